"""The charm on a host, and the files that jobs leave in its workspace."""

import dataclasses
import pathlib
import typing

import pytest
import yaml
from ops import testing

import charm
import host

SOURCE = pathlib.Path(__file__).parents[3] / "charms" / "ddp-trainer"
META = yaml.safe_load((SOURCE / "charmcraft.yaml").read_text())
ACCOUNT = host.account  # which the fixture `host` replaces, so that the tests run as root


@dataclasses.dataclass
class Trainer:
    """The charm on a host."""

    workspace: pathlib.Path
    root: pathlib.Path
    config: dict[str, typing.Any]
    secrets: list[testing.Secret] = dataclasses.field(default_factory=list[testing.Secret])
    context: testing.Context[charm.DdpTrainerCharm] = dataclasses.field(init=False)

    def state(self, *, is_leader: bool = False) -> testing.State:
        relation = testing.SubordinateRelation("juju-info", remote_app_name="sackd")
        wheelhouse = testing.Resource(name="wheelhouse", path=self.root / "wheelhouse")
        return testing.State(
            leader=is_leader,
            config=self.config,
            relations=[relation],
            resources=[wheelhouse],
            secrets=self.secrets,
        )

    def event(self, name: str, *, is_leader: bool = False) -> testing.State:
        self.context = self.new_context()
        state = self.state(is_leader=is_leader)
        event = getattr(self.context.on, name)
        if name == "secret_changed":
            return self.context.run(event(self.secrets[0]), state)
        relation = next(iter(state.relations))
        return self.context.run(event(relation) if name.startswith("relation") else event(), state)

    def run(self, action: str, **params: typing.Any) -> dict[str, str]:
        """Return an action's results; a failed one raises testing.ActionFailed."""
        self.context = self.new_context()
        given = {name.replace("_", "-"): value for name, value in params.items()}
        self.context.run(self.context.on.action(action, params=given), self.state())
        return typing.cast(dict[str, str], self.context.action_results or {})

    def fails(self, action: str, **params: typing.Any) -> str:
        """Return the one-line message of an action that fails."""
        with pytest.raises(testing.ActionFailed) as caught:
            self.run(action, **params)
        assert caught.value.message.isprintable()
        return caught.value.message

    @property
    def results(self) -> dict[str, str]:
        return typing.cast(dict[str, str], self.context.action_results or {})

    @property
    def log(self) -> list[str]:
        return list(self.context.action_logs)

    def new_context(self) -> testing.Context[charm.DdpTrainerCharm]:
        return testing.Context(
            charm.DdpTrainerCharm, meta=META, charm_root=self.root, app_name="trainer", unit_id=0
        )

    def files(self) -> dict[str, int]:
        """List the workspace's files, with the time of each change."""
        return {
            str(path.relative_to(self.workspace)): path.lstat().st_mtime_ns
            for path in self.workspace.rglob("*")
        }

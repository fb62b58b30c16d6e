"""juicefs-server-proxy under Scenario, on a real juicefs and the real servers of its options."""

import dataclasses
import pathlib
import typing

import pytest
import yaml
from ops import testing

from charm import JuicefsServerProxyCharm
from slurm_ddp.interfaces import filesystem_info as fs
from volume import format_journal, target

ROOT = pathlib.Path(__file__).resolve().parents[2]
META = yaml.safe_load((ROOT / "charms" / "juicefs-server-proxy" / "charmcraft.yaml").read_text())
Config = typing.Mapping[str, str | int | float | bool]


@dataclasses.dataclass
class Proxy:
    """One application with one unit. `state` is the state after the last hook."""

    program: pathlib.Path
    folder: pathlib.Path
    config: dict[str, str | int | float | bool]
    content: dict[str, str]
    app: str = "juicefs-server-proxy"
    state: testing.State | None = None
    logs: list[str] = dataclasses.field(default_factory=list[str])
    results: dict[str, typing.Any] = dataclasses.field(default_factory=dict[str, typing.Any])

    def _context(self) -> testing.Context[JuicefsServerProxyCharm]:
        return testing.Context(
            JuicefsServerProxyCharm, meta=META | {"name": self.app}, juju_version="3.6.8"
        )

    def _begin(self) -> testing.State:
        secret = testing.Secret(self.content)
        return testing.State(
            leader=True,
            relations={
                testing.PeerRelation("server-peers", id=1),
                testing.Relation(
                    "filesystem", id=10, remote_units_data={0: {fs.SCHEMES_KEY: fs.SCHEMES}}
                ),
            },
            resources={testing.Resource(name="juicefs", path=self.program)},
            secrets={secret} if self.content else set(),
            config=self.config | ({"credentials": secret.id} if self.content else {}),
        )

    def hook(self, name: str = "update_status", **changes: typing.Any) -> testing.State:
        """Run a hook on the state that the last one left, with changes; return the new one."""
        context = self._context()
        before = dataclasses.replace(self.state or self._begin(), **changes)
        self.state = context.run(getattr(context.on, name)(), before)
        self.logs += [str(line) for line in context.juju_log]
        return self.state

    def action(self, name: str, **params: typing.Any) -> dict[str, typing.Any]:
        """Run an action; return its results."""
        assert self.state is not None
        context = self._context()
        try:
            self.state = context.run(context.on.action(name, params=params), self.state)
        finally:
            self.logs += [str(line) for line in [*context.juju_log, *context.action_logs]]
        self.results = dict(context.action_results or {})
        return self.results

    def changed_secret(self, **changes: str) -> testing.State:
        """Give the operator's secret new content, and run the hook for it."""
        assert self.state is not None
        (mine,) = (secret for secret in self.state.secrets if secret.owner is None)
        content = {key.replace("_", "-"): value for key, value in changes.items()}
        new = dataclasses.replace(mine, latest_content=self.content | content)
        others = {secret for secret in self.state.secrets if secret.id != mine.id}
        return self.hook("config_changed", secrets={*others, new})

    @property
    def offer(self) -> tuple[fs.Juicefs, fs.JuicefsSecret]:
        """Read a client's data: the volume, and the content of its secret."""
        assert self.state is not None
        found = fs.parse(self.state.get_relation(10).local_app_data[fs.KEY])
        assert isinstance(found, fs.Juicefs)
        if found.secret_id is None:
            return found, fs.JuicefsSecret()
        secret = self.state.get_secret(id=found.secret_id)
        assert secret.remote_grants == {10: {"remote"}}
        return found, fs.JuicefsSecret.from_content(secret.latest_content or secret.tracked_content)

    @property
    def shown(self) -> bytes:
        """Return everything of the last state that others can read: all but the secrets."""
        assert self.state is not None
        seen = dataclasses.replace(self.state, secrets=frozenset())
        return repr([seen, self.logs, self.results]).encode()


def isolated(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
    """Keep the charm's files on its machine below a folder."""
    monkeypatch.setattr(target, "PROGRAM_DIR", folder / "lib")
    monkeypatch.setattr(target, "CONFIG_DIR", folder / "etc")
    monkeypatch.setattr(format_journal, "STATE_DIR", folder / "state")

"""The base of the Scenario tests of juicefs-server-proxy."""

import dataclasses
import json
import typing

from doubles import FakeJuicefs, FakeServers
from ops import testing

from charm import JuicefsServerProxyCharm
from slurm_ddp.interfaces import filesystem_info as fs

Config = typing.Mapping[str, str | int | float | bool]


@dataclasses.dataclass
class Rig:
    """The charm in its context, with its doubles."""

    ctx: testing.Context[JuicefsServerProxyCharm]
    world: FakeJuicefs
    servers: FakeServers
    program: testing.Resource

    def state(
        self,
        *relations: testing.RelationBase,
        leader: bool = True,
        config: Config | None = None,
        secrets: typing.Iterable[testing.Secret] = (),
    ) -> testing.State:
        """Return a state with a peer relation, unless relations are given."""
        return testing.State(
            leader=leader,
            relations=relations or [peers()],
            resources={self.program},
            config=dict(config or {}),
            secrets=set(secrets),
            storages={testing.Storage("volume")},
        )


def peers(**pinned: str) -> testing.PeerRelation:
    """Return the peer relation with the leader's pins."""
    data = {name: json.dumps(value) for name, value in pinned.items()}
    return testing.PeerRelation("server-peers", id=1, local_app_data=data)


def clients(*names: str) -> list[testing.Relation]:
    """Return a relation for each application that mounts the volume.

    One of its units can mount it.
    """
    units = {0: {fs.SCHEMES_KEY: fs.SCHEMES}}
    return [
        testing.Relation("filesystem", remote_app_name=name, id=10 + at, remote_units_data=units)
        for at, name in enumerate(names)
    ]

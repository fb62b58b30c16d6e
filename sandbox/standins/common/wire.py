"""Databags and secrets between upstream's Slurm charms: application data, every key, in JSON."""

import dataclasses
import typing

import ops

AUTH_LABEL = "slurm-auth-key"
JWT_LABEL = "slurm-jwt-key"
SLURMCTLD_PORT = 6817
SLURMD_PORT = 6818
SLURMDBD_PORT = 6819
SLURMRESTD_PORT = 6820


@dataclasses.dataclass(frozen=True)
class ControllerData:
    """slurmctld's data: controllers for sackd and slurmd, slurmdbd's JWT key, slurmrestd's config.

    Attributes:
        auth_key, auth_key_id, jwt_key: empty in the databag; they are in the secrets.
        controllers: host:port, the primary first.
        slurmconfig: the name of each file -> its settings as slurmutils has them.
    """

    auth_key: str = ""
    auth_key_id: str = ""
    auth_secret_id: str = ""
    controllers: list[str] = dataclasses.field(default_factory=list[str])
    jwt_key: str = ""
    jwt_secret_id: str = ""
    slurmconfig: dict[str, dict[str, typing.Any]] = dataclasses.field(
        default_factory=dict[str, dict[str, typing.Any]]
    )


def controller_ready(model: ops.Model, endpoint: str, *keys: str) -> bool:
    """Return whether the endpoint has relations, and all of them have these keys with values."""
    bags = [
        relation.data[relation.app] for relation in model.relations[endpoint] if relation.active
    ]
    return bool(bags) and all(
        bag.get(key, '""') not in ('""', "[]") for bag in bags for key in keys
    )

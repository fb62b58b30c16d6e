"""The databags between upstream's slurmctld and its slurmd and sackd: the requirer's application data, JSON per key.

Facts: charmed-hpc/slurm-charms 25.11, pkg/slurmctld-interface. Every field is always present. In this sandbox the
secret that `auth_secret_id` names holds munge's key, since the distribution's Slurm 22.05 has no auth/slurm.
"""

import collections.abc
import dataclasses
import json
import typing

AUTH_LABEL = "slurm-auth-key"
PORT = 6817

_EMPTY: dict[str, object] = {
    "auth_key": "",
    "auth_key_id": "",
    "auth_secret_id": "",
    "controllers": [],
    "jwt_key": "",
    "jwt_secret_id": "",
    "slurmconfig": {},
}


@dataclasses.dataclass(frozen=True)
class Controller:
    """What a node or a login host needs of the controller."""

    auth_secret_id: str
    controllers: tuple[str, ...]  # host:port


def controller_databag(auth_secret_id: str, controllers: collections.abc.Sequence[str]) -> dict[str, str]:
    """Return slurmctld's application databag."""
    values = _EMPTY | {"auth_secret_id": auth_secret_id, "controllers": list(controllers)}
    return {key: json.dumps(value) for key, value in values.items()}


def read_controller(databag: collections.abc.Mapping[str, str]) -> Controller | None:
    """Return what slurmctld published; None until it is ready, or when it cannot be read."""
    try:
        secret = json.loads(databag.get("auth_secret_id", '""'))
        controllers = json.loads(databag.get("controllers", "[]"))
    except ValueError:
        return None
    if not secret or not controllers:
        return None
    return Controller(auth_secret_id=secret, controllers=tuple(controllers))


def partition_databag(app: str, options: collections.abc.Mapping[str, str]) -> dict[str, str]:
    """Return slurmd's application databag: the partition that carries the application's name."""
    lower = {key.lower(): value for key, value in options.items()}
    return {"partition": json.dumps({"partitionname": app, "nodes": [app]} | lower)}


def read_partition(databag: collections.abc.Mapping[str, str]) -> dict[str, object] | None:
    """Return the partition that slurmd's leader published; None until it did, or when it cannot be read."""
    try:
        partition: object = json.loads(databag.get("partition", "null"))
    except ValueError:
        return None
    if not isinstance(partition, dict):
        return None
    named = typing.cast(dict[str, object], partition)
    return named if named.get("partitionname") else None


def parse_pairs(text: str) -> dict[str, str]:
    """Return `key=value` pairs separated by blanks or lines.

    Raises:
        ValueError: a word is not of that form. The message is one line and names the word.
    """
    pairs: dict[str, str] = {}
    for word in text.split():
        key, separator, value = word.partition("=")
        if not separator or not key.isalpha() or not value:
            raise ValueError(f"{word!r} is not of the form key=value")
        pairs[key] = value
    return pairs


def parse_lines(text: str) -> dict[str, str]:
    """Return the settings of a piece of slurm.conf, one `Key=Value` per line; comments and blank lines do not count.

    Raises:
        ValueError: a line is not of that form. The message is one line and names the line.
    """
    settings: dict[str, str] = {}
    for line in text.splitlines():
        stripped = line.partition("#")[0].strip()
        if not stripped:
            continue
        key, separator, value = (part.strip() for part in stripped.partition("="))
        if not separator or not key.isalnum() or not value:
            raise ValueError(f"{stripped!r} is not of the form Key=Value")
        settings[key] = value
    return settings

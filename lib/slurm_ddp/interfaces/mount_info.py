"""`mount_info`: a charm asks the filesystem client on its machine for a mount.

The wire format is that of the library mount_info (LIBAPI 0, LIBPATCH 1) of charmed-hpc's
filesystem-charms, whose roles are inverted: the charm that asks *provides* the endpoint. It writes
its application databag, each value as JSON; the client answers in its own unit databag with
`mounted`, which is `true` or `false`.
"""

import collections.abc
import json

import pydantic

MOUNTED = "mounted"  # the key in the client's unit databag


class MountRequest(pydantic.BaseModel, frozen=True, extra="ignore"):
    """The mount that a charm asks for; unset fields have upstream's defaults."""

    mountpoint: str
    noexec: bool = False
    read_only: bool = False


def load(databag: collections.abc.Mapping[str, str]) -> MountRequest | None:
    """Return the request in the asking application's databag, or None.

    Raises `ValueError` of one line.
    """
    values: dict[str, object] = {}
    for field in MountRequest.model_fields:
        try:
            values[field] = json.loads(databag.get(field, "null"))
        except ValueError as e:
            raise ValueError(f"{field} is not JSON") from e
    if not values.get("mountpoint"):
        return None
    try:
        return MountRequest.model_validate(
            {key: value for key, value in values.items() if value is not None}
        )
    except pydantic.ValidationError as e:
        raise ValueError(f"{e.errors()[0]['loc'][0]}: {e.errors()[0]['msg'].lower()}") from e


def answer(*, mounted: bool) -> dict[str, str]:
    """Write the client's unit databag."""
    return {MOUNTED: "true" if mounted else "false"}

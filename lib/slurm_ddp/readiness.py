"""The things a machine needs before it takes jobs; its charms share them without a relation.

A charm that makes something jobs need, such as a mount, keeps one file on its machine from its
first hook to its last:

    /var/lib/slurm-ddp/needs/<unit with - for />.json {"unit": "shared-filesystem-client/0", "boot":
    "<boot id>", "mountpoint": "/mnt/shared", "detail": "..."}

`boot` is the last boot that it worked in, absent while it does not work, so a reboot asks for
another check. The charm that resumes a node reads all files (`missing`) and watches the folder,
since a file may change without any hook. Unknown keys are ignored; a file that cannot be read
counts as missing. Standard library only: services use it, too.
"""

import dataclasses
import json
import pathlib

from slurm_ddp import files, mounts, records

DIRECTORY = pathlib.Path("/var/lib/slurm-ddp/needs")
BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Need:
    """A unit's contribution to jobs.

    Any field may be absent: the other charm may be older or newer.
    """

    unit: str | None = None
    boot: str | None = None  # the boot that it was seen to work in; None while it does not
    mountpoint: str | None = None  # that must be mounted for it to be there
    detail: str | None = ""  # what is missing


def tell(unit: str, *, ready: bool, mountpoint: str | None = None, detail: str = "") -> bool:
    """Record whether the contribution of `unit` works now; return whether that changed the file."""
    need = Need(
        unit=unit,
        boot=boot_id() if ready else None,
        mountpoint=mountpoint,
        detail="" if ready else detail,
    )
    fields = {key: value for key, value in dataclasses.asdict(need).items() if value is not None}
    return files.ensure_file(path(unit), json.dumps(fields) + "\n")


def withdraw(unit: str) -> bool:
    """Remove the record of `unit`; return whether there was one."""
    return files.ensure_absent(path(unit))


def missing() -> list[str]:
    """Return a line for each unit whose part jobs on this machine would lack, sorted."""
    boot = boot_id()
    lines: list[str] = []
    for file in sorted(DIRECTORY.glob("*.json")):
        try:
            need = records.read(Need, file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            lines.append(f"{file.stem} (its file cannot be read)")
            continue
        name = need.unit or file.stem
        if need.boot != boot:
            why = need.detail or ("not checked since this boot" if need.boot else "")
            lines.append(f"{name} ({why})" if why else name)
        elif need.mountpoint and not mounts.at(need.mountpoint):
            lines.append(f"{name} (nothing is mounted at {need.mountpoint})")
    return lines


def path(unit: str) -> pathlib.Path:
    """Name the unit's file."""
    return DIRECTORY / f"{unit.replace('/', '-')}.json"


def boot_id() -> str:
    """Read the id of this boot."""
    return BOOT_ID.read_text().strip()

"""What a machine waits for before it takes jobs, told between the charms on it without a relation.

A charm that makes something jobs need, such as a mount, keeps one file on its machine from its first hook to its last:

    /var/lib/slurm-ddp/needs/<unit with - for />.json
    {"unit": "shared-filesystem-client/0", "boot": "<boot id>", "mountpoint": "/mnt/shared", "detail": "..."}

`boot` is the boot in which it was seen to work last, absent while it does not: so after a reboot nothing is ready until
somebody has looked again, the charm or a service of its own. Whoever lets a node take jobs reads all files (`missing`),
and watches the folder, since a file may change without any hook. A reader ignores keys that it does not know, and takes
a file that it cannot read for something that is missing. Standard library only: services read and write the files, too.
"""

import dataclasses
import json
import pathlib
import typing

from slurm_ddp import files, mounts

DIRECTORY = pathlib.Path("/var/lib/slurm-ddp/needs")
BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Need:
    """What one unit makes for jobs. Any field may be absent: the other charm may be older or newer."""

    unit: str | None = None
    boot: str | None = None  # the boot in which it was seen to work; None while it does not
    mountpoint: str | None = None  # what must be mounted for it to be there
    detail: str = ""  # what is missing, for people

    @classmethod
    def parse(cls, text: str) -> "Need":
        """Return what a file says.

        Raises:
            ValueError: it is no JSON object, or a field is no text.
        """
        raw: object = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        fields = typing.cast("dict[str, object]", raw)
        texts = {
            name: fields[name] for name in ("unit", "boot", "mountpoint", "detail") if fields.get(name) is not None
        }
        if not all(isinstance(value, str) for value in texts.values()):
            raise ValueError("a field is no text")
        return cls(**typing.cast("dict[str, str]", texts))


def tell(unit: str, *, ready: bool, mountpoint: str | None = None, detail: str = "") -> bool:
    """Say whether what `unit` makes for jobs works now; return whether that is news."""
    boot = _boot_id() if ready else None
    need = Need(unit=unit, boot=boot, mountpoint=mountpoint, detail="" if ready else detail)
    fields = {key: value for key, value in dataclasses.asdict(need).items() if value is not None}
    return files.ensure_file(_path(unit), json.dumps(fields) + "\n")


def withdraw(unit: str) -> bool:
    """Let jobs no longer wait for what `unit` made; return whether they did."""
    return files.ensure_absent(_path(unit))


def missing() -> list[str]:
    """Return one line for each thing that jobs on this machine would miss, sorted; empty when all is there."""
    boot = _boot_id()
    lines: list[str] = []
    for path in sorted(DIRECTORY.glob("*.json")):
        try:
            need = Need.parse(path.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            lines.append(f"{path.stem} (its file cannot be read)")
            continue
        name = need.unit or path.stem
        if need.boot != boot:
            why = need.detail or ("not looked at since this boot" if need.boot else "")
            lines.append(f"{name} ({why})" if why else name)
        elif need.mountpoint and not mounts.at(need.mountpoint):
            lines.append(f"{name} (nothing is mounted at {need.mountpoint})")
    return lines


def _path(unit: str) -> pathlib.Path:
    return DIRECTORY / f"{unit.replace('/', '-')}.json"


def _boot_id() -> str:
    return BOOT_ID.read_text().strip()

"""Kills for lack of memory, by this task's cgroup: the job's limit, and the memory it reached."""

import math
import pathlib
import re
import typing

from ddp.node.diagnosis import rank_ends

_PEAKS = ("memory.peak", "memory.max_usage_in_bytes")  # of version 2 since Linux 5.19, of version 1
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_EVENTS = ("memory.events", "memory.oom_control")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_UNLIMITED = 1 << 60  # version 1 has a number for it
_NEARLY = 0.97  # the kernel charges pages in batches
MIB = 1 << 20
GIB = 1 << 30


class _Limit(typing.NamedTuple):
    """The lowest limit above a task, and the cgroup that has it."""

    group: pathlib.Path
    size_bytes: int


def shortage(host: str, proc: pathlib.Path = pathlib.Path("/proc/self")) -> str:
    """Report the memory shortage that made the kernel kill a process of this task, or ""."""
    try:
        groups = _groups(proc)
        # The job's own count includes earlier attempts
        if not _has_kills(groups[:-1]):
            return ""
        return f"{host}{rank_ends.SHORTAGE}{_details(host, groups)}"
    except (OSError, ValueError):
        return ""


def _has_kills(groups: list[pathlib.Path]) -> bool:
    """Return whether the first cgroup that counts kills has one."""
    for group in groups:
        for name in _EVENTS:
            kills = _kills(group / name)
            if kills is not None:
                return kills > 0
    return False


def _details(host: str, groups: list[pathlib.Path]) -> str:
    limit = _lowest_limit(groups)
    if limit is None:
        return f"{host}{rank_ends.OF_NODE}, and the job had no limit"
    had = f"had {limit.size_bytes // MIB} MiB"
    peak = _number(limit.group, _PEAKS)
    if peak is not None and peak < _NEARLY * limit.size_bytes:
        return f"{host}{rank_ends.OF_NODE}; the job {had}, reached {peak // MIB} MiB"
    enough = math.ceil(2 * limit.size_bytes / GIB)
    return f"{had}, reached it on {host}: --memory {enough}G"


def _lowest_limit(groups: list[pathlib.Path]) -> _Limit | None:
    limits: list[_Limit] = []
    for group in groups:
        size_bytes = _number(group, _LIMITS)
        if size_bytes and size_bytes < _UNLIMITED:
            limits.append(_Limit(group, size_bytes))
    return min(limits, key=lambda limit: limit.size_bytes, default=None)


def _groups(proc: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of the cgroups from this task's up to the job's; [] outside of a job."""
    kinds, path = _find_cgroup(proc)
    filesystem = "cgroup" if kinds else "cgroup2"
    for line in _lines(proc / "mounts"):
        _, point, kind, options = line.split()[:4]
        is_of_memory = not kinds or "memory" in options.split(",")
        if kind == filesystem and is_of_memory:
            return _up_to_job(pathlib.Path(point + path))
    return []


def _find_cgroup(proc: pathlib.Path) -> tuple[str, str]:
    """Return the controllers ("" in version 2) and the path of the cgroup that counts memory."""
    paths: dict[str, str] = {}
    for line in _lines(proc / "cgroup"):
        _, kinds, path = line.split(":", 2)
        paths[kinds] = path
    for kinds, path in paths.items():
        if "memory" in kinds.split(","):
            return kinds, path
    return "", paths.get("", "")


def _up_to_job(own: pathlib.Path) -> list[pathlib.Path]:
    groups = [own]
    for group in own.parents:
        groups.append(group)
        if group.name.startswith("job_"):
            return groups
    return []


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _kills(path: pathlib.Path) -> int | None:
    """Return how many processes the kernel killed; None if the file does not count them."""
    found = _KILLS.search(path.read_text()) if path.exists() else None
    return int(found[1]) if found else None


def _number(group: pathlib.Path, names: tuple[str, ...]) -> int | None:
    """Return the number in the first of these files that exists; None if it has none."""
    for name in names:
        path = group / name
        if path.exists():
            text = path.read_text().strip()
            return int(text) if text.isdigit() else None
    return None

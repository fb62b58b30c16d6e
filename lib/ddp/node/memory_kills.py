"""The memory of this task's cgroup, which Slurm made: what the job had, and whether the kernel killed for it."""

import math
import pathlib
import re

from ddp.node.diagnosis import rank_ends

_PEAKS = ("memory.peak", "memory.max_usage_in_bytes")  # of version 2 since Linux 5.19, of version 1
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_EVENTS = ("memory.events", "memory.oom_control")
_UNLIMITED = 1 << 60  # version 1 has a number for it
_NEARLY = 0.97  # the kernel charges pages in batches
MIB = 1 << 20


def shortage(host: str, proc: pathlib.Path = pathlib.Path("/proc/self")) -> str:
    """Report the memory that a process of this task was killed for; "" where the cgroup counts no such kill."""
    try:
        groups = _groups(proc)
        counted = [
            found
            for group in groups[:-1]
            for name in _EVENTS
            if (found := _kills(group / name)) is not None
        ]
        is_counted = any(counted[:1])  # the job's own counts earlier attempts, too
        return f"{host}{rank_ends.SHORTAGE}{_details(host, groups)}" if is_counted else ""
    except (OSError, ValueError):
        return ""


def _details(host: str, groups: list[pathlib.Path]) -> str:
    limited = [
        (group, limit)
        for group in groups
        if (limit := _number(group, _LIMITS)) and limit < _UNLIMITED
    ]
    if not limited:
        return f"{host}{rank_ends.OF_NODE}, and the job had no limit"
    group, limit = min(limited, key=lambda one: one[1])
    had, peak = f"had {limit // MIB} MiB", _number(group, _PEAKS)
    if peak is not None and peak < _NEARLY * limit:
        return f"{host}{rank_ends.OF_NODE}; the job {had}, reached {peak // MIB} MiB"
    return f"{had}, reached it on {host}: --memory {math.ceil(2 * limit / (1 << 30))}G"


def _groups(proc: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of this task's cgroup and of those above it, up to the job's; [] outside of a job's."""
    paths = {
        kinds: path for _, kinds, path in (line.split(":", 2) for line in _lines(proc / "cgroup"))
    }
    kinds = next((kinds for kinds in paths if "memory" in kinds.split(",")), "")
    for line in _lines(proc / "mounts"):
        _, point, kind, options = line.split()[:4]
        if kind == ("cgroup" if kinds else "cgroup2") and (
            not kinds or "memory" in options.split(",")
        ):
            own = pathlib.Path(point + paths.get(kinds, ""))
            job = next(
                (index for index, group in enumerate(own.parents) if group.name.startswith("job_")),
                None,
            )
            return [] if job is None else [own, *own.parents[: job + 1]]
    return []


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _kills(path: pathlib.Path) -> int | None:
    found = (
        re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    )
    return int(found[1]) if found else None


def _number(group: pathlib.Path, names: tuple[str, ...]) -> int | None:
    texts = [(group / name).read_text().strip() for name in names if (group / name).exists()]
    return int(texts[0]) if texts and texts[0].isdigit() else None

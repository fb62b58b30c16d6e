"""A job's memory limit and its peak, from its cgroup's files in both versions."""

import pathlib

import pytest

from ddp.node import memory_kills

GIB = 1 << 30
HAD = "had 1024 MiB, reached it on n1: --memory 2G"
NAMES = {
    2: ("memory.max", "memory.peak", "memory.events"),
    1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes", ""),
}


def make(
    top: pathlib.Path, version: int, *, kills: int, limit: int | None, peak: int | None, job: str
) -> pathlib.Path:
    """Write a task's cgroup files, with the limit at its step as Slurm sets it, and /proc/self."""
    mount = top / "cgroup"
    step = mount / "system.slice" / job / "step_0"
    task = step / "user" / "task_1"
    task.mkdir(parents=True)
    unlimited = "max" if version == 2 else str((1 << 63) - 4096)
    name, peaks, _ = NAMES[version]
    for group in (step.parent, step, task.parent, task):
        (group / name).write_text(str(limit) if limit and group == step else unlimited)
        if peak is not None:
            (group / peaks).write_text(f"{peak}\n")
        counts = (
            f"low 0\noom {kills}\noom_kill {kills}\n"
            if version == 2
            else f"under_oom 0\noom_kill {kills}\n"
        )
        (group / ("memory.events" if version == 2 else "memory.oom_control")).write_text(counts)
    (step.parent / ("memory.events" if version == 2 else "memory.oom_control")).write_text(
        "oom_kill 3\n"
    )
    path = task.relative_to(mount)
    proc = top / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(
        f"0::/{path}\n" if version == 2 else f"9:cpu:/x\n4:memory,misc:/{path}\n0::/\n"
    )
    kind = "cgroup2 rw" if version == 2 else "cgroup rw,memory,misc"
    (proc / "mounts").write_text(f"proc /proc proc rw 0 0\nnone {mount} {kind} 0 0\n")
    return proc


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("kills", "limit", "peak", "words"),
    [
        (1, GIB, GIB, HAD),
        (2, GIB, GIB - 4096, HAD),
        (1, GIB, None, HAD),  # an old kernel counts no peak
        (1, 3 * GIB // 2, 3 * GIB // 2, "had 1536 MiB, reached it on n1: --memory 3G"),
        (1, 4 * GIB, GIB, "n1 itself ran out of memory; the job had 4096 MiB, reached 1024 MiB"),
        (1, None, GIB, "n1 itself ran out of memory, and the job had no limit"),
        (0, GIB, GIB, ""),  # it was full, but nothing was killed
    ],
)
def test_a_kill_for_memory_is_described(
    tmp_path: pathlib.Path,
    version: int,
    kills: int,
    limit: int | None,
    peak: int | None,
    words: str,
):
    proc = make(tmp_path, version, kills=kills, limit=limit, peak=peak, job="job_12")
    assert memory_kills.shortage("n1", proc) == (
        f"n1: a process was killed for memory: {words}" if words else ""
    )


def test_other_cgroups_prove_nothing(tmp_path: pathlib.Path):
    assert (
        memory_kills.shortage(
            "n1", make(tmp_path, 2, kills=1, limit=GIB, peak=GIB, job="ssh.service")
        )
        == ""
    )
    assert memory_kills.shortage("n1", tmp_path / "none") == ""

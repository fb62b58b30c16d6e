"""What the actions do. Each ends by its deadline, tells how far it is, and leaves the mount as it found it."""

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import time

import pydantic

import mount_plan
from kinds import juicefs as juicefs_kind
from mount import mounter, plans
from slurm_ddp import apt, juicefs, mounts, systemd
from slurm_ddp.charm import Action, ActionError, Log, Parameters, Results
from slurm_ddp.run import CommandError, CommandTimeout, run

_FIO = "/usr/bin/fio"
_SYSTEMCTL, _SYSTEMD_RUN = "/usr/bin/systemctl", "/usr/bin/systemd-run"
_TELL_EVERY_S = 10.0
_BENCH_DIR = ".mount-benchmark"
_MOST_NAMED = 10


class Warmup(Parameters, frozen=True):
    """What `warmup` takes."""

    path: str = pydantic.Field(min_length=1)
    threads: int = pydantic.Field(default=50, ge=1, le=200)
    deadline: int = pydantic.Field(default=3600, ge=10, le=86400)


class Remount(Parameters, frozen=True):
    """What `remount` takes."""

    wait: int = pydantic.Field(default=0, ge=0, le=86400)
    force: bool = False


class Benchmark(Parameters, frozen=True):
    """What `benchmark` takes."""

    size: int = pydantic.Field(default=256, ge=16, le=65536)
    deadline: int = pydantic.Field(default=600, ge=30, le=7200)


class NoParameters(Parameters, frozen=True):
    """For an action that takes none."""


@dataclasses.dataclass(frozen=True)
class Mount:
    """What the actions work on: the mount, for this unit."""

    plan: mount_plan.Plan
    unit: str


def _status(mount: Mount, _: NoParameters, _log: Log) -> Results:
    plan = mount.plan
    look, seen = mounter.probe(plan), mounter.health(plan.spec.app)
    here = mounts.at(plan.spec.mountpoint)
    users = mounts.users(plan.spec.mountpoint)
    state = run(_SYSTEMCTL, "is-active", plan.unit, check=False).stdout.strip()
    results = {
        "state": look.state.value,
        "detail": look.detail,
        "source": plan.source,
        "mountpoint": plan.spec.mountpoint,
        "options": ",".join(here[-1].options) if here else "",
        "unit": f"{plan.unit} is {state}",
        "since": _moment(seen.since),
        "checked": _moment(seen.checked),
        "silent-server": f"{seen.down} since {_moment(seen.down_since)}" if seen.down else "",
        "mended": f"{seen.heals} times; last {seen.healed} at {_moment(seen.healed_at)}" if seen.heals else "never",
        "restart-pending": "true" if mounter.pending(plan) else "false",
        "drained": "true" if seen.drained else "",
        "users": _named(users),
        "warning": plans.exposed(plan, look),
        "version": plan.version,
        "metrics": f"http://127.0.0.1:{plan.port}/metrics" if plan.port else "",
    }
    if plan.caches:
        results["cache"] = "; ".join(f"{path}: {_disk(path)}" for path in plan.caches)
    return {key: value for key, value in results.items() if value}


def _warmup(mount: Mount, wanted: Warmup, log: Log) -> Results:
    plan = mount.plan
    if not plan.caches:
        raise ActionError("only a JuiceFS mount keeps copies on the local disk that could be fetched ahead")
    path = _inside(plan, wanted.path)
    app, mountpoint = plan.spec.app, plan.spec.mountpoint
    name = f"juicefs-warmup-{app}.service"
    if systemd.is_active(name):
        raise ActionError(f"a warm-up runs already: juju ssh to the machine and systemctl stop {name}, or wait for it")
    program = juicefs_kind.program_path(app)
    begin, before = time.monotonic(), _used(plan.caches)
    argv = (program, "--no-agent", "warmup", f"--threads={wanted.threads}", path)
    limits = ("--property=Nice=10", f"--property=RuntimeMaxSec={wanted.deadline}")
    log(f"fetching {path} to {' '.join(map(str, plan.caches))}")
    run(_SYSTEMD_RUN, "--quiet", f"--unit={name}", *limits, "--property=RemainAfterExit=no", *argv)
    told = begin
    while (state := run(_SYSTEMCTL, "is-active", name, check=False).stdout.strip()) in ("active", "activating"):
        now = time.monotonic()
        if now - begin > wanted.deadline:
            run(_SYSTEMCTL, "stop", name, check=False)
            break
        if now - told >= _TELL_EVERY_S:
            told = now
            log(f"{now - begin:.0f} s: {_used(plan.caches) - before:+.0f} MiB in the cache")
        if not mounts.at(mountpoint):
            raise ActionError(f"{mountpoint} was unmounted meanwhile")
        time.sleep(0.5)
    failed = state == "failed"
    said = _last_words(name)
    run(_SYSTEMCTL, "reset-failed", name, check=False)
    if failed or time.monotonic() - begin > wanted.deadline:
        raise ActionError(f"warmup did not end well within {wanted.deadline} s: {said}")
    return {
        "path": path,
        "seconds": f"{time.monotonic() - begin:.1f}",
        "cache-growth-mib": f"{max(0.0, _used(plan.caches) - before):.0f}",
        "cache": "; ".join(f"{cache}: {_disk(cache)}" for cache in plan.caches),
    }


def _remount(mount: Mount, wanted: Remount, log: Log) -> Results:
    plan = mount.plan
    mountpoint, begin, told = plan.spec.mountpoint, time.monotonic(), 0.0
    while users := mounts.users(mountpoint):
        now = time.monotonic()
        if now - begin >= wanted.wait:
            break
        if not told or now - told >= _TELL_EVERY_S:
            told = now
            log(f"{now - begin:.0f} s: in use by {_named(users)}")
        time.sleep(0.5)
    if users and not wanted.force:
        raise ActionError(
            f"{mountpoint} is in use by {_named(users)}: drain the node and wait (wait=SECONDS), or take it away from "
            "them with force=true: what they have open then fails"
        )
    log(f"mounting {plan.source} anew")
    look = mounter.remount(plan, unit=mount.unit)
    if not look:
        raise ActionError(f"{look.detail}: {mounter.reason(plan)}")
    return {"state": look.state.value, "seconds": f"{time.monotonic() - begin:.1f}"}


def _benchmark(mount: Mount, wanted: Benchmark, log: Log) -> Results:
    plan = mount.plan
    if plan.spec.read_only:
        raise ActionError("the mount is read-only: nothing can be written there")
    look = mounter.probe(plan)
    if not look:
        raise ActionError(look.detail)
    apt.ensure_packages(("fio",))
    local = mount_plan.STATE / plan.spec.app / "tmp"
    free_mib = _free_mib(local)
    if free_mib < 2 * wanted.size:
        raise ActionError(f"size: the local disk has {free_mib} MiB free: {free_mib // 2} at most")
    end = time.monotonic() + wanted.deadline
    results: Results = {"size-mib": str(wanted.size)}
    folder = f"{plan.spec.mountpoint}/{_BENCH_DIR}/{socket.gethostname()}.{os.getpid()}"
    for label, place in (("mount", folder), ("local", str(local / f"benchmark.{os.getpid()}"))):
        run("/usr/bin/mkdir", "-p", place, timeout=20)
        try:
            for test in _TESTS:
                log(f"{label}: {test}")
                results |= _fio(label, test, place, wanted.size, end)
        finally:
            for command in _removal(plan, place):
                run(*command, timeout=60, check=False)
            if label == "mount":
                run("/usr/bin/rmdir", f"{plan.spec.mountpoint}/{_BENCH_DIR}", timeout=10, check=False)
    return results


def _removal(plan: mount_plan.Plan, place: str) -> tuple[tuple[str, ...], ...]:
    """Return the commands that remove what was measured with."""
    version = juicefs.parse_version(plan.version)  # of JuiceFS's program, if it is one
    if version is None or not place.startswith(f"{plan.spec.mountpoint}/"):
        return (("/usr/bin/rm", "-rf", "--one-file-system", place),)
    return juicefs.removal(juicefs_kind.program_path(plan.spec.app), version, place)


# fio(1). One file, synced at the end of writing; reading begins with the kernel told to forget it
_TESTS = {
    "write": ("--rw=write", "--bs=1M", "--end_fsync=1"),
    "read": ("--rw=read", "--bs=1M"),
    "random-read": ("--rw=randread", "--bs=64k", "--runtime=15", "--time_based=0"),
}


def _fio(label: str, test: str, place: str, size_mib: int, end: float) -> Results:
    left = end - time.monotonic()
    if left < 1:
        raise ActionError("deadline: it passed before the benchmark was through: ask for a smaller size")
    # The whole path: fio leaves a --directory that follows --filename unheeded, and writes to where it was started
    fixed = ("--name=benchmark", f"--filename={place}/data", "--ioengine=psync", "--invalidate=1")
    try:
        said = run(
            _FIO,
            *fixed,
            "--output-format=json",
            f"--size={size_mib}M",
            *_TESTS[test],
            timeout=left,
            cwd=mount_plan.STATE,
        ).stdout
        job = json.loads(said[said.index("{") :])["jobs"][0]
    except CommandTimeout as e:
        raise ActionError("deadline: it passed before the benchmark was through: ask for a smaller size") from e
    except (CommandError, ValueError, KeyError, IndexError) as e:
        raise ActionError(f"{label}: fio: {e}") from e
    side = job["write" if test == "write" else "read"]
    found = {f"{label}-{test}-mib-s": f"{side['bw_bytes'] / (1 << 20):.1f}"}
    if test == "random-read":
        found[f"{label}-{test}-ms"] = f"{side['clat_ns']['mean'] / 1e6:.2f}"
    return found


def _inside(plan: mount_plan.Plan, text: str) -> str:
    """Return the real path of something on the mount."""
    look = mounter.probe(plan)
    if not look:
        raise ActionError(look.detail)
    mountpoint = plan.spec.mountpoint
    path = os.path.normpath(text if text.startswith("/") else f"{mountpoint}/{text}")
    if "\0" in text or not f"{path}/".startswith(f"{mountpoint}/"):
        raise ActionError(f"path: it must lie in {mountpoint}: give it relative to that, like datasets/owt")
    try:
        real = run("/usr/bin/realpath", "-e", "--", path, timeout=20).stdout.strip()
    except CommandError as e:
        raise ActionError(f"path: {path} does not exist") from e
    if not f"{real}/".startswith(f"{mountpoint}/"):
        raise ActionError(f"path: {path} leads out of {mountpoint}")
    return real


def _named(users: list[tuple[int, str]]) -> str:
    shown = ", ".join(f"{name} ({pid})" for pid, name in users[:_MOST_NAMED])
    return f"{shown} and {len(users) - _MOST_NAMED} more" if len(users) > _MOST_NAMED else shown


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)) if seconds else ""


def _used(caches: tuple[pathlib.Path, ...]) -> float:
    """Return how much the disks below the folders hold, in MiB: asking each block of a large cache would take long."""
    found = 0.0
    seen: set[int] = set()
    for cache in caches:
        with contextlib.suppress(OSError):
            device, stat = cache.stat().st_dev, os.statvfs(cache)
            if device not in seen:
                found += (stat.f_blocks - stat.f_bfree) * stat.f_frsize / (1 << 20)
            seen.add(device)
    return found


def _free_mib(path: pathlib.Path) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize >> 20


def _disk(cache: pathlib.Path) -> str:
    try:
        stat = os.statvfs(cache)
    except OSError as e:
        return (e.strerror or str(e)).lower()
    scale = stat.f_frsize / (1 << 30)
    return f"{stat.f_bavail * scale:.1f} of {stat.f_blocks * scale:.1f} GiB free"


def _last_words(unit: str) -> str:
    said = run("/usr/bin/journalctl", "-u", unit, "-n", "1", "-o", "cat", "--no-pager", check=False).stdout
    return said.strip()[-200:] or "it says nothing"


ACTIONS: dict[str, Action[Mount]] = {
    "status": Action(NoParameters, _status),
    "warmup": Action(Warmup, _warmup),
    "remount": Action(Remount, _remount),
    "benchmark": Action(Benchmark, _benchmark),
}

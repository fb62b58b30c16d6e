"""The actions. Each ends by its deadline, shows its progress, and leaves the mount unchanged."""

import os
import pathlib
import time

import pydantic

import mount_plan
from mount import judge, mounter, watching
from slurm_ddp import mounts, processes, systemd
from slurm_ddp.charm import Action, ActionError, Log, Parameters, Results

_SHOW_EVERY_S = 10.0
_MOST_NAMED = 10


class _Remount(Parameters, frozen=True):
    wait: int = pydantic.Field(default=0, ge=0, le=86400)
    force: bool = False


class _Progress:
    """Shows a line every ten seconds."""

    def __init__(self, log: Log) -> None:
        self._log, self._begin, self._shown = log, time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def show(self, text: str) -> None:
        if not self._shown or time.monotonic() - self._shown >= _SHOW_EVERY_S:
            self._shown = time.monotonic()
            self._log(f"{self.seconds:.0f} s: {text}")


def _status(plan: mount_plan.Plan, _: Parameters, _log: Log) -> Results:
    found, seen = mounter.probe(plan), watching.health(plan.spec.app)
    here = mounts.at(plan.spec.mountpoint)
    results = {
        "state": found.state.value,
        "detail": found.detail,
        "source": plan.source,
        "mountpoint": plan.spec.mountpoint,
        "options": ",".join(here[-1].options) if here else "",
        "unit": f"{plan.unit} is {systemd.state(plan.unit)}",
        "since": _moment(seen.since),
        "checked": _moment(seen.checked),
        "silent-server": f"{seen.down} since {_moment(seen.down_since)}" if seen.down else "",
        "repaired": f"{seen.heals} times; last {seen.healed} at {_moment(seen.healed_at)}"
        if seen.heals
        else "never",
        "restart-pending": "true" if mounter.pending(plan) else "false",
        "drained": "true" if seen.drained else "",
        "users": _named(processes.users(plan.spec.mountpoint)),
        "warning": judge.exposed(plan, found),
        "version": plan.version,
        "metrics": f"http://127.0.0.1:{plan.port}/metrics" if plan.port else "",
        "cache": _disks(plan.caches),
    }
    return {key: value for key, value in results.items() if value}


def _remount(plan: mount_plan.Plan, wanted: _Remount, log: Log) -> Results:
    progress = _Progress(log)
    while users := processes.users(plan.spec.mountpoint):
        if progress.seconds >= wanted.wait:
            break
        progress.show(f"in use by {_named(users)}")
        time.sleep(0.5)
    if users and not wanted.force:
        remedy = "drain the node and wait (wait=SECONDS), or force=true, which breaks what they have open"
        raise ActionError(f"{plan.spec.mountpoint} is in use by {_named(users)}: {remedy}")
    log(f"remounting {plan.source}")
    found = mounter.remount(plan)
    if not found:
        raise ActionError(f"{found.detail}: {mounter.reason(plan)}")
    return {"state": found.state.value, "seconds": f"{progress.seconds:.1f}"}


def _named(users: list[tuple[int, str]]) -> str:
    shown = ", ".join(f"{name} ({pid})" for pid, name in users[:_MOST_NAMED])
    return f"{shown} and {len(users) - _MOST_NAMED} more" if len(users) > _MOST_NAMED else shown


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)) if seconds else ""


def _disks(caches: tuple[pathlib.Path, ...]) -> str:
    """Describe the space on the disks of the folders."""
    texts: list[str] = []
    for cache in caches:
        try:
            stat = os.statvfs(cache)
            scale = stat.f_frsize / (1 << 30)
            texts.append(
                f"{cache}: {stat.f_bavail * scale:.1f} of {stat.f_blocks * scale:.1f} GiB free"
            )
        except OSError as e:
            texts.append(f"{cache}: {(e.strerror or str(e)).lower()}")
    return "; ".join(texts)


ACTIONS: dict[str, Action[mount_plan.Plan]] = {
    "status": Action(Parameters, _status),
    "remount": Action(_Remount, _remount),
}

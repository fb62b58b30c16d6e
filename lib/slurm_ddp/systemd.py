"""systemd units as desired state.

Every function is idempotent; `ensure_*` return whether they changed something.
"""

import collections.abc
import pathlib
import time

from slurm_ddp import files
from slurm_ddp.commands import Completed, run

UNIT_DIR = pathlib.Path("/etc/systemd/system")


def ensure_unit(name: str, text: str) -> bool:
    """Write one unit file; see `ensure_units`."""
    return bool(ensure_units({name: text}))


def ensure_units(texts: collections.abc.Mapping[str, str]) -> set[str]:
    """Write unit files that every user can read, and return those that changed.

    systemd is reloaded once if there are any.
    """
    changed = {name for name, text in texts.items() if files.ensure_file(UNIT_DIR / name, text)}
    if changed:
        daemon_reload()
    return changed


def ensure_dropin(unit: str, name: str, text: str) -> bool:
    """Write the drop-in `name` of `unit`; reload systemd if it changed."""
    return ensure_unit(f"{unit}.d/{name}", text)


def ensure_no_unit(name: str) -> None:
    """Stop and disable `name` and remove its unit file."""
    if (UNIT_DIR / name).exists():
        _systemctl("disable", "--now", name, timeout=120, check=False)
        files.ensure_absent(UNIT_DIR / name)
        daemon_reload()
        reset_failed(name)


def ensure_no_dropin(unit: str, name: str) -> bool:
    """Remove the drop-in `name` of `unit`, and the drop-in directory when it is left empty."""
    directory = UNIT_DIR / f"{unit}.d"
    changed = files.ensure_absent(directory / name)
    if changed:
        if not any(directory.iterdir()):
            directory.rmdir()
        daemon_reload()
    return changed


def daemon_reload() -> None:
    """Make systemd read its unit files again."""
    _systemctl("daemon-reload")


def reset_failed(name: str) -> None:
    """Make systemd forget that `name` failed, and how often it was started."""
    _systemctl("reset-failed", name, check=False)


def enable(name: str) -> None:
    """Start `name` at every boot from the next one on."""
    _systemctl("enable", name, timeout=120)


def enable_now(name: str, *, timeout: float = 120) -> None:
    """Start `name` now and at every boot. Raises `CommandError` when it does not start."""
    _systemctl("enable", "--now", name, timeout=timeout)


def start_later(name: str) -> None:
    """Ask systemd to start `name`, without waiting for it."""
    _systemctl("start", "--no-block", name)


def restart(name: str, *, timeout: float = 120) -> None:
    """Restart `name`. Raises `CommandError` when it does not come up."""
    _systemctl("restart", name, timeout=timeout)


def stop(name: str, *, timeout: float = 120) -> None:
    """Stop `name`; a unit that does not exist counts as stopped."""
    _systemctl("stop", name, timeout=timeout, check=False)


def journal(name: str, *, lines: int = 40, secrets: collections.abc.Iterable[str] = ()) -> str:
    """Read the last lines in the journal about a unit, without secrets."""
    return _journalctl("-u", name, lines=lines, secrets=secrets)


def output(name: str, *, secrets: collections.abc.Iterable[str] = ()) -> str:
    """Read the last lines that a unit's processes wrote since its last start, without secrets."""
    start = show(name, "InvocationID")
    return (
        _journalctl(f"_SYSTEMD_INVOCATION_ID={start}", lines=40, secrets=secrets) if start else ""
    )


def exists(name: str) -> bool:
    """Report whether systemd has a unit file for `name`."""
    return _systemctl("cat", name, check=False).returncode == 0


def state(name: str) -> str:
    """Read whether `name` is active, activating, failed ..."""
    return _systemctl("is-active", name, check=False).stdout.strip()


def is_active(name: str) -> bool:
    """Report whether `name` is running."""
    return _systemctl("is-active", "--quiet", name, check=False).returncode == 0


def is_enabled(name: str) -> bool:
    """Report whether systemd starts `name` at boot."""
    return _systemctl("is-enabled", "--quiet", name, check=False).returncode == 0


def active_for(name: str) -> float | None:
    """Compute for how many seconds `name` has been running, None while it is not."""
    started_us = show(name, "ActiveEnterTimestampMonotonic")
    if not started_us.isdigit() or not is_active(name):
        return None
    return time.clock_gettime(time.CLOCK_MONOTONIC) - int(started_us) / 1e6


def show(name: str, field: str) -> str:
    """Read one property of `name`, or "" if it has none."""
    return _systemctl("show", "-P", field, name, check=False).stdout.strip()


def _systemctl(*arguments: str, timeout: float = 60, check: bool = True) -> Completed:
    return run("/usr/bin/systemctl", *arguments, timeout=timeout, check=check)


def _journalctl(*match: str, lines: int, secrets: collections.abc.Iterable[str]) -> str:
    options = ("-n", str(lines), "-o", "cat", "--no-pager")
    return run("/usr/bin/journalctl", *match, *options, check=False, secrets=secrets).stdout

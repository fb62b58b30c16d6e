"""systemd units as desired state. Every function is idempotent; `ensure_*` say whether they changed something."""

import collections.abc
import pathlib
import time

from slurm_ddp import files
from slurm_ddp.run import run

UNIT_DIR = pathlib.Path("/etc/systemd/system")
_SYSTEMCTL = "/usr/bin/systemctl"


def ensure_unit(name: str, text: str) -> bool:
    """Write /etc/systemd/system/`name`, reload systemd if it changed. Everybody can read it: no secrets in `text`."""
    changed = files.ensure_file(UNIT_DIR / name, text)
    if changed:
        daemon_reload()
    return changed


def ensure_dropin(unit: str, name: str, text: str) -> bool:
    """Write the drop-in `name` of `unit` and reload systemd if it changed."""
    changed = files.ensure_file(UNIT_DIR / f"{unit}.d" / name, text)
    if changed:
        daemon_reload()
    return changed


def ensure_no_unit(name: str) -> bool:
    """Stop and disable `name` and remove its unit file."""
    path = UNIT_DIR / name
    if not path.exists():
        return False
    run(_SYSTEMCTL, "disable", "--now", name, timeout=120, check=False)
    files.ensure_absent(path)
    daemon_reload()
    run(_SYSTEMCTL, "reset-failed", name, check=False)
    return True


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
    run(_SYSTEMCTL, "daemon-reload")


def enable(name: str) -> None:
    """Start `name` at every boot from the next one on."""
    run(_SYSTEMCTL, "enable", name, timeout=120)


def enable_now(name: str, *, timeout: float = 120) -> None:
    """Start `name` now and at every boot. Raises `CommandError` when it does not start."""
    run(_SYSTEMCTL, "enable", "--now", name, timeout=timeout)


def restart(name: str, *, timeout: float = 120) -> None:
    """Restart `name`. Raises `CommandError` when it does not come up."""
    run(_SYSTEMCTL, "restart", name, timeout=timeout)


def try_restart(name: str) -> None:
    """Have systemd restart `name` if it runs, and do not wait for it; a unit that is not there is left alone."""
    run(_SYSTEMCTL, "try-restart", "--no-block", name, check=False)


def stop(name: str, *, timeout: float = 120) -> None:
    """Stop `name`; a unit that is not there counts as stopped."""
    run(_SYSTEMCTL, "stop", name, timeout=timeout, check=False)


def journal(name: str, *, secrets: collections.abc.Iterable[str] = ()) -> str:
    """Return the last lines that a unit wrote into the journal, without secrets."""
    lines = ("-n", "40", "-o", "cat", "--no-pager")
    return run("/usr/bin/journalctl", "-u", name, *lines, check=False, secrets=secrets).stdout


def own_words(name: str, *, secrets: collections.abc.Iterable[str] = ()) -> str:
    """Return the last lines that a unit's processes wrote since its last start, without secrets; none of systemd's."""
    start = run(_SYSTEMCTL, "show", "-P", "InvocationID", name, check=False).stdout.strip()
    if not start:
        return ""
    lines = (f"_SYSTEMD_INVOCATION_ID={start}", "-n", "40", "-o", "cat", "--no-pager")
    return run("/usr/bin/journalctl", *lines, check=False, secrets=secrets).stdout


def has_failed(name: str) -> bool:
    """Tell whether `name` ended with an error, and systemd leaves it at that."""
    return run(_SYSTEMCTL, "is-failed", "--quiet", name, check=False).returncode == 0


def active_for(name: str) -> float | None:
    """Return for how many seconds `name` has been running, None while it is not."""
    shown = run(_SYSTEMCTL, "show", "-P", "ActiveEnterTimestampMonotonic", name, check=False).stdout.strip()
    if not shown.isdigit() or not is_active(name):
        return None
    return time.clock_gettime(time.CLOCK_MONOTONIC) - int(shown) / 1e6


def start_later(name: str) -> None:
    """Have systemd start `name`, and do not wait for it."""
    run(_SYSTEMCTL, "start", "--no-block", name)


def is_active(name: str) -> bool:
    """Tell whether `name` is running."""
    return run(_SYSTEMCTL, "is-active", "--quiet", name, check=False).returncode == 0


def is_enabled(name: str) -> bool:
    """Tell whether systemd starts `name` at boot."""
    return run(_SYSTEMCTL, "is-enabled", "--quiet", name, check=False).returncode == 0

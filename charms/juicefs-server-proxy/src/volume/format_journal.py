"""A journal on the unit's disk of a format that began, until Juju keeps the result.

Juju drops the data of a hook that is killed, for example by a reboot: without the journal the
volume, and the servers of an embedded one with their passwords, would exist without an owner.
"""

import json
import pathlib

from slurm_ddp import files
from slurm_ddp.interfaces import filesystem_info as fs

STATE_DIR = pathlib.Path("/var/lib/slurm-ddp")
_CREDENTIALS, _BEGAN = "format-credentials.json", "format-began"


def keep_credentials(app: str, content: fs.JuicefsSecret) -> None:
    """Record the credentials that an embedded volume is about to get."""
    files.ensure_file(STATE_DIR / app / _CREDENTIALS, json.dumps(content.content()), mode=0o600)


def credentials(app: str) -> fs.JuicefsSecret | None:
    """Read the credentials planned for an embedded volume; None if missing or incomplete."""
    try:
        return fs.JuicefsSecret.from_content(
            json.loads((STATE_DIR / app / _CREDENTIALS).read_text())
        )
    except (OSError, ValueError, AttributeError):
        return None


def record(app: str, url: str, name: str) -> None:
    """Record that this volume is about to be formatted. `url` is without a password."""
    files.ensure_file(STATE_DIR / app / _BEGAN, f"{url}\n{name}\n")


def has(app: str, url: str, name: str) -> bool:
    """Report whether formatting of this volume began here, and Juju may not have kept it."""
    path = STATE_DIR / app / _BEGAN
    return path.is_file() and path.read_text(errors="replace") == f"{url}\n{name}\n"


def forget(app: str) -> None:
    """Remove the journal: Juju keeps the volume, or the application is removed."""
    for name in (_CREDENTIALS, _BEGAN):
        files.ensure_absent(STATE_DIR / app / name)

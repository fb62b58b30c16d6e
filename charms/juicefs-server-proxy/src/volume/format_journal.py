"""A journal on the unit's disk of a format that began, until Juju keeps the result.

Juju drops what a hook wrote when the hook is killed, by a reboot for example. Without the journal the volume, and the
servers of an embedded one with their passwords, would be there and be nobody's.
"""

import json
import pathlib

from slurm_ddp import files
from slurm_ddp.interfaces import filesystem_info

STATE_DIR = pathlib.Path("/var/lib/slurm-ddp")


def keep_credentials(app: str, content: filesystem_info.JuicefsSecret) -> None:
    """Record the credentials that an embedded volume is about to get."""
    files.ensure_file(_credentials(app), json.dumps(content.content()), mode=0o600)


def credentials(app: str) -> filesystem_info.JuicefsSecret | None:
    """Return the credentials that an embedded volume was about to get; None if there are none, or no whole ones."""
    try:
        return filesystem_info.JuicefsSecret.from_content(json.loads(_credentials(app).read_text()))
    except (OSError, ValueError, AttributeError):
        return None


def record(app: str, url: str, name: str) -> None:
    """Record that this volume is about to be formatted. `url` is without a password."""
    files.ensure_file(_formatting(app), f"{url}\n{name}\n")


def has(app: str, url: str, name: str) -> bool:
    """Return whether formatting of this volume began here, and Juju may not know of it."""
    path = _formatting(app)
    return path.is_file() and path.read_text(errors="replace") == f"{url}\n{name}\n"


def forget(app: str) -> None:
    """Remove the journal: Juju keeps the volume, or the application is removed."""
    for path in (_credentials(app), _formatting(app)):
        files.ensure_absent(path)


def _credentials(app: str) -> pathlib.Path:
    return STATE_DIR / app / "format-credentials.json"


def _formatting(app: str) -> pathlib.Path:
    return STATE_DIR / app / "format-began"

"""Munge's key, which all hosts of a cluster share."""

import base64
import pathlib
import secrets

from slurm_ddp import files, systemd

KEY = pathlib.Path("/etc/munge/munge.key")
PACKAGE = "munge"

_KEY_BYTES = 1024  # munge's maximum, mungekey(8)


def new_key() -> str:
    """Return a fresh key in base64."""
    return base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()


def ensure_key(key: str) -> bool:
    """Make munge use `key` (base64) and run; return whether it had another one."""
    changed = files.ensure_file(KEY, base64.b64decode(key), mode=0o400, owner="munge")
    if changed:
        systemd.restart("munge.service")
    systemd.enable_now("munge.service")
    return changed

"""Slurm on a machine whose slurmctld is stopped, while that of another machine is in control."""

import base64
import hashlib
import hmac
import json
import os
import pathlib
import time

from slurm_ddp.slurm import nodes

KEY = pathlib.Path("/etc/slurm/jwt_hs256.key")  # where upstream's charm writes it; controllers share it
_LIFE_S = 600


def is_controlled() -> bool:
    """Check whether a slurmctld elsewhere responds; if there may be one, Slurm's commands of this process reach it.

    auth/slurm has no socket here without a slurmctld, so the commands bring a token of root's (auth/jwt).
    """
    if not KEY.exists():
        return False
    os.environ["SLURM_JWT"] = _token(KEY.read_bytes())
    return nodes.is_controlled()


def _token(key: bytes) -> str:
    now = int(time.time())
    parts = ({"alg": "HS256", "typ": "JWT"}, {"iat": now, "exp": now + _LIFE_S, "sun": "root"})
    text = b".".join(_encode(json.dumps(part).encode()) for part in parts)
    return (text + b"." + _encode(hmac.new(key, text, hashlib.sha256).digest())).decode()


def _encode(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")

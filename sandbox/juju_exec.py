"""Requests of a host's units by juju-exec: files in the host that guest/juju_exec.py writes and waits for."""

import contextlib
import json
import pathlib
import re

from sandbox.guest import juju_exec as guest
from slurm_ddp import files

PROGRAM = pathlib.Path(guest.__file__)
PATH = "/usr/bin/juju-exec"  # where a host has it
_TMPFILES = "etc/tmpfiles.d/sandbox-juju-exec.conf"
_ID = re.compile(r"[0-9a-f]{32}")


def prepare(root: pathlib.Path) -> None:
    """Let a host forget at each boot what it asked for: Juju holds that in memory."""
    files.ensure_file(root / _TMPFILES, f"D! {guest.REQUESTS} 0700 root root -\n")


def pending(root: pathlib.Path) -> dict[str, str]:
    """Return the units of a host whose update-status is asked for, by request."""
    found: dict[str, str] = {}
    for path in sorted(_requests(root).glob("*.request")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it was removed, or is not ours
            if _ID.fullmatch(path.stem):
                found[path.stem] = str(json.loads(path.read_text())["unit"])
    return found


def answer(root: pathlib.Path, request: str, code: int, stderr: str = "") -> None:
    """End a request: whoever waits prints `stderr` and ends with the status `code`."""
    path = _requests(root) / f"{request}.request"
    if path.exists():  # else the host was rebooted
        files.ensure_file(path.with_suffix(".answer"), json.dumps({"code": code, "stderr": stderr}), mode=0o600)
        files.ensure_absent(path)


def not_found(root: pathlib.Path, request: str, unit: str) -> None:
    """End a request of a unit that the host does not have."""
    answer(root, request, 1, f"ERROR {guest.not_found(unit)}\n")


def agent(root: pathlib.Path, unit: str) -> pathlib.Path:
    """Return the folder of a unit's agent, which Juju removes with the unit."""
    return root / guest.AGENTS.relative_to("/") / f"unit-{unit.replace('/', '-')}"


def _requests(root: pathlib.Path) -> pathlib.Path:
    return root / guest.REQUESTS.relative_to("/")

"""Requests of a host's units by juju-exec: files that guest/juju_exec.py makes, and whose end it waits for."""

import pathlib
import re

from sandbox.guest import juju_exec as guest
from slurm_ddp import files

PROGRAM = pathlib.Path(guest.__file__)
PATH = "/usr/bin/juju-exec"  # where a host has it


def prepare(root: pathlib.Path) -> None:
    """Make a host forget its requests at each boot: Juju holds them in memory."""
    files.ensure_file(root / "etc/tmpfiles.d/sandbox-juju-exec.conf", f"D! {guest.REQUESTS} 0700 root root -\n")


def pending(root: pathlib.Path) -> dict[str, str]:
    """Return the units of a host whose update-status is asked for, by request."""
    names = (re.fullmatch(r"[0-9a-f]{32}\.(.+)-(\d+)", path.name) for path in sorted(_requests(root).glob("*")))
    return {found.string: f"{found[1]}/{found[2]}" for found in names if found}


def answer(root: pathlib.Path, request: str, failure: str = "") -> None:
    """End a request: juju-exec ends with status 0, or prints its failure and ends with 1."""
    path = _requests(root) / request
    if failure and path.exists():  # else the host was rebooted
        files.ensure_file(path.with_name(f"failure.{request}"), failure, mode=0o600)
    files.ensure_absent(path)


def agent(root: pathlib.Path, unit: str) -> pathlib.Path:
    """Return the folder of a unit's agent, which Juju removes with the unit."""
    return root / guest.AGENTS.relative_to("/") / f"unit-{unit.replace('/', '-')}"


def _requests(root: pathlib.Path) -> pathlib.Path:
    return root / guest.REQUESTS.relative_to("/")

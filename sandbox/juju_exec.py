"""Requests of a host's units by juju-exec: files that guest/juju_exec.py makes."""

import pathlib
import re

from sandbox.guest import juju_exec as guest
from slurm_ddp import files

PROGRAM = pathlib.Path(guest.__file__)
PATH = "/usr/bin/juju-exec"  # where a host has it


def prepare(root: pathlib.Path) -> None:
    """Make a host forget its requests at each boot: Juju holds them in memory."""
    files.ensure_file(root / "etc/tmpfiles.d/sandbox-juju-exec.conf", f"D! {guest.REQUESTS} 0700 root root -\n")


def take_requests(root: pathlib.Path) -> list[str]:
    """Remove the requests of a host; return their units."""
    units: list[str] = []
    for path in (root / guest.REQUESTS.relative_to("/")).glob("*"):
        if found := re.fullmatch(r"[0-9a-f]{32}\.(.+)-(\d+)", path.name):
            path.unlink(missing_ok=True)
            units.append(f"{found[1]}/{found[2]}")
    return units


def agent(root: pathlib.Path, unit: str) -> pathlib.Path:
    """Return the folder of a unit's agent, which Juju removes with the unit."""
    return root / guest.AGENTS.relative_to("/") / f"unit-{unit.replace('/', '-')}"

#!/usr/bin/python3 -I
"""juju-exec of a host, installed as /usr/bin/juju-exec: queues a unit's update-status hook.

A request is a file that a command of the sandbox picks up. Other uses of juju-exec are refused.
This file imports nothing from the sandbox.
"""

import os
import pathlib
import re
import shlex
import sys
import time
import uuid

PATH = "/usr/bin/juju-exec"  # the path of this file in a host
AGENTS = pathlib.Path("/var/lib/juju/agents")  # a folder for each unit, which Juju removes with it
REQUESTS = pathlib.Path("/var/lib/sandbox/juju-exec")  # emptied at each boot
_POLL_S = 0.3


def main() -> str | int:
    """Wait until a command has queued the hook; return an exit status or an error."""
    unit = (sys.argv[1:] or [""])[0].replace("/", "-")
    hook = f"JUJU_DISPATCH_PATH=hooks/update-status {AGENTS}/unit-{unit}/charm/dispatch"
    if os.environ.get("JUJU_CONTEXT_ID"):
        sys.stderr.write("ERROR juju-exec cannot be called from within a hook\n")
        return 2
    if sys.argv[2:] != [hook]:
        sys.stderr.write(
            f"ERROR the sandbox plays juju-exec UNIT {hook!r} alone, not {shlex.join(sys.argv[1:])!r}\n"
        )
        return 2
    if not (AGENTS / f"unit-{unit}").is_dir():
        return f'ERROR unit "{sys.argv[1]}" not found on this machine'
    REQUESTS.mkdir(mode=0o700, parents=True, exist_ok=True)
    request = REQUESTS / f"{uuid.uuid4().hex}.{unit}"
    request.touch()
    while request.exists():
        time.sleep(_POLL_S)
    return 0


def take_requests(root: pathlib.Path) -> list[str]:
    """Take the requests of the host at `root`; return their units. Runs in the engine."""
    units: list[str] = []
    for path in (root / REQUESTS.relative_to("/")).glob("*"):
        if found := re.fullmatch(r"[0-9a-f]{32}\.(.+)-(\d+)", path.name):
            path.unlink(missing_ok=True)
            units.append(f"{found[1]}/{found[2]}")
    return units


if __name__ == "__main__":
    sys.exit(main())

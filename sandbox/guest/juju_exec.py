#!/usr/bin/python3 -I
"""juju-exec of a host, where it is /usr/bin/juju-exec: runs a unit's update-status hook, and waits for its end.

A request is a file that a command of the sandbox finds and carries out with the machine's lock (juju_exec.py beside the
engine). What else Juju's juju-exec would run in a unit's context is refused. Wordings and exit statuses are those of
juju/juju, cmd/jujud/run/run.go: 2 for arguments, 1 where the unit is not here, else the hook's. This file imports
nothing of the sandbox.
"""

import json
import os
import pathlib
import re
import shlex
import sys
import time
import uuid

AGENTS = pathlib.Path("/var/lib/juju/agents")
REQUESTS = pathlib.Path("/var/lib/sandbox/juju-exec")  # emptied at each boot
_UNIT = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]*[a-z][a-z0-9]*)*/(?:0|[1-9]\d*)")
_POLL_S = 0.3


class ExecError(Exception):
    """juju-exec runs nothing."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def parse(words: list[str]) -> str:
    """Return the unit whose update-status is asked for.

    Raises:
        ExecError: Juju refuses the words, or the sandbox does not play what they ask for.
    """
    context = os.environ.get("JUJU_CONTEXT_ID", "")
    if context:
        raise ExecError(f"juju-exec cannot be called from within a hook, have context {json.dumps(context)}", 2)
    unit, *commands = [*(words[1:] if words[:1] == ["-u"] else words), ""]
    folder = AGENTS / f"unit-{unit.replace('/', '-')}"
    if _UNIT.fullmatch(unit) and not folder.is_dir():
        raise ExecError(not_found(unit), 1)
    hook = f"JUJU_DISPATCH_PATH=hooks/update-status {folder}/charm/dispatch"
    if not _UNIT.fullmatch(unit) or commands[:-1] != [hook]:
        raise ExecError(f"the sandbox plays juju-exec [-u] UNIT {hook!r} alone, not {shlex.join(words)!r}", 2)
    return unit


def not_found(unit: str) -> str:
    """Return Juju's words for a unit that this machine does not have."""
    return f"unit {json.dumps(unit)} not found on this machine"


def ask(unit: str) -> int:
    """Ask for the unit's update-status and wait; print what it left and return its exit status."""
    REQUESTS.mkdir(mode=0o700, parents=True, exist_ok=True)
    request = REQUESTS / f"{uuid.uuid4().hex}.request"
    draft, answer = request.with_suffix(".draft"), request.with_suffix(".answer")
    draft.write_text(json.dumps({"unit": unit}))
    draft.rename(request)
    while request.exists():
        time.sleep(_POLL_S)
    if not answer.exists():
        raise ExecError("r.runner.RunCommands: command execution aborted", 1)
    done = json.loads(answer.read_text())
    answer.unlink()
    sys.stderr.write(done["stderr"])
    return done["code"]


def main() -> int:
    """Do what the arguments say; return the exit status."""
    try:
        return ask(parse(sys.argv[1:]))
    except ExecError as e:
        print(f"ERROR {e}", file=sys.stderr)
        return e.code


if __name__ == "__main__":
    sys.exit(main())

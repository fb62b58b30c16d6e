"""Each rank's error file, which tells the launcher why the rank failed.

The format is from `record` of torch.distributed.elastic (error_handler.py, since torch 1.9). That
decorator imports torch, which a mistake in the options need not wait for, and ignores exceptions
that end in an exit code. `extraInfo` has more than torch's: `errno`, `path` and `node` of a refusal
by the operating system, and `of_peer` if a rank reports that another one is lost.
"""

import json
import os
import pathlib
import time
import traceback
import typing

from ddptrain.ground import errors, files, log


def leave(e: Exception, text: str, *, of_peer: bool = False) -> None:
    """Write why this rank ends, if a launcher asks for it. The stack of a bug is in it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    is_bug = not isinstance(e, errors.UserError | errors.PeerError | OSError)
    stack = "".join(traceback.format_exception(e)) if is_bug else ""
    more: dict[str, typing.Any] = {
        "py_callstack": f"{stack}[FATAL] {text}\n",
        "timestamp": str(int(time.time())),
    }
    if cause := errors.cause_of(e):
        more |= cause._asdict()
    if of_peer or isinstance(e, errors.LostError | errors.PeerError):
        more["of_peer"] = True
    try:  # another thread may write too, and end this rank
        with files.replacing(pathlib.Path(path)) as file:
            file.write(json.dumps({"message": {"message": text, "extraInfo": more}}).encode())
    except OSError:
        log.warn("ENV", "the error file could not be written")

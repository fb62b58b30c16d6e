"""Record which lines of the module run in processes that a test starts. `run.py` has the module execute this first.

`RECORD` is a file for one row a line: the test that runs, by the file beside it, and the line's number.
"""

import os
import pathlib
import sys
import threading
import types
import typing

RECORD: str = globals()["RECORD"]  # set by run.py in front of this text
MODULE: str = globals()["MODULE"]


def record() -> None:
    """Record from now on, in all threads."""
    test = pathlib.Path(f"{RECORD}.test").read_text()
    out = os.open(RECORD, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    seen: set[int] = set()

    def line(frame: types.FrameType, event: str, _: object) -> typing.Any:
        if event == "line" and frame.f_lineno not in seen:
            seen.add(frame.f_lineno)
            os.write(out, f"{frame.f_lineno} {test}\n".encode())
        return line

    def call(frame: types.FrameType, _event: str, _: object) -> typing.Any:
        return line if frame.f_code.co_filename == MODULE else None

    threading.settrace(call)
    sys.settrace(call)


if "pytest" not in sys.modules:  # there coverage does it
    record()

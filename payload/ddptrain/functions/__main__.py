"""A rank of a function's job: `python -m ddptrain.functions [--call=NUMBER]`.

It reads JOB_DIR/function.pkl, calls the function, and leaves its result or its exception in
RUN_DIR/results.
"""

import argparse
import os
import pathlib
import signal
import sys
import typing

from ddptrain.functions import calls, outcomes

_OURS = str(pathlib.Path(__file__).parent)  # whose frames a traceback does without
_CONTINUED = "continued.pkl"  # the call for the job's next start


def main(argv: list[str] | None = None) -> None:
    """Call the function; an exception goes on to Python, which prints it and ends with 1."""
    parser = argparse.ArgumentParser(prog="python -m ddptrain.functions")
    parser.add_argument("--call", type=int, default=0, help="number of the call, in a sweep")
    number = parser.parse_args(argv).call

    folder = pathlib.Path(os.environ["RUN_DIR"])
    rank = int(os.environ.get("RANK", "0"))
    outcomes.clear(folder, rank)
    try:
        call = _read_call(folder, number)
        if hasattr(call.function, "checkpoint"):
            _checkpoint_when_asked(call, folder, rank)
        value = call()
        outcomes.leave_result(folder, rank, value)
    except SystemExit as e:
        if e.code not in (None, 0):
            outcomes.leave_error(folder, rank, e)
            raise
        outcomes.leave_result(folder, rank, None)
    except BaseException as e:
        below = e.__traceback__
        while below is not None and below.tb_frame.f_code.co_filename.startswith(_OURS):
            below = below.tb_next
        outcomes.leave_error(folder, rank, e.with_traceback(below))
        raise


def _read_call(folder: pathlib.Path, number: int) -> calls.Call:
    """Read the call, or the one that an earlier start of the job left to go on with."""
    if (folder / _CONTINUED).exists():
        return calls.read(folder / _CONTINUED)
    return calls.read(pathlib.Path(os.environ["JOB_DIR"]) / calls.FILE, number)


def _checkpoint_when_asked(call: calls.Call, folder: pathlib.Path, rank: int) -> None:
    """Let rank 0 write the next start's call when the job is asked to stop, and end the job."""

    def leave(_number: int, _frame: object) -> None:
        if rank != 0:  # the launcher ends the others with it
            return
        function: typing.Any = call.function
        again = function.checkpoint(*call.args, **call.kwargs)
        if again is not None:
            calls.write(folder / _CONTINUED, [again])
        sys.stdout.flush()
        os._exit(1)  # an exception would be one of the function

    signal.signal(getattr(signal, f"SIG{calls.STOP_SIGNAL}"), leave)


if __name__ == "__main__":
    sys.argv[0] = "ddptrain.functions"
    main()

"""A command that has the terminal until it ends, such as an interactive one."""

import collections.abc
import signal
import subprocess
import types

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run(
    argv: collections.abc.Sequence[str],
    env: collections.abc.Mapping[str, str],
    *,
    folder: str | None = None,
) -> int:
    """Run a command on this terminal and return its exit status, 128 plus the number of a signal.

    The terminal signals both processes, and the command decides: this one waits for its end. A
    signal to this process alone is passed on.
    """
    before = {number: signal.getsignal(number) for number in _PASSED_ON}
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: types.FrameType | None) -> None:
        is_of_terminal = number in (signal.SIGINT, signal.SIGQUIT)
        if process is not None and not is_of_terminal:
            process.send_signal(number)

    try:
        for number in _PASSED_ON:
            signal.signal(number, pass_on)
        process = subprocess.Popen(argv, env=env, cwd=folder)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code

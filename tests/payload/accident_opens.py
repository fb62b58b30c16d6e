"""No accident: each rank records every file that it opens in its own file below $OPENS."""

# pyright: basic
import os
import pathlib
import sys

_own = os.open(
    pathlib.Path(os.environ["OPENS"], os.environ["RANK"]),
    os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
    0o644,
)


def note(event: str, args: tuple[object, ...]) -> None:
    if event == "open" and isinstance(args[0], str | os.PathLike):
        os.write(_own, f"{os.fspath(args[0])}\n".encode())


sys.addaudithook(note)

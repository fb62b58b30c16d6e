"""Each rank's outcome: the function's result or its exception, in a file of the run's folder."""

import contextlib
import dataclasses
import os
import pathlib
import socket
import time
import traceback
import typing

from ddptrain.functions import errors, pickles

FOLDER = "results"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A rank's result or exception."""

    rank: int
    world: int  # number of ranks
    host: str
    at: float  # in seconds since 1970
    is_ok: bool
    data: bytes  # the pickled result or exception; b"": it could not be pickled
    trace: str = ""

    def value(self) -> typing.Any:
        """Load the result, which may import modules that this Python lacks."""
        return pickles.loads(self.data)

    def error(self) -> BaseException:
        """Load the exception, with the rank's traceback as its cause.

        It is a FailedJobError if it cannot be loaded.
        """
        where = f"rank {self.rank} of {self.world} on {self.host}:\n{self.trace}"
        found: object = None
        with contextlib.suppress(Exception):  # an exception's class may raise anything here
            found = pickles.loads(self.data)
        if not isinstance(found, BaseException):
            last = self.trace.strip().rpartition("\n")[2]
            found = errors.FailedJobError(f"rank {self.rank} on {self.host}: {last}")
        found.__cause__ = errors.RankTraceback(where)
        return found


def clear(folder: pathlib.Path, rank: int) -> None:
    """Remove a rank's outcome of an earlier attempt."""
    (folder / FOLDER).mkdir(exist_ok=True)
    _path(folder, rank).unlink(missing_ok=True)


def leave_result(folder: pathlib.Path, rank: int, value: object) -> None:
    """Write a rank's result. Raises FunctionError, or the result's own error in pickling."""
    _write(folder, _outcome(rank, is_ok=True, data=pickles.dumps(value)))


def leave_error(folder: pathlib.Path, rank: int, error: BaseException) -> None:
    """Write a rank's exception."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    data = b""
    with contextlib.suppress(Exception):  # its text is enough
        data = pickles.dumps(error.with_traceback(None))
    _write(folder, _outcome(rank, is_ok=False, data=data, trace=trace))


def read_all(folder: pathlib.Path) -> dict[int, Outcome]:
    """Read the outcomes so far, by rank."""
    found: dict[int, Outcome] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder / FOLDER):  # noqa: PTH208 - it also renews what NFS remembers
            rank, _, suffix = name.partition(".")
            if rank.isdecimal() and suffix == "pkl":
                with contextlib.suppress(FileNotFoundError):
                    found[int(rank)] = Outcome(**pickles.read(folder / FOLDER / name))
    return found


def _outcome(rank: int, *, is_ok: bool, data: bytes, trace: str = "") -> Outcome:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Outcome(rank, world, host, time.time(), is_ok, data, trace)


def _write(folder: pathlib.Path, outcome: Outcome) -> None:
    pickles.write(_path(folder, outcome.rank), dataclasses.asdict(outcome))


def _path(folder: pathlib.Path, rank: int) -> pathlib.Path:
    return folder / FOLDER / f"{rank}.pkl"

"""Calls of functions: a file with one call for each run of a submission, which the ranks read."""

import collections.abc
import dataclasses
import os
import pathlib
import platform
import sys
import typing

from ddptrain.functions import errors, pickles

STOP_SIGNAL = "USR2"  # asks a function with a method `checkpoint` to leave; NCCL may take USR1
FILE = "function.pkl"  # in the folder of the run, or of the sweep


@dataclasses.dataclass(frozen=True)
class Call:
    """A function with its arguments."""

    function: collections.abc.Callable[..., typing.Any]
    args: tuple[typing.Any, ...] = ()
    kwargs: dict[str, typing.Any] = dataclasses.field(default_factory=dict[str, typing.Any])

    def __call__(self) -> typing.Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)

    @property
    def name(self) -> str:
        """The function's name, or its class's."""
        inner = getattr(self.function, "func", self.function)  # of functools.partial
        name = getattr(inner, "__name__", type(inner).__name__)
        return "function" if name == "<lambda>" else name


def write(path: pathlib.Path, calls: collections.abc.Sequence[Call]) -> None:
    """Write calls to a file. Raises FunctionError: one cannot be pickled."""
    found: list[bytes] = []
    for call in calls:
        try:
            found.append(pickles.dumps((call.function, call.args, call.kwargs)))
        except errors.FunctionError:
            raise
        except Exception as e:  # an object may raise anything as it is pickled
            why = f"{type(e).__name__}: {e}"
            raise errors.FunctionError(f"{call.name} cannot be pickled ({why})") from e
    place = {"python": _python(), "folder": os.getcwd(), "paths": _search_path()}  # noqa: PTH109
    pickles.write(path, {**place, "calls": found})


def read(path: pathlib.Path, number: int = 0) -> Call:
    """Read a call, after its modules' folders were put on sys.path.

    Raises FunctionError: it was written by another version of Python, whose functions differ.
    """
    held = pickles.read(path)
    if held["python"] != _python():
        why = f"it was pickled by Python {held['python']}, and the job's is {_python()}"
        how = (
            f"submit it from Python {_python()}, or give python= an environment that the nodes see"
        )
        raise errors.FunctionError(f"the function cannot be loaded: {why}; {how}")
    _extend_search_path(held["folder"], held["paths"])
    function, args, kwargs = pickles.loads(held["calls"][number])
    return Call(function, args, kwargs)


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _search_path() -> list[str]:
    """Return the folders of sys.path that are not this Python's own, such as the script's."""
    own = tuple({os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)})
    found: list[str] = []
    for part in sys.path:
        path = os.path.abspath(part or ".")  # noqa: PTH100 - a link keeps its own name
        is_own = os.path.realpath(path).startswith(tuple(f"{one}/lib" for one in own))
        if os.path.isdir(path) and not is_own:  # noqa: PTH112
            found.append(path)
    return found


def _extend_search_path(folder: str, paths: list[str]) -> None:
    """Append the submitter's folders: first their copies in the project, then themselves."""
    for path in paths:
        copied = os.path.normpath(os.path.join(os.getcwd(), os.path.relpath(path, folder)))  # noqa: PTH109, PTH118
        for one in (copied, path):
            if one not in sys.path and os.path.isdir(one):  # noqa: PTH112
                sys.path.append(one)

"""Pickles that only their owner can write, because a pickle can run code in its reader."""

import importlib
import os
import pathlib
import pickle
import stat
import typing

from ddptrain.functions import errors
from ddptrain.ground import files


def dumps(value: object) -> bytes:
    """Pickle a value; functions and classes of a notebook or script by value.

    Raises FunctionError without cloudpickle.
    """
    return typing.cast(bytes, _cloudpickle().dumps(value))


def loads(data: bytes) -> typing.Any:
    """Load what `dumps` returned."""
    return pickle.loads(data)  # noqa: S301 - `read` checked whose file it is from


def write(path: pathlib.Path, value: object) -> None:
    """Write a value of built-in types to a file of mode 0600, which appears whole."""
    with files.replacing(path) as file:
        os.fchmod(file.fileno(), 0o600)  # while it is empty
        pickle.dump(value, file, protocol=4)


def read(path: pathlib.Path) -> typing.Any:
    """Read a value that `write` wrote.

    Raises FileNotFoundError, and FunctionError for another account's file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise errors.FunctionError(f"{path} cannot be read: {e.strerror}") from e
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        is_own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
        if not is_own or about.st_mode & 0o022:
            why = f"it belongs to uid {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}"
            raise errors.FunctionError(f"{path} is not a file that only you can write: {why}")
        return pickle.load(file)  # noqa: S301


def _cloudpickle() -> typing.Any:
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        hint = "install it beside ddptrain: python -m pip install cloudpickle"
        raise errors.FunctionError(f"this Python has no cloudpickle; {hint}") from None
    return cloudpickle

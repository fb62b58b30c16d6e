"""An accident: opening a path with $FAIL_AT in it to write ($FAIL_MODE) fails with $FAIL_ERRNO."""

# pyright: basic, reportPrivateImportUsage=false
import builtins
import errno
import io
import os
import typing

from ddptrain.checkpoint import draft

_open, _os_open, _new = io.open, os.open, draft.Counted.__init__


def refuse(path: typing.Any) -> None:
    if not isinstance(path, int) and os.environ["FAIL_AT"] in os.fspath(path):
        number = getattr(errno, os.environ["FAIL_ERRNO"])
        raise OSError(number, os.strerror(number), os.fspath(path))


def opened(file, mode="r", *args, **kwargs):
    if any(letter in mode for letter in os.environ["FAIL_MODE"]):
        refuse(file)
    return _open(file, mode, *args, **kwargs)


def created(path, flags, *args, **kwargs):
    if flags & os.O_CREAT:
        refuse(path)
    return _os_open(path, flags, *args, **kwargs)


def counted(self, path, mode):
    if any(letter in mode for letter in os.environ["FAIL_MODE"]):
        refuse(path)
    _new(self, path, mode)


draft.Counted.__init__ = typing.cast(typing.Any, counted)
io.open = builtins.open = opened
os.open = created

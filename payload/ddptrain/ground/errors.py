"""Errors that the user can fix, and the operating system's refusal behind an error."""

import collections.abc
import errno
import importlib
import os
import typing

# Errors of calls on a shared filesystem once its client or its server has failed (errno.h): FUSE's
# ends open calls with ECONNABORTED and later ones with ENOTCONN, and one that was started again
# knows no open file, hence EBADF. Lustre and CephFS give ESHUTDOWN to a client that was cut off,
# NFS ESTALE and ETIMEDOUT.
OF_FILESYSTEM = frozenset(
    (
        errno.EIO,
        errno.EBADF,
        errno.ECONNABORTED,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
        errno.ESTALE,
    )
)


class Cause(typing.NamedTuple):
    """The operating system's refusal, as data: the launcher decides by it about another attempt."""

    errno: int
    path: str  # "": unknown
    node: str = ""  # where; "": on this one

    @property
    def is_of_filesystem(self) -> bool:
        """Return whether a shared filesystem that has failed for a while gives this error."""
        return self.errno in OF_FILESYSTEM


class UserError(Exception):
    """The request cannot be fulfilled.

    `str()` is one line: what failed, on what, and the remedy.
    """

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(" ".join(message.split()))
        self.retry = retry  # the same again may work, later or elsewhere


class LostError(UserError):
    """Another rank was lost, for a reason unknown here; a rank that knows it has reported it."""


class SharedError(UserError):
    """A `UserError` that every rank knows of, so that rank 0 alone reports it."""

    def __init__(self, message: str, *, retry: bool = False, cause: Cause | None = None) -> None:
        super().__init__(message, retry=retry)
        self.cause = cause


class PeerError(Exception):
    """Another rank has failed and says why; this one only leaves."""

    def __init__(self, message: str, cause: Cause | None = None) -> None:
        super().__init__(message)
        self.cause = cause


def cause_of(e: BaseException) -> Cause | None:
    """Find the operating system's refusal in an exception or its causes, a filesystem's first."""
    found = [cause for one in _chain(e) if (cause := _own_cause(one))]
    of_filesystem = [cause for cause in found if cause.is_of_filesystem]
    return next(iter([*of_filesystem, *found]), None)


def _chain(e: BaseException | None) -> collections.abc.Iterator[BaseException]:
    """Yield an exception and those that it was raised from, or after."""
    seen = set[int]()
    while e is not None and id(e) not in seen:
        yield e
        seen.add(id(e))
        before = None if e.__suppress_context__ else e.__context__
        e = e.__cause__ or before


def _own_cause(e: BaseException) -> Cause | None:
    if isinstance(e, (SharedError, PeerError)):
        return e.cause
    if isinstance(e, OSError) and e.errno is not None:
        is_path = isinstance(
            e.filename, (str, bytes, os.PathLike)
        )  # it may be a descriptor's number
        return Cause(e.errno, os.fsdecode(e.filename) if is_path else "")
    return None


def need(package: str, where: object) -> typing.Any:
    """Return an optional package. Raises UserError naming the file or flag that needs it."""
    try:
        return importlib.import_module(package)
    except ImportError as e:
        name = package.partition(".")[0]
        text = f"{where} needs the package {name}, which is not installed: pip install {name}"
        raise UserError(text) from e

"""Errors that the user can fix."""

import importlib
import typing


class UserError(Exception):
    """What was asked for cannot be done. `str()` is one line: what, on what, and the remedy."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(" ".join(message.split()))
        self.retry = retry  # the same again may work, later or elsewhere


class LostError(UserError):
    """Another rank was lost, for a reason unknown here; a rank that knows it has reported it already."""


class SharedError(UserError):
    """A `UserError` that every rank knows of, so that rank 0 alone reports it."""


class PeerError(Exception):
    """Another rank has failed and tells why; this one only leaves."""


def need(package: str, where: object) -> typing.Any:
    """Return an optional package. Raises UserError naming the file or flag that needs it."""
    try:
        return importlib.import_module(package)
    except ImportError as e:
        name = package.partition(".")[0]
        text = f"{where} needs the package {name}, which is not installed: pip install {name}"
        raise UserError(text) from e

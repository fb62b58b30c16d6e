"""The reasons why a project cannot be copied, as problems of the option `workload`."""

import pathlib

from ddp.problem import ParameterError

IGNORE_FILE = ".ddpignore"


class NoProjectError(ParameterError):
    """The folder is a home, or another one that is never copied as a whole."""


def of_path(
    path: pathlib.Path | str, why: str, how: str = "give the path of a script"
) -> ParameterError:
    """Make an error from a path, the reason and the remedy."""
    return ParameterError("workload", describe(path, why, how))


def describe(path: pathlib.Path | str, why: str, how: str) -> str:
    """Describe the problem with a path, and the remedy."""
    text = str(path)
    shown = text if text.isprintable() else ascii(text)
    return f"{shown}: {why}; {how}"


def send_less(root: pathlib.Path) -> str:
    """Describe how to copy less."""
    return f"list what the job does not need in {root / IGNORE_FILE}, or give --no-snapshot"

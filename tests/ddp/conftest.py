"""What the tests of the program share."""

import collections.abc
import os
import pathlib
import shutil

import pytest

RECORDED = pathlib.Path(__file__).parent / "data" / "gpt-20261123"


@pytest.fixture
def recorded(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run that the payload left, of two ranks: job 7 failed, job 8 trained 60 steps."""
    folder = tmp_path / RECORDED.name
    shutil.copytree(RECORDED, folder)
    times = {"logs/7.r0": 1795453270, "control/7.r0.outcome": 1795453281, "logs/8.r0": 1795453290,
             "control/8.r0.outcome": 1795453309}  # fmt: skip
    for name, seconds in times.items():
        if name.startswith("logs/"):
            (folder / name).mkdir()
        os.utime(folder / name, (seconds, seconds))
    return folder


@pytest.fixture
def make_run(tmp_path: pathlib.Path) -> collections.abc.Callable[..., pathlib.Path]:
    """Return a function that makes a run's folder with these files, by their names."""

    def make(name: str = "run", **texts: str | bytes) -> pathlib.Path:
        folder = tmp_path / name
        for sub in ("logs", "control"):
            (folder / sub).mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            (folder / path).write_bytes(text.encode() if isinstance(text, str) else text)
        return folder

    return make

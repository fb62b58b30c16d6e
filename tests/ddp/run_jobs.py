"""Slurm's records of a run's job."""

import dataclasses
import datetime
import typing

from ddp.slurm import jobs

RUNNING = jobs.Job(
    5,
    "ann",
    "RUNNING",
    0,
    0,
    2,
    "gpu",
    "10:00",
    "1:00:00",
    "2026-11-23T17:50:00Z",
    "None",
    "",
    "run",
)


NOW = datetime.datetime(2026, 11, 23, 18, 0, tzinfo=datetime.timezone.utc)  # noqa: UP017 - Python 3.10


def make(state: str = "RUNNING", **more: typing.Any) -> jobs.Job:
    """Return the record of a job in this state."""
    return dataclasses.replace(RUNNING, state=state, **more)

"""The catalogue of runs: the state of a sweep from its runs."""

import collections

import pytest

from ddp.run import catalog


@pytest.mark.parametrize(
    ("states", "whole"),
    [
        ({"PENDING": 3}, "PENDING"),
        ({"PENDING": 3, "COMPLETED": 1}, "RUNNING"),
        ({"RUNNING": 1, "FAILED": 3}, "RUNNING"),
        ({"COMPLETED": 4}, "COMPLETED"),
        ({"COMPLETED": 3, "CANCELLED": 1}, "CANCELLED"),
        ({"COMPLETED": 2, "CANCELLED": 1, "PREEMPTED": 1}, "PREEMPTED"),
        ({"COMPLETED": 3, "TIMEOUT": 1}, "FAILED"),
        ({"CANCELLED": 4}, "CANCELLED"),
        ({"UNKNOWN": 4}, "UNKNOWN"),
    ],
)
def test_a_sweep_is_active_while_a_run_is_then_as_bad_as_its_worst(
    states: dict[str, int], whole: str
):
    assert catalog.whole(collections.Counter(states)) == whole

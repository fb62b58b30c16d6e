"""Which requeued jobs are started without Slurm's delay."""

import subprocess

import pytest

from ddp.node import slurm

JOB = "JobId=12 Priority={priority} Restarts={restarts} PreemptTime={preempted} JobState=COMPLETING"


@pytest.mark.parametrize(
    ("about", "is_ours", "states", "is_released"),
    [
        ({}, True, "idle\nidle", True),  # a time limit
        ({"preempted": "2026-11-27T14:00:00"}, False, "idle\nidle", True),
        ({}, False, "idle\ndown*", True),  # Slurm lost a node
        ({}, False, "idle\nidle", False),  # an operator's scontrol requeue
        ({"priority": 0}, True, "down\ndown", False),  # held
        ({"restarts": 1}, True, "down\ndown", False),  # cancelled, not requeued
    ],
)
def test_an_operators_requeue_is_respected(
    monkeypatch: pytest.MonkeyPatch, about: dict[str, object], is_ours: bool, states: str, is_released: bool
):
    shown = JOB.format_map({"priority": 7, "restarts": 2, "preempted": "None", **about})
    texts = {"-o show job 12": shown, "-h -N -n a,b -o %T": states, "update JobId=12 StartTime=now+5": ""}
    asked: list[str] = []

    def call(*argv: str) -> subprocess.CompletedProcess[str]:
        asked.append(" ".join(argv[1:]))
        return subprocess.CompletedProcess(argv, 0, texts[asked[-1]], "")

    monkeypatch.setattr(slurm, "call", call)
    slurm.release("12", 1, ["a", "b"], is_ours=is_ours)
    assert ("update JobId=12 StartTime=now+5" in asked) == is_released

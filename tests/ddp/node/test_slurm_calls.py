"""Which requeued jobs are started without Slurm's delay."""

import subprocess

import pytest

from ddp.node import slurm_calls

JOB = "JobId=12 Priority={priority} Restarts={restarts} JobState=COMPLETING"


@pytest.mark.parametrize(
    ("about", "is_ours", "is_released"),
    [
        ({}, True, True),  # a time limit
        ({"preempted": "2026-11-27T14:00:00"}, False, True),
        ({}, False, False),  # Slurm lost a node, or an operator's scontrol requeue
        ({"priority": 0}, True, False),  # held
        ({"restarts": 1}, True, False),  # cancelled, not requeued
    ],
)
def test_requeues_of_others_keep_slurms_delay(
    monkeypatch: pytest.MonkeyPatch, about: dict[str, object], is_ours: bool, is_released: bool
):
    facts = {"priority": 7, "restarts": 2, "preempted": "N/A", **about}
    texts = {
        "-o show job 12": JOB.format_map(facts),
        "-h -j 12 -O PreemptTime": f"{facts['preempted']}\n",
        "update JobId=12 StartTime=now+10": "",
    }
    asked: list[str] = []

    def call(*argv: str) -> subprocess.CompletedProcess[str]:
        asked.append(" ".join(argv[1:]))
        return subprocess.CompletedProcess(argv, 0, texts[asked[-1]], "")

    monkeypatch.setattr(slurm_calls, "call", call)
    slurm_calls.release("12", 1, is_ours=is_ours)
    assert ("update JobId=12 StartTime=now+10" in asked) == is_released


@pytest.mark.parametrize(("ending_s", "delay_s"), [(0.0, 10), (7.0, 10), (9.0, 15), (30.0, 15)])
def test_a_slow_end_takes_slurmd_s_next_look_into_account(
    monkeypatch: pytest.MonkeyPatch, ending_s: float, delay_s: int
):
    """From 10 s after TERM on, slurmd looks only each 10 s whether a job has ended."""
    shown = JOB.format_map({"priority": 7, "restarts": 2})
    asked: list[str] = []

    def call(*argv: str) -> subprocess.CompletedProcess[str]:
        asked.append(" ".join(argv[1:]))
        return subprocess.CompletedProcess(argv, 0, shown, "")

    monkeypatch.setattr(slurm_calls, "call", call)
    slurm_calls.release("12", 1, is_ours=True, ending_s=ending_s)
    assert asked[-1] == f"update JobId=12 StartTime=now+{delay_s}"

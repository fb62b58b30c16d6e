"""The timer that checks idle nodes: set up once, on the leader.

Drains repeated failures, not all.
"""

import dataclasses
import json
import pathlib
import typing

import pytest
from harness import Trainer

import idle_check
import program
from machine import Machine

UNIT = "trainer/0"
CONFIG = {"workspace": "/mnt/shared"}
NODE = "NodeName={name} State={state} Reason={reason} Partitions=slurmd"


def follow(*, is_wanted: bool = True) -> None:
    idle_check.follow(UNIT, "ubuntu", CONFIG, is_wanted=is_wanted)


def test_the_timer_is_set_up_once_and_removed_with_its_files(
    machine: Machine, tmp_path: pathlib.Path
):
    follow()
    assert machine.active == {idle_check.TIMER}
    assert {path.name for path in (tmp_path / "systemd").iterdir() if path.is_file()} == {
        idle_check.SERVICE,
        idle_check.TIMER,
    }
    (settings,) = (tmp_path / "idle-check").iterdir()
    assert settings.stat().st_mode & 0o777 == 0o600
    assert json.loads(settings.read_text()) == {"unit": UNIT, "user": "ubuntu", "config": CONFIG}
    machine.calls.clear()
    follow()
    assert not [call for call in machine.calls if "enable" in call], "a second time changes nothing"

    follow(is_wanted=False)
    assert machine.active == set()
    assert list((tmp_path / "idle-check").iterdir()) == []
    machine.calls.clear()
    follow(is_wanted=False)
    assert machine.calls == []


@pytest.mark.parametrize(("option", "is_active"), [(True, True), (False, False)])
def test_the_option_decides_whether_the_leader_checks(
    ready: Trainer, machine: Machine, option: bool, is_active: bool
):
    ready.config["check-idle-nodes"] = option
    ready.event("config_changed", is_leader=True)
    assert (idle_check.TIMER in machine.active) == is_active


def test_only_the_leader_checks(ready: Trainer, machine: Machine):
    ready.event("config_changed")
    assert machine.active == set()


def nodes(*records: tuple[str, str, str]) -> str:
    lines = (NODE.format(name=name, state=state, reason=why) for name, state, why in records)
    return "\n".join(lines) + "\n"


@dataclasses.dataclass
class Scontrol:
    """Nodes, and the drains that were asked for."""

    shown: str
    drained: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    def __call__(self, argv: tuple[str, ...], _: str | None) -> str:
        if argv[:2] == ("show", "nodes"):
            return self.shown
        verb, node, state, reason = argv
        assert (verb, state) == ("update", "state=drain")
        self.drained[node.removeprefix("nodename=")] = reason.removeprefix("reason=")
        return ""


@pytest.mark.parametrize(
    ("records", "unfit", "drained"),
    [
        ([("n1", "IDLE", "x"), ("n2", "IDLE", "x")], {"n1": "bad"}, {"n1": "node-check: bad"}),
        # a third of six; one is drained already
        (
            [
                ("n1", "IDLE+DRAIN", "node-check: bad"),
                *((f"n{i}", "IDLE", "x") for i in range(2, 7)),
            ],
            {"n2": "bad", "n3": "bad"},
            {"n2": "node-check: bad"},
        ),
        # an administrator's drain stays
        ([("n1", "IDLE+DRAIN", "fan"), ("n2", "IDLE", "x")], {"n1": "bad"}, {}),
        # Slurm does not know it
        ([("n1", "IDLE", "x")], {"n9": "bad"}, {}),
    ],
)
def test_unfit_nodes_are_drained_but_at_most_a_third(
    machine: Machine,
    records: list[tuple[str, str, str]],
    unfit: dict[str, str],
    drained: dict[str, str],
):
    scontrol = Scontrol(nodes(*records))
    machine.answers["scontrol"] = scontrol
    assert idle_check.drain(unfit) == list(drained)
    assert scontrol.drained == drained


def test_the_program_is_asked_as_the_submit_user_and_names_the_unfit(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[typing.Any] = []

    def ask(user: str, request: object, log: object, *, timeout_s: float) -> program.Answer:
        asked.append((user, request))
        return program.Answer({"verdict": "done", "unfit": "n1: no /dev/shm: 64 MiB\nn2: slow"})

    monkeypatch.setattr(program, "ask", ask)
    found = idle_check.check({"unit": UNIT, "user": "ubuntu", "config": CONFIG})
    assert found == {"n1": "no /dev/shm: 64 MiB", "n2": "slow"}
    request = {"do": "doctor", "params": {"idle": True}, "config": CONFIG, "unit": UNIT}
    assert asked == [("ubuntu", request)]


def test_a_program_that_fails_drains_nothing(monkeypatch: pytest.MonkeyPatch):
    def ask(*_: object, **__: object) -> program.Answer:
        return program.Answer({}, "Slurm does not answer")

    monkeypatch.setattr(program, "ask", ask)
    with pytest.raises(program.ProgramError, match="Slurm does not answer"):
        idle_check.check({"unit": UNIT, "user": "ubuntu", "config": CONFIG})

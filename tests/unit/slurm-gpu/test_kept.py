"""Holds that upstream's slurmd ends: made again at once, and no job starts in between."""

import dataclasses
import json
import time
import typing

import pytest
from conftest import WITH_GPU
from slurm_double import Record, SlurmDouble

from node import journals, kept, registration, resume, slurmd_options
from slurm_ddp.slurm import nodes

NAME = "slurmd-0"
REASON = "gpu-mig: 0000:1b:00.0: 1g.10gb"
LONG_AGO = time.clock_gettime(time.CLOCK_MONOTONIC) - 200


@pytest.fixture(autouse=True)
def node(slurm: SlurmDouble) -> SlurmDouble:
    journals.STATE_DIR.mkdir()
    slurmd_options.PATH.write_text(WITH_GPU)
    slurm.register()
    slurm.slurmd_since = LONG_AGO
    return slurm


def hold(node: SlurmDouble) -> None:
    kept.take(kept.MIG, NAME, "0000:1b:00.0: 1g.10gb")
    assert node.record is not None
    assert (node.record.reason, node.maintained) == (REASON, ["slurm-gpu-slurmd-0"])


@pytest.mark.parametrize("looks_first", ["service", "hook", "release"])
def test_upstreams_idle_starts_no_job_and_the_node_is_held_again(
    node: SlurmDouble, looks_first: str
):
    hold(node)
    node.waiting = ["7"]
    assert node.upstream_sets_idle().returncode == 0
    node.schedule()
    assert "DRAIN" not in node.state()
    assert node.jobs == [], "the reservation keeps it off"
    if looks_first == "service":
        assert kept.keep() == (journals.Ground("gpu-mig", NAME, REASON),)
    elif looks_first == "hook":
        seen = nodes.show(NAME)
        assert seen is not None
        assert kept.is_taken(seen, kept.MIG)
    assert node.record is not None
    assert looks_first == "release" or ("DRAIN" in node.state(), node.record.reason) == (
        True,
        REASON,
    )
    kept.restore()
    assert "DRAIN" not in node.state()
    assert node.maintained == []
    assert node.jobs == ["7"]
    assert kept.keep() == ()


@pytest.mark.parametrize(
    "reason", ["", resume.NEW], ids=["slurmd registered it drained", "upstream marked it down"]
)
def test_a_reason_that_others_removed_comes_back(node: SlurmDouble, reason: str):
    hold(node)
    assert node.record is not None
    if reason:
        node.upstream_sets_idle()
        node.set_down(reason)
    node.record.reason = reason
    kept.keep()
    assert ("DRAIN" in node.state(), node.record.reason) == (True, REASON)


def test_an_administrator_who_resumes_it_is_obeyed(node: SlurmDouble):
    hold(node)
    nodes.resume(NAME)
    assert kept.keep() == ()
    assert node.state() == "IDLE+DYNAMIC_NORM"
    assert node.maintained == []
    seen = nodes.show(NAME)
    assert seen is not None
    assert not kept.is_taken(seen, kept.MIG)


def test_an_administrators_own_drain_stays_and_the_node_stays_held(node: SlurmDouble):
    hold(node)
    nodes.drain(NAME, "smoke")
    assert len(kept.keep()) == 1
    assert node.record is not None
    assert node.record.reason == "smoke"
    assert node.maintained


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> typing.Callable[[float], None]:
    """Make a clock that lets so many seconds pass."""
    passed = [0.0]
    real = time.time
    monkeypatch.setattr(kept.time, "time", lambda: real() + passed[0])
    return lambda seconds: passed.__setitem__(0, passed[0] + seconds)


@pytest.mark.parametrize("age", [40, 1790, 1810, 3590])
def test_who_ends_the_reservation_has_ten_minutes_to_delete_the_node(
    node: SlurmDouble, later: typing.Callable[[float], None], age: float
):
    """As upstream does in set-node-config and after a disconnect, retried at later events."""
    hold(node)
    delete = ("/usr/bin/scontrol", "delete", f"nodename={NAME}")
    assert "are busy" in node.run(*delete, check=False).stderr
    later(age)
    node.run("/usr/bin/scontrol", "delete", f"reservationname={kept.reservation(NAME)}")
    for _ in range(59):
        assert len(kept.keep()) == 1
        assert (node.maintained, "DRAIN" in node.state()) == ([], True)
        later(10)
    later(20)
    kept.keep()
    assert node.maintained == ["slurm-gpu-slurmd-0"], "nobody used them"
    later(40)
    node.run("/usr/bin/scontrol", "delete", f"reservationname={kept.reservation(NAME)}")
    kept.keep()
    assert node.maintained == [], "another ten minutes"
    node.run(*delete)
    assert node.record is None
    node.register()
    node.slurmd_since = time.clock_gettime(time.CLOCK_MONOTONIC)
    kept.keep()
    assert (node.maintained, "DRAIN" in node.state()) == (["slurm-gpu-slurmd-0"], True), (
        "upstream is done"
    )


def test_a_reservation_that_the_nodes_state_does_not_show_yet_is_not_taken_for_ended(
    node: SlurmDouble, later: typing.Callable[[float], None], monkeypatch: pytest.MonkeyPatch
):
    hold(node)
    later(40)
    shown = nodes.show(NAME)
    assert shown is not None
    bare = dataclasses.replace(shown, flags=shown.flags - {"MAINTENANCE", "RESERVED"})
    monkeypatch.setattr(nodes, "show", lambda _: bare)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    kept.keep()
    node.maintained.clear()
    later(1800)
    kept.keep()
    assert node.maintained == [], "only now it is seen to be missing"
    later(620)
    kept.keep()
    assert node.maintained == ["slurm-gpu-slurmd-0"]


def test_a_node_without_a_record_is_left_until_it_has_one(node: SlurmDouble):
    hold(node)
    node.maintained.clear()
    node.record = None
    node.log.clear()
    assert len(kept.keep()) == 1
    assert node.log == []
    node.record = Record("gpu:mock_gpu:1")
    node.slurmd_since = time.clock_gettime(time.CLOCK_MONOTONIC)
    kept.keep()
    assert "DRAIN" in node.state()


def test_a_silent_controller_at_the_end_of_a_hold_leaves_the_reservation_to_the_service(
    node: SlurmDouble,
):
    hold(node)
    node.answering = False
    kept.end(kept.MIG)
    assert node.maintained
    node.answering = True
    assert kept.keep() == ()
    assert node.maintained == []


def test_the_reservation_lasts_until_the_last_ground_ends(node: SlurmDouble):
    kept.hold("gpu-health", NAME, "gpu-health: Xid 79")
    hold(node)
    kept.end(kept.MIG)
    assert node.maintained, "the other ground is still there"
    assert [one.kind for one in kept.grounds()] == ["gpu-health"]
    kept.end("gpu-health")
    assert node.maintained == []


def test_a_held_node_can_be_registered_again(node: SlurmDouble):
    """Slurm deletes no reserved node; ours is lifted for that, and the node comes back drained."""
    hold(node)
    options = slurmd_options.read()
    assert options is not None
    node.devices = 2
    node.waiting = ["7"]
    progress = registration.advance(registration.Target(NAME, "gpu:mock_gpu:2", options))
    assert progress.stage is registration.Stage.REGISTERED
    assert node.record is not None
    assert (node.record.gres, "DRAIN" in node.state()) == ("gpu:mock_gpu:2", True)
    assert node.jobs == []
    kept.keep()
    assert node.maintained == ["slurm-gpu-slurmd-0"]


def test_removal_leaves_no_journal_and_no_reservation(node: SlurmDouble):
    hold(node)
    kept.end_all()
    assert node.maintained == []
    assert not (journals.STATE_DIR / journals.KEPT).exists()
    kept.end_all()
    (journals.STATE_DIR / journals.KEPT).write_text('{"reservation": {"node": "slurmd-0"}}')
    node.answering = False
    kept.end_all()
    assert not (journals.STATE_DIR / journals.KEPT).exists()


def leave_former_journals() -> None:
    """Leave an earlier release's files, one per hold, on a node that waits for a reboot."""
    ground = {"kind": "gpu-mig", "node": NAME, "reason": REASON}
    reserved = {"node": NAME, "until": time.time() + 3000, "ended": False}
    found = {"node": NAME, "states": ["down"], "reason": "bad fan", "kind": "gpu-mig"}
    holds = journals.STATE_DIR / "holds"
    holds.mkdir()
    (holds / "lock").touch()
    (holds / "gpu-mig.json").write_text(json.dumps(ground))
    (holds / "reserved").write_text(json.dumps(reserved))
    former = {**found, "boot_id": "boot-0"}
    (journals.STATE_DIR / "hold.json").write_text(json.dumps(former))


def test_a_hold_of_an_earlier_release_goes_on(node: SlurmDouble):
    nodes.drain(NAME, REASON)
    node.maintained = ["slurm-gpu-slurmd-0"]
    leave_former_journals()
    taken = journals.Maintenance(NAME, ("down",), "bad fan", "gpu-mig", "boot-0")
    assert kept.maintenance() == taken
    assert kept.keep() == (journals.Ground("gpu-mig", NAME, REASON),)

    kept.renew()

    left = {path.name for path in journals.STATE_DIR.iterdir()}
    assert left == {"kept.json", "kept.lock"}
    assert kept.maintenance() == taken
    kept.restore()
    assert (node.state(), node.maintained) == ("DOWN+DYNAMIC_NORM", [])
    assert kept.keep() == ()


def test_an_upgraded_charm_replaces_the_service_that_still_runs(node: SlurmDouble):
    leave_former_journals()
    node.log.clear()
    kept.renew()
    assert node.log == []  # Slurm is not asked
    kept.renew()
    assert kept.is_held("gpu-mig")


def test_a_health_check_of_an_earlier_release_may_still_add_its_ground(node: SlurmDouble):
    hold(node)
    holds = journals.STATE_DIR / "holds"
    holds.mkdir()
    ground = {"kind": "gpu-health", "node": NAME, "reason": "gpu-health: Xid 79"}
    (holds / "gpu-health.json").write_text(json.dumps(ground))
    assert {one.kind for one in kept.keep()} == {"gpu-mig", "gpu-health"}


@pytest.mark.parametrize("damage", ["[]", "{", '{"grounds": 5}', '{"grounds": [{"kind": 5}]}'])
def test_a_damaged_journal_holds_nothing(node: SlurmDouble, damage: str):
    (journals.STATE_DIR / journals.KEPT).write_text(damage)
    assert kept.grounds() == ()
    hold(node)
    assert [one.kind for one in kept.grounds()] == ["gpu-mig"]


CHECK = "node-check: /dev/shm has 64 MiB"


def test_a_node_that_its_daily_check_drained_is_held_until_an_administrator_resumes_it(
    node: SlurmDouble,
):
    kept.adopt(NAME)
    assert kept.grounds() == (), "it takes jobs"
    nodes.drain(NAME, CHECK)
    kept.adopt(NAME)
    assert kept.grounds() == (journals.Ground(kept.CHECK, NAME, CHECK),)
    assert node.maintained == ["slurm-gpu-slurmd-0"]
    node.upstream_sets_idle()
    kept.keep()
    assert node.record is not None
    assert ("DRAIN" in node.state(), node.record.reason) == (True, CHECK)

    node.slurmd_since = LONG_AGO
    nodes.resume(NAME)
    assert kept.keep() == ()
    kept.adopt(NAME)
    assert ("DRAIN" in node.state(), node.maintained) == (False, [])


def test_a_drain_of_an_administrator_is_not_adopted(node: SlurmDouble):
    nodes.drain(NAME, "a fan")
    kept.adopt(NAME)
    assert kept.grounds() == ()

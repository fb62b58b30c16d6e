"""A node in a reservation, which Slurm would end with the node's record: named and awaited."""

import dataclasses
import pathlib

import pytest
from conftest import OPTIONS, WITH_GPU
from roles import GRES, advance, drained, leave
from slurm_double import Record, SlurmDouble

from node import journals, registration, slurmd_unit
from node.registration import Progress, Stage

pytestmark = pytest.mark.usefixtures("options")
RESERVED = "scontrol update reservationname=maint nodes=slurmd-1, or wait for the end of maint"


@pytest.mark.parametrize("found", [Record(""), Record("", "DOWN", reason="'n/a'")])
def test_a_reservation_that_holds_the_node_is_named_and_nothing_changed(
    slurm: SlurmDouble, options: pathlib.Path, found: Record
):
    slurm.record = dataclasses.replace(found, flags=set(found.flags))
    slurm.reservations = ["maint"]
    for _ in range(2):
        assert advance() == Progress(Stage.RESERVED, RESERVED)
        assert registration.inspect("slurmd-0", GRES) == Progress(Stage.RESERVED, RESERVED)
    assert (slurm.log, slurm.record, options.read_text()) == ([], found, OPTIONS)
    slurm.reservations = []
    assert advance() == Progress(Stage.REGISTERED)
    assert slurm.record == dataclasses.replace(found, gres=GRES)


def test_a_reservation_that_is_to_come_is_not_lost(slurm: SlurmDouble, options: pathlib.Path):
    slurm.record = Record("")
    slurm.to_come = ["class"]
    printed = "scontrol delete reservationname=class, or wait for the end of class"
    assert advance() == Progress(Stage.RESERVED, printed)
    assert (slurm.log, slurm.to_come, options.read_text()) == ([], ["class"], OPTIONS)
    slurm.record = Record(GRES)  # nothing is to be changed, so nothing stands in the way
    assert advance() == Progress(Stage.REGISTERED)


def test_removal_keeps_a_reserved_node_registered(
    slurm: SlurmDouble, options: pathlib.Path, caplog: pytest.LogCaptureFixture
):
    options.write_text(WITH_GPU)
    slurm.register()
    slurm.to_come = ["class"]
    leave()
    assert slurm.record == Record(GRES)
    assert slurm.to_come == ["class"]
    assert (
        "the GPUs of slurmd-0 stay in Slurm: reserved scontrol delete reservationname=class"
        in caplog.text
    )


def test_a_reservation_that_begins_while_jobs_are_waited_for(slurm: SlurmDouble):
    """Its users' jobs run, on the GPUs that the node was registered with before."""
    slurm.record = Record("")
    slurm.jobs, slurm.waiting = ["7"], ["9"]
    assert advance().stage is Stage.AWAITS_JOBS
    slurm.reservations = ["maint"]
    assert advance() == Progress(Stage.RESERVED, RESERVED)
    assert (slurm.state(), slurm.ended) == ("MIXED+DYNAMIC_NORM+RESERVED", [])
    assert journals.NodeSnapshot.load() is None


def test_a_reservation_that_only_the_deletion_shows(
    slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch
):
    def busy(name: str) -> None:
        slurm.reservations = ["maint"]
        raise registration.nodes.NodeBusy(name)

    slurm.record = drained("bad fan", "")
    monkeypatch.setattr(registration.nodes, "delete", busy)
    assert advance() == Progress(Stage.RESERVED, RESERVED)
    assert slurm.record == drained("bad fan", "")
    assert not slurmd_unit.DRAINED_ENV.exists()
    assert journals.NodeSnapshot.load() is None

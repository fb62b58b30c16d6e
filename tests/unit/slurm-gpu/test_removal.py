"""On removal, drained nodes return to work if their GPUs are right, or say who must act."""

import pathlib
import shutil

import pytest
import roles
from conftest import OPTIONS, WITH_GPU
from machines import H200S, Card, add_driver, bring_back, lose
from roles import assert_no_journal, hook
from slurm_double import Record, SlurmDouble

from maintenance import hooks
from node import compute, journals, kept, registration, slurmd_options, slurmd_unit
from slurm_ddp.slurm import nodes

GRES = "gpu:nvidia_h200:2"
LOST = "slurm-gpu: 1 of 2 GPUs found, 0000:9d:00.0 missing"
XID = "gpu-health: Xid 79: fell off the bus: reboot 0000:9d:00.0"
NAME = "slurmd-0"


def remove() -> None:
    """Remove the charm, and check that all its files were removed."""
    hooks.release()
    compute.release(owner="slurm-gpu/0")
    journals.remove_folder()
    assert not journals.STATE_DIR.exists()


def drained(reason: str) -> Record:
    return roles.drained(reason, GRES)


def test_cards_that_came_back_since(two_cards: SlurmDouble, paths: pathlib.Path):
    lose(paths, 1)
    hook()
    assert two_cards.record == drained(LOST)
    two_cards.waiting = ["7"]
    bring_back(paths)
    remove()
    assert (two_cards.record, two_cards.jobs) == (Record(GRES), ["7"])


def test_removal_keeps_a_node_with_lost_cards_drained(
    two_cards: SlurmDouble, paths: pathlib.Path, caplog: pytest.LogCaptureFixture
):
    lose(paths, 1)
    hook()
    two_cards.waiting = ["7"]
    remove()
    assert (two_cards.record, two_cards.waiting) == (drained(LOST), ["7"])
    bring_back(paths)
    hook()  # the charm is back, and knows its own reason
    assert two_cards.record == Record(GRES)


def test_a_slurm_that_needed_the_lines_goes_on_without_gpus(
    slurm: SlurmDouble, paths: pathlib.Path
):
    """Without its lines the node loses all cards, the lost ones too: nothing stays wrong."""
    slurmd_unit.PUSHED.write_text("")  # a controller's gres.conf without AutoDetect
    for minor in range(2):
        (paths / f"dev/nvidia{minor}").touch()
    for lost in ((), (1,), (0, 1)):
        shutil.rmtree(paths / "proc/driver", ignore_errors=True)
        (paths / "proc/driver").mkdir()
        add_driver(paths, H200S)
        slurm.devices = 2
        slurmd_options.PATH.write_text(OPTIONS)
        slurm.record = None
        slurm.register()
        hook(roles.live())
        assert slurm.record == Record(GRES)
        lose(paths, *lost)
        hook(roles.OFF)
        assert slurm.record is not None
        assert slurm.record.reason.startswith("slurm-gpu: ") == bool(lost)
        remove()
        assert slurm.record == Record("")
        assert slurmd_options.PATH.read_text() == OPTIONS


def test_an_unfit_node_stays_drained(two_cards: SlurmDouble):
    """Its cards are no longer checked."""
    two_cards.record = drained(XID)
    remove()
    assert two_cards.record == drained(XID)


@pytest.mark.parametrize("reason", ["bad fan", "replaced by ops, see slurm-gpu: 1", ""])
@pytest.mark.parametrize("flag", ["DRAIN", "FAIL"])
def test_removal_leaves_an_administrators_order(
    two_cards: SlurmDouble, paths: pathlib.Path, reason: str, flag: str
):
    two_cards.record = Record(GRES, flags={"DYNAMIC_NORM", flag}, reason=reason)
    remove()
    assert two_cards.record == Record(GRES, flags={"DYNAMIC_NORM", flag}, reason=reason)


def test_a_node_that_waits_for_its_jobs_is_put_back(two_cards: SlurmDouble, paths: pathlib.Path):
    """A card was added; the node is drained until its jobs end, which this charm will not see."""
    add_driver(paths, [Card("NVIDIA H200", "0000:c1:00.0")], minors=[2])
    (paths / "dev/nvidia2").touch()
    two_cards.jobs = ["7"]
    hook()
    assert two_cards.record == drained(registration.REASON)
    remove()
    assert two_cards.record == Record(GRES)
    assert (two_cards.jobs, two_cards.ended) == (["7"], [])
    assert_no_journal()


def test_removal_keeps_a_node_with_a_broken_driver_drained(
    two_cards: SlurmDouble, paths: pathlib.Path, caplog: pytest.LogCaptureFixture
):
    """After a failed upgrade, the charm's hold goes with it, but the fault keeps jobs away."""
    kept.take(kept.DRIVER, NAME, "failed: no reboot")
    lose(paths, 0, 1)
    remove()
    assert two_cards.record is not None
    assert "DRAIN" in two_cards.record.flags
    assert (
        two_cards.record.reason
        == "slurm-gpu: 0 of 2 GPUs found, 0000:1b:00.0, 0000:9d:00.0 missing"
    )
    assert kept.maintenance() is None


def test_a_refused_registration_stays_out(two_cards: SlurmDouble, paths: pathlib.Path):
    two_cards.devices = 1  # slurmd finds fewer than the driver
    two_cards.register()
    reason = "gres/gpu count reported lower than configured (1 < 2)"
    shown = GRES.replace(":2", ":1")  # what slurmd reported
    assert two_cards.record == Record(
        shown, flags={"DYNAMIC_NORM", "DRAIN", "INVALID_REG"}, reason=reason
    )
    remove()
    assert two_cards.record is not None
    assert two_cards.record.reason == reason
    assert "DRAIN" in two_cards.record.flags


def test_removal_reports_a_silent_controller(
    two_cards: SlurmDouble, paths: pathlib.Path, caplog: pytest.LogCaptureFixture
):
    lose(paths, 1)
    hook()
    journals.write_kept(journals.Kept(maintenance=journals.Maintenance(NAME, kind=kept.RESET)))
    two_cards.answering = False
    remove()
    assert "slurmd-0 may stay drained, see sinfo -R" in caplog.text
    assert "this node stays drained, see sinfo -R" in caplog.text
    assert_no_journal()


def test_a_node_that_cannot_be_registered_again_keeps_its_options(slurm: SlurmDouble):
    """A slurmd that reports less than its record is refused at its next start, for good."""
    slurmd_options.PATH.write_text(WITH_GPU)
    slurm.register()
    slurm.jobs = ["7"]
    roles.leave()
    assert slurmd_options.PATH.read_text() == WITH_GPU
    slurm.end_jobs()
    slurm.register()
    assert (slurm.record, slurm.state()) == (Record(roles.GRES), "IDLE+DYNAMIC_NORM")


def test_a_node_that_is_busy_at_the_last_moment_keeps_its_options(
    slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch
):
    def refuses(name: str) -> None:
        raise nodes.NodeBusy(f"delete node {name}: Requested nodes are busy")

    slurmd_options.PATH.write_text(WITH_GPU)
    slurm.register()
    monkeypatch.setattr(nodes, "delete", refuses)
    roles.leave()
    assert slurm.record is not None
    assert (slurmd_options.PATH.read_text(), slurm.record.gres) == (WITH_GPU, roles.GRES)


def test_a_node_that_others_deleted_is_not_registered_again(slurm: SlurmDouble):
    """latest/edge's slurmctld deletes a departing unit's node.

    A slurmd restart would restore it.
    """
    slurmd_options.PATH.write_text(WITH_GPU)
    roles.leave()
    assert (slurm.record, slurm.log) == (None, [])
    assert "gres=" not in slurmd_options.PATH.read_text()


def test_leaving_without_a_controller(slurm: SlurmDouble, caplog: pytest.LogCaptureFixture):
    slurmd_options.PATH.write_text(OPTIONS)
    slurm.record, slurm.jobs = Record(""), ["7"]
    roles.advance()
    assert journals.NodeSnapshot.load() is not None
    slurm.answering = False
    roles.leave()
    assert "the GPUs of slurmd-0 stay in Slurm" in caplog.text
    assert journals.NodeSnapshot.load() is None

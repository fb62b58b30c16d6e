"""Which nodes are let take jobs: new ones and rebooted ones whose checks pass, and no other."""

import dataclasses
import pathlib

import pytest
import roles
from conftest import OPTIONS, WITH_GPU
from roles import stamp
from slurm_double import SlurmDouble

import settings
from node import journals, resume, slurmd_options
from node import watch as node_watch
from slurm_ddp import readiness
from slurm_ddp.charm import Level, Status

ACTIVE = Status(
    Level.ACTIVE,
    "gpu:mock_gpu:1 on slurmd-0 (from /proc/driver/nvidia; found by AutoDetect=nvidia)",
)
CLIENT = "shared-filesystem-client/0"
pytestmark = pytest.mark.usefixtures("uptime")


@pytest.fixture
def node(slurm: SlurmDouble, mock_gpu: pathlib.Path) -> SlurmDouble:
    """A registered node of Slurm 25.11 that works since long ago."""
    slurmd_options.PATH.write_text(WITH_GPU)
    slurm.booted = stamp(-86400)
    slurm.register()
    assert hook() == ACTIVE
    slurm.log.clear()
    return slurm


def reboot(node: SlurmDouble) -> None:
    resume.UPTIME.write_text("60.00 100.00\n")
    node.booted = stamp(-60)
    node.register()


def hook(**options: object) -> Status:
    """Run a hook, the service, and the hook that the first one asks for."""
    config = settings.Config(**options)  # pyright: ignore[reportArgumentType]
    node_watch.ensure(node_watch.Config(node="slurmd-0", **dataclasses.asdict(config)))
    roles.hook(config=config)
    node_watch.Watch().step()
    return roles.hook(config=config)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("down", "bad memory"),
        ("down", "Node unexpectedly rebooted, says who"),
        ("down", "'n/a'"),
        ("down", "slurmctld restarted"),
        ("drain", "Node unexpectedly rebooted"),
        ("fail", "Node unexpectedly rebooted"),
    ],
)
def test_states_that_people_ordered_stay(node: SlurmDouble, state: str, reason: str):
    node.run(
        "/usr/bin/scontrol", "update", "nodename=slurmd-0", f"state={state}", f"reason={reason}"
    )
    before = node.state()
    node.log.clear()
    hook()
    assert node.state() == before
    assert node.log == []


def test_a_long_boot_looks_like_a_node_that_does_not_answer(node: SlurmDouble):
    reboot(node)
    node.set_down("Not responding", f"slurm@{stamp(-200)}")
    assert hook() == ACTIVE
    assert node.state() == "IDLE+DYNAMIC_NORM"


def test_a_node_that_was_cut_off_and_not_rebooted_stays_down(node: SlurmDouble):
    node.set_down("Not responding", f"slurm@{stamp(-200)}")
    hook()
    assert node.state() == "DOWN+DYNAMIC_NORM"


@pytest.mark.parametrize(
    "started_s", [None, -300, -60]
)  # slurmd: not known, before the state was set, after that
@pytest.mark.parametrize("is_served", [False, True])
def test_a_node_is_new_by_upstreams_order_and_not_by_an_operators(
    slurm: SlurmDouble, mock_gpu: pathlib.Path, started_s: int | None, is_served: bool
):
    """set-node-state writes a new node's reason.

    Upstream's charm sets it right after slurmd's start.
    """
    slurmd_options.PATH.write_text(WITH_GPU)
    slurm.register()
    if is_served:
        hook()
    slurm.set_down(resume.NEW, f"root@{stamp(-100)}")
    slurm.started = "None" if started_s is None else stamp(started_s)
    hook(resume_when_ready=True)
    is_operators = is_served or started_s == -300
    assert slurm.state() == ("DOWN" if is_operators else "IDLE") + "+DYNAMIC_NORM"


@pytest.mark.parametrize("is_back", [False, True])  # its relation was removed and made again
def test_a_new_node_is_resumed_only_where_that_is_asked_for(node: SlurmDouble, is_back: bool):
    if is_back:
        node.started = stamp(-60)
    else:
        journals.clear(journals.SERVED)
    node.set_down(resume.NEW, f"root@{stamp(-55)}")
    typed = "scontrol update nodename=slurmd-0 state=resume"
    assert hook() == Status(Level.BLOCKED, f"{typed}, since it takes no jobs: down ('n/a')")
    assert node.state() == "DOWN+DYNAMIC_NORM"
    readiness.tell(CLIENT, ready=False)
    assert hook(resume_when_ready=True) == Status(
        Level.WAITING, f"slurmd-0 is new and takes no jobs yet: waiting for {CLIENT}"
    )
    readiness.tell(CLIENT, ready=True)
    assert hook(resume_when_ready=True) == ACTIVE
    assert node.state() == "IDLE+DYNAMIC_NORM"
    assert node.log == ["/usr/bin/scontrol update nodename=slurmd-0 state=resume"]


def test_a_new_node_waits_for_its_gpus(slurm: SlurmDouble, mock_gpu: pathlib.Path):
    """Upstream registers it down, without GPUs.

    It is registered again, still down, then resumed.
    """
    slurmd_options.PATH.write_text(OPTIONS)
    slurm.register()
    slurm.set_down(resume.NEW, "root@2026-11-20T18:51:55")
    slurm.waiting = ["7"]
    assert hook(resume_when_ready=True) == ACTIVE
    assert slurm.record is not None
    assert slurm.record.gres == "gpu:mock_gpu:1"
    assert slurm.jobs == ["7"]
    assert [order.split()[1:] for order in slurm.log if "state=resume" in order] == [
        ["update", "nodename=slurmd-0", "state=resume"]
    ]


REBOOTED = resume.Held("was rebooted")


def test_a_reason_that_changed_during_the_checks_counts(node: SlurmDouble):
    reboot(node)
    node.set_down("smoke in the rack", "root@2026-11-20T18:51:55")
    node.log.clear()
    assert resume.ensure("slurmd-0", settings.Config(), REBOOTED) is None
    assert node.log == []
    assert node.state() == "DOWN+DYNAMIC_NORM"


def test_a_refused_registration_is_not_resumed(node: SlurmDouble):
    reboot(node)
    assert node.record is not None
    node.record.flags.add("INVALID_REG")
    node.log.clear()
    found = resume.ensure("slurmd-0", settings.Config(), REBOOTED)
    assert found == dataclasses.replace(REBOOTED, lacks=("slurmd to register it",))
    assert node.log == []

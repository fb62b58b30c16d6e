"""What happens on a node without Juju: a rebooted one takes jobs, a hold is kept up."""

import pathlib
import subprocess
import sys

import pytest
from conftest import WITH_GPU
from roles import stamp
from slurm_double import SlurmDouble

from node import health_timer, journals, kept, slurmd_options
from node import watch as node_watch
from slurm_ddp import readiness, systemd
from slurm_ddp.commands import Completed
from slurm_ddp.slurm import nodes

NAME, CLIENT = "slurmd-0", "shared-filesystem-client/2"
RESUMED = "/usr/bin/scontrol update nodename=slurmd-0 state=resume"
SOURCES = pathlib.Path(node_watch.__file__).parents[1]
LIBRARY = pathlib.Path(readiness.__file__).parents[1]


@pytest.fixture
def node(slurm: SlurmDouble, mock_gpu: pathlib.Path, uptime: pathlib.Path) -> SlurmDouble:
    """A node that worked, and whose machine was rebooted; slurmd has not registered yet."""
    slurmd_options.PATH.write_text(WITH_GPU)
    uptime.write_text("60.00 100.00\n")
    slurm.booted = stamp(-86400)
    slurm.register()
    slurm.booted = stamp(-60)
    configure()
    slurm.log.clear()
    (journals.STATE_DIR / journals.CARDS).write_text('{"0000:01:00.0": "Mock GPU"}')
    return slurm


def configure(**changes: object) -> None:
    node_watch.ensure(node_watch.Config(node=NAME, **{"health_check": "never"} | changes))  # pyright: ignore[reportArgumentType]


def passes(watch: node_watch.Watch, most: int) -> list[float | None]:
    """Run the service for so many passes at most; time goes on as it says."""
    waits: list[float | None] = []
    for _ in range(most):
        waits.append(watch.step())
        if waits[-1] is None:
            break
        nodes.time.sleep(waits[-1])
    return waits


def test_a_rebooted_node_takes_jobs_as_soon_as_slurmd_registered(node: SlurmDouble):
    watch = node_watch.Watch()
    readiness.tell(CLIENT, ready=True)
    assert passes(watch, 3) == [10.0] * 3, "slurmd has not registered in this boot"
    node.register()
    node.waiting = ["7"]
    assert node.state() == "DOWN+DYNAMIC_NORM"
    assert passes(watch, 1) == [None]
    assert node.log == [RESUMED]
    assert node.jobs == ["7"]


@pytest.fixture
def asked(node: SlurmDouble, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return when the controller was asked."""
    times: list[float] = []

    def run(*argv: str, **more: object) -> Completed:
        times.append(nodes.time.monotonic())
        return node.run(*argv, **more)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(nodes, "run", run)
    return times


def test_it_waits_for_the_mount_without_asking_the_controller(
    node: SlurmDouble, asked: list[float]
):
    readiness.tell(CLIENT, ready=False, detail="not checked since this boot")
    node.register()
    watch = node_watch.Watch()
    assert passes(watch, 300) == [1.0] * 300, "five minutes, in which no hook runs"
    assert node.log == []
    assert len(asked) < 5
    readiness.tell(CLIENT, ready=False, detail="waiting for redis")
    assert passes(watch, 300) == [1.0] * 300
    assert len(asked) < 10
    readiness.tell(CLIENT, ready=True)
    assert watch.step() is None
    assert node.log == [RESUMED]


def test_a_node_that_shows_other_gpus_stays_down(node: SlurmDouble, paths: pathlib.Path):
    node.register()
    (paths / "proc/driver/nvidia/gpus/0000:01:00.0").rename(paths / "gone")
    watch = node_watch.Watch()
    assert passes(watch, 1) == [10.0]
    assert node.log == []
    (paths / "gone").rename(paths / "proc/driver/nvidia/gpus/0000:01:00.0")
    slurmd_options.PATH.write_text(WITH_GPU.replace("mock_gpu:1", "mock_gpu:2"))
    nodes.time.sleep(1)
    assert watch.step() == 10.0
    slurmd_options.PATH.write_text(WITH_GPU)
    nodes.time.sleep(11)
    assert watch.step() is None
    assert node.log == [RESUMED]


def test_unfit_cards_keep_it_down_and_are_looked_at_again(
    node: SlurmDouble, monkeypatch: pytest.MonkeyPatch
):
    complaints = [["fell off the bus"], []]
    monkeypatch.setattr(health_timer, "unfit", lambda *_, **__: complaints.pop(0))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    configure(health_check="auto")
    node.register()
    watch = node_watch.Watch()
    assert passes(watch, 2) == [60.0, None]
    assert node.log == [RESUMED]


@pytest.mark.parametrize(
    ("journal", "text"),
    [
        (journals.REGISTRATION, "{}"),
        (journals.KEPT, '{"maintenance": {"node": "slurmd-0", "kind": "gpu-mig"}}'),
    ],
)
def test_what_a_hook_has_started_is_left_to_hooks(node: SlurmDouble, journal: str, text: str):
    (journals.STATE_DIR / journal).write_text(text)
    node.register()
    assert passes(node_watch.Watch(), 1) == [None]
    assert node.log == []


def test_a_silent_controller_is_asked_again(node: SlurmDouble):
    node.answering = False
    assert passes(node_watch.Watch(), 2) == [10.0] * 2


def test_a_hold_is_kept_up_for_as_long_as_it_lasts(node: SlurmDouble):
    configure(resume_after_reboot=False)
    kept.take(kept.RESET, NAME, "all")
    watch = node_watch.Watch()
    assert watch.step() == 5.0
    node.waiting = ["7"]
    node.upstream_sets_idle()
    assert watch.step() == 5.0
    assert ("DRAIN" in node.state(), node.jobs) == (True, [])
    kept.restore()
    assert watch.step() is None
    assert node.jobs == ["7"]


def test_the_service_and_its_path_unit_run_from_the_charms_folder(node: SlurmDouble):
    service = (systemd.UNIT_DIR / node_watch.UNIT).read_text()
    assert f"ExecStart=/usr/bin/python3 -s -B {SOURCES}/node/watch.py\n" in service
    assert f"Environment=PYTHONPATH={SOURCES}:{LIBRARY}\n" in service
    assert f"ConditionPathExists={SOURCES}/node/watch.py\n" in service, (
        "harmless where the charm was removed"
    )
    assert (
        f"PathChanged={readiness.DIRECTORY}\n"
        in (systemd.UNIT_DIR / node_watch.PATH_UNIT).read_text()
    )
    node.log.clear()
    configure()
    assert node.log == [], "nothing changes the second time"
    node_watch.ensure_absent()
    assert not list(systemd.UNIT_DIR.glob("slurm-gpu-node*"))
    assert not node_watch.CONFIG.exists()


def test_the_service_runs_with_the_standard_library_alone(tmp_path: pathlib.Path):
    code = "import node.watch, sys; print([m for m in ('pydantic', 'ops', 'yaml') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-S", "-s", "-c", code],
        env={"PYTHONPATH": f"{SOURCES}:{LIBRARY}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"

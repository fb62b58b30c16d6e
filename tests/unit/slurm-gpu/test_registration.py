"""The state machine that registers GPUs: any state, any interruption, and no job is ended."""

import dataclasses
import itertools
import pathlib
import time

import pytest
from conftest import OPTIONS, WITH_GPU
from roles import GRES, advance, assert_no_journal, drained
from slurm_double import SHORT_OF_GPUS, Killed, Record, SlurmDouble

import settings
from node import journals, registration, resume, slurmd_options, slurmd_unit
from node.registration import Progress, Stage
from slurm_ddp.slurm import nodes

INVALID = "IDLE+DRAIN+DYNAMIC_NORM+INVALID_REG"


pytestmark = pytest.mark.usefixtures("options")


def test_a_node_that_is_not_registered_yet_is_not_restarted_for_nothing(
    slurm: SlurmDouble, options: pathlib.Path
):
    slurm.slurmd_active = False
    assert advance().stage is Stage.UNREGISTERED
    assert options.read_text() == WITH_GPU
    assert slurm.log == []


def test_a_slurmd_that_has_not_registered_yet_is_restarted_with_the_new_options(slurm: SlurmDouble):
    assert advance() == Progress(Stage.REGISTERED)
    assert slurm.log == ["restart slurmd.service"]
    assert slurm.record == Record(GRES)


def test_an_idle_node(slurm: SlurmDouble, options: pathlib.Path):
    slurm.record = Record("")
    assert advance() == Progress(Stage.REGISTERED)
    assert options.read_text() == WITH_GPU
    assert slurm.log == [
        "/usr/bin/scontrol update nodename=slurmd-0 state=drain 'reason=slurm-gpu: registering GPUs'",
        "/usr/bin/scontrol delete nodename=slurmd-0",
        "restart slurmd.service",
    ]
    assert slurm.record == Record(GRES)
    assert_no_journal()


def test_lines_that_are_not_live_leave_everything_alone(slurm: SlurmDouble, options: pathlib.Path):
    for record in (Record(""), None):
        slurm.record = record
        assert advance(lines_live=False).stage is Stage.AWAITS_LINES
    slurm.answering = False
    assert advance(lines_live=False).stage is Stage.SILENT
    assert slurm.log == []
    assert options.read_text() == OPTIONS


def test_running_jobs_are_waited_for_over_events(slurm: SlurmDouble, options: pathlib.Path):
    slurm.record = Record("")
    slurm.jobs = ["7", "9"]
    slurm.waiting = ["11"]
    for _ in range(2):
        assert advance() == Progress(Stage.AWAITS_JOBS, "2 jobs")
    assert registration.inspect("slurmd-0", GRES) == Progress(Stage.AWAITS_JOBS, "2 jobs")
    assert slurm.log == [
        "/usr/bin/scontrol update nodename=slurmd-0 state=drain 'reason=slurm-gpu: registering GPUs'"
    ]
    assert options.read_text() == OPTIONS
    slurm.jobs = ["9"]
    assert advance() == Progress(Stage.AWAITS_JOBS, "1 job")
    slurm.end_jobs()
    assert advance() == Progress(Stage.REGISTERED)
    assert slurm.record == Record(GRES)
    assert (slurm.ended, slurm.jobs, slurm.waiting) == ([], ["11"], [])


def test_a_job_that_is_being_cleaned_up_is_waited_for(
    slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch
):
    def busy(name: str) -> None:
        raise registration.nodes.NodeBusy(name)

    slurm.record = Record("")
    monkeypatch.setattr(registration.nodes, "delete", busy)
    assert advance() == Progress(Stage.AWAITS_JOBS, "a finishing job")


FOUND = {
    "idle": Record(""),
    "down by upstream": Record("", base="DOWN", reason="slurmd: not ready"),
    "drained by an administrator": drained("bad fan", ""),
    "down and drained": Record("", base="DOWN", flags={"DYNAMIC_NORM", "DRAIN"}, reason="bad fan"),
    "down and failing": Record("", base="DOWN", flags={"DYNAMIC_NORM", "FAIL"}, reason="bad disk"),
    "failing": Record("", flags={"DYNAMIC_NORM", "FAIL"}, reason="bad disk"),
}


def was_killed(slurm: SlurmDouble, found: str, lives: int) -> bool:
    """Run a hook that dies after so many commands in this state; return whether it did."""
    slurmd_options.PATH.write_text(OPTIONS)
    slurm.record = dataclasses.replace(FOUND[found], flags=set(FOUND[found].flags))
    slurm.log, slurm.lives = [], lives
    try:
        advance()
    except Killed:
        return True
    slurm.lives = None
    return False


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("jobs", [[], ["7"]], ids=["free", "busy"])
def test_the_hook_may_end_at_any_command(slurm: SlurmDouble, found: str, jobs: list[str]):
    """Kill the hook after 0, 1, 2, ... commands until one run passes.

    Later events finish the work.
    """
    for lives in itertools.count():
        slurm.jobs = list(jobs)
        killed = was_killed(slurm, found, lives)
        advance()
        slurm.end_jobs()
        assert advance() == Progress(Stage.REGISTERED), f"killed after {lives} commands"
        assert slurm.record == dataclasses.replace(FOUND[found], gres=GRES), (
            f"killed after {lives} commands"
        )
        assert slurm.ended == []
        assert_no_journal()
        slurm.log.clear()
        assert advance() == Progress(Stage.REGISTERED)
        assert slurm.log == []
        if not killed:
            return
        assert lives < 40, "the hook never came to its end"


@pytest.mark.parametrize("found", FOUND)
def test_a_reboot_at_any_command(slurm: SlurmDouble, found: str):
    """The machine loses power after 0, 1, 2, ... commands, and slurmd registers before any hook.

    A node that was to take no jobs takes none, not even between slurmd's start and the next hook.
    """
    for lives in itertools.count():
        slurm.jobs, slurm.waiting = [], ["9"]
        slurm.boot_time = slurm.booted = "None"
        killed = was_killed(slurm, found, lives)
        if killed:
            slurm.reboot()
        assert found == "idle" or slurm.waiting == ["9"], f"killed after {lives} commands"
        registration.refresh_drained_start()
        advance()
        assert slurm.record is not None
        assert slurm.record.gres == GRES
        if found != "idle":
            now, was = slurm.record, FOUND[found]
            assert (now.flags, now.reason) == (was.flags, was.reason), (
                f"killed after {lives} commands"
            )
            assert now.base in {was.base, "DOWN"}  # as Slurm marks a node that was rebooted
            assert slurm.waiting == ["9"]
        assert_no_journal()
        if not killed:
            return
        assert lives < 40, "the hook never came to its end"


def test_options_that_are_held_follow_those_of_slurmds_charm(
    slurm: SlurmDouble, options: pathlib.Path
):
    journals.NodeSnapshot("slurmd-0", ("drain",), "bad fan").save()
    registration.refresh_drained_start()
    assert not slurmd_unit.DRAINED_ENV.exists(), "none was due"
    slurmd_unit.DRAINED_ENV.write_text("SLURMD_OPTIONS=old\n")
    registration.refresh_drained_start()
    assert "--conf-server ctl:6817" in slurmd_unit.DRAINED_ENV.read_text()
    assert "state=drain" in slurmd_unit.DRAINED_ENV.read_text()
    options.write_text("SLURMD_OPTIONS=-Z\n")  # nothing that can be held
    registration.refresh_drained_start()
    assert not slurmd_unit.DRAINED_ENV.exists()
    slurmd_unit.DRAINED_ENV.write_text("SLURMD_OPTIONS=old\n")
    journals.clear(journals.REGISTRATION)
    registration.refresh_drained_start()
    assert not slurmd_unit.DRAINED_ENV.exists()


LEFT_BEHIND = (
    "gres/gpu count reported lower than configured (0 < 1)",
    "gres/gpu:h100 count too low (1 < 2)",
    "gres/gpu type (x) reported but not configured",
    "gres/gpu count changed and jobs are using them (1 != 2)",
    "gres/gpu GRES core specification 0 for node n0 doesn't match socket boundaries. (Socket 0 is cores 0-1)",
    "gres/gpu GRES autodetected core affinity 0-1 on node n0 doesn't match socket boundaries. (Socket 0 is cores 0-3)",
    "Invalid GRES Links value (0,-1) on node n0: i=1 >= link_len=1.",
    "slurm-gpu: registering GPUs",
)
OTHERS = ("bad fan", "gres/gpu card 3 is broken, ticket 7", "please look at slurm-gpu: odd", "")


@pytest.mark.parametrize("reason", LEFT_BEHIND + OTHERS)
def test_just_a_drain_that_slurm_or_we_left_behind_ends(slurm: SlurmDouble, reason: str):
    slurm.record = drained(reason)
    assert advance() == Progress(Stage.REGISTERED)
    assert slurm.record == (drained(reason) if reason in OTHERS else Record(GRES))
    assert ("update" in "".join(slurm.log)) == (reason in LEFT_BEHIND)


@pytest.fixture
def without_devices(slurm: SlurmDouble, options: pathlib.Path) -> SlurmDouble:
    """A node that registered before its devices were there."""
    options.write_text(WITH_GPU)
    slurm.devices = 0
    slurm.register()
    assert slurm.state() == INVALID
    return slurm


def test_a_node_that_registered_before_its_devices_were_there(without_devices: SlurmDouble):
    slurm = without_devices
    assert advance(lines_live=False).stage is Stage.AWAITS_LINES
    assert slurm.log == []
    slurm.devices = 1
    assert advance() == Progress(Stage.REGISTERED)
    assert slurm.record == Record(GRES)
    assert slurm.log == [
        "restart slurmd.service",
        "/usr/bin/scontrol update nodename=slurmd-0 state=resume",
    ]


def test_a_node_whose_devices_stay_away(without_devices: SlurmDouble):
    without_devices.jobs = ["7"]
    assert advance() == Progress(Stage.INVALID, SHORT_OF_GPUS.format(found=0, wanted=1))
    assert without_devices.log == [], "not restarted under its jobs"
    without_devices.end_jobs()
    assert advance().stage is Stage.INVALID
    assert without_devices.state() == INVALID
    assert without_devices.log == ["restart slurmd.service"]


def test_a_record_that_holds_more_than_it_shows_is_made_again(
    slurm: SlurmDouble, options: pathlib.Path
):
    """Slurm 24.11, after one of two cards was given up."""
    options.write_text(WITH_GPU.replace(GRES, GRES.replace(":1", ":2")))
    slurm.devices = 2
    slurm.register()
    slurm.devices = 1
    slurm.register()
    assert slurm.record == Record(
        GRES,
        flags={"DYNAMIC_NORM", "DRAIN", "INVALID_REG"},
        reason=SHORT_OF_GPUS.format(found=1, wanted=2),
    )
    slurm.jobs = ["7"]
    assert advance().stage is Stage.AWAITS_JOBS
    slurm.end_jobs()
    assert advance() == Progress(Stage.REGISTERED)
    assert slurm.record == Record(GRES)
    assert any("scontrol delete" in line for line in slurm.log)


def test_an_administrators_drain_survives_a_node_that_was_invalid(
    slurm: SlurmDouble, options: pathlib.Path
):
    options.write_text(WITH_GPU)
    slurm.register()
    assert slurm.record is not None
    slurm.record.flags.add("DRAIN")
    slurm.record.reason = "bad fan"
    assert advance() == Progress(Stage.REGISTERED)
    slurm.devices = 0
    slurm.register()
    reason = SHORT_OF_GPUS.format(found=0, wanted=1)
    assert advance() == Progress(Stage.INVALID, reason), (
        "Slurm's reason takes the place of the administrator's"
    )
    slurm.devices = 1
    slurm.register()
    assert advance() == Progress(Stage.REGISTERED)
    assert slurm.record == drained("bad fan")


def test_options_that_lag_behind_the_registration_are_brought_up(
    slurm: SlurmDouble, options: pathlib.Path
):
    slurm.record = Record(GRES)
    assert advance() == Progress(Stage.REGISTERED)
    assert options.read_text() == WITH_GPU
    assert slurm.log == []


def test_a_slurmd_that_does_not_come_back(slurm: SlurmDouble):
    slurm.record = Record("")
    slurm.registers = False
    assert advance() == Progress(Stage.FAILED, "slurmd did not register slurmd-0 again within 30 s")
    slurm.registers = True
    assert advance() == Progress(Stage.REGISTERED)
    assert slurm.record == Record(GRES)


def test_a_slurmd_that_upstream_stopped_stays_stopped(slurm: SlurmDouble, options: pathlib.Path):
    journals.NodeSnapshot("slurmd-0", ("drain",), "bad fan").save()
    options.write_text(OPTIONS.replace(" --conf-server ctl:6817", ""))
    slurm.slurmd_active = False
    assert advance().stage is Stage.UNREGISTERED
    assert not slurm.slurmd_active


def test_a_silent_controller(slurm: SlurmDouble, options: pathlib.Path):
    slurm.record = Record("")
    slurm.answering = False
    slurmd_unit.DRAINED_ENV.parent.mkdir(parents=True, exist_ok=True)
    slurmd_unit.DRAINED_ENV.write_text("left by a hook that was interrupted")
    printed = (
        "show node slurmd-0: slurm_x error: Unable to contact slurm controller (connect failure)"
    )
    assert advance() == Progress(Stage.SILENT, printed)
    assert options.read_text() == WITH_GPU
    assert not slurmd_unit.DRAINED_ENV.exists()
    assert slurm.log == []


@pytest.mark.parametrize(
    "text", [None, "SLURMD_OPTIONS=-Z -N slurmd-0\n"], ids=["removed", "without --conf"]
)
def test_options_that_change_while_the_controller_is_silent_are_an_error_in_words(
    slurm: SlurmDouble, options: pathlib.Path, text: str | None
):
    good = slurmd_options.read()
    assert good is not None
    slurm.record, slurm.answering = Record(""), False
    options.unlink() if text is None else options.write_text(text)
    progress = registration.advance(registration.Target("slurmd-0", GRES, good))
    assert progress.stage is Stage.FAILED
    assert progress.detail.startswith(f"{slurmd_options.PATH}: ")


def test_a_journal_of_another_node_is_dropped(slurm: SlurmDouble):
    journals.NodeSnapshot("other-0", ("down",), "x").save()
    slurm.record = Record(GRES)
    assert advance() == Progress(Stage.REGISTERED)
    assert journals.NodeSnapshot.load() is None
    assert slurm.record == Record(GRES)


@pytest.mark.parametrize(
    ("record", "progress"),
    [
        (None, Progress(Stage.UNREGISTERED)),
        (Record(""), Progress(Stage.DIFFERS, "(none)")),
        (Record(GRES), Progress(Stage.REGISTERED, "IDLE+DYNAMIC_NORM")),
        (Record(GRES, flags={"INVALID_REG", "DRAIN"}, reason="x"), Progress(Stage.INVALID, "x")),
        (Record(GRES, "DOWN", reason="bad fan"), Progress(Stage.KEPT_AWAY, "down (bad fan)")),
        (drained(""), Progress(Stage.KEPT_AWAY, "drained (no reason given)")),
        (
            Record(GRES, flags={"FAIL"}, reason="bad disk"),
            Progress(Stage.KEPT_AWAY, "failing (bad disk)"),
        ),
        (
            Record(GRES, "DOWN", reason=resume.REBOOTED),
            Progress(Stage.KEPT, "was rebooted and takes no jobs yet"),
        ),
        (Record(GRES, "DOWN", reason=resume.NEW), Progress(Stage.KEPT_AWAY, "down ('n/a')")),
    ],
)
def test_inspecting_changes_nothing(slurm: SlurmDouble, record: Record | None, progress: Progress):
    slurm.record = record
    assert registration.inspect("slurmd-0", GRES, settings.Config()) == progress
    slurm.slurmd_active = False
    stopped = record is not None and record.gres == GRES and progress.stage is not Stage.INVALID
    assert registration.inspect("slurmd-0", GRES) == (
        Progress(Stage.STOPPED) if stopped else progress
    )
    assert slurm.log == []


def test_inspecting_when_the_controller_fails(monkeypatch: pytest.MonkeyPatch):
    def fail(name: str) -> None:
        raise nodes.NodeError(f"show node {name}: Unspecified error")

    monkeypatch.setattr(nodes, "show", fail)
    failed = Progress(Stage.FAILED, "show node slurmd-0: Unspecified error")
    assert registration.inspect("slurmd-0", GRES) == failed
    assert registration.drain_for_loss("slurmd-0", "1 of 2 GPUs found") == failed


def test_an_order_that_has_ended_is_forgotten(slurm: SlurmDouble):
    slurm.record = drained("bad fan")
    advance()
    assert journals.NodeSnapshot.load(journals.ORDER) is not None
    nodes.resume("slurmd-0")
    advance()
    assert journals.NodeSnapshot.load(journals.ORDER) is None


def test_a_node_that_came_back_from_a_reboot_without_its_gpus_waits_for_the_checks(
    slurm: SlurmDouble,
):
    slurm.record = Record(
        GRES, "DOWN", {"DYNAMIC_NORM", "DRAIN"}, SHORT_OF_GPUS.format(found=0, wanted=1)
    )
    assert advance() == Progress(Stage.REGISTERED)
    assert slurm.record == Record(GRES, "DOWN", reason="Node unexpectedly rebooted")


def test_a_node_with_another_gres_than_its_options_is_a_failure(
    slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch
):
    slurm.record = Record("")
    monkeypatch.setattr(slurmd_options, "ensure_gres", lambda gres: False)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert advance() == Progress(Stage.FAILED, f"slurmd-0 registered with Gres=(none), not {GRES}")


def test_a_down_and_drained_node_is_never_undrained_in_between(slurm: SlurmDouble):
    slurm.record = Record("", "DOWN", {"DYNAMIC_NORM", "DRAIN"}, "bad fan")
    advance()
    assert not any("undrain" in order for order in slurm.log)


def test_a_node_that_was_down_is_not_marked_down_over_a_job(slurm: SlurmDouble):
    """A job came to it since, as after an administrator's resume; `state=down` would end that."""
    snapshot = journals.NodeSnapshot("slurmd-0", ("down",), "bad memory")
    snapshot.save()
    slurm.record = Record(GRES, flags={"DYNAMIC_NORM", "DRAIN"}, reason=registration.REASON)
    slurm.jobs = ["7"]
    assert advance() == Progress(Stage.AWAITS_JOBS, "1 job")
    assert (slurm.jobs, slurm.ended, journals.NodeSnapshot.load()) == (["7"], [], snapshot)
    slurm.end_jobs()
    assert advance() == Progress(Stage.REGISTERED)
    assert slurm.record == Record(GRES, "DOWN", reason="bad memory")
    assert journals.NodeSnapshot.load() is None


def test_the_drop_in(slurm: SlurmDouble, paths: pathlib.Path):
    files = (pathlib.Path("/dev/nvidia0"), pathlib.Path("/dev/nvidia1"))
    assert [slurmd_unit.ensure_dropin(files), slurmd_unit.ensure_dropin(files)] == [True, False]
    text = (paths / "etc/systemd/system/slurmd.service.d/20-gpu.conf").read_text()
    assert "After=nvidia-persistenced.service nvidia-fabricmanager.service\n" in text
    assert f"EnvironmentFile=-{slurmd_unit.DRAINED_ENV}\n" in text
    assert [slurmd_unit.ensure_no_dropin(), slurmd_unit.ensure_no_dropin()] == [True, False]
    assert not (paths / "etc/systemd/system/slurmd.service.d").exists()
    assert slurm.log == ["daemon-reload", "daemon-reload"]


@pytest.mark.parametrize(
    "first", [Record(""), Record("", "IDLE", {"DYNAMIC_NORM", "DRAIN"}, "bad memory")]
)
def test_a_drain_that_another_orders_while_jobs_are_waited_for(slurm: SlurmDouble, first: Record):
    slurm.record = dataclasses.replace(first, flags=set(first.flags))
    slurm.jobs, slurm.waiting = ["7"], ["9"]
    assert advance() == Progress(Stage.AWAITS_JOBS, "1 job")
    nodes.drain("slurmd-0", "bad fan")
    assert advance() == Progress(Stage.AWAITS_JOBS, "1 job")
    slurm.end_jobs()
    assert advance() == Progress(Stage.REGISTERED)
    assert slurm.record == drained("bad fan")
    assert (slurm.ended, slurm.waiting) == ([], ["9"])


@pytest.mark.parametrize(
    ("slurmd_runs_s", "flags", "reason"),
    [(300, {"DYNAMIC_NORM"}, ""), (5, {"DYNAMIC_NORM", "DRAIN"}, "bad memory")],
)
def test_a_drain_that_ends_while_jobs_are_waited_for_is_restored_unless_an_administrator_ended_it(
    slurm: SlurmDouble, slurmd_runs_s: float, flags: set[str], reason: str
):
    """Upstream sets its node idle right after slurmd's restart.

    Later only an administrator does.
    """
    slurm.record = Record("", "IDLE", {"DYNAMIC_NORM", "DRAIN"}, "bad memory")
    slurm.jobs = ["7"]
    assert advance() == Progress(Stage.AWAITS_JOBS, "1 job")
    nodes.resume("slurmd-0")
    slurm.slurmd_since = time.clock_gettime(time.CLOCK_MONOTONIC) - slurmd_runs_s
    assert advance() == Progress(Stage.AWAITS_JOBS, "1 job")
    slurm.end_jobs()
    assert advance() == Progress(Stage.REGISTERED)
    assert slurm.record == Record(GRES, flags=flags, reason=reason)


def test_a_drain_that_another_orders_before_nothing_is_to_be_done_any_more(slurm: SlurmDouble):
    slurm.record = Record("")
    slurm.jobs = ["7"]
    advance()
    nodes.drain("slurmd-0", "bad fan")
    assert advance(gres=None) == Progress(Stage.REGISTERED)
    assert slurm.record == drained("bad fan", "")

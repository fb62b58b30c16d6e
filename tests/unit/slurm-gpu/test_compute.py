"""The whole compute role: from this machine's trees to a status, with the controller's answers."""

import pathlib

import pytest
from conftest import OPTIONS, WITH_GPU
from roles import OFF, UPSTREAM, hook, live, offer
from slurm_double import Record, SlurmDouble

import settings
from gpu import detect as gpu_detect
from gpu.detect import NvmlAnswer
from node import compute, slurmd_options, slurmd_unit
from node import machine as machines
from slurm_ddp.charm import Level, Status
from slurm_ddp.interfaces.slurm_gres import ControllerGres, NodeGres

LINE = "Name=gpu Type=mock_gpu File={} Flags=nvidia_gpu_env"
ACTIVE = "gpu:mock_gpu:1 on slurmd-0 (from /proc/driver/nvidia; {})"
BY_LINES = ACTIVE.format("lines in the controller's gres.conf")
BY_DETECTION = ACTIVE.format("found by AutoDetect=nvidia")
AWAITS = Status(Level.WAITING, "waiting for slurm-gpu on slurmctld to hand out this node's lines")


def test_a_machine_without_gpus(slurm: SlurmDouble):
    slurmd_options.PATH.write_text(OPTIONS)
    hook()
    assert offer() == NodeGres(node="slurmd-0", gres="", lines=(), awaits=False)
    assert (slurm.log, slurmd_options.PATH.read_text()) == ([], OPTIONS)


def test_the_unit_publishes_its_gres_and_lines(registered: SlurmDouble, mock_gpu: pathlib.Path):
    """No lines if slurmd finds the GPUs by itself; otherwise lines that must be live first."""
    assert offer() == NodeGres(node="slurmd-0", gres="gpu:mock_gpu:1", lines=(), awaits=False)
    lines = (LINE.format(mock_gpu),)
    assert offer(OFF) == NodeGres(node="slurmd-0", gres="gpu:mock_gpu:1", lines=lines, awaits=True)


def test_a_node_waits_for_lines_that_it_needs(registered: SlurmDouble):
    assert hook(OFF) == AWAITS
    assert registered.record == Record("")
    assert slurmd_options.PATH.read_text() == OPTIONS
    slurmd_unit.PUSHED.write_text("".join(f"{line}\n" for line in pushed_lines()))
    assert hook(live()) == Status(Level.ACTIVE, BY_LINES)
    assert registered.record == Record("gpu:mock_gpu:1")
    registered.log.clear()
    assert hook(live()) == Status(Level.ACTIVE, BY_LINES)
    assert registered.log == []


def pushed_lines() -> list[str]:
    return [f"NodeName=slurmd-0 AutoDetect=off {line}" for line in machines.look(answer=OFF).lines]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("# NodeName=slurmd-0\nNodeName=slurmd-1 Name=gpu\n{}\n", Status(Level.ACTIVE, BY_LINES)),
        ("#{}\n", AWAITS),
        ("{} Cores=0\n", AWAITS),
        ("{}\nNodeName=slurmd-0 AutoDetect=off Name=gpu File=/dev/x\n", AWAITS),
    ],
)
def test_just_the_lines_that_slurmd_has_fetched_count_without_an_answer(
    registered: SlurmDouble, text: str, status: Status
):
    (line,) = pushed_lines()
    slurmd_unit.PUSHED.write_text(text.format(line))
    assert hook(OFF) == status


def test_a_node_that_needs_lines_without_a_gres_lines(registered: SlurmDouble):
    text = (
        "slurmd does not find these GPUs by itself: integrate node-gres with slurm-gpu on slurmctld"
    )
    assert hook(OFF, related=False) == Status(Level.BLOCKED, text)
    assert registered.log == ["daemon-reload"]


def test_cores_that_only_slurmd_finds_wrong_need_lines(
    registered: SlurmDouble, mock_gpu: pathlib.Path
):
    """slurmd's own detection decides, against any rule."""
    registered.printed = "slurmd: error: System GPU detection failed\n"
    machine = machines.look(answer=UPSTREAM)
    assert machine.lines == (LINE.format(mock_gpu),)


def test_lines_that_the_registered_gres_needs_stay_until_it_is_another(registered: SlurmDouble):
    """Shares go: a slurmd without their lines would fall short of its record, and be refused."""
    registered.types = "gpu,shard"
    shares = settings.Config(shards_per_gpu=4)
    first = offer(config=shares)
    assert first is not None
    assert hook(live(UPSTREAM, shares), shares).level == Level.ACTIVE
    slurmd_unit.PUSHED.write_text(
        "".join(f"NodeName=slurmd-0 AutoDetect=off {line}\n" for line in first.lines or ())
    )
    assert offer(published=first) == first.model_copy(update={"gres": "gpu:mock_gpu:1"})
    assert hook(published=first).level == Level.ACTIVE
    assert registered.record == Record("gpu:mock_gpu:1")
    assert offer(published=first) == NodeGres(
        node="slurmd-0", gres="gpu:mock_gpu:1", lines=(), awaits=True
    )


@pytest.mark.parametrize("forgets", ["jobs", "shards"])
def test_shards_stay_while_slurm_knows_them_and_a_job_that_asked_for_some(
    registered: SlurmDouble, forgets: str
):
    """slurmctld 24.11.5 crashes on start and reconfigure if such a job's node lost its shards."""
    registered.types = "gpu,shard"
    shares = settings.Config(shards_per_gpu=4)
    assert hook(live(UPSTREAM, shares), shares).level == Level.ACTIVE
    registered.remembered = [
        "7   N/A   gres/gpu:1   N/A   N/A",
        "12_3   N/A   gres/gpu:1,gres/shard:2   N/A   N/A",
    ]
    text = "slurmd-0 is drained: waiting for Slurm to forget job 12_3, which asked for shards (MinJobAge), before its GPUs"
    for _ in range(2):
        assert hook() == Status(Level.WAITING, f"{text} are registered")
        assert registered.record is not None and registered.record.gres == "gpu:mock_gpu:1,shard:4"
    if forgets == "jobs":
        registered.remembered.pop()
    else:
        registered.types = "gpu"
    assert hook().level == Level.ACTIVE
    assert registered.record is not None and registered.record.gres == "gpu:mock_gpu:1"
    assert "DRAIN" not in registered.record.flags


@pytest.mark.parametrize("state", ["drain", "down", "fail"])
def test_the_status_is_never_active_over_a_node_that_takes_no_jobs(
    registered: SlurmDouble, state: str
):
    assert hook().level == Level.ACTIVE
    registered.run(
        "/usr/bin/scontrol", "update", "nodename=slurmd-0", f"state={state}", "reason=bad fan"
    )
    how = {"drain": "drained", "down": "down", "fail": "failing"}[state]
    text = (
        f"scontrol update nodename=slurmd-0 state=resume, since it takes no jobs: {how} (bad fan)"
    )
    assert hook() == Status(Level.BLOCKED, text)


LOW = "Low RealMemory (reported:900 < 100.00% of configured:4000)"
INVALID = Record("", flags={"DYNAMIC_NORM", "DRAIN", "INVALID_REG"}, reason=LOW)


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({"record": INVALID}, Status(Level.BLOCKED, f"Slurm refuses slurmd-0: {LOW}")),
        ({"slurmd_active": False}, Status(Level.WAITING, "waiting for slurmd to run on slurmd-0")),
        (
            {"record": Record("gpu:mock_gpu:1")},
            Status(
                Level.BLOCKED,
                "scontrol delete nodename=slurmd-0, then systemctl restart slurmd: "
                "it has Gres=gpu:mock_gpu:1, not (none)",
            ),
        ),
    ],
    ids=["invalid", "stopped", "differs"],
)
def test_the_status_of_a_machine_without_gpus_is_that_of_its_node(
    slurm: SlurmDouble, found: dict[str, object], status: Status
):
    slurmd_options.PATH.write_text(OPTIONS)
    slurm.register()
    assert hook() == Status(Level.ACTIVE, "no NVIDIA GPU on this machine")
    vars(slurm).update(found)
    assert hook() == status


def test_detection_by_nvml_needs_its_plugin(
    registered: SlurmDouble, paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    answer = NvmlAnswer.model_validate(
        {"gpus": [{"name": "Mock GPU", "minor": 0, "bus_id": "0000:01:00.0"}]}
    )
    monkeypatch.setattr(gpu_detect, "run_probe", lambda: answer)
    assert hook(ControllerGres(autodetect="nvml")) == AWAITS
    (paths / "plugins").mkdir()
    (paths / "plugins/gpu_nvml.so").touch()
    text = "gpu:mock_gpu:1 on slurmd-0 (from NVML; found by AutoDetect=nvml)"
    assert hook(ControllerGres(autodetect="nvml")) == Status(Level.ACTIVE, text)


def test_each_detected_gpu_is_a_line(registered: SlurmDouble, mock_gpu: pathlib.Path):
    found = compute.detected(machines.look(None))
    assert (found["count"], found["gpus"]) == ("1", "0000:01:00.0: Mock GPU, /dev/nvidia0")


def test_the_options_are_right_before_slurmd_registers(slurm: SlurmDouble, mock_gpu: pathlib.Path):
    slurm.slurmd_active = slurm.answering = False
    slurmd_options.PATH.write_text(OPTIONS.replace(" --conf-server ctl:6817", ""))
    verdict = hook(related=False)
    assert verdict.level == Level.WAITING
    assert verdict.text.startswith("waiting for slurmctld (show node slurmd-0: ")
    assert slurmd_options.PATH.read_text() == WITH_GPU.replace(" --conf-server ctl:6817", "")
    slurmd_options.PATH.write_text(WITH_GPU)  # upstream adds the server, and starts slurmd
    slurm.answering = slurm.slurmd_active = True
    slurm.register()
    slurm.log.clear()
    assert hook(related=False) == Status(Level.ACTIVE, BY_DETECTION)
    assert slurm.log == []


def test_device_files_are_waited_for(registered: SlurmDouble, mock_gpu: pathlib.Path):
    mock_gpu.unlink()
    assert hook(live()) == Status(Level.WAITING, f"waiting for the driver to make {mock_gpu}")
    assert registered.record == Record("")
    mock_gpu.touch()
    assert hook(live()).level == Level.ACTIVE


def test_gres_that_an_administrator_added_stay(registered: SlurmDouble):
    slurmd_options.PATH.write_text(OPTIONS.replace("features=slurmd", "features=slurmd gres=nic:2"))
    assert hook(live()).level == Level.ACTIVE
    assert registered.record is not None
    assert registered.record.gres == "gpu:mock_gpu:1,nic:2"


def test_a_static_node_is_blocked_with_the_gres_to_write(
    slurm: SlurmDouble, mock_gpu: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machines.socket, "gethostname", lambda: "slurmd-0.example")
    slurmd_options.PATH.write_text("SLURMD_OPTIONS=-N slurmd-0 --conf-server ctl:6817\n")
    slurm.record = Record("gpu:2", flags=set())
    slurm.register = lambda: None  # pyright: ignore[reportAttributeAccessIssue] - there is no --conf to read
    text = "set Gres=gpu:mock_gpu:1 for slurmd-0 in slurm.conf: it has Gres=gpu:2"
    assert hook() == Status(Level.BLOCKED, text)
    slurm.record = Record("gpu:mock_gpu:1", flags=set())
    assert hook() == Status(Level.ACTIVE, BY_DETECTION)


def test_leaving_a_node_that_needs_the_controllers_lines(
    registered: SlurmDouble, paths: pathlib.Path
):
    slurmd_unit.PUSHED.write_text("")
    hook(live())
    compute.release(owner="another/0")
    assert registered.record == Record("gpu:mock_gpu:1")
    compute.release(owner="slurm-gpu/0")
    assert registered.record == Record("")
    assert slurmd_options.PATH.read_text() == OPTIONS
    assert not (paths / "etc/systemd/system/slurmd.service.d").exists()
    registered.log.clear()
    compute.release(owner="slurm-gpu/0")
    assert registered.log == []


def test_the_summary(registered: SlurmDouble, mock_gpu: pathlib.Path):
    hook(live())
    summary = compute.summary(machines.look(answer=live()))
    assert summary == {
        "node": "slurmd-0",
        "wanted": "gpu:mock_gpu:1",
        "configured": "gpu:mock_gpu:1",
        "registered": "gpu:mock_gpu:1",
        "state": "IDLE+DYNAMIC_NORM",
        "lines": f"NodeName=slurmd-0 AutoDetect=off {LINE.format(mock_gpu)}",
        "lines-live": "true",
        "found-by": "from /proc/driver/nvidia; lines in the controller's gres.conf",
    }

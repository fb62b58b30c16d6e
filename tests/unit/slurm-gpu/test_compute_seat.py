"""The compute seat as a whole: from this machine's trees to a status, with the controller's answer at each stage."""

import pathlib

import pytest
from conftest import OPTIONS, WITH_GPU
from machines import Card, add_driver, add_pci
from slurm_double import Record, SlurmDouble

import compute_seat
import gpu_detect
import gres_conf
import registration
import slurmd_options
from compute_seat import Level, Verdict
from gpu_detect import NvmlAnswer
from slurm_ddp.interfaces.slurm_gres import ControllerGres, NodeGres
from slurm_ddp.run import CommandError

LINE = "Name=gpu Type=mock_gpu File={} Flags=nvidia_gpu_env"
ACTIVE = "gpu:mock_gpu:1 on slurmd-0 (from /proc/driver/nvidia; {})"
BY_LINES = ACTIVE.format("lines in the controller's gres.conf")
BY_DETECTION = ACTIVE.format("found by AutoDetect=nvidia")
AWAITS = Verdict(Level.WAITING, "waiting for slurm-gpu on slurmctld to hand out this node's lines")


def hook(answer: ControllerGres | None = None, *, related: bool = True) -> Verdict:
    """Run what one hook runs."""
    machine = compute_seat.look()
    progress = compute_seat.ensure(machine, answer, owner="slurm-gpu/0")
    return compute_seat.verdict(machine, answer, related=related, progress=progress)


def offer(answer: ControllerGres | None = None) -> NodeGres | None:
    return compute_seat.offer(compute_seat.look(), answer)


@pytest.fixture
def registered(slurm: SlurmDouble, mock_gpu: pathlib.Path) -> SlurmDouble:
    """A node with a GPU that slurmd registered without it."""
    slurmd_options.PATH.write_text(OPTIONS)
    slurm.register()
    return slurm


def live() -> ControllerGres:
    said = offer()
    assert said is not None
    return ControllerGres(autodetect="off", applied=("0" * 12, said.digest))


def test_a_machine_without_gpus(slurm: SlurmDouble):
    slurmd_options.PATH.write_text(OPTIONS)
    assert hook() == Verdict(Level.ACTIVE, "no NVIDIA GPU on this machine")
    assert offer() == NodeGres(node="slurmd-0", gres="", lines=())
    assert slurm.log == []
    assert slurmd_options.PATH.read_text() == OPTIONS


def test_a_machine_without_gpus_before_slurmd(slurm: SlurmDouble):
    assert hook() == Verdict(Level.ACTIVE, "no NVIDIA GPU on this machine")
    assert offer() is None


def test_a_gpu_before_slurmd_is_set_up(slurm: SlurmDouble, mock_gpu: pathlib.Path):
    assert hook() == Verdict(Level.WAITING, "waiting for slurmd to be set up")
    assert offer() is None
    assert slurm.log == []


def test_a_node_that_lost_its_gpus(slurm: SlurmDouble):
    slurmd_options.PATH.write_text(WITH_GPU)
    text = "slurmd-0 registers gpu:mock_gpu:1, but this machine shows no NVIDIA GPU"
    assert hook() == Verdict(Level.BLOCKED, text)
    assert slurm.log == []


def test_what_the_controller_is_told(registered: SlurmDouble, mock_gpu: pathlib.Path):
    assert offer() == NodeGres(node="slurmd-0", gres="gpu:mock_gpu:1", lines=(LINE.format(mock_gpu),), awaits=True)


def test_22_05_waits_for_its_lines(registered: SlurmDouble):
    assert hook() == AWAITS
    assert hook(ControllerGres(autodetect="off", applied=())) == AWAITS
    assert registered.record == Record("")
    assert slurmd_options.PATH.read_text() == OPTIONS
    machine = compute_seat.look()
    assert machine.offer is not None
    compute_seat.PUSHED.write_text("".join(f"{line}\n" for line in pushed_lines()))
    assert hook(live()) == Verdict(Level.ACTIVE, BY_LINES)
    assert registered.record == Record("gpu:mock_gpu:1")
    registered.log.clear()
    assert hook(live()) == Verdict(Level.ACTIVE, BY_LINES)
    assert registered.log == []


def test_lines_that_arrive_while_a_hook_runs_count_in_the_next(registered: SlurmDouble):
    machine = compute_seat.look()
    progress = compute_seat.ensure(machine, None, owner="slurm-gpu/0")
    compute_seat.PUSHED.write_text("".join(f"{line}\n" for line in pushed_lines()))
    assert compute_seat.verdict(machine, None, related=True, progress=progress) == AWAITS
    assert hook() == Verdict(Level.ACTIVE, BY_LINES)


def pushed_lines() -> list[str]:
    machine = compute_seat.look()
    assert machine.plan is not None
    return [f"NodeName=slurmd-0 AutoDetect=off {line}" for line in machine.plan.lines]


def test_lines_that_slurmd_has_fetched_count_without_an_answer(registered: SlurmDouble):
    (line,) = pushed_lines()
    compute_seat.PUSHED.write_text(f"# NodeName=slurmd-0\nNodeName=slurmd-1 Name=gpu\n{line}\n")
    assert hook() == Verdict(Level.ACTIVE, BY_LINES)


@pytest.mark.parametrize(
    "text", ["#{}\n", "{} Cores=0\n", "{}\nNodeName=slurmd-0 AutoDetect=off Name=gpu File=/dev/x\n"]
)
def test_other_lines_that_slurmd_has_fetched_do_not_count(registered: SlurmDouble, text: str):
    (line,) = pushed_lines()
    compute_seat.PUSHED.write_text(text.format(line))
    assert hook() == AWAITS


def test_22_05_without_a_controller_seat(registered: SlurmDouble):
    text = "Slurm 22.05 cannot find these GPUs alone: integrate node-gres with slurm-gpu on slurmctld"
    assert hook(related=False) == Verdict(Level.BLOCKED, text)
    assert registered.log == ["daemon-reload"]


def test_25_11_finds_the_gpus_by_itself(registered: SlurmDouble):
    registered.version = "slurm 25.11.2"
    said = offer()
    assert said is not None
    assert said.awaits is False
    assert hook(related=False) == Verdict(Level.ACTIVE, BY_DETECTION)
    assert registered.record == Record("gpu:mock_gpu:1")


def test_25_11_with_a_controller_seat_does_not_wait_either(registered: SlurmDouble):
    registered.version = "slurm 25.11.2"
    answer = ControllerGres(autodetect="nvidia", applied=())
    assert hook(answer) == Verdict(Level.ACTIVE, BY_DETECTION)
    compute_seat.PUSHED.write_text("".join(f"{line}\n" for line in pushed_lines()))
    assert hook(answer) == Verdict(Level.ACTIVE, BY_LINES)


@pytest.mark.parametrize("how", ["answer", "pushed"])
def test_25_11_whose_controller_detects_nothing_waits(registered: SlurmDouble, how: str):
    registered.version = "slurm 25.11.2"
    if how == "pushed":
        compute_seat.PUSHED.write_text("# nothing\n")
    answer = ControllerGres(autodetect="off") if how == "answer" else None
    assert hook(answer) == AWAITS
    assert hook(live()).level == Level.ACTIVE


def test_detection_by_nvml_needs_its_plugin(
    registered: SlurmDouble, paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    answer = NvmlAnswer.model_validate({"gpus": [{"name": "Mock GPU", "minor": 0, "bus_id": "0000:01:00.0"}]})
    monkeypatch.setattr(gpu_detect, "run_probe", lambda: answer)
    assert hook(ControllerGres(autodetect="nvml")) == AWAITS
    (paths / "plugins").mkdir()
    (paths / "plugins/gpu_nvml.so").touch()
    text = "gpu:mock_gpu:1 on slurmd-0 (from NVML; found by AutoDetect=nvml)"
    assert hook(ControllerGres(autodetect="nvml")) == Verdict(Level.ACTIVE, text)


def test_the_options_are_right_before_slurmd_registers(slurm: SlurmDouble, mock_gpu: pathlib.Path):
    slurm.version = "slurm 25.11.2"
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
    assert hook(related=False) == Verdict(Level.ACTIVE, BY_DETECTION)
    assert slurm.log == []


def test_a_node_that_waits_for_jobs(registered: SlurmDouble):
    registered.jobs = ["7"]
    text = "slurmd-0 is drained: waiting for 1 job before its GPUs are registered"
    assert hook(live()) == Verdict(Level.WAITING, text)
    machine = compute_seat.look()
    assert compute_seat.verdict(machine, live(), related=True, progress=None) == Verdict(Level.WAITING, text)
    registered.end_jobs()
    assert hook(live()).level == Level.ACTIVE


def test_a_node_that_slurm_refuses(registered: SlurmDouble):
    registered.devices = 0
    text = "Slurm refuses slurmd-0: gres/gpu count reported lower than configured (0 < 1)"
    assert hook(live()) == Verdict(Level.BLOCKED, text)


def test_a_slurmd_that_does_not_come_back(registered: SlurmDouble):
    registered.registers = False
    text = "slurmd did not register slurmd-0 again within 30 s; see journalctl -u slurmd"
    assert hook(live()) == Verdict(Level.BLOCKED, text)


def test_a_slurmd_that_was_not_started(slurm: SlurmDouble, mock_gpu: pathlib.Path):
    slurmd_options.PATH.write_text(OPTIONS)
    slurm.slurmd_active = False
    assert hook(live()) == Verdict(Level.WAITING, "waiting for slurmd to register slurmd-0")


def test_a_slurmd_that_stopped(registered: SlurmDouble):
    assert hook(live()).level == Level.ACTIVE
    registered.slurmd_active = False
    assert hook(live()) == Verdict(Level.WAITING, "waiting for slurmd to run on slurmd-0")


def test_a_status_without_a_reconcile_says_what_follows(registered: SlurmDouble):
    verdict = compute_seat.verdict(compute_seat.look(), live(), related=True, progress=None)
    assert verdict == Verdict(Level.WAITING, "slurmd-0 has Gres=(none); gpu:mock_gpu:1 follows with the next event")


def test_cards_without_a_driver(slurm: SlurmDouble, paths: pathlib.Path):
    slurmd_options.PATH.write_text(OPTIONS)
    add_pci(paths, "0000:01:00.0")
    text = "1 NVIDIA GPU has no driver: set driver=580 (or another branch), or install one and reboot this machine"
    assert hook() == Verdict(Level.BLOCKED, text)
    assert offer() is None
    assert slurm.log == []


def test_a_driver_that_fails_changes_nothing(registered: SlurmDouble, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_detect, "run_probe", lambda: NvmlAnswer(error="GPU is lost", broken=True))
    assert hook(ControllerGres()) == Verdict(Level.BLOCKED, "NVML: GPU is lost; reboot this machine")
    assert offer() is None
    assert registered.log == []


def test_mig_changes_nothing(registered: SlurmDouble, paths: pathlib.Path):
    (paths / "proc/driver/nvidia/capabilities/gpu0/mig/gi1").mkdir(parents=True)
    text = "GPU 0000:01:00.0 is in MIG mode, whose instances only NVML tells: install libnvidia-ml.so.1"
    assert hook(ControllerGres()) == Verdict(Level.BLOCKED, text)
    assert registered.log == []


def test_options_in_another_form(slurm: SlurmDouble, mock_gpu: pathlib.Path):
    slurmd_options.PATH.write_text("SLURMD_OPTIONS=--conf 'cpus=2\n")
    text = f"{slurmd_options.PATH}: a quote in SLURMD_OPTIONS is not closed"
    assert hook() == Verdict(Level.BLOCKED, text)


def test_device_files_are_waited_for(registered: SlurmDouble, mock_gpu: pathlib.Path):
    mock_gpu.unlink()
    assert hook(live()) == Verdict(Level.WAITING, f"waiting for the driver to make {mock_gpu}")
    assert registered.record == Record("")
    mock_gpu.touch()
    assert hook(live()).level == Level.ACTIVE


def test_another_gpu(registered: SlurmDouble, paths: pathlib.Path, mock_gpu: pathlib.Path):
    hook(live())
    old = live()
    registered.devices = 2
    add_driver(paths, [Card("Mock GPU", "0000:02:00.0")], minors=[1])
    (paths / "dev/nvidia1").touch()
    assert hook(old) == AWAITS
    assert registered.record == Record("gpu:mock_gpu:1")
    assert hook(live()).text.startswith("gpu:mock_gpu:2 on slurmd-0")
    assert registered.record == Record("gpu:mock_gpu:2")


def test_what_an_administrator_added_to_the_gres_stays(registered: SlurmDouble):
    slurmd_options.PATH.write_text(OPTIONS.replace("features=slurmd", "features=slurmd gres=nic:2"))
    assert hook(live()).level == Level.ACTIVE
    assert registered.record is not None
    assert registered.record.gres == "gpu:mock_gpu:1,nic:2"


def test_a_slurmd_with_its_own_files(slurm: SlurmDouble, mock_gpu: pathlib.Path):
    slurmd_options.SLURM_CONF.write_text("ClusterName=x\n")
    gres_conf.PATH.write_text("# mine\n")
    slurmd_options.PATH.write_text(OPTIONS.replace(" --conf-server ctl:6817", ""))
    slurm.register()
    text = ACTIVE.format("lines in this node's gres.conf")
    slurm.jobs = ["7"]
    hook()
    assert gres_conf.PATH.read_text() == "# mine\n"
    slurm.end_jobs()
    assert hook() == Verdict(Level.ACTIVE, text)
    assert gres_conf.PATH.read_text().splitlines()[::3] == ["# mine", *pushed_lines()]
    assert slurm.record == Record("gpu:mock_gpu:1")
    slurm.log.clear()
    assert hook() == Verdict(Level.ACTIVE, text)
    assert slurm.log == []
    compute_seat.release(owner="slurm-gpu/0")
    assert gres_conf.PATH.read_text() == "# mine\n"


def test_a_node_that_stands_in_slurm_conf(slurm: SlurmDouble, mock_gpu: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compute_seat.socket, "gethostname", lambda: "slurmd-0.example")
    slurmd_options.SLURM_CONF.write_text("NodeName=slurmd-0 Gres=gpu:2\n")
    slurm.options = slurmd_options.SLURM_CONF
    slurm.record = Record("gpu:2", flags=set())
    slurm.register = lambda: None  # pyright: ignore[reportAttributeAccessIssue] - there is no --conf to read
    text = "slurm.conf has Gres=gpu:2 for slurmd-0: set Gres=gpu:mock_gpu:1 there"
    assert hook() == Verdict(Level.BLOCKED, text)
    slurm.record = Record("gpu:mock_gpu:1", flags=set())
    assert hook() == Verdict(Level.ACTIVE, ACTIVE.format("lines in this node's gres.conf"))


def test_leaving_a_node_that_needs_the_controllers_lines(registered: SlurmDouble, paths: pathlib.Path):
    hook(live())
    compute_seat.release(owner="another/0")
    assert registered.record == Record("gpu:mock_gpu:1")
    compute_seat.release(owner="slurm-gpu/0")
    assert registered.record == Record("")
    assert slurmd_options.PATH.read_text() == OPTIONS
    assert not (paths / "etc/systemd/system/slurmd.service.d").exists()
    registered.log.clear()
    compute_seat.release(owner="slurm-gpu/0")
    assert registered.log == []


def test_leaving_a_node_that_finds_its_gpus_alone(registered: SlurmDouble, paths: pathlib.Path):
    registered.version = "slurm 25.11.2"
    hook(related=False)
    compute_seat.release(owner="slurm-gpu/0")
    assert registered.record == Record("gpu:mock_gpu:1")
    assert slurmd_options.PATH.read_text() == WITH_GPU
    assert not (paths / "etc/systemd/system/slurmd.service.d").exists()


def test_the_summary(registered: SlurmDouble, mock_gpu: pathlib.Path):
    hook(live())
    summary = compute_seat.summary(compute_seat.look(), live())
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


def test_the_summary_of_a_machine_without_anything(slurm: SlurmDouble):
    assert compute_seat.summary(compute_seat.look(), None) == {"lines-live": "true"}


def test_the_summary_says_why_it_is_short(registered: SlurmDouble):
    registered.answering = False
    problem = "show node slurmd-0: slurm_x error: Unable to contact slurm controller (connect failure)"
    assert compute_seat.summary(compute_seat.look(), None)["problem"] == problem


def test_the_drop_in_names_this_machines_devices(registered: SlurmDouble, paths: pathlib.Path, mock_gpu: pathlib.Path):
    hook(live())
    text = (paths / "etc/systemd/system/slurmd.service.d" / registration.DROPIN).read_text()
    assert f"until test -e {mock_gpu}; do" in text


def test_a_local_slurmd_that_does_not_start_is_told(
    slurm: SlurmDouble, mock_gpu: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    slurmd_options.SLURM_CONF.touch()
    slurmd_options.PATH.write_text(OPTIONS.replace(" --conf-server ctl:6817", ""))

    def fails() -> None:
        raise CommandError("systemctl exited 1: Job for slurmd.service failed")

    monkeypatch.setattr(registration, "restart_if_active", fails)
    progress = compute_seat.ensure(compute_seat.look(), None, owner="slurm-gpu/0")
    assert progress == registration.Progress(
        registration.Stage.FAILED, "systemctl exited 1: Job for slurmd.service failed"
    )
    compute_seat.release(owner="slurm-gpu/0")  # as in the remove hook
    assert not compute_seat.OWNER.exists()


def test_a_damaged_local_file_is_told(slurm: SlurmDouble, mock_gpu: pathlib.Path):
    slurmd_options.SLURM_CONF.touch()
    slurmd_options.PATH.write_text(OPTIONS.replace(" --conf-server ctl:6817", ""))
    gres_conf.PATH.write_text("# BEGIN slurm-gpu\n")
    progress = compute_seat.ensure(compute_seat.look(), None, owner="slurm-gpu/0")
    assert progress is not None
    assert progress.stage is registration.Stage.FAILED
    assert "do not pair up" in progress.detail
    compute_seat.release(owner="slurm-gpu/0")
    assert gres_conf.PATH.read_text() == "# BEGIN slurm-gpu\n"


def test_a_driver_that_hangs_while_files_are_made(mock_gpu: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    gpu_detect.NVIDIA_MODPROBE.parent.mkdir(parents=True, exist_ok=True)
    gpu_detect.NVIDIA_MODPROBE.touch()
    asked: list[str] = []

    def hangs(*argv: str | pathlib.Path, **_: object) -> None:
        asked.append(str(argv[-1]))
        raise CommandError("nvidia-modprobe: no answer within 60 s")

    monkeypatch.setattr(gpu_detect, "run", hangs)
    missing = [mock_gpu.with_name("nvidia7"), mock_gpu.with_name("nvidia8")]
    assert gpu_detect.ensure_device_files((mock_gpu, *missing)) == missing
    assert asked == ["0"]

"""What the tests of slurm-gpu share: the charm's paths in a temporary folder, and a Slurm that keeps to the real one's rules."""

import pathlib

import pytest
from slurm_double import SlurmDouble

import compute_seat
import controller_seat
import gpu_detect
import gpu_health
import gpu_monitor
import gres_check
import gres_conf
import registration
import slurmd_options
from slurm_ddp import systemd
from slurm_ddp.slurm import nodes

CONF = "cpus=2 boards=1 socketsperboard=1 corespersocket=2 threadspercore=1 realmemory=4000  memspeclimit=1024 features=slurmd"
OPTIONS = f"SLURMD_OPTIONS=--conf '{CONF}' -Z -N slurmd-0 --conf-server ctl:6817\n"
ask_nvml = gpu_detect.run_probe  # which no test runs without saying so
WITH_GPU = OPTIONS.replace("features=slurmd", "features=slurmd gres=gpu:mock_gpu:1")


@pytest.fixture(autouse=True)
def paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Move every path that the charm touches under a temporary folder, and return that."""
    for name in ("etc/default", "etc/slurm", "run/slurm/conf", "dev", "proc", "sys", "var"):
        (tmp_path / name).mkdir(parents=True)
    state = tmp_path / "var/slurm-gpu"
    moved = {
        slurmd_options: {"PATH": "etc/default/slurmd", "SLURM_CONF": "etc/slurm/slurm.conf"},
        registration: {"STATE_DIR": "var/slurm-gpu", "HELD_ENV": "run/slurm-gpu/slurmd"},
        compute_seat: {
            "OWNER": "var/slurm-gpu/compute",
            "CARDS": "var/slurm-gpu/cards.json",
            "PUSHED": "run/slurm/conf/gres.conf",
        },
        controller_seat: {
            "OWNER": "var/slurm-gpu/controller",
            "LIVE": "var/slurm-gpu/live",
            "SLURM_CONF": "etc/slurm/slurm.conf",
        },
        gpu_health: {"STATE": "var/slurm-gpu/health.json"},
        gpu_monitor: {"PROGRAM": "usr/local/sbin/gpu-health", "NVIDIA_SMI": "usr/bin/nvidia-smi"},
        gres_check: {"ACCEPTED": "var/slurm-gpu/accepted"},
        gres_conf: {"PATH": "etc/slurm/gres.conf"},
        systemd: {"UNIT_DIR": "etc/systemd/system"},
        gpu_detect: {"NVIDIA_MODPROBE": "usr/bin/nvidia-modprobe"},
    }
    for module, names in moved.items():
        for name, path in names.items():
            monkeypatch.setattr(module, name, tmp_path / path)
    monkeypatch.setattr(compute_seat, "STATE_DIR", state)
    monkeypatch.setattr(compute_seat, "PLUGIN_DIRS", (tmp_path / "plugins",))
    roots = gpu_detect.Roots(proc=tmp_path / "proc", sys=tmp_path / "sys", dev=tmp_path / "dev")
    monkeypatch.setattr(compute_seat, "ROOTS", roots)
    owner = tmp_path.owner()
    monkeypatch.setattr(gres_conf, "_OWNER", owner)
    return tmp_path


@pytest.fixture(autouse=True)
def slurm(paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> SlurmDouble:
    """Return the Slurm that answers this test's commands. No test runs a real one by accident."""
    double = SlurmDouble(slurmd_options.PATH, registration.HELD_ENV)
    for module in (nodes, registration, systemd, gres_check):
        monkeypatch.setattr(module, "run", double.run)
    now = [0.0]
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(nodes.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return double


@pytest.fixture(autouse=True)
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks this machine's driver."""
    monkeypatch.setattr(gpu_detect, "run_probe", lambda: gpu_detect.NvmlAnswer(error="NVML Shared Library Not Found"))


@pytest.fixture
def mock_gpu(paths: pathlib.Path) -> pathlib.Path:
    """Give this machine one GPU, the way the sandbox does, and return its device file."""
    card = paths / "proc/driver/nvidia/gpus/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t Mock GPU\n")
    device = paths / "dev/nvidia0"
    device.touch()
    return device

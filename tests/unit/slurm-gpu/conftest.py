"""Fixtures of slurm-gpu's tests: the charm's paths in a temporary folder, and a faithful Slurm."""

import functools
import pathlib
import time

import machines
import pytest
import roles
import yaml
from health_scene import BUS, Scene
from machine_double import MachineDouble
from ops import testing
from slurm_double import Record, SlurmDouble

import charm
import pci as gpu_pci
from controller import gres_lines
from driver import install as driver_install
from driver import plan as driver_plan
from driver import state as driver_state
from gpu import detect as gpu_detect
from gpu import gres_check, gres_conf, xids
from gpu import mig as gpu_mig
from maintenance import layouts, reset, services
from node import compute, health_timer, journals, machine, resume, slurmd_options, slurmd_unit
from node import health as gpu_health
from node import watch as node_watch
from slurm_ddp import apt, files, readiness, systemd, wake
from slurm_ddp.commands import CommandError, Completed
from slurm_ddp.slurm import nodes

REAL = {"sleep": time.sleep, "monotonic": time.monotonic}
ROOT = pathlib.Path(charm.__file__).resolve().parents[1]
COMPUTE = testing.SubordinateRelation("compute", interface="juju-info", remote_app_name="slurmd")
CONTROLLER = testing.SubordinateRelation(
    "controller", interface="juju-info", remote_app_name="slurmctld"
)
CONF = "cpus=2 boards=1 socketsperboard=1 corespersocket=2 threadspercore=1 realmemory=4000  memspeclimit=1024 features=slurmd"
OPTIONS = f"SLURMD_OPTIONS=--conf '{CONF}' -Z -N slurmd-0 --conf-server ctl:6817\n"
CARDS = ("0000:1b:00.0", "0000:9d:00.0")
# Files with times, or with a waiting unit's observations
PASSING = (
    "proc/sys/kernel/random/boot_id",
    "proc/uptime",
    "var/slurm-gpu/kept.lock",
    "var/slurm-gpu/health.json",
)
ask_nvml = gpu_detect.run_probe  # which no test runs without saying so
WITH_GPU = OPTIONS.replace("features=slurmd", "features=slurmd gres=gpu:mock_gpu:1")


@pytest.fixture(autouse=True)
def paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Move every path that the charm touches under a temporary folder, and return that."""
    for name in ("etc/default", "etc/slurm", "run/slurm/conf", "dev", "proc", "sys", "var"):
        (tmp_path / name).mkdir(parents=True)
    moved = {
        slurmd_options: {"PATH": "etc/default/slurmd"},
        services: {
            "STOPPED": "var/slurm-gpu/stopped-units",
            "PERSISTENCED_PROGRAM": "usr/bin/nvidia-persistenced",
        },
        journals: {"STATE_DIR": "var/slurm-gpu"},
        slurmd_unit: {
            "DRAINED_ENV": "var/slurm-gpu/held-options",
            "PUSHED": "run/slurm/conf/gres.conf",
        },
        driver_install: {
            "NOUVEAU": "etc/modprobe.d/slurm-gpu-nouveau.conf",
            "HELD": "var/slurm-gpu/held-packages",
            "NVIDIA_SMI": "usr/bin/nvidia-smi",
            "PROC_MODULES": "proc/modules",
            "UPDATE_INITRAMFS": "usr/sbin/update-initramfs",
        },
        driver_state: {
            "BOOT": "boot",
            "OS_RELEASE": "etc/os-release",
            "FABRIC_PROGRAM": "usr/bin/nv-fabricmanager",
            "RUNFILE": "usr/bin/nvidia-uninstall",
        },
        compute: {"OWNER": "var/slurm-gpu/compute"},
        gres_lines: {
            "OWNER": "var/slurm-gpu/controller",
            "LIVE": "var/slurm-gpu/live",
            "SLURM_CONF": "etc/slurm/slurm.conf",
        },
        gpu_health: {"STATE": "var/slurm-gpu/health.json"},
        health_timer: {"PROGRAM": "usr/local/sbin/gpu-health", "NVIDIA_SMI": "usr/bin/nvidia-smi"},
        layouts: {"PROGRAM": "usr/local/sbin/gpu-mig"},
        node_watch: {"CONFIG": "var/slurm-gpu/node.json"},
        gpu_pci: {"PROC": "proc", "SYS": "sys", "DEV": "dev"},
        gpu_mig: {"LAYOUTS": "var/slurm-gpu/mig.json"},
        gres_conf: {"PATH": "etc/slurm/gres.conf"},
        systemd: {"UNIT_DIR": "etc/systemd/system"},
        readiness: {"DIRECTORY": "var/needs", "BOOT_ID": "proc/sys/kernel/random/boot_id"},
        wake: {"JUJU_EXEC": "usr/bin/juju-exec"},
        gpu_detect: {"NVIDIA_MODPROBE": "usr/bin/nvidia-modprobe"},
    }
    for module, names in moved.items():
        for name, path in names.items():
            monkeypatch.setattr(module, name, tmp_path / path)
    monkeypatch.setattr(machine, "PLUGIN_DIRS", (tmp_path / "plugins",))
    monkeypatch.setattr(driver_state, "LIBRARY_DIRS", (tmp_path / "lib",))
    files.ensure_file(readiness.BOOT_ID, "boot-0\n")
    owner = tmp_path.owner()
    monkeypatch.setattr(gres_conf, "_OWNER", owner)
    return tmp_path


@pytest.fixture(autouse=True)
def slurm(paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> SlurmDouble:
    """Return the Slurm that answers this test's commands. No test runs a real one by accident."""
    double = SlurmDouble(slurmd_options.PATH, slurmd_unit.DRAINED_ENV)
    for module in (nodes, systemd, gres_check):
        monkeypatch.setattr(module, "run", double.run)
    now = [0.0]
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(nodes.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return double


@pytest.fixture(autouse=True)
def no_driver_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks this machine's kernel for NVIDIA's module."""

    def missing(*argv: object, **_: object) -> Completed:
        raise CommandError(f"{argv[0]}: No such file or directory")

    monkeypatch.setattr(driver_state, "run", missing)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for the disk."""
    monkeypatch.setattr(files.os, "fsync", lambda _: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


@pytest.fixture(autouse=True)
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks this machine's driver."""
    monkeypatch.setattr(
        gpu_detect,
        "run_probe",
        lambda: gpu_detect.NvmlAnswer(error="NVML Shared Library Not Found"),
    )


@pytest.fixture
def mock_gpu(paths: pathlib.Path) -> pathlib.Path:
    """Give this machine one GPU, the way the sandbox does, and return its device file."""
    card = paths / "proc/driver/nvidia/gpus/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t Mock GPU\n")
    device = paths / "dev/nvidia0"
    device.touch()
    return device


@pytest.fixture
def options(paths: pathlib.Path) -> pathlib.Path:
    """Return the file of slurmd's options, as upstream writes it for a node without GPUs."""
    slurmd_options.PATH.write_text(OPTIONS)
    return slurmd_options.PATH


@pytest.fixture
def registered(slurm: SlurmDouble, mock_gpu: pathlib.Path) -> SlurmDouble:
    """Return the Slurm of a node with a GPU that slurmd registered without it."""
    slurmd_options.PATH.write_text(OPTIONS)
    slurm.register()
    return slurm


@pytest.fixture
def node(paths: pathlib.Path, slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch) -> MachineDouble:
    """Return the machine under this test's commands: Ubuntu 24.04 with one H100 and no driver."""
    (paths / "etc/os-release").write_text('NAME="Ubuntu"\nID=ubuntu\nVERSION_ID="24.04"\n')
    double = MachineDouble(paths, slurm)
    double.add_card()
    for module in (apt, driver_install, driver_plan, driver_state, gpu_mig, reset, systemd):
        monkeypatch.setattr(module, "run", double.run)
    return double


@functools.cache
def context(app: str = "slurm-gpu") -> testing.Context[charm.SlurmGpuCharm]:
    """Return a context that does not read the metadata again for each hook."""
    meta = yaml.safe_load((ROOT / "charmcraft.yaml").read_text())
    config, actions = meta.pop("config"), meta.pop("actions")
    return testing.Context(
        charm.SlurmGpuCharm,
        meta=meta,
        config=config,
        actions=actions,
        juju_version="3.6.8",
        app_name=app,
    )


@pytest.fixture
def ctx() -> testing.Context[charm.SlurmGpuCharm]:
    return testing.Context(charm.SlurmGpuCharm, charm_root=ROOT)


@pytest.fixture
def two_cards(slurm: SlurmDouble, paths: pathlib.Path) -> SlurmDouble:
    """Return the Slurm of a node in service with two cards."""
    slurm.devices = 2
    machines.add_driver(paths, machines.H200S)
    for minor in range(2):
        (paths / f"dev/nvidia{minor}").touch()
    slurmd_options.PATH.write_text(OPTIONS)
    slurm.register()
    roles.hook()
    assert slurm.record == Record("gpu:nvidia_h200:2")
    slurm.log.clear()
    return slurm


@pytest.fixture
def uptime(paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Return the file with the machine's uptime: a day."""
    monkeypatch.setattr(resume, "UPTIME", paths / "proc/uptime")
    resume.UPTIME.write_text("86400.00 100.00\n")
    return resume.UPTIME


@pytest.fixture
def scene(paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(xids, "JOURNALCTL", str(paths / "bin/journalctl"))
    monkeypatch.setattr(nodes, "SCONTROL", str(paths / "bin/scontrol"))
    monkeypatch.setattr(gpu_health, "NVIDIA_SMI", str(paths / "bin/nvidia-smi"))
    for name, function in REAL.items():  # programs run here, and take their time
        monkeypatch.setattr(gpu_health.time, name, function)
    (paths / "proc/uptime").write_text("1000.0 1.0\n")
    machines.add_pci(paths, BUS)
    found = Scene(paths)
    monkeypatch.setattr(systemd, "start_later", found.woken.append)
    return found

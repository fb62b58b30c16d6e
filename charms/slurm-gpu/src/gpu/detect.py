"""Find the NVIDIA GPUs of this machine.

Sources in order: NVML (in a child process, since a broken driver can hang its callers), the
driver's own /proc/driver/nvidia, and the PCI bus, which shows GPUs without a driver. Every answer
names its source.
"""

import collections.abc
import dataclasses
import os
import pathlib
import re
import sys

import pydantic

import pci as gpu_pci
from driver import state as driver_state
from slurm_ddp import files
from slurm_ddp.commands import CommandError, run

_PROBE_TIMEOUT_S = 60.0  # a driver with a dead GSP answers after about 45 s or never
_PROGRAM = str(pathlib.Path(__file__).with_name("nvml.py"))
_FIELD = re.compile(r"^\s*([^:\n]+?)\s*:[ \t]*(.*?)\s*$", re.MULTILINE)
NVIDIA_MODPROBE = pathlib.Path("/usr/bin/nvidia-modprobe")

SOURCES = {
    "nvml": "NVML",
    "proc": "/proc/driver/nvidia",
    "pci": "the PCI bus",
    "none": "the PCI bus and /proc/driver/nvidia",
}


@dataclasses.dataclass(frozen=True)
class Instance:
    """One MIG instance of a card."""

    profile: str  # "3g.20gb"
    # N of /dev/nvidia-caps/nvidia-capN: of the GPU instance, of the compute instance
    caps: tuple[int, int] = (0, 0)
    gpu_instance: int = 0  # the driver's number of it
    compute_instance: int = 0


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU; a field is None if its source does not report it."""

    name: str | None  # the model as the driver spells it
    bus_id: str | None  # as in sysfs: "0000:1b:00.0"
    minor: int | None  # N of /dev/nvidiaN
    uuid: str | None = None
    cpus: frozenset[int] | None = None  # the kernel's numbers of the nearby CPUs
    mig: bool = False  # whether the card is cut into MIG instances
    instances: tuple[Instance, ...] = ()  # those that NVML reported


@dataclasses.dataclass(frozen=True)
class Detection:
    """The GPUs of this machine in the order of their bus ids, which is NVML's."""

    source: str  # a key of SOURCES
    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None  # why they cannot be given to jobs, in words
    note: str | None = None  # why a better source was not used
    driver: str | None = None  # the driver's version

    @property
    def is_usable(self) -> bool:
        """Whether there are GPUs with a working driver."""
        return bool(self.gpus) and self.problem is None


class NvmlAnswer(pydantic.BaseModel, frozen=True):
    """The output of `gpu.nvml`; bus ids are in NVML's spelling, and instances without `caps`."""

    gpus: tuple[Gpu, ...] | None = None
    driver: str | None = None
    error: str = "no answer"
    broken: bool = False  # a loaded driver fails


def detect() -> Detection:
    """Return the GPUs of this machine. Never hangs: NVML gets `_PROBE_TIMEOUT_S` seconds."""
    cards = gpu_pci.cards()
    on_bus = tuple(
        Gpu(None, card.bus_id, minor=None, cpus=_local_cpus(card.bus_id)) for card in cards
    )
    listed = _from_proc()
    if not on_bus and not listed:
        return Detection("none")
    found = _ask(on_bus, listed)
    driver = driver_state.look()
    problem = driver_state.explain(driver, answers=found.source != "pci") or found.problem
    return dataclasses.replace(found, problem=problem, driver=found.driver or driver.loaded)


def _ask(on_bus: tuple[Gpu, ...], listed: tuple[Gpu, ...]) -> Detection:
    answer = run_probe()
    if answer.gpus is not None:
        minors = _mig_minors()
        try:
            return Detection(
                "nvml", tuple(_from_nvml(gpu, minors) for gpu in answer.gpus), driver=answer.driver
            )
        except KeyError as e:
            problem = (
                f"the driver gives no device file for MIG instance {e.args[0]}: reboot this machine"
            )
            return Detection("nvml", problem=problem, driver=answer.driver)
    problem = f"NVML: {answer.error}; reboot this machine" if answer.broken else None
    if listed:
        return Detection("proc", listed, problem, answer.error)
    count = "1 NVIDIA GPU has" if len(on_bus) == 1 else f"{len(on_bus)} NVIDIA GPUs have"
    problem = problem or f"{count} no driver: install one and reboot this machine"
    return Detection("pci", on_bus, problem, answer.error)


def run_probe() -> NvmlAnswer:
    """Ask NVML in a child process; report a missing answer as an error."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        done = run(sys.executable, _PROGRAM, env={"PYTHONPATH": path}, timeout=_PROBE_TIMEOUT_S)
        return NvmlAnswer.model_validate_json(done.stdout)
    except CommandError as e:
        return NvmlAnswer(error=f"the driver does not answer ({e})", broken=True)
    except pydantic.ValidationError:
        return NvmlAnswer(error="the driver's library returned unexpected values", broken=True)


def ensure_device_files(devices: collections.abc.Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Let the driver make its device files if its helper is installed; return the missing ones."""
    devices = tuple(devices)
    if all(file.exists() for file in devices):
        return []
    if NVIDIA_MODPROBE.exists():
        caps = {number: name for name, number in _mig_minors().items()}
        for file in devices:
            number = re.sub(r"\D", "", file.name) or "0"
            words = ("-u", "-c", number)
            if file.name.startswith("nvidia-cap"):
                if int(number) not in caps:
                    continue
                # Gpu0/gi1/access -> gpu0/mig/gi1/access
                name = caps[int(number)].replace("/", "/mig/", 1)
                words = ("-f", f"/proc/driver/nvidia/capabilities/{name}")
            try:
                run(NVIDIA_MODPROBE, *words, check=False)
            except CommandError:  # the driver hangs: the missing files are reported
                break
    return [file for file in devices if not file.exists()]


def _mig_minors() -> dict[str, int]:
    """Return the minors of the driver's capability files by name.

    Such as {"gpu0/gi1/access": 12, "gpu0/gi1/ci0/access": 13}.
    """
    text = files.read(gpu_pci.PROC / "driver/nvidia-caps/mig-minors")
    return {
        name: int(number)
        for name, number in re.findall(r"^(gpu\S+/access) (\d+)$", text, re.MULTILINE)
    }


def _from_nvml(gpu: Gpu, minors: collections.abc.Mapping[str, int]) -> Gpu:
    bus_id = gpu_pci.bus_id(gpu.bus_id or "")
    instances: list[Instance] = []
    for one in gpu.instances:
        at = f"gpu{gpu.minor}/gi{one.gpu_instance}"
        caps = (minors[f"{at}/access"], minors[f"{at}/ci{one.compute_instance}/access"])
        instances.append(dataclasses.replace(one, caps=caps))
    cpus = gpu.cpus if gpu.cpus is not None else _local_cpus(bus_id)
    return dataclasses.replace(gpu, bus_id=bus_id, cpus=cpus, instances=tuple(instances))


def _from_proc() -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    nvidia = gpu_pci.PROC / "driver/nvidia"
    for directory in sorted(
        (nvidia / "gpus").glob("*"), key=lambda path: gpu_pci.bus_key(path.name)
    ):
        try:
            text = (directory / "information").read_text(errors="replace")
        except OSError:
            continue
        fields = dict(_FIELD.findall(text))
        bus_id = gpu_pci.bus_id(directory.name)
        minor = fields.get("Device Minor", "")
        number = int(minor) if minor.isdigit() else len(found)
        instances = (nvidia / f"capabilities/gpu{number}/mig").glob("gi*")
        found.append(
            Gpu(
                name=fields.get("Model") or None,
                bus_id=bus_id,
                minor=number,
                uuid=fields.get("GPU UUID") or None,
                cpus=_local_cpus(bus_id),
                mig=any(instances),
            )
        )
    return tuple(found)


def _local_cpus(bus_id: str | None) -> frozenset[int] | None:
    text = files.read(gpu_pci.SYS / gpu_pci.DEVICES / bus_id / "local_cpulist") if bus_id else None
    return parse_cpu_list(text) if text else None


def parse_cpu_list(text: str) -> frozenset[int] | None:
    """Return the numbers in the kernel's list format ("0-3,8"), or None when `text` is not one."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            return None
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(numbers)

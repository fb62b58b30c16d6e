"""From GPUs to Slurm: the Gres of a node and its gres.conf lines, equal to what Slurm's own nvml detection yields.

Rules and their evidence are in the fact sheet of this charm (README, "How lines are made"): Type is the driver's name
in lower case with each space an underscore; Cores only when every GPU sits beside one whole socket or all cores,
since Slurm 24.11 and later refuses anything else; Links only when NVML told them.
"""

import collections.abc
import dataclasses
import pathlib
import re

import gpu_detect

NVIDIA_ENV = "nvidia_gpu_env"  # without a flag a line sets the variables of all four vendors
_TYPE = re.compile(r"[^a-z0-9_.+-]")
AUTODETECT_NVIDIA_SINCE = (24, 11)  # gpu_nvidia.so; it also began to refuse Cores that cut a socket


class GresError(Exception):
    """These GPUs cannot be given to jobs as they are. `str()` is one line and says what to do."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """The cores of this machine in Slurm's order (hwloc's): socket by socket, and the kernel's CPUs of each."""

    sockets: tuple[tuple[frozenset[int], ...], ...]

    @property
    def num_cores(self) -> int:
        """How many cores there are in all."""
        return sum(len(socket) for socket in self.sockets)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a node's GPUs mean for Slurm."""

    gres: str  # "gpu:h100:8"
    lines: tuple[str, ...]  # gres.conf records in device order, without NodeName and AutoDetect
    device_files: tuple[pathlib.Path, ...]
    explicit: bool  # Slurm's own detection would yield something else, so the lines must be live first
    notes: tuple[str, ...] = ()  # what was left out, and why


def plan(
    detection: gpu_detect.Detection,
    settings: collections.abc.Mapping[str, str],
    topology: Topology | None,
    dev: pathlib.Path = pathlib.Path("/dev"),
) -> Plan:
    """Return the Gres and lines for the detected GPUs.

    Args:
        detection: usable GPUs, in NVML's order.
        settings: the node's `--conf`, for its sockets and cores.
        topology: this machine's cores; without it no Cores are written.
        dev: where the device files are.

    Raises:
        GresError: a GPU is in a mode that this charm does not hand out.
    """
    gpus = detection.gpus
    for gpu in gpus:
        if gpu.mig:
            raise GresError(f"GPU {gpu.bus_id} is in MIG mode: switch it off with nvidia-smi -i {gpu.bus_id} -mig 0")
        if gpu.name is None or gpu.minor is None:
            raise GresError(f"GPU {gpu.bus_id or '?'}: {gpu_detect.SOURCES[detection.source]} gives no model")
    types = [slurm_type(gpu.name or "") for gpu in gpus]
    devices = tuple(dev / f"nvidia{gpu.minor}" for gpu in gpus)
    cores, notes = _cores(gpus, settings, topology)
    links = _links(gpus)
    lines: list[str] = []
    for i, (kind, device) in enumerate(zip(types, devices, strict=True)):
        words = ["Name=gpu", f"Type={kind}", f"File={device}"]
        words += [f"Cores={cores[i]}"] if cores else []
        words += [f"Links={links[i]}"] if links else []
        lines.append(" ".join((*words, f"Flags={NVIDIA_ENV}")))
    counts: dict[str, int] = {}
    for kind in types:
        counts[kind] = counts.get(kind, 0) + 1
    return Plan(
        gres=",".join(f"gpu:{kind}:{count}" for kind, count in counts.items()),
        lines=tuple(lines),
        device_files=devices,
        explicit=any(kind != _as_slurm_detects(gpu.name or "") for kind, gpu in zip(types, gpus, strict=True)),
        notes=tuple(notes),
    )


def node_lines(node: str, lines: collections.abc.Iterable[str]) -> list[str]:
    """Return the records of one node as gres.conf takes them: for this node only, instead of any detection."""
    return [f"NodeName={node} AutoDetect=off {line}" for line in lines]


def slurm_type(name: str) -> str:
    """Return the Type of a model: Slurm's spelling, and underscores for what a Gres string cannot hold."""
    return _TYPE.sub("_", _as_slurm_detects(name))


def read_topology(sys_root: pathlib.Path = pathlib.Path("/sys")) -> Topology | None:
    """Return this machine's cores, or None where the kernel does not tell."""
    packages: dict[int, set[frozenset[int]]] = {}
    for directory in (sys_root / "devices/system/cpu").glob("cpu[0-9]*"):
        try:
            package = int((directory / "topology/physical_package_id").read_text())
            siblings = gpu_detect.parse_cpu_list((directory / "topology/thread_siblings_list").read_text().strip())
        except (OSError, ValueError):
            continue  # an offline CPU has no topology
        if siblings:
            packages.setdefault(package, set()).add(siblings)
    sockets = [tuple(sorted(cores, key=min)) for cores in packages.values()]
    return Topology(tuple(sorted(sockets, key=lambda cores: min(cores[0])))) if sockets else None


def ranges(numbers: collections.abc.Iterable[int]) -> str:
    """Return numbers as Slurm writes them: "0-3,8"."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    for i, number in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != number + 1:
            parts.append(f"{ordered[start]}-{number}" if number != ordered[start] else f"{number}")
            start = i + 1
    return ",".join(parts)


def _as_slurm_detects(name: str) -> str:
    """Spell a model as gpu_common_underscorify_tolower() of src/plugins/gpu/common/gpu_common.c does."""
    return name.strip().lower().replace(" ", "_")


def _cores(
    gpus: collections.abc.Sequence[gpu_detect.Gpu],
    settings: collections.abc.Mapping[str, str],
    topology: Topology | None,
) -> tuple[list[str] | None, list[str]]:
    """Return the Cores of each GPU, or None and the reason why no line gets any."""
    if topology is None or any(not gpu.cpus for gpu in gpus):
        return None, []
    shape = [len(socket) for socket in topology.sockets]
    if shape != _configured_shape(settings, shape):
        return None, ["no Cores: the node's --conf describes other sockets and cores than this machine has"]
    numbered = [core for socket in topology.sockets for core in socket]
    whole = {frozenset(range(topology.num_cores))}
    first = 0
    for size in shape:
        whole.add(frozenset(range(first, first + size)))
        first += size
    found: list[str] = []
    for gpu in gpus:
        near = frozenset(i for i, core in enumerate(numbered) if core & (gpu.cpus or frozenset()))
        if near not in whole:
            note = f"no Cores: {gpu.bus_id} sits beside cores {ranges(near)}, which are no whole socket"
            return None, [f"{note}; slurmd --parameters numa_node_as_socket would make them one"]
        found.append(ranges(near))
    return found, []


def _configured_shape(settings: collections.abc.Mapping[str, str], default: list[int]) -> list[int] | None:
    """Return the cores of each socket as `--conf` has them."""
    try:
        boards = int(settings.get("boards", "1"))
        if "socketsperboard" in settings:
            sockets = boards * int(settings["socketsperboard"])
        else:
            sockets = int(settings.get("sockets", len(default)))
        return [int(settings.get("corespersocket", default[0]))] * sockets
    except ValueError:
        return None


def _links(gpus: collections.abc.Sequence[gpu_detect.Gpu]) -> list[str] | None:
    """Return the Links of each GPU when NVML told them for all; their number must be that of the node's GPUs."""
    if any(gpu.links is None or len(gpu.links) != len(gpus) for gpu in gpus):
        return None
    return [",".join(str(count) for count in gpu.links or ()) for gpu in gpus]

"""Make a node's Gres and gres.conf lines, equal to what Slurm's own nvml detection yields.

The charm's README has the rules and their evidence ("How lines are made").
"""

import collections
import collections.abc
import dataclasses
import itertools
import pathlib
import re

import pci
from gpu import detect

SHARD = "shard"  # the Gres of a part of a card
_FLAGS = "nvidia_gpu_env"  # a line without a flag sets the variables of all four vendors
_NOT_IN_TYPES = re.compile(r"[^a-z0-9_.+-]")

# Why a node's GPUs cannot be registered, and what Slurm's lines lack
_NO_MODEL = "GPU {card}: {source} gives no model"
_MIG_UNSEEN = (
    "GPU {card} is in MIG mode, whose instances only NVML reports: install libnvidia-ml.so.1"
)
_MIG_EMPTY = (
    "GPU {card} is in MIG mode without instances: make some (nvidia-smi mig -cgi ... -C) or run "
    "nvidia-smi -i {card} -mig 0"
)
_MIG_SHARED = "no shards are available: GPU {card} is cut into MIG instances, which have none"
_OTHER_SOCKETS = (
    "no Cores: the node's --conf describes other sockets and cores than this machine has"
)
_CUT_SOCKET = (
    "no Cores: {card} sits beside cores {cores}, which are not a whole socket; slurmd --parameters numa_node_as_socket "
    "would make them one"
)

# The cores of a machine in Slurm's order (hwloc's): socket by socket, and the kernel's CPUs of each
# core
Topology = tuple[tuple[frozenset[int], ...], ...]


class GresError(ValueError):
    """These GPUs cannot be given to jobs as they are.

    `str()` is one line with the problem and its fix.
    """


@dataclasses.dataclass(frozen=True)
class Plan:
    """A node's GPUs in Slurm's form."""

    gres: str  # "gpu:h100:8"
    # All gres.conf records in device order, for AutoDetect=off and without NodeName
    lines: tuple[str, ...]
    device_files: tuple[pathlib.Path, ...]
    is_detected: bool = False  # whether Slurm's nvidia detection yields the same without lines
    notes: tuple[str, ...] = ()  # what was left out and why


@dataclasses.dataclass(frozen=True)
class _Device:
    """The device of one line: a card, or a MIG instance of one."""

    gpu: int  # the index of its card
    kind: str  # its Type
    files: tuple[pathlib.Path, ...]


def plan(
    detection: detect.Detection,
    settings: collections.abc.Mapping[str, str],
    topology: Topology | None,
    dev: pathlib.Path = pci.DEV,
    *,
    shards: int = 0,
) -> Plan:
    """Return the Gres and the lines of the detected GPUs.

    Each card or MIG instance has a line, in NVML's order.

    `settings` is the node's `--conf`. Without a `topology` no Cores are written. `shards` is the
    number for each card.

    Raises:
        GresError: a GPU cannot be handed out as it is.
    """
    gpus = detection.gpus
    for gpu in gpus:
        _check(gpu, detection.source, shards)
    devices: list[_Device] = []
    for index, gpu in enumerate(gpus):
        devices += _devices(index, gpu, dev)
    cores, notes, is_cut = _cores(gpus, settings, topology)
    lines: list[str] = []
    for device in devices:
        lines.append(_line(device, cores[device.gpu] if cores else ""))
    counts = collections.Counter(device.kind for device in devices)
    items = [f"gpu:{kind}:{count}" for kind, count in counts.items()]
    if shards:
        lines += [f"Name={SHARD} Count={shards} File={device.files[0]}" for device in devices]
        items.append(f"{SHARD}:{shards * len(devices)}")
    all_files = dict.fromkeys(file for device in devices for file in device.files)
    return Plan(
        gres=",".join(items),
        lines=tuple(lines),
        device_files=tuple(all_files),
        is_detected=not is_cut and not shards and all(map(_is_detected, gpus)),
        notes=tuple(notes),
    )


def _line(device: _Device, cores: str) -> str:
    """Write the record of a device."""
    key = "MultipleFiles" if len(device.files) > 1 else "File"
    words = ["Name=gpu", f"Type={device.kind}", f"{key}={','.join(map(str, device.files))}"]
    if cores:
        words.append(f"Cores={cores}")
    words.append(f"Flags={_FLAGS}")
    return " ".join(words)


def node_lines(node: str, lines: collections.abc.Iterable[str]) -> list[str]:
    """Return the records of one node for gres.conf, which replace any detection."""
    return [f"NodeName={node} AutoDetect=off {line}" for line in lines]


def fields(line: str) -> dict[str, str]:
    """Return the `Key=Value` words of a gres.conf record."""
    found: dict[str, str] = {}
    for word in line.split():
        key, equals, value = word.partition("=")
        if equals:
            found[key] = value
    return found


def device_files(line: str) -> list[str]:
    """Return the device files of a gres.conf record."""
    record = fields(line)
    listed = record.get("File") or record.get("MultipleFiles", "")
    return [file for file in listed.split(",") if file]


def slurm_type(name: str) -> str:
    """Return the Type of a model in Slurm's spelling.

    Characters that a Gres string cannot hold become underscores.
    """
    return _NOT_IN_TYPES.sub("_", _as_slurm_detects(name))


def read_topology() -> Topology | None:
    """Return this machine's cores, or None if the kernel does not show them."""
    packages: dict[int, set[frozenset[int]]] = {}
    for directory in (pci.SYS / "devices/system/cpu").glob("cpu[0-9]*"):
        try:
            package = int((directory / "topology/physical_package_id").read_text())
            siblings = detect.parse_cpu_list(
                (directory / "topology/thread_siblings_list").read_text().strip()
            )
        except (OSError, ValueError):
            continue  # an offline CPU has no topology
        if siblings:
            packages.setdefault(package, set()).add(siblings)
    sockets = [tuple(sorted(cores, key=min)) for cores in packages.values()]
    return tuple(sorted(sockets, key=lambda cores: min(cores[0]))) or None


def ranges(numbers: collections.abc.Iterable[int]) -> str:
    """Return numbers as Slurm writes them: "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] + 1 == number:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    words = ["-".join(map(str, run)) for run in runs]
    return ",".join(words)


def _check(gpu: detect.Gpu, source: str, shards: int) -> None:
    if not (gpu.name or "").strip() or gpu.minor is None:
        raise GresError(_NO_MODEL.format(card=gpu.bus_id or "?", source=detect.SOURCES[source]))
    if gpu.mig and not gpu.instances:
        text = _MIG_EMPTY if source == "nvml" else _MIG_UNSEEN
        raise GresError(text.format(card=gpu.bus_id))
    if gpu.mig and shards:
        raise GresError(_MIG_SHARED.format(card=gpu.bus_id))


def _as_slurm_detects(name: str) -> str:
    """Spell a model as gpu_common_underscorify_tolower() does.

    Source: src/plugins/gpu/common/gpu_common.c.
    """
    return name.strip().lower().replace(" ", "_")


def _is_detected(gpu: detect.Gpu) -> bool:
    """Whether Slurm's nvidia detection yields the card as planned; it sees no MIG instances."""
    return not gpu.instances and slurm_type(gpu.name or "") == _as_slurm_detects(gpu.name or "")


def _devices(index: int, gpu: detect.Gpu, dev: pathlib.Path) -> list[_Device]:
    name = gpu.name or ""
    card = dev / f"nvidia{gpu.minor}"
    if not gpu.instances:
        return [_Device(index, slurm_type(name), (card,))]
    model = _as_slurm_detects(name).partition("-")[0]  # cut as src/plugins/gpu/nvml/gpu_nvml.c does
    devices: list[_Device] = []
    for instance in gpu.instances:
        caps = [dev / f"nvidia-caps/nvidia-cap{number}" for number in instance.caps]
        kind = slurm_type(f"{model}_{instance.profile}")
        devices.append(_Device(index, kind, (card, *caps)))
    return devices


def _cores(
    gpus: collections.abc.Sequence[detect.Gpu],
    settings: collections.abc.Mapping[str, str],
    topology: Topology | None,
) -> tuple[list[str] | None, list[str], bool]:
    """Return each GPU's Cores, or None and why, and whether they cut a socket."""
    if topology is None or any(not gpu.cpus for gpu in gpus):
        return None, [], False
    shape = [len(socket) for socket in topology]
    if shape != _configured_shape(settings, shape):
        return None, [_OTHER_SOCKETS], False
    whole = _whole_sets(shape)
    found: list[str] = []
    for gpu in gpus:
        near = _near(gpu, topology)
        if near not in whole:
            return None, [_CUT_SOCKET.format(card=gpu.bus_id, cores=ranges(near))], True
        found.append(ranges(near))
    return found, [], False


def _whole_sets(shape: list[int]) -> set[frozenset[int]]:
    """List the sets that Slurm accepts as Cores: one whole socket, or all cores."""
    found = {frozenset(range(sum(shape)))}
    first = 0
    for size in shape:
        found.add(frozenset(range(first, first + size)))
        first += size
    return found


def _near(gpu: detect.Gpu, topology: Topology) -> frozenset[int]:
    """Return the numbers, as Slurm counts, of the cores that are close to a card."""
    numbered = list(itertools.chain.from_iterable(topology))
    cpus = gpu.cpus or frozenset()
    return frozenset(number for number, core in enumerate(numbered) if core & cpus)


def _configured_shape(
    settings: collections.abc.Mapping[str, str], default: list[int]
) -> list[int] | None:
    """Return the cores of each socket as `--conf` has them."""
    try:
        if "socketsperboard" in settings:
            sockets = int(settings.get("boards", "1")) * int(settings["socketsperboard"])
        else:
            sockets = int(settings.get("sockets", len(default)))
        return [int(settings.get("corespersocket", default[0]))] * sockets
    except ValueError:
        return None

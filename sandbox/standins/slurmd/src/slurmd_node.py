"""The compute node: its description in SLURMD_OPTIONS, and the charm's orders to Slurm for it."""

import collections.abc
import dataclasses
import importlib
import json
import typing

import slurmutils
from common import conf, service

from slurm_ddp.commands import run

SERVICE = service.Service(
    "slurmd",
    owner="root",
    packages=("slurm-client",),
    dropin=(
        "[Unit]\nStartLimitIntervalSec=90\nStartLimitBurst=10\n\n"
        "[Service]\nLimitMEMLOCK=infinity\nLimitNOFILE=1048576\nRestart=on-failure\nRestartSec=10\n"
    ),
    raises_limits=True,
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The charm's options."""

    state: str
    reason: str
    partition: slurmutils.Partition


def parse(app: str, options: collections.abc.Mapping[str, object]) -> Settings:
    """Return the options of the charm deployed as `app`. Raises `conf.OptionsRefused`.

    The application's name and nodes always override the partition's in partition-config.
    """
    reasons: dict[str, str] = {}
    state, reason = str(options["default-node-state"]), str(options["default-node-reason"])
    if state not in ("idle", "down"):
        reasons["default-node-state"] = f"{state!r} is neither idle nor down"
    partition = slurmutils.Partition()
    try:
        partition = slurmutils.Partition.from_str(str(options["partition-config"]))
    except (slurmutils.ModelError, ValueError) as e:
        reasons["partition-config"] = str(e)
    if reasons:
        raise conf.OptionsRefused(reasons)
    partition.partition_name = app
    partition.nodes = [app]
    return Settings(state, reason or ("n/a" if state == "down" else ""), partition)


def describe(unit: str, gpus: list[str]) -> slurmutils.Node:
    """Return the report of `slurmd -C` on this machine, as a node of the application's partition.

    Without a GPU, gres stays in `--conf` as an empty word. Hosts share one computer's cores: nodes
    with odd numbers leave the first half to those with even numbers, which leave the second half
    (CpuSpecList). Raises CommandError, slurmutils.ModelError.
    """
    node = slurmutils.Node.from_str(
        run("/usr/sbin/slurmd", "-C").stdout.strip().splitlines()[:-1][0]
    )
    assert node.real_memory is not None
    node.mem_spec_limit = min(1024, node.real_memory // 2)
    node.gres = gpus
    del node.node_name
    app, number = unit.split("/")
    node.features = [app]
    cpus, threads = node.cpus or 1, node.threads_per_core or 1
    if half := cpus // threads // 2 * threads:
        node.cpu_spec_list = list(range(half) if int(number) % 2 else range(half, cpus))
    return node


def gpus() -> list[str]:
    """Return NVML's cards as Gres, one word for each model; empty if NVML does not load."""
    nvml: typing.Any = importlib.import_module(
        "pynvml"
    )  # untyped; slurm-gpu brings it to every host
    counts: dict[str, int] = {}
    try:
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            name = str(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(index)))
            model = "_".join(name.split()).lower()
            counts[model] = counts.get(model, 0) + 1
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return []
    return [f"gpu:{model}:{count}" for model, count in counts.items()]


def node() -> slurmutils.Node:
    """Return `--conf`. Raises slurmutils.ModelError if it has something unknown to slurmutils."""
    return slurmutils.Node.from_str(str(SERVICE.options().get("--conf", "")))


def set_node(node: slurmutils.Node) -> None:
    """Write `--conf`."""
    SERVICE.set_options(SERVICE.options() | {"--conf": str(node)})


def name() -> str:
    """Return the node's name in Slurm."""
    return str(SERVICE.options().get("-N", ""))


def exists() -> bool:
    """Return whether Slurm knows the node; False too if the controller does not answer."""
    try:
        service.scontrol("show", "node", name())
    except service.SlurmError:
        return False
    return True


def show() -> dict[str, typing.Any]:
    """Return Slurm's record of the node. Raises `SlurmError`."""
    return json.loads(service.scontrol("--json", "show", "node", name()))["nodes"][0]


def delete() -> None:
    """Delete the node from Slurm. Raises `SlurmError`, for example if it runs jobs."""
    service.scontrol("delete", f"nodename={name()}")


def reconfigure(state: str = "", reason: str = "") -> None:
    """Restart slurmd and, without waiting for its registration, set a state. Raises `SlurmError`.

    `idle` ends a drain. The quotes around a reason become part of it.
    """
    SERVICE.reconfigure()
    if not state:
        return
    words = [f"nodename={name()}", f"state={state}"]
    if state != "idle":
        reason = reason or "n/a"
        is_quoted = reason.startswith(("'", '"')) and reason.endswith(("'", '"'))
        words.append(f"reason={reason}" if is_quoted else f"reason='{reason}'")
    service.scontrol("update", *words)

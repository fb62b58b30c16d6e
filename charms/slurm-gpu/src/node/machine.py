"""This machine as a compute node: its GPUs, slurmd's options, its Gres and gres.conf lines."""

import dataclasses
import logging
import pathlib
import socket

import pci
import settings
from gpu import detect, gres, gres_check, gres_conf
from node import journals, slurmd_options, slurmd_unit
from slurm_ddp import files
from slurm_ddp.interfaces import slurm_gres
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

PLUGIN_DIRS = (
    pathlib.Path("/usr/lib/x86_64-linux-gnu/slurm-wlm"),
    pathlib.Path("/usr/lib/x86_64-linux-gnu/slurm"),
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """This machine at the start of a hook."""

    detection: detect.Detection
    config: settings.Config
    autodetect: str  # AutoDetect of the controller's gres.conf
    answer: slurm_gres.ControllerGres | None = None  # published by the controller
    before: slurm_gres.NodeGres | None = None  # published by this unit before
    options: slurmd_options.Options | None = None  # None while slurmd's charm has not written them
    node: str | None = None
    plan: gres.Plan | None = None  # None without usable GPUs
    # What gres.conf must hold for them; none where slurmd finds them by itself
    lines: tuple[str, ...] = ()
    problem: str | None = None  # a problem that the operator must fix before anything changes

    @property
    def configured(self) -> str | None:
        """The Gres in slurmd's options."""
        return self.options.gres if self.options else None

    @property
    def wanted(self) -> str | None:
        """The Gres to register: this machine's GPUs, and additions of others to `--conf`."""
        return slurmd_options.merged_gres(self.configured, self.plan.gres if self.plan else None)

    @property
    def registers_gpus(self) -> bool:
        """Whether slurmd's options have GPUs."""
        return "gpu" in slurmd_options.gres_names(self.configured)


def look(
    config: settings.Config | None = None,
    answer: slurm_gres.ControllerGres | None = None,
    before: slurm_gres.NodeGres | None = None,
) -> Machine:
    """Return this machine's state, given the options and the data published by both sides."""
    config = config or settings.Config()
    machine = Machine(detect.detect(), config, _autodetect(answer), answer, before)
    try:
        machine = _with_node(machine)
        problem = config.problem or machine.detection.problem
        if problem or not machine.detection.gpus:
            return dataclasses.replace(machine, problem=problem)
        return _with_lines(dataclasses.replace(machine, plan=_plan(machine)))
    except (slurmd_options.OptionsError, ValueError) as e:
        return dataclasses.replace(machine, problem=str(e))


def lost(machine: Machine) -> str | None:
    """Return the cards that are missing or without a driver, None when all are there."""
    had = journals.cards()
    cards = [gpu.bus_id for gpu in machine.detection.gpus]
    if not had:
        return None
    if machine.detection.problem:
        return machine.detection.problem
    missing = sorted(had - set(cards))
    if len(cards) >= len(had) or not missing:  # a card in another slot is not lost
        return None
    return f"{len(cards)} of {len(had)} GPUs found, {', '.join(missing)} missing"


def pushed_lines(node: str | None) -> list[str]:
    """Return the node's records in the gres.conf that its slurmd fetched last."""
    return [
        row
        for row in files.read(slurmd_unit.PUSHED).splitlines()
        if row.startswith(f"NodeName={node} ")
    ]


def _with_node(machine: Machine) -> Machine:
    options = slurmd_options.read()
    node = options.node if options else None
    if node is None and options is not None and options.conf_server:
        node = socket.gethostname().partition(".")[0]
    if node is not None and not slurm_gres.is_node_name(node):
        raise ValueError(f"{slurmd_options.PATH}: no node can have the name {node!r:.60}")
    return dataclasses.replace(machine, options=options, node=node)


def _plan(machine: Machine) -> gres.Plan:
    """Return the Gres and lines of this machine's GPUs.

    Raises `ValueError` where jobs cannot have them.
    """
    conf = machine.options.settings if machine.options else {}
    shards = machine.config.shards_per_gpu
    plan = gres.plan(machine.detection, conf, gres.read_topology(), pci.DEV, shards=shards)
    if machine.node is not None:
        _check_gres_types({"gpu": "", gres.SHARD: "shards-per-gpu: "} if shards else {"gpu": ""})
    try:
        slurm_gres.NodeGres(gres=plan.gres, lines=plan.lines)
    except ValueError as e:  # refuse it here, since the controller would
        raise ValueError(f"Slurm cannot hold the names of these GPUs: {plan.gres!r:.80}") from e
    return plan


def _with_lines(machine: Machine) -> Machine:
    """Return the machine with the lines that slurmd needs to find its devices.

    There are none if it detects them.
    """
    plan, node = machine.plan, machine.node
    assert plan is not None
    conf = machine.options.settings if machine.options else {}
    can_check = all(file.exists() for file in plan.device_files)
    if plan.is_detected and _can_detect(machine):
        problem = (
            gres_check.difference(node, plan, (), conf, machine.autodetect)
            if node and can_check
            else None
        )
        if problem is None:
            return machine
        logger.info("slurmd's own detection does not yield these GPUs: %s", problem)
    problem = gres_check.difference(node, plan, plan.lines, conf) if node and can_check else None
    return dataclasses.replace(machine, lines=plan.lines, problem=problem)


def _can_detect(machine: Machine) -> bool:
    """Whether slurmd has the detection that the controller's gres.conf asks for."""
    if machine.autodetect == "nvml" and machine.detection.source == "nvml":
        return any((path / "gpu_nvml.so").exists() for path in PLUGIN_DIRS)
    return machine.autodetect == "nvidia"


def _check_gres_types(wanted: dict[str, str]) -> None:
    """Raise `ValueError` if slurm.conf lacks one of these, which costs a node all its Gres.

    The option's name comes first.
    """
    try:
        types = set((nodes.setting("GresTypes") or "").split(",")) - {""}
    except nodes.NodeError:
        return  # nothing is registered without a controller, and the next event asks again
    for name, option in wanted.items():
        if name not in types:
            kinds = ",".join(sorted({*wanted, *types}))
            raise ValueError(
                f"{option}set GresTypes={kinds} in slurm.conf (docs/howto/gpus.md): it has no {name}"
            )


def _autodetect(answer: slurm_gres.ControllerGres | None) -> str:
    """Return the AutoDetect of the controller's gres.conf.

    Until that is known, return the value that upstream writes there.
    """
    if answer and answer.autodetect:
        return answer.autodetect
    try:
        return (
            gres_conf.read(slurmd_unit.PUSHED).autodetect
            if slurmd_unit.PUSHED.exists()
            else "nvidia"
        )
    except gres_conf.GresConfError:
        return "off"

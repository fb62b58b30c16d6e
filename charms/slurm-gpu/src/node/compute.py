"""The compute role: publish this machine's gres.conf lines, register its GPUs, report progress."""

import contextlib
import logging
import pathlib

import settings
from gpu import detect, gres
from node import (
    health,
    health_timer,
    journals,
    kept,
    orders,
    registration,
    slurmd_options,
    slurmd_unit,
)
from node import machine as machines
from node.machine import Machine, lost
from node.registration import Progress, Stage
from slurm_ddp import files
from slurm_ddp.charm import ActionError, Level, Status
from slurm_ddp.commands import CommandError
from slurm_ddp.interfaces import slurm_gres
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

OWNER = journals.STATE_DIR / "compute"  # the unit that registers this machine's GPUs

# LOST never comes here: the loss is reported before
_TEXTS = {
    Stage.REGISTERED: (Level.ACTIVE, "{gres} on {node} ({how})"),
    Stage.KEPT: (Level.WAITING, "{node} {detail}"),
    Stage.UNREGISTERED: (Level.WAITING, "waiting for slurmd to register {node}"),
    Stage.AWAITS_LINES: (
        Level.WAITING,
        "waiting for slurm-gpu on slurmctld to hand out this node's lines",
    ),
    Stage.AWAITS_JOBS: (
        Level.WAITING,
        "{node} is drained: waiting for {detail} before its GPUs are registered",
    ),
    Stage.RESERVED: (Level.BLOCKED, "{detail}: it holds {node}"),
    Stage.STOPPED: (Level.WAITING, "waiting for slurmd to run on {node}"),
    Stage.SILENT: (Level.WAITING, "waiting for slurmctld ({detail})"),
    Stage.DIFFERS: (Level.WAITING, "{node} has Gres={detail}; {gres} follows with the next event"),
    Stage.KEPT_AWAY: (
        Level.BLOCKED,
        "scontrol update nodename={node} state=resume, since it takes no jobs: {detail}",
    ),
    Stage.INVALID: (Level.BLOCKED, "Slurm refuses {node}: {detail}"),
    Stage.STATIC: (Level.BLOCKED, "set Gres={gres} for {node} in slurm.conf: it has {detail}"),
    Stage.FAILED: (Level.BLOCKED, "see journalctl -u slurmd: {detail}"),
}
_DIFFERS_WITHOUT_GPUS = (
    Level.BLOCKED,
    "scontrol delete nodename={node}, then systemctl restart slurmd: it has Gres={detail}, not {gres}",
)
_NO_GPU = "no NVIDIA GPU on this machine"
_NO_CONTROLLER = Status(
    Level.BLOCKED,
    "slurmd does not find these GPUs by itself: integrate node-gres with slurm-gpu on slurmctld",
)


def offer(machine: Machine) -> slurm_gres.NodeGres | None:
    """Compose the data to publish; None while nothing is certain.

    While the node is registered with another Gres, the lines suit that one, too: slurmd must not
    report less. Lines of lost cards are left out: slurmd does not start with a line for a missing
    device file.
    """
    node = machine.node
    if node is None:
        return None
    names = machine.plan.gres if machine.plan else ""
    before = _published_lines(machine)
    if lost(machine):
        is_planned = machine.plan is not None and not machine.problem
        kept_lines = _with_files(machine.lines if is_planned else before)
        return slurm_gres.NodeGres(node=node, gres=names, lines=kept_lines, awaits=False)
    if machine.problem:
        return None
    lines = machine.lines
    if not set(before) <= set(lines) and not _is_registered(machine):
        lines = _lines_of_both(machine, before)
    awaits = bool(lines or machines.pushed_lines(node))
    return slurm_gres.NodeGres(node=node, gres=names, lines=lines, awaits=awaits)


def _published_lines(machine: Machine) -> tuple[str, ...]:
    """Return the lines that this unit published for the node before."""
    published = machine.before
    if published is None or published.node != machine.node:
        return ()
    return published.lines or ()


def _lines_of_both(machine: Machine, before: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines for the former Gres and the present one.

    A present line replaces one for the same devices.
    """
    wanted = machine.lines
    if not wanted and machine.plan is not None:  # all: one line ends the detection
        wanted = machine.plan.lines
    still_there = _with_files(before)
    if not wanted or not still_there:
        return machine.lines
    by_devices = {_key(line): line for line in still_there}
    by_devices |= {_key(line): line for line in wanted}
    return tuple(by_devices.values())


def awaits_drain(machine: Machine, progress: Progress | None) -> bool:
    """Whether jobs are to be kept off a node that lost cards as soon as its controller answers."""
    return (
        lost(machine) is not None
        and progress is not None
        and progress.stage in {Stage.SILENT, Stage.FAILED}
    )


def accept(machine: Machine) -> None:
    """Accept the cards found now as the complete set.

    Raises:
        ActionError: there are none, or they cannot be registered.
    """
    if machine.problem or machine.plan is None:
        raise ActionError(machine.problem or _NO_GPU)
    journals.clear(journals.CARDS)


def lines_live(machine: Machine) -> bool:
    """Whether slurmd will find the devices if it registers now.

    The controller then has the lines that were offered, or none.
    """
    if machine.plan is None:
        return True
    offered = offer(machine)
    if offered is None:
        return False
    if machines.pushed_lines(machine.node) == gres.node_lines(
        offered.node or "", offered.lines or ()
    ):
        return True
    return bool(
        machine.answer and machine.answer.applied and offered.digest in machine.answer.applied
    )


def ensure(machine: Machine, *, owner: str) -> Progress | None:
    """Register the GPUs as far as possible now; return None if there are none.

    `offer` is published before.
    """
    registration.refresh_drained_start()
    ensure_health_check(machine)
    loss, node, plan = lost(machine), machine.node, machine.plan
    if loss and node is not None:
        if plan is not None:  # so that slurmd does not wait for the lost cards at each start
            with contextlib.suppress(CommandError):
                slurmd_unit.ensure_dropin(plan.device_files)
        return registration.drain_for_loss(node, loss)
    if machine.problem or machine.options is None or node is None or plan is None:
        return None
    files.ensure_file(OWNER, owner + "\n")
    try:
        slurmd_unit.ensure_dropin(plan.device_files)
        if detect.ensure_device_files(plan.device_files):
            return None
    except CommandError as e:
        return Progress(Stage.FAILED, str(e))
    target = registration.Target(
        node, machine.wanted, machine.options, lines_live=lines_live(machine)
    )
    progress = registration.advance(target)
    if progress.stage is Stage.REGISTERED:
        cards = {gpu.bus_id: gpu.name for gpu in machine.detection.gpus if gpu.bus_id}
        journals.write(journals.CARDS, cards)
    return progress


def release(*, owner: str, config: settings.Config | None = None) -> None:
    """Hand the machine back to Slurm, which goes on without this charm and its lines.

    Where slurmd finds the GPUs by itself they stay registered. May be called again.
    """
    if not OWNER.exists():
        # No GPU was ever registered here; the health check may have been set up all the same
        if health_timer.PROGRAM.exists():
            _end_drain(machines.look(config))
        health_timer.ensure_absent()
        return
    if OWNER.read_text().strip() != owner:
        return
    machine = machines.look(config)
    _leave_registration(machine)
    _end_drain(machine)
    health_timer.ensure_absent()
    slurmd_unit.ensure_no_dropin()
    for journal in (journals.ORDER, journals.CARDS, journals.SERVED):  # leaving writes the last
        journals.clear(journal)
    for path in (slurmd_unit.DRAINED_ENV, OWNER):
        files.ensure_absent(path)


def detected(machine: Machine) -> dict[str, str]:
    """Return the GPUs and their source, for the `detect` action."""
    found = machine.detection
    results = {
        "source": detect.SOURCES[found.source],
        "count": str(len(found.gpus)),
        "gpus": "\n".join(map(_in_words, found.gpus)),
        "driver": found.driver,
        "problem": machine.problem,
        "note": found.note,
    }
    return {key: text for key, text in results.items() if text is not None}


def _in_words(gpu: detect.Gpu) -> str:
    parts = [
        f"{gpu.bus_id or '?'}: {gpu.name or 'model unknown'}",
        f"/dev/nvidia{gpu.minor}" if gpu.minor is not None else "no device file",
        f"CPUs {gres.ranges(gpu.cpus)}" if gpu.cpus else "",
        gpu.uuid or "",
        f"MIG: {len(gpu.instances)} instances" if gpu.mig else "",
    ]
    return ", ".join(filter(None, parts))


def summary(machine: Machine) -> dict[str, str]:
    """Compare the wanted, the configured and the registered Gres, for the `show-gres` action."""
    plan = machine.plan
    results = {
        "node": machine.node or "",
        "configured": machine.configured or "",
        "lines": "\n".join(gres.node_lines(machine.node or "?", machine.lines)),
        "lines-live": str(lines_live(machine)).lower(),
        "problem": machine.problem or "",
    }
    if plan is not None:
        results["wanted"] = plan.gres
        results["notes"] = "\n".join(plan.notes)
        results["found-by"] = _how(machine)
    if machine.node is not None:
        results |= _as_registered(machine.node, results["problem"])
    return {key: text for key, text in results.items() if text}


def _as_registered(name: str, problem: str) -> dict[str, str]:
    """Return the node as the controller has it.

    A silent controller is a problem, unless there is another one.
    """
    try:
        node = nodes.show(name)
    except nodes.NodeError as e:
        return {"problem": problem or str(e)}
    if node is None:
        return {"state": "not registered"}
    return {"registered": node.gres or "", "state": node.state_text, "reason": node.reason or ""}


def status(machine: Machine, *, related: bool, progress: Progress | None) -> Status:
    """Return the status of the node.

    The controller is asked again, unless `progress` of this hook is an obstacle.
    """
    if machine.problem:
        return Status(Level.BLOCKED, machine.problem)
    loss = lost(machine)
    if loss:
        return Status(Level.BLOCKED, f"bring back what is missing, or run accept-gpus: {loss}")
    if machine.plan is None:
        return _status_without_gpus(machine, progress)
    if machine.node is None:
        return Status(Level.WAITING, "waiting for slurmd to be set up")
    missing = [str(file) for file in machine.plan.device_files if not file.exists()]
    if missing:
        return Status(Level.WAITING, f"waiting for the driver to make {', '.join(missing)}")
    if progress is None or progress.stage is Stage.REGISTERED:
        progress = registration.inspect(machine.node, machine.wanted, machine.config)
    return _status_with_gpus(machine, machine.plan, progress, related=related)


def _status_with_gpus(
    machine: Machine, plan: gres.Plan, progress: Progress, *, related: bool
) -> Status:
    """Turn the progress of a node with GPUs into its status."""
    stage = progress.stage
    if stage is Stage.KEPT_AWAY and kept.maintenance() is not None:
        stage = Stage.REGISTERED  # `maintenance.hooks` reports its own hold
    complaint = health.State.load().reason
    if complaint and stage in {Stage.REGISTERED, Stage.KEPT_AWAY}:
        return Status(Level.BLOCKED, f"{machine.node} is unfit: {complaint}")
    needs_lines = stage is Stage.AWAITS_LINES or not lines_live(machine)
    if needs_lines and stage not in {Stage.REGISTERED, Stage.KEPT}:
        if not related:
            return _NO_CONTROLLER
        if stage is not Stage.KEPT_AWAY:
            stage = Stage.AWAITS_LINES
    level, text = _TEXTS[stage]
    return Status(
        level,
        text.format(node=machine.node, detail=progress.detail, gres=plan.gres, how=_how(machine)),
    )


def _status_without_gpus(machine: Machine, progress: Progress | None) -> Status:
    node = machine.node
    if machine.registers_gpus:
        had = nodes.plain_gres(machine.configured)
        return Status(
            Level.BLOCKED, f"{node} registers {had}, but this machine shows no NVIDIA GPU"
        )
    has_joined = machine.options is not None and machine.options.conf_server is not None
    if (progress is None or progress.stage is Stage.REGISTERED) and node is not None and has_joined:
        progress = registration.inspect(node, machine.configured, machine.config)
    if progress is None or progress.stage in {Stage.REGISTERED, Stage.UNREGISTERED}:
        return Status(Level.ACTIVE, _NO_GPU)
    level, text = _TEXTS[progress.stage]
    if progress.stage is Stage.DIFFERS:  # which the charm changes only for GPUs
        level, text = _DIFFERS_WITHOUT_GPUS
    return Status(
        level, text.format(node=node, detail=progress.detail, gres=machine.configured or "(none)")
    )


def _is_registered(machine: Machine) -> bool:
    """Whether the controller has the Gres that this node should have, or does not know the node."""
    assert machine.node is not None
    try:
        node = nodes.show(machine.node)
    except nodes.NodeError:
        return False
    return node is None or nodes.same_gres(node.gres, machine.wanted if machine.plan else None)


def _with_files(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines whose device files are there."""
    found: list[str] = []
    for line in lines:
        files_of_line = map(pathlib.Path, gres.device_files(line))
        if all(file.exists() for file in files_of_line):
            found.append(line)
    return tuple(found)


def _key(line: str) -> tuple[object, ...]:
    """Compute a key that two lines for the same devices under the same type share."""
    record = gres.fields(line)
    return (record["Name"], record.get("Type"), *gres.device_files(line))


def ensure_health_check(machine: Machine) -> None:
    """Set up the health check's timer, or remove it if there is nothing to check.

    That is without a node or a GPU, or if the option says never.
    """
    config = machine.config
    if config.problem:
        return  # the status reports it
    is_wanted = bool(machine.detection.gpus) and config.health_check != "never"
    try:
        health_timer.ensure(machine.node if is_wanted else None, config.health_xids)
    except CommandError as e:  # the GPUs are registered all the same
        logger.warning("the health check is not set up: %s", e)


def _leave_registration(machine: Machine) -> None:
    """Register the node without GPUs if slurmd cannot find them without lines.

    A registration in progress ends.
    """
    if machine.options is None or machine.node is None:
        return
    lines_go = machine.registers_gpus and machine.autodetect == "off"
    if machine.plan is not None:
        lines_go = bool(machine.lines)
    if lines_go:  # without which slurmd does not find the GPUs
        left = slurmd_options.merged_gres(machine.options.gres, None)
    elif journals.NodeSnapshot.load() is not None:  # in the middle of a registration
        left = machine.wanted if machine.plan else machine.options.gres
    else:
        return
    registration.leave(registration.Target(machine.node, left, machine.options))


def _end_drain(machine: Machine) -> None:
    """Resume a node that this charm drained for a reason that has passed; leave others drained.

    The cards are not checked any more, so a drain of the health check stays.
    """
    if machine.node is None:
        return
    try:
        node = nodes.show(machine.node)
        if node is None:
            return
        by_health = (node.reason or "").startswith(health.REASON)
        is_ours = node.is_drained and (by_health or orders.is_ours(node.reason))
        wrong = lost(machine) if nodes.count_gres(node.gres, "gpu") else None
        if is_ours and node.is_valid and wrong is None and not by_health:
            nodes.resume(node.name)
        elif wrong is not None and not orders.is_kept_away(node):
            nodes.drain(node.name, f"slurm-gpu: {wrong}"[: kept.MOST_REASON])
    except nodes.NodeError as e:
        logger.warning("%s may stay drained, see sinfo -R: %s", machine.node, e)


def _how(machine: Machine) -> str:
    """Describe how slurmd finds the GPUs: "from NVML; found by AutoDetect=nvml"."""
    source = detect.SOURCES[machine.detection.source]
    if machine.lines:
        return f"from {source}; lines in the controller's gres.conf"
    return f"from {source}; found by AutoDetect={machine.autodetect}"

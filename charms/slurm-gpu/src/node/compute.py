"""The compute seat: from the GPUs of this machine to a node that Slurm gives them out on."""

import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import re
import socket

import settings as gpu_settings
from controller import advice as slurm_advice
from gpu import detect as gpu_detect
from gpu import gres, gres_check, gres_conf
from gpu_base import Level, Verdict
from maintenance import hold as gpu_hold
from node import health_check as gpu_monitor
from node import registration, slurmd_options
from node import resume as bring_up
from slurm_ddp import files, readiness
from slurm_ddp.interfaces import slurm_gres
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

STATE_DIR = registration.STATE_DIR
OWNER = STATE_DIR / "compute"  # the unit that registers this machine's GPUs
CARDS = STATE_DIR / "cards.json"  # the bus ids of the cards that the node was registered with last
SHARED = STATE_DIR / "shared"  # the name of the shares of cards that the node was registered with last
PUSHED = pathlib.Path("/run/slurm/conf/gres.conf")  # what a configless slurmd fetched
PLUGIN_DIRS = (pathlib.Path("/usr/lib/x86_64-linux-gnu/slurm-wlm"), pathlib.Path("/usr/lib/x86_64-linux-gnu/slurm"))
ROOTS = gpu_detect.Roots()
_LOCAL_UNIT = "local/0"  # the one entry of a node's own gres.conf


_TEXTS = {
    registration.Stage.UNREGISTERED: (Level.WAITING, "waiting for slurmd to register {node}"),
    registration.Stage.AWAITS_JOBS: (
        Level.WAITING,
        "{node} is drained: waiting for {detail} before its GPUs are registered",
    ),
    registration.Stage.RESERVED: (Level.BLOCKED, "{node} cannot be registered with {gres} while it is in {detail}"),
    registration.Stage.STOPPED: (Level.WAITING, "waiting for slurmd to run on {node}"),
    registration.Stage.SILENT: (Level.WAITING, "waiting for slurmctld ({detail})"),
    registration.Stage.DIFFERS: (Level.WAITING, "{node} has Gres={detail}; {gres} follows with the next event"),
    registration.Stage.KEPT_AWAY: (
        Level.BLOCKED,
        "{node} takes no jobs: {detail}; scontrol update nodename={node} state=resume ends that",
    ),
    registration.Stage.INVALID: (Level.BLOCKED, "Slurm refuses {node}: {detail}"),
    registration.Stage.STATIC: (Level.BLOCKED, "slurm.conf has {detail} for {node}: set Gres={gres} there"),
    registration.Stage.FAILED: (Level.BLOCKED, "{detail}; see journalctl -u slurmd"),
}  # REGISTERED and AWAITS_LINES depend on more than the stage
_DIFFERS_WITHOUT_GPUS = (
    Level.BLOCKED,
    "{node} has Gres={detail}, slurmd's options {gres}: scontrol delete nodename={node}, then systemctl restart slurmd",
)
_TAKES_JOBS_OR_NOT = frozenset({registration.Stage.REGISTERED, registration.Stage.KEPT_AWAY})


class MachineError(Exception):
    """What was asked of this machine cannot be done. `str()` is one line."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """This machine as it is at the start of a hook."""

    detection: gpu_detect.Detection
    options: slurmd_options.Options | None  # None while slurmd's charm has not written them
    version: tuple[int, int] | None  # slurmd's
    node: str | None
    local: bool  # slurmd reads this machine's own files
    settings: gpu_settings.Settings = dataclasses.field(default_factory=gpu_settings.Settings)
    plan: gres.Plan | None = None  # None without usable GPUs
    lines: tuple[str, ...] = ()  # what gres.conf must hold for them; none where slurmd finds them by itself
    problem: str | None = None  # what a person must fix before anything is changed

    @functools.cached_property
    def offer(self) -> slurm_gres.NodeGres | None:
        """What the controller should know, None while there is nothing certain. `awaits` is not filled in."""
        if self.node is None or self.problem:
            return None
        return slurm_gres.NodeGres(node=self.node, gres=self.plan.gres if self.plan else "", lines=self.lines)


def look(wishes: gpu_settings.Settings | None = None, answer: slurm_gres.ControllerGres | None = None) -> Machine:
    """Return this machine as it is, under these options and what the controller's gres.conf makes nodes do."""
    machine = _look(wishes or gpu_settings.Settings(), answer)
    try:
        _ = machine.offer
    except ValueError:  # what the controller's side would refuse is refused here
        names = machine.plan.gres if machine.plan else ""
        return dataclasses.replace(
            machine, plan=None, lines=(), problem=f"Slurm cannot hold the names of these GPUs: {names!r:.80}"
        )
    return machine


def _look(wishes: gpu_settings.Settings, answer: slurm_gres.ControllerGres | None) -> Machine:
    detection = gpu_detect.detect(ROOTS)
    version = registration.slurm_version()
    try:
        options = slurmd_options.read()
        local = slurmd_options.is_local()
    except slurmd_options.OptionsError as e:
        return Machine(detection, None, version, None, local=False, problem=str(e))
    if options is None and local:
        options = slurmd_options.Options(None, None, None)
    node = options.node if options else None
    if options is not None and node is None and (local or options.conf_server):
        node = socket.gethostname().partition(".")[0]
    if node is not None and not slurm_gres.is_node_name(node):
        text = f"{slurmd_options.PATH}: no node can have the name {node!r:.60}"
        return Machine(detection, options, version, None, local, wishes, problem=text)
    problem = gpu_monitor.problem(wishes.health) or detection.problem
    machine = Machine(detection, options, version, node, local, wishes, problem=problem)
    settings = options.settings if options else {}
    try:
        names = wishes.check()
        if machine.problem or not detection.gpus:
            return machine
        topology = gres.read_topology(ROOTS.sys)
        plan = gres.plan(detection, settings, topology, ROOTS.dev, names, shares=wishes.shares)
    except (gpu_settings.SettingsError, gres.GresError) as e:
        return dataclasses.replace(machine, problem=str(e))
    if node is not None:
        problem = _unknown_to_slurm(wishes.shares)
        if problem:
            return dataclasses.replace(machine, problem=problem)
    autodetect = _autodetect(answer)
    beside = None if local else _beside(machine, plan, autodetect)
    lines = plan.lines if beside is None else beside
    if version is None or node is None or not all(file.exists() for file in plan.device_files):
        return dataclasses.replace(machine, plan=plan, lines=lines)
    if beside is not None:
        problem = gres_check.difference(node, plan, beside, settings, autodetect)
        if problem is None:
            return dataclasses.replace(machine, plan=plan, lines=beside)
        logger.info("slurmd's own detection will not do: %s", problem)
    problem = gres_check.difference(node, plan, plan.lines, settings)
    return dataclasses.replace(machine, plan=plan, lines=plan.lines, problem=problem)


def _beside(machine: Machine, plan: gres.Plan, autodetect: str) -> tuple[str, ...] | None:
    """Return what gres.conf must hold beside slurmd's own detection, None where that will not do."""
    if plan.beside is None or (autodetect != "nvidia" and not (autodetect == "nvml" and _has_nvml_plugin(machine))):
        return None
    return tuple(f"AutoDetect={autodetect} {line}" for line in plan.beside)


def offer(machine: Machine, published: slurm_gres.NodeGres | None) -> slurm_gres.NodeGres | None:
    """Return what to publish, None for what is published already.

    Its lines suit the Gres that the node is registered with, too, as long as that is another than it should have: a
    slurmd that reads them meanwhile must not fall short of it. A line for a device file that is not there would keep
    slurmd from starting, so the lines of a lost card go.

    Args:
        machine: this machine.
        published: what this unit published last.
    """
    before = (published.lines or ()) if published and published.node == machine.node else ()
    if lost(machine) and machine.node is not None:
        lines = machine.lines if machine.plan is not None and not machine.problem else before
        names = machine.plan.gres if machine.plan else ""
        return slurm_gres.NodeGres(node=machine.node, gres=names, lines=_with_files(lines), awaits=False)
    said = machine.offer
    if said is None:
        return None
    lines = machine.lines
    if not set(before) <= set(lines) and not _is_registered(machine):
        kept = {_key(line): line for line in _with_files(before) if _fits(line, lines)}
        lines = tuple((kept | {_key(line): line for line in lines}).values())
        lines = tuple(re.sub(r" Links=\S+", "", line) for line in lines)  # whose length is that of one Gres
    awaits = not machine.local and bool(lines or _pushed_lines(machine))
    return said.model_copy(update={"lines": lines, "awaits": awaits})


def _is_registered(machine: Machine) -> bool:
    """Whether the controller has the Gres that this node should have, or does not know the node."""
    assert machine.node is not None
    try:
        node = nodes.show(machine.node)
    except nodes.NodeError:
        return False
    return node is None or nodes.same_gres(node.gres, _wanted(machine) if machine.plan else None)


def _with_files(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines whose device files are there."""
    return tuple(line for line in lines if all(pathlib.Path(file).exists() for file in _files(line)))


def _files(line: str) -> list[str]:
    return [file for text in re.findall(r"\b(?:Multiple)?Files?=(\S+)", line) for file in text.split(",")]


def _key(line: str) -> tuple[object, ...]:
    """Return what two lines for the same devices under the same type have in common."""
    return (re.findall(r"\bName=\S+", line)[0], *re.findall(r"\bType=\S+", line), *_files(line))


def _fits(line: str, lines: tuple[str, ...]) -> bool:
    """Whether a line can stand beside others of its node: all must name one detection, and none means any."""
    modes = [word.partition(" ")[0] if word.startswith("AutoDetect=") else None for word in (line, *lines[:1])]
    return modes[0] == modes[1] if lines else modes[0] is not None


def lost(machine: Machine) -> str | None:
    """Return which of the node's cards are gone or without a working driver, None when all that it had are there."""
    had = _registered_cards()
    cards = [gpu.bus_id for gpu in machine.detection.gpus]
    if not had:
        return None
    if machine.detection.problem:
        return machine.detection.problem
    missing = sorted(had - set(cards))
    if len(cards) >= len(had) or not missing:  # a card in another slot is not lost
        return None
    return f"{len(cards)} of {len(had)} GPUs found, {', '.join(missing)} missing"


def awaits_drain(machine: Machine, progress: registration.Progress | None) -> bool | None:
    """Whether jobs are to be kept off a node that lost cards as soon as its controller answers.

    None where this hook did not try to: an action that only reads.
    """
    if lost(machine) is None:
        return False
    if progress is None:
        return None
    return progress.stage in {registration.Stage.SILENT, registration.Stage.FAILED}


def accept(machine: Machine) -> None:
    """Take the cards that are here now for all that this node should have.

    Raises:
        MachineError: there is none, or what is here cannot be registered.
    """
    if machine.problem or machine.plan is None:
        raise MachineError(machine.problem or "no NVIDIA GPU on this machine")
    files.ensure_absent(CARDS)


def lines_live(machine: Machine, offered: slurm_gres.NodeGres | None, answer: slurm_gres.ControllerGres | None) -> bool:
    """Whether slurmd will find the devices if it registers now: the controller has the lines offered, or none."""
    if machine.plan is None or machine.local or offered is None:
        return machine.local or machine.plan is None
    if _pushed_lines(machine) == gres.node_lines(offered.node or "", offered.lines or ()):
        return True
    return bool(answer and answer.applied and offered.digest in answer.applied)


def ensure(
    machine: Machine,
    offered: slurm_gres.NodeGres | None,
    answer: slurm_gres.ControllerGres | None,
    *,
    owner: str,
) -> registration.Progress | None:
    """Bring the node's GPUs into Slurm as far as it goes now. None when there is nothing to bring.

    Args:
        machine: this machine.
        offered: what `offer` returned, which is published.
        answer: what the controller seat published.
        owner: this unit's name.
    """
    registration.refresh_held()
    if machine.settings.is_valid:
        try:
            gpu_monitor.ensure(
                machine.node,
                machine.settings.health,
                has_gpus=bool(machine.detection.gpus),
                dcgm=machine.settings.dcgm,
                xids=machine.settings.xids,
            )
        except CommandError as e:  # the GPUs are registered all the same
            logger.warning("the health check is not set up: %s", e)
    loss = lost(machine)
    if loss and machine.node is not None:
        if machine.plan is not None:  # so that slurmd does not wait for what is lost whenever it starts
            with contextlib.suppress(CommandError):
                registration.ensure_dropin(machine.plan.device_files)
        return registration.keep_away(machine.node, loss)
    if machine.problem or machine.options is None or machine.node is None:
        return None
    if machine.plan is None:
        return _let_work(machine, machine.node) if _has_joined(machine) and not _registers_gpus(machine) else None
    files.ensure_file(OWNER, owner + "\n")
    try:
        registration.ensure_dropin(machine.plan.device_files)
    except CommandError as e:
        return registration.Progress(registration.Stage.FAILED, str(e))
    if gpu_detect.ensure_device_files(machine.plan.device_files, ROOTS.proc):
        return None
    live = lines_live(machine, offered, answer)
    if machine.local:
        try:
            live = _ensure_local_lines(machine)
        except (gres_conf.GresConfError, nodes.NodeError, CommandError) as e:
            return registration.Progress(registration.Stage.FAILED, str(e))
    progress = registration.advance(machine.options, machine.node, _wanted(machine), lines_live=live)
    if progress.stage is registration.Stage.REGISTERED:
        cards = sorted(gpu.bus_id for gpu in machine.detection.gpus if gpu.bus_id)
        files.ensure_file(CARDS, json.dumps(cards) + "\n")
        _note_shares(machine)
        return _let_work(machine, machine.node)
    return progress


def release(*, owner: str, wishes: gpu_settings.Settings | None = None) -> None:
    """Leave a machine that Slurm can go on using, without this charm and without lines on the controller.

    Where slurmd finds the GPUs by itself they stay registered. May be called again.
    """
    if not OWNER.exists():  # no GPU was ever registered here; the health check may have been set up all the same
        if gpu_monitor.PROGRAM.exists():
            _end_drain(look(wishes))
        gpu_monitor.ensure_absent()
        return
    if OWNER.read_text().strip() != owner:
        return
    machine = look(wishes)
    if machine.options is not None and machine.node is not None:
        if _needs_lines(machine):
            rest = slurmd_options.merged_gres(machine.options.gres, None, _shared_before())
            registration.leave(machine.options, machine.node, rest)
        elif registration.Found.load() is not None:  # in the middle of a registration
            registration.leave(
                machine.options, machine.node, _wanted(machine) if machine.plan else machine.options.gres
            )
    _end_drain(machine)
    if machine.local:
        try:
            book = gres_conf.read()
            if book is not None and gres_conf.write(book.with_entries({})):
                registration.restart_if_active()
        except (gres_conf.GresConfError, CommandError) as e:
            logger.warning("see %s for lines of slurm-gpu that are left: %s", gres_conf.PATH, e)
    gpu_monitor.ensure_absent()
    registration.ensure_no_dropin()
    registration.forget_orders()
    files.ensure_absent(registration.HELD_ENV)
    files.ensure_absent(CARDS)
    files.ensure_absent(SHARED)
    files.ensure_absent(OWNER)


def _needs_lines(machine: Machine) -> bool:
    """Whether slurmd will not find the node's GPUs when the controller has no lines for them."""
    if machine.plan is not None or machine.local:
        return bool(machine.lines) and not machine.local
    return _registers_gpus(machine) and _autodetect(None) == "off"


def _end_drain(machine: Machine) -> None:
    """Resume a node that this charm drained if its GPUs are right; else keep jobs away, and say that it is left so."""
    if machine.node is None:
        return
    try:
        node = nodes.show(machine.node)
        if node is None:
            return
        of_health = gpu_monitor.is_ours(node.reason)
        is_ours = node.is_drained and (of_health or registration.is_ours(node.reason))
        has_gpus = "gpu" in {item.partition(":")[0] for item in (node.gres or "").split(",")}
        wrong = lost(machine) if has_gpus else None
        if wrong is None and is_ours and not node.is_valid:
            wrong = node.reason
        if wrong is None and is_ours and of_health and has_gpus:
            wrong = gpu_monitor.still_unfit(machine.node, dcgm=machine.settings.dcgm, xids=machine.settings.xids)
        is_kept_away = node.is_drained or node.is_down or "FAIL" in node.flags
        if is_ours and wrong is None:
            nodes.resume(machine.node)
        elif is_ours:
            registration.abandon(machine.node, node.reason or "")
        elif wrong is not None and not is_kept_away:
            registration.abandon(machine.node, f"slurm-gpu: {wrong}")
    except nodes.NodeError as e:
        logger.warning("%s may stay drained, see sinfo -R: %s", machine.node, e)


def detected(machine: Machine) -> dict[str, str]:
    """Return the GPUs and which source told, for the `detect` action."""
    found = machine.detection
    gpus = [
        {key: value for key, value in dataclasses.asdict(gpu).items() if value not in (None, ())} for gpu in found.gpus
    ]
    results = {
        "source": gpu_detect.SOURCES[found.source],
        "count": str(len(gpus)),
        "gpus": json.dumps(gpus, default=sorted),
        "driver": found.driver,
        "problem": machine.problem,
        "note": found.note,
    }
    return {key: text for key, text in results.items() if text is not None}


def summary(
    machine: Machine, offered: slurm_gres.NodeGres | None, answer: slurm_gres.ControllerGres | None
) -> dict[str, str]:
    """Return what is wanted, what is written down and what the controller has, for the `show-gres` action."""
    results = {
        "node": machine.node or "",
        "wanted": machine.plan.gres if machine.plan else "",
        "configured": (machine.options.gres if machine.options else None) or "",
        "lines": "\n".join(gres.node_lines(machine.node or "?", machine.lines)),
        "notes": "\n".join(machine.plan.notes) if machine.plan else "",
        "lines-live": str(lines_live(machine, offered, answer)).lower(),
        "found-by": _how(machine, answer) if machine.plan else "",
        "problem": machine.problem or "",
    }
    if machine.node is not None:
        try:
            node = nodes.show(machine.node)
        except nodes.NodeError as e:
            results["problem"] = results["problem"] or str(e)
        else:
            results["registered"] = (node.gres or "") if node else ""
            results["state"] = node.state_text if node else "not registered"
            results["reason"] = (node.reason or "") if node else ""
    return {key: text for key, text in results.items() if text}


def verdict(
    machine: Machine,
    offered: slurm_gres.NodeGres | None,
    answer: slurm_gres.ControllerGres | None,
    *,
    related: bool,
    progress: registration.Progress | None,
) -> Verdict:
    """Return the status of the node, asking the controller anew where this hook did not change anything.

    Args:
        machine: this machine.
        offered: what this unit publishes.
        answer: what the controller seat published.
        related: whether there is a controller seat.
        progress: how far this hook came.
    """
    if machine.problem:
        return Verdict(Level.BLOCKED, machine.problem)
    loss = lost(machine)
    if loss:
        return Verdict(Level.BLOCKED, f"{loss}: bring back what is missing, or run accept-gpus")
    if machine.plan is None:
        return _without_gpus(machine, progress)
    if machine.node is None:
        return Verdict(Level.WAITING, "waiting for slurmd to be set up")
    missing = [str(file) for file in machine.plan.device_files if not file.exists()]
    if missing:
        return Verdict(Level.WAITING, f"waiting for the driver to make {', '.join(missing)}")
    if progress is None or progress.stage is registration.Stage.REGISTERED:
        progress = registration.inspect(machine.node, _wanted(machine), machine.settings.policy)
    if progress.stage is registration.Stage.KEPT_AWAY and gpu_hold.Hold.load() is not None:
        progress = registration.Progress(registration.Stage.REGISTERED)  # which gpu_work explains
    waits = progress.stage is registration.Stage.AWAITS_LINES or not lines_live(machine, offered, answer)
    return _by_stage(machine, progress, _how(machine, answer), waits=waits, related=related)


def _by_stage(machine: Machine, progress: registration.Progress, how: str, *, waits: bool, related: bool) -> Verdict:
    stage, detail, node = progress.stage, progress.detail, machine.node
    unfit = gpu_monitor.complaint()
    if stage in _TAKES_JOBS_OR_NOT and unfit:
        return Verdict(Level.BLOCKED, f"{node} is unfit: {unfit}")
    if stage is registration.Stage.REGISTERED:
        return Verdict(Level.ACTIVE, f"{_plan(machine).gres} on {node} ({how})")
    if progress.held is not None:
        return _kept(machine, progress.held)
    if waits and not related:
        return Verdict(
            Level.BLOCKED,
            "slurmd does not find these GPUs by itself: integrate node-gres with slurm-gpu on slurmctld",
        )
    if waits and stage is not registration.Stage.KEPT_AWAY:
        return Verdict(Level.WAITING, "waiting for slurm-gpu on slurmctld to hand out this node's lines")
    level, text = _TEXTS[stage]
    return Verdict(level, text.format(node=node, detail=detail, gres=_plan(machine).gres))


def _kept(machine: Machine, held: bring_up.Held) -> Verdict:
    lacks = f": waiting for {', '.join(held.lacks)}" if held.lacks else ""
    return Verdict(Level.WAITING, f"{machine.node} {held.why} and takes no jobs yet{lacks}")


def _without_gpus(machine: Machine, progress: registration.Progress | None) -> Verdict:
    if _registers_gpus(machine):
        had = nodes.plain_gres(machine.options.gres) if machine.options else None
        return Verdict(Level.BLOCKED, f"{machine.node} registers {had}, but this machine shows no NVIDIA GPU")
    is_settled = progress is None or progress.stage is registration.Stage.REGISTERED
    if is_settled and machine.node is not None and _has_joined(machine):
        progress = registration.inspect(machine.node, _configured(machine), machine.settings.policy)
    if progress is not None and progress.held is not None:
        return _kept(machine, progress.held)
    if progress is None or progress.stage in {registration.Stage.REGISTERED, registration.Stage.UNREGISTERED}:
        return Verdict(Level.ACTIVE, "no NVIDIA GPU on this machine")
    level, text = _TEXTS[progress.stage]
    if progress.stage is registration.Stage.DIFFERS:  # which the charm changes only for GPUs
        level, text = _DIFFERS_WITHOUT_GPUS
    return Verdict(level, text.format(node=machine.node, detail=progress.detail, gres=_configured(machine) or "(none)"))


def _registers_gpus(machine: Machine) -> bool:
    had = nodes.plain_gres(_configured(machine))
    return had is not None and any(item.partition(":")[0] == "gpu" for item in had.split(","))


def _has_joined(machine: Machine) -> bool:
    return machine.options is not None and (machine.local or machine.options.conf_server is not None)


def _let_work(machine: Machine, node: str) -> registration.Progress:
    return registration.let_work(node, machine.settings.policy, lambda: _lacks(machine))


def _lacks(machine: Machine) -> list[str]:
    """Return what jobs on this machine would miss, besides its registration."""
    wishes = machine.settings
    if not machine.detection.gpus or wishes.health == "off":
        return readiness.missing()
    return [*readiness.missing(), *gpu_monitor.unfit(machine.node, dcgm=wishes.dcgm, xids=wishes.xids)]


def _unknown_to_slurm(shares: gres.Shares | None) -> str | None:
    """Return what to do before the controller takes such Gres. A name it does not know costs a node all its Gres."""
    try:
        types = nodes.gres_types()
    except nodes.NodeError:
        return None  # nothing is registered without a controller, and the next event asks again
    wanted = {"gpu": "", **({shares.name: f"{gpu_settings.SHARES[shares.name]}: "} if shares else {})}
    name = next((name for name in wanted if name not in types), None)
    if name is None:
        return None
    typed = slurm_advice.gres_types({*wanted, *types})
    return f"{wanted[name]}slurm.conf has no {name} among its GresTypes: {typed}"


def _how(machine: Machine, answer: slurm_gres.ControllerGres | None) -> str:
    source = gpu_detect.SOURCES[machine.detection.source]
    if machine.local:
        return f"from {source}; lines in this node's gres.conf"
    if machine.lines:
        return f"from {source}; lines in the controller's gres.conf"
    return f"from {source}; found by AutoDetect={_autodetect(answer)}"


def _registered_cards() -> set[str]:
    try:
        cards = json.loads(CARDS.read_text())
    except (OSError, ValueError):
        return set()
    return {str(card) for card in cards} if isinstance(cards, list) else set()  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _wanted(machine: Machine) -> str | None:
    """Return the Gres to register: our GPUs, and what else an administrator put into `--conf`."""
    return slurmd_options.merged_gres(_configured(machine), _plan(machine).gres, _shared_before())


def _note_shares(machine: Machine) -> None:
    """Remember which shares are ours, until a hook finds none of them configured."""
    if machine.settings.shares:
        files.ensure_file(SHARED, f"{machine.settings.shares.name}\n")
    elif not set(_shared_before()) & {item.partition(":")[0] for item in (_configured(machine) or "").split(",")}:
        files.ensure_absent(SHARED)


def _configured(machine: Machine) -> str | None:
    return machine.options.gres if machine.options else None


def _shared_before() -> list[str]:
    """Return the name of the shares that we registered, which go when the option does."""
    try:
        return SHARED.read_text().split()
    except OSError:
        return []


def _plan(machine: Machine) -> gres.Plan:
    assert machine.plan is not None
    return machine.plan


def _has_nvml_plugin(machine: Machine) -> bool:
    return machine.detection.source == "nvml" and any((path / "gpu_nvml.so").exists() for path in PLUGIN_DIRS)


def _autodetect(answer: slurm_gres.ControllerGres | None) -> str:
    """Return what the controller's gres.conf makes nodes do; while nothing is known, what upstream writes there."""
    if answer and answer.autodetect:
        return answer.autodetect
    try:
        book = gres_conf.read(PUSHED)
    except gres_conf.GresConfError:
        return "off"
    return book.autodetect if book else "nvidia"


def _pushed_lines(machine: Machine) -> list[str]:
    """Return this node's records in the gres.conf that its slurmd fetched last."""
    try:
        rows = PUSHED.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [row for row in rows if row.startswith(f"NodeName={machine.node} ")]


def _ensure_local_lines(machine: Machine) -> bool:
    """Write this node's own gres.conf and let slurmd read it; return whether it has. A node with jobs is left alone."""
    node, said = machine.node, machine.offer
    if node is None or said is None:
        return False
    book = gres_conf.read() or gres_conf.Book("", "", {})
    wanted = book.with_entries({_LOCAL_UNIT: gres_conf.Entry.of(_LOCAL_UNIT, said)})
    if wanted == book:
        return True
    try:
        registered = nodes.show(node)
    except nodes.ControllerSilent:
        registered = None
    if registered is not None and registered.is_busy:
        return False
    gres_conf.write(wanted)
    registration.restart_if_active()
    return True

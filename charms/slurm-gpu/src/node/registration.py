"""A node's GPUs in Slurm: the state machine that registers them without losing a job or an administrator's drain.

A dynamic node's Gres cannot be changed while its record exists: a restarted slurmd with other options is ignored, and
`scontrol update gres=` is refused. So: keep new jobs away, wait until the node is free (over later events, never
inside a hook), edit `--conf`, delete the record, restart slurmd, check what it registered, and put the state back
that was found. `scontrol delete` comes before the restart, since on Slurm 25 a node authenticates through its own
running slurmd.

A journal on disk holds the state that was found, so each step may be the last one before a reboot.
"""

import dataclasses
import enum
import json
import logging
import pathlib
import re

from node import hold as node_hold
from node import resume as bring_up
from node import slurmd_options
from slurm_ddp import files, systemd
from slurm_ddp.run import CommandError, run
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

SLURMD = "slurmd.service"
STATE_DIR = pathlib.Path("/var/lib/slurm-gpu")
# Named in the drop-in, after /etc/default/slurmd: on disk, since the machine may reboot while a node is deleted.
HELD_ENV = STATE_DIR / "held-options"
DROPIN = "20-gpu.conf"
SLURMD_PROGRAM = "/usr/sbin/slurmd"

REASON = "slurm-gpu: registering GPUs"
_OUR_REASON = "slurm-gpu:"
_LOSS = "slurm-gpu"  # the hold of a node that lost GPUs
_PUT_BACK = "put back by slurm-gpu"  # of a state that had no reason
_ABANDONED = " (slurm-gpu is removed: resume by hand)"
_MOST_REASON = 200
_REGISTER_S = 30.0
_SETTLE_S = 10.0
_DEVICE_WAIT_S = 60
# Ends every slurmd in the unit's control group. Where this runs, the unit's own has not started yet.
_END_LEFT_OVER = """\
for s in TERM TERM TERM TERM TERM TERM TERM TERM KILL TERM; do \
p=$(grep -ls :/system.slice/slurmd.service $(pgrep -x slurmd | sed "s,.*,/proc/&/cgroup,") /dev/null | cut -d/ -f3); \
test "$p" || break; \
echo "slurmd" $p "of the former start holds the port: sending SIG$s"; kill -$s $p; sleep 0.5; done"""

# Reasons that Slurm itself sets when GPUs and Gres disagree: src/slurmctld/node_mgr.c and src/interfaces/gres.c. The
# drain they come with stays after the cause is gone.
_GRES_REASONS = re.compile(
    r"gres/(?:gpu|shard|mps)(:\S+)? count (reported lower than configured|too low|changed and jobs are using them)"
    r"|gres/gpu type \(\S*\) reported but not configured"
    r"|gres/gpu GRES (core specification|autodetected core affinity)"
    r"|Invalid GRES Links value"
)
# How many GPUs the record of a refused node has, of which Slurm shows only how many slurmd reported.
_RECORDED = re.compile(
    r"gres/(?P<name>\w+)\S* count reported lower than configured \(\d+ < (?P<count>\d+)\)"
    rf"|{_OUR_REASON} \d+ of (?P<had>\d+) GPUs found"
)


class Stage(enum.Enum):
    """How far a node is."""

    REGISTERED = "registered"  # the controller has the Gres and accepts it
    UNREGISTERED = "unregistered"  # the options are right; slurmd has not registered yet
    AWAITS_LINES = "awaits-lines"  # the controller does not hand out this node's gres.conf lines yet
    AWAITS_JOBS = "awaits-jobs"  # drained by us; jobs hold the node
    RESERVED = "reserved"  # the controller must not forget the node: a reservation has it
    STOPPED = "stopped"  # the controller has the Gres, but slurmd does not run
    SILENT = "silent"  # no controller answers
    INVALID = "invalid"  # the controller refuses what the node reports
    DIFFERS = "differs"  # the controller has another Gres, and it is for the next event to change it
    STATIC = "static"  # the node stands in slurm.conf, with another Gres
    KEPT_AWAY = "kept-away"  # registered, and drained, down or failing for whatever else
    KEPT = "kept"  # registered, and down since it is new or was rebooted and something is not ready yet
    LOST = "lost"  # GPUs that the node had are gone, and jobs are kept away
    FAILED = "failed"  # a command or slurmd did not do what it should


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where the node is, and in words what stands in the way."""

    stage: Stage
    detail: str = ""
    held: bring_up.Held | None = None  # for KEPT


@dataclasses.dataclass(frozen=True)
class Found:
    """The node as we found it, before we touched it."""

    node: str
    states: tuple[str, ...] = ()  # of "drain", "down", "fail": what to put back; empty for a node in service
    reason: str | None = None

    @classmethod
    def load(cls, path: pathlib.Path | None = None) -> "Found | None":
        """Return what the journal holds, if a registration is under way."""
        try:
            raw = json.loads((path or _journal()).read_text())
            return cls(node=raw["node"], states=tuple(raw["states"]), reason=raw["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, path: pathlib.Path | None = None) -> None:
        """Write the journal, before the first step that changes the node."""
        text = json.dumps({"node": self.node, "states": list(self.states), "reason": self.reason})
        files.ensure_file(path or _journal(), text + "\n", mode=0o600)

    @staticmethod
    def clear() -> None:
        """Forget: the node is as it was found."""
        files.ensure_absent(_journal())


def advance(options: slurmd_options.Options, name: str, gres: str | None, *, lines_live: bool) -> Progress:
    """Move the node towards registering with `gres`, as far as it goes now, and return where it is.

    Takes at most about a minute. Never stops a job: a node with jobs is drained and left for a later event.

    Args:
        options: what slurmd is started with.
        name: the node's name.
        gres: the wanted Gres, None for none.
        lines_live: whether slurmd will find the devices for this Gres; until then nothing is changed.
    """
    node_hold.end(_LOSS)
    try:
        return _advance(options, name, gres, lines_live=lines_live)
    except nodes.ControllerSilent as e:
        if lines_live and options.conf is not None:
            slurmd_options.ensure_gres(gres)  # so that slurmd registers right the first time
            refresh_held()
        return Progress(Stage.SILENT, str(e))
    except (nodes.NodeError, CommandError, slurmd_options.OptionsError) as e:
        return Progress(Stage.FAILED, str(e))


def refresh_held() -> None:
    """Let the options of a node that must come back drained, which an interrupted hook left, follow slurmd's own."""
    if not HELD_ENV.exists():
        return
    try:
        if Found.load() is not None:
            _hold()
            return
    except (OSError, ValueError, slurmd_options.OptionsError) as e:
        logger.warning("%s: %s", HELD_ENV, e)
    files.ensure_absent(HELD_ENV)


def keep_away(name: str, loss: str) -> Progress:
    """Keep new jobs off a node that lost GPUs, and give the loss as the reason; running ones go on.

    A node that somebody else keeps jobs away from is left as it is. One that lacks GPUs after a reboot is DOWN as well,
    and has Slurm's reason. `advance` ends this drain once the GPUs are there again.
    """
    reason = f"{_OUR_REASON} {loss}"[:_MOST_REASON]
    try:
        node_hold.keep()  # before an end of the drain that upstream ordered is taken for an administrator's
        node = nodes.show(name)
        if node is not None:
            _note_order(node)
            if node.reason != reason and not is_anothers(node, None) and _order(name) is None:
                nodes.drain(name, reason)
                node_hold.begin(_LOSS, name, reason)
            if bring_up.is_stale(node):  # when slurmd registers, Slurm's reason takes the place of this one
                return Progress(Stage.SILENT, f"slurmd has not registered {name} since this machine booted")
    except nodes.ControllerSilent as e:
        return Progress(Stage.SILENT, str(e))
    except nodes.NodeError as e:
        return Progress(Stage.FAILED, str(e))
    return Progress(Stage.LOST, loss)


def let_work(name: str, policy: bring_up.Policy, checks: bring_up.Checks) -> Progress:
    """Let a registered node take jobs if only its newness or its reboot keeps them away."""
    try:
        held = bring_up.ensure(name, policy, checks)
    except nodes.ControllerSilent as e:
        return Progress(Stage.SILENT, str(e))
    except nodes.NodeError as e:
        return Progress(Stage.FAILED, str(e))
    return Progress(Stage.KEPT, held=held) if held else Progress(Stage.REGISTERED)


def inspect(name: str, gres: str | None, policy: bring_up.Policy | None = None) -> Progress:
    """Return where the node is, without changing anything."""
    try:
        node = nodes.show(name)
    except nodes.ControllerSilent as e:
        return Progress(Stage.SILENT, str(e))
    except nodes.NodeError as e:
        return Progress(Stage.FAILED, str(e))
    if node is None:
        return Progress(Stage.UNREGISTERED)
    if not nodes.same_gres(node.gres, gres):
        if Found.load() is not None and node.is_busy:
            try:
                return _awaits_jobs(name)
            except nodes.NodeError as e:
                return Progress(Stage.SILENT, str(e))
        try:
            reserved = _reserved(node, None)
        except nodes.NodeError as e:
            return Progress(Stage.SILENT, str(e))
        return reserved or Progress(Stage.DIFFERS, node.gres or "(none)")
    if not node.is_valid:
        return Progress(Stage.INVALID, node.reason or node.state_text)
    if not systemd.is_active(SLURMD):
        return Progress(Stage.STOPPED)
    held = bring_up.held(node, policy) if policy else None
    if held:
        return Progress(Stage.KEPT, held=held)
    if is_kept_away(node):
        return Progress(Stage.KEPT_AWAY, _why_away(node))
    return Progress(Stage.REGISTERED, node.state_text)


def leave(options: slurmd_options.Options, name: str, gres: str | None) -> None:
    """Register the node with `gres` if that is possible at once, else leave it as it is; drain nothing.

    For a charm that goes: there is no later event on which a drain would end. What slurmd is started with changes only
    together with the controller's record: a slurmd that reports less than that has is refused, for good.
    """
    try:
        node = nodes.show(name)
        if node is not None and (node.is_busy or not node.is_dynamic):
            found = Found.load()
            if found is not None and not is_anothers(node, found.reason):
                put_back(node, found)
            logger.warning("%s keeps Gres=%s and its lines: it cannot be registered anew now", name, node.gres or "")
        else:
            progress = _advance(options, name, gres, lines_live=True)
            if progress.stage in {Stage.AWAITS_JOBS, Stage.RESERVED}:  # since `show`; the record is still there
                slurmd_options.ensure_gres(options.gres)
            if progress.stage is not Stage.REGISTERED:
                logger.warning("the GPUs of %s stay in Slurm: %s %s", name, progress.stage.value, progress.detail)
    except (nodes.NodeError, CommandError, slurmd_options.OptionsError) as e:
        logger.warning("the GPUs of %s stay in Slurm: %s", name, e)
    Found.clear()


def abandon(name: str, reason: str) -> None:
    """Keep new jobs off a node that this charm leaves with something wrong, and say that nobody will resume it."""
    text = f"{reason.removesuffix(_ABANDONED)[: _MOST_REASON - len(_ABANDONED)]}{_ABANDONED}"
    nodes.drain(name, text)
    logger.warning("%s stays drained: %s", name, text)


def restart_if_active() -> None:
    """Restart slurmd where it runs; jobs go on."""
    if systemd.is_active(SLURMD):
        systemd.restart(SLURMD)


def ensure_dropin(device_files: tuple[pathlib.Path, ...]) -> bool:
    """Make slurmd wait at boot for its device files; return whether that changed. slurmd is not restarted.

    One that waits already follows the list, so that it starts as soon as a missing card is known to be lost.

    Each start ends what a former one left: a restart while slurmd reconfigures, which takes some 0.05 s on each node at
    each `scontrol reconfigure`, stops the process that hands over, and not the one that takes over, since the unit has
    KillMode=process. That one keeps the port, and no slurmd of the unit would start any more. Seen on 24.11.5.
    """
    changed = files.ensure_file(_devices(), "".join(f"{file}\n" for file in device_files))
    left_over = _END_LEFT_OVER.replace("$", "$$")  # for systemd
    present = f"! test -e {_devices()} || xargs -ra {_devices()} ls >/dev/null 2>&1"
    text = f"""# Written by the slurm-gpu charm.
[Unit]
Wants=nvidia-persistenced.service
After=nvidia-persistenced.service nvidia-fabricmanager.service

[Service]
# The device files appear when something opens the driver. A missing one must not keep slurmd down: Slurm says so
# itself.
ExecStartPre=-/usr/bin/nvidia-modprobe -u -c0
ExecStartPre=-/usr/bin/timeout {_DEVICE_WAIT_S} /bin/sh -c 'until {present}; do sleep 0.5; done'
ExecStartPre=-/bin/sh -c '{left_over}'
# Only there while the charm registers a node that must come back drained.
EnvironmentFile=-{HELD_ENV}
"""
    return systemd.ensure_dropin(SLURMD, DROPIN, text) or changed


def ensure_no_dropin() -> bool:
    """Remove the drop-in; return whether it was there."""
    files.ensure_absent(_devices())
    return systemd.ensure_no_dropin(SLURMD, DROPIN)


def slurm_version(program: str = SLURMD_PROGRAM) -> tuple[int, int] | None:
    """Return the major version of slurmd or another of Slurm's daemons, (25, 11), or None where it is not installed."""
    try:
        text = run(program, "-V").stdout
    except CommandError:
        return None
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _advance(options: slurmd_options.Options, name: str, gres: str | None, *, lines_live: bool) -> Progress:
    node = nodes.show(name)
    if node is not None:
        _note_order(node)
    found = _found(name, node)
    if node is not None or found is None:  # nobody is to register
        files.ensure_absent(HELD_ENV)
    if node is not None and (nodes.same_gres(node.gres, gres) or _reports_less(node, gres)):
        return _settle(node, found, gres, options, lines_live=lines_live)
    if not lines_live:
        return Progress(Stage.AWAITS_LINES)
    if node is None:
        return _register(options, name, gres, found)
    if not node.is_dynamic or options.conf is None:
        return Progress(Stage.STATIC, f"Gres={node.gres or '(none)'}")
    return _reserved(node, found) or _register_anew(options, node, gres, found)


def _found(name: str, node: nodes.Node | None) -> Found | None:
    """Return what the journal holds of this node, with what somebody ordered since."""
    found = Found.load()
    if found is not None and found.node != name:
        Found.clear()
        return None
    if found is not None and node is not None and is_anothers(node, found.reason):  # set while we waited
        found = as_found(node)
        found.save()
    return found


def _register_anew(
    options: slurmd_options.Options, node: nodes.Node, gres: str | None, found: Found | None
) -> Progress:
    """Let the controller forget a node that has another Gres, as soon as it is free."""
    name = node.name
    if found is None:
        found = as_found(node)
        found.save()
    if not node.is_drained and not (node.is_down and not node.is_busy):
        nodes.drain(name, REASON)
        node = nodes.show(name) or node
    if node.is_busy:
        return _awaits_jobs(name)
    slurmd_options.ensure_gres(gres)
    if found.states:  # first, since after a reboot right behind the deletion slurmd registers before any hook runs
        _hold()
    try:
        with node_hold.lifted(name):
            nodes.delete(name)
    except nodes.NodeBusy:
        files.ensure_absent(HELD_ENV)
        return _reserved(node, found) or _awaits_jobs(name)
    return _register(options, name, gres, found)


def _register(options: slurmd_options.Options, name: str, gres: str | None, found: Found | None) -> Progress:
    """Let slurmd register a node that the controller does not know."""
    changed = options.conf is not None and slurmd_options.ensure_gres(gres)
    if not systemd.is_active(SLURMD) and (found is None or options.conf_server is None):
        return Progress(Stage.UNREGISTERED)  # its charm starts it, and stops it when slurmctld goes
    if changed or found is not None:
        _restart(held=found is not None and bool(found.states))
    node = nodes.wait(name, lambda n: n is not None, timeout=_REGISTER_S if found else _SETTLE_S)
    files.ensure_absent(HELD_ENV)
    if node is None:
        if found is None:
            return Progress(Stage.UNREGISTERED)
        return Progress(Stage.FAILED, f"slurmd did not register {name} again within {_REGISTER_S:.0f} s")
    if not nodes.same_gres(node.gres, gres) and not _reports_less(node, gres):
        registered = node.gres or "(none)"
        return Progress(Stage.FAILED, f"{name} registered with Gres={registered}, not {gres or '(none)'}")
    return _settle(node, found, gres, options, lines_live=True, is_fresh=True)


def _settle(
    node: nodes.Node,
    found: Found | None,
    gres: str | None,
    options: slurmd_options.Options,
    *,
    lines_live: bool,
    is_fresh: bool = False,
) -> Progress:
    """Check a node whose Gres is right, mend what Slurm's GPU check or we did to its state, and put back the rest.

    `is_fresh`: its record was made just now.
    """
    if options.conf is not None and lines_live:
        slurmd_options.ensure_gres(gres)  # the next registration must not undo this one
    stale = not is_fresh and node.is_dynamic and options.conf is not None and _is_stale(node, gres)
    is_ready = not node.is_valid and lines_live and not node.is_busy and not stale
    if is_ready and (is_ours(node.reason) or found is not None):
        _restart(held=found is not None and bool(found.states))
        node = nodes.wait(node.name, lambda n: n is not None and n.is_valid, timeout=_SETTLE_S) or node
        files.ensure_absent(HELD_ENV)
    if not node.is_valid:
        if not lines_live:
            return Progress(Stage.AWAITS_LINES)
        if stale:
            return _reserved(node, found) or _register_anew(options, node, gres, found)
        return Progress(Stage.INVALID, node.reason or node.state_text)
    if found is not None:
        return put_back(node, found)
    if is_kept_away(node) and is_ours(node.reason):
        return put_back(node, as_found(node))
    return Progress(Stage.REGISTERED)


def forget_orders() -> None:
    """Forget what `_note_order` remembered, when the charm leaves."""
    files.ensure_absent(_order_path())


def put_back(node: nodes.Node, found: Found) -> Progress:
    """Give the node the state and reason in which it was found."""
    reason = found.reason or _PUT_BACK
    if "down" in found.states:
        if node.is_busy:  # marking it down now would end a job
            return _awaits_jobs(node.name)
        nodes.set_down(node.name, reason)
        if not {"drain", "fail"} & set(found.states):
            nodes.undrain(node.name)
    if "drain" in found.states:
        nodes.drain(node.name, reason)
    elif "fail" in found.states:  # which takes the place of a drain
        nodes.set_fail(node.name, reason)
    elif not found.states and node.is_drained:
        nodes.resume(node.name)
    Found.clear()
    return Progress(Stage.REGISTERED)


def as_found(node: nodes.Node) -> Found:
    """Return what to put back later: what an administrator or upstream set, not what we or a missing GPU did.

    Slurm's reason for a missing GPU takes the place of any other. A node that is DOWN with it, and was not before, came
    back from a reboot: jobs wait for the checks that follow one.
    """
    if is_ours(node.reason):
        rebooted = Found(node.name, ("down",), bring_up.REBOOTED)
        return _order(node.name) or (rebooted if node.is_down else Found(node.name))
    flags = (("drain", node.is_drained), ("fail", "FAIL" in node.flags), ("down", node.is_down))
    states = tuple(state for state, is_set in flags if is_set)
    return Found(node.name, states, node.reason if states else None)


def _note_order(node: nodes.Node) -> None:
    """Remember for which reason somebody else keeps jobs away, until nobody does."""
    if is_anothers(node, None):
        as_found(node).save(_order_path())
    elif not is_kept_away(node):
        files.ensure_absent(_order_path())


def _order(name: str) -> Found | None:
    order = Found.load(_order_path())
    return order if order is not None and order.node == name else None


def is_anothers(node: nodes.Node, found: str | None) -> bool:
    """Whether somebody keeps jobs away since the node was found with the reason `found`.

    Neither we, who may have put that back half, nor Slurm, for a missing GPU or for a slurmd that was away.
    """
    known = {None, found, _PUT_BACK, bring_up.REBOOTED, bring_up.NOT_RESPONDING}
    return is_kept_away(node) and node.reason not in known and not is_ours(node.reason)


def is_kept_away(node: nodes.Node) -> bool:
    """Whether the node takes no new jobs."""
    return node.is_drained or node.is_down or "FAIL" in node.flags


def is_ours(reason: str | None) -> bool:
    """Whether we drained with this reason, or Slurm did for GPUs that disagree with Gres."""
    return reason is not None and (reason.startswith(_OUR_REASON) or _GRES_REASONS.match(reason) is not None)


def _is_stale(node: nodes.Node, gres: str | None) -> bool:
    """Whether the controller refuses a node for a Gres of its record that is not the one it should have now."""
    count = _recorded(node)
    return count is not None and count[1] != nodes.count_gres(gres, count[0])


def _reports_less(node: nodes.Node, gres: str | None) -> bool:
    """Whether the record has the Gres, and slurmd reported fewer of it when it registered last."""
    count = _recorded(node)
    one_each = (re.sub(r":\d+(?=,|$)", ":1", nodes.plain_gres(text) or "") for text in (node.gres, gres))
    return count is not None and count[1] == nodes.count_gres(gres, count[0]) and nodes.same_gres(*one_each)


def _recorded(node: nodes.Node) -> tuple[str, int] | None:
    """Return of which Gres a refused node reported too few, and how many its record has."""
    match = None if node.is_valid else _RECORDED.match(node.reason or "")
    if match is None:
        return None
    return (match["name"], int(match["count"])) if match["name"] else ("gpu", int(match["had"]))


def _why_away(node: nodes.Node) -> str:
    """Return how and why the node takes no jobs: "drained (bad fan)"."""
    flags = (("down", node.is_down), ("drained", node.is_drained), ("failing", "FAIL" in node.flags))
    state = " and ".join(word for word, is_set in flags if is_set)
    return f"{state} ({node.reason or 'no reason given'})"


def _awaits_jobs(name: str) -> Progress:
    ids = nodes.job_ids(name)
    count = "1 job" if len(ids) == 1 else f"{len(ids)} jobs" if ids else "a finishing job"
    return Progress(Stage.AWAITS_JOBS, count)


def _reserved(node: nodes.Node, found: Found | None) -> Progress | None:
    """Return that a reservation has the node, which is then as it was found: jobs may run until that ends.

    One that is to come would lose the node in silence if it was deleted.
    """
    reservations = nodes.reservations(node.name)
    reservations.pop(node_hold.reservation(node.name), None)
    if not reservations:
        return None
    if found is not None:
        put_back(node, found)
    name, others = next(iter(reservations.items()))
    typed = f"scontrol delete reservationname={name}"
    if others:
        typed = f"scontrol update reservationname={name} nodes={others}"
    return Progress(Stage.RESERVED, f"reservation {', '.join(reservations)}: wait for its end, or {typed}")


def _restart(*, held: bool) -> None:
    if held:
        _hold()
    systemd.restart(SLURMD)


def _hold() -> None:
    """Have slurmd, whenever it starts next, register the node drained."""
    files.ensure_file(HELD_ENV, slurmd_options.held(slurmd_options.PATH.read_text()), mode=0o600)


def _journal() -> pathlib.Path:
    return STATE_DIR / "registration.json"


def _devices() -> pathlib.Path:
    return STATE_DIR / "devices"  # the files that slurmd waits for


def _order_path() -> pathlib.Path:
    return STATE_DIR / "order.json"

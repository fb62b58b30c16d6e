"""What is done to a node's GPUs beside registering them: drivers, resets, MIG layouts, as one hook sees it.

A hook asks `before` what it may do, registers the node, and tells `after` how far that came. All of it may be
interrupted: the journals of `driver_upgrade` and `gpu_hold` say what is to be finished.
"""

import collections.abc
import contextlib
import logging

from driver import install as driver_install
from driver import plan as driver_plan
from driver import state as driver_state
from driver import upgrade as driver_upgrade
from driver.upgrade import Turn
from maintenance import hold as gpu_hold
from maintenance import mig as gpu_mig
from maintenance import reset as gpu_tasks
from node import registration
from node import watch as node_watch
from scripts import health as gpu_health
from slurm_ddp import systemd
from slurm_ddp.charm import Level, Status
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

Options = collections.abc.Mapping[str, object]


def before() -> Turn:
    """Go on with what is under way, and return what the hook may do."""
    hold = gpu_hold.Hold.load()
    if hold is not None and hold.kind != gpu_hold.DRIVER:
        if hold.boot_id and hold.boot_id == driver_upgrade.boot_id():
            return _before_reboot(hold)
        with contextlib.suppress(gpu_mig.MigError):  # what an interrupted one left; the registration sees the rest
            gpu_mig.apply_all()
        driver_install.ensure_services()
        return Turn.REGISTER
    return driver_upgrade.advance()


def _before_reboot(hold: gpu_hold.Hold) -> Turn:
    """Reboot for a MIG mode only while the node is still held and free; else the mode changes with a later boot."""
    try:
        node = nodes.show(hold.node)
        if node is not None and not gpu_hold.is_ours(node, hold.kind):
            gpu_hold.forget()
            return driver_upgrade.advance()
        if driver_upgrade.next_kernel_lacks_driver():  # which the status tells
            return Turn.HOLD
        return Turn.REBOOT if gpu_hold.in_the_way(node) is None else Turn.HOLD
    except nodes.NodeError:
        return Turn.HOLD


def after(node: str | None, options: Options, progress: registration.Progress | None) -> bool:
    """Take in how far the registration came; return whether something began that the hook should go on with."""
    _ensure_watch(node, options)
    hold = gpu_hold.Hold.load()
    if hold is not None and hold.kind != gpu_hold.DRIVER:
        if progress is not None and progress.stage in driver_upgrade.REGISTERED:
            try:
                gpu_hold.give_back()
            except nodes.NodeError:
                return False  # the next hook tries again
        return False
    driver_upgrade.finish(progress)
    try:
        wanted = driver_plan.spec(options)
    except driver_state.DriverError:
        return False  # the status tells
    if driver_upgrade.Upgrade.load() is None:
        driver_upgrade.ensure_settings(wanted)
    return driver_upgrade.ensure_wanted(node, wanted)


def _ensure_watch(node: str | None, options: Options) -> None:
    if node is None or not gpu_health.are_xids(str(options.get("health-xids", ""))):
        return  # which the status tells
    config = node_watch.Config(
        node,
        rebooted=bool(options.get("resume-after-reboot", True)),
        new=bool(options.get("resume-when-ready", False)),
        checks_health=options.get("health-check") != "off",
        dcgm=bool(options.get("health-dcgm", False)),
        xids=str(options.get("health-xids", "")),
    )
    try:
        node_watch.ensure(config)
    except CommandError as e:
        logger.warning("what needs no hook is not set up: %s", e)


def note(unit: str, verdict: Status, node: str | None = None, *, waits: bool | None = False) -> None:
    """Have the unit woken when what it waits for may have come, and what needs no hook done without one.

    Args:
        unit: the unit.
        verdict: its status.
        node: the node of a compute seat, as soon as it has one.
        waits: whether something is to be done later, though the status is of something else. None: as noted last.
    """
    if waits is None and verdict.level != Level.WAITING:
        return
    try:
        node_watch.note(unit, waits=bool(waits) or verdict.level == Level.WAITING, node=node)
    except CommandError as e:
        logger.warning("%s is not woken before Juju's next event: %s", unit, e)


def renew_watch() -> None:
    """Let the service, where it runs, go on with this version of the charm."""
    try:
        systemd.try_restart(node_watch.UNIT)
    except CommandError as e:
        logger.warning("%s goes on with the charm's code of before: %s", node_watch.UNIT, e)


def is_watching() -> bool:
    """Whether something of `node_watch` is here, as on machines without GPUs, too."""
    return node_watch.CONFIG.exists() or (systemd.UNIT_DIR / node_watch.UNIT).exists()


def rebooting() -> None:
    """Take note that a reboot was asked for."""
    driver_upgrade.rebooting()


def release() -> None:
    """Leave the machine to Slurm and its administrators; the driver stays."""
    try:
        gpu_hold.give_back()
    except nodes.NodeError as e:
        logger.warning("this node stays drained, see sinfo -R: %s", e)
    gpu_hold.forget()
    node_watch.ensure_absent()
    driver_upgrade.release()
    gpu_tasks.ensure_no_layouts()


def verdict(options: Options, otherwise: collections.abc.Callable[[], Status]) -> Status:
    """Return the status of the node: what is under way, what a person must do, else what `otherwise` says."""
    try:
        wanted = driver_plan.spec(options)
    except driver_state.DriverError as e:
        return Status(Level.BLOCKED, str(e))
    upgrade = driver_upgrade.Upgrade.load()
    if upgrade is not None:
        return Status(Level.BLOCKED if upgrade.failed else Level.WAITING, upgrade.text)
    note = driver_upgrade.note(wanted)
    if note is not None:
        return Status(Level.BLOCKED, note)
    said = otherwise()
    hold = gpu_hold.Hold.load()
    if hold is None or said.level != Level.ACTIVE:
        return said
    reboots = hold.boot_id and hold.boot_id == driver_upgrade.boot_id()
    then = "this machine reboots" if reboots else "it is given back"
    return Status(Level.WAITING, f"{hold.node} is drained for {hold.kind}: {then} with the next event")

"""What is done to a node's GPUs beside registering them: drivers, resets, MIG layouts, as one hook sees it.

A hook calls `resume_pending`, which returns what it may do, registers the node, and passes how far that came to
`complete_pending`. All of it may be interrupted: the journals of `driver.upgrade` and `maintenance.hold` hold what
remains.
"""

import collections.abc
import contextlib
import logging

from driver import install, plan, upgrade
from driver.state import DriverError
from driver.upgrade import Pending
from maintenance import hold, mig
from node import registration
from node import watch as node_watch
from scripts import health
from scripts import mig as layouts
from slurm_ddp.charm import Level, Status
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

Options = collections.abc.Mapping[str, object]


def resume_pending() -> Pending:
    """Go on with what is under way, and return what the hook may do."""
    held = _held()
    if held is None:
        return upgrade.advance()
    if held.boot_id and held.boot_id == upgrade.boot_id():
        return _before_reboot(held)
    with contextlib.suppress(layouts.MigError):  # what an interrupted one left; the registration sees the rest
        layouts.apply_all()
    install.ensure_services()
    return Pending.REGISTER


def complete_pending(node: str | None, options: Options, progress: registration.Progress | None) -> bool:
    """Record how far the registration came; return whether something began that the hook should go on with."""
    _ensure_watch(node, options)
    if _held() is not None:
        if progress is not None and progress.stage in upgrade.REGISTERED:
            with contextlib.suppress(nodes.NodeError):  # the next hook tries again
                hold.release()
        return False
    upgrade.complete(progress)
    try:
        wanted = plan.spec(options)
    except DriverError:
        return False  # the status shows it
    if upgrade.Upgrade.load() is None:
        upgrade.ensure_settings(wanted)
    return upgrade.ensure_wanted(node, wanted)


def _held() -> hold.Hold | None:
    """Return the hold of a reset or a MIG layout."""
    held = hold.Hold.load()
    return held if held is not None and held.kind != hold.DRIVER else None


def _before_reboot(held: hold.Hold) -> Pending:
    """Reboot for a MIG mode only while the node is still held and free; else the mode changes with a later boot."""
    try:
        node = nodes.show(held.node)
        if node is not None and not hold.is_ours(node, held.kind):
            hold.forget()
            return upgrade.advance()
        if upgrade.facts().next_kernel_lacks_driver or hold.jobs_on(node) is not None:  # the status shows which
            return Pending.WAIT
    except nodes.NodeError:
        return Pending.WAIT
    return Pending.REBOOT


def _ensure_watch(node: str | None, options: Options) -> None:
    xids = str(options.get("health-xids", ""))
    try:
        health.parse_xids(xids)
    except ValueError:
        return  # the status shows it
    if node is None:
        return
    config = node_watch.Config(
        node,
        rebooted=bool(options.get("resume-after-reboot", True)),
        new=bool(options.get("resume-when-ready", False)),
        checks_health=options.get("health-check") != "off",
        dcgm=bool(options.get("health-dcgm", False)),
        xids=xids,
    )
    try:
        node_watch.ensure(config)
    except CommandError as e:
        logger.warning("the service %s is not set up: %s", node_watch.UNIT, e)


@contextlib.contextmanager
def leaving() -> collections.abc.Generator[None]:
    """Log a command that fails inside: a hook that fails keeps the unit from going, and the next one tries again."""
    try:
        yield
    except CommandError as e:
        logger.warning("something of slurm-gpu is left on this machine: %s", e)


def release() -> None:
    """Leave the machine to Slurm and its administrators; the driver stays."""
    try:
        hold.release()
    except nodes.NodeError as e:
        logger.warning("this node stays drained, see sinfo -R: %s", e)
    hold.forget()
    node_watch.ensure_absent()
    upgrade.release()
    mig.ensure_no_layouts()


def verdict(options: Options, otherwise: collections.abc.Callable[[], Status]) -> Status:
    """Return the status of the node: what is under way, what the operator must do, else what `otherwise` returns."""
    try:
        wanted = plan.spec(options)
    except DriverError as e:
        return Status(Level.BLOCKED, str(e))
    running = upgrade.Upgrade.load()
    if running is not None:
        return Status(Level.BLOCKED if running.failed else Level.WAITING, running.text)
    if (text := upgrade.note(wanted)) is not None:
        return Status(Level.BLOCKED, text)
    verdict, held = otherwise(), hold.Hold.load()
    if held is None or verdict.level != Level.ACTIVE:
        return verdict
    reboots = held.boot_id and held.boot_id == upgrade.boot_id()
    then = "this machine reboots" if reboots else "its state is restored"
    return Status(Level.WAITING, f"{held.node} is drained for {held.kind}: {then} with the next event")

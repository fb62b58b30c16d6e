"""Maintenance of a node's GPUs (drivers, resets, MIG layouts), as one hook sees it.

A hook calls `prepare`, registers the node if that allows it, and passes how far that came to
`complete`. Each step may be interrupted: the journal of `node.kept` and the state of the packages
show what remains.
"""

import collections.abc
import contextlib
import dataclasses
import logging

from driver import plan
from driver.state import DriverError
from gpu import mig
from maintenance import layouts, services, upgrade
from node import journals, kept, registration
from node import watch as node_watch
from node.machine import Machine
from slurm_ddp import readiness
from slurm_ddp.charm import Level, Status
from slurm_ddp.commands import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

Options = collections.abc.Mapping[str, object]
# Stages of a node that has its GPUs in Slurm; KEPT may wait for a mount, which does not concern the
# cards.
_REGISTERED = frozenset({registration.Stage.REGISTERED, registration.Stage.KEPT})


def prepare(options: Options) -> bool:
    """Continue maintenance or install the option's driver; return whether to register the node."""
    with contextlib.suppress(CommandError):  # the next hook tries again
        kept.renew()
    held = kept.maintenance()
    if held is None:
        with contextlib.suppress(DriverError):  # the status shows an invalid option
            upgrade.ensure_wanted(plan.spec(options))
        return True
    if held.boot_id == readiness.boot_id():
        return _is_given_up(held)
    # Repair after an interrupted hook; the registration checks the rest
    with contextlib.suppress(mig.MigError):
        mig.apply_all()
    services.ensure_running()
    return True


def complete(machine: Machine, options: Options, progress: registration.Progress | None) -> None:
    """Release a held node that is registered, and keep the driver's settings."""
    if machine.node is not None:
        with contextlib.suppress(nodes.NodeError):  # the next hook tries again
            kept.adopt(machine.node)
    if machine.node is not None and machine.config.problem is None:  # else the status shows it
        try:
            node_watch.ensure(
                node_watch.Config(node=machine.node, **dataclasses.asdict(machine.config))
            )
        except CommandError as e:
            logger.warning("the service %s is not set up: %s", node_watch.UNIT, e)
    if kept.maintenance() is None:
        with contextlib.suppress(DriverError):  # the status shows an invalid option
            upgrade.ensure_settings(plan.spec(options))
    elif progress is not None and progress.stage in _REGISTERED:
        with contextlib.suppress(nodes.NodeError):  # the next hook tries again
            kept.restore()


def release() -> None:
    """Hand the machine back to Slurm and its administrators; the driver stays."""
    try:
        kept.restore()
    except nodes.NodeError as e:
        logger.warning("this node stays drained, see sinfo -R: %s", e)
    kept.forget()
    node_watch.ensure_absent()
    upgrade.release()
    layouts.ensure_no_layouts()


def verdict(options: Options, otherwise: collections.abc.Callable[[], Status]) -> Status:
    """Return the operator's task, then maintenance in progress, then the status of `otherwise`."""
    held = kept.maintenance()
    if held is not None and held.boot_id == readiness.boot_id():
        return Status(Level.BLOCKED, f"{held.node} is drained for {held.kind}: reboot this machine")
    try:
        text = upgrade.note(plan.spec(options))
    except DriverError as e:
        text = str(e)
    if text is not None:
        return Status(Level.BLOCKED, text)
    status = otherwise()
    if held is None or status.level != Level.ACTIVE:
        return status
    return Status(
        Level.WAITING,
        f"{held.node} is drained for {held.kind}: its state is restored with the next event",
    )


def _is_given_up(held: journals.Maintenance) -> bool:
    """End the hold of a node that waits for a reboot if another changed its state.

    Returns whether that is so.
    """
    with contextlib.suppress(nodes.NodeError):
        node = nodes.show(held.node)
        if node is not None and not kept.is_taken(node, held.kind):
            kept.forget()
            return True
    return False

"""Judges a mount: the unit's status for what a probe found, or for what failed."""

import contextlib
import time

import mount_messages as messages
import mount_plan
from kinds import presets
from mount import mounter, watching
from scripts import keeper
from slurm_ddp import juicefs, mounts
from slurm_ddp.charm import Level, Status
from slurm_ddp.mounts import State


def judge(plan: mount_plan.Plan, found: mounts.Result) -> Status:
    """Turn what a probe of the mount found into the unit's status."""
    seen, waits = watching.health(plan.spec.app), mounter.pending(plan)
    mounted = messages.MOUNTED.format(source=plan.source, mountpoint=plan.spec.mountpoint)
    match found.state:
        case State.RIGHT:
            warning = exposed(plan, found)
            text = mounted + (messages.PENDING if waits else "") + (f"; {warning}" if warning else "")
            return Status(Level.ACTIVE, text)
        case State.WRONG if waits:
            return Status(Level.MAINTENANCE, messages.OTHER_SETTINGS.format(detail=found.detail))
        case State.WRONG:
            return Status(Level.BLOCKED, messages.OTHER_MOUNT.format(detail=found.detail))
        case State.ABSENT:
            return Status(Level.BLOCKED, messages.NOT_MOUNTED.format(source=plan.source, reason=mounter.reason(plan)))
        case State.FAILED:
            return Status(Level.BLOCKED, found.detail)
        case State.SLOW if seen.slow and time.time() - seen.slow >= keeper.SLOW_S:
            return Status(Level.WAITING, messages.SLOW_FOR_LONG.format(detail=found.detail, source=plan.source))
        case State.SLOW:
            return Status(Level.ACTIVE, mounted + messages.SLOW_NOW)
        case State.HUNG if seen.down:
            return Status(Level.WAITING, messages.SERVER_DOWN.format(problem=seen.down, since=_since(seen.down_since)))
        case State.HUNG:
            text = messages.HUNG.format(mountpoint=plan.spec.mountpoint, since=_since(seen.hung))
            return Status(Level.WAITING, text if seen.hung else found.detail)
        case State.STALE | State.STACKED:
            return Status(Level.MAINTENANCE, messages.REMOUNTING.format(detail=found.detail))


def exposed(plan: mount_plan.Plan, found: mounts.Result) -> str:
    """Warn that others can replace what is in the filesystem's root, and what to type; nothing where they cannot."""
    if found.open_mode is None:
        return ""
    remedy = plan.remedy or messages.MAKE_STICKY.format(mountpoint=plan.spec.mountpoint)
    return messages.EXPOSED.format(mode=found.open_mode, remedy=remedy)


def explained(app: str) -> contextlib.AbstractContextManager[None]:
    """Turn what fails inside into a `StatusError`: Waiting for what may end without the operator, else Blocked."""

    def wait(error: Exception) -> str:
        if not isinstance(error, juicefs.UnreachableError):
            return str(error)
        return messages.SERVER_DOWN.format(problem=error, since=_since(watching.health(app).down_since))

    lasting = (mount_plan.MountError, presets.OptionError)
    return juicefs.explained(app, wait, passing=(mount_plan.NotYetError,), lasting=lasting)


def _since(moment: float) -> str:
    return f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(moment))} UTC" if moment else ""

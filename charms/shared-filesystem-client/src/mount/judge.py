"""Judges a mount: the unit's status for a probe's result, or for an error."""

import contextlib
import time

import mount_plan
from kinds import presets
from mount import mounter, watching
from scripts import keeper
from slurm_ddp import juicefs, mounts
from slurm_ddp.charm import Level, Status
from slurm_ddp.mounts import State


def judge(plan: mount_plan.Plan, found: mounts.Result) -> Status:
    """Turn a probe's result into the unit's status."""
    waits = mounter.pending(plan)
    match found.state:
        case State.RIGHT:
            return Status(Level.ACTIVE, _right(plan, found, waits=waits))
        case State.WRONG if waits:
            return Status(
                Level.MAINTENANCE, f"{found.detail}; the change waits until nobody uses it"
            )
        case State.WRONG:
            return Status(
                Level.BLOCKED, f"unmount it, or choose another mountpoint: {found.detail}"
            )
        case State.ABSENT:
            return Status(Level.BLOCKED, f"{plan.source} does not mount: {mounter.reason(plan)}")
        case State.FAILED:
            return Status(Level.BLOCKED, found.detail)
        case State.SLOW | State.HUNG:
            return _slow_or_hung(plan, found)
        case State.STALE | State.STACKED:
            return Status(Level.MAINTENANCE, f"{found.detail}; remounting it")


def _right(plan: mount_plan.Plan, found: mounts.Result, *, waits: bool) -> str:
    """Describe a mount that works, with a warning about other accounts, and a change that waits."""
    text = exposed(plan, found) or _mounted(plan)
    if waits:
        text += "; restart pending: a change waits until nobody uses it"
    return text


def _slow_or_hung(plan: mount_plan.Plan, found: mounts.Result) -> Status:
    seen = watching.health(plan.spec.app)
    if found.state is State.SLOW:
        if seen.slow and time.time() - seen.slow >= keeper.SLOW_S:
            remedy = f"look at what stores the data of {plan.source}"
            return Status(Level.WAITING, f"{found.detail}; {remedy}")
        return Status(Level.ACTIVE, f"{_mounted(plan)}; writes are slow now")
    if seen.down:
        text = f"{seen.down}{_since(seen.down_since)}; the mount waits for it"
        return Status(Level.WAITING, text)
    if seen.hung:
        text = f"{plan.spec.mountpoint} does not answer{_since(seen.hung)}"
        return Status(Level.WAITING, text)
    return Status(Level.WAITING, found.detail)


def _mounted(plan: mount_plan.Plan) -> str:
    by = f" by {plan.client}" if plan.client else ""
    return f"{plan.source} is mounted at {plan.spec.mountpoint}{by}"


def exposed(plan: mount_plan.Plan, found: mounts.Result) -> str:
    """Return a warning with its remedy if others can replace folders in the root, or ""."""
    if found.open_mode is None:
        return ""
    remedy = plan.remedy or f"chmod +t {plan.spec.mountpoint}, as root where that may write"
    return f"{remedy}: others can replace folders in it (mode {found.open_mode:04o})"


def explained(app: str) -> contextlib.AbstractContextManager[None]:
    """Turn errors inside into a `StatusError`: Waiting if they may pass, or Blocked."""

    def wait(error: Exception) -> str:
        if not isinstance(error, juicefs.UnreachableError):
            return str(error)
        return f"{error}{_since(watching.health(app).down_since)}; the mount waits for it"

    lasting = (mount_plan.MountError, presets.OptionError)
    return juicefs.explained(app, wait, passing=(mount_plan.NotYetError,), lasting=lasting)


def _since(moment: float) -> str:
    if not moment:
        return ""
    return f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(moment))} UTC"

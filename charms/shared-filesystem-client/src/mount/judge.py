"""Judges a mount: the unit's status for what a probe found, or for what failed."""

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
    """Turn what a probe of the mount found into the unit's status."""
    seen, waits = watching.health(plan.spec.app), mounter.pending(plan)
    mounted = f"{plan.source} is mounted at {plan.spec.mountpoint}{f' by {plan.client}' if plan.client else ''}"
    match found.state:
        case State.RIGHT:
            warning = exposed(plan, found)
            change = "restart pending: a change waits until nobody uses it" if waits else ""
            return Status(Level.ACTIVE, "; ".join(filter(None, (warning or mounted, change))))
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
        case State.SLOW if seen.slow and time.time() - seen.slow >= keeper.SLOW_S:
            return Status(
                Level.WAITING, f"{found.detail}; look at what stores the data of {plan.source}"
            )
        case State.SLOW:
            return Status(Level.ACTIVE, mounted + "; writes are slow now")
        case State.HUNG if seen.down:
            return Status(
                Level.WAITING, f"{seen.down}{_since(seen.down_since)}; the mount waits for it"
            )
        case State.HUNG:
            text = f"{plan.spec.mountpoint} does not answer{_since(seen.hung)}"
            return Status(Level.WAITING, text if seen.hung else found.detail)
        case State.STALE | State.STACKED:
            return Status(Level.MAINTENANCE, f"{found.detail}; remounting it")


def exposed(plan: mount_plan.Plan, found: mounts.Result) -> str:
    """Warn that others can replace what is in the filesystem's root, and what to type; nothing where they cannot."""
    if found.open_mode is None:
        return ""
    remedy = plan.remedy or f"chmod +t {plan.spec.mountpoint}, as root where that may write"
    return f"{remedy}: others can replace folders in it (mode {found.open_mode:04o})"


def explained(app: str) -> contextlib.AbstractContextManager[None]:
    """Turn what fails inside into a `StatusError`: Waiting for what may end without the operator, else Blocked."""

    def wait(error: Exception) -> str:
        if not isinstance(error, juicefs.UnreachableError):
            return str(error)
        return f"{error}{_since(watching.health(app).down_since)}; the mount waits for it"

    lasting = (mount_plan.MountError, presets.OptionError)
    return juicefs.explained(app, wait, passing=(mount_plan.NotYetError,), lasting=lasting)


def _since(moment: float) -> str:
    return f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(moment))} UTC" if moment else ""

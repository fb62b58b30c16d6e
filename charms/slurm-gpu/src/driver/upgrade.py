"""Upgrade a node's driver step by step: drain, wait for jobs, install, load or reboot, verify, register.

A journal holds the next step and the exact set of packages, written before the step begins, and each step may be done
twice. So an upgrade may be interrupted anywhere, by a reboot too, and the next hook goes on. A step that fails leaves
the node drained with the reason, and reports what to do; running the upgrade again tries that step again. What cannot
begin or be cancelled raises `DriverError`.
"""

import collections.abc
import contextlib
import enum
import logging
import time
import typing

import pydantic

from driver import install, plan, state
from driver.plan import Plan, Spec
from driver.state import DriverError
from gpu import detect
from maintenance import hold
from node import node_state, registration
from slurm_ddp import apt, files, systemd
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

DAY_S = 24 * 3600
_SETTLE_S = 600.0  # a fabric manager has the cards of a host ready within minutes of its start
_MOST_REBOOTS = 3
# Where a node is that has its GPUs in Slurm; KEPT may wait for a mount, which does not concern the driver.
REGISTERED = frozenset({registration.Stage.REGISTERED, registration.Stage.KEPT})
_REFUSED = "driver-refused.json"  # what the archives refused last: `key`, `text`, and when (seconds since 1970, `at`)
_RETRY_S = 3600.0  # after a refusal, so that not every hook asks the archives again
_FAILURES = (DriverError, hold.HoldError, nodes.NodeError, apt.AptError, CommandError)
ROOTS = detect.Roots()


class Pending(enum.Enum):
    """What maintenance leaves to the hook."""

    NONE = "none"  # nothing is pending: go on as ever
    WAIT = "wait"  # leave the node alone
    REBOOT = "reboot"  # ask Juju for a reboot
    REGISTER = "register"  # register the node, then call `complete`


class _Wait(Exception):
    """The step goes on with a later hook. `str()` is what it waits for."""


class Upgrade(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The journal."""

    step: typing.Literal["ask", "drain", "install", "load", "reboot", "verify", "register"]  # what is done next
    node: str | None  # None: slurmd is not set up, so there are no jobs
    spec: Spec
    plan: Plan
    rolling: bool  # one node at a time
    patience_s: float  # how long jobs are waited for
    drained_at: float = 0.0  # seconds since 1970
    since: float = 0.0  # when this step began
    boot_id: str = ""
    reboots: int = 0
    waits: str = ""  # for what, in words
    failed: str = ""  # why, in words

    @classmethod
    def load(cls) -> "Upgrade | None":
        """Return the upgrade that is under way."""
        with contextlib.suppress(pydantic.ValidationError):
            return cls.model_validate(node_state.read(node_state.UPGRADE))
        return None

    def save(self, **changes: typing.Any) -> "Upgrade":
        """Write it with these changes, before what it describes begins."""
        after = self.model_copy(update=changes)
        node_state.write(node_state.UPGRADE, after.model_dump())
        return after

    def to(self, step: str, **changes: typing.Any) -> "Upgrade":
        """Save it at another step."""
        return self.save(step=step, **({"since": time.time(), "waits": "", "failed": ""} | changes))

    def show(self) -> nodes.Node | None:
        """Return the node as the controller has it, None where no job can run on it."""
        return nodes.show(self.node) if self.node else None

    @property
    def text(self) -> str:
        """Where it is, for a status."""
        driver = f"driver {self.plan.version}"
        if self.failed:
            return f"{driver} failed: {self.failed}; then run upgrade-driver again, or with cancel=true"
        return f"{driver}: {self.waits or _STEPS[self.step].status}"


class Step(typing.NamedTuple):
    """One step of an upgrade."""

    run: collections.abc.Callable[[Upgrade], Pending | None]  # advances the journal, or ends the hook's part
    status: str
    retry: str  # where an upgrade that failed here begins again


def begin(node: str | None, wanted: Spec, *, rolling: bool = True, patience_s: float = DAY_S) -> Upgrade | None:
    """Begin an upgrade, or go on with the one that is under way; return None where there is nothing to do."""
    running = Upgrade.load()
    if running is not None:
        if wanted.version in {None, running.plan.version} and wanted.branch == running.spec.branch:
            return running.to(_STEPS[running.step].retry, reboots=0) if running.failed else running
        if running.step not in _UNTOUCHED:
            raise DriverError(f"driver {running.plan.version} is under way: wait for it, or run with cancel=true")
    here = facts()
    if not here.cards:
        raise DriverError("this machine shows no NVIDIA GPU on its PCI bus, so there is no driver to install")
    packages = plan.resolve(here, wanted)
    is_there = install.is_installed(packages) and here.loaded == packages.version
    if running is None and is_there and state.diagnose(here) is None:
        return None
    upgrade = Upgrade(step="ask", node=node, spec=wanted, plan=packages, rolling=rolling, patience_s=patience_s)
    return upgrade.to("ask")


def cancel() -> str:
    """Stop an upgrade, and restore the node's state; return what was done."""
    upgrade = Upgrade.load()
    if upgrade is None:
        raise DriverError("no upgrade is under way")
    if upgrade.step not in _UNTOUCHED:
        if not upgrade.failed:
            raise DriverError(f"driver {upgrade.plan.version} cannot be cancelled now: {upgrade.text}")
        install.ensure_services()
    if not hold.release():
        raise DriverError(f"{upgrade.node} was down before and has jobs now: try again when they have ended")
    node_state.clear(node_state.UPGRADE)
    return f"driver {upgrade.plan.version} is cancelled"


def advance() -> Pending:
    """Go on as far as it goes now. Never waits long, and only drains a node that has jobs."""
    while (upgrade := Upgrade.load()) is not None and not upgrade.failed:
        try:
            pending = _STEPS[upgrade.step].run(upgrade)
        except (_Wait, nodes.ControllerSilent) as e:
            upgrade.save(waits=str(e) if isinstance(e, _Wait) else f"waits for slurmctld ({e})")
            return Pending.WAIT
        except _FAILURES as e:
            _fail(str(e))
            return Pending.WAIT
        if pending is not None:
            return pending
    return Pending.NONE if upgrade is None else Pending.WAIT


def complete(progress: registration.Progress | None) -> bool:
    """Record how far the registration came; return whether the upgrade is completed."""
    upgrade = Upgrade.load()
    if upgrade is None or upgrade.step != "register":
        return False
    if upgrade.node is not None and (progress is None or progress.stage not in REGISTERED):
        detail = f" ({' '.join(filter(None, (progress.stage.value, progress.detail)))})" if progress else ""
        upgrade.save(waits=f"is loaded; waits until {upgrade.node} is registered{detail}")
        return False
    try:
        if not hold.release():
            return False
    except nodes.NodeError as e:
        upgrade.save(waits=f"is loaded; waits for slurmctld ({e})")
        return False
    node_state.clear(node_state.UPGRADE)
    return True


def ensure_wanted(node: str | None, wanted: Spec) -> bool:
    """Begin to install the option's driver on a machine without any; return whether that begins now.

    A driver that is there is never changed by an option: `upgrade-driver` does that.
    """
    if wanted.keeps or Upgrade.load() is not None:
        return False
    here = facts()
    key = f"{wanted} {here.kernel} {here.next_kernel}"
    started = None
    if here.cards and not here.version:
        if _was_refused(key):
            return False
        try:
            started = begin(node, wanted, rolling=False)
        except (DriverError, CommandError) as e:
            _refuse(key, e)
            return False
    node_state.clear(_REFUSED)
    return started is not None


def note(wanted: Spec) -> str | None:
    """State what the operator should know of a driver, though it may work; None when there is nothing."""
    here = facts()
    if not here.cards:
        return None
    if not wanted.keeps and not here.version and (text := (node_state.read(_REFUSED) or {}).get("text")):
        return str(text)
    if not wanted.keeps and here.version and here.branch != wanted.branch:
        return f"driver {here.version} is here, but the option is driver={wanted.branch}: run upgrade-driver"
    problem = state.diagnose(here)
    if problem is None and here.loaded is not None and here.library is None:
        return (
            f"driver {here.loaded} is here without libnvidia-ml.so.1, so its health is not checked: install "
            "libnvidia-compute of exactly that version"
        )
    return problem.text if problem is not None and not problem.is_fatal else None


def ensure_settings(wanted: Spec) -> None:
    """Keep a driver that works as it is: initialised, with nvidia-smi, and held from apt and unattended-upgrades."""
    here = facts()
    if not here.cards or here.loaded is None or here.runfile:
        return
    key = f"utils {here.loaded}"
    if wanted.utils and not _was_refused(key):
        try:
            install.ensure_utils(here)
        except (DriverError, apt.AptError, CommandError) as e:  # the health check works without it, so it is no status
            logger.warning("reset-gpu and set-mig need nvidia-smi, which is not installed: %s", e)
            _refuse(key, e)
    try:
        install.ensure_hold(on=wanted.hold)
    except CommandError as e:  # another dpkg runs, as on a fresh machine: the next hook tries again
        logger.warning("the driver's packages are not held yet: %s", e)
    if install.ensure_persistence(on=wanted.persistence) and install.PERSISTENCED_PROGRAM.exists():
        with contextlib.suppress(CommandError):  # jobs go on; the next boot starts it anyway
            systemd.restart(install.PERSISTENCED)


def release() -> None:
    """Remove what this charm set for the driver; the driver stays."""
    if Upgrade.load() is not None or install.STOPPED.exists():
        install.ensure_services()
    try:
        install.ensure_hold(on=False)
    except CommandError as e:
        logger.warning("the driver's packages stay held, see apt-mark showhold: %s", e)
    install.ensure_persistence(on=False)
    files.ensure_absent(install.NOUVEAU)
    for journal in (node_state.UPGRADE, _REFUSED):
        node_state.clear(journal)


def count_reboot() -> None:
    """Count a reboot that was asked for."""
    upgrade = Upgrade.load()
    if upgrade is not None and upgrade.step == "reboot":
        upgrade.save(reboots=upgrade.reboots + 1)


def facts() -> state.Facts:
    """Return this machine as it is now."""
    return state.look(ROOTS.proc, ROOTS.sys)


def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return (ROOTS.proc / "sys/kernel/random/boot_id").read_text().strip()


def _ask(upgrade: Upgrade) -> None:
    node = upgrade.show()
    if node is None:  # no job can run on it
        upgrade.to("install")
        return
    why = f"driver {upgrade.plan.version}"
    if not upgrade.rolling:
        hold.take(hold.DRIVER, node.name, why)
    elif (other := hold.take_turn(hold.DRIVER, node.name, why)) is not None:
        raise _Wait(f"waits for its turn: {other} changes its driver")
    upgrade.to("drain", drained_at=time.time())


def _drain(upgrade: Upgrade) -> None:
    node = upgrade.show()
    if node is not None and not hold.is_ours(node, hold.DRIVER):
        hold.forget()
        upgrade.to("ask")
        raise DriverError(f"another changed the state of {upgrade.node} before it was free")
    jobs = hold.jobs_on(node)
    if jobs is None:
        upgrade.to("install")
        return
    if time.time() - upgrade.drained_at < upgrade.patience_s:
        raise _Wait(f"waits for {jobs} on {upgrade.node}")
    hold.release()
    upgrade.to("ask")
    hours = upgrade.patience_s / 3600
    raise DriverError(f"{jobs} still ran on {upgrade.node} after {hours:g} h, so the node was released")


def _install(upgrade: Upgrade) -> None:
    _check_free(upgrade)
    apt.repair()
    packages, here = upgrade.plan, facts()
    if here.next_kernel not in packages.kernels or not (install.is_installed(packages) or _is_available(packages)):
        packages = plan.resolve(here, upgrade.spec)  # the archive or /boot changed
        upgrade = upgrade.to("install", plan=packages)
    if not install.is_installed(packages):
        install.stop_holders()
    install.install(packages)
    install.ensure_settings(persistence=upgrade.spec.persistence, hold=upgrade.spec.hold)
    upgrade.to("load")


def _load(upgrade: Upgrade) -> None:
    _check_free(upgrade)
    here = facts()
    install.check_next_kernel(upgrade.plan, here.kernel)
    install.stop_holders()
    if install.load(upgrade.plan.version, here):
        upgrade.to("verify")
    else:
        upgrade.to("reboot", boot_id=boot_id())


def _reboot(upgrade: Upgrade) -> Pending | None:
    if boot_id() != upgrade.boot_id:
        upgrade.to("verify")
        return None
    if upgrade.reboots >= _MOST_REBOOTS:
        raise DriverError("this machine does not reboot: reboot it by hand")
    _check_free(upgrade)
    install.check_next_kernel(upgrade.plan, facts().kernel)  # another kernel may have been installed since
    return Pending.REBOOT


def _verify(upgrade: Upgrade) -> None:
    here, version = facts(), upgrade.plan.version
    if here.loaded == version:
        install.start_services(fabric=upgrade.plan.fabric)
    elif here.loaded is not None:
        raise DriverError(f"driver {here.loaded} runs instead: see lsinitramfs and modinfo nvidia")
    problem = state.explain(ROOTS.proc, ROOTS.sys)
    if problem is None:
        detection, count = detect.detect(ROOTS), len(here.cards)
        missing = count - len(detection.gpus)
        problem = detection.problem or (f"{missing} of {count} GPUs do not respond" if missing > 0 else None)
    if problem is None:
        upgrade.to("register")
    elif here.loaded == version and time.time() - upgrade.since < _SETTLE_S:
        raise _Wait(f"is loaded; {problem}")
    else:
        raise DriverError(problem)


def _register(_: Upgrade) -> Pending:
    return Pending.REGISTER


_STEPS = {
    "ask": Step(_ask, "asks for its turn", "ask"),
    "drain": Step(_drain, "waits for jobs", "drain"),
    "install": Step(_install, "is being installed", "install"),
    "load": Step(_load, "is being loaded", "install"),
    "reboot": Step(_reboot, "reboots with the next event", "install"),
    "verify": Step(_verify, "is being verified", "load"),
    "register": Step(_register, "is loaded; the node registers", "verify"),
}
_UNTOUCHED = {"ask", "drain"}  # steps before which nothing is changed on the machine


def _check_free(upgrade: Upgrade) -> None:
    """Make sure, before every step that ends what runs on the GPUs, that nothing does."""
    node = upgrade.show()
    jobs = hold.jobs_on(node)
    if jobs is not None:
        raise DriverError(f"{jobs} started on {upgrade.node} meanwhile: drain it")
    if node is not None and not (node.is_drained or node.is_down):
        hold.take(hold.DRIVER, node.name, f"driver {upgrade.plan.version}")


def _is_available(packages: Plan) -> bool:
    try:
        apt.simulate(apt.assigned(packages.packages))
    except apt.AptError:
        return False
    return True


def _fail(why: str) -> None:
    upgrade = Upgrade.load()
    if upgrade is None:
        return
    upgrade.save(failed=why)
    if upgrade.node is not None and hold.Hold.load() is not None:
        with contextlib.suppress(nodes.NodeError, hold.HoldError):  # the status shows it anyway
            hold.take(hold.DRIVER, upgrade.node, f"failed: {why}")


def _was_refused(key: str) -> bool:
    last = node_state.read(_REFUSED) or {}
    at = last.get("at")
    return last.get("key") == key and isinstance(at, float) and time.time() - at < _RETRY_S


def _refuse(key: str, error: Exception) -> None:
    node_state.write(_REFUSED, {"key": key, "text": str(error), "at": time.time()})

"""Upgrade a node's driver step by step: drain, wait for jobs, install, load or reboot, verify, register.

A journal holds the next step and the exact set of packages, written before the step begins, and each step may be done
twice. So an upgrade may be interrupted anywhere, by a reboot too, and the next hook goes on. A step that fails leaves
the node drained with the reason, and says what to do; running the upgrade again tries that step again.
"""

import collections.abc
import contextlib
import dataclasses
import enum
import json
import logging
import pathlib
import time
import typing

from driver import install as driver_install
from driver import plan as driver_plan
from driver import state as driver_state
from driver.state import DriverError
from gpu import detect as gpu_detect
from maintenance import hold as gpu_hold
from node import node_state, registration
from slurm_ddp import apt, files, systemd
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

DEFAULT_PATIENCE_S = 24 * 3600.0
_SETTLE_S = 600.0  # a fabric manager has the cards of a host ready within minutes of its start
_MOST_REBOOTS = 3
# Where a node is that has its GPUs in Slurm; KEPT may wait for a mount, which is no matter of drivers.
REGISTERED = frozenset({registration.Stage.REGISTERED, registration.Stage.KEPT})
_RETRY_S = 3600.0  # after a refusal, so that not every hook asks the archives again
ROOTS = gpu_detect.Roots()


class Step(enum.StrEnum):
    """What is done next."""

    ASK = "ask"  # for the cluster's turn
    DRAIN = "drain"  # wait until the node is free
    INSTALL = "install"
    LOAD = "load"
    REBOOT = "reboot"
    VERIFY = "verify"
    REGISTER = "register"


class Turn(enum.Enum):
    """What the hook does with the rest of its time."""

    NONE = "none"  # no upgrade: go on as ever
    HOLD = "hold"  # leave the node alone
    REBOOT = "reboot"  # ask Juju for a reboot
    REGISTER = "register"  # register the node, then tell `finish`


@dataclasses.dataclass(frozen=True)
class Upgrade:
    """The journal."""

    step: Step
    node: str | None  # None: slurmd is not set up, so there are no jobs
    spec: driver_plan.Spec
    plan: driver_plan.Plan
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
        try:
            raw: dict[str, typing.Any] = json.loads(_journal().read_text())
            spec, plan = driver_plan.Spec(**raw.pop("spec")), raw.pop("plan")
            packages = tuple((str(name), str(number)) for name, number in plan.pop("packages"))
            whole = driver_plan.Plan(packages=packages, kernels=tuple(plan.pop("kernels")), **plan)
            return cls(step=Step(raw.pop("step")), spec=spec, plan=whole, **raw)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self) -> None:
        """Write it, before what it tells of is begun."""
        files.ensure_file(_journal(), json.dumps(dataclasses.asdict(self)) + "\n", mode=0o600)

    def to(self, step: Step, **changes: typing.Any) -> "Upgrade":
        """Return it at another step, saved."""
        fresh: dict[str, typing.Any] = {"since": time.time(), "waits": "", "failed": ""}
        after = dataclasses.replace(self, step=step, **(fresh | changes))
        after.save()
        return after

    @property
    def text(self) -> str:
        """Where it is, for a status."""
        driver = f"driver {self.plan.version}"
        if self.failed:
            return f"{driver} failed: {self.failed}; then run upgrade-driver again, or with cancel=true"
        return f"{driver}: {self.waits or _DOING[self.step]}"


_BEFORE = frozenset({Step.ASK, Step.DRAIN})  # nothing is changed on the machine yet
# Where an upgrade that failed begins again; else at the step that failed.
_RETRY = {Step.LOAD: Step.INSTALL, Step.REBOOT: Step.INSTALL, Step.VERIFY: Step.LOAD, Step.REGISTER: Step.VERIFY}
_DOING = {
    Step.ASK: "asks for its turn",
    Step.DRAIN: "waits for jobs",
    Step.INSTALL: "is being installed",
    Step.LOAD: "is being loaded",
    Step.REBOOT: "reboots with the next event",
    Step.VERIFY: "is being looked at",
    Step.REGISTER: "is there; the node registers",
}


def begin(
    node: str | None, wanted: driver_plan.Spec, *, rolling: bool = True, patience_s: float = DEFAULT_PATIENCE_S
) -> Upgrade | None:
    """Begin an upgrade, or go on with the one that is under way; return None where there is nothing to do.

    Raises:
        DriverError: the driver is not available, another upgrade is under way, or this machine has no GPU.
    """
    running = Upgrade.load()
    if running is not None:
        if wanted.version in {None, running.plan.version} and wanted.branch == running.spec.branch:
            return running.to(_RETRY.get(running.step, running.step), reboots=0) if running.failed else running
        if running.step not in _BEFORE:
            raise DriverError(f"driver {running.plan.version} is under way: wait for it, or run with cancel=true")
    facts = _facts()
    if not facts.cards:
        raise DriverError("this machine shows no NVIDIA GPU on its PCI bus, so there is no driver to install")
    plan = driver_plan.resolve(facts, wanted)
    is_there = driver_install.is_installed(plan) and facts.loaded == plan.version
    if running is None and is_there and driver_state.diagnose(facts) is None:
        return None
    return Upgrade(Step.ASK, node, wanted, plan, rolling, patience_s).to(Step.ASK)


def cancel() -> str:
    """Stop an upgrade, and put the node back; return what was done.

    Raises:
        DriverError: there is none, or it is where stopping would leave half a driver.
        NodeError: the controller did not do as asked.
    """
    upgrade = Upgrade.load()
    if upgrade is None:
        raise DriverError("no upgrade is under way")
    if upgrade.step not in _BEFORE:
        if not upgrade.failed:
            raise DriverError(f"driver {upgrade.plan.version} is past the point: {upgrade.text}")
        driver_install.ensure_services()
    if not gpu_hold.give_back():
        raise DriverError(f"{upgrade.node} was down before and has jobs now: try again when they have ended")
    files.ensure_absent(_journal())
    return f"driver {upgrade.plan.version} is given up"


def advance() -> Turn:
    """Go on as far as it goes now. Never waits long, and never while the node has jobs does more than drain it."""
    upgrade = Upgrade.load()
    while upgrade is not None and not upgrade.failed:
        before = upgrade
        try:
            upgrade, turn = _STEPS[upgrade.step](upgrade)
        except nodes.ControllerSilent as e:
            return _wait(before, f"waits for slurmctld ({e})")[1]
        except (DriverError, gpu_hold.HoldError, nodes.NodeError, CommandError) as e:
            return _fail(before, str(e))[1]
        if turn is not None:
            return turn
    return Turn.NONE if upgrade is None else Turn.HOLD


def finish(progress: registration.Progress | None) -> bool:
    """Take in how far the registration came; return whether the upgrade is done with."""
    upgrade = Upgrade.load()
    if upgrade is None or upgrade.step is not Step.REGISTER:
        return False
    if upgrade.node is not None and (progress is None or progress.stage not in REGISTERED):
        detail = f" ({progress.stage.value} {progress.detail})" if progress else ""
        _wait(upgrade, f"is there; waits until {upgrade.node} is registered{detail}".replace(" )", ")"))
        return False
    try:
        if not gpu_hold.give_back():
            return False
    except nodes.NodeError as e:
        _wait(upgrade, f"is there; waits for slurmctld ({e})")
        return False
    files.ensure_absent(_journal())
    return True


def ensure_wanted(node: str | None, wanted: driver_plan.Spec) -> bool:
    """Begin to install the option's driver on a machine without any; return whether that begins now.

    A driver that is there is never changed by an option: `upgrade-driver` does that.
    """
    if wanted.keeps or Upgrade.load() is not None:
        return False
    facts = _facts()
    if not facts.cards or facts.has_driver:
        files.ensure_absent(_refusals())
        return False
    key = f"{wanted} {facts.kernel} {facts.next_kernel}"
    if _was_refused(key):
        return False
    try:
        begun = begin(node, wanted, rolling=False)
    except (DriverError, CommandError) as e:
        _refuse(key, e)
        return False
    files.ensure_absent(_refusals())
    return begun is not None


def note(wanted: driver_plan.Spec) -> str | None:
    """Return what the operator should know of a driver, though it may work; None when there is nothing."""
    facts = _facts()
    if not facts.cards:
        return None
    if not wanted.keeps and not facts.has_driver:
        refused = _refusal().get("text")
        if refused:
            return str(refused)
    if not wanted.keeps and facts.has_driver and facts.version.partition(".")[0] != wanted.branch:
        return f"driver {facts.version} is here, and the option says {wanted.branch}: run upgrade-driver"
    finding = driver_state.diagnose(facts)
    if finding is None and facts.loaded is not None and facts.library is None:
        return (
            f"driver {facts.loaded} is here without libnvidia-ml.so.1, so its health is not checked: install "
            "libnvidia-compute of exactly that version"
        )
    return str(finding) if finding is not None and not finding.is_fatal else None


def ensure_settings(wanted: driver_plan.Spec) -> None:
    """Keep a driver that works as it is: awake, with nvidia-smi, and out of apt's and unattended-upgrades' hands."""
    facts = _facts()
    if not facts.cards or facts.loaded is None or facts.runfile:
        return
    key = f"utils {facts.loaded}"
    if wanted.utils and not _was_refused(key):
        try:
            driver_install.ensure_utils(facts)
        except (DriverError, CommandError) as e:  # the health check works without it, so it is no status
            logger.warning("reset-gpu and set-mig need nvidia-smi, which is not installed: %s", e)
            _refuse(key, e)
    try:
        driver_install.ensure_hold(on=wanted.hold)
    except CommandError as e:  # another dpkg runs, as on a fresh machine: the next hook tries again
        logger.warning("the driver's packages are not held yet: %s", e)
    if driver_install.ensure_persistence(on=wanted.persistence) and driver_install.PERSISTENCED_PROGRAM.exists():
        with contextlib.suppress(CommandError):  # jobs go on; the next boot starts it anyway
            systemd.restart(driver_install.PERSISTENCED)


def release() -> None:
    """Remove what holds this machine back; the driver stays."""
    if Upgrade.load() is not None or driver_install.STOPPED.exists():
        driver_install.ensure_services()
    try:
        driver_install.ensure_hold(on=False)
    except CommandError as e:
        logger.warning("the driver's packages stay held, see apt-mark showhold: %s", e)
    driver_install.ensure_persistence(on=False)
    for path in (_journal(), _refusals(), driver_install.NOUVEAU):
        files.ensure_absent(path)


_Next = tuple[Upgrade, Turn | None]


def _ask(upgrade: Upgrade) -> _Next:
    node = nodes.show(upgrade.node) if upgrade.node else None
    if upgrade.node is None or node is None:  # no job can run on it
        return upgrade.to(Step.INSTALL), None
    why = f"driver {upgrade.plan.version}"
    if not upgrade.rolling:
        gpu_hold.take(gpu_hold.DRIVER, upgrade.node, why)
    elif (other := gpu_hold.turn(gpu_hold.DRIVER, upgrade.node, why)) is not None:
        return _wait(upgrade, f"waits for its turn: {other} changes its driver")
    return upgrade.to(Step.DRAIN, drained_at=time.time()), None


def _drain(upgrade: Upgrade) -> _Next:
    node = nodes.show(upgrade.node) if upgrade.node else None
    if node is not None and not gpu_hold.is_ours(node, gpu_hold.DRIVER):
        gpu_hold.forget()
        return _fail(upgrade.to(Step.ASK), f"somebody else changed the state of {upgrade.node} before it was free")
    busy = gpu_hold.in_the_way(node)
    if busy is None:
        return upgrade.to(Step.INSTALL), None
    if time.time() - upgrade.drained_at < upgrade.patience_s:
        return _wait(upgrade, f"waits for {busy} on {upgrade.node}")
    gpu_hold.give_back()
    hours = upgrade.patience_s / 3600
    return _fail(upgrade.to(Step.ASK), f"{busy} still ran on {upgrade.node} after {hours:g} h, so it is back")


def _install(upgrade: Upgrade) -> _Next:
    _check_free(upgrade)
    facts, plan = _facts(), upgrade.plan
    driver_install.repair()
    is_there = driver_install.is_installed(plan)
    if facts.next_kernel not in plan.kernels or not (is_there or _is_available(plan)):  # the archive or /boot changed
        plan = driver_plan.resolve(facts, upgrade.spec)
        upgrade = upgrade.to(Step.INSTALL, plan=plan)
        is_there = driver_install.is_installed(plan)
    if not is_there:
        driver_install.stop_holders()
    driver_install.install(plan)
    driver_install.ensure_settings(persistence=upgrade.spec.persistence, hold=upgrade.spec.hold)
    return upgrade.to(Step.LOAD), None


def _load(upgrade: Upgrade) -> _Next:
    _check_free(upgrade)
    facts = _facts()
    driver_install.check_next_kernel(upgrade.plan, facts.kernel)
    driver_install.stop_holders()
    if driver_install.load(upgrade.plan.version, facts):
        return upgrade.to(Step.VERIFY), None
    return upgrade.to(Step.REBOOT, boot_id=boot_id()), None


def _reboot(upgrade: Upgrade) -> _Next:
    if boot_id() != upgrade.boot_id:
        return upgrade.to(Step.VERIFY), None
    if upgrade.reboots >= _MOST_REBOOTS:
        return _fail(upgrade, "this machine does not reboot: reboot it by hand")
    _check_free(upgrade)
    driver_install.check_next_kernel(upgrade.plan, _facts().kernel)  # another kernel may have come since
    return upgrade, Turn.REBOOT


def rebooting() -> None:
    """Count a reboot that was asked for."""
    upgrade = Upgrade.load()
    if upgrade is not None and upgrade.step is Step.REBOOT:
        dataclasses.replace(upgrade, reboots=upgrade.reboots + 1).save()


def _verify(upgrade: Upgrade) -> _Next:
    facts, version = _facts(), upgrade.plan.version
    if facts.loaded == version:
        driver_install.start_services(fabric=upgrade.plan.fabric)
        facts = _facts()
    elif facts.loaded is not None:
        return _fail(upgrade, f"driver {facts.loaded} runs instead: see lsinitramfs and modinfo nvidia")
    finding = driver_state.diagnose(facts)
    problem = str(finding) if finding is not None and finding.is_fatal else None
    if problem is None:
        found = gpu_detect.detect(ROOTS)
        missing = len(facts.cards) - len(found.gpus)
        problem = found.problem or (f"{missing} of {len(facts.cards)} GPUs do not answer" if missing > 0 else None)
    if problem is None:
        return upgrade.to(Step.REGISTER), None
    if time.time() - upgrade.since < _SETTLE_S and facts.loaded == version:
        return _wait(upgrade, f"is loaded; {problem}")
    return _fail(upgrade, problem)


_STEPS: dict[Step, collections.abc.Callable[[Upgrade], _Next]] = {
    Step.ASK: _ask,
    Step.DRAIN: _drain,
    Step.INSTALL: _install,
    Step.LOAD: _load,
    Step.REBOOT: _reboot,
    Step.VERIFY: _verify,
    Step.REGISTER: lambda upgrade: (upgrade, Turn.REGISTER),
}


def _check_free(upgrade: Upgrade) -> None:
    """Make sure, before every step that ends what runs on the GPUs, that nothing does."""
    node = nodes.show(upgrade.node) if upgrade.node else None
    busy = gpu_hold.in_the_way(node)
    if busy is not None:
        raise DriverError(f"{busy} started on {upgrade.node} meanwhile: drain it")
    if node is not None and not (node.is_drained or node.is_down):
        gpu_hold.take(gpu_hold.DRIVER, node.name, f"driver {upgrade.plan.version}")


def _is_available(plan: driver_plan.Plan) -> bool:
    try:
        apt.simulate(apt.assigned(plan.exact))
    except apt.AptError:
        return False
    return True


def _wait(upgrade: Upgrade, text: str) -> tuple[Upgrade, Turn]:
    after = dataclasses.replace(upgrade, waits=text)
    after.save()
    return after, Turn.HOLD


def _fail(upgrade: Upgrade, text: str) -> tuple[Upgrade, Turn]:
    after = dataclasses.replace(upgrade, failed=text)
    after.save()
    if upgrade.node is not None and gpu_hold.Hold.load() is not None:
        with contextlib.suppress(nodes.NodeError, gpu_hold.HoldError):  # the status shows it anyway
            gpu_hold.take(gpu_hold.DRIVER, upgrade.node, f"failed: {text}")
    return after, Turn.HOLD


def next_kernel_lacks_driver() -> bool:
    """Return whether a reboot now would come up without the driver."""
    return _facts().next_kernel_lacks_driver


def present() -> str:
    """Return the version of the driver that this machine has, empty where it has none."""
    return _facts().version


def _facts() -> driver_state.Facts:
    return driver_state.look(ROOTS.proc, ROOTS.sys)


def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return (ROOTS.proc / "sys/kernel/random/boot_id").read_text().strip()


def _refusal() -> dict[str, typing.Any]:
    """Return what was refused last, when and why: `key`, `at` (seconds since 1970) and `text`."""
    try:
        raw = json.loads(_refusals().read_text())
        return {"key": str(raw["key"]), "at": float(raw["at"]), "text": str(raw["text"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _was_refused(key: str) -> bool:
    last = _refusal()
    return last.get("key") == key and time.time() - last["at"] < _RETRY_S


def _refuse(key: str, error: Exception) -> None:
    files.ensure_file(_refusals(), json.dumps({"key": key, "text": str(error), "at": time.time()}) + "\n", mode=0o600)


def _journal() -> pathlib.Path:
    return node_state.STATE_DIR / "upgrade.json"


def _refusals() -> pathlib.Path:
    return node_state.STATE_DIR / "driver-refused.json"

"""Another driver for a node, step by step: drained, free of jobs, installed, loaded or rebooted, looked at, registered.

A journal holds the step that is next and the exact set of packages, written before the step begins, and each step may
be done twice. So an upgrade may be interrupted anywhere, by a reboot too, and the next hook goes on. A step that fails
leaves the node drained with the reason, and says what to do; running the upgrade again tries that step again.
"""

import contextlib
import dataclasses
import enum
import json
import logging
import pathlib
import time
import typing

import driver_install
import driver_plan
import driver_state
import gpu_detect
import gpu_hold
import registration
from slurm_ddp import apt, files, systemd
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

DEFAULT_PATIENCE_S = 24 * 3600.0
_SETTLE_S = 600.0  # a fabric manager has the cards of a host ready within minutes of its start
_MOST_REBOOTS = 3
# Where a node is that has its GPUs in Slurm; KEPT may wait for a mount, which is no matter of drivers.
REGISTERED = frozenset({registration.Stage.REGISTERED, registration.Stage.KEPT})
_RETRY_PLAN_S = 3600.0
ROOTS = gpu_detect.Roots()


class UpgradeError(Exception):
    """An upgrade cannot begin, be stopped or be told of. `str()` is one line and says what to do."""


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
    wish: driver_plan.Wish
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
            wish = driver_plan.Wish(**raw.pop("wish"))
            plan = raw.pop("plan")
            packages = tuple((str(name), str(number)) for name, number in plan.pop("packages"))
            kernels = tuple(str(kernel) for kernel in plan.pop("kernels"))
            whole = driver_plan.Plan(packages=packages, kernels=kernels, **plan)
            return cls(step=Step(raw.pop("step")), wish=wish, plan=whole, **raw)
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
        if self.failed:
            return (
                f"driver {self.plan.version} failed: {self.failed}; then run upgrade-driver again, or with cancel=true"
            )
        return f"driver {self.plan.version}: {self.waits or _DOING[self.step]}"


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
    node: str | None, wanted: driver_plan.Wish, *, rolling: bool = True, patience_s: float = DEFAULT_PATIENCE_S
) -> Upgrade | None:
    """Write down an upgrade, or go on with the one that is under way; return None where there is nothing to do.

    Raises:
        PlanError: what is wanted cannot be had.
        InstallError: apt does not work.
        UpgradeError: another upgrade is under way, or this machine has no GPU.
    """
    running = Upgrade.load()
    if running is not None:
        asked_else = wanted.version not in {None, running.plan.version} or wanted.branch != running.wish.branch
        if asked_else and running.step not in {Step.ASK, Step.DRAIN}:
            raise UpgradeError(f"driver {running.plan.version} is under way: wait for it, or run with cancel=true")
        if not asked_else:
            return running.to(_RETRY.get(running.step, running.step), reboots=0) if running.failed else running
    facts = _facts()
    if not facts.cards:
        raise UpgradeError("this machine shows no NVIDIA GPU on its PCI bus, so there is no driver to install")
    plan = driver_install.resolve(facts, wanted)
    if running is None and driver_install.is_installed(plan) and facts.loaded == plan.version:
        wrong = driver_state.diagnose(facts)
        if wrong is None:
            return None
    upgrade = Upgrade(Step.ASK, node, wanted, plan, rolling, patience_s)
    return upgrade.to(Step.ASK)


def cancel() -> str:
    """Stop an upgrade, and put the node back; return what was done.

    Raises:
        UpgradeError: there is none, or it is where stopping would leave half a driver.
        NodeError: the controller did not do as asked.
    """
    upgrade = Upgrade.load()
    if upgrade is None:
        raise UpgradeError("no upgrade is under way")
    if not upgrade.failed and upgrade.step not in {Step.ASK, Step.DRAIN}:
        raise UpgradeError(f"driver {upgrade.plan.version} is past the point: {upgrade.text}")
    if upgrade.step not in {Step.ASK, Step.DRAIN}:
        driver_install.ensure_services()
    if not gpu_hold.give_back():
        raise UpgradeError(f"{upgrade.node} was down before and has jobs now: try again when they have ended")
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
            _wait(before, f"waits for slurmctld ({e})")
            return Turn.HOLD
        except (
            driver_install.InstallError, driver_plan.PlanError, gpu_hold.HoldError, nodes.NodeError, CommandError,
        ) as e:  # fmt: skip
            upgrade, turn = _fail(before, str(e)), Turn.HOLD
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


def ensure_wanted(node: str | None, wanted: driver_plan.Wish) -> bool:
    """Let a machine without any driver get the one that the option names; return whether that begins now.

    A driver that is there is never changed by an option: `upgrade-driver` does that.
    """
    if wanted.keeps or Upgrade.load() is not None:
        return False
    facts = _facts()
    if not facts.cards or facts.has_driver:
        files.ensure_absent(_refusal())
        return False
    key = f"{wanted} {facts.kernel} {facts.next_kernel}"
    said = _Refusal.load()
    if said is not None and said.key == key and time.time() - said.at < _RETRY_PLAN_S:
        return False
    try:
        begun = begin(node, wanted, rolling=False)
    except (driver_plan.PlanError, driver_install.InstallError, UpgradeError, CommandError) as e:
        _Refusal(key, str(e), time.time()).save()
        return False
    files.ensure_absent(_refusal())
    return begun is not None


def note(wanted: driver_plan.Wish) -> str | None:
    """Return what a person should know of a driver, though it may work; None when there is nothing."""
    facts = _facts()
    if not facts.cards:
        return None
    said = _Refusal.load()
    if not wanted.keeps and said is not None and not facts.has_driver:
        return said.text
    if not wanted.keeps and facts.has_driver and _branch(facts) != wanted.branch:
        return f"driver {_version(facts)} is here, and the option says {wanted.branch}: run upgrade-driver"
    wrong = driver_state.diagnose(facts)
    if wrong is None and facts.loaded is not None and facts.library is None:
        return (
            f"driver {facts.loaded} is here without libnvidia-ml.so.1, so its health is not checked: install "
            "libnvidia-compute of exactly that version"
        )
    return str(wrong) if wrong is not None and not wrong.is_fatal else None


def ensure_settings(wanted: driver_plan.Wish) -> None:
    """Keep a driver that works as it is: awake, and out of apt's and unattended-upgrades' hands."""
    facts = _facts()
    if not facts.cards or facts.loaded is None or facts.runfile:
        return
    if wanted.utils:
        _ensure_utils(facts)
    try:
        driver_install.ensure_hold(on=wanted.hold)
    except CommandError as e:  # another dpkg runs, as on a fresh machine: the next hook tries again
        logger.warning("the driver's packages are not held yet: %s", e)
    if driver_install.ensure_persistence(on=wanted.persistence) and driver_install.PERSISTENCED_PROGRAM.exists():
        with contextlib.suppress(CommandError):  # jobs go on; the next boot starts it anyway
            systemd.restart(driver_install.PERSISTENCED)


def _ensure_utils(facts: driver_state.Facts) -> None:
    """Install nvidia-smi where it is missing. The health check works without it, so a failure is no status."""
    key = f"utils {facts.loaded}"
    said = _Refusal.load()
    if said is not None and said.key == key and time.time() - said.at < _RETRY_PLAN_S:
        return
    try:
        driver_install.ensure_utils(facts)
    except (driver_install.InstallError, CommandError) as e:
        logger.warning("reset-gpu and set-mig need nvidia-smi, which is not installed: %s", e)
        _Refusal(key, str(e), time.time()).save()


def release() -> None:
    """Leave the machine: what holds it back goes, the driver stays."""
    if Upgrade.load() is not None or driver_install.STOPPED.exists():
        driver_install.ensure_services()
    try:
        driver_install.ensure_hold(on=False)
    except CommandError as e:
        logger.warning("the driver's packages stay held, see apt-mark showhold: %s", e)
    driver_install.ensure_persistence(on=False)
    for path in (_journal(), _refusal(), driver_install.NOUVEAU):
        files.ensure_absent(path)


_Next = tuple[Upgrade | None, Turn | None]


def _ask(upgrade: Upgrade) -> _Next:
    if upgrade.node is None:
        return upgrade.to(Step.INSTALL), None
    why = f"driver {upgrade.plan.version}"
    node = nodes.show(upgrade.node)
    if node is None:  # nobody can use it, and nobody misses it
        return upgrade.to(Step.INSTALL), None
    if upgrade.rolling:
        other = gpu_hold.turn(gpu_hold.DRIVER, upgrade.node, why)
        if other is not None:
            return _wait(upgrade, f"waits for its turn: {other} changes its driver")
    else:
        gpu_hold.take(gpu_hold.DRIVER, upgrade.node, why)
    return upgrade.to(Step.DRAIN, drained_at=time.time()), None


def _drain(upgrade: Upgrade) -> _Next:
    node = nodes.show(upgrade.node) if upgrade.node else None
    if node is not None and not gpu_hold.is_ours(node, gpu_hold.DRIVER):
        gpu_hold.forget()
        return _fail(
            upgrade.to(Step.ASK), f"somebody else changed the state of {upgrade.node} before it was free"
        ), Turn.HOLD
    busy = gpu_hold.in_the_way(node)
    if busy is None:
        return upgrade.to(Step.INSTALL), None
    if time.time() - upgrade.drained_at < upgrade.patience_s:
        return _wait(upgrade, f"waits for {busy} on {upgrade.node}")
    gpu_hold.give_back()  # the jobs had their time, and so had we
    hours = upgrade.patience_s / 3600
    return _fail(
        upgrade.to(Step.ASK), f"{busy} still ran on {upgrade.node} after {hours:g} h, so it is back"
    ), Turn.HOLD


def _install(upgrade: Upgrade) -> _Next:
    _check_free(upgrade)
    facts = _facts()
    plan = upgrade.plan
    driver_install.repair()
    is_there = driver_install.is_installed(plan)
    if facts.next_kernel not in plan.kernels or not (is_there or _can_be_had(plan)):  # things went on while we waited
        plan = driver_install.resolve(facts, upgrade.wish)
        upgrade = upgrade.to(Step.INSTALL, plan=plan)
        is_there = driver_install.is_installed(plan)
    if not is_there:
        driver_install.stop_holders()
    driver_install.install(plan)
    driver_install.ensure_settings(persistence=upgrade.wish.persistence, hold=upgrade.wish.hold)
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
        return _fail(upgrade, "this machine does not reboot: reboot it by hand"), Turn.HOLD
    _check_free(upgrade)
    driver_install.check_next_kernel(upgrade.plan, _facts().kernel)  # another kernel may have come since
    return upgrade, Turn.REBOOT


def rebooting() -> None:
    """Count a reboot that was asked for."""
    upgrade = Upgrade.load()
    if upgrade is not None and upgrade.step is Step.REBOOT:
        dataclasses.replace(upgrade, reboots=upgrade.reboots + 1).save()


def _verify(upgrade: Upgrade) -> _Next:
    facts = _facts()
    version = upgrade.plan.version
    if facts.loaded == version:
        driver_install.start_services(fabric=upgrade.plan.fabric)
        facts = _facts()
    wrong = driver_state.diagnose(facts)
    if facts.loaded not in {None, version}:
        return _fail(upgrade, f"driver {facts.loaded} runs instead: see lsinitramfs and modinfo nvidia"), Turn.HOLD
    trouble = str(wrong) if wrong is not None and wrong.is_fatal else None
    if trouble is None:
        found = gpu_detect.detect(ROOTS)
        missing = len(facts.cards) - len(found.gpus)
        trouble = found.problem or (f"{missing} of {len(facts.cards)} GPUs do not answer" if missing > 0 else None)
    if trouble is None:
        return upgrade.to(Step.REGISTER), None
    if time.time() - upgrade.since < _SETTLE_S and facts.loaded == version:
        return _wait(upgrade, f"is loaded; {trouble}")
    return _fail(upgrade, trouble), Turn.HOLD


def _register(upgrade: Upgrade) -> _Next:
    return upgrade, Turn.REGISTER


_STEPS = {
    Step.ASK: _ask,
    Step.DRAIN: _drain,
    Step.INSTALL: _install,
    Step.LOAD: _load,
    Step.REBOOT: _reboot,
    Step.VERIFY: _verify,
    Step.REGISTER: _register,
}


def _check_free(upgrade: Upgrade) -> None:
    """Make sure, before every step that ends what runs on the GPUs, that nothing does."""
    node = nodes.show(upgrade.node) if upgrade.node else None
    busy = gpu_hold.in_the_way(node)
    if busy is not None:
        raise driver_install.InstallError(f"{busy} started on {upgrade.node} meanwhile: drain it")
    if node is not None and not (node.is_drained or node.is_down):
        gpu_hold.take(gpu_hold.DRIVER, node.name, f"driver {upgrade.plan.version}")


def _can_be_had(plan: driver_plan.Plan) -> bool:
    try:
        apt.removed_by(plan.exact)
    except apt.AptError:
        return False
    return True


def _wait(upgrade: Upgrade, text: str) -> _Next:
    after = dataclasses.replace(upgrade, waits=text)
    after.save()
    return after, Turn.HOLD


def _fail(upgrade: Upgrade, text: str) -> Upgrade:
    after = dataclasses.replace(upgrade, failed=text)
    after.save()
    if upgrade.node is not None and gpu_hold.Hold.load() is not None:
        with contextlib.suppress(nodes.NodeError, gpu_hold.HoldError):  # the status tells it anyway
            gpu_hold.take(gpu_hold.DRIVER, upgrade.node, f"failed: {text}")
    return after


def next_kernel_lacks_driver() -> bool:
    """Whether a reboot now would come up without the driver."""
    return driver_state.next_kernel_lacks_driver(_facts())


def present() -> str:
    """Return the version of the driver that this machine has, empty where it has none."""
    return _version(_facts())


def _version(facts: driver_state.Facts) -> str:
    return facts.loaded or facts.library or (facts.module.version if facts.module else "")


def _branch(facts: driver_state.Facts) -> str:
    return _version(facts).partition(".")[0]


def _facts() -> driver_state.Facts:
    return driver_state.look(ROOTS.proc, ROOTS.sys)


def boot_id() -> str:
    """Return what names this boot of the machine."""
    return (ROOTS.proc / "sys/kernel/random/boot_id").read_text().strip()


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """Why the option's driver could not be had, so that not every hook asks the archives again."""

    key: str
    text: str
    at: float

    @classmethod
    def load(cls) -> "_Refusal | None":
        try:
            raw = json.loads(_refusal().read_text())
            return cls(raw["key"], raw["text"], float(raw["at"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self) -> None:
        files.ensure_file(_refusal(), json.dumps(dataclasses.asdict(self)) + "\n", mode=0o600)


def _journal() -> pathlib.Path:
    return registration.STATE_DIR / "upgrade.json"


def _refusal() -> pathlib.Path:
    return registration.STATE_DIR / "driver-refused.json"

"""Install a driver: for the action `upgrade-driver`, and for the option `driver`.

An upgrade needs no journal: its node stays drained until the GPUs are registered again, and the
packages' state (`driver.state`) shows an interrupted one. Running `upgrade-driver` again finishes
it.
"""

import logging
import time

from driver import install, plan, state
from driver.plan import Plan, Spec
from driver.state import DriverError
from maintenance import reset, services
from node import journals, kept
from slurm_ddp import apt, files
from slurm_ddp.charm import ActionError, Log, Results
from slurm_ddp.commands import CommandError

logger = logging.getLogger(__name__)

# The last refusal by the archives: `key`, `text`, and the time `at` (seconds since 1970)
_REFUSED = "driver-refused.json"
_RETRY_S = 3600.0  # after a refusal, so that not every hook asks the archives again


def upgrade(wanted: Spec, node: str | None, wait_s: float, log: Log, *, drain: bool) -> Results:
    """Install this driver on a node without jobs. The node is still held afterwards.

    Raises:
        ActionError: jobs run on the node, or the new driver does not work.
        DriverError: no such driver can be installed here.
    """
    here = state.look()
    if not here.cards:
        raise DriverError(
            "this machine shows no NVIDIA GPU on its PCI bus, so there is no driver to install"
        )
    apt.repair()
    packages = plan.resolve(here, wanted)
    if (
        install.is_installed(packages)
        and here.loaded == packages.version
        and state.diagnose(state.look()) is None
    ):
        return {"result": "up-to-date", "driver": packages.version}
    reset.free(kept.DRIVER, node, f"driver {packages.version}", wait_s, log, drain=drain)
    log(f"installing driver {packages.version}")
    services.stop_holders()
    try:
        is_loaded = _install(packages)
    finally:
        services.ensure_running()
    if not is_loaded:
        kept.keep_until_reboot()
        detail = f"reboot this machine: driver {packages.version} is installed, and loads with the next boot"
        return {"result": "reboot", "driver": packages.version, "detail": detail}
    if (problem := state.explain(state.look())) is not None:
        raise ActionError(f"driver {packages.version} is installed, but {problem}")
    return {"result": "done", "driver": packages.version}


def ensure_wanted(wanted: Spec) -> None:
    """Install the option's driver on a machine without any, under which no job uses a card.

    A driver that is here is never changed by an option: `upgrade-driver` does that.
    """
    here = state.look()
    key = f"{wanted} {here.kernel} {here.next_kernel}"
    if wanted.keeps and not here.version:  # of a driver that is no longer wanted
        journals.clear(_REFUSED)
    if wanted.keeps or not here.cards or here.version or here.unfinished or _was_refused(key):
        return
    try:
        _install(plan.resolve(here, wanted))
        services.ensure_running()
        journals.clear(_REFUSED)
    except (DriverError, apt.AptError, CommandError) as e:
        _refuse(key, e)


def ensure_settings(wanted: Spec) -> None:
    """Keep a working driver: initialised, with nvidia-smi, and held from apt's upgrades."""
    here = state.look()
    if not here.cards or here.loaded is None or here.runfile:
        return
    key = f"utils {here.loaded}"
    try:
        if not _was_refused(key):
            install.ensure_utils(here)
            journals.clear(_REFUSED)
    except (DriverError, apt.AptError, CommandError) as e:
        _refuse(key, e)
    try:
        install.ensure_hold(on=wanted.hold_driver)
    except CommandError as e:  # another dpkg runs, as on a new machine: the next hook tries again
        logger.warning("the driver's packages are not held yet: %s", e)
    services.ensure_persistence(on=wanted.persistence_mode)


def note(wanted: Spec) -> str | None:
    """Return a note to the operator about a driver, even one that works; None without one."""
    here = state.look()
    if not here.cards:
        return None
    refused = str((journals.read(_REFUSED) or {}).get("text", ""))
    if not here.version and not wanted.keeps and refused:
        return refused
    if here.version and not wanted.keeps and here.branch != wanted.driver:
        return f"driver {here.version} is here, but the option is driver={wanted.driver}: run upgrade-driver"
    problem = state.diagnose(here)
    if problem is None and here.loaded and not install.NVIDIA_SMI.exists():
        why = f" ({refused})" if refused else ""
        return f"driver {here.loaded} is here without nvidia-smi, so its health is not checked{why}: run upgrade-driver"
    return state.PROBLEMS[problem].format(f=here) if problem == "next-kernel" else None


def release() -> None:
    """Remove this charm's settings of the driver; the driver stays."""
    if services.STOPPED.exists():
        services.ensure_running()
    try:
        install.ensure_hold(on=False)
    except CommandError as e:
        logger.warning("the driver's packages stay held, see apt-mark showhold: %s", e)
    services.ensure_persistence(on=False)
    files.ensure_absent(install.NOUVEAU)
    journals.clear(_REFUSED)


def _install(packages: Plan) -> bool:
    """Install and load the driver; return False if only a reboot can load it.

    Raises `DriverError`, `CommandError`.
    """
    install.install(packages)
    after = state.look()
    if after.next_module is None or after.next_module.version != packages.version:
        raise DriverError(
            f"kernel {after.next_kernel}, which boots next, has no module of it: see dkms status"
        )
    return install.load(packages.version, after)


def _was_refused(key: str) -> bool:
    last = journals.read(_REFUSED) or {}
    at = last.get("at")
    return last.get("key") == key and isinstance(at, float) and time.time() - at < _RETRY_S


def _refuse(key: str, error: Exception) -> None:
    logger.warning("%s", error)
    journals.write(_REFUSED, {"key": key, "text": str(error), "at": time.time()})

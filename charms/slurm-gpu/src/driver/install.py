"""The driver's packages, settings and services on this machine. Every step may be repeated."""

import contextlib
import logging
import pathlib
import re

from driver import plan as driver_plan
from driver import state as driver_state
from driver.state import DriverError
from slurm_ddp import apt, files, systemd
from slurm_ddp.run import CommandError, run

logger = logging.getLogger(__name__)

PERSISTENCED = "nvidia-persistenced.service"
_PERSIST_DROPIN = "10-slurm-gpu.conf"
NOUVEAU = pathlib.Path("/etc/modprobe.d/slurm-gpu-nouveau.conf")
HELD = pathlib.Path("/var/lib/slurm-gpu/held-packages")  # by us, and not by anybody before
STOPPED = pathlib.Path("/var/lib/slurm-gpu/stopped-units")  # by us, and to be started again
UNATTENDED = pathlib.Path("/etc/apt/apt.conf.d/51-slurm-gpu")
PERSISTENCED_PROGRAM = pathlib.Path("/usr/bin/nvidia-persistenced")
NVIDIA_SMI = pathlib.Path("/usr/bin/nvidia-smi")
NVIDIA_MODPROBE = pathlib.Path("/usr/bin/nvidia-modprobe")
PROC_MODULES = pathlib.Path("/proc/modules")
PASSWD = pathlib.Path("/etc/passwd")
UPDATE_INITRAMFS = pathlib.Path("/usr/sbin/update-initramfs")
_ACCOUNTS = ("nvidia-persistenced", "nvpd")  # Ubuntu's and Debian's
_STOP_S, _UNLOAD_S = 120.0, 60.0
# What apt must not move by itself, and what is merely called so.
_HOLD_PATTERNS = ("nvidia-*", "libnvidia-*", "linux-modules-nvidia-*", "libcuda1", "cuda-drivers*", "firmware-nvidia-*")
_NOT_HELD = ("nvidia-cuda-", "nvidia-container-", "libnvidia-container")

# What keeps the driver's devices open on a node without jobs, in the order in which it is stopped. Upstream's slurmd
# charm brings DCGM as a snap. The health check's timer is started again by `gpu_monitor`.
_DCGM = (
    "dcgm-exporter.service",
    "nvidia-dcgm.service",
    "snap.dcgm.dcgm-exporter.service",
    "snap.dcgm.nv-hostengine.service",
)
HOLDERS = ("gpu-health.timer", "gpu-health.service", *_DCGM, PERSISTENCED, driver_state.FABRIC)
# Modules in the order in which they can be unloaded (gpu.md 2.6; nvidia-peermem and gdrdrv use nvidia too).
_MODULES = ("gdrdrv", "nvidia_peermem", "nvidia_fs", "nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia")

_UNATTENDED = """\
// Written by the slurm-gpu charm: a driver that changes under a running node breaks it ("Driver/library version
// mismatch"). The action upgrade-driver moves it.
Unattended-Upgrade::Package-Blacklist {
    "nvidia-";
    "libnvidia-";
    "linux-modules-nvidia-";
    "libcuda1";
    "cuda-drivers";
    "firmware-nvidia-";
};
"""
_NOUVEAU = """\
# Written by the slurm-gpu charm.
blacklist nouveau
options nouveau modeset=0
"""


def is_installed(plan: driver_plan.Plan) -> bool:
    """Whether exactly these packages are here."""
    there = apt.installed(*plan.exact)
    return all(there.get(name) == number for name, number in plan.packages)


def repair() -> None:
    """Finish what an interrupted transaction left half done; apt answers nothing before that."""
    try:
        apt.repair()
    except apt.AptError as e:
        raise DriverError(f"dpkg --configure -a: {e}") from e


def install(plan: driver_plan.Plan) -> None:
    """Install the set in one transaction, after finishing what an interrupted one left."""
    repair()
    try:
        if not is_installed(plan):
            apt.install_exact(plan.exact)
    except apt.AptError as e:
        raise DriverError(f"driver {plan.version}: {e}") from e


def ensure_settings(*, persistence: bool, hold: bool) -> None:
    """Configure an installed driver: nouveau stays away, cards stay awake, apt leaves the packages alone."""
    try:
        if files.ensure_file(NOUVEAU, _NOUVEAU) and UPDATE_INITRAMFS.exists():
            run(UPDATE_INITRAMFS, "-u", "-k", "all", timeout=600, check=False)
        ensure_persistence(on=persistence)
        ensure_hold(on=hold)
    except CommandError as e:
        raise DriverError(str(e)) from e


def ensure_utils(facts: driver_state.Facts) -> None:
    """Install nvidia-smi of exactly the driver's version where packages brought a driver without it.

    As upstream's slurmd does with nvidia-headless-no-dkms. Nothing else is installed, moved or removed.

    Raises:
        DriverError: the archives do not have that version (any more), or apt would change something else.
    """
    name, number = _utils()
    if NVIDIA_SMI.exists() or not name or apt.upstream(number) != facts.loaded or apt.installed(name):
        return
    try:
        gone = apt.simulate(apt.assigned({name: number})).removed
        if gone:
            raise DriverError(f"{name} {number}: apt would remove {', '.join(gone)}")
        apt.install_exact({name: number})
    except apt.AptError as e:
        raise DriverError(f"{name} {number}: {e}") from e


def utils_advice() -> str:
    """Return what to type for nvidia-smi."""
    name, number = _utils()
    if not name:
        return "install nvidia-smi of exactly the driver's version from where the driver came"
    typed = f"apt-get install {name}={number}"
    return f"juju config slurm-gpu driver-utils=true installs it with the unit's next event, or on the machine: {typed}"


def _utils() -> tuple[str, str]:
    """Return the package with nvidia-smi that fits the installed user space, "" where no packages brought that."""
    for name, number in sorted(apt.installed("libnvidia-compute-*", "libnvidia-ml1").items()):
        match = re.fullmatch(r"libnvidia-compute-(\d+(?:-server)?)|libnvidia-ml1", name)
        if match is not None:
            return f"nvidia-utils-{match[1]}" if match[1] else "nvidia-smi", number
    return "", ""


def ensure_hold(*, on: bool) -> None:
    """Keep apt and unattended-upgrades from moving the driver, or let them. Fails while another dpkg runs."""
    names = [name for name in apt.installed(*_HOLD_PATTERNS) if not name.startswith(_NOT_HELD)]
    if on:
        files.ensure_file(UNATTENDED, _UNATTENDED)
        ours = set(_text(HELD).split()) | (set(names) - apt.held())
        files.ensure_file(HELD, "".join(f"{name}\n" for name in sorted(ours)))
        apt.ensure_held(names)
    elif UNATTENDED.exists():  # what an administrator or an image held before stays held
        apt.ensure_not_held(_text(HELD).split())
        files.ensure_absent(HELD)
        files.ensure_absent(UNATTENDED)  # last, or a failure would leave them held for good


def ensure_persistence(*, on: bool) -> bool:
    """Keep the driver's state on idle cards; return whether anything changed, for which its daemon must be restarted.

    Ubuntu's unit runs without persistence mode and stops when nothing needs it.
    """
    if not on or not PERSISTENCED_PROGRAM.exists():
        return systemd.ensure_no_dropin(PERSISTENCED, _PERSIST_DROPIN)
    account = next((name for name in _ACCOUNTS if re.search(rf"^{name}:", _text(PASSWD), re.MULTILINE)), None)
    user = f" --user {account}" if account else ""
    return systemd.ensure_dropin(
        PERSISTENCED,
        _PERSIST_DROPIN,
        "# Written by the slurm-gpu charm.\n[Unit]\nStopWhenUnneeded=false\n\n[Service]\nExecStart=\n"
        f"ExecStart={PERSISTENCED_PROGRAM}{user} --persistence-mode --verbose\n",
    )


def check_next_kernel(plan: driver_plan.Plan, running: str) -> None:
    """Raise unless the kernel that boots next has the driver: the machine must not be rebooted into another."""
    kernel = driver_state.newest_kernel(running)
    module = driver_state.on_disk(kernel)
    if module is None or module.version != plan.version:
        has = "no nvidia module; see dkms status" if module is None else f"driver {module.version}, not {plan.version}"
        raise DriverError(f"no reboot: kernel {kernel}, which boots next, has {has}")


def stop_holders() -> None:
    """Stop what keeps the driver's devices open. Jobs are not among it: check first."""
    active = [unit for unit in HOLDERS if systemd.is_active(unit)]
    if set(active) & set(_DCGM):  # written down first: they run again whatever happens
        names = set(_text(STOPPED).split()) | (set(active) & set(_DCGM))
        files.ensure_file(STOPPED, "".join(f"{name}\n" for name in sorted(names)))
    for unit in active:
        try:
            systemd.stop(unit, timeout=_STOP_S)
        except CommandError as e:
            raise DriverError(f"{unit} does not stop: {e}; see journalctl -u {unit}") from e


def start_services(*, fabric: bool) -> None:
    """Start what belongs to a loaded driver."""
    unit = PERSISTENCED
    try:
        if PERSISTENCED_PROGRAM.exists():
            systemd.restart(unit)
        unit = driver_state.FABRIC
        if fabric:
            systemd.enable_now(unit, timeout=300)
    except CommandError as e:
        raise DriverError(f"{unit}: {e}; see journalctl -u {unit}") from e
    _start_dcgm()


def ensure_services() -> None:
    """Start those that are installed and do not run; one that fails shows in the status."""
    for program, unit in ((PERSISTENCED_PROGRAM, PERSISTENCED), (driver_state.FABRIC_PROGRAM, driver_state.FABRIC)):
        if program.exists() and not systemd.is_active(unit):
            with contextlib.suppress(CommandError):
                systemd.restart(unit)
    _start_dcgm()


def _start_dcgm() -> None:
    """Start what `stop_holders` stopped of DCGM, the engine before what asks it."""
    names = _text(STOPPED).split()
    for unit in reversed(_DCGM):
        if unit in names:
            try:
                systemd.restart(unit)
            except CommandError as e:
                logger.warning("%s does not start again: %s", unit, e)
    files.ensure_absent(STOPPED)


def load(version: str, facts: driver_state.Facts) -> bool:
    """Load this version of the driver; return False where only a reboot can.

    Nothing may use the cards: call `stop_holders` first, on a node without jobs.
    """
    if facts.loaded == version and not facts.nouveau:
        return True
    try:
        if facts.nouveau:
            return False
        loaded = [line.partition(" ")[0] for line in _text(PROC_MODULES).splitlines()] if facts.loaded else []
        for name in _MODULES:
            if name in loaded:
                run("/usr/sbin/rmmod", name, timeout=_UNLOAD_S)
        module = driver_state.on_disk(facts.kernel)
        if module is None or module.version != version:
            return False
        run("/usr/sbin/modprobe", "nvidia", timeout=_UNLOAD_S)
        run("/usr/sbin/modprobe", "nvidia-uvm", timeout=_UNLOAD_S)
        if NVIDIA_MODPROBE.exists():
            run(NVIDIA_MODPROBE, "-u", "-c", "0", check=False)
    except CommandError:  # something has it open, or Secure Boot refuses it
        return False
    return True


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

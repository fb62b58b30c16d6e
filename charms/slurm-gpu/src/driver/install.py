"""The driver's packages, settings and services on this machine. Every step may be repeated."""

import contextlib
import logging
import pathlib
import re

from driver import state
from driver.plan import Plan
from driver.state import FABRIC, DriverError, Facts
from slurm_ddp import apt, files, systemd
from slurm_ddp.run import CommandError, run

logger = logging.getLogger(__name__)

PERSISTENCED = "nvidia-persistenced.service"
_DROPIN = "10-slurm-gpu.conf"
NOUVEAU = pathlib.Path("/etc/modprobe.d/slurm-gpu-nouveau.conf")
HELD = pathlib.Path("/var/lib/slurm-gpu/held-packages")  # by this charm, and not before it
STOPPED = pathlib.Path("/var/lib/slurm-gpu/stopped-units")  # by this charm, and to be started again
UNATTENDED = pathlib.Path("/etc/apt/apt.conf.d/51-slurm-gpu")
PERSISTENCED_PROGRAM = pathlib.Path("/usr/bin/nvidia-persistenced")
NVIDIA_SMI = pathlib.Path("/usr/bin/nvidia-smi")
NVIDIA_MODPROBE = pathlib.Path("/usr/bin/nvidia-modprobe")
PROC_MODULES = pathlib.Path("/proc/modules")
PASSWD = pathlib.Path("/etc/passwd")
UPDATE_INITRAMFS = pathlib.Path("/usr/sbin/update-initramfs")
_ACCOUNTS = ("nvidia-persistenced", "nvpd")  # Ubuntu's and Debian's
_STOP_S, _UNLOAD_S = 120.0, 60.0
# How the names of packages begin that apt must not move by itself, and of those that are merely called so.
_DRIVER = ("nvidia-", "libnvidia-", "linux-modules-nvidia-", "libcuda1", "cuda-drivers", "firmware-nvidia-")
_NOT_DRIVER = ("nvidia-cuda-", "nvidia-container-", "libnvidia-container")

# What keeps the driver's devices open on a node without jobs, in the order in which it is stopped. Upstream's slurmd
# charm installs DCGM as a snap. The health check's timer is started again by `node.health_check`.
_DCGM = (
    "dcgm-exporter.service",
    "nvidia-dcgm.service",
    "snap.dcgm.dcgm-exporter.service",
    "snap.dcgm.nv-hostengine.service",
)
HOLDERS = ("gpu-health.timer", "gpu-health.service", *_DCGM, PERSISTENCED, FABRIC)
# Modules in the order in which they can be unloaded; nvidia-peermem and gdrdrv use nvidia too.
_MODULES = ("gdrdrv", "nvidia_peermem", "nvidia_fs", "nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia")

_UNATTENDED = """\
// Written by the slurm-gpu charm: a driver that changes under a running node breaks it ("Driver/library version
// mismatch"). The action upgrade-driver moves it.
Unattended-Upgrade::Package-Blacklist {{
{names}}};
"""
_NOUVEAU = """\
# Written by the slurm-gpu charm.
blacklist nouveau
options nouveau modeset=0
"""
_PERSISTENCE = """\
# Written by the slurm-gpu charm.
[Unit]
StopWhenUnneeded=false

[Service]
ExecStart=
ExecStart={program}{user} --persistence-mode --verbose
"""


def is_installed(plan: Plan) -> bool:
    """Whether exactly these packages are here."""
    return apt.installed(*plan.packages) == plan.packages


def install(plan: Plan) -> None:
    """Install the set in one transaction, after finishing what an interrupted one left."""
    apt.repair()
    if not is_installed(plan):
        apt.install_exact(plan.packages)


def ensure_settings(*, persistence: bool, hold: bool) -> None:
    """Configure an installed driver: no nouveau, cards stay initialised, apt leaves the packages alone."""
    if files.ensure_file(NOUVEAU, _NOUVEAU) and UPDATE_INITRAMFS.exists():
        run(UPDATE_INITRAMFS, "-u", "-k", "all", timeout=600, check=False)
    ensure_persistence(on=persistence)
    ensure_hold(on=hold)


def ensure_utils(facts: Facts) -> None:
    """Install nvidia-smi of exactly the driver's version where packages brought a driver without it.

    As upstream's slurmd does with nvidia-headless-no-dkms. Nothing else is installed, moved or removed.

    Raises:
        AptError: the archives do not have that version (any more).
        DriverError: apt would remove something for it.
    """
    name, number = _utils()
    if NVIDIA_SMI.exists() or not name or apt.upstream(number) != facts.loaded or apt.installed(name):
        return
    if removed := apt.simulate(apt.assigned({name: number})).removed:
        raise DriverError(f"{name} {number}: apt would remove {', '.join(removed)}")
    apt.install_exact({name: number})


def utils_advice() -> str:
    """Give the command that installs nvidia-smi."""
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
    """Hold the driver's packages from apt and unattended-upgrades, or release them. Fails while another dpkg runs."""
    if on:
        names = [name for name in apt.installed(*(f"{one}*" for one in _DRIVER)) if not name.startswith(_NOT_DRIVER)]
        files.ensure_file(UNATTENDED, _UNATTENDED.format(names="".join(f'    "{name}";\n' for name in _DRIVER)))
        _write(HELD, set(files.read(HELD).split()) | (set(names) - apt.held()))
        apt.ensure_held(names)
    elif UNATTENDED.exists():  # what an administrator or an image held before stays held
        apt.ensure_not_held(files.read(HELD).split())
        files.ensure_absent(HELD)
        files.ensure_absent(UNATTENDED)  # last, or a failure would leave them held for good


def ensure_persistence(*, on: bool) -> bool:
    """Keep the driver's state on idle cards; return whether anything changed, for which its daemon must be restarted.

    Ubuntu's unit runs without persistence mode and stops when nothing needs it.
    """
    if not on or not PERSISTENCED_PROGRAM.exists():
        return systemd.ensure_no_dropin(PERSISTENCED, _DROPIN)
    account = next((name for name in _ACCOUNTS if re.search(rf"^{name}:", files.read(PASSWD), re.MULTILINE)), None)
    user = f" --user {account}" if account else ""
    return systemd.ensure_dropin(PERSISTENCED, _DROPIN, _PERSISTENCE.format(program=PERSISTENCED_PROGRAM, user=user))


def check_next_kernel(plan: Plan, running: str) -> None:
    """Raise unless the kernel that boots next has the driver: the machine must not be rebooted into another."""
    kernel = state.newest_kernel(running)
    module = state.on_disk(kernel)
    if module is None or module.version != plan.version:
        has = "no nvidia module; see dkms status" if module is None else f"driver {module.version}, not {plan.version}"
        raise DriverError(f"no reboot: kernel {kernel}, which boots next, has {has}")


def load(version: str, facts: Facts) -> bool:
    """Load this version of the driver; return False where only a reboot can.

    Nothing may use the cards: call `stop_holders` first, on a node without jobs.
    """
    if facts.nouveau or facts.loaded == version:
        return not facts.nouveau
    try:
        loaded = [line.partition(" ")[0] for line in files.read(PROC_MODULES).splitlines()] if facts.loaded else []
        for name in _MODULES:
            if name in loaded:
                run("/usr/sbin/rmmod", name, timeout=_UNLOAD_S)
        module = state.on_disk(facts.kernel)
        if module is None or module.version != version:
            return False
        run("/usr/sbin/modprobe", "nvidia", timeout=_UNLOAD_S)
        run("/usr/sbin/modprobe", "nvidia-uvm", timeout=_UNLOAD_S)
        if NVIDIA_MODPROBE.exists():
            run(NVIDIA_MODPROBE, "-u", "-c", "0", check=False)
    except CommandError:  # something has it open, or Secure Boot refuses it
        return False
    return True


def stop_holders() -> None:
    """Stop what keeps the driver's devices open. Jobs are not among it: check first."""
    active = [unit for unit in HOLDERS if systemd.is_active(unit)]
    if dcgm := set(active) & set(_DCGM):  # recorded first: they run again whatever happens
        _write(STOPPED, dcgm | set(files.read(STOPPED).split()))
    for unit in active:
        try:
            systemd.stop(unit, timeout=_STOP_S)
        except CommandError as e:
            raise DriverError(f"{unit} does not stop: {e}; see journalctl -u {unit}") from e


def start_services(*, fabric: bool) -> None:
    """Start what belongs to a driver that was loaded. Raises `DriverError`: one does not start."""
    unit = PERSISTENCED
    try:
        if PERSISTENCED_PROGRAM.exists():
            systemd.restart(unit)
        unit = FABRIC
        if fabric:
            systemd.enable_now(unit, timeout=300)
    except CommandError as e:
        raise DriverError(f"{unit}: {e}; see journalctl -u {unit}") from e
    _start_dcgm()


def ensure_services() -> None:
    """Start those that are installed and do not run; one that fails shows in the status."""
    for program, unit in ((PERSISTENCED_PROGRAM, PERSISTENCED), (state.FABRIC_PROGRAM, FABRIC)):
        if program.exists() and not systemd.is_active(unit):
            with contextlib.suppress(CommandError):
                systemd.restart(unit)
    _start_dcgm()


def _start_dcgm() -> None:
    """Start what `stop_holders` stopped of DCGM, the engine before what queries it."""
    names = files.read(STOPPED).split()
    for unit in reversed(_DCGM):
        if unit in names:
            try:
                systemd.restart(unit)
            except CommandError as e:
                logger.warning("%s does not start again: %s", unit, e)
    files.ensure_absent(STOPPED)


def _write(path: pathlib.Path, names: set[str]) -> None:
    files.ensure_file(path, "".join(f"{name}\n" for name in sorted(names)))

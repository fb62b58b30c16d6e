"""The driver's packages and module on this machine. Every step may be repeated."""

import pathlib

import template
from driver import state
from driver.plan import Plan
from driver.state import FABRIC, DriverError, Facts
from slurm_ddp import apt, files, systemd
from slurm_ddp.commands import CommandError, run

NOUVEAU = pathlib.Path("/etc/modprobe.d/slurm-gpu-nouveau.conf")
HELD = pathlib.Path("/var/lib/slurm-gpu/held-packages")  # by this charm, and not before it
NVIDIA_SMI = pathlib.Path("/usr/bin/nvidia-smi")
PROC_MODULES = pathlib.Path("/proc/modules")
UPDATE_INITRAMFS = pathlib.Path("/usr/sbin/update-initramfs")
_UNLOAD_S = 60.0
# Packages that are merely called so
_NOT_DRIVER = ("nvidia-cuda-", "nvidia-container-", "libnvidia-container")

# Modules in unload order; nvidia-peermem and gdrdrv use nvidia too.
_MODULES = (
    "gdrdrv",
    "nvidia_peermem",
    "nvidia_fs",
    "nvidia_uvm",
    "nvidia_drm",
    "nvidia_modeset",
    "nvidia",
)


def is_installed(plan: Plan) -> bool:
    """Whether exactly these packages are installed."""
    return apt.installed(*plan.packages) == plan.packages


def install(plan: Plan) -> None:
    """Install the set in one transaction; nouveau is off from the next boot on.

    Raises `CommandError`.
    """
    if not is_installed(plan):
        apt.install_exact(plan.packages)
    if files.ensure_file(NOUVEAU, template.fill("nouveau.conf")) and UPDATE_INITRAMFS.exists():
        run(UPDATE_INITRAMFS, "-u", "-k", "all", timeout=600, check=False)
    if plan.fabric:
        systemd.enable(FABRIC)


def ensure_utils(facts: Facts) -> None:
    """Install nvidia-smi of exactly the driver's version if the driver came without it.

    Upstream installs such drivers. Raises `AptError` if the archives lack that version,
    `DriverError` if apt would remove anything.
    """
    prefix = "libnvidia-compute-"
    libraries = apt.installed(f"{prefix}*-server")
    if NVIDIA_SMI.exists() or len(libraries) != 1:
        return
    ((library, number),) = libraries.items()
    name = f"nvidia-utils-{library.removeprefix(prefix)}"
    if apt.upstream(number) == facts.loaded and not apt.installed(name):
        if removed := apt.simulate(apt.assigned({name: number})).removed:
            raise DriverError(f"{name} {number}: apt would remove {', '.join(removed)}")
        apt.install_exact({name: number})


def ensure_hold(*, on: bool) -> None:
    """Hold the driver's packages from apt and unattended-upgrades, or release them.

    Fails while another dpkg runs. Packages that an administrator or an image held stay held.
    """
    ours = set(files.read(HELD).split())
    if on:
        names = apt.installed(*(f"{one}*" for one in state.PACKAGES))
        names = [name for name in names if not name.startswith(_NOT_DRIVER)]
        files.ensure_file(HELD, "\n".join(sorted(ours | (set(names) - apt.held()))) + "\n")
        apt.ensure_held(names)
    elif ours:
        apt.ensure_not_held(ours)
        files.ensure_absent(HELD)  # last, or a failure would leave them held for good


def load(version: str, facts: Facts) -> bool:
    """Load this version of the driver; return False if only a reboot can.

    Nothing may use the cards.
    """
    if facts.nouveau or facts.loaded == version:
        return not facts.nouveau
    try:
        if facts.loaded:
            _unload()
        if facts.module is None or facts.module.version != version:
            return False
        run("/usr/sbin/modprobe", "nvidia", timeout=_UNLOAD_S)
        run("/usr/sbin/modprobe", "nvidia-uvm", timeout=_UNLOAD_S)
    except CommandError:  # something has it open, or Secure Boot refuses it
        return False
    return True


def _unload() -> None:
    """Unload the driver's modules. Raises `CommandError` if something uses them."""
    loaded = [line.partition(" ")[0] for line in files.read(PROC_MODULES).splitlines()]
    for name in _MODULES:
        if name in loaded:
            run("/usr/sbin/rmmod", name, timeout=_UNLOAD_S)

"""Which driver this machine has, and what is wrong with it.

Everything is read from sysfs, procfs and files, and with short commands that have a deadline: a broken driver hangs
whoever opens its devices, so nothing here does.
"""

import collections.abc
import dataclasses
import pathlib
import re

from gpu import pci as gpu_pci
from slurm_ddp.run import CommandError, run

_TIMEOUT_S = 10.0
_KERNEL = re.compile(r"\d+\.\d+[A-Za-z0-9.+~-]*")
_LIBRARY = re.compile(r"libnvidia-ml\.so\.(\d+(?:\.\d+)+)")
_BLACKWELL = 0x2900  # the first PCI device id of the generation that has NVLink 5

# Names under which distributions install the module: Ubuntu and NVIDIA, Debian's nvidia-kernel-dkms, Debian's
# nvidia-open-kernel-dkms (its /etc/nvidia/current/nvidia-modprobe.conf maps the first to the others).
MODULES = ("nvidia", "nvidia-current", "nvidia-current-open")
# Who may sign a module that Secure Boot loads without a key enrolled at the console: the archives' own builds. What
# DKMS builds here is signed with a key of this machine, if at all (wiki.ubuntu.com/UEFI/SecureBoot, "MOK").
_TRUSTED_SIGNERS = ("Canonical Ltd.", "Debian Secure Boot")
_SECURE_BOOT = "firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"  # UEFI 2.10, 3.3
LIBRARY_DIRS = tuple(
    pathlib.Path("/usr", name) for name in ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64", "lib/wsl/lib")
)
FABRIC = "nvidia-fabricmanager.service"
FABRIC_PROGRAM = pathlib.Path("/usr/bin/nv-fabricmanager")
RUNFILE = pathlib.Path("/usr/bin/nvidia-uninstall")  # which only NVIDIA's runfile installer leaves
BOOT = pathlib.Path("/boot")
OS_RELEASE = pathlib.Path("/etc/os-release")


class DriverError(Exception):
    """A driver cannot be chosen, installed or upgraded. `str()` is one line: which option or step, why, the cure."""


@dataclasses.dataclass(frozen=True)
class Module:
    """The driver's kernel module in the tree of one kernel."""

    version: str
    signer: str = ""

    @property
    def is_trusted(self) -> bool:
        """Whether Secure Boot loads it with no key enrolled by hand."""
        return self.signer.startswith(_TRUSTED_SIGNERS)


@dataclasses.dataclass(frozen=True)
class Facts:
    """The machine as it is now."""

    release: str = ""  # "ubuntu 24.04"
    kernel: str = ""
    next_kernel: str = ""  # what the machine boots next: the newest in /boot
    cards: tuple[gpu_pci.Card, ...] = ()
    switches: int = 0  # NVSwitches that this machine sees
    nvlink5: bool = False  # NVLink 5 switches, managed through a network card
    secure_boot: bool = False
    nouveau: bool = False
    loaded: str | None = None  # the version of the module that runs
    is_open: bool | None = None  # whether that is the open one
    library: str | None = None  # the version of libnvidia-ml.so.1
    module: Module | None = None  # for the running kernel
    next_module: Module | None = None  # for the next one
    fabric: str | None = None  # the fabric manager's version
    fabric_state: str = ""  # as systemd reports it
    runfile: bool = False  # installed by NVIDIA's own installer, not by packages

    @property
    def needs_fabric(self) -> bool:
        """Whether CUDA works only once a fabric manager has set up the switches."""
        return self.switches > 0 or self.nvlink5

    @property
    def version(self) -> str:
        """The version of the driver that is here, loaded or not; empty where there is none."""
        return self.loaded or self.library or (self.module.version if self.module else "")

    @property
    def has_driver(self) -> bool:
        """Whether a driver is installed or running, working or not."""
        return bool(self.version)

    @property
    def next_kernel_lacks_driver(self) -> bool:
        """Whether a reboot now would come up without the driver that runs."""
        if self.loaded is None or self.next_kernel == self.kernel or self.next_module is not None:
            return False
        return self.module is not None  # else a container: the modules are the host's


class Trouble:
    """The names of what can be wrong."""

    OFF_BUS = "off-bus"
    MISMATCH = "mismatch"
    NO_FABRIC = "no-fabric"
    FABRIC_MISMATCH = "fabric-mismatch"
    FABRIC_DOWN = "fabric-down"
    NOUVEAU = "nouveau"
    NO_DRIVER = "no-driver"
    NO_MODULE = "no-module"
    SECURE_BOOT = "secure-boot"
    NOT_LOADED = "not-loaded"
    NEXT_KERNEL = "next-kernel"


_UNLOADED = {Trouble.NOUVEAU, Trouble.NO_DRIVER, Trouble.NO_MODULE, Trouble.SECURE_BOOT, Trouble.NOT_LOADED}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `str()` says what, and what to do."""

    trouble: str
    text: str

    @property
    def is_fatal(self) -> bool:
        """Whether jobs cannot use the GPUs now."""
        return self.trouble != Trouble.NEXT_KERNEL

    def __str__(self) -> str:
        return self.text


def look(proc: pathlib.Path = pathlib.Path("/proc"), sys: pathlib.Path = pathlib.Path("/sys")) -> Facts:
    """Return the machine's state. Takes well under a second where nothing hangs, and never much over a minute."""
    kernel = _read(proc / "sys/kernel/osrelease") or ""
    fields = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', _read(OS_RELEASE) or "", re.MULTILINE))
    release = f"{fields.get('ID', '')} {fields.get('VERSION_ID', '')}".strip()
    next_kernel = newest_kernel(kernel)
    cards = tuple(dataclasses.replace(c, lost=gpu_pci.is_lost(sys, c.bus_id)) for c in gpu_pci.cards(sys))
    loaded = _read(sys / "module/nvidia/version")
    if not cards and loaded is None:
        return Facts(release=release, kernel=kernel, next_kernel=next_kernel)
    text = _read(proc / "driver/nvidia/version") or ""
    switches = len(gpu_pci.switches(sys))
    module = on_disk(kernel)
    fabric = re.search(r"\d+\.\d+(?:\.\d+)*", _ask(FABRIC_PROGRAM, "--version")) if FABRIC_PROGRAM.exists() else None
    return Facts(
        release=release,
        kernel=kernel,
        next_kernel=next_kernel,
        cards=cards,
        switches=switches,
        nvlink5=not switches and any(card.device >= _BLACKWELL for card in cards) and _has_nvlink5(sys),
        secure_boot=_is_secure_boot(sys),
        nouveau=(sys / "module/nouveau").exists(),
        loaded=loaded,
        is_open="Open Kernel Module" in text if text else None,
        library=_library(),
        module=module,
        next_module=module if next_kernel == kernel else on_disk(next_kernel),
        fabric=fabric[0] if fabric else None,
        fabric_state=_ask("/usr/bin/systemctl", "is-active", FABRIC) if switches or FABRIC_PROGRAM.exists() else "",
        runfile=RUNFILE.exists(),
    )


def diagnose(facts: Facts) -> Finding | None:
    """Return the first thing that is wrong, worst first; None when the driver works as far as can be told."""
    return next(_findings(facts), None)


def explain(proc: pathlib.Path, sys: pathlib.Path, *, answers: bool = False) -> str | None:
    """Return why jobs cannot use this machine's GPUs and what to do; None where nothing is known to be wrong.

    With `answers` a driver answered, so it is loaded whatever this machine shows of it, as in a container.
    """
    finding = diagnose(look(proc, sys))
    if finding is None or not finding.is_fatal or (answers and finding.trouble in _UNLOADED):
        return None
    return str(finding)


def newest_kernel(running: str) -> str:
    """Return the release of the newest kernel in /boot, the running one where there is none."""
    names = [path.name.removeprefix("vmlinuz-") for path in BOOT.glob("vmlinuz-*")]
    return max((name for name in names if _KERNEL.fullmatch(name)), key=_kernel_key, default=running)


def _kernel_key(release: str) -> list[tuple[int, int | str]]:
    """Return a sort key under which 6.8.0-100 comes after 6.8.0-99."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.findall(r"\d+|[a-z]+", release)]


def on_disk(kernel: str) -> Module | None:
    """Return the driver's module in the tree of this kernel, None when it has none."""
    for name in MODULES if _KERNEL.fullmatch(kernel) else ():
        printed = _ask("/usr/sbin/modinfo", "-k", kernel, name)
        fields = dict(re.findall(r"^(version|signer):\s+(.*)$", printed, re.MULTILINE))
        if fields.get("version"):
            return Module(fields["version"], fields.get("signer", ""))
    return None


def _findings(facts: Facts) -> collections.abc.Iterator[Finding]:
    lost = [card.bus_id for card in facts.cards if card.lost]
    if lost:
        text = (
            f"GPU {', '.join(lost)} fell off the bus: reboot this machine, and replace the card if it falls off again"
        )
        yield Finding(Trouble.OFF_BUS, text)
    if facts.loaded is None:
        if any(card.bound_to in {None, "nvidia", "nouveau"} for card in facts.cards):  # vfio-pci: a virtual machine's
            yield _not_loaded(facts)
        return
    if facts.library not in {None, facts.loaded}:
        text = (
            f"driver {facts.loaded} runs with the library of {facts.library}: run upgrade-driver, or drain and reboot"
        )
        yield Finding(Trouble.MISMATCH, text)
    if facts.needs_fabric:
        cure = f"run upgrade-driver, or install nvidia-fabricmanager-{facts.loaded.partition('.')[0]} {facts.loaded}"
        if facts.fabric is None:
            text = f"NVSwitches without a fabric manager, so CUDA fails with error 802: {cure}"
            yield Finding(Trouble.NO_FABRIC, text)
        elif facts.fabric != facts.loaded:
            text = f"fabric manager {facts.fabric} does not fit driver {facts.loaded}: {cure}"
            yield Finding(Trouble.FABRIC_MISMATCH, text)
        elif facts.fabric_state not in {"active", "activating", "reloading"}:
            yield Finding(
                Trouble.FABRIC_DOWN,
                f"the fabric manager is {facts.fabric_state or 'not running'}: systemctl enable --now {FABRIC}, and "
                f"see journalctl -u {FABRIC} if it ends again",
            )
    if facts.next_kernel_lacks_driver:
        text = f"kernel {facts.next_kernel}, which boots next, has no nvidia module: run upgrade-driver before a reboot"
        yield Finding(Trouble.NEXT_KERNEL, text)


def _not_loaded(facts: Facts) -> Finding:
    if not facts.has_driver:
        trouble, what = Trouble.NOUVEAU, "nouveau has the GPUs and no NVIDIA driver is installed"
        if not facts.nouveau:
            count = len(facts.cards)
            trouble, what = Trouble.NO_DRIVER, f"{count} NVIDIA GPU{' has' if count == 1 else 's have'} no driver"
        return Finding(trouble, f"{what}: set driver=580 (or another branch), or install one and reboot this machine")
    if facts.nouveau:
        cure = "run upgrade-driver, or blacklist nouveau and reboot"
        return Finding(Trouble.NOUVEAU, f"nouveau has the GPUs instead of the installed driver: {cure}")
    if facts.module is None:
        text = f"kernel {facts.kernel} has no nvidia module: run upgrade-driver, or install the modules for this kernel"
        return Finding(Trouble.NO_MODULE, text)
    if facts.secure_boot and not facts.module.is_trusted:
        return Finding(
            Trouble.SECURE_BOOT,
            "Secure Boot refuses the nvidia module built on this machine: enrol its key at the console (mokutil "
            "--import), switch Secure Boot off, or use modules that the distribution signed",
        )
    text = f"driver {facts.module.version} is installed and not loaded: reboot this machine"
    return Finding(Trouble.NOT_LOADED, f"{text}, and see journalctl -k -g NVRM if it stays so")


def _has_nvlink5(sys: pathlib.Path) -> bool:
    """Return whether an mlx5 function manages NVLink switches (SW_MNG in its product data)."""
    paths = sorted((sys / "class/infiniband").glob("*/device/vpd"))
    return any(_ask("/usr/bin/grep", "-ac", "SW_MNG", path) not in {"", "0"} for path in paths)


def _is_secure_boot(sys: pathlib.Path) -> bool:
    try:
        return (sys / _SECURE_BOOT).read_bytes()[-1:] == b"\x01"  # after four bytes of attributes
    except OSError:
        return False


def _library() -> str | None:
    links = (directory / "libnvidia-ml.so.1" for directory in LIBRARY_DIRS)
    matches = (_LIBRARY.fullmatch(link.resolve().name) for link in links if link.exists())
    return next((match[1] for match in matches if match), None)


def _ask(*argv: str | pathlib.Path) -> str:
    """Return what a command prints, empty where it fails or hangs."""
    try:
        return run(*argv, timeout=_TIMEOUT_S, check=False).stdout.strip()
    except CommandError:
        return ""


def _read(path: pathlib.Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None

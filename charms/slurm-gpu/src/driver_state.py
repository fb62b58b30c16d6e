"""What this machine has of NVIDIA's driver, and what is wrong with it, in words that say what to do.

Everything is read without the driver's help: from sysfs, procfs and files, and with short commands that have a
deadline. A broken driver hangs whoever opens its devices, so nothing here does.
"""

import dataclasses
import pathlib
import re

import driver_packages
from slurm_ddp.run import CommandError, run

_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")
_SWITCH_CLASS = "0x0680"  # "bridge, other": NVSwitches up to the fourth generation of NVLink
_TIMEOUT_S = 10.0
_GONE = "ffffffff"  # what the configuration space of a device reads that left the bus
_KERNEL = re.compile(r"\d+\.\d+[A-Za-z0-9.+~-]*")
_LIBRARY = re.compile(r"libnvidia-ml\.so\.(\d+(?:\.\d+)+)")

# Names under which distributions install the module: Ubuntu and NVIDIA, Debian's nvidia-kernel-dkms, Debian's
# nvidia-open-kernel-dkms (its /etc/nvidia/current/nvidia-modprobe.conf maps the first to the others).
MODULES = ("nvidia", "nvidia-current", "nvidia-current-open")
# Who may sign a module that Secure Boot loads without a key enrolled at the console: the archives' own builds. What
# DKMS builds here is signed with a key of this machine, if at all (wiki.ubuntu.com/UEFI/SecureBoot, "MOK").
_TRUSTED_SIGNERS = ("Canonical Ltd.", "Debian Secure Boot")
_SECURE_BOOT = "firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"  # UEFI 2.10, 3.3
LIBRARY_DIRS = (
    pathlib.Path("/usr/lib/x86_64-linux-gnu"),
    pathlib.Path("/usr/lib/aarch64-linux-gnu"),
    pathlib.Path("/usr/lib64"),
    pathlib.Path("/usr/lib/wsl/lib"),
)
FABRIC = "nvidia-fabricmanager.service"
FABRIC_PROGRAM = pathlib.Path("/usr/bin/nv-fabricmanager")
RUNFILE = pathlib.Path("/usr/bin/nvidia-uninstall")  # which only NVIDIA's runfile installer leaves
BOOT = pathlib.Path("/boot")
OS_RELEASE = pathlib.Path("/etc/os-release")


@dataclasses.dataclass(frozen=True)
class Card:
    """One GPU on the PCI bus."""

    bus_id: str
    device: int  # PCI device id
    bound_to: str | None = None  # the kernel driver that has it
    lost: bool = False  # it is listed, and does not answer


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
    cards: tuple[Card, ...] = ()
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
    fabric_state: str = ""  # as systemd says
    runfile: bool = False  # installed by NVIDIA's own installer, not by packages

    @property
    def needs_fabric(self) -> bool:
        """Whether CUDA works only once a fabric manager has set up the switches."""
        return self.switches > 0 or self.nvlink5

    @property
    def has_driver(self) -> bool:
        """Whether a driver is installed or running, working or not."""
        return self.loaded is not None or self.module is not None or self.library is not None


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


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `str()` says what and what to do."""

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
    next_kernel = newest_kernel(kernel)
    cards, switches = _on_bus(sys)
    loaded = _read(sys / "module/nvidia/version")
    text = _read(proc / "driver/nvidia/version") or ""
    if not cards and loaded is None:
        return Facts(release=_release(), kernel=kernel, next_kernel=next_kernel)
    module = on_disk(kernel)
    return Facts(
        release=_release(),
        kernel=kernel,
        next_kernel=next_kernel,
        cards=cards,
        switches=switches,
        nvlink5=not switches and any(_is_blackwell(card) for card in cards) and _has_nvlink5(sys),
        secure_boot=_is_secure_boot(sys),
        nouveau=(sys / "module/nouveau").exists(),
        loaded=loaded,
        is_open="Open Kernel Module" in text if text else None,
        library=_library(),
        module=module,
        next_module=module if next_kernel == kernel else on_disk(next_kernel),
        fabric=_fabric_version(),
        fabric_state=_fabric_state() if switches or FABRIC_PROGRAM.exists() else "",
        runfile=RUNFILE.exists(),
    )


def diagnose(facts: Facts) -> Finding | None:
    """Return the first thing that is wrong, worst first; None when the driver works as far as can be told."""
    for row in _ROWS:
        finding = row(facts)
        if finding is not None:
            return finding
    return None


def explain(proc: pathlib.Path, sys: pathlib.Path, *, answers: bool = False) -> str | None:
    """Return why jobs cannot use this machine's GPUs and what to do, None where the driver's own word is to count.

    With `answers` a driver was heard, so it is loaded whatever this machine shows of it, as in a container.
    """
    finding = diagnose(look(proc, sys))
    if finding is not None and answers and finding.trouble in _SILENT:
        return None
    return str(finding) if finding is not None and finding.is_fatal else None


def next_kernel_lacks_driver(facts: Facts) -> bool:
    """Whether a reboot now would come up without the driver that runs."""
    return _next_kernel(facts) is not None


def newest_kernel(running: str) -> str:
    """Return the release of the newest kernel in /boot, the running one where there is none."""
    names = [path.name.removeprefix("vmlinuz-") for path in BOOT.glob("vmlinuz-*")]
    releases = [name for name in names if _KERNEL.fullmatch(name)]
    return max(releases, key=kernel_key, default=running)


def kernel_key(release: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key under which 6.8.0-100 comes after 6.8.0-99."""
    return tuple((1, int(part)) if part.isdigit() else (0, part) for part in re.findall(r"\d+|[a-z]+", release))


def on_disk(kernel: str) -> Module | None:
    """Return the driver's module in the tree of this kernel, None when it has none."""
    if not _KERNEL.fullmatch(kernel):
        return None
    for name in MODULES:
        try:
            told = run("/usr/sbin/modinfo", "-k", kernel, name, timeout=_TIMEOUT_S).stdout
        except CommandError:
            continue
        fields = dict(re.findall(r"^(version|signer):\s+(.*)$", told, re.MULTILINE))
        if fields.get("version"):
            return Module(fields["version"], fields.get("signer", ""))
    return None


def _off_bus(facts: Facts) -> Finding | None:
    lost = [card.bus_id for card in facts.cards if card.lost]
    if not lost:
        return None
    return Finding(
        Trouble.OFF_BUS,
        f"GPU {', '.join(lost)} fell off the bus: reboot this machine, and replace the card if it falls off again",
    )


def _mismatch(facts: Facts) -> Finding | None:
    if facts.loaded is None or facts.library is None or facts.library == facts.loaded:
        return None
    return Finding(
        Trouble.MISMATCH,
        f"driver {facts.loaded} runs with the library of {facts.library}: run upgrade-driver, or drain and reboot",
    )


def _fabric(facts: Facts) -> Finding | None:
    if facts.loaded is None or not facts.needs_fabric:
        return None
    branch = facts.loaded.partition(".")[0]
    if facts.fabric is None:
        return Finding(
            Trouble.NO_FABRIC,
            f"NVSwitches without a fabric manager, so CUDA fails with error 802: run upgrade-driver, or install "
            f"nvidia-fabricmanager-{branch} {facts.loaded}",
        )
    if facts.fabric != facts.loaded:
        return Finding(
            Trouble.FABRIC_MISMATCH,
            f"fabric manager {facts.fabric} does not fit driver {facts.loaded}: run upgrade-driver, or install "
            f"nvidia-fabricmanager-{branch} {facts.loaded}",
        )
    if facts.fabric_state in {"active", "activating", "reloading"}:
        return None
    return Finding(
        Trouble.FABRIC_DOWN,
        f"the fabric manager is {facts.fabric_state or 'not running'}: systemctl enable --now {FABRIC}, and see "
        f"journalctl -u {FABRIC} if it ends again",
    )


def _not_loaded(facts: Facts) -> Finding | None:
    if facts.loaded is not None or not facts.cards:
        return None
    if all(card.bound_to not in {None, "nvidia", "nouveau"} for card in facts.cards):
        return None  # vfio-pci: given to virtual machines, so none of ours
    if facts.module is None and not facts.has_driver:
        held = "nouveau has the GPUs and no NVIDIA driver is installed" if facts.nouveau else _count(facts.cards)
        trouble = Trouble.NOUVEAU if facts.nouveau else Trouble.NO_DRIVER
        return Finding(trouble, f"{held}: set driver=580 (or another branch), or install one and reboot this machine")
    if facts.nouveau:
        return Finding(
            Trouble.NOUVEAU,
            "nouveau has the GPUs instead of the installed driver: run upgrade-driver, or blacklist nouveau and reboot",
        )
    if facts.module is None:
        return Finding(
            Trouble.NO_MODULE,
            f"kernel {facts.kernel} has no nvidia module: run upgrade-driver, or install the modules for this kernel",
        )
    if facts.secure_boot and not facts.module.is_trusted:
        return Finding(
            Trouble.SECURE_BOOT,
            "Secure Boot refuses the nvidia module built on this machine: enrol its key at the console (mokutil "
            "--import), switch Secure Boot off, or use modules that the distribution signed",
        )
    return Finding(
        Trouble.NOT_LOADED,
        f"driver {facts.module.version} is installed and not loaded: reboot this machine, and see "
        "journalctl -k -g NVRM if it stays so",
    )


def _next_kernel(facts: Facts) -> Finding | None:
    if facts.loaded is None or facts.next_kernel == facts.kernel or facts.next_module is not None:
        return None
    if facts.module is None:  # a container: the modules are the host's
        return None
    return Finding(
        Trouble.NEXT_KERNEL,
        f"kernel {facts.next_kernel}, which boots next, has no nvidia module: run upgrade-driver before a reboot",
    )


_SILENT = frozenset(
    {Trouble.NOUVEAU, Trouble.NO_DRIVER, Trouble.NO_MODULE, Trouble.SECURE_BOOT, Trouble.NOT_LOADED}
)  # in which no driver can answer
_ROWS = (_off_bus, _mismatch, _fabric, _not_loaded, _next_kernel)


def _count(cards: tuple[Card, ...]) -> str:
    return "1 NVIDIA GPU has no driver" if len(cards) == 1 else f"{len(cards)} NVIDIA GPUs have no driver"


def _on_bus(sys: pathlib.Path) -> tuple[tuple[Card, ...], int]:
    cards: list[Card] = []
    switches = 0
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        if _read(device / "vendor") != _NVIDIA:
            continue
        kind = _read(device / "class") or ""
        if kind.startswith(_SWITCH_CLASS):
            switches += 1
        elif kind.startswith(_GPU_CLASSES):
            cards.append(Card(device.name, _hex(_read(device / "device")), _bound_to(device), _is_lost(device)))
    return tuple(cards), switches


def _bound_to(device: pathlib.Path) -> str | None:
    driver = device / "driver"
    return driver.resolve().name if driver.exists() else None


def _is_lost(device: pathlib.Path) -> bool:
    config = device / "config"
    if not config.exists():
        return False
    try:
        told = run("/usr/bin/od", "-An", "-tx1", "-N4", config, timeout=_TIMEOUT_S).stdout
    except CommandError:  # reading four bytes takes no time, unless the bus hangs
        return True
    return "".join(told.split()) == _GONE


def _is_blackwell(card: Card) -> bool:
    kind = driver_packages.architecture(card.device)
    return kind is None or kind.name.startswith("Blackwell")


def _has_nvlink5(sys: pathlib.Path) -> bool:
    """Whether an mlx5 function says that it manages NVLink switches (SW_MNG in its product data)."""
    for path in sorted((sys / "class/infiniband").glob("*/device/vpd")):
        try:
            if run("/usr/bin/grep", "-qa", "SW_MNG", path, timeout=_TIMEOUT_S, check=False).returncode == 0:
                return True
        except CommandError:
            continue
    return False


def _is_secure_boot(sys: pathlib.Path) -> bool:
    try:
        return (sys / _SECURE_BOOT).read_bytes()[-1:] == b"\x01"  # after four bytes of attributes
    except OSError:
        return False


def _library() -> str | None:
    for directory in LIBRARY_DIRS:
        link = directory / "libnvidia-ml.so.1"
        match = _LIBRARY.fullmatch(link.resolve().name) if link.exists() else None
        if match:
            return match[1]
    return None


def _fabric_version() -> str | None:
    if not FABRIC_PROGRAM.exists():
        return None
    try:
        told = run(FABRIC_PROGRAM, "--version", timeout=_TIMEOUT_S, check=False).stdout
    except CommandError:
        return None
    match = re.search(r"\d+\.\d+(?:\.\d+)*", told)
    return match[0] if match else None


def _fabric_state() -> str:
    try:
        return run("/usr/bin/systemctl", "is-active", FABRIC, timeout=_TIMEOUT_S, check=False).stdout.strip()
    except CommandError:
        return "unknown"


def _release() -> str:
    fields = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', _read(OS_RELEASE) or "", re.MULTILINE))
    return f"{fields.get('ID', '')} {fields.get('VERSION_ID', '')}".strip()


def _hex(text: str | None) -> int:
    try:
        return int(text or "", 16)
    except ValueError:
        return 0


def _read(path: pathlib.Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None

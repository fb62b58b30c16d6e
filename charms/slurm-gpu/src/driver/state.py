"""Which driver this machine has, and what is wrong with it.

Everything is read from sysfs, procfs and files, and with short commands that have a deadline: a broken driver hangs
whatever opens its devices, so nothing here does. Standard library only: the watching service imports it.
"""

import dataclasses
import pathlib
import re
import typing

from gpu import pci
from slurm_ddp import files
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


_INSTALL = "set driver=580 (or another branch), or install one and reboot this machine"
_FABRIC = "run upgrade-driver, or install nvidia-fabricmanager-{f.branch} {f.loaded}"
PROBLEMS = {  # what can be wrong, as the status reports it; formatted with the facts
    "off-bus": "GPU {f.lost} fell off the bus: reboot this machine, and replace the card if it falls off again",
    "nouveau-alone": f"nouveau has the GPUs and no NVIDIA driver is installed: {_INSTALL}",
    "no-driver": f"{{f.gpus}} no driver: {_INSTALL}",
    "nouveau": "nouveau has the GPUs instead of the installed driver: run upgrade-driver, or blacklist nouveau and "
    "reboot",
    "no-module": "kernel {f.kernel} has no nvidia module: run upgrade-driver, or install the modules for this kernel",
    "secure-boot": "Secure Boot refuses the nvidia module built on this machine: enrol its key at the console (mokutil "
    "--import), switch Secure Boot off, or use modules that the distribution signed",
    "not-loaded": "driver {f.module.version} is installed and not loaded: reboot this machine, and see journalctl -k "
    "-g NVRM if it stays so",
    "mismatch": "driver {f.loaded} runs with the library of {f.library}: run upgrade-driver, or drain and reboot",
    "no-fabric": f"NVSwitches without a fabric manager, so CUDA fails with error 802: {_FABRIC}",
    "fabric-mismatch": f"fabric manager {{f.fabric}} does not fit driver {{f.loaded}}: {_FABRIC}",
    "fabric-down": f"the fabric manager is {{f.fabric_state}}: systemctl enable --now {FABRIC}, and see journalctl -u "
    f"{FABRIC} if it ends again",
    "next-kernel": "kernel {f.next_kernel}, which boots next, has no nvidia module: run upgrade-driver before a reboot",
}


class DriverError(Exception):
    """A driver cannot be chosen, installed or upgraded. `str()` is one line: which option or step, why, what to do."""


class Module(typing.NamedTuple):
    """The driver's kernel module in the tree of one kernel."""

    version: str
    signer: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """The machine as it is now."""

    release: str = ""  # "ubuntu 24.04"
    kernel: str = ""
    next_kernel: str = ""  # what the machine boots next: the newest in /boot
    cards: tuple[pci.Card, ...] = ()
    switches: int = 0  # NVSwitches that this machine sees
    nvlink5: bool = False  # NVLink 5 switches, managed through a network card
    secure_boot: bool = False
    nouveau: bool = False
    loaded: str | None = None  # the version of the module that runs
    library: str | None = None  # the version of libnvidia-ml.so.1
    module: Module | None = None  # for the running kernel
    next_module: Module | None = None  # for the next one
    fabric: str | None = None  # the fabric manager's version
    fabric_state: str = "not running"  # as systemd reports it
    runfile: bool = False  # installed by NVIDIA's own installer, not by packages

    @property
    def lost(self) -> str:
        """The cards that are listed and do not respond."""
        return ", ".join(card.bus_id for card in self.cards if card.lost)

    @property
    def gpus(self) -> str:
        """How many cards have: "2 NVIDIA GPUs have"."""
        return f"{len(self.cards)} NVIDIA GPU{' has' if len(self.cards) == 1 else 's have'}"

    @property
    def needs_fabric(self) -> bool:
        """Whether CUDA works only once a fabric manager has set up the switches."""
        return self.switches > 0 or self.nvlink5

    @property
    def version(self) -> str:
        """The version of the driver that is here, loaded or not; empty where there is none."""
        return self.loaded or self.library or (self.module.version if self.module else "")

    @property
    def branch(self) -> str:
        """The branch of that driver."""
        return self.version.partition(".")[0]

    @property
    def next_kernel_lacks_driver(self) -> bool:
        """Whether a reboot now would come up without the driver that runs."""
        if self.loaded is None or self.next_kernel == self.kernel or self.next_module is not None:
            return False
        return self.module is not None  # else a container: the modules are the host's


class Problem(typing.NamedTuple):
    """One thing that is wrong."""

    name: str  # in PROBLEMS
    text: str  # what is wrong, and what to do

    @property
    def is_fatal(self) -> bool:
        """Whether jobs cannot use the GPUs now."""
        return self.name != "next-kernel"


def diagnose(facts: Facts) -> Problem | None:
    """Return the worst problem, None when the driver works as far as can be determined."""
    loaded = facts.loaded is not None
    # vfio-pci: the card is a virtual machine's
    unloaded = not loaded and any(card.bound_to in {None, "nvidia", "nouveau"} for card in facts.cards)
    signer = facts.module.signer if facts.module else ""
    needs_fabric = loaded and facts.needs_fabric
    worst_first = (
        ("off-bus", bool(facts.lost)),
        ("nouveau-alone", unloaded and facts.nouveau and not facts.version),
        ("no-driver", unloaded and not facts.version),
        ("nouveau", unloaded and facts.nouveau),
        ("no-module", unloaded and facts.module is None),
        ("secure-boot", unloaded and facts.secure_boot and not signer.startswith(_TRUSTED_SIGNERS)),
        ("not-loaded", unloaded),
        ("mismatch", loaded and facts.library not in {None, facts.loaded}),
        ("no-fabric", needs_fabric and facts.fabric is None),
        ("fabric-mismatch", needs_fabric and facts.fabric != facts.loaded),
        ("fabric-down", needs_fabric and facts.fabric_state not in {"active", "activating", "reloading"}),
        ("next-kernel", facts.next_kernel_lacks_driver),
    )
    name = next((name for name, is_so in worst_first if is_so), None)
    return Problem(name, PROBLEMS[name].format(f=facts)) if name else None


def explain(proc: pathlib.Path, sys: pathlib.Path, *, answers: bool = False) -> str | None:
    """Explain what keeps jobs from this machine's GPUs and what to do; None where nothing is known to be wrong.

    With `answers` a driver responded, so it is loaded whatever this machine shows of it, as in a container.
    """
    facts = look(proc, sys)
    problem = diagnose(facts)
    if problem is None or not problem.is_fatal or (answers and facts.loaded is None and problem.name != "off-bus"):
        return None
    return problem.text


def look(proc: pathlib.Path = pathlib.Path("/proc"), sys: pathlib.Path = pathlib.Path("/sys")) -> Facts:
    """Return the machine's state. Takes well under a second where nothing hangs, and never much over a minute."""
    kernel = files.read(proc / "sys/kernel/osrelease")
    fields = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', files.read(OS_RELEASE), re.MULTILINE))
    next_kernel = newest_kernel(kernel)
    cards = tuple(dataclasses.replace(card, lost=pci.is_lost(sys, card.bus_id)) for card in pci.cards(sys))
    loaded = files.read(sys / "module/nvidia/version") or None
    facts = Facts(f"{fields.get('ID', '')} {fields.get('VERSION_ID', '')}".strip(), kernel, next_kernel, cards)
    if not cards and loaded is None:
        return facts
    switches, has_fabric, module = len(pci.switches(sys)), FABRIC_PROGRAM.exists(), on_disk(kernel)
    fabric = re.search(r"\d+(\.\d+)+", _ask(FABRIC_PROGRAM, "--version")) if has_fabric else None
    fabric_state = _ask("/usr/bin/systemctl", "is-active", FABRIC) if switches or has_fabric else ""
    return dataclasses.replace(
        facts,
        switches=switches,
        nvlink5=not switches and any(card.device >= _BLACKWELL for card in cards) and _has_nvlink5(sys),
        secure_boot=_is_secure_boot(sys),
        nouveau=(sys / "module/nouveau").exists(),
        loaded=loaded,
        library=_library(),
        module=module,
        next_module=module if next_kernel == kernel else on_disk(next_kernel),
        fabric=fabric[0] if fabric else None,
        fabric_state=fabric_state or facts.fabric_state,
        runfile=RUNFILE.exists(),
    )


def newest_kernel(running: str) -> str:
    """Return the release of the newest kernel in /boot, the running one where there is none."""
    names = [path.name.removeprefix("vmlinuz-") for path in BOOT.glob("vmlinuz-*")]
    return max((name for name in names if _KERNEL.fullmatch(name)), key=version_key, default=running)


def version_key(version: str) -> list[tuple[int, int | str]]:
    """Make a sort key of a release or version, under which 6.8.0-100 comes after 6.8.0-99."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.findall(r"\d+|[a-z]+", version)]


def on_disk(kernel: str) -> Module | None:
    """Return the driver's module in the tree of this kernel, None when it has none."""
    for name in MODULES if _KERNEL.fullmatch(kernel) else ():
        printed = _ask("/usr/sbin/modinfo", "-k", kernel, name)
        fields = dict(re.findall(r"^(version|signer):\s+(.*)$", printed, re.MULTILINE))
        if fields.get("version"):
            return Module(fields["version"], fields.get("signer", ""))
    return None


def _has_nvlink5(sys: pathlib.Path) -> bool:
    """Report whether an mlx5 function manages NVLink switches (SW_MNG in its product data)."""
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
    """Read what a command prints, empty where it fails or hangs."""
    try:
        return run(*argv, timeout=_TIMEOUT_S, check=False).stdout.strip()
    except CommandError:
        return ""

"""The driver of this machine, and its problems.

Facts come from sysfs, procfs, files, and short commands with a deadline. A broken driver hangs
every program that opens its devices, so nothing here opens them. An interrupted operation shows in
the packages' state, so it needs no journal.
"""

import dataclasses
import pathlib
import re
import typing

import pci
from slurm_ddp import files
from slurm_ddp.commands import CommandError, run

_TIMEOUT_S = 10.0
_KERNEL = re.compile(r"\d+\.\d+[A-Za-z0-9.+~-]*")
_LIBRARY = re.compile(r"libnvidia-ml\.so\.(\d+(?:\.\d+)+)")
PACKAGES = ("nvidia-", "libnvidia-", "linux-modules-nvidia-", "libcuda1", "cuda-drivers")
_DPKG_ROW = "${db:Status-Status} ${Package}\\n"
_UNFINISHED = re.compile(r"^(?:half-installed|unpacked|half-configured) (\S+)$", re.MULTILINE)
# Who signs modules that Secure Boot loads without a key enrolled at the console: the archive's own
# builds. DKMS signs with a key of this machine, if at all (wiki.ubuntu.com/UEFI/SecureBoot, "MOK").
_TRUSTED_SIGNER = "Canonical Ltd."
_SECURE_BOOT = (
    "firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"  # UEFI 2.10, 3.3
)
LIBRARY_DIRS = tuple(
    pathlib.Path("/usr", name)
    for name in ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64", "lib/wsl/lib")
)
FABRIC = "nvidia-fabricmanager.service"
FABRIC_PROGRAM = pathlib.Path("/usr/bin/nv-fabricmanager")
RUNFILE = pathlib.Path("/usr/bin/nvidia-uninstall")  # which only NVIDIA's own installer leaves
BOOT = pathlib.Path("/boot")
OS_RELEASE = pathlib.Path("/etc/os-release")

PROBLEMS = {  # what can be wrong, as the status reports it; formatted with the facts
    "unfinished": "the installation of {f.unfinished} was interrupted: run upgrade-driver, or dpkg --configure -a",
    "no-driver": "{f.gpus} no driver: set driver=580 (or another branch), or install one and reboot this machine",
    "nouveau": "nouveau has the GPUs instead of the installed driver: reboot this machine, and blacklist nouveau if it "
    "still has them",
    "no-module": "kernel {f.kernel} has no nvidia module: run upgrade-driver, or install the modules for this kernel",
    "secure-boot": "Secure Boot refuses the nvidia module built on this machine: enrol its key at the console (mokutil "
    "--import), switch Secure Boot off, or use modules that the distribution signed",
    "not-loaded": "driver {f.module.version} is installed and not loaded: reboot this machine, and see journalctl -k "
    "-g NVRM if it stays so",
    "mismatch": "driver {f.loaded} runs with the library of {f.library}: run upgrade-driver, or drain and reboot",
    "no-fabric": "the NVSwitches need fabric manager {f.loaded} and have {f.fabric}, so CUDA fails with error 802: run "
    "upgrade-driver, or install nvidia-fabricmanager-{f.branch} {f.loaded}",
    "fabric-down": f"the fabric manager is {{f.fabric_state}}: systemctl enable --now {FABRIC}, and see journalctl -u "
    f"{FABRIC} if it ends again",
    "next-kernel": "kernel {f.next_kernel}, which boots next, has no nvidia module: run upgrade-driver before a reboot",
}


class DriverError(Exception):
    """A driver cannot be chosen or installed.

    `str()` is one line: which option or step, why, what to do.
    """


class Module(typing.NamedTuple):
    """The driver's kernel module in the tree of one kernel."""

    version: str
    signer: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """The machine as it is now."""

    release: str = ""  # "ubuntu 24.04"
    kernel: str = ""
    next_kernel: str = ""  # the newest in /boot, which boots next
    cards: tuple[pci.Card, ...] = ()
    switches: int = 0  # NVSwitches that this machine sees
    secure_boot: bool = False
    nouveau: bool = False
    loaded: str | None = None  # the version of the module that runs
    library: str | None = None  # the version of libnvidia-ml.so.1
    module: Module | None = None  # for the running kernel
    next_module: Module | None = None  # for the next one
    fabric: str | None = None  # the fabric manager's version
    fabric_state: str = "not running"  # as systemd reports it
    runfile: bool = False  # installed by NVIDIA's own installer, not by packages
    unfinished: str = ""  # packages that dpkg left half installed

    @property
    def gpus(self) -> str:
        """Say how many cards have: "2 NVIDIA GPUs have"."""
        return f"{len(self.cards)} NVIDIA GPU{' has' if len(self.cards) == 1 else 's have'}"

    @property
    def version(self) -> str:
        """The version of the installed or loaded driver; empty without one."""
        return self.loaded or self.library or (self.module.version if self.module else "")

    @property
    def branch(self) -> str:
        """The branch of that driver."""
        return self.version.partition(".")[0]


def diagnose(facts: Facts) -> str | None:
    """Return the worst of PROBLEMS; None if the driver works as far as we can tell."""
    if facts.unfinished:
        return "unfinished"
    if facts.loaded is not None:
        return _diagnose_loaded(facts)
    # vfio-pci: the card is a virtual machine's
    needs_driver = any(card.bound_to in {None, "nvidia", "nouveau"} for card in facts.cards)
    return _diagnose_unloaded(facts) if needs_driver else None


def _diagnose_unloaded(facts: Facts) -> str:
    if not facts.version:
        return "no-driver"
    if facts.nouveau:
        return "nouveau"
    if facts.module is None:
        return "no-module"
    if facts.secure_boot and not facts.module.signer.startswith(_TRUSTED_SIGNER):
        return "secure-boot"
    return "not-loaded"


def _diagnose_loaded(facts: Facts) -> str | None:
    if facts.library not in {None, facts.loaded}:
        return "mismatch"
    if facts.switches > 0:
        if facts.fabric != facts.loaded:
            return "no-fabric"
        if facts.fabric_state not in {"active", "activating", "reloading"}:
            return "fabric-down"
    has_module = facts.module is not None  # else a container: the modules are the host's
    if has_module and facts.next_kernel != facts.kernel and facts.next_module is None:
        return "next-kernel"
    return None


def explain(facts: Facts, *, answers: bool = False) -> str | None:
    """Explain what keeps jobs from this machine's GPUs and how to fix it; None if nothing does.

    `answers` means that a driver responded: it is loaded even if this machine does not show it, as
    in a container.
    """
    problem = diagnose(facts)
    if problem is None or problem == "next-kernel" or (answers and facts.loaded is None):
        return None
    return PROBLEMS[problem].format(f=facts)


def look() -> Facts:
    """Return the machine's state.

    Takes well under a second unless something hangs, and hardly ever more than a minute.
    """
    kernel = files.read(pci.PROC / "sys/kernel/osrelease")
    fields = dict(
        re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', files.read(OS_RELEASE), re.MULTILINE)
    )
    next_kernel = newest_kernel(kernel)
    cards = pci.cards()
    loaded = files.read(pci.SYS / "module/nvidia/version") or None
    facts = Facts(
        f"{fields.get('ID', '')} {fields.get('VERSION_ID', '')}".strip(), kernel, next_kernel, cards
    )
    if not cards and loaded is None:
        return facts
    switches, has_fabric, module = len(pci.switches()), FABRIC_PROGRAM.exists(), _on_disk(kernel)
    fabric = re.search(r"\d+(\.\d+)+", _ask(FABRIC_PROGRAM, "--version")) if has_fabric else None
    fabric_state = _ask("/usr/bin/systemctl", "is-active", FABRIC) if switches or has_fabric else ""
    packages = _ask(
        "/usr/bin/dpkg-query", "-W", "-f", _DPKG_ROW, *(f"{name}*" for name in PACKAGES)
    )
    return dataclasses.replace(
        facts,
        switches=switches,
        secure_boot=_is_secure_boot(),
        nouveau=(pci.SYS / "module/nouveau").exists(),
        loaded=loaded,
        library=_library(),
        module=module,
        next_module=module if next_kernel == kernel else _on_disk(next_kernel),
        fabric=fabric[0] if fabric else None,
        fabric_state=fabric_state or facts.fabric_state,
        runfile=RUNFILE.exists(),
        unfinished=", ".join(_UNFINISHED.findall(packages)),
    )


def version_key(version: str) -> list[tuple[int, int | str]]:
    """Make a sort key of a release or version, under which 6.8.0-100 comes after 6.8.0-99."""
    key: list[tuple[int, int | str]] = []
    for part in re.findall(r"\d+|[a-z]+", version):
        key.append((1, int(part)) if part.isdigit() else (0, part))
    return key


def newest_kernel(running: str) -> str:
    """Return the release of the newest kernel in /boot, the running one if that is empty."""
    names = [path.name.removeprefix("vmlinuz-") for path in BOOT.glob("vmlinuz-*")]
    return max(
        (name for name in names if _KERNEL.fullmatch(name)), key=version_key, default=running
    )


def _on_disk(kernel: str) -> Module | None:
    """Return the driver's module in the tree of this kernel, None when it has none."""
    printed = _ask("/usr/sbin/modinfo", "-k", kernel, "nvidia") if _KERNEL.fullmatch(kernel) else ""
    fields = dict(re.findall(r"^(version|signer):\s+(.*)$", printed, re.MULTILINE))
    return Module(fields["version"], fields.get("signer", "")) if fields.get("version") else None


def _is_secure_boot() -> bool:
    try:
        # After four bytes of attributes
        return (pci.SYS / _SECURE_BOOT).read_bytes()[-1:] == b"\x01"
    except OSError:
        return False


def _library() -> str | None:
    links = (directory / "libnvidia-ml.so.1" for directory in LIBRARY_DIRS)
    matches = (_LIBRARY.fullmatch(link.resolve().name) for link in links if link.exists())
    return next((match[1] for match in matches if match), None)


def _ask(*argv: str | pathlib.Path) -> str:
    """Run a command; return its output, or "" if it fails or hangs."""
    try:
        return run(*argv, timeout=_TIMEOUT_S, check=False).stdout.strip()
    except CommandError:
        return ""

"""Which driver this machine should have: from options, devices and archives to one exact set of packages.

Names and branches are tables; apt resolves the rest. A driver that is not available is refused with the option's name
and what to type instead.

Sources. Ubuntu: the archive of 22.04 and 24.04, components restricted and multiverse, as of November 2026. Debian:
bookworm and bookworm-security, components contrib, non-free and non-free-firmware, as of November 2026.
"""

import collections.abc
import dataclasses
import re

from driver import state as driver_state
from driver.state import DriverError
from slurm_ddp import apt
from slurm_ddp.run import CommandError

KEEP = "keep"
BRANCHES = ("535", "550", "570", "575", "580", "590", "595")  # that one of the distributions ever had
_VERSION = re.compile(r"\d{3}(\.\d{1,4}){1,3}", re.ASCII)

# Generation, first and last PCI device id, kernel modules that drive it, first and last branch. Ids: pci-ids.ucw.cz,
# vendor 10de. Modules: docs.nvidia.com/datacenter/tesla/driver-installation-guide, "NVIDIA Kernel Modules". Branches:
# NVIDIA's "Supported NVIDIA GPU Products" of each release (580 is the last for Maxwell, Pascal and Volta).
_EITHER, _OPEN, _PROPRIETARY = ("open", "proprietary"), ("open",), ("proprietary",)
GENERATIONS = (
    ("Maxwell", 0x1340, 0x15EF, _PROPRIETARY, 340, 580),
    ("Pascal", 0x15F0, 0x15FF, _PROPRIETARY, 367, 580),
    ("Maxwell", 0x1600, 0x17FF, _PROPRIETARY, 340, 580),
    ("Pascal", 0x1B00, 0x1D7F, _PROPRIETARY, 367, 580),
    ("Volta", 0x1D80, 0x1DFF, _PROPRIETARY, 384, 580),
    ("Turing", 0x1E00, 0x1FFF, _EITHER, 410, 999),
    ("Ampere", 0x2080, 0x20FF, _EITHER, 450, 999),
    ("Turing", 0x2180, 0x21FF, _EITHER, 410, 999),
    ("Ampere", 0x2200, 0x22FF, _EITHER, 450, 999),
    ("Hopper", 0x2300, 0x2341, _EITHER, 520, 999),
    ("Grace Hopper", 0x2342, 0x2342, _OPEN, 535, 999),
    ("Hopper", 0x2343, 0x2347, _EITHER, 520, 999),
    ("Grace Hopper", 0x2348, 0x2348, _OPEN, 550, 999),
    ("Hopper", 0x2349, 0x23FF, _EITHER, 520, 999),
    ("Ampere", 0x2400, 0x25FF, _EITHER, 450, 999),
    ("Ada", 0x2600, 0x28FF, _EITHER, 525, 999),
    ("Blackwell", 0x2900, 0x2FFF, _OPEN, 570, 999),
    ("Blackwell Ultra", 0x3180, 0x31FF, _OPEN, 580, 999),
)


@dataclasses.dataclass(frozen=True)
class Release:
    """How one release of a distribution packages the driver. `{b}`: branch, `{o}`: -open or nothing, `{k}`: kernel."""

    branches: tuple[str, ...]
    driver: tuple[str, ...]  # of exactly the driver's version; the first one's version is the driver's
    utils: str  # nvidia-smi
    optional: tuple[str, ...]  # of any version
    hint: str  # what to do when a package is not in the archives
    signed: str = ""  # modules for one kernel
    built: tuple[str, ...] = ()  # modules to be built here, where `driver` does not bring them
    fabric: tuple[str, ...] = ()


_UBUNTU = Release(
    BRANCHES,
    ("nvidia-headless-no-dkms-{b}-server{o}", "nvidia-kernel-common-{b}-server", "libnvidia-compute-{b}-server"),
    "nvidia-utils-{b}-server",
    ("nvidia-modprobe",),
    "check that restricted and multiverse are enabled (add-apt-repository restricted multiverse)",
    signed="linux-modules-nvidia-{b}-server{o}-{k}",
    built=("nvidia-dkms-{b}-server{o}",),
    fabric=("nvidia-fabricmanager-{b}", "libnvidia-nscq-{b}"),
)
RELEASES = {
    "ubuntu 22.04": _UBUNTU,
    "ubuntu 24.04": _UBUNTU,
    "debian 12": Release(
        ("535",),
        ("nvidia{o}-kernel-dkms", "nvidia{o}-kernel-support", "libcuda1", "libnvidia-ml1", "firmware-nvidia-gsp"),
        "nvidia-smi",
        ("nvidia-modprobe", "nvidia-persistenced"),
        "check that contrib, non-free and non-free-firmware are in the apt sources, or use NVIDIA's own repository and "
        "driver=keep",
    ),
}
_NVLINK5, _CUDA = "nvlsm", "nvidia-cuda-toolkit"
_PINNED = "*nvidia* libcuda1"  # what apt takes in the driver's version, dependencies too, wherever it has that version
# Packages that a change of driver may take away: the other branch's. Anything else that apt wants to remove stops it.
_MAY_GO = ("nvidia-", "libnvidia-", "linux-modules-nvidia-", "linux-objects-nvidia-", "linux-signatures-nvidia-",
           "xserver-xorg-video-nvidia", "cuda-drivers", "libcuda1", "libcudadebugger1", "firmware-nvidia-")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Spec:
    """The options, checked one by one and together."""

    branch: str = KEEP  # "580", or "keep"
    module: str = "auto"
    utils: bool = True
    cuda: bool = False
    fabric: str = "auto"
    persistence: bool = True
    hold: bool = True
    version: str | None = None  # exactly this one: "580.173.02"

    @property
    def keeps(self) -> bool:
        """Whether the driver is left to whoever installed it."""
        return self.branch == KEEP

    def wants_fabric(self, facts: driver_state.Facts) -> bool:
        """Return whether this machine gets a fabric manager."""
        return self.fabric == "on" or (self.fabric == "auto" and facts.needs_fabric)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One exact set of packages."""

    version: str  # the driver's: "580.173.02"
    module: str  # "open" or "proprietary"
    packages: tuple[tuple[str, str], ...]  # names and versions, sorted
    kernels: tuple[str, ...]  # those that get modules
    dkms: bool  # the modules are built here
    fabric: bool  # a fabric manager belongs to it

    @property
    def exact(self) -> dict[str, str]:
        """The packages by name."""
        return dict(self.packages)


def spec(options: collections.abc.Mapping[str, object]) -> Spec:
    """Return the charm's options as one specification.

    Raises:
        DriverError: one has no such value, or two contradict each other.
    """
    branch = str(options.get("driver", KEEP)).strip()
    if branch != KEEP and branch not in BRANCHES:
        raise DriverError(f"driver: {branch!r:.60} is neither keep nor a branch: {', '.join(BRANCHES)}")
    flavour = str(options.get("driver-flavour", "server")).strip()
    if flavour != "server":
        raise DriverError(f"driver-flavour: {flavour!r:.60} is not server, the only flavour: set driver-flavour=server")
    got = Spec(
        branch=branch,
        module=_choice(options, "kernel-module", ("auto", "open", "proprietary")),
        utils=bool(options.get("driver-utils", True)),
        cuda=bool(options.get("cuda-toolkit", False)),
        fabric=_choice(options, "fabric-manager", ("auto", "on", "off")),
        persistence=bool(options.get("persistence-mode", True)),
        hold=bool(options.get("hold-driver", True)),
    )
    for option, wants in (
        ("cuda-toolkit=true", got.cuda),
        (f"kernel-module={got.module}", got.module != "auto"),
        ("fabric-manager=on", got.fabric == "on"),
    ):
        if got.keeps and wants:
            raise DriverError(f"{option} contradicts driver=keep, which installs nothing: set a branch")
    return got


def narrowed(wanted: Spec, branch: str | None, version: str | None, present: str = "") -> Spec:
    """Return the specification with the parameters of `upgrade-driver` on top.

    Args:
        wanted: the options.
        branch: the parameter, which must not contradict the option.
        version: the parameter, which must be of that branch.
        present: the version of the driver that is there, whose branch counts where nothing else names one.

    Raises:
        DriverError: they are no branch and no version, contradict each other, or name none while the option says keep.
    """
    if branch is not None and branch not in BRANCHES:
        raise DriverError(f"branch: {branch!r:.60} is none of {', '.join(BRANCHES)}")
    if version is not None and not _VERSION.fullmatch(version):
        raise DriverError(f"version: {version!r:.60} is not a driver version such as 580.173.02")
    if branch and not wanted.keeps and branch != wanted.branch:
        raise DriverError(f"branch={branch} contradicts the option driver={wanted.branch}: set driver={branch} first")
    chosen = branch or (None if wanted.keeps else wanted.branch) or (version or present).partition(".")[0]
    if not chosen:
        raise DriverError("branch: driver=keep says none; give branch=580 (or another), or set the option driver")
    if chosen not in BRANCHES:
        source = f"version: {chosen}" if version else f"branch: that of the driver here, {chosen},"
        raise DriverError(f"{source} is none of {', '.join(BRANCHES)}")
    if version and version.partition(".")[0] != chosen:
        raise DriverError(f"version={version} is not of branch {chosen}")
    return dataclasses.replace(wanted, branch=chosen, version=version or None)


def kernel_modules(facts: driver_state.Facts, wanted: Spec) -> tuple[str, ...]:
    """Return which of NVIDIA's kernel modules drive all cards in this branch, the better one first.

    Raises:
        DriverError: none does, or not the one of the option.
    """
    asked = _EITHER if wanted.module == "auto" else (wanted.module,)
    needs: dict[str, str] = {}
    for card in facts.cards:
        row = next((row for row in GENERATIONS if row[1] <= card.device <= row[2]), None)
        if row is None:  # a newer card than the table
            asked = asked[:1]
            continue
        name, _, _, modules, since, until = row
        gpu = f"GPU {card.bus_id} ({name})"
        if int(wanted.branch) < since:
            raise DriverError(f"driver: {gpu} needs branch {since} or later, not {wanted.branch}")
        if int(wanted.branch) > until:
            raise DriverError(f"driver: {gpu} works up to branch {until}, not {wanted.branch}")
        if wanted.module not in {"auto", *modules}:
            raise DriverError(f"kernel-module={wanted.module}: {gpu} needs the {modules[0]} module")
        if len(modules) == 1:
            needs[modules[0]] = card.bus_id
    if len(needs) > 1:
        raise DriverError(
            f"kernel-module: GPU {needs['open']} needs the open module and {needs['proprietary']} the proprietary one: "
            "they cannot work in one machine"
        )
    return tuple(needs) or (asked if facts.cards else asked[:1])


def resolve(facts: driver_state.Facts, wanted: Spec) -> Plan:
    """Return the set of packages that apt would install now, after reading the archives anew.

    Where the cards take either kernel module, the newer version decides, and between equals the open one.

    Raises:
        DriverError: the distribution or a device does not fit the options, the archives do not have the driver as a
            whole, or apt would remove something else for it.
    """
    release = RELEASES.get(facts.release)
    if release is None:
        here = facts.release or "an unknown system"
        raise DriverError(
            f"driver={wanted.branch}: this machine has {here}, not one of {', '.join(RELEASES)}: use driver=keep"
        )
    if wanted.branch not in release.branches:
        has = ", ".join(release.branches)
        raise DriverError(f"driver: {facts.release} has no branch {wanted.branch}, only {has}")
    if facts.runfile:
        raise DriverError("driver: NVIDIA's own installer put one here: run nvidia-uninstall first, or use driver=keep")
    if wanted.wants_fabric(facts) and not release.fabric:
        raise DriverError(f"fabric-manager: {facts.release} packages none: use NVIDIA's repository and driver=keep")
    try:
        choices = [_Choice(facts, wanted, release, module) for module in kernel_modules(facts, wanted)]
        apt.update()
        newest = apt.candidates(choice.name(release.driver[0]) for choice in choices)
        choices.sort(key=lambda choice: version_key(newest.get(choice.name(release.driver[0]), "")), reverse=True)
        refused: list[DriverError] = []
        for choice in choices:
            try:
                return choice.resolve(newest)
            except DriverError as e:
                refused.append(e)
        raise refused[0]
    except CommandError as e:
        raise DriverError(f"apt: {e}") from e


@dataclasses.dataclass(frozen=True)
class _Choice:
    """One kernel module, and the packages that go with it."""

    facts: driver_state.Facts
    wanted: Spec
    release: Release
    module: str

    def name(self, pattern: str, kernel: str = "") -> str:
        return pattern.format(b=self.wanted.branch, o="-open" if self.module == "open" else "", k=kernel)

    def resolve(self, newest: collections.abc.Mapping[str, str]) -> Plan:
        facts, wanted, release = self.facts, self.wanted, self.release
        option = f"driver={wanted.branch}"
        fabric = wanted.wants_fabric(facts)
        patterns = [*release.driver, *([release.utils] if wanted.utils else ()), *(release.fabric if fabric else ())]
        core = [self.name(pattern) for pattern in patterns]
        version = wanted.version or apt.upstream(newest.get(core[0], ""))
        extra = [*([_NVLINK5] if facts.nvlink5 else ()), *([_CUDA] if wanted.cuda else ())]
        pins = {_PINNED: f"{version}-*"} if version else {}
        offered = apt.candidates([*core, *extra, *release.optional, *self._kernel_packages()], pins)
        missing = [name for name in core if name not in offered]
        if missing:
            raise DriverError(f"{option}: {', '.join(missing)} not in this machine's archives: {release.hint}")
        if not version.startswith(f"{wanted.branch}."):
            leads = version.partition(".")[0]
            raise DriverError(f"{option}: {core[0]} only leads on to branch {leads} now: set driver={leads}")
        if _NVLINK5 in extra and _NVLINK5 not in offered:
            raise DriverError(
                f"{option}: NVLink 5 switches need {_NVLINK5}, which only NVIDIA's repository has: add that, or use "
                "driver=keep"
            )
        if _CUDA in extra and _CUDA not in offered:
            raise DriverError(f"cuda-toolkit: {_CUDA} is not in this machine's archives: {release.hint}")
        others = [f"{name} is {offered[name]}" for name in core if apt.upstream(offered[name]) != version]
        if others:
            raise DriverError(f"{option}: the archives have no {version} as a whole: {', '.join(others)}")
        names = [*core, *extra, *(name for name in release.optional if name in offered)]
        modules, kernels, changes = self._with_modules(names, version, offered, pins)
        foreign = [name for name in changes.removed if not name.startswith(_MAY_GO)]
        if foreign:
            raise DriverError(f"driver {version}: apt would remove {', '.join(foreign)}: see what conflicts first")
        exact = apt.installed(*names, *modules)
        exact |= {n: v for n, v in changes.installed.items() if n.startswith(_MAY_GO) or n in {*names, *modules}}
        built = not release.signed or self.name(release.signed, facts.next_kernel) not in modules
        return Plan(version, self.module, tuple(sorted(exact.items())), kernels, built, fabric)

    def _kernels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.facts.kernel, self.facts.next_kernel)))

    def _kernel_packages(self) -> list[str]:
        patterns = [*self.release.built, "linux-headers-{k}", *([self.release.signed] if self.release.signed else ())]
        return [self.name(pattern, kernel) for kernel in self._kernels() for pattern in patterns]

    def _signed(self, version: str, offered: collections.abc.Mapping[str, str]) -> dict[str, str]:
        """Return the packages with signed modules of this version, by kernel.

        They name it in what they depend on, some as a lower bound only: apt would take newer user space for them.
        """
        names = {kernel: self.name(self.release.signed, kernel) for kernel in self._kernels()}
        depends = apt.depends(name for name in names.values() if name in offered)
        mark = re.compile(rf"nvidia-kernel-common-\S+ \(>= {re.escape(version)}[-)]")
        return {kernel: name for kernel, name in names.items() if mark.search(depends.get(name, ""))}

    def _with_modules(
        self,
        names: list[str],
        version: str,
        offered: collections.abc.Mapping[str, str],
        pins: collections.abc.Mapping[str, str],
    ) -> tuple[list[str], tuple[str, ...], apt.Changes]:
        """Return the packages that bring modules, the kernels that get them, and all that apt would change.

        The next kernel must get them, since it is what a reboot comes up with; the running one does where it can.
        """
        kernel = self.facts.next_kernel
        signed = self._signed(version, offered)
        option = f"driver={self.wanted.branch}"
        lacks = f"no signed modules for kernel {kernel}" if self.release.signed else "only modules to be built here"
        if kernel in signed:
            packages, covered = list(signed.values()), tuple(signed)
        elif self.facts.secure_boot:
            raise DriverError(
                f"{option}: {lacks}, and Secure Boot refuses modules built on this machine: boot a kernel that has "
                "signed ones, or switch Secure Boot off"
            )
        elif f"linux-headers-{kernel}" not in offered:
            raise DriverError(
                f"{option}: {lacks}, and no linux-headers-{kernel} to build them with: boot a kernel of the archive"
            )
        else:
            covered = tuple(kernel for kernel in self._kernels() if f"linux-headers-{kernel}" in offered)
            packages = [self.name(pattern) for pattern in self.release.built]
            packages += [f"linux-headers-{kernel}" for kernel in covered]
        try:
            return packages, covered, apt.simulate([*names, *packages], pins)
        except apt.AptError as e:
            raise DriverError(f"{option}: apt cannot install {version} as a whole: {e}") from e


def version_key(version: str) -> tuple[int, ...]:
    """Return a driver version as numbers, to compare it."""
    return tuple(int(number) for number in re.findall(r"\d+", apt.upstream(version)))


def _choice(options: collections.abc.Mapping[str, object], name: str, allowed: tuple[str, ...]) -> str:
    value = str(options.get(name, allowed[0])).strip()
    if value not in allowed:
        raise DriverError(f"{name}: {value!r:.60} is none of {', '.join(allowed)}")
    return value

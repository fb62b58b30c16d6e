"""Which driver this machine should have: from options, devices and archives to one exact set of packages.

Names and branches are tables; apt resolves the rest. What is not available raises `DriverError` with the
option's name and what to type instead.

Sources. Ubuntu: the archive of 22.04 and 24.04, components restricted and multiverse, as of November 2026. Debian:
bookworm and bookworm-security, components contrib, non-free and non-free-firmware, as of November 2026.
"""

import collections.abc
import re
import typing

import pydantic

from driver.state import DriverError, Facts, version_key
from slurm_ddp import apt, charm
from slurm_ddp.run import CommandError

KEEP = "keep"
Branch = typing.Literal["535", "550", "570", "575", "580", "590", "595"]  # that one of the distributions ever had
BRANCHES: tuple[Branch, ...] = typing.get_args(Branch)
VERSION = re.compile(r"[0-9]{3}(\.[0-9]{1,4}){1,3}")

# Generation, ranges of PCI device ids, kernel modules that drive it, first and last branch. Ids: pci-ids.ucw.cz, vendor
# 10de. Modules: docs.nvidia.com/datacenter/tesla/driver-installation-guide, "NVIDIA Kernel Modules". Branches: NVIDIA's
# "Supported NVIDIA GPU Products" of each release (580 is the last for Maxwell, Pascal and Volta).
_EITHER, _OPEN, _PROPRIETARY = ("open", "proprietary"), ("open",), ("proprietary",)
GENERATIONS = (
    ("Maxwell", ((0x1340, 0x15EF), (0x1600, 0x17FF)), _PROPRIETARY, 340, 580),
    ("Pascal", ((0x15F0, 0x15FF), (0x1B00, 0x1D7F)), _PROPRIETARY, 367, 580),
    ("Volta", ((0x1D80, 0x1DFF),), _PROPRIETARY, 384, 580),
    ("Turing", ((0x1E00, 0x1FFF), (0x2180, 0x21FF)), _EITHER, 410, 999),
    ("Ampere", ((0x2080, 0x20FF), (0x2200, 0x22FF), (0x2400, 0x25FF)), _EITHER, 450, 999),
    ("Hopper", ((0x2300, 0x2341), (0x2343, 0x2347), (0x2349, 0x23FF)), _EITHER, 520, 999),
    ("Grace Hopper", ((0x2342, 0x2342),), _OPEN, 535, 999),
    ("Grace Hopper", ((0x2348, 0x2348),), _OPEN, 550, 999),
    ("Ada", ((0x2600, 0x28FF),), _EITHER, 525, 999),
    ("Blackwell", ((0x2900, 0x2FFF),), _OPEN, 570, 999),
    ("Blackwell Ultra", ((0x3180, 0x31FF),), _OPEN, 580, 999),
)


class Release(typing.NamedTuple):
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
_HEADERS, _NVLINK5, _CUDA = "linux-headers-{k}", "nvlsm", "nvidia-cuda-toolkit"
_NVLINK5_HINT = "NVLink 5 switches need nvlsm, which only NVIDIA's repository has: add that, or use driver=keep"
_PINNED = "*nvidia* libcuda1"  # what apt takes in the driver's version, dependencies too, wherever it has that version
# Packages that a change of driver may remove: the other branch's. Anything else that apt wants to remove stops it.
_MAY_GO = ("nvidia-", "libnvidia-", "linux-modules-nvidia-", "linux-objects-nvidia-", "linux-signatures-nvidia-",
           "xserver-xorg-video-nvidia", "cuda-drivers", "libcuda1", "libcudadebugger1", "firmware-nvidia-")  # fmt: skip


class Spec(pydantic.BaseModel, frozen=True, populate_by_name=True):
    """The options, which are the aliases, checked one by one and together."""

    branch: typing.Literal["keep", Branch] = pydantic.Field(default="keep", validation_alias="driver")
    flavour: typing.Literal["server"] = pydantic.Field(default="server", validation_alias="driver-flavour")
    module: typing.Literal["auto", "open", "proprietary"] = pydantic.Field(
        default="auto", validation_alias="kernel-module"
    )
    utils: bool = pydantic.Field(default=True, validation_alias="driver-utils")
    cuda: bool = pydantic.Field(default=False, validation_alias="cuda-toolkit")
    fabric: typing.Literal["auto", "on", "off"] = pydantic.Field(default="auto", validation_alias="fabric-manager")
    persistence: bool = pydantic.Field(default=True, validation_alias="persistence-mode")
    hold: bool = pydantic.Field(default=True, validation_alias="hold-driver")
    version: str | None = None  # exactly this one: "580.173.02"

    @pydantic.field_validator("branch", "flavour", "module", "fabric", mode="before")
    @classmethod
    def _strip(cls, value: object) -> object:
        return value.strip() if isinstance(value, str) else value

    @pydantic.field_validator("module", "cuda", "fabric")
    @classmethod
    def _needs_branch(cls, value: str | bool, info: pydantic.ValidationInfo) -> str | bool:
        if info.data.get("branch") == KEEP and value in {"open", "proprietary", True, "on"}:
            raise ValueError(f"{value} contradicts driver=keep, which installs nothing: set a branch")
        return value

    @property
    def keeps(self) -> bool:
        """Whether the driver is left to whoever installed it."""
        return self.branch == KEEP

    def wants_fabric(self, facts: Facts) -> bool:
        """Whether this machine gets a fabric manager."""
        return self.fabric == "on" or (self.fabric == "auto" and facts.needs_fabric)


class Plan(pydantic.BaseModel, frozen=True):
    """One exact set of packages."""

    version: str  # the driver's: "580.173.02"
    packages: typing.Annotated[dict[str, str], pydantic.BeforeValidator(dict)]  # versions by name; once they were pairs
    kernels: tuple[str, ...]  # those that get modules
    fabric: bool  # a fabric manager belongs to it


def spec(options: collections.abc.Mapping[str, object]) -> Spec:
    """Return the charm's options as one specification."""
    try:
        return Spec.model_validate(dict(options))
    except pydantic.ValidationError as e:
        raise DriverError(charm.problem(e)) from e


def narrowed(wanted: Spec, branch: Branch | None, version: str | None, present: str = "") -> Spec:
    """Return the specification with the parameters of `upgrade-driver` on top.

    `present` is the branch of the driver that is there, which counts where nothing else names one.
    """
    if branch and not wanted.keeps and branch != wanted.branch:
        raise DriverError(f"branch={branch} contradicts the option driver={wanted.branch}: set driver={branch} first")
    of_version = version.partition(".")[0] if version else ""
    chosen = branch or (None if wanted.keeps else wanted.branch) or of_version or present
    if not chosen:
        raise DriverError("branch: driver=keep names none; give branch=580 (or another), or set the option driver")
    if chosen not in BRANCHES:
        source = f"version: {chosen}" if version else f"branch: that of the driver here, {chosen},"
        raise DriverError(f"{source} is none of {', '.join(BRANCHES)}")
    if version and of_version != chosen:
        raise DriverError(f"version={version} is not of branch {chosen}")
    return wanted.model_copy(update={"branch": chosen, "version": version})


def kernel_modules(facts: Facts, wanted: Spec) -> tuple[str, ...]:
    """Choose NVIDIA's kernel modules that drive all cards in this branch, the better one first."""
    asked = _EITHER if wanted.module == "auto" else (wanted.module,)
    needs: dict[str, str] = {}
    for card in facts.cards:
        row = next((row for row in GENERATIONS if any(a <= card.device <= b for a, b in row[1])), None)
        if row is None:  # a newer card than the table
            asked = asked[:1]
            continue
        name, _, modules, since, until = row
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


def resolve(facts: Facts, wanted: Spec) -> Plan:
    """Return the set of packages that apt would install now, after reading the archives anew.

    Where the cards take either kernel module, the newer version decides, and between equals the open one.
    """
    release = RELEASES.get(facts.release)
    if release is None:
        here, known = facts.release or "an unknown system", ", ".join(RELEASES)
        raise DriverError(f"driver={wanted.branch}: this machine has {here}, not one of {known}: use driver=keep")
    if wanted.branch not in release.branches:
        has = ", ".join(release.branches)
        raise DriverError(f"driver: {facts.release} has no branch {wanted.branch}, only {has}")
    if facts.runfile:
        raise DriverError("driver: NVIDIA's own installer put one here: run nvidia-uninstall first, or use driver=keep")
    if wanted.wants_fabric(facts) and not release.fabric:
        raise DriverError(f"fabric-manager: {facts.release} packages none: use NVIDIA's repository and driver=keep")
    try:
        modules = kernel_modules(facts, wanted)
        apt.update()
        names = {module: _named(release.driver[0], wanted, module) for module in modules}
        newest = apt.candidates(names.values())
        refused: list[DriverError] = []
        for module in sorted(
            modules, key=lambda module: version_key(apt.upstream(newest.get(names[module], ""))), reverse=True
        ):
            try:
                return _resolve(facts, wanted, release, module, wanted.version or newest.get(names[module], ""))
            except DriverError as e:
                refused.append(e)
        raise refused[0]
    except CommandError as e:
        raise DriverError(f"apt: {e}") from e


def _resolve(facts: Facts, wanted: Spec, release: Release, module: str, newest: str) -> Plan:
    """List what apt would install with this kernel module and this version; empty where it has none."""
    option, version, fabric = f"driver={wanted.branch}", apt.upstream(newest), wanted.wants_fabric(facts)
    patterns = (*release.driver, *((release.utils,) if wanted.utils else ()), *(release.fabric if fabric else ()))
    core = [_named(pattern, wanted, module) for pattern in patterns]  # of exactly the driver's version
    extra = [name for name, wants in ((_NVLINK5, facts.nvlink5), (_CUDA, wanted.cuda)) if wants]
    built = [_named(pattern, wanted, module) for pattern in release.built]
    kernels = tuple(dict.fromkeys((facts.kernel, facts.next_kernel)))
    headers = {kernel: _HEADERS.format(k=kernel) for kernel in kernels}
    signed = {kernel: _named(release.signed, wanted, module, kernel) for kernel in kernels if release.signed}
    pins = {_PINNED: f"{version}-*"} if version else {}
    names = [*core, *extra, *release.optional, *built, *headers.values(), *signed.values()]
    offered = apt.candidates(names, pins)
    if missing := [name for name in (*core, *extra) if name not in offered]:
        hint = _NVLINK5_HINT if _NVLINK5 in missing else release.hint
        raise DriverError(f"{option}: {', '.join(missing)} not in this machine's archives: {hint}")
    if not version.startswith(f"{wanted.branch}."):
        other = version.partition(".")[0]
        raise DriverError(f"{option}: {core[0]} only leads on to branch {other} now: set driver={other}")
    if others := [f"{name} is {offered[name]}" for name in core if apt.upstream(offered[name]) != version]:
        raise DriverError(f"{option}: the archives have no {version} as a whole: {', '.join(others)}")
    # The next kernel must get modules, since a reboot comes up with it; the running one gets them where it can.
    modules = _of_version(version, (name for name in signed.values() if name in offered))
    by_kernel = {kernel: name for kernel, name in signed.items() if name in modules}
    if facts.next_kernel not in by_kernel:
        by_kernel = {kernel: name for kernel, name in headers.items() if name in offered}
        _check_builds(facts, option, by_kernel, signs=bool(release.signed))
        modules = {*built, *by_kernel.values()}
    names = [*core, *extra, *(name for name in release.optional if name in offered), *sorted(modules)]
    try:
        changes = apt.simulate(names, pins)
    except apt.AptError as e:
        raise DriverError(f"{option}: apt cannot install {version} as a whole: {e}") from e
    if foreign := [name for name in changes.removed if not name.startswith(_MAY_GO)]:
        raise DriverError(f"driver {version}: apt would remove {', '.join(foreign)}: see what conflicts first")
    ours = {name: number for name, number in changes.installed.items() if name.startswith(_MAY_GO) or name in names}
    packages = dict(sorted((apt.installed(*names) | ours).items()))
    return Plan(version=version, packages=packages, kernels=tuple(by_kernel), fabric=fabric)


def _of_version(version: str, signed: collections.abc.Iterable[str]) -> set[str]:
    """Choose the packages with signed modules of this version.

    They name it in what they depend on, some as a lower bound only: apt would take newer user space for them.
    """
    mark = re.compile(rf"nvidia-kernel-common-\S+ \(>= {re.escape(version)}[-)]")
    return {name for name, depends in apt.depends(signed).items() if mark.search(depends)}


def _check_builds(facts: Facts, option: str, headers: collections.abc.Container[str], *, signs: bool) -> None:
    """Raise unless modules for the next kernel can be built on this machine."""
    kernel = facts.next_kernel
    lacks = f"no signed modules for kernel {kernel}" if signs else "only modules to be built here"
    if facts.secure_boot:
        raise DriverError(
            f"{option}: {lacks}, and Secure Boot refuses modules built on this machine: boot a kernel that has signed "
            "ones, or switch Secure Boot off"
        )
    if kernel not in headers:
        raise DriverError(
            f"{option}: {lacks}, and no linux-headers-{kernel} to build them with: boot a kernel of the archive"
        )


def _named(pattern: str, wanted: Spec, module: str, kernel: str = "") -> str:
    return pattern.format(b=wanted.branch, o="-open" if module == "open" else "", k=kernel)

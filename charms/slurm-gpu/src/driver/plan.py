"""Choose this machine's driver: one exact set of packages.

Options, cards and archives decide.

ubuntu-drivers chooses what fits the cards, apt resolves the rest. Package names come from the
archive, components restricted and multiverse, as of November 2026. If no driver is available,
`DriverError` names the option and a value that works.
"""

import collections.abc
import re
import typing

import pydantic

from driver import state
from driver.state import DriverError, Facts
from slurm_ddp import apt, charm
from slurm_ddp.commands import CommandError, last_line, run

_BRANCH = re.compile(r"[0-9]{3}")
_VERSION = re.compile(r"[0-9]{3}(\.[0-9]{1,4}){1,3}")
_UBUNTU_DRIVERS = "/usr/bin/ubuntu-drivers"  # of the package ubuntu-drivers-common
_LISTING_S = 300.0
# A line of `ubuntu-drivers list --gpgpu`; the rest of it names the package with the kernel's
# modules
_OFFERED = re.compile(r"^nvidia-headless-no-dkms-([0-9]{3}-server(?:-open)?)\b", re.MULTILINE)
_MODPROBE = "nvidia-modprobe"  # which makes the device files; of any version
_PINNED = "*nvidia* libcuda1"  # what apt takes in the driver's version, dependencies too, if it has that version
# Packages that a change of driver may remove: the other branch's. Anything else that apt wants to
# remove stops it.
_ALSO = (
    "linux-objects-nvidia-",
    "linux-signatures-nvidia-",
    "libcudadebugger1",
    "xserver-xorg-video-nvidia",
)
_REMOVABLE = (*state.PACKAGES, *_ALSO)


class Spec(pydantic.BaseModel, frozen=True):
    """The options, checked one by one and together."""

    driver: str = "keep"  # or a branch: "580"
    kernel_module: typing.Literal["auto", "open", "proprietary"] = "auto"
    fabric_manager: typing.Literal["auto", "always", "never"] = "auto"
    persistence_mode: bool = True
    hold_driver: bool = True
    version: str | None = None  # exactly this one: "580.173.02"

    @pydantic.field_validator("driver")
    @classmethod
    def _is_branch(cls, value: str) -> str:
        if value != "keep" and not _BRANCH.fullmatch(value):
            raise ValueError("use keep, or a branch such as 580")
        return value

    @pydantic.field_validator("kernel_module", "fabric_manager")
    @classmethod
    def _needs_branch(cls, value: str, info: pydantic.ValidationInfo) -> str:
        if info.data.get("driver") == "keep" and value in {"open", "proprietary", "always"}:
            raise ValueError(
                f"{value} contradicts driver=keep, which installs nothing: set a branch"
            )
        return value

    @property
    def keeps(self) -> bool:
        """Whether the installed driver stays."""
        return self.driver == "keep"


class Plan(typing.NamedTuple):
    """One exact set of packages."""

    version: str  # the driver's: "580.173.02"
    packages: dict[str, str]  # versions by name
    fabric: bool  # whether a fabric manager belongs to it


def spec(options: collections.abc.Mapping[str, object]) -> Spec:
    """Return the charm's options as one specification."""
    try:
        return Spec.model_validate(
            {name.replace("-", "_"): value for name, value in options.items()}
        )
    except pydantic.ValidationError as e:
        raise DriverError(charm.problem(e)) from e


def narrowed(wanted: Spec, branch: str | None, version: str | None, present: str = "") -> Spec:
    """Return the specification with the parameters of `upgrade-driver`.

    `present` is the branch of the driver here.
    """
    _check_parameters(wanted, branch, version)
    of_version = (version or "").partition(".")[0]
    of_option = "" if wanted.keeps else wanted.driver
    chosen = branch or of_option or of_version or present
    if not chosen:
        raise DriverError(
            "branch: driver=keep names none; give branch=580 (or another), or set the option driver"
        )
    if version and of_version != chosen:
        raise DriverError(f"version={version} is not of branch {chosen}")
    return wanted.model_copy(update={"driver": chosen, "version": version})


def _check_parameters(wanted: Spec, branch: str | None, version: str | None) -> None:
    if version is not None and not _VERSION.fullmatch(version):
        raise DriverError(f"version: {version!r:.60} is not a driver version such as 580.173.02")
    if branch is not None and not _BRANCH.fullmatch(branch):
        raise DriverError(f"branch: {branch!r:.60} is not a branch such as 580")
    if branch and not wanted.keeps and branch != wanted.driver:
        raise DriverError(
            f"branch={branch} contradicts the option driver={wanted.driver}: set driver={branch} first"
        )


def offered() -> list[str]:
    """List the drivers that ubuntu-drivers finds for this machine's cards, such as 580-server-open.

    Raises DriverError if it cannot be asked, `CommandError` if apt fails.
    """
    apt.ensure_packages(["ubuntu-drivers-common"])
    listed = run(_UBUNTU_DRIVERS, "list", "--gpgpu", timeout=_LISTING_S, check=False)
    if listed.returncode != 0:
        why = last_line(listed.stdout) or last_line(listed.stderr)
        raise DriverError(f"driver: ubuntu-drivers list --gpgpu exited {listed.returncode}: {why}")
    return _OFFERED.findall(listed.stdout)


def kernel_modules(wanted: Spec, found: collections.abc.Collection[str]) -> list[str]:
    """Return the suffixes of this branch's available drivers, the better one first."""
    suffixes = {"open": ["-open"], "proprietary": [""], "auto": ["-open", ""]}[wanted.kernel_module]
    return [suffix for suffix in suffixes if f"{wanted.driver}-server{suffix}" in found]


def resolve(facts: Facts, wanted: Spec) -> Plan:
    """Refresh the package index, and return the set of packages that apt would install."""
    if not facts.release.startswith("ubuntu "):
        here = facts.release or "an unknown system"
        raise DriverError(
            f"driver: use keep: {here} is not Ubuntu, from whose archive driver={wanted.driver} comes"
        )
    if facts.runfile:
        raise DriverError(
            "driver: NVIDIA's own installer put one here: run nvidia-uninstall first, or use driver=keep"
        )
    refused: list[DriverError] = []
    try:
        apt.update()
        found = offered()
        suffixes = kernel_modules(wanted, found)
        if not suffixes:
            raise _not_offered(wanted, found)
        for suffix in suffixes:
            try:
                return _resolve(facts, wanted, suffix)
            except DriverError as e:
                refused.append(e)
    except CommandError as e:
        raise DriverError(f"apt: {e}") from e
    raise refused[0]


def _not_offered(wanted: Spec, found: collections.abc.Collection[str]) -> DriverError:
    """Return the error for a driver that ubuntu-drivers does not offer."""
    if not found:
        hint = "enable restricted and multiverse (add-apt-repository restricted multiverse), or use driver=keep"
        return DriverError(
            f"driver={wanted.driver}: {hint}: ubuntu-drivers offers nothing for these GPUs"
        )
    branches = sorted({name.partition("-")[0] for name in found})
    if wanted.driver in branches:
        return DriverError(
            f"kernel-module: use auto: these GPUs have no {wanted.kernel_module} one of {wanted.driver}"
        )
    return DriverError(
        f"driver: use {', '.join(branches)} or keep: {wanted.driver} is not offered for these GPUs"
    )


def _resolve(facts: Facts, wanted: Spec, suffix: str) -> Plan:
    """List what apt would install with the kernel modules of this suffix."""
    option = f"driver={wanted.driver}"
    fabric = wanted.fabric_manager == "always"
    if wanted.fabric_manager == "auto":
        fabric = facts.switches > 0
    core = _core(wanted, suffix, fabric=fabric)
    version = wanted.version or apt.upstream(apt.candidates(core[:1]).get(core[0], ""))
    pins = {_PINNED: f"{version}-*"} if version else {}
    _check_archives(wanted, core, version, apt.candidates([*core, _MODPROBE], pins))

    modules = _modules(facts, option, f"{wanted.driver}-server{suffix}", version)
    names = [*core, _MODPROBE, *modules]
    try:
        changes = apt.simulate(names, pins)
    except apt.AptError as e:
        raise DriverError(f"{option}: apt cannot install {version} as a whole: {e}") from e
    foreign = [name for name in changes.removed if not name.startswith(_REMOVABLE)]
    if foreign:
        raise DriverError(
            f"driver {version}: apt would remove {', '.join(foreign)}: see what conflicts first"
        )
    packages = apt.installed(*names)
    for name, number in changes.installed.items():
        if name.startswith(_REMOVABLE) or name in names:
            packages[name] = number
    return Plan(version, dict(sorted(packages.items())), fabric)


def _core(wanted: Spec, suffix: str, *, fabric: bool) -> list[str]:
    """Name the packages that must be of exactly the driver's version."""
    server = f"{wanted.driver}-server"
    names = [
        f"nvidia-headless-no-dkms-{server}{suffix}",
        f"nvidia-kernel-common-{server}",
        f"libnvidia-compute-{server}",
        f"nvidia-utils-{server}",
    ]
    if fabric:
        names += [f"nvidia-fabricmanager-{wanted.driver}", f"libnvidia-nscq-{wanted.driver}"]
    return names


def _check_archives(wanted: Spec, core: list[str], version: str, available: dict[str, str]) -> None:
    """Raise `DriverError` unless the archives have the whole driver in this version."""
    option = f"driver={wanted.driver}"
    missing = [name for name in (*core, _MODPROBE) if name not in available]
    if missing:
        hint = "add-apt-repository restricted multiverse"
        raise DriverError(f"{hint}: {option}: not in this machine's archives: {', '.join(missing)}")
    if not version.startswith(f"{wanted.driver}."):
        other = version.partition(".")[0]
        raise DriverError(
            f"{option}: {core[0]} only leads on to branch {other} now: set driver={other}"
        )
    differing = [name for name in core if apt.upstream(available[name]) != version]
    if differing:
        others = ", ".join(f"{name} is {available[name]}" for name in differing)
        raise DriverError(f"{option}: the archives have no {version} as a whole: {others}")


def _modules(facts: Facts, option: str, series: str, version: str) -> list[str]:
    """Choose the packages with modules for the running kernel and for the next one.

    Signed modules name their driver in their dependencies, some only as a lower bound, which could
    pull in newer user space. If the next kernel lacks signed modules, DKMS builds them for both
    kernels.
    """
    kernels = dict.fromkeys((facts.kernel, facts.next_kernel))
    signed = {kernel: f"linux-modules-nvidia-{series}-{kernel}" for kernel in kernels}
    of_version = re.compile(rf"nvidia-kernel-common-\S+ \(>= {re.escape(version)}[-)]")
    found = {
        name for name, depends in apt.depends(signed.values()).items() if of_version.search(depends)
    }
    if signed[facts.next_kernel] in found:
        return sorted(found)
    headers = apt.candidates(f"linux-headers-{kernel}" for kernel in kernels)
    if facts.secure_boot or f"linux-headers-{facts.next_kernel}" not in headers:
        why = f"no linux-headers-{facts.next_kernel} can build"
        if facts.secure_boot:
            why = "Secure Boot refuses"
        raise DriverError(
            f"{option}: no signed modules for kernel {facts.next_kernel}, and {why} modules of this machine: boot a "
            "kernel that has signed ones"
        )
    return [f"nvidia-dkms-{series}", *headers]

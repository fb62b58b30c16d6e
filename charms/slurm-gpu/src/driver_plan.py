"""Which driver this machine should have: from options, devices and the archives to one exact set of packages.

Nothing here touches the machine. What cannot be had is refused with the option's name and what to type instead.
"""

import collections.abc
import dataclasses
import re

import driver_packages
import driver_state
from slurm_ddp import apt

KEEP = "keep"
FLAVOURS = ("server", "desktop")
KERNEL_MODULES = ("auto", "open", "proprietary")
FABRICS = ("auto", "on", "off")
_VERSION = re.compile(r"\d{3}(\.\d{1,4}){1,3}", re.ASCII)
_DEPENDS = re.compile(r"(?P<name>[a-z0-9.+-]+)(?::\w+)?(?: \((?P<how>[<>=]+) (?P<version>[^)]+)\))?")
_MOST_PACKAGES = 100

Offers = collections.abc.Mapping[str, tuple[apt.Version, ...]]
Lookup = collections.abc.Callable[[collections.abc.Iterable[str]], Offers]


class PlanError(Exception):
    """What was asked for cannot be had. `str()` is one line: which option, why, and what to type."""


@dataclasses.dataclass(frozen=True)
class Wish:
    """The options, checked one by one and together."""

    branch: str = KEEP  # "580", or "keep"
    flavour: str = "server"
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


def wish(options: collections.abc.Mapping[str, object]) -> Wish:
    """Return the charm's options as one wish.

    Raises:
        PlanError: one has no such value, or two contradict each other.
    """
    branch = str(options.get("driver", KEEP)).strip()
    if branch != KEEP and branch not in driver_packages.BRANCHES:
        raise PlanError(f"driver: {branch!r:.60} is neither keep nor a branch: {', '.join(driver_packages.BRANCHES)}")
    flavour = _choice(options, "driver-flavour", FLAVOURS)
    module = _choice(options, "kernel-module", KERNEL_MODULES)
    fabric = _choice(options, "fabric-manager", FABRICS)
    utils, cuda = bool(options.get("driver-utils", True)), bool(options.get("cuda-toolkit", False))
    if branch == KEEP and cuda:
        raise PlanError("cuda-toolkit=true contradicts driver=keep, which installs nothing: set a branch")
    if branch == KEEP and module != "auto":
        raise PlanError(f"kernel-module={module} contradicts driver=keep, which installs nothing: set a branch")
    if branch == KEEP and flavour != FLAVOURS[0]:
        raise PlanError(f"driver-flavour={flavour} contradicts driver=keep, which installs nothing: set a branch")
    if branch == KEEP and fabric == "on":
        raise PlanError("fabric-manager=on contradicts driver=keep, which installs nothing: set a branch")
    if flavour == "desktop" and fabric == "on":
        raise PlanError("fabric-manager=on contradicts driver-flavour=desktop: fabric managers fit server drivers only")
    return Wish(
        branch=branch,
        flavour=flavour,
        module=module,
        utils=utils,
        cuda=cuda,
        fabric=fabric,
        persistence=bool(options.get("persistence-mode", True)),
        hold=bool(options.get("hold-driver", True)),
    )


def narrowed(wanted: Wish, branch: str | None, version: str | None, present: str = "") -> Wish:
    """Return the wish with the parameters of `upgrade-driver` on top.

    Args:
        wanted: the options.
        branch: the parameter, which must not contradict the option.
        version: the parameter, which must be of that branch.
        present: the version of the driver that is there, whose branch counts where nothing else says one.

    Raises:
        PlanError: they are no branch and no version, contradict each other, or say nothing while the option says keep.
    """
    if branch is not None and branch not in driver_packages.BRANCHES:
        raise PlanError(f"branch: {branch!r:.60} is none of {', '.join(driver_packages.BRANCHES)}")
    if version is not None and not _VERSION.fullmatch(version):
        raise PlanError(f"version: {version!r:.60} is not a driver version such as 580.173.02")
    if branch and not wanted.keeps and branch != wanted.branch:
        raise PlanError(f"branch={branch} contradicts the option driver={wanted.branch}: set driver={branch} first")
    chosen = branch or (None if wanted.keeps else wanted.branch) or (version or present).partition(".")[0]
    if not chosen:
        raise PlanError("branch: driver=keep says none; give branch=580 (or another), or set the option driver")
    if chosen not in driver_packages.BRANCHES:
        said = f"version: {chosen}" if version else f"branch: that of the driver here, {chosen},"
        raise PlanError(f"{said} is none of {', '.join(driver_packages.BRANCHES)}")
    if version and version.partition(".")[0] != chosen:
        raise PlanError(f"version={version} is not of branch {chosen}")
    return dataclasses.replace(wanted, branch=chosen, version=version or None)


def check(facts: driver_state.Facts, wanted: Wish) -> driver_packages.Release:
    """Return how this machine's distribution packages the driver.

    Raises:
        PlanError: the distribution or a device does not fit the options.
    """
    release = driver_packages.RELEASES.get(facts.release)
    if release is None:
        known = ", ".join(driver_packages.RELEASES)
        here = facts.release or "an unknown system"
        raise PlanError(f"driver={wanted.branch}: this machine has {here}, not one of {known}: use driver=keep")
    if wanted.branch not in release.branches:
        raise PlanError(f"driver: {release.name} has no branch {wanted.branch}, only {', '.join(release.branches)}")
    if facts.runfile:
        raise PlanError("driver: NVIDIA's own installer put one here: run nvidia-uninstall first, or use driver=keep")
    branch = int(wanted.branch)
    for card in facts.cards:
        kind = driver_packages.architecture(card.device)
        if kind is None:
            continue
        if branch < kind.since:
            raise PlanError(f"driver: GPU {card.bus_id} ({kind.name}) needs branch {kind.since} or later, not {branch}")
        if kind.until is not None and branch > kind.until:
            raise PlanError(f"driver: GPU {card.bus_id} ({kind.name}) works up to branch {kind.until}, not {branch}")
        if kind.module != "either" and wanted.module not in {"auto", kind.module}:
            raise PlanError(
                f"kernel-module={wanted.module}: GPU {card.bus_id} ({kind.name}) needs the {kind.module} module"
            )
    kernel_module(facts, wanted)
    if _wants_fabric(facts, wanted):
        if not release.fabric:
            raise PlanError(f"fabric-manager: {release.name} packages none: use NVIDIA's repository and driver=keep")
        if wanted.flavour != "server":
            raise PlanError("driver-flavour: NVSwitches need a fabric manager, which fits driver-flavour=server only")
    return release


def kernel_module(facts: driver_state.Facts, wanted: Wish) -> str:
    """Return which of NVIDIA's kernel modules drives these cards: "open" wherever all of them take it.

    Raises:
        PlanError: one card needs the one, another the other.
    """
    if wanted.module != "auto":
        return wanted.module
    kinds = {card.bus_id: driver_packages.architecture(card.device) for card in facts.cards}
    needs = {kind.module: bus_id for bus_id, kind in kinds.items() if kind is not None and kind.module != "either"}
    if len(needs) > 1:
        raise PlanError(
            f"kernel-module: GPU {needs['open']} needs the open module and {needs['proprietary']} the proprietary one: "
            "they cannot work in one machine"
        )
    return next(iter(needs), "open")


def _possible_modules(facts: driver_state.Facts, wanted: Wish) -> tuple[str, ...]:
    """Return which kernel modules may be taken, the better one first."""
    module = kernel_module(facts, wanted)
    kinds = [driver_packages.architecture(card.device) for card in facts.cards]
    free = wanted.module == "auto" and all(kind is None or kind.module == "either" for kind in kinds)
    return ("open", "proprietary") if free and kinds and None not in kinds else (module,)


def resolve(facts: driver_state.Facts, wanted: Wish, lookup: Lookup) -> Plan:
    """Return the newest set of packages of one version that the archives have as a whole.

    Where the cards take either kernel module, the newer version decides, and between equals the open one.

    Args:
        facts: this machine.
        wanted: of which branch, and perhaps of which version.
        lookup: tells what the archives offer of some packages.

    Raises:
        PlanError: there is none.
    """
    release = check(facts, wanted)
    modules = _possible_modules(facts, wanted)
    plans: list[Plan] = []
    refused: PlanError | None = None
    for module in modules:
        try:
            plans.append(_resolve(facts, wanted, release, module, lookup))
        except PlanError as e:
            refused = refused or e
    if not plans:
        assert refused is not None
        raise refused
    return max(plans, key=lambda plan: version_key(plan.version))  # the first of equals: the open modules


def _resolve(
    facts: driver_state.Facts, wanted: Wish, release: driver_packages.Release, module: str, lookup: Lookup
) -> Plan:
    names = _Names(release, wanted, module)
    fabric = _wants_fabric(facts, wanted)
    core = [*names(release.locked), *(names(release.utils) if wanted.utils else ())]
    core += names(release.fabric) if fabric else ()
    loose = [*names(release.loose), *(names(release.nvlink5) if facts.nvlink5 else ())]
    loose += names(release.cuda) if wanted.cuda else ()
    modules = _Modules.of(facts, names, module)
    offers = lookup([*core, *loose, *modules.names])
    _check_offered(release, wanted, core, loose, offers)
    reasons: list[str] = []
    for version in _versions(core, offers, wanted.version):
        try:
            packages, kernels = modules.pick(version, offers)
        except PlanError as e:
            reasons.append(f"{version}: {e}")
            continue
        chosen = {name: _offer(offers, name, version) for name in core} | packages
        chosen |= {name: offers[name][0].number for name in loose if offers.get(name)}
        exact = _closed(chosen, version, lookup)
        dkms = any(name in exact for name in modules.built)
        return Plan(version, module, tuple(sorted(exact.items())), kernels, dkms, fabric)
    if reasons:
        raise PlanError(f"driver={wanted.branch}: {reasons[0]}")
    whole = wanted.version or f"branch {wanted.branch}"
    lacking = sorted({name for name in core if not _has(offers, name, wanted.version)})
    raise PlanError(
        f"driver={wanted.branch}: the archives have no {whole} as a whole: "
        f"{', '.join(lacking or core)} are of {'other' if lacking else 'different'} versions"
    )


class _Names:
    """Fills in the names of packages."""

    def __init__(self, release: driver_packages.Release, wanted: Wish, module: str) -> None:
        self._fields = {
            "b": wanted.branch,
            "f": "-server" if wanted.flavour == "server" else "",
            "o": "-open" if module == "open" else "",
        }
        self.release = release

    def __call__(self, patterns: collections.abc.Iterable[str]) -> list[str]:
        return [self.one(pattern) for pattern in patterns]

    def one(self, pattern: str, **more: str) -> str:
        return pattern.format(**self._fields, **more)


@dataclasses.dataclass(frozen=True)
class _Modules:
    """The packages that bring kernel modules."""

    facts: driver_state.Facts
    common: str  # the package in whose dependencies signed modules name their driver version
    signed: dict[str, str]  # by kernel
    built: list[str]
    headers: dict[str, str]  # by kernel

    @classmethod
    def of(cls, facts: driver_state.Facts, names: "_Names", module: str) -> "_Modules":
        release = names.release
        kernels = tuple(dict.fromkeys((facts.kernel, facts.next_kernel)))
        return cls(
            facts,
            names.one(release.names_version),
            {kernel: names.one(release.prebuilt, k=kernel) for kernel in kernels if release.prebuilt},
            names(release.dkms[module]),
            {kernel: names.one(release.headers, k=kernel) for kernel in kernels},
        )

    @property
    def names(self) -> list[str]:
        """All that may be asked for."""
        return [*self.signed.values(), *self.built, *self.headers.values()]

    def pick(self, version: str, offers: Offers) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the packages that give the kernels modules of this version, and those kernels.

        The next kernel must get them, since it is what a reboot comes up with; the running one does where it can.

        Raises:
            PlanError: the next kernel cannot have them.
        """
        next_kernel = self.facts.next_kernel
        found: dict[str, str] = {}
        kernels: list[str] = []
        for kernel, name in self.signed.items():
            fitting = [o.number for o in offers.get(name, ()) if _module_version(o, self.common) == version]
            if fitting:
                found[name] = fitting[0]
                kernels.append(kernel)
        if next_kernel in kernels:
            return found, tuple(kernels)
        lacks = f"no signed modules for kernel {next_kernel}" if self.signed else "only modules to be built here"
        if self.facts.secure_boot:
            raise PlanError(
                f"{lacks}, and Secure Boot refuses modules built on this machine: boot a kernel that has signed ones, "
                "or switch Secure Boot off"
            )
        if not all(_has(offers, name, version) for name in self.built):
            raise PlanError(f"{lacks}, and no {self.built[0]} of that version")
        if not offers.get(self.headers[next_kernel]):
            raise PlanError(
                f"{lacks}, and no {self.headers[next_kernel]} to build them with: boot a kernel of the archive"
            )
        with_headers = [kernel for kernel, name in self.headers.items() if offers.get(name)]
        packages = {name: _offer(offers, name, version) for name in self.built}
        packages |= {self.headers[kernel]: offers[self.headers[kernel]][0].number for kernel in with_headers}
        return packages, tuple(with_headers)


def _module_version(offer: apt.Version, common: str) -> str | None:
    """Return the driver version of prebuilt modules: they depend on at least that version of its support files."""
    for clause in offer.depends:
        for choice in clause:
            match = _DEPENDS.fullmatch(choice)
            if match and match["name"] == common and match["how"] in {">=", "="}:
                return apt.upstream(match["version"]) if "-" in match["version"] else match["version"]
    return None


def _closed(chosen: dict[str, str], version: str, lookup: Lookup) -> dict[str, str]:
    """Return the set with everything that it depends on in exactly this version.

    apt takes the newest version of what is not named, and then finds that it does not fit.
    """
    exact = dict(chosen)
    todo: list[str] = list(chosen)
    while todo and len(exact) < _MOST_PACKAGES:
        clauses = [
            clause
            for name, offers in lookup(todo).items()
            for offer in offers
            if offer.number == exact.get(name) and offer.upstream == version
            for clause in offer.depends
        ]
        names = {match["name"] for clause in clauses for choice in clause if (match := _DEPENDS.fullmatch(choice))}
        offers = lookup(names - set(exact))
        todo = list[str]()
        for clause in clauses:
            matches = [match for choice in clause if (match := _DEPENDS.fullmatch(choice))]
            if any(match["name"] in exact for match in matches):
                continue
            for match in matches:
                name = match["name"]
                of_driver = match["how"] in {"=", "<=", ">="} and match["version"].startswith(version)
                if of_driver and _has(offers, name, version):
                    exact[name] = _offer(offers, name, version)
                    todo.append(name)
                    break
    return exact


def _versions(core: list[str], offers: Offers, only: str | None) -> list[str]:
    """Return the driver versions in which every package of the core is offered, the newest first."""
    sets = [{offer.upstream for offer in offers.get(name, ())} for name in core]
    common = set[str].intersection(*sets) if sets else set[str]()
    if only is not None:
        common &= {only}
    return sorted(common, key=version_key, reverse=True)


def version_key(version: str) -> tuple[int, ...]:
    """Return a driver version as numbers, to compare it."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _check_offered(
    release: driver_packages.Release,
    wanted: Wish,
    core: list[str],
    loose: list[str],
    offers: Offers,
) -> None:
    missing = [name for name in core if not offers.get(name)]
    if missing:
        raise PlanError(f"driver={wanted.branch}: {', '.join(missing)} not in this machine's archives: {release.hint}")
    for name in loose:
        if name in release.nvlink5 and not offers.get(name):
            raise PlanError(
                f"driver={wanted.branch}: NVLink 5 switches need {name}, which only NVIDIA's repository has: add that, "
                "or use driver=keep"
            )
        if name in release.cuda and not offers.get(name):
            raise PlanError(f"cuda-toolkit: {name} is not in this machine's archives: {release.hint}")
    moved = [name for name in core if not any(offer.upstream.startswith(f"{wanted.branch}.") for offer in offers[name])]
    if moved:
        leads = offers[moved[0]][0].upstream.partition(".")[0]
        raise PlanError(f"driver={wanted.branch}: {moved[0]} only leads on to branch {leads} now: set driver={leads}")


def _wants_fabric(facts: driver_state.Facts, wanted: Wish) -> bool:
    return wanted.fabric == "on" or (wanted.fabric == "auto" and facts.needs_fabric)


def _has(offers: Offers, name: str, version: str | None) -> bool:
    return any(version in {None, offer.upstream} for offer in offers.get(name, ()))


def _offer(offers: Offers, name: str, version: str) -> str:
    return next(offer.number for offer in offers[name] if offer.upstream == version)


def _choice(options: collections.abc.Mapping[str, object], name: str, allowed: tuple[str, ...]) -> str:
    said = str(options.get(name, allowed[0])).strip()
    if said not in allowed:
        raise PlanError(f"{name}: {said!r:.60} is none of {', '.join(allowed)}")
    return said

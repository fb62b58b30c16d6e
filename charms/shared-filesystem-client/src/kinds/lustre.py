"""Draws up the mount of a Lustre filesystem: one mount unit of systemd's; installs the client, and configures LNet.

A client's modules fit one kernel. Where packages come from is data (lustre_archives.toml); which of them fit this
kernel is read from the archive's own index.
"""

import collections.abc
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import platform
import re
import tomllib
import typing

import mount_plan
from kinds import kernel, presets
from slurm_ddp import download, files, mounts
from slurm_ddp.commands import CommandError, run
from slurm_ddp.interfaces import filesystem_info as fs

SOURCES = pathlib.Path("/etc/apt/sources.list.d")
KEYRINGS = pathlib.Path("/etc/apt/keyrings")
MODPROBE = pathlib.Path("/etc/modprobe.d/slurm-ddp-lnet.conf")
MODULES = pathlib.Path("/lib/modules")
LNET = pathlib.Path("/sys/module/lnet/parameters/networks")
ESC_CLIENT = pathlib.Path("/usr/sbin/esc-client")
ESC_CONFIG = pathlib.Path("/etc/esc-client.conf")
FSTAB = pathlib.Path("/etc/fstab")
_NAME = "slurm-ddp-lustre"
_PORT = 988  # where LNet listens, lnet's module parameter accept_port
_WRITTEN = "# Written by the charm shared-filesystem-client; changes here are lost.\n"
_MOST_BYTES = 64 << 20  # of a key, and of DDN's program
_NETWORK = r"(tcp|o2ib|kfi|gni)\d{0,5}(\([A-Za-z0-9_.:,-]+\))?"
_NID = re.compile(r"(?P<host>[^@\s:]+)@(?P<kind>tcp|o2ib|kfi|gni)(?P<number>\d{0,5})")


@dataclasses.dataclass(frozen=True)
class Preset:
    """Where a vendor's client comes from; the fields are explained in lustre_archives.toml."""

    line: str
    key_url: str = ""
    packages: collections.abc.Sequence[str] = ()
    versioned: str = ""
    dkms: collections.abc.Sequence[str] = ()
    note: str = ""


PRESETS = {
    name: Preset(**table)
    for name, table in tomllib.loads(
        pathlib.Path(__file__).with_name("lustre_archives.toml").read_text()
    ).items()
}
EXASCALER = "exascaler"  # DDN's file servers hand out their own client
_NAMED = (*PRESETS, EXASCALER)


class Package(typing.NamedTuple):
    """One entry of an archive's index."""

    name: str
    version: str


def plan(spec: mount_plan.Spec, filesystem: fs.Lustre) -> mount_plan.Plan:
    """Draw up the mount of a filesystem; install the client and configure LNet, except in a container."""
    identifiers = nids(filesystem.nids)
    path = kernel.below("/", spec.subdirectory)
    source = f"{servers(identifiers)}:/{filesystem.fs_name}{path if path != '/' else ''}"
    options = presets.merge(
        presets.LUSTRE, profile=spec.profile, given=spec.mount_options, holding=spec.holding
    )
    pairs = [identifier.split("@") for identifier in identifiers]
    if not kernel.container():
        ensure_installed(spec, mgs=pairs[0][0])
        is_mounted = any(mount.fstype == kernel.LUSTRE.fstype for mount in mounts.table())
        ensure_networks(spec, identifiers, mounted=is_mounted)
    kernel.check(kernel.LUSTRE)
    # Servers on InfiniBand alone cannot be asked over TCP: whether they answer is seen when mounting
    by_tcp = all(network.startswith("tcp") for _, network in pairs)
    groups = (tuple((host, _PORT) for host, _ in pairs),) if by_tcp else ()
    return kernel.plan(spec, kind=kernel.LUSTRE, source=source, options=options, servers=groups)


def nids(texts: collections.abc.Sequence[str]) -> tuple[str, ...]:
    """Normalise identifiers to what the kernel shows: `tcp0` is `tcp`, and an identifier without network is on it."""
    found: list[str] = []
    for text in texts:
        match = _NID.fullmatch(text if "@" in text else f"{text}@tcp")
        if match is None:
            raise mount_plan.MountError(
                "a Lustre server's identifier is ADDRESS@NETWORK, like 10.0.0.2@tcp1 or @o2ib"
            )
        found.append(f"{match['host']}@{match['kind']}{match['number'].lstrip('0')}")
    return tuple(found)


def servers(identifiers: collections.abc.Sequence[str]) -> str:
    """Write the first part of a mount's source: nodes behind each other `:`, the identifiers of one with `,`.

    The wire format is one flat list. A server has one identifier on each of its networks, so a network that comes again
    begins the next server, which takes over when the first fails.
    """
    nodes: list[dict[str, str]] = []  # identifiers by network
    for identifier in identifiers:
        network = identifier.partition("@")[2]
        if not nodes or network in nodes[-1]:
            nodes.append({})
        nodes[-1][network] = identifier
    return ":".join(",".join(node.values()) for node in nodes)


def resolve(
    preset: Preset, index: collections.abc.Iterable[Package], release: str
) -> tuple[str, ...]:
    """Choose what to give to `apt-get install` for a kernel; an error names the kernels that the index has."""
    if preset.versioned:
        fitting = [
            (_numbers(match[1]), one)
            for one in index
            if (match := re.fullmatch(preset.versioned, one.name))
        ]
        mine = [pair for pair in fitting if pair[1].version == release]
        if not mine:
            raise mount_plan.MountError(_nothing_for(release, {one.version for _, one in fitting}))
        return ("=".join(max(mine, key=lambda pair: pair[0])[1]),)
    names = {one.name for one in index}
    wanted = tuple(template.format(kernel=release) for template in preset.packages)
    if set(wanted) <= names:
        return wanted
    if preset.dkms and set(preset.dkms) <= names:
        return (*preset.dkms, f"linux-headers-{release}")
    pattern = re.escape(preset.packages[0]).replace(re.escape("{kernel}"), r"(\d.*)")
    kernels = {
        kernel
        for name in names
        if (match := re.fullmatch(pattern, name))
        for kernel in match.groups()
    }
    raise mount_plan.MountError(_nothing_for(release, kernels))


def parse_index(text: str) -> list[Package]:
    """Parse the packages that a `Packages` file lists (deb822(5))."""
    paragraphs = (
        dict(re.findall(r"^(Package|Version): (\S+)", paragraph, re.MULTILINE))
        for paragraph in re.split(r"\n\s*\n", text)
    )
    return [
        Package(fields["Package"], fields["Version"]) for fields in paragraphs if len(fields) == 2
    ]


def check(config: mount_plan.Config) -> None:
    """Raise `ValueError`, which names the option, unless the options make sense."""
    text = config.lustre_repository
    if text not in ("", *_NAMED) and not text.startswith("deb "):
        known = ", ".join(_NAMED)
        raise ValueError(
            f"lustre-repository: {text[:40]!r} is none of {known}, nor a line deb URL SUITE COMPONENT"
        )
    if "\n" in text:
        raise ValueError("lustre-repository: one line of sources.list, without a line break")
    if text.startswith("deb ") and not config.lustre_packages:
        example = "lustre-client-modules-{kernel} lustre-client-utils"
        raise ValueError(
            f"lustre-packages: name the client's packages in your repository, for example {example}"
        )
    for word in config.lustre_packages.split():
        if not re.fullmatch(r"[a-z0-9{][a-z0-9+.{}~-]*", word) or set(
            re.findall(r"\{(.*?)\}", word)
        ) - {"kernel"}:
            raise ValueError(
                f"lustre-packages: {word[:40]!r} is no package's name; only {{kernel}} is filled in"
            )
    if text == EXASCALER and not re.fullmatch(r"[0-9a-f]{64}", config.lustre_checksum):
        raise ValueError(
            "lustre-checksum: set the SHA-256 of http://SERVER/client-setup-tool, which is not signed"
        )
    if config.lnet_networks and not re.fullmatch(f"{_NETWORK}(,{_NETWORK})*", config.lnet_networks):
        raise ValueError(
            "lnet-networks: networks with their interfaces, like tcp1(eth0) or o2ib(ib0),tcp(eth0)"
        )


def ensure_installed(config: mount_plan.Config, release: str = "", *, mgs: str = "") -> None:
    """Have a client whose modules fit the running kernel, EXAScaler's from its server `mgs`; keep one that is there."""
    release = release or os.uname().release
    if _has_modules(release):
        return
    if not config.lustre_repository:
        known, others = "|".join(_NAMED), _others(release)
        remedy = f"set lustre-repository={known}, or a line of your own"
        raise mount_plan.MountError(
            f"no Lustre client for kernel {release} is installed{others}: {remedy}"
        )
    if config.lustre_repository == EXASCALER:
        _run_exascaler(mgs, config.lustre_checksum)
    else:
        is_url = config.lustre_key.startswith("http")
        own = Preset(
            config.lustre_repository,
            config.lustre_key if is_url else "",
            config.lustre_packages.split(),
        )
        preset = PRESETS.get(config.lustre_repository, own)
        wanted = resolve(preset, _read_index(preset, "" if is_url else config.lustre_key), release)
        _apt("-y", "--no-install-recommends", "install", *wanted, timeout=1800)
    run("/usr/sbin/depmod", "-a", release, check=False)
    if not _has_modules(release):
        repository, others = config.lustre_repository[:40], _others(release)
        problem = f"{repository} installed no modules for the running kernel {release}{others}"
        raise mount_plan.MountError(f"{problem}: boot a kernel that it supports")


def ensure_networks(
    config: mount_plan.Config, identifiers: collections.abc.Sequence[str], *, mounted: bool
) -> None:
    """Have LNet speak on the networks of the option, else of the servers, each on the interface that leads there."""
    wanted = config.lnet_networks or derive_networks(identifiers)
    if not wanted:
        return
    changed = files.ensure_file(MODPROBE, f'{_WRITTEN}options lnet networks="{wanted}"\n')
    if not LNET.exists():
        return
    running = LNET.read_text().strip()
    if running == wanted or (running in ("", "(null)") and not changed):
        return
    if mounted:
        now = running or "its own choice"
        raise mount_plan.MountError(
            f"LNet runs on {now}, not on {wanted}: unmount all Lustre here, or reboot"
        )
    try:
        run("/usr/sbin/lustre_rmmod", timeout=90)
    except CommandError as e:
        raise mount_plan.MountError(
            f"LNet cannot change to {wanted} while it is in use: reboot ({e})"
        ) from e


def derive_networks(identifiers: collections.abc.Sequence[str]) -> str:
    """Name LNet's networks with the interfaces that lead to the servers; nothing where its default, tcp, is right."""
    found: dict[str, str] = {}
    for identifier in identifiers:
        address, _, network = identifier.partition("@")
        if network not in found and (interface := _interface_to(address)):
            found[network] = f"{network}({interface})"
    return "" if set(found) <= {"tcp"} else ",".join(found.values())


def remove() -> None:
    """Remove the archive and LNet's networks. The packages stay: other mounts may use them."""
    for path in (
        MODPROBE,
        SOURCES / f"{_NAME}.list",
        KEYRINGS / f"{_NAME}.asc",
        KEYRINGS / f"{_NAME}.gpg",
    ):
        files.ensure_absent(path)


def _interface_to(address: str) -> str:
    if not re.fullmatch(r"[0-9.]+", address):
        return ""
    with contextlib.suppress(CommandError, ValueError, KeyError, IndexError, TypeError):
        return str(
            json.loads(run("/usr/sbin/ip", "-j", "route", "get", address, timeout=10).stdout)[0][
                "dev"
            ]
        )
    return ""


def _read_index(preset: Preset, key: str) -> list[Package]:
    """Write the archive's line and key, and read which packages it has."""
    system, listing = platform.freedesktop_os_release(), SOURCES / f"{_NAME}.list"
    keyring = KEYRINGS / f"{_NAME}.{'gpg' if preset.key_url.endswith('.gpg') else 'asc'}"
    line = preset.line.replace("{codename}", system.get("VERSION_CODENAME", "")).replace(
        "{keyring}", str(keyring)
    )
    line = line.replace("{number}", system.get("VERSION_ID", "").replace(".", ""))
    content = key.encode() if key else _fetch(preset.key_url) if preset.key_url else b""
    if content:
        files.ensure_file(keyring, content)
        if "[" not in line:
            line = line.replace("deb ", f"deb [signed-by={keyring}] ", 1)
    files.ensure_file(listing, f"# Written by the charm shared-filesystem-client.\n{line}\n")
    _apt("update", listing=listing, timeout=300)
    names = _apt(
        "indextargets", "--format", "$(FILENAME)", "Created-By: Packages", listing=listing
    ).splitlines()
    texts = (run("/usr/lib/apt/apt-helper", "cat-file", name, timeout=120).stdout for name in names)
    return [package for text in texts for package in parse_index(text)]


def _apt(*arguments: str, listing: pathlib.Path | None = None, timeout: float = 60) -> str:
    """Run apt-get, with `listing` for that archive alone; return its output."""
    options = ["DPkg::Lock::Timeout=600"]
    if listing is not None:
        options += [
            f"Dir::Etc::sourcelist={listing}",
            "Dir::Etc::sourceparts=-",
            "APT::Get::List-Cleanup=0",
        ]
    command = [
        "/usr/bin/apt-get",
        *(word for option in options for word in ("-o", option)),
        *arguments,
    ]
    return run(*command, env={"DEBIAN_FRONTEND": "noninteractive"}, timeout=timeout).stdout


def _run_exascaler(mgs: str, checksum: str) -> None:
    """Run DDN's program, which installs the client from the servers; keep it from touching fstab and from mounting."""
    content = _fetch(f"http://{mgs}/client-setup-tool")
    found = hashlib.sha256(content).hexdigest()
    if found != checksum:
        raise mount_plan.MountError(
            f"lustre-checksum: {mgs} serves a client-setup-tool with SHA-256 {found}"
        )
    files.ensure_file(ESC_CLIENT, content, mode=0o755)
    fstab = FSTAB.read_bytes() if FSTAB.exists() else b""
    scratch = mount_plan.STATE / "esc-client"
    scratch.mkdir(parents=True, exist_ok=True)
    mount = {"ClientDevice": f"{mgs}@tcp:/none", "Mountpoint": str(scratch)}
    config = {
        "Version": "2.0.0",
        "MountConfig": mount | {"PackageSource": f"http://{mgs}/client-packages"},
    }
    files.ensure_file(ESC_CONFIG, json.dumps(config, indent=1) + "\n")
    try:
        # It fails to mount `none`, which is wanted: what counts is whether the modules are there afterwards
        run(ESC_CLIENT, "auto", "setup", "--config", ESC_CONFIG, timeout=1800, check=False)
        run(ESC_CLIENT, "unmount", "-m", scratch, timeout=120, check=False)
    finally:
        if FSTAB.exists() and FSTAB.read_bytes() != fstab:
            files.ensure_file(FSTAB, fstab)
        with contextlib.suppress(OSError):
            scratch.rmdir()


def _fetch(url: str) -> bytes:
    try:
        return download.fetch(url, most_bytes=_MOST_BYTES, timeout=300)
    except download.TooLargeError as e:
        raise mount_plan.MountError(str(e)) from e
    except download.DownloadError as e:
        raise mount_plan.NotYetError(str(e)) from e


def _has_modules(release: str) -> bool:
    return (
        kernel.known(kernel.LUSTRE)
        or run("/usr/sbin/modinfo", "-k", release, "lustre", check=False).returncode == 0
    )


def _others(release: str) -> str:
    """Name the kernels that modules are installed for, as part of a sentence."""
    found = sorted(
        {path.relative_to(MODULES).parts[0] for path in MODULES.glob("*/**/lustre.ko*")} - {release}
    )
    return f" (only for {', '.join(found)})" if found else ""


def _nothing_for(release: str, kernels: set[str]) -> str:
    series, flavour = release.partition("-")[0].rsplit(".", 1)[0], release.rpartition("-")[2]
    close = sorted(
        (one for one in kernels if one.startswith(series) and one.endswith(flavour)), key=_numbers
    )
    text = f"the repository has no Lustre client for kernel {release}"
    if close:
        return text + f"; it has one for {close[-1]}: boot that kernel"
    newest = max(kernels, key=_numbers, default="")
    return text + (
        f"; its newest is for {newest}: boot that kernel, or choose another repository"
        if newest
        else ""
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))

"""The Lustre client: which packages hold it, for which kernel, and the networks that it speaks on.

A client's modules fit one kernel. Where packages come from is data (`PRESETS`); which of them fit this kernel is read
from the archive's own index.
"""

import collections.abc
import contextlib
import dataclasses
import hashlib
import http.client
import json
import os
import pathlib
import re
import time
import urllib.request

import mount_plan
from slurm_ddp import files
from slurm_ddp.run import CommandError, last_line, run

SOURCES = pathlib.Path("/etc/apt/sources.list.d")
KEYRINGS = pathlib.Path("/etc/apt/keyrings")
MODPROBE = pathlib.Path("/etc/modprobe.d/slurm-ddp-lnet.conf")
MODULES = pathlib.Path("/lib/modules")
LNET = pathlib.Path("/sys/module/lnet/parameters/networks")
FILESYSTEMS = pathlib.Path("/proc/filesystems")
OS_RELEASE = pathlib.Path("/etc/os-release")
ESC_CLIENT = pathlib.Path("/usr/sbin/esc-client")
FSTAB = pathlib.Path("/etc/fstab")
_NAME = "slurm-ddp-lustre"
_KEY_BYTES, _TOOL_BYTES = 1 << 20, 64 << 20
_APT = ("/usr/bin/apt-get", "-o", "DPkg::Lock::Timeout=600")
_ENV = {"DEBIAN_FRONTEND": "noninteractive"}
_IP = "/usr/sbin/ip"
_NID = re.compile(r"(?P<host>[^@\s]+)@(?P<kind>tcp|o2ib|kfi|gni)(?P<number>\d{0,5})")
TCP_PORT = 988  # where LNet listens, lnet's module parameter accept_port


@dataclasses.dataclass(frozen=True)
class Preset:
    """Where a vendor's client comes from."""

    line: str  # of sources.list(5), with {codename}, {number} (2404) and {keyring}
    key_url: str  # empty: the archive is not signed
    packages: tuple[str, ...]  # with {kernel}; the first decides whether the archive fits this kernel
    versioned: str = ""  # instead: packages of such a name, of which the one with the kernel's name as version fits
    dkms: tuple[str, ...] = ()  # built on the machine, for whatever kernel it runs
    note: str = ""


PRESETS = {
    # docs.aws.amazon.com/fsx/latest/LustreGuide/install-lustre-client.html: kernels of the flavour aws only
    "aws": Preset(
        "deb [signed-by={keyring}] https://fsx-lustre-client-repo.s3.amazonaws.com/ubuntu {codename} main",
        "https://fsx-lustre-client-repo-public-keys.s3.amazonaws.com/fsx-ubuntu-public-key.asc",
        ("lustre-client-modules-{kernel}",),
    ),
    # cloud.google.com/managed-lustre/docs/connect-from-compute-engine
    "gcp": Preset(
        "deb [signed-by={keyring}] https://us-apt.pkg.dev/projects/lustre-client-binaries "
        "lustre-client-ubuntu-{codename} main",
        "https://us-apt.pkg.dev/doc/repo-signing-key.gpg",
        ("lustre-client-modules-{kernel}", "lustre-client-utils"),
    ),
    # learn.microsoft.com/azure/azure-managed-lustre/connect-clients: NAME=KERNEL, one name for each Lustre version
    "azure": Preset(
        "deb [arch=amd64 signed-by={keyring}] https://packages.microsoft.com/repos/amlfs-{codename} {codename} main",
        "https://packages.microsoft.com/keys/microsoft.asc",
        (),
        versioned=r"amlfs-lustre-client-(\d+[0-9.]*)-.+",
    ),
    # downloads.whamcloud.com/public/lustre: a flat archive without a signature, over HTTPS
    "whamcloud": Preset(
        "deb [trusted=yes] https://downloads.whamcloud.com/public/lustre/latest-release/ubuntu{number}/client/ ./",
        "",
        ("lustre-client-modules-{kernel}", "lustre-client-utils"),
        dkms=("lustre-client-modules-dkms", "lustre-client-utils"),
        note="whamcloud's archive is not signed: HTTPS alone vouches for it",
    ),
}
EXASCALER = "exascaler"  # DDN's file servers hand out their own client
REPOSITORIES = ("", *PRESETS, EXASCALER, "a line `deb ...`")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options about Lustre."""

    repository: str = ""  # a preset, or a line of sources.list
    packages: str = ""  # of one's own repository, with {kernel}
    key: str = ""  # of one's own repository: an armoured key, or the URL of one
    checksum: str = ""  # of EXAScaler's program, SHA-256
    networks: str = ""  # as lnet's module parameter `networks` takes it


class NoPackageError(mount_plan.MountError):
    """The archive has no client for this kernel."""


@dataclasses.dataclass(frozen=True)
class Package:
    """One entry of an archive's index."""

    name: str
    version: str


def nids(texts: collections.abc.Sequence[str]) -> tuple[str, ...]:
    """Return the identifiers as the kernel shows them: `tcp0` is `tcp`, and an identifier without network is on it.

    Raises:
        mount_plan.MountError: one of them is no identifier.
    """
    found: list[str] = []
    for text in texts:
        match = _NID.fullmatch(text if "@" in text else f"{text}@tcp")
        if match is None or ":" in match["host"]:
            raise mount_plan.MountError("a Lustre server's identifier is ADDRESS@NETWORK, like 10.0.0.2@tcp1 or @o2ib")
        number = match["number"].lstrip("0")
        found.append(f"{match['host']}@{match['kind']}{number}")
    return tuple(found)


def servers(identifiers: collections.abc.Sequence[str]) -> str:
    """Return the first part of a mount's source: nodes behind each other `:`, the identifiers of one with `,`.

    The wire format is one flat list. A server has one identifier on each of its networks, so a network that comes again
    begins the next server, which takes over when the first fails.
    """
    nodes: list[list[str]] = []
    for identifier in identifiers:
        network = identifier.partition("@")[2]
        if not nodes or any(network == known.partition("@")[2] for known in nodes[-1]):
            nodes.append([])
        nodes[-1].append(identifier)
    return ":".join(",".join(node) for node in nodes)


def resolve(preset: Preset, index: collections.abc.Iterable[Package], kernel: str) -> tuple[str, ...]:
    """Return what to give to `apt-get install` for this kernel.

    Raises:
        NoPackageError: the index has nothing for it; the message names what it has for kernels close to it.
    """
    listed = list(index)
    names = {one.name for one in listed}
    if preset.versioned:
        fitting = [(_numbers(match[1]), one) for one in listed if (match := re.fullmatch(preset.versioned, one.name))]
        mine = [pair for pair in fitting if pair[1].version == kernel]
        if mine:
            best = max(mine, key=lambda pair: pair[0])[1]
            return (f"{best.name}={best.version}",)
        raise NoPackageError(_nothing_for(kernel, {one.version for _, one in fitting}))
    wanted = tuple(template.format(kernel=kernel) for template in preset.packages)
    if set(wanted) <= names:
        return wanted
    if preset.dkms and set(preset.dkms) <= names:
        return (*preset.dkms, f"linux-headers-{kernel}")
    pattern = re.escape(preset.packages[0]).replace(re.escape("{kernel}"), "(.+)")
    kernels = {match[1] for name in names if (match := re.fullmatch(pattern, name))}
    raise NoPackageError(_nothing_for(kernel, {name for name in kernels if name[:1].isdigit()}))


def parse_index(text: str) -> list[Package]:
    """Return the packages that a `Packages` file lists (deb822(5))."""
    found: list[Package] = []
    for paragraph in re.split(r"\n\s*\n", text):
        fields = dict(re.findall(r"^(Package|Version): (\S+)", paragraph, re.MULTILINE))
        if "Package" in fields and "Version" in fields:
            found.append(Package(fields["Package"], fields["Version"]))
    return found


def check(settings: Settings) -> None:
    """Raise `ValueError`, which names the option, unless the options make sense."""
    text = settings.repository
    if text not in ("", *PRESETS, EXASCALER) and not text.startswith("deb "):
        raise ValueError(
            f"lustre-repository: {text[:40]!r} is none of {', '.join([*PRESETS, EXASCALER])}, nor a line of "
            "sources.list: deb URL SUITE COMPONENT"
        )
    if "\n" in text:
        raise ValueError("lustre-repository: one line of sources.list, without a line break")
    if text.startswith("deb ") and not settings.packages:
        raise ValueError(
            "lustre-packages: say what your repository calls the client, for example "
            "lustre-client-modules-{kernel} lustre-client-utils"
        )
    for word in settings.packages.split():
        if not re.fullmatch(r"[a-z0-9{][a-z0-9+.{}~-]*", word) or set(re.findall(r"\{(.*?)\}", word)) - {"kernel"}:
            raise ValueError(f"lustre-packages: {word[:40]!r} is no package's name; only {{kernel}} is filled in")
    if text == EXASCALER and not re.fullmatch(r"[0-9a-f]{64}", settings.checksum):
        raise ValueError(
            "lustre-checksum: EXAScaler's servers hand out their client over HTTP, unsigned: give the SHA-256 of "
            "http://SERVER/client-setup-tool, 64 hexadecimal digits"
        )
    if settings.networks and not re.fullmatch(
        r"(tcp|o2ib|kfi|gni)\d{0,5}(\([A-Za-z0-9_.:,-]+\))?(,(tcp|o2ib|kfi|gni)\d{0,5}(\([A-Za-z0-9_.:,-]+\))?)*",
        settings.networks,
    ):
        raise ValueError("lnet-networks: networks with their interfaces, like tcp1(eth0) or o2ib(ib0),tcp(eth0)")


def ensure_installed(settings: Settings, mgs: str, kernel: str | None = None) -> None:
    """Have a client whose modules fit the running kernel; do nothing where one is there already, whoever installed it.

    Args:
        settings: the options.
        mgs: the address of the first management server, which EXAScaler's client comes from.
        kernel: the running one.

    Raises:
        mount_plan.MountError: there is none; the message says what to do.
        CommandError: apt failed.
    """
    kernel = kernel or os.uname().release
    if _has_modules(kernel):
        return
    if not settings.repository:
        presets = "|".join([*PRESETS, EXASCALER])
        raise mount_plan.MountError(
            f"there is no Lustre client for kernel {kernel} here{_others(kernel)}: say where one comes from: "
            f"lustre-repository={presets}, or a line of your own"
        )
    if settings.repository == EXASCALER:
        _run_exascaler(mgs, settings.checksum)
    else:
        preset = PRESETS.get(settings.repository) or Preset(
            settings.repository,
            settings.key if settings.key.startswith("http") else "",
            tuple(settings.packages.split()),
        )
        listing = _ensure_source(preset, settings.key if not settings.key.startswith("http") else "")
        wanted = resolve(preset, _index(listing), kernel)
        run(*_APT, "-y", "--no-install-recommends", "install", *wanted, env=_ENV, timeout=1800)
    run("/usr/sbin/depmod", "-a", kernel, check=False)
    if not _has_modules(kernel):
        raise mount_plan.MountError(
            f"{settings.repository[:40]} installed no modules for the running kernel {kernel}{_others(kernel)}: "
            "boot a kernel that it has them for"
        )


def ensure_networks(settings: Settings, identifiers: collections.abc.Sequence[str], *, mounted: bool) -> None:
    """Have LNet speak on the networks of the servers.

    Without the option each network gets the interface that leads to the server on it; `tcp`, which LNet takes by
    itself, is left to it.

    Raises:
        mount_plan.MountError: another application needs other networks; or LNet runs with others and cannot change now.
    """
    wanted = settings.networks or derive_networks(identifiers)
    if not wanted:
        return
    changed = files.ensure_file(
        MODPROBE,
        f'# Written by the charm shared-filesystem-client; changes here are lost.\noptions lnet networks="{wanted}"\n',
    )
    if not LNET.exists():
        return
    running = LNET.read_text().strip()
    if running == wanted or (running in ("", "(null)") and not changed):
        return
    if mounted:
        raise mount_plan.MountError(
            f"LNet runs on {running or 'its own choice'}, and {wanted} is wanted: unmount all Lustre here, or reboot"
        )
    try:
        run("/usr/sbin/lustre_rmmod", timeout=90)
    except CommandError as e:
        raise mount_plan.MountError(f"LNet cannot change to {wanted} while it is in use: reboot ({e})") from e


def derive_networks(identifiers: collections.abc.Sequence[str]) -> str:
    """Return LNet's networks with the interfaces that lead to the servers; nothing where the default is right."""
    found: dict[str, str] = {}
    for identifier in identifiers:
        address, _, network = identifier.partition("@")
        if network not in found and (interface := _interface_to(address)):
            found[network] = f"{network}({interface})"
    return "" if set(found) <= {"tcp"} else ",".join(found.values())


def remove() -> None:
    """Take the archive and LNet's networks away. The packages stay: other mounts may use them."""
    for path in (MODPROBE, SOURCES / f"{_NAME}.list", KEYRINGS / f"{_NAME}.asc", KEYRINGS / f"{_NAME}.gpg"):
        files.ensure_absent(path)


def release() -> dict[str, str]:
    """Return this system's os-release(5)."""
    lines = OS_RELEASE.read_text().splitlines()
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}


def _interface_to(address: str) -> str:
    if not re.fullmatch(r"[0-9.]+", address):
        return ""
    with contextlib.suppress(CommandError, ValueError, KeyError, IndexError, TypeError):
        return str(json.loads(run(_IP, "-j", "route", "get", address, timeout=10).stdout)[0]["dev"])
    return ""


def _ensure_source(preset: Preset, key: str) -> pathlib.Path:
    """Write the archive's line and key, read its index; return the file with the line."""
    system = release()
    keyring = KEYRINGS / f"{_NAME}.{'gpg' if preset.key_url.endswith('.gpg') else 'asc'}"
    listing = SOURCES / f"{_NAME}.list"
    line = preset.line
    for name, value in {
        "{codename}": system.get("VERSION_CODENAME", ""),
        "{number}": system.get("VERSION_ID", "").replace(".", ""),
        "{keyring}": str(keyring),
    }.items():
        line = line.replace(name, value)
    content = key.encode() if key else _fetch(preset.key_url, _KEY_BYTES) if preset.key_url else b""
    if content:
        files.ensure_file(keyring, content)
        if "signed-by=" not in line and "[" not in line:
            line = line.replace("deb ", f"deb [signed-by={keyring}] ", 1)
    files.ensure_file(listing, f"# Written by the charm shared-filesystem-client.\n{line}\n")
    run(*_APT, *_only(listing), "update", env=_ENV, timeout=300)
    return listing


def _only(listing: pathlib.Path) -> tuple[str, ...]:
    """Return apt's options for this archive alone."""
    return (
        "-o",
        f"Dir::Etc::sourcelist={listing}",
        "-o",
        "Dir::Etc::sourceparts=-",
        "-o",
        "APT::Get::List-Cleanup=0",
    )


def _index(listing: pathlib.Path) -> list[Package]:
    told = run(
        *_APT, *_only(listing), "indextargets", "--format", "$(FILENAME)", "Created-By: Packages", env=_ENV
    ).stdout
    found: list[Package] = []
    for name in told.splitlines():
        found += parse_index(run("/usr/lib/apt/apt-helper", "cat-file", name, timeout=120).stdout)
    return found


def _run_exascaler(mgs: str, checksum: str) -> None:
    """Run DDN's program, which installs the client from the servers; keep it from touching fstab and from mounting."""
    content = _fetch(f"http://{mgs}/client-setup-tool", _TOOL_BYTES)
    found = hashlib.sha256(content).hexdigest()
    if found != checksum:
        raise mount_plan.MountError(f"lustre-checksum: {mgs} hands out a client-setup-tool of SHA-256 {found}")
    files.ensure_file(ESC_CLIENT, content, mode=0o755)
    fstab = FSTAB.read_bytes() if FSTAB.exists() else b""
    scratch = mount_plan.STATE / "esc-client"
    scratch.mkdir(parents=True, exist_ok=True)
    config = {
        "Version": "2.0.0",
        "MountConfig": {
            "ClientDevice": f"{mgs}@tcp:/none",
            "Mountpoint": str(scratch),
            "PackageSource": f"http://{mgs}/client-packages",
        },
    }
    path = pathlib.Path("/etc/esc-client.conf")
    files.ensure_file(path, json.dumps(config, indent=1) + "\n")
    try:
        # It fails to mount `none`, which is wanted: what counts is whether the modules are there afterwards
        run(ESC_CLIENT, "auto", "setup", "--config", path, timeout=1800, check=False)
        run(ESC_CLIENT, "unmount", "-m", scratch, timeout=120, check=False)
    finally:
        if FSTAB.exists() and FSTAB.read_bytes() != fstab:
            files.ensure_file(FSTAB, fstab)
        with contextlib.suppress(OSError):
            scratch.rmdir()


def _fetch(url: str, most: int) -> bytes:
    """Return what is at `url`, through the proxy of the model if it has one."""
    host = url.split("/")[2]
    proxies = {
        scheme: os.environ[f"JUJU_CHARM_{scheme.upper()}_PROXY"]
        for scheme in ("http", "https")
        if os.environ.get(f"JUJU_CHARM_{scheme.upper()}_PROXY")
    }
    handlers = [urllib.request.ProxyHandler(proxies)] if proxies else []
    content, end = bytearray(), time.monotonic() + 300
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=20) as answer:
            while block := answer.read(1 << 16):
                content += block
                if len(content) > most or time.monotonic() > end:
                    raise mount_plan.MountError(f"{host} sends too much, or too slowly")
    except (OSError, http.client.HTTPException) as e:
        raise mount_plan.NotYetError(f"no download from {host} ({last_line(str(e))})") from e
    return bytes(content)


def _has_modules(kernel: str) -> bool:
    if any(line.split()[-1:] == ["lustre"] for line in FILESYSTEMS.read_text().splitlines()):
        return True
    return run("/usr/sbin/modinfo", "-k", kernel, "lustre", check=False).returncode == 0


def _others(kernel: str) -> str:
    """Return for which kernels modules are installed, as part of a sentence."""
    found = sorted({path.relative_to(MODULES).parts[0] for path in MODULES.glob("*/**/lustre.ko*")} - {kernel})
    return f" (only for {', '.join(found)})" if found else ""


def _nothing_for(kernel: str, kernels: set[str]) -> str:
    series, flavour = kernel.partition("-")[0].rsplit(".", 1)[0], kernel.rpartition("-")[2]
    close = sorted((one for one in kernels if one.startswith(series) and one.endswith(flavour)), key=_numbers)
    instead = f"; it has one for {close[-1]}: boot that kernel" if close else ""
    if not close and kernels:
        instead = f"; its newest is for {max(kernels, key=_numbers)}: boot that kernel, or choose another repository"
    return f"the repository has no Lustre client for kernel {kernel}{instead}"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))

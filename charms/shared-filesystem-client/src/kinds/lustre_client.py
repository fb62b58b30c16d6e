"""Install a Lustre client with modules for the running kernel, by lustre_archives.toml."""

import collections.abc
import dataclasses
import os
import pathlib
import platform
import tomllib

import mount_plan
from kinds import kernel
from slurm_ddp import apt, download, files
from slurm_ddp.commands import CommandError, run

SOURCES = pathlib.Path("/etc/apt/sources.list.d")
KEYRINGS = pathlib.Path("/etc/apt/keyrings")
_NAME = "slurm-ddp-lustre"
_WRITTEN = "# Written by the charm shared-filesystem-client; changes here are lost.\n"
_KEY_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Archive:
    """The source of a vendor's client; lustre_archives.toml explains the fields."""

    archive: str
    packages: collections.abc.Sequence[str]
    page: str
    key: str = ""


_TABLE = pathlib.Path(__file__).with_name("lustre_archives.toml")
ARCHIVES = {name: Archive(**row) for name, row in tomllib.loads(_TABLE.read_text()).items()}


def check(repository: str) -> None:
    """Raise `ValueError`, which names the option, unless it is empty or a known archive."""
    if repository and repository not in ARCHIVES:
        raise ValueError(
            f"lustre-repository: {repository[:40]!r} is none of {', '.join(ARCHIVES)}; "
            "install its client as the vendor says"
        )


def ensure(repository: str, release: str = "") -> None:
    """Install a client whose modules fit the running kernel, unless one is there."""
    release = release or os.uname().release
    if _has_modules(release):
        return
    if not repository:
        raise mount_plan.MountError(
            f"no Lustre client for kernel {release}: set lustre-repository={'|'.join(ARCHIVES)}"
        )
    chosen = ARCHIVES[repository]
    see = f"no Lustre client for {release}: see {chosen.page}"
    _ensure_archive(chosen)
    try:
        apt.ensure_packages([name.format(kernel=release) for name in chosen.packages])
    except CommandError as e:
        raise mount_plan.MountError(f"{see} ({e})") from e
    run("/usr/sbin/depmod", "-a", release, check=False)
    if not _has_modules(release):
        raise mount_plan.MountError(see)


def remove() -> None:
    """Remove the archive and its key. The packages stay: other mounts may use them."""
    files.ensure_absent(SOURCES / f"{_NAME}.list")
    for suffix in ("asc", "gpg"):
        files.ensure_absent(KEYRINGS / f"{_NAME}.{suffix}")


def _ensure_archive(chosen: Archive) -> None:
    """Write the archive's line and key, as apt on this release of Ubuntu reads them."""
    keyring = KEYRINGS / f"{_NAME}.{'gpg' if chosen.key.endswith('.gpg') else 'asc'}"
    if chosen.key:
        files.ensure_file(keyring, _fetch(chosen.key))
    system = platform.freedesktop_os_release()
    line = chosen.archive.format(
        codename=system.get("VERSION_CODENAME", ""),
        number=system.get("VERSION_ID", "").replace(".", ""),
        keyring=keyring,
    )
    files.ensure_file(SOURCES / f"{_NAME}.list", f"{_WRITTEN}{line}\n")


def _fetch(url: str) -> bytes:
    try:
        return download.fetch(url, most_bytes=_KEY_BYTES, timeout=300)
    except download.TooLargeError as e:
        raise mount_plan.MountError(str(e)) from e
    except download.DownloadError as e:
        raise mount_plan.NotYetError(str(e)) from e


def _has_modules(release: str) -> bool:
    if kernel.known(kernel.LUSTRE):
        return True
    return run("/usr/sbin/modinfo", "-k", release, "lustre", check=False).returncode == 0

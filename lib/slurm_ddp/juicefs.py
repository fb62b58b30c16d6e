"""The program `juicefs`: where it comes from, what each version of it can do, and what its words mean.

Sources: the source of juicefs at the tags v0.14.2, v1.0.0 to v1.3.1 and v1.4.1, and runs of 0.14.2 and 1.3.1.
"""

import collections.abc
import dataclasses
import datetime
import gzip
import hashlib
import http.client
import io
import json
import os
import pathlib
import platform
import re
import socket
import tarfile
import tempfile
import time
import typing
import urllib.error
import urllib.parse
import urllib.request

from slurm_ddp import juicefs_access
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.run import CommandError, CommandTimeout, Completed, last_line, run

RELEASE = "1.3.1"  # what is installed when the charm has no resource
_RELEASE_URL = "https://github.com/juicedata/juicefs/releases/download/v{version}/juicefs-{version}-linux-{arch}.tar.gz"
# SHA-256 of the release's tarballs, as in its checksums.txt
_SHA256 = {
    "amd64": "eb67a7be5d174b420cb3734d441971b3a462ab522b78ad2a6ed993e7deddcd44",
    "arm64": "c29bff8f609366011cee03b9abcc76c11a06308b2c314364b8c340a2bfbc6c48",
}
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LARGEST_BYTES = 512 << 20  # a tarball or program beyond this is something else
_DOWNLOAD_S = 600.0

# The version that introduced each flag. A flag that a program does not know is fatal, so it is left out there; every
# one below only tunes, or has another spelling for older programs.
_SINCE = {
    "all-squash": (1, 3),
    "atime-mode": (1, 1),
    "attr-cache": (0, 14),
    "backup-meta": (1, 0),
    "block-size": (0, 14),
    "bucket": (0, 14),
    "buffer-size": (0, 14),
    "cache-dir": (0, 14),
    "cache-eviction": (1, 1),
    "cache-expire": (1, 2),
    "cache-large-write": (1, 3),
    "cache-partial-only": (0, 14),
    "cache-size": (0, 14),
    "capacity": (0, 14),
    "compress": (0, 14),
    "dir-entry-cache": (0, 14),
    "disable-transparent-hugepage": (1, 3),
    "download-limit": (0, 17),
    "enable-xattr": (0, 14),
    "encrypt-rsa-key": (0, 14),
    "entry-cache": (0, 14),
    "free-space-ratio": (0, 14),
    "get-timeout": (0, 14),
    "heartbeat": (1, 0),
    "hide-internal": (1, 4),
    "inodes": (0, 14),
    "io-retries": (0, 14),
    "max-deletes": (1, 0),
    "max-downloads": (1, 4),
    "max-fuse-io": (1, 3),
    "max-readahead": (1, 3),
    "max-uploads": (0, 14),
    "metrics": (0, 14),
    "negative-entry-cache": (1, 3),
    "no-bgjob": (1, 0),
    "no-syslog": (0, 14),
    "no-update": (0, 14),
    "no-usage-report": (0, 14),
    "open-cache": (0, 15),
    "open-cache-limit": (1, 1),
    "prefetch": (0, 14),
    "prefix-internal": (1, 1),
    "put-timeout": (0, 14),
    "read-only": (0, 15),
    "readdir-cache": (1, 3),
    "root-squash": (1, 1),
    "skip-dir-nlink": (1, 1),
    "skip-trash": (1, 3),
    "storage": (0, 14),
    "subdir": (0, 15),
    "trash-days": (1, 0),
    "upload-limit": (0, 17),
    "verify-cache-checksum": (1, 1),
    "writeback": (0, 14),
}
# The version that introduced each command; format, mount, umount, status, gc and fsck were there before all these.
# sync-perms is sync, of a volume that is not mounted (jfs://), with modes and owners
_COMMANDS_SINCE = {"config": (1, 0), "dump": (1, 0), "load": (1, 0), "quota": (1, 1), "sync-perms": (1, 1)}
# juicefs of the 1.x series and the ones before read each other's volumes badly or not at all
_FIRST_STABLE = (1, 0)

_OLD_SESSION = datetime.timedelta(seconds=150)  # without a beat: two were missed

# What `status` says of an engine without a volume: 1.x; 0.14 on Redis, MySQL and PostgreSQL
_NOT_FORMATTED = (
    r"database is not formatted",
    r"load setting: no volume found",
    r"load setting: Error 1146[^:]*: Table '[^']*jfs_setting' doesn't exist",
    r'load setting: pq: relation "[^"]*jfs_setting" does not exist',
)
_SYNC_S = 30.0
_UNREAD = 0o2001  # the mode of a folder whose mode was not replaced by one that was read
_DIED_AT_START = re.compile(r"^panic: (?s:.*)/minio@[^/\s]+/cmd/net\.go:\d+", re.MULTILINE)
_STORE_REFUSED = re.compile(r"\b(SignatureDoesNotMatch|InvalidAccessKeyId|AccessDenied)\b")
_OLD_MYSQL = "Unknown system variable 'transaction_isolation'"
_REFUSED = (
    "NOAUTH",
    "WRONGPASS",
    "wrong number of arguments for 'auth' command",
    "NOPERM",
    "Access denied for user",
    "password authentication failed",
)

Version = tuple[int, int, int]


JuicefsError = juicefs_access.JuicefsError


class UnreachableError(JuicefsError):
    """A server does not answer; it may come back by itself."""


class DownloadError(JuicefsError):
    """The program could not be fetched."""


def advice(error: JuicefsError, app: str) -> str:
    """Return what went wrong and, where an application's operator can mend it with one command, that command."""
    if isinstance(error, DownloadError):
        return f"{error}: attach it: juju attach-resource {app} juicefs=FILE"
    return str(error)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a metadata engine says of its volume."""

    name: str
    uuid: str
    storage: str
    bucket: str
    clients: tuple[str, ...] = ()  # that have it mounted now, as HOST at MOUNTPOINT
    block_kib: int = 4096
    compression: str = "none"
    encrypted: bool | None = None  # programs before 1.0 do not tell
    capacity_gib: int = 0  # 0: no limit
    inodes: int = 0  # 0: no limit
    trash_days: int = 0
    used_bytes: int | None = None  # programs before 1.0 do not tell
    used_inodes: int | None = None


def ensure_program(target: pathlib.Path, resource: pathlib.Path | None) -> bool:
    """Make `target` the program that `resource` holds (as such, or in a release's tarball), or the pinned release.

    Returns whether it changed.

    Raises:
        DownloadError: there is no resource, and the release could not be fetched or is not what it should be.
        JuicefsError: the resource is not a juicefs that runs on this machine.
    """
    if resource is not None and resource.stat().st_size == 0:
        resource = None  # a placeholder, as one is uploaded to a store
    if resource is not None:
        stat = resource.stat()
        source = f"resource {stat.st_size} {stat.st_mtime_ns}"
    else:
        source = f"release {RELEASE}"
    stamp = target.with_name(f"{target.name}.source")
    if target.exists() and stamp.exists() and stamp.read_text() == source:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.new")
    try:
        content = resource.read_bytes() if resource is not None else _fetch_release()
        new.write_bytes(_unpack(content))
        new.chmod(0o755)
        version(new)
        new.replace(target)
    except CommandError as e:
        raise JuicefsError(f"resource juicefs does not run here: {e}") from e
    finally:
        new.unlink(missing_ok=True)
    stamp.write_text(source)
    return True


def version(program: pathlib.Path) -> Version:
    """Return the program's version. Raises `CommandError` when it does not run."""
    said = _run(program, "--version", timeout=20).stdout
    found = re.search(r"version v?(\d+)\.(\d+)\.(\d+)", said)
    if not found:
        raise CommandError(f"{program.name}: cannot read its version from {last_line(said)!r}")
    major, minor, patch = (int(part) for part in found.groups())
    return major, minor, patch


def flags(program: Version, wanted: collections.abc.Mapping[str, str | bool]) -> list[str]:
    """Return those of the wanted flags that this version knows, as arguments; False leaves one out."""
    chosen: list[str] = []
    for name, value in wanted.items():
        if value is not False and program >= _SINCE[name]:
            chosen.append(f"--{name}" if value is True else f"--{name}={value}")
    return chosen


def knows(program: Version, flag: str) -> bool:
    """Tell whether this version knows the flag."""
    return program >= _SINCE[flag]


def since(flag: str) -> str:
    """Return the version that introduced the flag, as text."""
    return ".".join(map(str, _SINCE[flag]))


def has_command(program: Version, command: str) -> bool:
    """Tell whether this version has the command."""
    return program >= _COMMANDS_SINCE.get(command, (0, 14))


def command_since(command: str) -> str:
    """Return the version that introduced a command, in words."""
    return ".".join(map(str, _COMMANDS_SINCE[command]))


def same_series(one: Version, other: Version) -> bool:
    """Tell whether both versions can use the same volume."""
    return (one >= _FIRST_STABLE) == (other >= _FIRST_STABLE)


def parse_version(text: str) -> Version | None:
    """Return the version that a text like 1.3.1 names."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def check_reachable(addresses: collections.abc.Iterable[tuple[str, int]], *, timeout: float = 3.0) -> None:
    """Raise `UnreachableError` unless one of the addresses takes a TCP connection. `timeout` (s) is for each of them.

    Without this look first, juicefs 0.14 waits longer than a minute for an engine that is down, and 1.3 up to minutes.
    """
    problem = "no address"
    for host, port in addresses:
        try:
            socket.create_connection((host, port), timeout=timeout).close()
            return
        except OSError as e:
            problem = f"{fs.join_address(host, port)} does not answer ({e.strerror or e})"
    raise UnreachableError(problem.lower())


def inspect(program: pathlib.Path, access: juicefs_access.Access, *, timeout: float = 8) -> Setting | None:
    """Return what the engine says of its volume; None when it says that it has none.

    Raises:
        UnreachableError: the engine does not answer (in time).
        JuicefsError: anything else, a wrong password for one.
    """
    check_reachable(access.engine.addresses)
    try:
        done = invoke(program, access, "status", access.url, timeout=timeout)
    except CommandTimeout as e:
        raise UnreachableError(f"{','.join(access.engine.hosts)} does not answer in words") from e
    except CommandError as e:
        if any(re.search(words, e.stderr) for words in _NOT_FORMATTED):
            return None
        raise JuicefsError(explain(e)) from e
    return _read_status(done)


def ensure_sticky(program: pathlib.Path, access: juicefs_access.Access, folder: str = "/") -> str:
    """Set the sticky bit on a folder of a volume where others can write it; return what was done, or nothing.

    A volume's root has mode 0777 after format, as has what mount makes for --subdir (run with 1.3.1): there any account
    can rename what is another's. What an administrator made stricter stays as it is. A folder that is absent is made.
    It needs no mount: sync (1.1 and later) copies the mode and owner of the first thing it lists, the folder itself.

    Raises:
        JuicefsError: it failed, or this program cannot.
    """
    if not has_command(version(program), "sync-perms"):
        raise JuicefsError(f"juicefs before {command_since('sync-perms')} does not show the mode of {folder}")
    inside = f"jfs://VOLUME{folder.rstrip('/')}/"
    with tempfile.TemporaryDirectory(prefix="juicefs-mode-") as scratch:  # 0700
        copy = pathlib.Path(scratch, "copy")
        copy.mkdir()
        copy.chmod(_UNREAD)
        _sync(program, access, inside, f"{copy}/")
        mode = copy.stat().st_mode & 0o7777
        if mode != _UNREAD and (not mode & 0o022 or mode & 0o1000):
            return ""
        wanted = 0o1777 if mode == _UNREAD else mode | 0o1000
        copy.chmod(wanted)  # its owner is the folder's, which stays
        _sync(program, access, f"{copy}/", inside)
        if mode == _UNREAD:
            return f"{folder} was made with mode {wanted:04o}"
        return f"{folder} had mode {mode:04o}, so others could replace what is in it: it has {wanted:04o} now"


def _sync(program: pathlib.Path, access: juicefs_access.Access, source: str, target: str) -> None:
    flags = ("--perms", "--dirs", "--limit=1")  # not --force-update: 1.3.1 crashes on a root
    try:
        invoke(program, access, "sync", *flags, source, target, env={"VOLUME": access.url}, timeout=_SYNC_S)
    except CommandTimeout as e:
        raise UnreachableError(f"juicefs sync does not end within {_SYNC_S:.0f} s") from e
    except CommandError as e:
        raise JuicefsError(f"juicefs sync: {explain(e)}") from e


def removal(program: pathlib.Path, mine: Version, folder: str) -> tuple[tuple[str, ...], ...]:
    """Return the commands that remove a folder of a mounted volume, past the trash where the program knows how."""
    plain = ("/usr/bin/rm", "-rf", "--one-file-system", folder)
    past = (str(program), "--no-agent", "rmr", "--skip-trash", folder)
    return (past, plain) if knows(mine, "skip-trash") else (plain,)


def invoke(
    program: pathlib.Path,
    access: juicefs_access.Access,
    *arguments: str,
    env: collections.abc.Mapping[str, str] | None = None,
    timeout: float,
) -> str:
    """Run the program with the credentials in its environment, and `env`; return its standard output."""
    return run_program(program, access, *arguments, env=env, timeout=timeout).stdout


def run_program(
    program: pathlib.Path,
    access: juicefs_access.Access,
    *arguments: str,
    env: collections.abc.Mapping[str, str] | None = None,
    timeout: float,
) -> Completed:
    """Run the program with the credentials in its environment, and `env`; return what it said."""
    variables = access.environment | dict(env or {})
    return _run(program, "--no-agent", *arguments, env=variables, timeout=timeout, secrets=access.secrets)


def _run(program: pathlib.Path, *arguments: str, **keywords: typing.Any) -> Completed:
    """Run the program; again when it died before it began.

    0.14 lists the host's addresses when it is loaded, and panics when a network interface goes at that moment.
    """
    for pause in (0.1, 1.0):
        try:
            return run(program, *arguments, **keywords)
        except CommandError as e:
            if not _DIED_AT_START.search(e.stderr):
                raise
            time.sleep(pause)
    return run(program, *arguments, **keywords)


def explain(error: CommandError) -> str:
    """Return the reason that the program gave before it ended, as one line."""
    return reason(error.stderr) or last_line(str(error))


def reason(log: str) -> str:
    """Return what the last fatal line of the program's log says, or else the last error; nothing if there is none."""
    if any(words in log for words in _REFUSED):
        return "the metadata engine refuses the user or password"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    if crash := re.search(r"^panic: (.*)", plain, re.MULTILINE):  # as 0.14.2's fsck does on an SFTP store
        return f"juicefs crashed: {last_line(crash[1])}"
    for level in ("FATAL", "ERROR"):
        if found := re.findall(rf"<{level}>: (.*)", plain):
            if refused := _STORE_REFUSED.search(found[-1]):
                return f"the object store refuses the keys ({refused[1]})"
            if _OLD_MYSQL in found[-1]:  # juicefs 1.3.0 and 1.3.1, its issue 6762
                return "this database is too old for this juicefs: it takes MySQL 8.0 or MariaDB 11.1, or newer"
            if any(re.search(words, found[-1]) for words in _NOT_FORMATTED):  # 1.x would have a person format it
                return "the metadata engine holds no volume: look at the charm that offers it"
            return last_line(without_place(found[-1]))
    return ""


def without_place(line: str) -> str:
    """Return a line of the program's log without the place in its source: [main.go:31], or [main@main.go:31] of 1.3."""
    return re.sub(r" \[(?:\w+@)?\w+\.go:\d+\]$", "", line)


def _read_status(text: str) -> Setting:
    # 0.14 on SQL engines prints log lines before the JSON
    lines = text.splitlines()
    try:
        document = typing.cast("dict[str, typing.Any]", json.loads("\n".join(lines[lines.index("{") :])))
        setting = typing.cast("dict[str, typing.Any]", document["Setting"])
        stat = typing.cast("dict[str, typing.Any]", document.get("Stat") or {})
        return Setting(
            name=str(setting["Name"]),
            uuid=str(setting["UUID"]),
            storage=str(setting.get("Storage", "")),
            bucket=str(setting.get("Bucket", "")),
            clients=_live(document.get("Sessions") or []),
            block_kib=int(setting.get("BlockSize") or 4096),
            compression=str(setting.get("Compression") or "none"),
            encrypted=bool(setting.get("EncryptKey")) if "TrashDays" in setting else None,
            capacity_gib=int(setting.get("Capacity") or 0) >> 30,
            inodes=int(setting.get("Inodes") or 0),
            trash_days=int(setting.get("TrashDays") or 0),
            used_bytes=stat.get("UsedSpace"),
            used_inodes=stat.get("UsedInodes"),
        )
    except (ValueError, KeyError, TypeError) as e:
        raise JuicefsError("juicefs status printed something unexpected") from e


def _live(sessions: list[dict[str, typing.Any]]) -> tuple[str, ...]:
    """Return the clients whose session has not expired, sorted.

    1.x takes a session away when its client unmounts, and lists that of one that was killed until another client clears
    it away: its time to live was renewed every 12 s, to a minute. 0.14 never takes one away, and beats once a minute.
    """
    now, found = datetime.datetime.now(datetime.timezone.utc), list[str]()  # noqa: UP017 - Python 3.10
    for session in sessions:
        if "Expire" in session:
            ends = datetime.datetime.fromisoformat(session["Expire"])
        else:
            ends = datetime.datetime.fromisoformat(session["Heartbeat"]) + _OLD_SESSION
        if ends > now:
            found.append(f"{session.get('HostName') or session.get('Hostname')} at {session.get('MountPoint')}")
    return tuple(sorted(found))


def _unpack(content: bytes) -> bytes:
    """Return the program from a tarball; anything else is taken for the program itself."""
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            member = next(
                (item for item in archive if pathlib.PurePath(item.name).name == "juicefs" and item.isfile()), None
            )
            file = archive.extractfile(member) if member is not None and member.size < _LARGEST_BYTES else None
            if file is None:
                raise JuicefsError("the juicefs tarball has no program named juicefs in it")
            return file.read()
    except (tarfile.TarError, gzip.BadGzipFile, EOFError) as e:
        raise JuicefsError("the juicefs tarball is damaged") from e


def _fetch_release() -> bytes:
    """Return the pinned release's tarball, whose checksum is right."""
    arch = _ARCHITECTURES.get(platform.machine())
    if arch is None:
        raise DownloadError(f"juicefs {RELEASE} is not released for {platform.machine()}")
    proxies = {
        scheme: os.environ[f"JUJU_CHARM_{scheme.upper()}_PROXY"]
        for scheme in ("http", "https")
        if os.environ.get(f"JUJU_CHARM_{scheme.upper()}_PROXY")
    }
    handlers = [urllib.request.ProxyHandler(proxies)] if proxies else []
    url = _RELEASE_URL.format(version=RELEASE, arch=arch)
    host = urllib.parse.urlsplit(url).hostname
    content, end = bytearray(), time.monotonic() + _DOWNLOAD_S
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=20) as answer:
            while block := answer.read(1 << 20):
                content += block
                if len(content) > _LARGEST_BYTES or time.monotonic() > end:
                    raise DownloadError(f"juicefs {RELEASE}: {host} sends too much, or too slowly")
    except (OSError, http.client.HTTPException) as e:  # urllib's errors are among the first
        reason = e.reason if isinstance(e, urllib.error.URLError) else e
        raise DownloadError(f"juicefs {RELEASE}: no download from {host} ({last_line(str(reason))})") from e
    if hashlib.sha256(content).hexdigest() != _SHA256[arch]:
        raise DownloadError(f"juicefs {RELEASE}: what {host} sent has another checksum than the release")
    return bytes(content)

"""The program `juicefs`: its source, its versions' abilities, and the meaning of its output."""

import collections.abc
import contextlib
import dataclasses
import datetime
import gzip
import hashlib
import io
import json
import pathlib
import platform
import re
import tarfile
import tempfile
import time
import typing
import urllib.parse

from slurm_ddp import download, juicefs_access, mounts
from slurm_ddp.charm import Level, StatusError
from slurm_ddp.commands import CommandError, CommandTimeout, Completed, last_line, run

RELEASE = "1.4.1"  # installed if the charm has no resource
_RELEASE_URL = "https://github.com/juicedata/juicefs/releases/download/v{version}/juicefs-{version}-linux-{arch}.tar.gz"
_SHA256: dict[str, str] = juicefs_access.FACTS["checksums"]
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LARGEST_BYTES = 512 << 20  # a tarball or program beyond this is something else
_DOWNLOAD_S = 600.0

OLDEST = (1, 3)  # the version before ends at a SIGHUP
# The version that introduced a flag that users may set
SINCE = {"hide-internal": (1, 4), "max-downloads": (1, 4)}
_SYNC_S = 30.0
_UNREAD = 0o2001  # the mode of a folder whose mode was not replaced by one that was read
_DIED_AT_START = re.compile(r"^panic: (?s:.*)/minio@[^/\s]+/cmd/net\.go:\d+", re.MULTILINE)
TRASH = "/.trash"  # in a volume's root
_NOT_FORMATTED = "database is not formatted"  # what `status` reports of an engine without a volume
Version = tuple[int, int, int]


class JuicefsError(Exception):
    """juicefs, or something that it needs, failed. `str()` is one line without secrets."""


class UnreachableError(JuicefsError):
    """A server does not answer, which may end by itself."""


class DownloadError(JuicefsError):
    """The program could not be fetched."""


class OldProgramError(JuicefsError):
    """The program is older than `OLDEST`."""


@contextlib.contextmanager
def explained(
    app: str,
    wait: collections.abc.Callable[[Exception], str] = str,
    *,
    passing: tuple[type[Exception], ...] = (),
    lasting: tuple[type[Exception], ...] = (),
) -> collections.abc.Generator[None]:
    """Raise the `StatusError` of the charm `app` for a failure inside.

    It waits, with the text of `wait`, for a server that does not answer and `passing` failures,
    which may end by themselves. The operator must resolve `lasting` ones, and failures of juicefs
    and other commands.
    """
    attach = f"juju attach-resource {app} juicefs=FILE"
    remedies: dict[type[Exception], str] = {
        DownloadError: f"{attach}: ",
        OldProgramError: f"{attach}: ",
    }
    try:
        yield
    except (UnreachableError, *passing) as e:
        raise StatusError(Level.WAITING, wait(e), retry=True) from e
    except (JuicefsError, CommandError, *lasting) as e:
        raise StatusError(Level.BLOCKED, f"{remedies.get(type(e), '')}{e}") from e


@dataclasses.dataclass(frozen=True)
class Setting:
    """A volume's settings in its metadata engine."""

    name: str
    uuid: str
    storage: str = ""
    bucket: str = ""
    clients: tuple[str, ...] = ()  # that have it mounted now, as HOST at MOUNTPOINT
    block_kib: int = 4096
    compression: str = "none"
    encrypted: bool = False
    capacity_gib: int = 0  # 0: no limit
    inodes: int = 0  # 0: no limit
    trash_days: int = 0
    used_bytes: int = 0
    used_inodes: int = 0


def ensure_program(target: pathlib.Path, resource: pathlib.Path | None) -> bool:
    """Install `resource`, or else the pinned release, as `target`; return whether it changed.

    A resource is a program or a release's tarball.

    Raises:
        DownloadError: there is no resource, and the release could not be fetched or has another
            checksum.
        JuicefsError: the resource is not a juicefs that runs on this machine.
    """
    stat = resource.stat() if resource is not None else None
    if stat is None or stat.st_size == 0:  # a placeholder, as one is uploaded to a store
        resource, source = None, f"release {RELEASE}"
    else:
        source = f"resource {stat.st_size} {stat.st_mtime_ns}"
    stamp = target.with_name(f"{target.name}.source")
    if target.exists() and stamp.exists() and stamp.read_text() == source:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.new")
    try:
        new.write_bytes(
            _unpack(resource.read_bytes() if resource is not None else _fetch_release())
        )
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
    """Return the version of the program.

    Raises `CommandError` if it does not run, `OldProgramError` before `OLDEST`.
    """
    printed = _run(program, "--version", timeout=20).stdout
    found = re.search(r"version v?(\d+)\.(\d+)\.(\d+)", printed)
    if found is None:
        raise CommandError(f"{program.name}: cannot read its version from {last_line(printed)!r}")
    parsed = (int(found[1]), int(found[2]), int(found[3]))
    if parsed < OLDEST:
        raise OldProgramError(f"juicefs {text(parsed)} is too old: attach {text(OLDEST)} or newer")
    return parsed


def text(version: tuple[int, ...]) -> str:
    """Write a version: 1.3.1."""
    return ".".join(map(str, version))


def flags(wanted: collections.abc.Mapping[str, str | bool]) -> list[str]:
    """Write flags as arguments, without those that are False."""
    words: list[str] = []
    for name, value in wanted.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words.append(f"--{name}={value}")
    return words


def check_reachable(
    addresses: collections.abc.Iterable[tuple[str, int]], *, timeout: float = 3.0
) -> None:
    """Raise `UnreachableError` unless one of the addresses takes a TCP connection.

    Each address gets `timeout` seconds.

    juicefs itself waits up to minutes for an engine that is down.
    """
    if problem := mounts.unreachable(addresses, timeout=timeout):
        raise UnreachableError(problem)


def inspect(
    program: pathlib.Path, access: juicefs_access.Access, *, timeout: float = 8
) -> Setting | None:
    """Ask the engine for its volume; None when it reports that it has none.

    Raises:
        UnreachableError: the engine does not answer (in time).
        JuicefsError: anything else, such as a wrong password.
    """
    check_reachable(access.engine.addresses)
    try:
        return _read_status(invoke(program, access, "status", access.url, timeout=timeout).stdout)
    except CommandTimeout as e:
        raise UnreachableError(
            f"{','.join(access.engine.hosts)} accepts connections and does not respond"
        ) from e
    except CommandError as e:
        if _NOT_FORMATTED in e.stderr:
            return None
        raise JuicefsError(explain(e)) from e


def ensure_sticky(program: pathlib.Path, access: juicefs_access.Access, folder: str = "/") -> str:
    """Make a volume's folder, or set its sticky bit if others can write to it.

    Returns a line that describes the change, or "".

    After format a volume's root has mode 0777, and so has a folder that mount makes for --subdir
    (1.3.1): any account can rename another's files. It needs no mount: sync copies mode and owner
    of the first thing it lists, the folder itself. Raises `JuicefsError`.
    """
    found, wanted = _change_mode(program, access, folder, _sticky)
    if found == wanted:
        return ""
    if found == _UNREAD:
        return f"{folder} was made with mode {wanted:04o}"
    return f"{folder} had mode {found:04o}, so others could replace what is in it: it has {wanted:04o} now"


def ensure_private_trash(program: pathlib.Path, access: juicefs_access.Access) -> bool:
    """Close a volume's trash to all but root; return whether it was open. Raises `JuicefsError`.

    After format it has mode 0555, and deleted files keep their own mode in it, so anybody could
    read a file of mode 0644 that was in a folder of mode 0700. Only mounts with --subdir, /
    included, take the trash's mode from the engine (1.3.1 and 1.4.1, NewVFS in pkg/vfs/vfs.go); the
    others show 0555.
    """
    found, wanted = _change_mode(program, access, TRASH, lambda _: 0o700)
    return found != wanted


def _sticky(mode: int) -> int:
    if mode == _UNREAD:
        return 0o1777
    return mode | 0o1000 if mode & 0o022 else mode


def _change_mode(
    program: pathlib.Path,
    access: juicefs_access.Access,
    folder: str,
    choose: collections.abc.Callable[[int], int],
) -> tuple[int, int]:
    """Give a folder the mode chosen for its present one, and return both.

    An absent folder has _UNREAD.
    """
    inside = f"jfs://VOLUME{folder.rstrip('/')}/"
    with tempfile.TemporaryDirectory(prefix="juicefs-mode-") as scratch:  # 0700
        copy = pathlib.Path(scratch, "copy")
        copy.mkdir()
        copy.chmod(_UNREAD)
        _sync(program, access, inside, f"{copy}/")
        found = copy.stat().st_mode & 0o7777
        wanted = choose(found)
        if wanted != found:
            copy.chmod(wanted)  # its owner is the folder's, which stays
            _sync(program, access, f"{copy}/", inside)
        return found, wanted


def _sync(program: pathlib.Path, access: juicefs_access.Access, source: str, target: str) -> None:
    flags = ("--perms", "--dirs", "--limit=1")  # not --force-update: 1.3.1 crashes on a root
    try:
        invoke(
            program,
            access,
            "sync",
            *flags,
            source,
            target,
            env={"VOLUME": access.url},
            timeout=_SYNC_S,
        )
    except CommandTimeout as e:
        raise UnreachableError(f"juicefs sync did not end within {_SYNC_S:.0f} s") from e
    except CommandError as e:
        raise JuicefsError(f"juicefs sync: {explain(e)}") from e


def invoke(
    program: pathlib.Path,
    access: juicefs_access.Access,
    *arguments: str,
    env: collections.abc.Mapping[str, str] | None = None,
    timeout: float,
) -> Completed:
    """Run the program with the credentials in its environment, and `env`."""
    variables = access.environment | dict(env or {})
    return _run(
        program, "--no-agent", *arguments, env=variables, timeout=timeout, secrets=access.secrets
    )


def _run(program: pathlib.Path, *arguments: str, **keywords: typing.Any) -> Completed:
    """Run the program, up to three times.

    It lists the host's addresses when it is loaded, and panics if an interface is removed at that
    moment (minio's cmd/net.go).
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
    """State why the program failed, as one line."""
    return reason(error.stderr) or last_line(str(error))


def reason(log: str) -> str:
    """Explain the log's last fatal line, or else its last error; "" if it has neither."""
    if any(words in log for words in juicefs_access.FACTS["refusals"]):
        return "the metadata engine refuses the user or password"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    if crash := re.search(r"^panic: (.*)", plain, re.MULTILINE):
        return f"juicefs crashed: {last_line(crash[1])}"
    errors = re.findall(r"<FATAL>: (.*)", plain) or re.findall(r"<ERROR>: (.*)", plain)
    meanings: dict[str, str] = juicefs_access.FACTS["meanings"]
    for pattern, meaning in meanings.items() if errors else ():
        if found := re.search(pattern, errors[-1]):
            return meaning.format(found[0])
    return last_line(without_place(errors[-1])) if errors else ""


def without_place(line: str) -> str:
    """Return a line of the log without its place in the source.

    That is [main.go:31], or [main@main.go:31] of 1.3.
    """
    return re.sub(r" \[(?:\w+@)?\w+\.go:\d+\]$", "", line)


def _read_status(printed: str) -> Setting:
    lines = printed.splitlines()  # the JSON may follow lines of the log
    try:
        document = typing.cast(
            "dict[str, typing.Any]", json.loads("\n".join(lines[lines.index("{") :]))
        )
        setting = typing.cast("dict[str, typing.Any]", document["Setting"])
        stat = typing.cast("dict[str, typing.Any]", document.get("Stat") or {})
        if not setting.get("MetaVersion"):  # which every version since 1.0 writes
            remedy = (
                "deploy another application, and copy its files to a new volume with juicefs sync"
            )
            raise JuicefsError(
                f"volume {setting['Name']} was made by a juicefs before 1.0, too old: {remedy}"
            )
        texts = {
            "name": "Name",
            "uuid": "UUID",
            "storage": "Storage",
            "bucket": "Bucket",
            "compression": "Compression",
        }
        numbers = {"block_kib": "BlockSize", "inodes": "Inodes", "trash_days": "TrashDays"}
        numbers |= {"used_bytes": "UsedSpace", "used_inodes": "UsedInodes"}
        found = setting | stat
        values: dict[str, typing.Any] = {
            field: str(found[key]) for field, key in texts.items() if found.get(key)
        }
        values |= {field: int(found[key]) for field, key in numbers.items() if found.get(key)}
        return Setting(
            **values,
            clients=_live(document.get("Sessions") or []),
            encrypted=bool(setting.get("EncryptKey")),
            capacity_gib=int(setting.get("Capacity") or 0) >> 30,
        )
    except (ValueError, KeyError, TypeError) as e:
        raise JuicefsError("juicefs status printed unexpected output") from e


def _live(sessions: list[dict[str, typing.Any]]) -> tuple[str, ...]:
    """Return the clients whose session has not expired; a killed one stays listed until then.

    A session is renewed every 12 s to a minute.
    """
    now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017 - Python 3.10
    live = (
        session for session in sessions if datetime.datetime.fromisoformat(session["Expire"]) > now
    )
    return tuple(
        sorted(f"{session.get('HostName')} at {session.get('MountPoint')}" for session in live)
    )


def _unpack(content: bytes) -> bytes:
    """Extract the program from a tarball; anything else is the program itself."""
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            for member in archive:
                if (
                    pathlib.PurePath(member.name).name == "juicefs"
                    and member.isfile()
                    and member.size < _LARGEST_BYTES
                ):
                    return typing.cast("typing.IO[bytes]", archive.extractfile(member)).read()
    except (tarfile.TarError, gzip.BadGzipFile, EOFError) as e:
        raise JuicefsError("the juicefs tarball is damaged") from e
    raise JuicefsError("the juicefs tarball has no program named juicefs in it")


def _fetch_release() -> bytes:
    """Download the pinned release's tarball and check its checksum."""
    arch = _ARCHITECTURES.get(platform.machine())
    if arch is None:
        raise DownloadError(f"juicefs {RELEASE} is not released for {platform.machine()}")
    url = _RELEASE_URL.format(version=RELEASE, arch=arch)
    try:
        content = download.fetch(url, most_bytes=_LARGEST_BYTES, timeout=_DOWNLOAD_S)
    except download.DownloadError as e:
        raise DownloadError(f"juicefs {RELEASE}: {e}") from e
    if hashlib.sha256(content).hexdigest() != _SHA256[arch]:
        host = urllib.parse.urlsplit(url).hostname
        raise DownloadError(
            f"juicefs {RELEASE}: what {host} sent has another checksum than the release"
        )
    return content

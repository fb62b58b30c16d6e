"""The program `juicefs`: where it comes from, what each version of it can do, and what its words mean.

Sources: the source of juicefs at the tags v0.14.2, v1.0.0 to v1.3.1 and v1.4.1, and runs of 0.14.2.
"""

import collections.abc
import dataclasses
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
import time
import typing
import urllib.error
import urllib.parse
import urllib.request

from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.run import CommandError, CommandTimeout, last_line, run

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

ENGINES = ("redis",)  # metadata engines that this code can address
# The variables that the drivers of the object stores read when the volume holds no keys
_KEY_VARIABLES = {
    "s3": {
        "access-key": "AWS_ACCESS_KEY_ID",
        "secret-key": "AWS_SECRET_ACCESS_KEY",
        "session-token": "AWS_SESSION_TOKEN",
    },
    "minio": {"access-key": "MINIO_ACCESS_KEY", "secret-key": "MINIO_SECRET_KEY"},
}
KEYLESS_STORES = tuple(_KEY_VARIABLES)

# The version that introduced each flag. A flag that a program does not know is fatal, so it is left out there; every
# one below only tunes, or has another spelling for older programs.
_SINCE = {
    "backup-meta": (1, 0),
    "bucket": (0, 14),
    "buffer-size": (0, 14),
    "cache-dir": (0, 14),
    "cache-size": (0, 14),
    "free-space-ratio": (0, 14),
    "no-syslog": (0, 14),
    "no-update": (0, 14),
    "no-usage-report": (0, 14),
    "read-only": (0, 15),
    "storage": (0, 14),
    "subdir": (0, 15),
}
# juicefs of the 1.x series and the ones before read each other's volumes badly or not at all
_FIRST_STABLE = (1, 0)

# What `status` says of an engine without a volume: 1.x; 0.14 on Redis
_NOT_FORMATTED = ("database is not formatted", "load setting: no volume found")
_REFUSED = ("NOAUTH", "WRONGPASS", "wrong number of arguments for 'auth' command", "NOPERM")

Version = tuple[int, int, int]


class JuicefsError(Exception):
    """juicefs, or something that it needs, failed. `str()` is one line without secrets."""


class UnreachableError(JuicefsError):
    """A server does not answer; it may come back by itself."""


class DownloadError(JuicefsError):
    """The program could not be fetched."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """A metadata engine's address."""

    kind: str  # one of fs.ENGINES
    hosts: tuple[str, ...]  # each HOST:PORT
    db: str
    tls: bool = False
    params: str = ""

    @classmethod
    def of(cls, volume: fs.Juicefs) -> "Engine":
        """Return the engine that holds a published volume."""
        return cls(volume.engine, volume.hosts, volume.db, volume.tls, volume.params)

    def url(self, user: str | None = None) -> str:
        """Return the META-URL; it never has a password in it."""
        if self.kind not in ENGINES:
            raise JuicefsError(f"metadata engine {self.kind} is not supported yet")
        scheme = {"redis": "rediss" if self.tls else "redis"}[self.kind]
        login = f"{urllib.parse.quote(user, safe='')}@" if user else ""
        query = f"?{self.params}" if self.params else ""
        return f"{scheme}://{login}{','.join(self.hosts)}/{self.db}{query}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a metadata engine says of its volume."""

    name: str
    uuid: str
    storage: str
    bucket: str
    sessions: int  # clients that have it mounted and may write


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
    said = run(program, "--version", timeout=20).stdout
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


def same_series(one: Version, other: Version) -> bool:
    """Tell whether both versions can use the same volume."""
    return (one >= _FIRST_STABLE) == (other >= _FIRST_STABLE)


def parse_version(text: str) -> Version | None:
    """Return the version that a text like 1.3.1 names."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def environment(secret: fs.JuicefsSecret, *, store: str = "", keyless: bool = False) -> dict[str, str]:
    """Return the variables with credentials for the program: the engine's, and a keyless volume's store's."""
    content = secret.content()
    variables = {"meta-password": "REDIS_PASSWORD"}
    if keyless:
        variables |= _KEY_VARIABLES.get(store, {})
    return {variable: content[key] for key, variable in variables.items() if key in content}


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


def inspect(program: pathlib.Path, engine: Engine, secret: fs.JuicefsSecret, *, timeout: float = 20) -> Setting | None:
    """Return what the engine says of its volume; None when it says that it has none.

    Raises:
        UnreachableError: the engine does not answer (in time).
        JuicefsError: anything else, a wrong password for one.
    """
    addresses = [(host, port or 0) for host, port in map(fs.split_address, engine.hosts)]
    check_reachable(addresses)
    try:
        done = invoke(program, "status", engine.url(secret.meta_user), secret=secret, timeout=timeout)
    except CommandTimeout as e:
        raise UnreachableError(f"{','.join(engine.hosts)} does not answer in words") from e
    except CommandError as e:
        if any(words in e.stderr for words in _NOT_FORMATTED):
            return None
        raise JuicefsError(explain(e)) from e
    return _read_status(done)


def invoke(
    program: pathlib.Path,
    *arguments: str,
    secret: fs.JuicefsSecret,
    env: collections.abc.Mapping[str, str] | None = None,
    timeout: float,
) -> str:
    """Run the program with the engine's password in its environment, and `env`; return its standard output."""
    variables = environment(secret) | dict(env or {})
    return run(program, "--no-agent", *arguments, env=variables, timeout=timeout, secrets=secret.values()).stdout


def explain(error: CommandError) -> str:
    """Return the reason that the program gave before it ended, as one line."""
    return reason(error.stderr) or last_line(str(error))


def reason(log: str) -> str:
    """Return what the last fatal line of the program's log says, or else the last error; nothing if there is none."""
    if any(words in log for words in _REFUSED):
        return "the metadata engine refuses the user or password"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    for level in ("FATAL", "ERROR"):
        if found := re.findall(rf"<{level}>: (.*)", plain):
            return last_line(re.sub(r" \[\w+\.go:\d+\]$", "", found[-1]))
    return ""


def _read_status(text: str) -> Setting:
    # 0.14 on SQL engines prints log lines before the JSON
    lines = text.splitlines()
    try:
        document = typing.cast("dict[str, typing.Any]", json.loads("\n".join(lines[lines.index("{") :])))
        setting = typing.cast("dict[str, typing.Any]", document["Setting"])
        return Setting(
            name=str(setting["Name"]),
            uuid=str(setting["UUID"]),
            storage=str(setting.get("Storage", "")),
            bucket=str(setting.get("Bucket", "")),
            sessions=len(document.get("Sessions") or []),
        )
    except (ValueError, KeyError, TypeError) as e:
        raise JuicefsError("juicefs status printed something unexpected") from e


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

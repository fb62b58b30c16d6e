"""What actions do to a volume: check, clean, back up, restore, limit, measure.

Commands that can take long run beside a loop that logs how long they have been running. Their output, which holds names
of files, is kept on the unit for root alone.
"""

import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import datetime
import gzip
import hashlib
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time

from slurm_ddp import apt, juicefs, juicefs_access, mounts
from slurm_ddp.charm import ActionError, Log, Results
from slurm_ddp.run import CommandError, clean_env, last_line, run, scrub
from volume.spec import Volume

STATE_DIR = pathlib.Path("/var/lib/slurm-ddp")
_DROP_CACHES = pathlib.Path("/proc/sys/vm/drop_caches")
_LONG_S = 24 * 3600.0
_SHORT_S = 120.0
_BEAT_S = 15.0
_MOUNT_S = 60.0
_HEAD_BYTES = 1 << 16  # of a backup: its setting stands first


@dataclasses.dataclass(frozen=True)
class Target:
    """A volume, and what works on it."""

    app: str
    program: pathlib.Path
    volume: Volume
    access: juicefs_access.Access

    @property
    def directory(self) -> pathlib.Path:
        """Return where reports and backups lie."""
        return STATE_DIR / self.app


def check(target: Target, *, repair: bool, path: str, timeout_s: float, log: Log) -> Results:
    """Check that every block of every file is in the object store; return what was found."""
    flags: list[str] = []
    if path or repair:
        flags += [f"--path={path or '/'}", "--recursive", *(["--repair"] if repair else [])]
    report, failure = _long(target, "fsck", target.access.url, *flags, timeout_s=timeout_s, log=log)
    if failure is not None:
        raise ActionError(f"fsck: {juicefs.explain(failure)}; its whole report: {report}")
    return {"state": "clean", "summary": _summary(report), "report": str(report)}


def collect_garbage(target: Target, *, delete: bool, compact: bool, timeout_s: float, log: Log) -> Results:
    """Find blocks that no file uses; delete them, and join fragments, if asked to; return what was found."""
    flags = [*(["--delete"] if delete else []), *(["--compact"] if compact else [])]
    report, failure = _long(target, "gc", target.access.url, *flags, timeout_s=timeout_s, log=log)
    if failure is not None:
        raise ActionError(f"gc: {juicefs.explain(failure)}; its whole report: {report}")
    did = "deleted" if delete else "dry run: nothing was deleted; delete=true does"
    return {"mode": did, "summary": _summary(report), "report": str(report)}


def back_up(target: Target, uuid: str, *, timeout_s: float, log: Log) -> Results:
    """Write all metadata, without credentials, into a file on this machine; return where it is."""
    folder = target.directory / "backups"
    _private(folder)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    path = folder / f"{target.volume.name}-{stamp}.json.gz"
    partial = path.with_name(f".{path.name.removesuffix('.gz')}.{os.getpid()}.gz")  # another may begin this second
    partial.touch(mode=0o600)
    try:
        report, failure = _long(target, "dump", target.access.url, str(partial), timeout_s=timeout_s, log=log)
        if failure is not None:
            raise ActionError(f"dump: {juicefs.explain(failure)}; its whole report: {report}")
        found = _uuid_of(partial)
        if found != uuid:
            raise ActionError(f"the backup is of volume {found or 'unknown'}, not {uuid}: it is not kept")
        partial.chmod(0o600)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return {"file": str(path), "bytes": str(path.stat().st_size), "sha256": _digest(path), "uuid": uuid}


def restore(target: Target, path: pathlib.Path, uuid: str, *, timeout_s: float, log: Log) -> Results:
    """Load a backup of volume `uuid` into an engine that holds nothing; return what is there then."""
    if not target.volume.keyless:
        raise ActionError(
            "an embedded volume keeps its metadata in the unit's storage, in Redis' append-only log: bring that back"
        )
    if not path.is_file() or path.is_symlink():
        raise ActionError(f"file: {path} is not there: juju scp BACKUP UNIT:/tmp/ first")
    found = _uuid_of(path)
    if found != uuid:
        raise ActionError(f"uuid: {path.name} is a backup of volume {found or 'unknown'}, not {uuid}")
    there = juicefs.inspect(target.program, target.access)
    if there is not None:
        raise ActionError(
            f"the metadata engine holds volume {there.name} ({there.uuid}): a backup goes into an empty one only"
        )
    report, failure = _long(target, "load", target.access.url, str(path), timeout_s=timeout_s, log=log)
    if failure is not None:
        raise ActionError(f"load: {juicefs.explain(failure)}; its whole report: {report}")
    there = juicefs.inspect(target.program, target.access)
    if there is None or there.uuid != uuid:
        raise ActionError(f"after load the metadata engine does not hold volume {uuid}; the report: {report}")
    return {"uuid": there.uuid, "volume": there.name, "report": str(report)}


def set_quota(target: Target, path: str, *, capacity_gib: int, inodes: int, delete: bool) -> Results:
    """Limit what a folder of the volume may hold, or lift its limits; return them as they are then."""
    if delete:
        _quota(target, "delete", "--path", path)
        return {"path": path, "capacity-gib": "unlimited", "inodes": "unlimited"}
    limits = [
        *(["--capacity", str(capacity_gib)] if capacity_gib else []),
        *(["--inodes", str(inodes)] if inodes else []),
    ]
    _quota(target, "set", "--path", path, *limits)
    for quota in list_quotas(target):
        if quota["path"] == path:
            return quota
    raise ActionError(f"path: juicefs knows no quota of {path} after it was set")


def list_quotas(target: Target) -> list[dict[str, str]]:
    """Return the quotas of the volume's folders."""
    return read_quotas(_quota(target, "list"))


def read_quotas(table: str) -> list[dict[str, str]]:
    """Return the rows of the table that `juicefs quota list` draws, with bars or with boxes."""
    names = ("path", "size", "used", "used-percent", "inodes", "inodes-used", "inodes-used-percent")
    found: list[dict[str, str]] = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"[|\u2502\u2503]", line.strip().strip("|\u2502\u2503"))]
        if len(cells) == len(names) and cells[0].startswith("/"):
            found.append(dict(zip(names, cells, strict=True)))
    return found


def benchmark(target: Target, *, big_mib: int, small_files: int, timeout_s: float, log: Log) -> Results:
    """Mount the volume on this machine for a moment, without a cache, and measure it; return the figures."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise ActionError("/dev/fuse does not open here: run the action benchmark of shared-filesystem-client")
    apt.ensure_packages(["fuse3"])
    version, env = juicefs.version(target.program), dict[str, str]()
    if juicefs.knows(version, "skip-trash"):
        env["PATH"] = ""  # it finds no `rm` then, which would put what it wrote into the trash, and only says so
    if not os.access(_DROP_CACHES, os.W_OK):  # a container
        env["SKIP_DROP_CACHES"] = "true"
    _private(target.directory)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=target.directory) as scratch:
        mountpoint, cache = pathlib.Path(scratch) / "mnt", pathlib.Path(scratch) / "cache"
        mountpoint.mkdir()
        # A cache of next to nothing: it is the engine and the store that are measured
        flags = juicefs.flags(
            version,
            {
                "no-usage-report": True,
                "no-syslog": True,
                "cache-dir": str(cache),
                "cache-size": "1",
                "backup-meta": "0",
            },
        )
        with _mounted(target, flags, mountpoint):
            log(f"mounted; writing and reading {big_mib} MiB and {small_files} small files")
            words = [f"--big-file-size={big_mib}", f"--small-file-count={small_files}", "--small-file-size=0.1"]
            folder = str(mountpoint / f".benchmark-{secrets.token_hex(8)}")
            run("/usr/bin/mkdir", folder, timeout=_SHORT_S)
            try:
                with _beating("bench", log) as beat:
                    output = beat(
                        lambda: juicefs.invoke(
                            target.program, target.access, "bench", *words, folder, env=env, timeout=timeout_s
                        )
                    )
            finally:
                for command in juicefs.removal(target.program, version, folder):
                    run(*command, timeout=_SHORT_S)
        return read_benchmark(output)


def read_benchmark(output: str) -> Results:
    """Return the figures in the table that `juicefs bench` prints."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    figure = r"\s*([0-9.]+ [^|]+?)\s*\|"
    rows = re.findall(rf"^[|\s]*([A-Z][A-Za-z ]+?)\s*\|{figure}{figure}", plain, re.MULTILINE)
    found = {name.lower().replace(" ", "-"): f"{value}, {cost}" for name, value, cost in rows}
    if not found:
        raise ActionError("juicefs bench returned unexpected output")
    return found


@contextlib.contextmanager
def _mounted(target: Target, flags: list[str], mountpoint: pathlib.Path) -> collections.abc.Generator[None]:
    argv = [
        str(target.program),
        "--no-agent",
        "mount",
        *flags,
        "-o",
        "nosuid,nodev",
        target.access.url,
        str(mountpoint),
    ]
    with (mountpoint.parent / "log").open("w+") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=clean_env(target.access.environment),
            start_new_session=True,
        )
        try:
            end = time.monotonic() + _MOUNT_S
            while not mounts.at(str(mountpoint)):
                if process.poll() is not None or time.monotonic() > end:
                    output.seek(0)
                    text = scrub(output.read(), target.access.secrets)
                    raise ActionError(
                        f"mount: {juicefs.reason(text) or last_line(text) or f'not mounted within {_MOUNT_S:.0f} s'}"
                    )
                time.sleep(0.1)
            yield
        finally:
            subprocess.run(["/bin/umount", "-l", str(mountpoint)], check=False, capture_output=True, timeout=30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(_MOUNT_S)


@contextlib.contextmanager
def _beating(
    what: str, log: Log
) -> collections.abc.Generator[collections.abc.Callable[[collections.abc.Callable[[], str]], str]]:
    """Yield a function that runs another one and logs every now and then how long it has taken."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def beat(function: collections.abc.Callable[[], str]) -> str:
            began, future = time.monotonic(), pool.submit(function)
            while True:
                try:
                    return future.result(timeout=_BEAT_S)
                except concurrent.futures.TimeoutError:
                    if future.done():
                        raise
                    log(f"{what}: {time.monotonic() - began:.0f} s")

        yield beat


def _long(
    target: Target, command: str, *arguments: str, timeout_s: float, log: Log
) -> tuple[pathlib.Path, CommandError | None]:
    """Run a command that may take long; return the file with its output, and its error if it failed."""
    folder = target.directory / "reports"
    _private(folder)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    report, failure = folder / f"{command}-{stamp}-{os.getpid()}.log", None  # another may begin this second
    log(f"{command} of volume {target.volume.name} started")
    with _beating(command, log) as beat:
        try:
            output = beat(lambda: _both(target, command, *arguments, timeout_s=timeout_s))
        except CommandError as e:
            output, failure = e.stdout + e.stderr or f"{e}\n", e
    report.touch(mode=0o600)
    report.write_text(output)
    for old in sorted(folder.glob(f"{command}-*.log"))[:-10]:
        old.unlink(missing_ok=True)
    return report, failure


def _both(target: Target, command: str, *arguments: str, timeout_s: float) -> str:
    """Return a command's standard output and error."""
    done = juicefs.run_program(target.program, target.access, command, *arguments, timeout=min(timeout_s, _LONG_S))
    return done.stdout + done.stderr


def _quota(target: Target, verb: str, *arguments: str) -> str:
    try:
        return juicefs.invoke(
            target.program, target.access, "quota", verb, target.access.url, *arguments, timeout=_SHORT_S
        )
    except CommandError as e:
        raise ActionError(f"quota {verb}: {juicefs.explain(e)}") from e


def _private(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def _summary(report: pathlib.Path) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", report.read_text())
    lines = re.findall(r"<(?:INFO|WARNING)>: (?!(?:flush|close) session )(.*)", plain)  # the last lines of 1.3
    return juicefs.without_place(last_line("\n".join(lines) or plain))


def _uuid_of(backup: pathlib.Path) -> str:
    """Return the UUID of the volume that a backup is of; nothing if it is none."""
    with backup.open("rb") as raw:
        is_gzip = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(backup) if is_gzip else backup.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode("utf-8", "replace")
    except (OSError, EOFError):
        return ""
    found = re.search(r'"UUID":\s*"([0-9a-f-]{36})"', head)
    return found[1] if found else ""


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(app: str) -> None:
    """Remove reports and exports, which hold names and credentials. Backups stay: they may be the only ones."""
    for name in ("reports", "kubernetes"):
        shutil.rmtree(STATE_DIR / app / name, ignore_errors=True)
    for folder in (STATE_DIR / app, STATE_DIR):
        with contextlib.suppress(OSError):  # a backup, or another application's
            folder.rmdir()

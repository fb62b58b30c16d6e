"""Long commands on a volume and their reports, which root alone may read; backups, and restoring them; quotas."""

import collections.abc
import concurrent.futures
import datetime
import gzip
import hashlib
import os
import pathlib
import re
import time
import typing

from slurm_ddp import files, juicefs
from slurm_ddp.charm import ActionError, Log, Results
from slurm_ddp.run import CommandError, last_line
from volume import messages
from volume.target import Target

_SHORT_S = 120.0
_BEAT_S = 15.0
_HEAD_BYTES = 1 << 16  # of a backup: its setting stands first
_KEPT = 10  # reports of each command

T = typing.TypeVar("T")


def back_up(target: Target, uuid: str, *, timeout_s: float, log: Log) -> Results:
    """Write all metadata, without credentials, into a file on this machine."""
    path = private(target.directory / "backups") / f"{target.volume.name}-{_stamp()}.json.gz"
    partial = path.with_name(f".{path.name.removesuffix('.gz')}.{os.getpid()}.gz")  # another may begin this second
    partial.touch(mode=0o600)
    try:
        run_long(target, "dump", str(partial), timeout_s=timeout_s, log=log)
        found = _uuid_of(partial)
        if found != uuid:
            raise ActionError(messages.BACKUP_OF_OTHER.format(found=found or "unknown", uuid=uuid))
        partial.chmod(0o600)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": str(path), "bytes": str(path.stat().st_size), "sha256": digest, "uuid": uuid}


def restore(target: Target, path: pathlib.Path, uuid: str, *, timeout_s: float, log: Log) -> Results:
    """Load a backup of volume `uuid` into an engine that holds nothing."""
    if not target.volume.keyless:
        raise ActionError(messages.EMBEDDED)
    if not path.is_file() or path.is_symlink():
        raise ActionError(messages.NO_FILE.format(file=path))
    found = _uuid_of(path)
    if found != uuid:
        raise ActionError(messages.OTHER_BACKUP.format(file=path.name, found=found or "unknown", uuid=uuid))
    if (there := target.inspect()) is not None:
        raise ActionError(messages.OCCUPIED.format(name=there.name, uuid=there.uuid))
    report = run_long(target, "load", str(path), timeout_s=timeout_s, log=log)
    there = target.inspect()
    if there is None or there.uuid != uuid:
        raise ActionError(messages.NOT_RESTORED.format(uuid=uuid, report=report))
    return {"uuid": there.uuid, "volume": there.name, "report": str(report)}


def list_quotas(target: Target) -> list[dict[str, str]]:
    """Read the table that `juicefs quota list` draws, with bars or with boxes."""
    names = ("path", "size", "used", "used-percent", "inodes", "inodes-used", "inodes-used-percent")
    found: list[dict[str, str]] = []
    for line in quota(target, "list").splitlines():
        cells = [cell.strip() for cell in re.split(r"[|\u2502\u2503]", line.strip().strip("|\u2502\u2503"))]
        if len(cells) == len(names) and cells[0].startswith("/"):
            found.append(dict(zip(names, cells, strict=True)))
    return found


def quota(target: Target, verb: str, *arguments: str) -> str:
    """Run `juicefs quota`. Raises `ActionError` if it fails."""
    try:
        return target.invoke("quota", verb, target.access.url, *arguments, timeout=_SHORT_S).stdout
    except CommandError as e:
        raise ActionError(f"quota {verb}: {juicefs.explain(e)}") from e


def with_progress(what: str, log: Log, function: collections.abc.Callable[[], T]) -> T:
    """Run a function, and log every now and then for how long it has been running."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        began, future = time.monotonic(), pool.submit(function)
        while not concurrent.futures.wait([future], timeout=_BEAT_S).done:
            log(f"{what}: {time.monotonic() - began:.0f} s")
        return future.result()


def private(folder: pathlib.Path) -> pathlib.Path:
    """Make a folder that root alone can enter."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def run_long(target: Target, command: str, *arguments: str, timeout_s: float, log: Log) -> pathlib.Path:
    """Run a command that may take long; return the file with its output. Raises `ActionError` if it fails."""
    folder = private(target.directory / "reports")
    report = folder / f"{command}-{_stamp()}-{os.getpid()}.log"  # another may begin this second
    log(f"{command} of volume {target.volume.name} started")
    failure, argv = None, (command, target.access.url, *arguments)
    try:
        done = with_progress(command, log, lambda: target.invoke(*argv, timeout=timeout_s))
        output = done.stdout + done.stderr
    except CommandError as e:
        failure, output = e, e.stdout + e.stderr or f"{e}\n"
    files.ensure_file(report, output, mode=0o600)
    for old in sorted(folder.glob(f"{command}-*.log"))[:-_KEPT]:
        old.unlink(missing_ok=True)
    if failure is not None:
        reason = juicefs.explain(failure)
        raise ActionError(messages.FAILED.format(command=command, reason=reason, report=report)) from failure
    return report


def _stamp() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")


def summary(report: pathlib.Path) -> str:
    """Pick the last line of a report that is about the volume."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", report.read_text())
    lines = re.findall(r"<(?:INFO|WARNING)>: (?!(?:flush|close) session )(.*)", plain)  # the last lines of 1.3
    return juicefs.without_place(last_line("\n".join(lines) or plain))


def _uuid_of(backup: pathlib.Path) -> str:
    """Read the UUID of the volume that a backup is of; nothing if it is none."""
    with backup.open("rb") as raw:
        is_gzip = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(backup) if is_gzip else backup.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode("utf-8", "replace")
    except (OSError, EOFError):
        return ""
    found = re.search(r'"UUID":\s*"([0-9a-f-]{36})"', head)
    return found[1] if found else ""

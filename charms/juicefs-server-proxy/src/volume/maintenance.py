"""Long commands on a volume, with reports that only root can read; backup, restore, quotas."""

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

import pydantic

from slurm_ddp import files, juicefs
from slurm_ddp.charm import Action, ActionError, Log, Parameters, Results
from slurm_ddp.commands import CommandError, Completed, last_line
from volume.target import Target, Unit

_SHORT_S = 120.0
_BEAT_S = 15.0
_HEAD_BYTES = 1 << 16  # of a backup: its setting stands first
_KEPT = 10  # reports of each command


def _inside(path: str) -> str:
    if not re.fullmatch(r"/[^\0\n]*", path) or ".." in path.split("/"):
        raise ValueError("an absolute path inside the volume is needed, like /datasets")
    return path


def _absolute(file: str) -> str:
    if not file.startswith("/"):
        raise ValueError("an absolute path on this unit is needed, like /tmp/backup.json.gz")
    return file


class _Long(Parameters, frozen=True):
    """The parameters of an action that can take long."""

    timeout: int = pydantic.Field(default=3600, ge=1, le=24 * 3600)  # seconds


class _Fsck(_Long, frozen=True):
    path: typing.Annotated[str, pydantic.AfterValidator(lambda path: path and _inside(path))] = ""
    repair: bool = False


class _Gc(_Long, frozen=True):
    delete: bool = False
    compact: bool = False


class _Restore(_Long, frozen=True):
    uuid: str
    file: typing.Annotated[str, pydantic.AfterValidator(_absolute)]


class _Quota(Parameters, frozen=True):
    path: typing.Annotated[str, pydantic.AfterValidator(_inside)] | None = None
    uid: int | None = pydantic.Field(default=None, ge=1)
    gid: int | None = pydantic.Field(default=None, ge=1)
    capacity: int = pydantic.Field(default=0, ge=0)  # GiB
    inodes: int = pydantic.Field(default=0, ge=0)
    remove: bool = False

    @property
    def subject(self) -> tuple[str, str]:
        """The limited parameter's name and value. Raises ActionError unless one is given."""
        given = {"path": self.path, "uid": self.uid, "gid": self.gid}
        chosen = [(name, str(value)) for name, value in given.items() if value is not None]
        if len(chosen) != 1:
            raise ActionError("path, uid, gid: give one of them")
        return chosen[0]


def _fsck(unit: Unit, wanted: _Fsck, log: Log) -> Results:
    flags: list[str] = []
    if wanted.path or wanted.repair:
        flags += [f"--path={wanted.path or '/'}", "--recursive"]
    if wanted.repair:
        flags.append("--repair")
    target, _ = unit.verify()
    report = _run_long(target, "fsck", *flags, timeout_s=wanted.timeout, log=log)
    return {"state": "clean", "summary": _summary(report), "report": str(report)}


def _gc(unit: Unit, wanted: _Gc, log: Log) -> Results:
    flags = [f"--{flag}" for flag in ("delete", "compact") if getattr(wanted, flag)]
    target, _ = unit.verify()
    report = _run_long(target, "gc", *flags, timeout_s=wanted.timeout, log=log)
    mode = "deleted" if wanted.delete else "dry run: nothing was deleted; delete=true does"
    return {"mode": mode, "summary": _summary(report), "report": str(report)}


def _back_up(unit: Unit, wanted: _Long, log: Log) -> Results:
    """Write all metadata, without credentials, into a file on this machine."""
    target, setting = unit.verify()
    path = back_up(target, setting, timeout_s=wanted.timeout, log=log)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "file": str(path),
        "bytes": str(path.stat().st_size),
        "sha256": digest,
        "uuid": setting.uuid,
    }


def back_up(
    target: Target, setting: juicefs.Setting, *, timeout_s: float, log: Log
) -> pathlib.Path:
    """Back up the volume's metadata, without credentials; return the file. Raises `ActionError`."""
    path = private(target.directory / "backups") / f"{target.volume.name}-{_stamp()}.json.gz"
    # Another may begin this second
    partial = path.with_name(f".{path.name.removesuffix('.gz')}.{os.getpid()}.gz")
    partial.touch(mode=0o600)
    try:
        _run_long(target, "dump", str(partial), timeout_s=timeout_s, log=log)
        found = _uuid_of(partial)
        if found != setting.uuid:
            raise ActionError(
                f"the backup is of volume {found or 'unknown'}, not {setting.uuid}: it is not kept"
            )
        partial.chmod(0o600)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _restore(unit: Unit, wanted: _Restore, log: Log) -> Results:
    """Load a backup of the volume into an engine that holds nothing."""
    path, uuid = pathlib.Path(wanted.file), wanted.uuid
    if not unit.leads:
        raise ActionError("run it on the leader: the unit with a * in juju status")
    if unit.uuid not in (None, uuid):
        raise ActionError(
            f"uuid: this application's volume is {unit.uuid}: deploy another application for another"
        )
    target = unit.target()
    if not target.volume.keyless:
        raise ActionError(
            "the metadata of an embedded volume is Redis' log in the unit's storage: restore that"
        )
    if not path.is_file() or path.is_symlink():
        raise ActionError(f"file: {path} does not exist: juju scp BACKUP UNIT:/tmp/ first")
    found = _uuid_of(path)
    if found != uuid:
        raise ActionError(
            f"uuid: {path.name} is a backup of volume {found or 'unknown'}, not {uuid}"
        )
    if (there := target.inspect()) is not None:
        raise ActionError(
            f"the metadata engine holds volume {there.name} ({there.uuid}): restore into an empty one"
        )
    report = _run_long(target, "load", str(path), timeout_s=wanted.timeout, log=log)
    there = target.inspect()
    if there is None or there.uuid != uuid:
        raise ActionError(
            f"after load the metadata engine does not hold volume {uuid}; the report: {report}"
        )
    unit.pin(uuid)
    return {"uuid": there.uuid, "volume": there.name, "report": str(report)}


def _set_quota(unit: Unit, wanted: _Quota, _log: Log) -> Results:
    limits = {"--capacity": wanted.capacity, "--inodes": wanted.inodes}
    if not wanted.remove and not any(limits.values()):
        raise ActionError("capacity, inodes: set one of them, or remove=true")
    kind, value = wanted.subject
    target = unit.verify()[0]
    if wanted.remove:
        _quota(target, "delete", f"--{kind}", value)
        return {kind: value, "capacity-gib": "unlimited", "inodes": "unlimited"}

    flags = [word for flag, limit in limits.items() if limit for word in (flag, str(limit))]
    _quota(target, "set", f"--{kind}", value, *flags)
    listed = value if kind == "path" else f"{kind}:{value}"
    for quota in _quotas(target):
        if quota.pop("of") == listed:
            return {kind: value, **quota}
    raise ActionError(f"{kind}: juicefs lists no quota of {value} after it was set")


def _list_quotas(unit: Unit, _: Parameters, _log: Log) -> Results:
    found = _quotas(unit.verify()[0])
    lines = [
        f"{quota['of']}: {quota['used']} of {quota['size']}, {quota['inodes-used']} of {quota['inodes']} inodes"
        for quota in found
    ]
    return {"count": str(len(found)), "quotas": "\n".join(lines)}


ACTIONS: dict[str, Action[Unit]] = {
    "fsck": Action(_Fsck, _fsck),
    "gc": Action(_Gc, _gc),
    "backup-metadata": Action(_Long, _back_up),
    "restore-metadata": Action(_Restore, _restore),
    "set-quota": Action(_Quota, _set_quota),
    "list-quotas": Action(Parameters, _list_quotas),
}


def _quotas(target: Target) -> list[dict[str, str]]:
    """Read the table that `juicefs quota list` draws, with bars or with boxes."""
    names = ("of", "size", "used", "used-percent", "inodes", "inodes-used", "inodes-used-percent")
    found: list[dict[str, str]] = []
    for line in _quota(target, "list").splitlines():
        cells = [
            cell.strip()
            for cell in re.split(r"[|\u2502\u2503]", line.strip().strip("|\u2502\u2503"))
        ]
        if len(cells) == len(names) and cells[0].startswith(("/", "uid:", "gid:")):
            found.append(dict(zip(names, cells, strict=True)))
    return found


def _quota(target: Target, verb: str, *arguments: str) -> str:
    try:
        return target.invoke("quota", verb, target.access.url, *arguments, timeout=_SHORT_S).stdout
    except CommandError as e:
        raise ActionError(f"quota {verb}: {juicefs.explain(e)}") from e


def _with_progress(
    what: str, log: Log, function: collections.abc.Callable[[], Completed]
) -> Completed:
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


def _run_long(
    target: Target, command: str, *arguments: str, timeout_s: float, log: Log
) -> pathlib.Path:
    """Run a command that may take long; return the file of its output. Raises `ActionError`."""
    folder = private(target.directory / "reports")
    report = folder / f"{command}-{_stamp()}-{os.getpid()}.log"  # another may begin this second
    log(f"{command} of volume {target.volume.name} started")
    failure, argv = None, (command, target.access.url, *arguments)
    try:
        done = _with_progress(command, log, lambda: target.invoke(*argv, timeout=timeout_s))
        output = done.stdout + done.stderr
    except CommandError as e:
        failure, output = e, e.stdout + e.stderr or f"{e}\n"
    files.ensure_file(report, output, mode=0o600)
    for old in sorted(folder.glob(f"{command}-*.log"))[:-_KEPT]:
        old.unlink(missing_ok=True)
    if failure is not None:
        reason = juicefs.explain(failure)
        raise ActionError(f"{command}: {reason}; its whole report: {report}") from failure
    return report


def _stamp() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")


def _summary(report: pathlib.Path) -> str:
    """Pick the last line of a report that is about the volume."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", report.read_text())
    lines = re.findall(
        r"<(?:INFO|WARNING)>: (?!(?:flush|close) session )(.*)", plain
    )  # the last lines of 1.3
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

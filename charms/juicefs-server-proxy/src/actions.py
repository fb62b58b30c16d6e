"""The actions: parameters in, results out."""

import collections.abc
import dataclasses
import json
import pathlib
import re

import pydantic

import embedded.store
from slurm_ddp import juicefs, juicefs_access
from slurm_ddp.charm import Action, ActionError, Log, Parameters, Results
from slurm_ddp.interfaces import filesystem_info as fs
from volume import formatting, kubernetes, maintenance
from volume.maintenance import Target
from volume.spec import Volume

_DAY_S = 24 * 3600


@dataclasses.dataclass(frozen=True)
class Unit:
    """What an action works on: this unit, its application's volume, and the ways to it."""

    app: str
    name: str
    leads: bool
    program: pathlib.Path
    uuid: str | None  # of the volume; None before it is formatted
    directory: pathlib.Path | None  # the storage, on the unit that serves an embedded volume
    verify: collections.abc.Callable[[], tuple[Volume, juicefs.Setting]]  # looks that the volume is there
    access: collections.abc.Callable[[], tuple[Volume, fs.JuicefsSecret, juicefs_access.Access]]  # without a look
    pin: collections.abc.Callable[[str], object]  # keeps the UUID of a volume that was restored


class _Long(Parameters, frozen=True):
    timeout: int = pydantic.Field(default=3600, ge=1, le=_DAY_S)  # seconds


class _Fsck(_Long, frozen=True):
    path: str = ""
    repair: bool = False


class _Gc(_Long, frozen=True):
    delete: bool = False
    compact: bool = False


class _Restore(_Long, frozen=True):
    uuid: str
    file: str


class _Quota(Parameters, frozen=True):
    path: str
    capacity: int = pydantic.Field(default=0, ge=0)
    inodes: int = pydantic.Field(default=0, ge=0)
    remove: bool = False


class _Kubernetes(Parameters, frozen=True):
    namespace: str = "default"
    name: str = ""
    size: str = "1Ti"


class _Benchmark(_Long, frozen=True):
    big_file_size: int = pydantic.Field(default=256, ge=1, le=65536)
    small_files: int = pydantic.Field(default=100, ge=1, le=100000)


def _target(unit: Unit) -> tuple[Target, juicefs.Setting]:
    """Return the volume, after a look that it is the one it should be."""
    volume, setting = unit.verify()
    return Target(unit.app, unit.program, volume, unit.access()[2]), setting


def _status(unit: Unit, _: Parameters, _log: Log) -> Results:
    volume, setting = unit.verify()
    shown = formatting.describe(volume, setting, unit.program)
    if unit.directory is not None:
        usage = embedded.store.usage(unit.directory)
        shown |= {
            "storage-used-bytes": str(usage.used),
            "storage-free-bytes": str(usage.free),
            "storage-sync-ms": f"{embedded.store.sync_ms(unit.directory):.1f}",
            "survives-power-loss": "yes" if embedded.store.is_durable(unit.directory) else "no",
        }
    return shown


def _fsck(unit: Unit, wanted: _Fsck, log: Log) -> Results:
    if wanted.path:
        _check_path(wanted.path)
    target, timeout_s = _target(unit)[0], wanted.timeout
    return maintenance.check(target, repair=wanted.repair, path=wanted.path, timeout_s=timeout_s, log=log)


def _gc(unit: Unit, wanted: _Gc, log: Log) -> Results:
    target, timeout_s = _target(unit)[0], wanted.timeout
    return maintenance.collect_garbage(
        target, delete=wanted.delete, compact=wanted.compact, timeout_s=timeout_s, log=log
    )


def _backup(unit: Unit, wanted: _Long, log: Log) -> Results:
    target, setting = _target(unit)
    return maintenance.back_up(target, setting.uuid, timeout_s=wanted.timeout, log=log)


def _restore(unit: Unit, wanted: _Restore, log: Log) -> Results:
    if not unit.leads:
        raise ActionError("run it on the leader: the unit with a * in juju status")
    if unit.uuid not in (None, wanted.uuid):
        raise ActionError(f"uuid: this application's volume is {unit.uuid}: deploy another application for another")
    if not wanted.file.startswith("/"):
        raise ActionError("file: an absolute path on this unit is needed, like /tmp/backup.json.gz")
    volume, _, access = unit.access()
    target, path = Target(unit.app, unit.program, volume, access), pathlib.Path(wanted.file)
    done = maintenance.restore(target, path, wanted.uuid, timeout_s=wanted.timeout, log=log)
    unit.pin(wanted.uuid)
    return done


def _set_quota(unit: Unit, wanted: _Quota, _log: Log) -> Results:
    _check_path(wanted.path)
    if not wanted.remove and not wanted.capacity and not wanted.inodes:
        raise ActionError("capacity, inodes: set one of them, or remove=true")
    return maintenance.set_quota(
        _target(unit)[0], wanted.path, capacity_gib=wanted.capacity, inodes=wanted.inodes, delete=wanted.remove
    )


def _list_quotas(unit: Unit, _: Parameters, _log: Log) -> Results:
    found = maintenance.list_quotas(_target(unit)[0])
    return {"count": str(len(found)), "quotas": json.dumps(found)}


def _export(unit: Unit, wanted: _Kubernetes, _log: Log) -> Results:
    volume, setting = unit.verify()
    name, version = wanted.name or volume.name, juicefs.version(unit.program)
    export = kubernetes.manifests(
        volume, setting.uuid, unit.access()[1], version, namespace=wanted.namespace, name=name, size=wanted.size
    )
    path = kubernetes.write(export, maintenance.STATE_DIR / unit.app / "kubernetes", name)
    return {
        "file": str(path),
        "apply": f"juju ssh {unit.name} sudo cat {path} | kubectl apply -f -",
        "without-secrets": export.others,
    }


def _benchmark(unit: Unit, wanted: _Benchmark, log: Log) -> Results:
    return maintenance.benchmark(
        _target(unit)[0],
        big_mib=wanted.big_file_size,
        small_files=wanted.small_files,
        timeout_s=wanted.timeout,
        log=log,
    )


def _check_path(path: str) -> None:
    if not re.fullmatch(r"/[^\0\n]*", path) or ".." in path.split("/"):
        raise ActionError("path: an absolute path inside the volume is needed, like /datasets")


ACTIONS: dict[str, Action[Unit]] = {
    "status": Action(Parameters, _status),
    "fsck": Action(_Fsck, _fsck),
    "gc": Action(_Gc, _gc),
    "backup-metadata": Action(_Long, _backup),
    "restore-metadata": Action(_Restore, _restore),
    "set-quota": Action(_Quota, _set_quota),
    "list-quotas": Action(Parameters, _list_quotas),
    "export-kubernetes": Action(_Kubernetes, _export),
    "benchmark": Action(_Benchmark, _benchmark),
}

"""The actions: parameters in, results out."""

import collections.abc
import dataclasses
import json
import pathlib
import re
import typing

import pydantic

from slurm_ddp import juicefs
from slurm_ddp.charm import Action, ActionError, Log, Parameters, Results
from volume import benchmark, kubernetes, maintenance, messages
from volume.target import Target

_DAY_S = 24 * 3600


@dataclasses.dataclass(frozen=True)
class Unit:
    """What the actions work on: this unit, its application's volume, and the ways to it."""

    name: str
    leads: bool
    uuid: str | None  # of the volume; None before it is formatted
    target: collections.abc.Callable[[], Target]  # the volume that should be there, unseen
    verify: collections.abc.Callable[[], tuple[Target, juicefs.Setting]]  # after a look that it is there
    storage: collections.abc.Callable[[], Results]  # the state of its disk, where this unit serves the volume
    pin: collections.abc.Callable[[str], object]  # keeps the UUID of a volume that was restored


def _inside(path: str) -> str:
    if not re.fullmatch(r"/[^\0\n]*", path) or ".." in path.split("/"):
        raise ValueError(messages.PATH)
    return path


def _absolute(file: str) -> str:
    if not file.startswith("/"):
        raise ValueError(messages.FILE)
    return file


class _Long(Parameters, frozen=True):
    timeout: int = pydantic.Field(default=3600, ge=1, le=_DAY_S)  # seconds


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
    path: typing.Annotated[str, pydantic.AfterValidator(_inside)]
    capacity: int = pydantic.Field(default=0, ge=0)  # GiB
    inodes: int = pydantic.Field(default=0, ge=0)
    remove: bool = False


class _Kubernetes(Parameters, frozen=True):
    namespace: str = "default"
    name: str = ""
    size: str = "1Ti"


class _Benchmark(_Long, frozen=True):
    big_file_size: int = pydantic.Field(default=256, ge=1, le=65536)  # MiB
    small_files: int = pydantic.Field(default=100, ge=1, le=100000)


def _status(unit: Unit, _: Parameters, _log: Log) -> Results:
    target, setting = unit.verify()
    return {
        "volume": target.volume.name,
        "uuid": setting.uuid,
        "metadata-url": target.volume.engine.url(),
        "storage-type": setting.storage,
        "bucket": setting.bucket,
        "clients": str(len(setting.clients)),
        "juicefs-version": juicefs.text(juicefs.version(target.program)),
        "block-size": f"{setting.block_kib}K",
        "compression": setting.compression,
        "encrypted": "yes" if setting.encrypted else "no",
        "capacity-gib": str(setting.capacity_gib or "unlimited"),
        "inodes": str(setting.inodes or "unlimited"),
        "used-bytes": str(setting.used_bytes),
        "used-inodes": str(setting.used_inodes),
        **unit.storage(),
    }


def _fsck(unit: Unit, wanted: _Fsck, log: Log) -> Results:
    flags = (f"--path={wanted.path or '/'}", "--recursive") if wanted.path or wanted.repair else ()
    repair = ("--repair",) if wanted.repair else ()
    report = maintenance.run_long(unit.verify()[0], "fsck", *flags, *repair, timeout_s=wanted.timeout, log=log)
    return {"state": "clean", "summary": maintenance.summary(report), "report": str(report)}


def _gc(unit: Unit, wanted: _Gc, log: Log) -> Results:
    flags = [f"--{flag}" for flag in ("delete", "compact") if getattr(wanted, flag)]
    report = maintenance.run_long(unit.verify()[0], "gc", *flags, timeout_s=wanted.timeout, log=log)
    mode = "deleted" if wanted.delete else messages.DRY_RUN
    return {"mode": mode, "summary": maintenance.summary(report), "report": str(report)}


def _back_up(unit: Unit, wanted: _Long, log: Log) -> Results:
    target, setting = unit.verify()
    return maintenance.back_up(target, setting.uuid, timeout_s=wanted.timeout, log=log)


def _restore(unit: Unit, wanted: _Restore, log: Log) -> Results:
    if not unit.leads:
        raise ActionError(messages.NOT_LEADER)
    if unit.uuid not in (None, wanted.uuid):
        raise ActionError(messages.OTHER_VOLUME.format(uuid=unit.uuid))
    path = pathlib.Path(wanted.file)
    results = maintenance.restore(unit.target(), path, wanted.uuid, timeout_s=wanted.timeout, log=log)
    unit.pin(wanted.uuid)
    return results


def _set_quota(unit: Unit, wanted: _Quota, _log: Log) -> Results:
    limits = {"--capacity": wanted.capacity, "--inodes": wanted.inodes}
    if not wanted.remove and not any(limits.values()):
        raise ActionError(messages.NO_LIMIT)
    target = unit.verify()[0]
    if wanted.remove:
        maintenance.quota(target, "delete", "--path", wanted.path)
        return {"path": wanted.path, "capacity-gib": "unlimited", "inodes": "unlimited"}
    flags = [word for flag, limit in limits.items() if limit for word in (flag, str(limit))]
    maintenance.quota(target, "set", "--path", wanted.path, *flags)
    for quota in maintenance.list_quotas(target):
        if quota["path"] == wanted.path:
            return quota
    raise ActionError(messages.NO_QUOTA.format(path=wanted.path))


def _list_quotas(unit: Unit, _: Parameters, _log: Log) -> Results:
    found = maintenance.list_quotas(unit.verify()[0])
    return {"count": str(len(found)), "quotas": json.dumps(found)}


def _export(unit: Unit, wanted: _Kubernetes, _log: Log) -> Results:
    target, setting = unit.verify()
    name = wanted.name or target.volume.name
    path, shown = kubernetes.export(target, setting.uuid, namespace=wanted.namespace, name=name, size=wanted.size)
    apply = f"juju ssh {unit.name} sudo cat {path} | kubectl apply -f -"
    return {"file": str(path), "apply": apply, "without-secrets": shown}


def _benchmark(unit: Unit, wanted: _Benchmark, log: Log) -> Results:
    sizes = {"big_mib": wanted.big_file_size, "small_files": wanted.small_files}
    return benchmark.measure(unit.verify()[0], **sizes, timeout_s=wanted.timeout, log=log)


ACTIONS: dict[str, Action[Unit]] = {
    "status": Action(Parameters, _status),
    "fsck": Action(_Fsck, _fsck),
    "gc": Action(_Gc, _gc),
    "backup-metadata": Action(_Long, _back_up),
    "restore-metadata": Action(_Restore, _restore),
    "set-quota": Action(_Quota, _set_quota),
    "list-quotas": Action(Parameters, _list_quotas),
    "export-kubernetes": Action(_Kubernetes, _export),
    "benchmark": Action(_Benchmark, _benchmark),
}

"""The actions: parameters in, results out. Whatever fails is one line."""

import collections.abc
import json
import pathlib
import re
import typing

import ops
import pydantic

import embedded_store
import juicefs_volume
import kubernetes_export
import volume_maintenance
from slurm_ddp import juicefs, juicefs_access
from slurm_ddp.interfaces import filesystem_info as fs
from volume_ledger import Ledger
from volume_maintenance import Target
from volume_options import Volume
from volume_trouble import TroubleError, explained

_DAY_S = 24 * 3600


class Charm(typing.Protocol):
    """What an action needs of the charm."""

    program: pathlib.Path

    @property
    def app(self) -> ops.Application:
        """Return the application."""
        ...

    @property
    def unit(self) -> ops.Unit:
        """Return the unit."""
        ...

    @property
    def model(self) -> ops.Model:
        """Return the model."""
        ...

    def verify(self) -> tuple[Volume, juicefs.Setting]:
        """Return the volume, after a look that it is there."""
        ...

    def access(self) -> tuple[Volume, fs.JuicefsSecret, juicefs_access.Access]:
        """Return the volume that should be there, and how to get at it."""
        ...

    def ledger(self) -> Ledger:
        """Return what the application remembers."""
        ...


class Parameters(pydantic.BaseModel, frozen=True, extra="forbid"):
    """An action without parameters."""


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
    big_file_size: int = pydantic.Field(default=256, ge=1, le=65536, alias="big-file-size")
    small_files: int = pydantic.Field(default=100, ge=1, le=100000, alias="small-files")


Results = dict[str, str]


def run(charm: Charm, event: ops.ActionEvent) -> None:
    """Do what an action asks for."""
    name = event.handle.kind.removesuffix("_action").replace("_", "-")
    model, act = ACTIONS[name]
    try:
        parameters = model.model_validate(event.params)
        with explained(charm.app.name):
            event.set_results(act(charm, parameters, event))
    except pydantic.ValidationError as e:
        error = e.errors()[0]
        event.fail(f"{'.'.join(str(part) for part in error['loc'])}: {error['msg'].lower()}")
    except TroubleError as e:
        event.fail(e.status.message)
    except (volume_maintenance.MaintenanceError, ValueError) as e:
        event.fail(str(e))


def _target(charm: Charm) -> tuple[Target, juicefs.Setting]:
    """Return the volume, after a look that it is the one it should be."""
    volume, setting = charm.verify()
    return Target(charm.app.name, charm.program, volume, charm.access()[2]), setting


def _status(charm: Charm, _parameters: Parameters, _event: ops.ActionEvent) -> Results:
    volume, setting = charm.verify()
    shown = juicefs_volume.describe(volume, setting, charm.program)
    storages = charm.model.storages["volume"]
    if charm.ledger().pinned.server == charm.unit.name and storages:
        directory = storages[0].location
        usage = embedded_store.usage(directory)
        shown |= {
            "storage-used-bytes": str(usage.used),
            "storage-free-bytes": str(usage.free),
            "storage-sync-ms": f"{embedded_store.sync_ms(directory):.1f}",
            "survives-power-loss": "yes" if embedded_store.is_durable(directory) else "no",
        }
    return shown


def _fsck(charm: Charm, parameters: _Fsck, event: ops.ActionEvent) -> Results:
    if parameters.path:
        _check_path(parameters.path)
    return volume_maintenance.check(
        _target(charm)[0],
        repair=parameters.repair,
        path=parameters.path,
        timeout_s=parameters.timeout,
        say=event.log,
    )


def _gc(charm: Charm, parameters: _Gc, event: ops.ActionEvent) -> Results:
    return volume_maintenance.collect_garbage(
        _target(charm)[0],
        delete=parameters.delete,
        compact=parameters.compact,
        timeout_s=parameters.timeout,
        say=event.log,
    )


def _backup(charm: Charm, parameters: _Long, event: ops.ActionEvent) -> Results:
    target, setting = _target(charm)
    return volume_maintenance.back_up(target, setting.uuid, timeout_s=parameters.timeout, say=event.log)


def _restore(charm: Charm, parameters: _Restore, event: ops.ActionEvent) -> Results:
    if not charm.unit.is_leader():
        raise ValueError("run it on the leader: the unit with a * in juju status")
    pinned = charm.ledger().pinned
    if pinned.uuid is not None and pinned.uuid != parameters.uuid:
        raise ValueError(f"uuid: this application's volume is {pinned.uuid}: deploy another application for another")
    if not parameters.file.startswith("/"):
        raise ValueError("file: an absolute path on this unit is needed, like /tmp/backup.json.gz")
    volume, _, access = charm.access()
    target = Target(charm.app.name, charm.program, volume, access)
    path = pathlib.Path(parameters.file)
    done = volume_maintenance.restore(target, path, parameters.uuid, timeout_s=parameters.timeout, say=event.log)
    charm.ledger().pin(uuid=parameters.uuid)
    return done


def _set_quota(charm: Charm, parameters: _Quota, _event: ops.ActionEvent) -> Results:
    _check_path(parameters.path)
    if not parameters.remove and not parameters.capacity and not parameters.inodes:
        raise ValueError("capacity, inodes: set one of them, or remove=true")
    return volume_maintenance.set_quota(
        _target(charm)[0],
        parameters.path,
        capacity_gib=parameters.capacity,
        inodes=parameters.inodes,
        delete=parameters.remove,
    )


def _list_quotas(charm: Charm, _parameters: Parameters, _event: ops.ActionEvent) -> Results:
    found = volume_maintenance.list_quotas(_target(charm)[0])
    return {"count": str(len(found)), "quotas": json.dumps(found)}


def _export(charm: Charm, parameters: _Kubernetes, _event: ops.ActionEvent) -> Results:
    volume, setting = charm.verify()
    secret = charm.access()[1]
    name = parameters.name or volume.name
    export = kubernetes_export.manifests(
        volume,
        setting.uuid,
        secret,
        juicefs.version(charm.program),
        namespace=parameters.namespace,
        name=name,
        size=parameters.size,
    )
    path = kubernetes_export.write(export, volume_maintenance.STATE_DIR / charm.app.name / "kubernetes", name)
    return {
        "file": str(path),
        "apply": f"juju ssh {charm.unit.name} sudo cat {path} | kubectl apply -f -",
        "without-secrets": export.others,
    }


def _benchmark(charm: Charm, parameters: _Benchmark, event: ops.ActionEvent) -> Results:
    return volume_maintenance.benchmark(
        _target(charm)[0],
        big_mib=parameters.big_file_size,
        small_files=parameters.small_files,
        timeout_s=parameters.timeout,
        say=event.log,
    )


def _check_path(path: str) -> None:
    if not re.fullmatch(r"/[^\0\n]*", path) or ".." in path.split("/"):
        raise ValueError("path: an absolute path inside the volume is needed, like /datasets")


Act = collections.abc.Callable[[Charm, typing.Any, ops.ActionEvent], Results]
ACTIONS: dict[str, tuple[type[Parameters], Act]] = {
    "status": (Parameters, _status),
    "fsck": (_Fsck, _fsck),
    "gc": (_Gc, _gc),
    "backup-metadata": (_Long, _backup),
    "restore-metadata": (_Restore, _restore),
    "set-quota": (_Quota, _set_quota),
    "list-quotas": (Parameters, _list_quotas),
    "export-kubernetes": (_Kubernetes, _export),
    "benchmark": (_Benchmark, _benchmark),
}

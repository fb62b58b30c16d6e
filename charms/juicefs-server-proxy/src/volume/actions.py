"""The actions: `status`, and the ones of the other modules."""

from slurm_ddp import juicefs
from slurm_ddp.charm import Action, Log, Parameters, Results
from volume import kubernetes, maintenance
from volume.target import Unit


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
        "used-gib": f"{setting.used_bytes / 2**30:.2f}",
        "used-inodes": str(setting.used_inodes),
        **unit.storage(),
    }


ACTIONS = {"status": Action(Parameters, _status), **maintenance.ACTIONS, **kubernetes.ACTIONS}

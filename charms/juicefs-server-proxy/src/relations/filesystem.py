"""The applications that mount the volume: what they are offered, and which of them cannot mount it."""

import ops

from relations.peers import Ledger
from slurm_ddp import wake
from slurm_ddp.charm import Level, Status
from slurm_ddp.interfaces import filesystem_info as fs
from volume import messages

ENDPOINT = "filesystem"
_SILENT_S = 60  # for a client of ours that has joined: its first hook may need its machine's lock


def publish(charm: ops.CharmBase, uri: str, secret: ops.Secret | None) -> bool:
    """Offer the volume, and grant its credentials, to every related application; return whether there is one."""
    for relation in charm.model.relations[ENDPOINT]:
        if secret is not None:
            secret.grant(relation)
        relation.data[charm.app][fs.KEY] = uri
    return bool(charm.model.relations[ENDPOINT])


def unable(charm: ops.CharmBase, ledger: Ledger) -> Status | None:
    """Name a related application none of whose units publishes that it can mount JuiceFS.

    Upstream's filesystem-client writes nothing into its databag and fails its hook over a scheme that it does not know.
    A client of ours that has just joined has a minute to publish; after that this unit looks again by itself.
    """
    silent = {
        relation.id: relation.app.name
        for relation in charm.model.relations[ENDPOINT]
        if relation.units and not any(fs.mounts_juicefs(relation.data[unit]) for unit in relation.units)
    }
    silent_s = ledger.silent_s(silent)
    if any(seconds < _SILENT_S for seconds in silent_s.values()):
        wake.later(charm.unit.name, charm.charm_dir, _SILENT_S)
    for relation, client in silent.items():
        if silent_s[relation] >= _SILENT_S:
            return Status(Level.BLOCKED, messages.CANNOT_MOUNT.format(app=charm.app.name, client=client))
    return None

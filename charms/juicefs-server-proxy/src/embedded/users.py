"""Who has a volume mounted that this unit serves, and which related applications cannot mount it at all."""

import collections.abc
import contextlib
import dataclasses
import pathlib
import time

import ops

import embedded_store
import juicefs_volume
import volume_ledger
import volume_options
from slurm_ddp import juicefs, wake
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.run import CommandError
from volume_trouble import RemovalRefusedError, TroubleError

_UNMOUNT_S = 30.0  # for clients that are removed together with the volume; their hooks may need this machine's lock
RECONNECT_S = 20.0  # a client's heartbeat, which opens its connection again, comes every 10 to 12 s
_LOOK_S = 2.0
_SILENT_S = 60  # for a client of ours that has joined: its first hook may need its machine's lock
_MOST_NAMED = 5
_UNKNOWN = "cannot tell which clients have the volume mounted"


@contextlib.contextmanager
def refusing(app: str) -> collections.abc.Generator[None]:
    """Raise `RemovalRefusedError` for a `TroubleError` inside: the servers cannot be asked who uses the volume."""
    try:
        yield
    except TroubleError as e:
        raise RemovalRefusedError(app, f"{_UNKNOWN} ({e})", "resolve that") from e


def await_none(model: ops.Model, program: pathlib.Path, settings: embedded_store.Settings) -> None:
    """Wait a moment until no client has the volume mounted. A metadata server that is down is started and asked.

    The servers are asked: Juju's list of related units does not change while a hook fails.

    Raises:
        RemovalRefusedError: one still has, or that cannot be found out.
    """
    end = time.monotonic() + _UNMOUNT_S
    clients = [relation.app.name for relation in model.relations["filesystem"]]
    ends = " and ".join(f"juju remove-relation {settings.app} {client}" for client in clients)
    while True:
        remedy = f"unmount it there{f' with {ends}' if ends else ''}"
        try:
            up_s = embedded_store.start_metadata(settings.app)
            problem = mounted_by(program, settings)
            if not problem and up_s >= RECONNECT_S:
                return
            if not problem:
                problem, remedy = f"the metadata server started {up_s:.0f} s ago and clients may reconnect", "wait"
        except (embedded_store.StoreError, juicefs.JuicefsError, CommandError) as e:
            problem, remedy = f"{_UNKNOWN} ({e})", "repair the metadata server"
        if time.monotonic() >= end:
            raise RemovalRefusedError(settings.app, problem, remedy)
        model.unit.status = ops.MaintenanceStatus(f"{problem}; waiting until it is unmounted")
        time.sleep(_LOOK_S)


def mounted_by(program: pathlib.Path, settings: embedded_store.Settings) -> str:
    """Return what shows that clients have the volume mounted; nothing where nobody has.

    Raises:
        JuicefsError, CommandError: the metadata server or `ss` cannot be asked.
    """
    sessions = _sessions(program, settings)
    found = [f"the volume is mounted by {_named(sessions)}"] if sessions else []
    if addresses := embedded_store.connected():  # after juicefs has ended, which connects as well
        found.append(f"the volume's metadata server has connections from {_named(addresses)}")
    return "; ".join(found)


def _named(clients: tuple[str, ...]) -> str:
    more = f" and {len(clients) - _MOST_NAMED} more" if len(clients) > _MOST_NAMED else ""
    return f"{', '.join(clients[:_MOST_NAMED])}{more}"


def unable(charm: ops.CharmBase, ledger: volume_ledger.Ledger) -> ops.StatusBase | None:
    """Return the status that names a related application none of whose units says that it can mount JuiceFS.

    Upstream's filesystem-client writes nothing into its databag and fails its hook over a scheme that it does not know.
    A client of ours that has just joined has a minute to say it; after that this unit looks again by itself.
    """
    silent = {
        relation.id: relation.app.name
        for relation in charm.model.relations["filesystem"]
        if relation.units and not any(fs.mounts_juicefs(relation.data[unit]) for unit in relation.units)
    }
    silent_s, app = ledger.silent_s(silent), charm.app.name
    if any(seconds < _SILENT_S for seconds in silent_s.values()):
        wake.later(charm.unit.name, charm.charm_dir, _SILENT_S)
    for relation, client in silent.items():
        if silent_s[relation] >= _SILENT_S:
            return ops.BlockedStatus(
                f"{client} cannot mount JuiceFS: juju remove-relation {app} {client}, and use shared-filesystem-client"
            )
    return None


def _sessions(program: pathlib.Path, settings: embedded_store.Settings) -> tuple[str, ...]:
    here = dataclasses.replace(settings, address="127.0.0.1")  # where Redis listens, whatever the unit's address is now
    volume = embedded_store.volume("any", here.address, volume_options.Format())
    access = juicefs_volume.open_access(program, here.app, volume, here.credentials)
    setting = juicefs.inspect(program, access)
    return setting.clients if setting is not None else ()

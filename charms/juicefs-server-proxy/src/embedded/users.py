"""Who has a volume mounted that this unit serves."""

import collections.abc
import time

import embedded.store
from slurm_ddp import juicefs
from slurm_ddp.commands import CommandError
from volume import spec, target

_UNMOUNT_S = 30.0  # for clients that are removed together with the volume; their hooks may need this machine's lock
RECONNECT_S = 20.0  # a client's heartbeat, which opens its connection again, comes every 10 to 12 s
_LOOK_S = 2.0
_MOST_NAMED = 5


class RemovalRefusedError(Exception):
    """The storage must not go yet.

    Failing the hook is the only way to keep Juju from taking it away.
    """

    def __init__(self, app: str, problem: str, remedy: str) -> None:
        anyway = f"to remove the volume under its clients: juju config {app} allow-removal=true"
        super().__init__(f"{problem}: {remedy}, and Juju's next run of this hook passes; {anyway}")


def await_none(
    settings: embedded.store.Settings,
    clients: collections.abc.Iterable[str],
    show: collections.abc.Callable[[str], object],
) -> None:
    """Wait a moment until no client has the volume mounted; `show` gets the reason as one line.

    Asks the servers, and starts the metadata server for that if it is down: Juju's list of related
    units (`clients` are their applications) does not change while a hook fails. Raises
    `RemovalRefusedError` if a client still has it mounted.
    """
    end = time.monotonic() + _UNMOUNT_S
    ends = " and ".join(f"juju remove-relation {settings.app} {client}" for client in clients)
    while True:
        remedy = f"unmount it there{f' with {ends}' if ends else ''}"
        try:
            up_s = embedded.store.start_metadata(settings.app)
            problem = mounted_by(settings)
            if not problem and up_s >= RECONNECT_S:
                return
            if not problem:
                problem, remedy = (
                    f"the metadata server started {up_s:.0f} s ago and clients may reconnect",
                    "wait",
                )
        except (embedded.store.StoreError, juicefs.JuicefsError, CommandError) as e:
            problem, remedy = (
                f"it is unknown who has the volume mounted ({e})",
                "repair the metadata server",
            )
        if time.monotonic() >= end:
            raise RemovalRefusedError(settings.app, problem, remedy)
        show(f"waiting until the volume is unmounted: {problem}")
        time.sleep(_LOOK_S)


def mounted_by(settings: embedded.store.Settings) -> str:
    """Return who has the volume mounted, or "". Raises `JuicefsError`, `CommandError`."""
    # At the loopback: Redis always listens there, even if the unit's address changed
    volume = embedded.store.volume("any", "127.0.0.1", spec.Format())
    setting = target.open_target(settings.app, volume, settings.credentials).inspect()
    found: list[str] = []
    if setting is not None and setting.clients:
        found.append(f"the volume is mounted by {_named(setting.clients)}")
    if addresses := embedded.store.connected():  # after juicefs has ended, which connects as well
        found.append(f"the volume's metadata server has connections from {_named(addresses)}")
    return "; ".join(found)


def _named(clients: tuple[str, ...]) -> str:
    more = f" and {len(clients) - _MOST_NAMED} more" if len(clients) > _MOST_NAMED else ""
    return f"{', '.join(clients[:_MOST_NAMED])}{more}"

"""Who has a volume mounted that this unit serves."""

import collections.abc
import contextlib
import dataclasses
import pathlib
import time

import embedded.store
from slurm_ddp import juicefs
from slurm_ddp.charm import StatusError
from slurm_ddp.run import CommandError
from volume import formatting, spec

_UNMOUNT_S = 30.0  # for clients that are removed together with the volume; their hooks may need this machine's lock
RECONNECT_S = 20.0  # a client's heartbeat, which opens its connection again, comes every 10 to 12 s
_LOOK_S = 2.0
_MOST_NAMED = 5
_UNKNOWN = "cannot tell which clients have the volume mounted"


class RemovalRefusedError(Exception):
    """The unit's storage must not go yet. It fails the hook: nothing else keeps Juju from taking the storage away."""

    def __init__(self, app: str, problem: str, remedy: str) -> None:
        super().__init__(
            f"{problem}: {remedy}, and Juju's next run of this hook passes; "
            f"or remove the volume under its clients: juju config {app} allow-removal=true"
        )


@contextlib.contextmanager
def refusing(app: str) -> collections.abc.Generator[None]:
    """Raise `RemovalRefusedError` for a `StatusError` inside: the servers cannot be asked who uses the volume."""
    try:
        yield
    except StatusError as e:
        raise RemovalRefusedError(app, f"{_UNKNOWN} ({e})", "resolve that") from e


def await_none(
    program: pathlib.Path,
    settings: embedded.store.Settings,
    clients: collections.abc.Iterable[str],
    show: collections.abc.Callable[[str], object],
) -> None:
    """Wait a moment until no client has the volume mounted. A metadata server that is down is started and asked.

    The servers are asked: Juju's list of related units does not change while a hook fails.

    Args:
        program: juicefs.
        settings: of the servers.
        clients: the applications that are related.
        show: takes what is waited for, as one line.

    Raises:
        RemovalRefusedError: one still has, or that cannot be found out.
    """
    end = time.monotonic() + _UNMOUNT_S
    ends = " and ".join(f"juju remove-relation {settings.app} {client}" for client in clients)
    while True:
        remedy = f"unmount it there{f' with {ends}' if ends else ''}"
        try:
            up_s = embedded.store.start_metadata(settings.app)
            problem = mounted_by(program, settings)
            if not problem and up_s >= RECONNECT_S:
                return
            if not problem:
                problem, remedy = f"the metadata server started {up_s:.0f} s ago and clients may reconnect", "wait"
        except (embedded.store.StoreError, juicefs.JuicefsError, CommandError) as e:
            problem, remedy = f"{_UNKNOWN} ({e})", "repair the metadata server"
        if time.monotonic() >= end:
            raise RemovalRefusedError(settings.app, problem, remedy)
        show(f"{problem}; waiting until it is unmounted")
        time.sleep(_LOOK_S)


def mounted_by(program: pathlib.Path, settings: embedded.store.Settings) -> str:
    """Return what shows that clients have the volume mounted; nothing where nobody has.

    Raises:
        JuicefsError, CommandError: the metadata server or `ss` cannot be asked.
    """
    sessions = _sessions(program, settings)
    found = [f"the volume is mounted by {_named(sessions)}"] if sessions else []
    if addresses := embedded.store.connected():  # after juicefs has ended, which connects as well
        found.append(f"the volume's metadata server has connections from {_named(addresses)}")
    return "; ".join(found)


def _named(clients: tuple[str, ...]) -> str:
    more = f" and {len(clients) - _MOST_NAMED} more" if len(clients) > _MOST_NAMED else ""
    return f"{', '.join(clients[:_MOST_NAMED])}{more}"


def _sessions(program: pathlib.Path, settings: embedded.store.Settings) -> tuple[str, ...]:
    here = dataclasses.replace(settings, address="127.0.0.1")  # where Redis listens, whatever the unit's address is now
    volume = embedded.store.volume("any", here.address, spec.Format())
    access = formatting.open_access(program, here.app, volume, here.credentials)
    setting = juicefs.inspect(program, access)
    return setting.clients if setting is not None else ()

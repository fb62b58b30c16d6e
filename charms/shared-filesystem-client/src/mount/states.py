"""What each application left on this machine: enough to remove it, and to decide whether a mount is up to date."""

import typing

import pydantic

import mount_plan
from slurm_ddp import files

_FILE = "mount.json"  # in the application's state folder
_METRICS_PORT = 9567  # JuiceFS's own


class State(pydantic.BaseModel, frozen=True):
    """One application's mount."""

    mountpoint: str
    unit: str
    fstypes: tuple[str, ...]
    sources: tuple[str, ...] = ()  # what may be mounted there: more than one while a change waits
    made_mountpoint: bool = False
    boot: str = ""
    changed_us: int = 0  # on the monotonic clock of that boot: when unit, environment or program last changed
    users: tuple[str, ...] = ()  # the Juju units that want it: one for each principal on the machine
    files: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    port: int = 0
    reloads: bool = False  # the program that runs can be exchanged under the mount

    def saved(self, app: str, **changes: typing.Any) -> "State":
        """Apply the changes and write the file."""
        state = self.model_copy(update=changes)
        files.ensure_file(mount_plan.STATE / app / _FILE, state.model_dump_json(indent=1) + "\n", mode=0o600)
        return state


def load(app: str) -> State | None:
    """Read an application's state; None where it mounts nothing."""
    try:
        return State.model_validate_json((mount_plan.STATE / app / _FILE).read_text())
    except OSError:
        return None


def load_all() -> dict[str, State]:
    """Read the states of all applications on this machine."""
    found = {path.parent.name: load(path.parent.name) for path in mount_plan.STATE.glob(f"*/{_FILE}")}
    return {app: state for app, state in found.items() if state is not None}


def fstypes() -> set[str]:
    """List the types of all that the applications on this machine mount."""
    return {fstype for state in load_all().values() for fstype in state.fstypes}


def metrics_port(app: str, wanted: int) -> int:
    """Choose the port for an application's metrics: the wanted one, or else the first that no other application has."""
    ports = {name: state.port for name, state in load_all().items()}
    free = (port for port in range(_METRICS_PORT, _METRICS_PORT + 1000) if port not in ports.values())
    return wanted or ports.get(app) or next(free)

"""Each application's mount and files on this machine, for its removal and for the keeper."""

import dataclasses
import typing

import mount_plan
from scripts import keeper
from slurm_ddp import files, records

State = keeper.Watch
_METRICS_PORT = 9567  # JuiceFS's own


def save(state: State, **changes: typing.Any) -> State:
    """Apply the changes and write the file."""
    state = dataclasses.replace(state, **changes)
    files.ensure_file(mount_plan.STATE / state.app / keeper.WATCH, records.text(state), mode=0o600)
    return state


def load(app: str) -> State | None:
    """Read an application's state; None if it mounts nothing."""
    try:
        return records.read(State, mount_plan.STATE / app / keeper.WATCH)
    except OSError:
        return None


def load_all() -> dict[str, State]:
    """Read the states of all applications on this machine."""
    found = {
        path.parent.name: load(path.parent.name)
        for path in mount_plan.STATE.glob(f"*/{keeper.WATCH}")
    }
    return {app: state for app, state in found.items() if state is not None}


def metrics_port(app: str, wanted: int) -> int:
    """Choose the port for an application's metrics: the wanted one, or the first free one."""
    ports = {name: state.port for name, state in load_all().items()}
    taken = set(ports.values())
    free = (port for port in range(_METRICS_PORT, _METRICS_PORT + 1000) if port not in taken)
    return wanted or ports.get(app) or next(free)

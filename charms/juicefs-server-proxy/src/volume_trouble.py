"""What keeps a volume from being offered, as the status that says so."""

import collections.abc
import contextlib

import ops

import embedded_store
import juicefs_volume
from slurm_ddp import juicefs
from slurm_ddp.run import CommandError


class TroubleError(Exception):
    """The volume cannot be offered; `status` says why."""

    def __init__(self, status: ops.StatusBase) -> None:
        super().__init__(status.message)
        self.status = status


class RemovalRefusedError(Exception):
    """The unit's storage must not go yet. It fails the hook: nothing else keeps Juju from taking the storage away."""

    def __init__(self, app: str, users: list[str]) -> None:
        super().__init__(
            f"{', '.join(users)} use the volume: remove those relations first, or let it go: "
            f"juju config {app} allow-removal=true; Juju then tries again by itself"
        )


@contextlib.contextmanager
def explained(app: str) -> collections.abc.Generator[None]:
    """Turn what fails inside into a `TroubleError`: Waiting for what may mend itself, else Blocked."""
    try:
        yield
    except juicefs.UnreachableError as e:
        raise TroubleError(ops.WaitingStatus(f"metadata engine: {e}")) from e
    except juicefs.JuicefsError as e:
        raise TroubleError(ops.BlockedStatus(juicefs.advice(e, app))) from e
    except (juicefs_volume.VolumeError, embedded_store.StoreError, CommandError) as e:
        raise TroubleError(ops.BlockedStatus(str(e))) from e

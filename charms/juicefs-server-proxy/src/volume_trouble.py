"""What keeps a volume from being offered, as the status that says so."""

import contextlib

import ops

import embedded_store
import juicefs_volume
from slurm_ddp import trouble


class TroubleError(Exception):
    """The volume cannot be offered; `status` says why."""

    def __init__(self, status: ops.StatusBase, *, passes: bool = False) -> None:
        super().__init__(status.message)
        self.status = status
        self.passes = passes  # without an event of Juju's: it has to be tried again


class RemovalRefusedError(Exception):
    """The unit's storage must not go yet. It fails the hook: nothing else keeps Juju from taking the storage away."""

    def __init__(self, app: str, problem: str, remedy: str) -> None:
        super().__init__(
            f"{problem}: {remedy}, and Juju's next run of this hook passes; "
            f"or remove the volume under its clients: juju config {app} allow-removal=true"
        )


def explained(app: str) -> contextlib.AbstractContextManager[None]:
    """Turn what fails inside into a `TroubleError`: Waiting for what may mend itself, else Blocked."""
    return trouble.explained(app, _tell, lasting=(juicefs_volume.VolumeError, embedded_store.StoreError))


def _tell(_: Exception, said: str, *, passes: bool) -> TroubleError:
    status = ops.WaitingStatus(f"metadata engine: {said}") if passes else ops.BlockedStatus(said)
    return TroubleError(status, passes=passes)

"""What keeps a volume from being offered, as the status that says so."""

import contextlib

import ops

import embedded_store
import juicefs_volume
from slurm_ddp import trouble


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


def explained(app: str) -> contextlib.AbstractContextManager[None]:
    """Turn what fails inside into a `TroubleError`: Waiting for what may mend itself, else Blocked."""
    return trouble.explained(app, _tell, lasting=(juicefs_volume.VolumeError, embedded_store.StoreError))


def _tell(_: Exception, said: str, *, passes: bool) -> TroubleError:
    return TroubleError(ops.WaitingStatus(f"metadata engine: {said}") if passes else ops.BlockedStatus(said))

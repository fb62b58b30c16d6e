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


@contextlib.contextmanager
def explained(app: str) -> collections.abc.Generator[None]:
    """Turn what fails inside into a `TroubleError`: Waiting for what may mend itself, else Blocked."""
    try:
        yield
    except juicefs.UnreachableError as e:
        raise TroubleError(ops.WaitingStatus(f"metadata engine: {e}")) from e
    except juicefs.DownloadError as e:
        raise TroubleError(ops.BlockedStatus(f"{e}: attach it: juju attach-resource {app} juicefs=FILE")) from e
    except (juicefs.JuicefsError, juicefs_volume.VolumeError, embedded_store.StoreError, CommandError) as e:
        raise TroubleError(ops.BlockedStatus(str(e))) from e

"""The nodes of a job: those with ranks, the spare ones, and those that it goes on without."""

from ddp.node import slurm_calls, spool
from ddp.node.control_files import ControlFiles
from ddp.node.started_job import StartedJob


class Placement:
    """Puts the ranks on the first nodes of the job; the others are spare."""

    def __init__(self, job: StartedJob, files: ControlFiles, allocated: list[str]) -> None:
        self._job = job
        self._files = files
        self.removed: list[str] = []  # nodes that spare ones replaced
        self._take(allocated)

    def _take(self, allocated: list[str]) -> None:
        self.allocated = allocated
        self.hosts = allocated[: self._job.num_nodes]  # in the order of the ranks
        self._files.write_hosts(self.hosts)

    @property
    def spare(self) -> list[str]:
        """The nodes without ranks."""
        return self.allocated[self._job.num_nodes :]

    def can_swap(self, bad: list[str]) -> bool:
        """Return whether spare nodes can replace bad ones; that is done once."""
        if self.removed or self._job.host in bad:
            return False
        return len(self._without(bad)) >= self._job.num_nodes

    def swap(self, bad: list[str]) -> None:
        """Put the ranks on spare nodes in place of bad ones."""
        self.removed = bad
        self._take(self._without(bad))
        spool.write(f"[RESTART] on {' '.join(self.hosts)}, without {' '.join(bad)}")

    def remove_swapped(self) -> None:
        """Remove replaced nodes from the job, before Slurm ends the job for their sake."""
        if self.removed:
            slurm_calls.keep(self._job.slurm_id, self.allocated)

    def shrink(self, bad: list[str]) -> None:
        """Remove bad nodes from the job."""
        slurm_calls.keep(self._job.slurm_id, self._without(bad))

    def can_exclude(self, bad: list[str]) -> bool:
        """Return whether the partition has enough nodes without these and the excluded ones."""
        if set(bad) & set(self._job.spec.nodelist):
            return False  # nodelist names it
        usable = slurm_calls.usable_nodes(self._job.partition, self._job.spec.reservation)
        excluded = {*bad, *self._job.spec.exclude, *self._files.read_excluded()}
        return len(usable - excluded) >= self._job.num_nodes

    def exclude(self, bad: list[str]) -> None:
        """Exclude bad nodes from the job's next start."""
        self._files.exclude(bad)
        names = {*self._job.spec.exclude, *self._files.read_excluded(), *bad}
        more: list[str] = []
        if self._job.spec.nodes:  # spare nodes are welcome, not needed
            more = [f"NumNodes={self._job.num_nodes}-{self._job.num_allocated}"]
        slurm_calls.exclude(self._job.slurm_id, ",".join(sorted(names)), more)

    def _without(self, bad: list[str]) -> list[str]:
        return [host for host in self.allocated if host not in bad]

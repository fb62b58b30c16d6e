"""Decide after a failed attempt: another one here, on other nodes, after a pause, or none."""

import contextlib

from ddp.node import slurm_calls, spool, stall, storage
from ddp.node.control_files import ControlFiles
from ddp.node.diagnosis import verdicts
from ddp.node.placement import Placement
from ddp.node.ranks import Ranks
from ddp.node.started_job import StartedJob
from ddp.node.stop_requests import SLICE_S, StopRequests

# Attempts after faults of the filesystem, a node or the network, over all starts of the job
MAX_FAULTS = 8
LONGEST_PAUSE_S = 60.0
EXPLAINING_S = 120.0
_MAX_WORDS = 300
_UNMOUNTED = "is the shared filesystem mounted"


class Recovery:
    """Decides by the verdict on an attempt whether there is another one."""

    def __init__(
        self,
        job: StartedJob,
        placement: Placement,
        stop: StopRequests,
        *,
        files: ControlFiles,
        shared: storage.Storage,
        output: spool.Output,
    ) -> None:
        self._job = job
        self._placement = placement
        self._stop = stop
        self._files = files
        self._storage = shared
        self._output = output
        before = files.read_retries()
        self._retries = {name: before.get(name, 0) for name in ("program", "faults")}

    def prepare_retry(self, ranks: Ranks) -> bool:
        """Record why an attempt failed; requeue the job, or return True to try again here."""
        kind, node, words, comes_again = self._explain(ranks)
        words = " ".join(words.split())[:_MAX_WORDS] or f"exit code {ranks.code}"
        self._files.record_failure(ranks.attempt_id, kind, node, words)
        if comes_again or self._stop.is_ending:
            return False
        if kind in ("filesystem", "network") or ranks.stalled:
            return self._wait_out(kind, node, is_silent=bool(ranks.lost))
        if kind == "node" and node != "-":
            return self._replace(node, words, ranks.lost)
        return self._restart()

    def _explain(self, ranks: Ranks) -> verdicts.Verdict:
        hosts = self._placement.hosts
        if 1 < len(ranks.lost) == len(hosts) - 1:
            return verdicts.Verdict("network", "-", "no other node responds")
        if ranks.lost:
            return verdicts.Verdict("node", ranks.lost[0], verdicts.LOST)

        run_dir = self._job.run_dir
        job_id = self._job.job_id
        if ranks.stalled:
            node = "-"
            words = ranks.stalled
            with contextlib.suppress(OSError, ValueError):
                node, more = storage.within(
                    lambda: stall.behind(run_dir, job_id, hosts), EXPLAINING_S
                )
                words = f"{words}; {more}" if more else words
            return verdicts.Verdict("program", node, words)

        with contextlib.suppress(OSError, ValueError):
            return storage.within(
                lambda: verdicts.blame(run_dir, job_id, ranks.attempt_id, hosts), EXPLAINING_S
            )
        return verdicts.Verdict("unknown", "-", "")

    def _replace(self, node: str, words: str, lost: list[str]) -> bool:
        """Go on without a bad node if there are others: here, or in the next start of the job."""
        bad = lost or [node]
        if self._retries["faults"] < MAX_FAULTS:
            if self._placement.can_swap(bad):
                self._count("faults")
                self._placement.swap(bad)
                return True
            if self._placement.can_exclude(bad):
                self._requeue_without(bad, is_lost=bool(lost))
                return False

        if words == verdicts.LOST:
            return self._wait_out("node", node, is_silent=bool(lost))
        if _UNMOUNTED in words:
            return self._wait_out("filesystem", node)
        where = f"partition {self._job.partition} has no other node for it"
        return self._restart(f"{node} is suspect, but {where}; trying it again")

    def _requeue_without(self, bad: list[str], *, is_lost: bool) -> None:
        self._count("faults")
        if is_lost:  # else the job would be COMPLETING until Slurm notices
            self._placement.shrink(bad)
        if self._stop.requeue():
            self._placement.exclude(bad)
            self._stop.make_way(self._output)

    def _restart(self, remark: str = "") -> bool:
        """Count a restart after the program's failure; return False if max-restarts is reached."""
        limit = self._job.spec.max_restarts
        if self._retries["program"] >= limit:
            return False
        self._count("program")
        spool.write(f"[RESTART] {self._retries['program']} of {limit}")
        if remark:
            spool.write(f"[RESTART] {remark}")
        return True

    def _wait_out(self, kind: str, node: str, *, is_silent: bool = False) -> bool:
        """Wait until a fault that is not the program's may be over; return whether to try again."""
        if self._retries["faults"] >= MAX_FAULTS:
            faults = f"{MAX_FAULTS} faults of the filesystem, the nodes or the network"
            spool.write(f"[RESTART] given up after {faults}")
            return False
        self._count("faults")
        if kind == "node" and not slurm_calls.await_node(
            node, self._stop.is_asked, is_silent=is_silent
        ):
            return False
        self._storage.await_ready()
        self._pause(kind, node)
        return not self._stop.is_asked()

    def _pause(self, kind: str, node: str) -> None:
        """Pause for longer after each fault, unless a signal arrives."""
        faults = self._retries["faults"]
        pause_s = min(LONGEST_PAUSE_S, 2.0**faults)
        where = f" on {node}" if node != "-" else ""
        count = f"{faults} of {MAX_FAULTS}; it is not counted against max-restarts"
        spool.write(f"[RESTART] after a fault of the {kind}{where} in {pause_s:.0f} s, {count}")
        for _ in range(int(pause_s / SLICE_S)):
            if not self._stop.is_asked():
                slurm_calls.pause(SLICE_S)

    def _count(self, what: str) -> None:
        self._retries[what] += 1
        self._files.write_retries(self._retries)

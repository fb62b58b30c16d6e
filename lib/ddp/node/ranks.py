"""The ranks of a job, as its supervisor sees them: started, signalled, watched, ended."""

import contextlib
import shlex
import signal
import subprocess
import time

from ddp.node import (
    continuation,
    exit_codes,
    lifelines,
    network,
    slurm_calls,
    spec,
    spool,
    srun,
    stall,
    storage,
    time_limit,
)
from ddp.node.control_files import ControlFiles
from ddp.node.placement import Placement
from ddp.node.started_job import StartedJob

TOGETHER_S = 3.0  # nodes that are lost within this time are lost together


class Ranks:
    """Runs the ranks, one attempt after the other; the fields describe the last attempt."""

    def __init__(
        self,
        job: StartedJob,
        placement: Placement,
        *,
        files: ControlFiles,
        shared: storage.Storage,
        fabric: spec.Fabric,
        env: dict[str, str],
        srun_path: str,
    ) -> None:
        self._job = job
        self._placement = placement
        self._files = files
        self._storage = shared
        self._fabric = fabric
        self._env = env
        self._srun_path = srun_path
        self._metrics = f"{job.run_dir}/metrics.jsonl"

        self.attempt_id = ""
        self.code = 0
        self.outcome = ""  # by the ranks' own account
        self.lost: list[str] = []  # nodes that stopped responding
        self.stalled = ""  # that it stands still, in words
        self.mark = time_limit.Mark(time.time(), -1, 1)  # where it began
        self._metrics_size = 0  # then
        self._words: list[str] = []  # of the command, without those of `--again`
        self._first_start = 0.0  # when the run's first attempt began, if `--again` is given
        self._stalled_at = -stall.APART_S  # when an attempt stood still last
        self._joined: set[str] = set()  # nodes whose tasks run
        self._step: subprocess.Popen[bytes] | None = None
        self._lines: lifelines.Lifelines | None = None

    def run(
        self,
        attempt_id: str,
        words: list[str | None],
        output: spool.Output,
        *,
        is_stopping: storage.Claim,
    ) -> None:
        """Run the ranks once, on all nodes, until they end; set `code` and `outcome`.

        A word that is None stands for the checkpoint to resume from.
        """
        has_checkpoint = self._begin(attempt_id)
        if is_stopping():  # the signal was received between two attempts
            self.ask_to_stop()
        # This run's own checkpoint goes before the one that it began from
        resume = "auto" if has_checkpoint else self._job.spec.resume
        filled = _fill_in(words, resume)
        self._words = filled
        argv = self._command([*filled, *self._words_to_continue()])

        lines = lifelines.Lifelines(self._on_joined, self._on_lost, self._env["HEAD_IP"])
        self._lines = lines
        self._env["LIFELINE"] = lines.place
        self.code = self._prepare_image()
        if self.code == 0:
            self._run_step(argv)
        lines.close()

        if self.code == 128 + signal.SIGTERM and not is_stopping():
            self.code = 1  # srun's TERM to the other tasks when one failed is not the reason
        if self.code or output.trouble:  # wait until all output is on the shared filesystem
            self._storage.await_ready()
            output.flush()
        self.outcome = self._files.read_outcome(attempt_id)
        spool.write(f"[RESULT] rc={self.code} outcome={self.outcome or 'none'}")

    def _begin(self, attempt_id: str) -> bool:
        """Begin an attempt; return whether the run has a checkpoint."""
        self._env["RUN_ATTEMPT_ID"] = attempt_id
        self._env["STOP_FILE"] = self._files.stop_path(attempt_id)
        self._env["TORCH_FR_DUMP_TEMP_FILE"] = f"{self._job.run_dir}/logs/{attempt_id}.flight-"
        has_checkpoint = self._files.clear(attempt_id)
        self.attempt_id = attempt_id
        self.mark = time_limit.Mark(time.time(), -1, 1)
        self._metrics_size = self._storage.do(lambda: time_limit.size(self._metrics))
        self.lost = []
        self._joined = set()
        self.stalled = ""
        return has_checkpoint

    def _words_to_continue(self) -> tuple[str, ...]:
        """Return the arguments of `--again`, if this attempt has something to continue from."""
        if not self._job.spec.again:
            return ()
        began = self._files.first_start()
        self._first_start = began or time.time()
        if not began:
            return ()
        found = self._storage.do(self._find_checkpoint)
        if found.missing:
            spool.write(f"[RESTART] nothing to continue from: no {found.missing}")
            return ()
        spool.write(f"[RESTART] it continues with: {shlex.join(found.words)}")
        return found.words

    def _find_checkpoint(self) -> continuation.Filled:
        job = self._job
        again = job.spec.again
        if not continuation.has_pattern(again):
            places = time_limit.folders(job.run_dir, job.spec.workdir, self._words)
            if not time_limit.has_saved(job.run_dir, places, self._first_start):
                return continuation.Filled((), f"new file below {' or '.join(places)}")
        return continuation.fill_in(again, job.run_dir, job.spec.workdir)

    def _has_saved(self) -> bool:
        """Return whether another attempt would continue by the arguments of `--again`."""
        return bool(self._job.spec.again) and not self._find_checkpoint().missing

    def _command(self, words: list[str]) -> list[str]:
        return srun.command(
            self._srun_path,
            self._job.spec,
            self._placement.hosts,
            [self._job.program, "node", self._job.spec_path, *words],
            env=self._env,
            mounts=self._fabric.mounts,
        )

    def _prepare_image(self) -> int:
        """Unpack an imported image and return the exit code.

        slurmstepd reads its bundle before the step begins.
        """
        job = self._job.spec
        if not job.container or not job.environment:
            return 0
        program = [self._job.program, "image", self._job.spec_path]
        argv = srun.command(self._srun_path, job, self._placement.hosts, program, env=self._env)
        return subprocess.call(argv, env=self._env, cwd="/")

    def _run_step(self, argv: list[str]) -> None:
        """Start the step, and wait until it ends; set `code`."""
        self.code = 1
        port = network.find_port()
        if port is None:
            return
        self._env["HEAD_PORT"] = str(port)
        if self._job.spec.launcher == "node":
            own = network.find_port(without=port)
            if own is None:
                return
            self._env["PROGRAM_PORT"] = str(own)
        spool.write(
            f"[ENV] job={self._job.job_id} attempt={self.attempt_id}"
            f" nodes={' '.join(self._placement.hosts)} head={self._env['HEAD_IP']}:{port}"
            f" ranks_per_node={self._job.spec.ranks_per_node}"
        )
        self._step = srun.start(argv, self._env)
        watch = stall.Watch(self._job.run_dir, self._on_stalled, self._has_saved)
        spool.remove_old(self._job.spec.cache)  # while the ranks start
        self.code = exit_codes.exit_code(self._step.wait())
        watch.close()

    def is_running(self) -> bool:
        """Return whether the step runs."""
        return self._step is not None and self._step.poll() is None

    def wait(self, timeout_s: float) -> None:
        """Wait until the step ends, or for a time."""
        if self._step is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._step.wait(timeout_s)

    def ask_to_stop(self, stop_by: float | None = None) -> None:
        """Ask the ranks by $STOP_FILE to save and leave, until a time if it is known."""
        if self.attempt_id:
            with contextlib.suppress(OSError, exit_codes.FatalError):
                self._files.ask_to_stop(self.attempt_id, stop_by)

    def signal(self, name: str) -> bool:
        """Send a signal to the ranks, and log which nodes it reached; return whether any."""
        reached: list[str] = []
        if self._lines is not None:
            reached = self._lines.signal(signal.Signals[f"SIG{name}"])
        missed = [host for host in self._placement.hosts if host not in reached]
        if reached:
            where = " ".join(reached)
            spool.write(f"[PREEMPT] {slurm_calls.stamp()} {name} was sent to the ranks on {where}")
        if missed:
            where = " ".join(missed)
            spool.write(
                f"[PREEMPT] {slurm_calls.stamp()} {name} did not reach the ranks on {where}"
            )
        return bool(reached)

    def first_step(self) -> int:
        """Return the first step that this attempt logged; -1 if unknown."""
        return time_limit.first_step(self._metrics, self._metrics_size)

    def _on_joined(self, host: str) -> None:
        """Remove replaced nodes from the job once all tasks run.

        Not before: Slurm (24.11 to 26.05) then gives srun wrong addresses of dynamic nodes.
        """
        self._joined.add(host)
        if self._joined.issuperset(self._placement.hosts):
            self._placement.remove_swapped()

    def _on_lost(self, host: str) -> None:
        """End the step, once all nodes that are lost together are known."""
        if not self.is_running() or host not in self._placement.hosts or host in self.lost:
            return
        spool.write(f"[ENV] {slurm_calls.stamp()} {host} does not respond")
        self.lost.append(host)
        is_first = len(self.lost) == 1
        if is_first and self._step is not None:
            slurm_calls.pause(TOGETHER_S)
            srun.kill(self._step)

    def _on_stalled(self, words: str) -> None:
        """Let the ranks print their stacks and end, at most once an hour."""
        if self._step is None or time.monotonic() - self._stalled_at < stall.APART_S:
            return
        self.stalled = words
        self._stalled_at = time.monotonic()
        spool.write(f"[ENV] {slurm_calls.stamp()} {words}: the ranks print their stacks and end")
        reached = self._lines.signal(signal.SIGABRT) if self._lines else []
        for host in self._placement.hosts:
            if host not in reached:
                spool.write(f"[ENV] {host}: its ranks were not reached")
        srun.end(self._step, self._job.job_id)


def _fill_in(words: list[str | None], resume: str) -> list[str]:
    filled: list[str] = []
    for word in words:
        filled.append(resume if word is None else word)
    return filled

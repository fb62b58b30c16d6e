"""The batch script's program: start the ranks on all nodes, and decide on retries when they end.

Slurm sends its signals to this process. All imports are done before the ranks start, and output
goes to this node's own disk first, so that this program survives the death of the shared
filesystem's client and waits for it.
"""

import os
import shutil
import subprocess
import traceback

from ddp.node import (
    exit_codes,
    job_secrets,
    mirror,
    network,
    notification,
    slurm_calls,
    spec,
    spool,
    srun,
    started_job,
    storage,
)
from ddp.node.control_files import ControlFiles
from ddp.node.placement import Placement
from ddp.node.ranks import Ranks
from ddp.node.recovery import Recovery
from ddp.node.stop_requests import CAUSES, StopRequests

LAST_FLUSH_S = 5.0  # for output, after an earlier wait or when Slurm is about to kill this process
_OF_RANKS = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: ",
}


class Supervisor:
    """One start of the job."""

    def __init__(self, job: spec.JobSpec, spec_path: str, env: dict[str, str]) -> None:
        self.job = started_job.read(job, spec_path, env)
        self.env = env
        # PATH may be the user's later
        self.srun_path = shutil.which("srun", path=env.get("PATH")) or "srun"
        self.fabric = network.choose(job, self.job.num_nodes)
        note = spool.note(self.job.host)
        self.output = spool.Output(job.cache, self.job.job_id, note)
        self.storage = storage.Storage(
            self.job.control, note, is_cancelled=lambda: self.stop.is_ending
        )
        self.files = ControlFiles(self.job, self.storage)
        self.stop = StopRequests(self.job, self.files)
        self.notify = ""  # the URL
        self.mirror: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Run the job and return its exit code."""
        self.stop.listen()
        try:
            code = self._run()
        except exit_codes.FatalError as e:
            spool.write(f"[FATAL] {self.job.host}: {e}")
            self.files.last_failure = str(e)
            code = exit_codes.FATAL
        except Exception:  # a bug: print it while this process still copies its output to the log
            traceback.print_exc()
            code = 1

        mirror.end(self.mirror, self.job, self._is_leaving)
        self._notify(code)
        if not self.stop.is_asked() and not self.stop.may_come_back:
            job_secrets.remove(self.job)  # a requeue removes them later
        is_late = bool(self.output.trouble) or self.stop.is_ending
        self.output.close(LAST_FLUSH_S if is_late else spool.FLUSH_S)
        if self.stop.is_ending:
            self._release()
        return code

    def _is_leaving(self) -> bool:
        """Return whether this job was asked to leave its nodes."""
        return self.stop.is_asked() or self.stop.is_ending

    def _notify(self, code: int) -> None:
        """Post that the run has ended, unless the job comes back or a sweep just goes on."""
        if not self.notify:
            return
        if self.stop.is_ending:
            self.stop.settle()
        if self.stop.is_requeued or self.stop.is_requeued_by_slurm:
            return
        array = self.job.array
        goes_on = array is not None and not slurm_calls.is_last_task(*array)
        if goes_on and code == 0:
            return
        state, reason = self._describe_end(code)
        about = notification.message(self.job, state=state, exit_code=code, reason=reason)
        timeout_s = notification.ENDING_S if self.stop.is_ending else notification.SEND_S
        notification.send(self.notify, about, self.env, timeout_s)

    def _describe_end(self, code: int) -> tuple[str, str]:
        """Return how the run ended, and why."""
        if code == 0:
            return "completed", ""
        if self.stop.cause == "cancelled":
            return "cancelled", ""
        if self.stop.is_asked() and self.stop.cause and not self.stop.is_stuck:
            return "stopped", CAUSES[self.stop.cause]
        return "failed", self.files.last_failure

    def _release(self) -> None:
        """Let the job start again without Slurm's delay, if it was requeued."""
        self.stop.settle()
        slurm_calls.release(
            self.job.slurm_id,
            self.job.restarts,
            is_ours=self.stop.is_requeued,
            ending_s=self.stop.ending_s(),
        )

    def _run(self) -> int:
        """Run one attempt after the other; return the exit code. Raises FatalError."""
        if self._was_done():
            return 0
        self._set_variables()
        words = self._words()
        placement = Placement(self.job, self.files, self._allocated())
        recovery = Recovery(
            self.job,
            placement,
            self.stop,
            files=self.files,
            shared=self.storage,
            output=self.output,
        )
        self._set_head(placement.hosts)
        ranks = Ranks(
            self.job,
            placement,
            files=self.files,
            shared=self.storage,
            fabric=self.fabric,
            env=self.env,
            srun_path=self.srun_path,
        )
        self.stop.pass_on_to(ranks, [word or "" for word in words])
        self._unpack_on(placement.spare)
        self.mirror = mirror.start(self.job, self.env)

        restarts = 0
        while True:
            attempt = self.job.attempt_id(restarts)
            ranks.run(attempt, words, self.output, is_stopping=self.stop.is_asked)
            if ranks.outcome == "done":
                return 0
            if self.stop.explains_end(ranks):
                return self._leave(ranks)
            if ranks.code == 0 and not self.job.spec.leaves_outcome:
                self._write_outcome(ranks, "done")
                return 0

            ranks.code = ranks.code or 1
            if not recovery.prepare_retry(ranks):
                return self._give_up(ranks)
            restarts += 1

    def _was_done(self) -> bool:
        """Return whether there is nothing to do, since the last start came to its end.

        Slurm up to 25.11 queues a job once more that was done after an earlier start of it had
        ended in a grace time (its flag GRACE_PREEMPT stays). Its secrets are removed by then.
        """
        if not self.files.was_done():
            return False
        spool.write("[REQUEUE] nothing to do: the job was done before Slurm queued it again")
        return True

    def _give_up(self, ranks: Ranks) -> int:
        """Leave after a failure without another attempt here; return the exit code."""
        if self.stop.is_requeued:
            return exit_codes.COMES_BACK
        if self.stop.is_asked() and ranks.code != exit_codes.FATAL:
            return self._leave(ranks)
        self._write_outcome(ranks, "failed")
        return ranks.code

    def _leave(self, ranks: Ranks) -> int:
        """Leave as Slurm asks, after a requeue if that is right; return the exit code."""
        self.stop.settle()
        if self.stop.cause == "cancelled":
            self._write_outcome(ranks, "cancelled")
            return exit_codes.COMES_BACK if ranks.outcome == "preempted" else ranks.code
        if self.stop.is_stuck:
            self._write_outcome(ranks, "failed")
            return ranks.code or 1
        self._write_outcome(ranks, "preempted")
        if self.stop.is_requeued and not self.stop.is_ending:
            self.stop.make_way(self.output)
        return exit_codes.COMES_BACK

    def _write_outcome(self, ranks: Ranks, outcome: str) -> None:
        if not ranks.outcome:
            self.files.write_outcome(ranks.attempt_id, outcome, ranks.code, self.stop.cause)

    # -- before the first attempt ----------------------------------------------------------------

    def _set_variables(self) -> None:
        """Set the variables of the ranks. Raises FatalError."""
        job = self.job.spec
        env = self.env
        env.update(job.variables)
        env.update(job_secrets.read_variables(job.secrets_path, self.storage))
        self.notify = job_secrets.read_notify(job.notify_path, self.storage)
        env.update(_OF_RANKS)
        env["JOB_DIR"] = job.job_dir
        env["RUN_DIR"] = self.job.run_dir
        env["NPROC"] = str(job.ranks_per_node)
        env.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # else each rank connects with each other one
        if not job.gpus_per_node:
            env["CUDA_VISIBLE_DEVICES"] = ""
        job_secrets.check_token(job.token_path, self.storage)

    def _words(self) -> list[str | None]:
        """Return the words of the command; None stands for the checkpoint. Raises FatalError."""
        places = {"RUN_DIR": self.job.run_dir, "resume": None}
        words: list[str | None] = []
        for word in self.job.spec.command:
            words.append(places[word.text] if word.is_variable else word.text)
        if self.job.array is None:
            return words

        path = f"{self.job.run_dir}/args"
        try:
            words += self.files.read_lines(path)
        except OSError as e:
            hint = "is the shared filesystem mounted here?"
            raise exit_codes.FatalError(
                f"{path} cannot be read ({storage.reason(e)}); {hint}"
            ) from e
        self.files.write_job_id()
        return words

    def _allocated(self) -> list[str]:
        """Return the nodes of the job. Raises FatalError."""
        if self.job.num_nodes == 1 and self.job.nodelist == self.job.host:
            return [self.job.host]
        return slurm_calls.hostnames(self.job.nodelist)

    def _set_head(self, hosts: list[str]) -> None:
        self.env["HEAD_IP"] = self._head_address(hosts)
        self.env["HEAD_NODE"] = self.job.host

    def _head_address(self, hosts: list[str]) -> str:
        """Return this node's address for the others. Raises FatalError.

        Slurm is asked now: a node may return with another address.
        """
        if name := self.fabric.interface:
            try:
                return network.interface_address(name)
            except OSError as e:
                needs = f"the interface {name} with an address, which does not exist here"
                raise exit_codes.FatalError(f"fabric={self.fabric.name} needs {needs}") from e
        if self.job.num_nodes == 1:
            return "127.0.0.1"
        shown = slurm_calls.show_nodes(self.job.nodelist, hosts)
        return network.head_address(self.job.host, hosts, shown)

    def _unpack_on(self, spare: list[str]) -> None:
        """Let spare nodes unpack the environment in the meantime."""
        if not spare or self.job.spec.environment is None:
            return
        program = [self.job.program, "unpack", self.job.spec_path]
        argv = srun.command(self.srun_path, self.job.spec, spare, program, env=self.env)
        subprocess.Popen(argv)


def main(spec_path: str) -> int:
    """Run a job and return its exit code."""
    job = spec.load(spec.JobSpec, spec_path)
    supervisor = Supervisor(job, spec_path, dict(os.environ))
    os.chdir("/")  # Slurm's choice is on the shared filesystem
    return supervisor.run()

"""The batch script's program: start the ranks on all nodes, and decide on retries when they end.

Slurm sends its signals to this process. All imports are done before the ranks start, and output goes to this node's own
disk first, so that this program survives the death of the shared filesystem's client and waits for it.
"""

import contextlib
import dataclasses
import functools
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
import traceback
import zipapp

from ddp.node import (
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
from ddp.node.diagnosis import verdicts

LEAVING_S = 30.0  # Slurm's KillWait
LAST_FLUSH_S = 5.0  # for output, after an earlier wait or when Slurm is about to kill this process
_SLICE_S = 0.1  # of a pause that a signal ends
MAX_FAULTS = (
    8  # attempts after faults of the filesystem, a node or the network, over all starts of the job
)
LONGEST_PAUSE_S = 60.0
EXPLAINING_S = 120.0
TOGETHER_S = 3.0  # nodes that are lost within this time are lost together
PORT, PORTS = 20000, 10000  # below the range of outgoing connections
WARNED_S = 300.0  # before the end of the time limit: a warning within it is Slurm's (_LEAD_S and up to 60 s)
SAVING_S = (
    10.0  # for ranks to save before the supervisor looks whether they did, within Slurm's KillWait
)
CAUSES = {
    "limit": "it has reached its time limit",
    "preemption": "another job takes its place",
    "requeue": "it was requeued",
    "failure": "a node has failed",
    "cancelled": "it was cancelled",
}


class Supervisor:
    """One start of the job."""

    def __init__(self, job: spec.JobSpec, spec_path: str, env: dict[str, str]) -> None:
        self.job, self.spec_path, self.env = job, spec_path, env
        self.host, self.job_id = env["SLURMD_NODENAME"], env["SLURM_JOB_ID"]
        self.slurm_id = (
            self.job_id
        )  # for commands: the id of an array's last task stands for all of its tasks
        if job.is_sweep:
            self.slurm_id = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
        self.run_dir = (
            f"{job.job_dir}-{env['SLURM_ARRAY_TASK_ID']}" if job.is_sweep else job.job_dir
        )
        self.control = f"{self.run_dir}/control"
        self.program = f"{self.control}/{self.job_id}.pyz"
        self.num_nodes = job.nodes or int(env["SLURM_JOB_NUM_NODES"])
        self.restarts = int(env.get("SLURM_RESTART_COUNT") or 0)
        self.again = 0  # attempts within this start of the job
        self.retries = {"program": 0, "faults": 0}
        self.hosts: list[str] = []  # those of the ranks
        self.allocated: list[str] = []  # with the spare nodes behind them
        self.lost: list[str] = []  # nodes that stopped responding in this attempt
        self.joined: set[str] = set()  # nodes whose tasks run
        self.removed: list[str] = []  # nodes that spare ones replaced
        self.stalled, self.stalled_at = (
            "",
            -stall.APART_S,
        )  # that this attempt stands still; when the last one did
        self._step: subprocess.Popen[bytes] | None = None
        self.stopping = ""  # the first signal
        self.is_ending = False  # TERM was received, after whatever signal: Slurm ends this job
        self.ending_at = 0.0
        self.end = float(env.get("SLURM_JOB_END_TIME") or "inf")
        self.cause = ""  # why it ends, a key of CAUSES
        self.is_signalled = False  # the ranks got a signal, so that their end is no sign of a fault
        self.is_stuck = False  # it reached its limit again without progress
        self.comes_back = False  # the job may be requeued and then needs its token
        self.is_requeued = False
        self.words: list[str | None] = []
        self._settling = threading.Lock()
        self._is_settled = False
        self._lines: lifelines.Lifelines | None = None
        self._mark = time_limit.Mark(time.time(), -1, 1)
        self._metrics = f"{self.run_dir}/metrics.jsonl"
        self._metrics_size = 0
        self.attempt_id = ""
        self.code = 0
        self.outcome = ""
        self.output = spool.Output(job.cache, self.job_id, spool.note(self.host))
        self.storage = storage.Storage(
            self.control, spool.note(self.host), is_cancelled=lambda: self.is_ending
        )
        self.fabric = network.choose(job, self.num_nodes)
        self._stop_file = ""

    # -- the job -------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the job and return its exit code."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            code = self._run()
        except exit_codes.FatalError as e:
            spool.write(f"[FATAL] {self.host}: {e}")
            code = exit_codes.FATAL
        except Exception:  # a bug: print it while this process still copies its output to the log
            traceback.print_exc()
            code = 1
        self._forget_token()
        self.output.close(LAST_FLUSH_S if self.output.trouble or self.is_ending else spool.FLUSH_S)
        if self.is_ending:
            self._settle()
            ending_s = time.monotonic() - self.ending_at
            slurm_calls.release(
                self.slurm_id, self.restarts, is_ours=self.is_requeued, ending_s=ending_s
            )
        return code

    def _run(self) -> int:
        self._prepare()
        while True:
            self._attempt()
            if self.outcome == "done":
                return 0
            if self._has_left():
                return self._leave()
            if self.code == 0 and not self.job.leaves_outcome:
                self._leave_outcome("done")
                return 0
            self.code = self.code or 1
            if self._retry():
                continue
            if self.is_requeued:
                return exit_codes.COMES_BACK
            if self.stopping and self.code != exit_codes.FATAL:
                return self._leave()
            self._leave_outcome("failed")
            return self.code

    def _prepare(self) -> None:
        import shutil

        job, env = self.job, self.env
        self.srun = (
            shutil.which("srun", path=env.get("PATH")) or "srun"
        )  # PATH may be the user's from here on
        env.update(job.variables)
        env.update(self._secrets())
        env |= {
            "JOB_DIR": job.job_dir,
            "RUN_DIR": self.run_dir,
            "NPROC": str(job.ranks_per_node),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: ",
        }
        env.setdefault(
            "TORCH_GLOO_LAZY_INIT", "1"
        )  # else each rank connects with each other one (gloo)
        if not job.gpus_per_node:
            env["CUDA_VISIBLE_DEVICES"] = ""
        if job.token_path and not self.storage.do(lambda: os.access(job.token_path, os.R_OK)):
            where = "does not exist, so this job has no Hugging Face token"
            spool.write(
                f"[ENV] {job.token_path} {where}; submit the run with the trainer to get one"
            )
        places = {"RUN_DIR": self.run_dir, "resume": None}  # each attempt sets the second
        self.words = [places[word.text] if word.is_variable else word.text for word in job.command]
        if job.is_sweep:
            try:
                self.words += self.storage.do(lambda: _text(f"{self.run_dir}/args")).splitlines()
            except OSError as e:
                hint = f"({storage.reason(e)}); is the shared filesystem mounted here?"
                raise exit_codes.FatalError(f"{self.run_dir}/args cannot be read {hint}") from e
            self._write(f"{self.control}/job", f"{self.job_id}\n")
        nodelist = env["SLURM_JOB_NODELIST"]
        is_alone = self.num_nodes == 1 and nodelist == self.host
        self._take([self.host] if is_alone else slurm_calls.hostnames(nodelist))
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._read(f"{self.control}/{self.job_id}.retries"))
            self.retries = {name: int(found[name]) for name in self.retries}
        env["HEAD_IP"], env["HEAD_NODE"] = self._head_address(), self.host
        program = os.path.dirname(self.spec_path)
        self.storage.do(
            lambda: zipapp.create_archive(program, self.program)
        )  # one file, which each node reads once
        if job.environment and (spare := self.allocated[self.num_nodes :]):
            subprocess.Popen(
                srun.command(
                    self.srun, job, spare, [self.program, "unpack", self.spec_path], env=env
                )
            )

    def _take(self, allocated: list[str]) -> None:
        """Put the ranks on the first nodes of these; the others are spare."""
        self.allocated, self.hosts = allocated, allocated[: self.num_nodes]
        self._write(
            f"{self.control}/{self.job_id}.hosts", " ".join(self.hosts) + "\n"
        )  # in the order of the ranks

    def _head_address(self) -> str:
        """Return this node's address for the others. Query Slurm now: a node may return with another address."""
        if name := self.fabric.interface:
            try:
                return network.interface_address(name)
            except OSError as e:
                why = f"fabric={self.fabric.name} needs the interface {name} with an address, which does not exist here"
                raise exit_codes.FatalError(why) from e
        if self.num_nodes == 1:
            return "127.0.0.1"
        shown = slurm_calls.show_nodes(self.env["SLURM_JOB_NODELIST"], self.hosts)
        return network.head_address(self.host, self.hosts, shown)

    # -- signals -------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _: object) -> None:
        name = "TERM" if number == signal.SIGTERM else "USR1"
        self.stopping = self.stopping or name
        if name == "TERM" and not self.is_ending:
            self.ending_at = time.monotonic()
            self.is_ending = True
            self.is_signalled = True  # Slurm sends TERM to the ranks, too
            threading.Thread(target=self._settle, daemon=True).start()
        spool.write(
            f"[PREEMPT] {slurm_calls.stamp()} {name}: $STOP_FILE asks the ranks to save and leave"
        )
        threading.Thread(target=self._ask_to_stop, args=(name,), daemon=True).start()

    def _ask_to_stop(self, name: str) -> None:
        if name == "USR1" and self.job.stop_signal:
            self._signal_ranks(self.job.stop_signal)
        if name == "TERM" and self._is_running() and not slurm_calls.signals_every_process():
            self._signal_ranks(name)
        if path := self._stop_file:
            with contextlib.suppress(OSError, exit_codes.FatalError):
                self.storage.do(lambda: _write(path, ""))

    def _signal_ranks(self, name: str) -> None:
        """Send the program's stop signal to the ranks on all nodes, and log who was reached."""
        reached = (
            self._lines.signal(signal.Signals[f"SIG{name}"]) if self._lines is not None else []
        )
        self.is_signalled = self.is_signalled or bool(reached)
        if reached:
            spool.write(
                f"[PREEMPT] {slurm_calls.stamp()} {name} was sent to the ranks on {' '.join(reached)}"
            )
        if missed := [host for host in self.hosts if host not in reached]:
            spool.write(
                f"[PREEMPT] {slurm_calls.stamp()} {name} did not reach the ranks on {' '.join(missed)}"
            )

    # -- the end of an attempt that was asked to stop ------------------------------------------------------------------

    def _has_left(self) -> bool:
        """Return whether the attempt ended because it was asked to stop.

        One that only $STOP_FILE asked, and that ended with 0 without an outcome, has come to its own end.
        """
        if self.outcome == "preempted" or self.is_ending:
            return True
        if not self.stopping:
            return (
                self._is_preempted()
            )  # at the start of its grace time Slurm sends TERM to the ranks alone
        if self.lost or self.stalled or self.code == exit_codes.FATAL:
            return False
        return self.is_signalled or self.code != 0

    def _is_preempted(self) -> bool:
        return slurm_calls.is_preempted(self.slurm_id)

    def _leave(self) -> int:
        """Requeue the job if that is right, and return its exit code."""
        self._settle()
        if self.cause == "cancelled":
            self._leave_outcome("cancelled")
            return exit_codes.COMES_BACK if self.outcome == "preempted" else self.code
        if self.is_stuck:
            self._leave_outcome("failed")
            return self.code or 1
        self._leave_outcome("preempted")
        if self.is_requeued and not self.is_ending:
            self._make_way()
        return exit_codes.COMES_BACK

    def _settle(self) -> None:
        """Find out why the job is to stop, and requeue it where Slurm does not.

        At once after TERM: Slurm takes a requeue until the job's last process has ended.
        """
        with self._settling:
            if self._is_settled:
                return
            is_ending = self.is_ending
            found = self._find_cause(is_ending=is_ending)
            self.cause = found.cause
            if found.cause in ("limit", "preemption") and not found.is_requeued:
                self._come_back()
            self._is_settled = is_ending or self.is_requeued or not self.is_ending

    def _find_cause(self, *, is_ending: bool) -> slurm_calls.Ending:
        if is_ending:
            found = slurm_calls.ending_of(self.slurm_id, self.restarts, self.end)
            spool.write(
                f"[PREEMPT] {slurm_calls.stamp()} Slurm ends this job: {CAUSES[found.cause]}"
            )
            return found
        if self._is_preempted():
            return slurm_calls.Ending("preemption")
        return slurm_calls.Ending("limit")  # what the warning is for

    def _come_back(self) -> None:
        """Requeue the job, unless it has come back often enough or does not get on."""
        if self.restarts >= self.job.max_requeues:
            spool.write(f"[REQUEUE] not again: max-requeues is {self.job.max_requeues}")
            return
        if self.cause == "limit" and not self._gets_on():
            return
        self._requeue()

    def _gets_on(self) -> bool:
        """Return whether another attempt may get further, and note where this one began for the next one."""
        if time.time() < self.end - WARNED_S:
            return True  # an operator's warning
        path = f"{self.control}/{self.job_id}.limits"
        places = time_limit.folders(
            self.run_dir, self.job.workdir, [word or "" for word in self.words]
        )
        before = time_limit.parse(self._read(path))
        mark = dataclasses.replace(self._mark, step=self._first_step())
        if before is not None and not self._is_further(before, mark, places):
            mark = dataclasses.replace(before, attempts=before.attempts + 1)
        if mark.attempts < time_limit.ATTEMPTS:
            self._write(path, time_limit.dump(mark))
            return True
        self.is_stuck = True
        why = f"{mark.attempts} attempts reached the time limit without progress (no file below {' or '.join(places)})"
        why += "; save checkpoints there and start from them, or submit it with a longer time-limit"
        spool.write(f"[REQUEUE] not again: {why}")
        self._record_failure("program", "-", why)
        return False

    def _first_step(self) -> int:
        is_counted = self.job.metrics and "step" not in dict(self.job.metrics)
        if is_counted:  # our count of lines goes on over all attempts
            return -1
        return time_limit.first_step(self._metrics, self._metrics_size)

    def _is_further(
        self, before: time_limit.Mark, mark: time_limit.Mark, places: list[str]
    ) -> bool:
        """Return whether this attempt began further than the one before, or either left something."""
        if mark.step > before.step >= 0:
            return True
        if self._step is not None and self.is_ending:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the ranks may save now
                self._step.wait(SAVING_S)
        return time_limit.has_saved(self.run_dir, places, before.since)

    # -- an attempt ----------------------------------------------------------------------------------------------------

    def _attempt(self) -> None:
        """Run the ranks once, on all nodes, until they end; set code and outcome."""
        self.attempt_id = f"{self.job_id}.r{self.restarts}" + (
            f"t{self.again}" if self.again else ""
        )
        outcome, stop = (f"{self.control}/{self.attempt_id}.{name}" for name in ("outcome", "stop"))
        env = self.env
        env |= {"RUN_ATTEMPT_ID": self.attempt_id, "STOP_FILE": stop}
        env["TORCH_FR_DUMP_TEMP_FILE"] = f"{self.run_dir}/logs/{self.attempt_id}.flight-"
        resumes = self.storage.do(lambda: _begin(outcome, stop, f"{self.run_dir}/latest"))
        self._stop_file = stop
        self._mark = time_limit.Mark(time.time(), -1, 1)
        self._metrics_size = self.storage.do(lambda: time_limit.size(self._metrics))
        if self.stopping:  # the signal was received between two attempts
            self._ask_to_stop("")
        resume = (
            "auto" if resumes else self.job.resume
        )  # this run's own checkpoint goes before the one it began from
        words = [resume if word is None else word for word in self.words]
        program = [self.program, "node", self.spec_path, *words]
        argv = srun.command(
            self.srun, self.job, self.hosts, program, env=env, mounts=self.fabric.mounts
        )
        self.lost, self.joined, self.stalled = [], set(), ""
        lines = self._lines = lifelines.Lifelines(self._on_joined, self._on_lost, env["HEAD_IP"])
        env["LIFELINE"] = lines.place
        self.code = 0
        if (
            self.job.container and self.job.environment
        ):  # slurmstepd reads the bundle before the step begins
            prepare = srun.command(
                self.srun, self.job, self.hosts, [self.program, "image", self.spec_path], env=env
            )
            self.code = subprocess.call(prepare, env=env, cwd="/")
        for port in _ports(0 if self.code else 3):
            self.code = 1
            if not network.is_free(port):
                spool.write(f"[ENV] port {port} is taken, trying another")
                continue
            env["HEAD_PORT"] = str(port)
            spool.write(
                f"[ENV] job={self.job_id} attempt={self.attempt_id} nodes={' '.join(self.hosts)} "
                f"head={env['HEAD_IP']}:{port} ranks_per_node={self.job.ranks_per_node}"
            )
            self._step = srun.start(argv, env)
            watch = stall.Watch(self.run_dir, self._on_stalled)
            spool.remove_old(self.job.cache)  # while the ranks start
            self.code = exit_codes.exit_code(self._step.wait())
            watch.close()
            break
        lines.close()
        if self.code == 143 and not self.stopping:
            self.code = 1  # srun's TERM to the other tasks when one failed is not the reason
        if self.code or self.output.trouble:  # wait until all output is on the shared filesystem
            self.storage.await_ready()
            self.output.flush()
        found = re.search(r'"outcome": *"([a-z]*)"', self._read(outcome))
        self.outcome = found[1] if found else ""
        spool.write(f"[RESULT] rc={self.code} outcome={self.outcome or 'none'}")

    def _on_joined(self, host: str) -> None:
        """Remove replaced nodes from the job when all tasks run, before Slurm ends the job for their sake.

        Not before: Slurm (24.11 to 26.05) then gives srun wrong addresses of dynamic nodes.
        """
        self.joined.add(host)
        if self.removed and self.joined.issuperset(self.hosts):
            slurm_calls.keep(self.slurm_id, self.allocated)

    def _on_lost(self, host: str) -> None:
        if self._is_running() and host in self.hosts and host not in self.lost:
            spool.write(f"[ENV] {slurm_calls.stamp()} {host} does not respond")
            self.lost.append(host)
            if len(self.lost) == 1 and self._step is not None:
                slurm_calls.pause(TOGETHER_S)
                srun.kill(self._step)  # its lifelines end the tasks

    def _is_running(self) -> bool:
        return self._step is not None and self._step.poll() is None

    def _on_stalled(self, words: str) -> None:
        """Let the ranks print their stacks and end, at most once an hour."""
        if self._step is not None and time.monotonic() - self.stalled_at >= stall.APART_S:
            self.stalled, self.stalled_at = words, time.monotonic()
            spool.write(
                f"[ENV] {slurm_calls.stamp()} {words}: the ranks print their stacks and end"
            )
            reached = self._lines.signal(signal.SIGABRT) if self._lines else []
            for host in self.hosts:
                if host not in reached:
                    spool.write(f"[ENV] {host}: its ranks were not reached")
            srun.end(self._step, self.job_id)

    # -- after a failure -----------------------------------------------------------------------------------------------

    def _retry(self) -> bool:
        """Record why an attempt failed; requeue the job, or return True to try again here."""
        kind, node, words, comes_again = self._explain()
        words = " ".join(words.split())[:300] or f"exit code {self.code}"
        self._record_failure(kind, node, words)
        if comes_again or self.is_ending:
            return False
        if kind in ("filesystem", "network") or self.stalled:
            return self._outwait(kind, node)
        if kind != "node" or node == "-":
            return self._restart()
        bad = self.lost or [node]
        if self.retries["faults"] < MAX_FAULTS and self._swap(bad):
            return True
        if self.retries["faults"] < MAX_FAULTS and self._is_spare(bad):
            self._count("faults")
            if self.lost:  # else the job would be COMPLETING until Slurm notices
                slurm_calls.keep(
                    self.slurm_id, [host for host in self.allocated if host not in bad]
                )
            if self._requeue():
                self._leave_out(bad)
                self._make_way()
            return False
        if words == verdicts.LOST:
            return self._outwait(kind, node)
        if "is the shared filesystem mounted" in words:
            return self._outwait("filesystem", node)
        partition = self.env["SLURM_JOB_PARTITION"]
        return self._restart(
            f"{node} is suspect, but partition {partition} has no other node for it; trying it again"
        )

    def _record_failure(self, kind: str, node: str, words: str) -> None:
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\t{self.attempt_id}\t{kind}\t{node}\t{words}\n"
        self._write(f"{self.control}/{self.job_id}.failures", line, append=True)
        spool.write(f"[FAILED] attempt={self.attempt_id} fault={kind} node={node}: {words}")

    def _explain(self) -> verdicts.Verdict:
        if self.lost and 1 < len(self.lost) == len(self.hosts) - 1:
            return verdicts.Verdict("network", "-", "no other node responds")
        if self.lost:
            return verdicts.Verdict("node", self.lost[0], verdicts.LOST)
        if self.stalled:
            node, words = "-", ""
            with contextlib.suppress(OSError, ValueError):
                node, words = storage.within(
                    lambda: stall.behind(self.run_dir, self.job_id, self.hosts), EXPLAINING_S
                )
            return verdicts.Verdict("program", node, "; ".join(filter(None, (self.stalled, words))))
        with contextlib.suppress(OSError, ValueError):
            attempt = (self.run_dir, self.job_id, self.attempt_id, self.hosts)
            return storage.within(lambda: verdicts.blame(*attempt), EXPLAINING_S)
        return verdicts.Verdict("unknown", "-", "")

    def _restart(self, remark: str = "") -> bool:
        """Count a restart after a failure of the program; return False where max-restarts is reached."""
        if self.retries["program"] >= self.job.max_restarts:
            return False
        self._count("program")
        spool.write(f"[RESTART] {self.retries['program']} of {self.job.max_restarts}")
        if remark:
            spool.write(f"[RESTART] {remark}")
        self.again += 1
        return True

    def _outwait(self, kind: str, node: str) -> bool:
        """Wait until a fault that is not the program's may be over; return whether to try again."""
        if self.retries["faults"] >= MAX_FAULTS:
            spool.write(
                f"[RESTART] given up after {MAX_FAULTS} faults of the filesystem, the nodes or the network"
            )
            return False
        self._count("faults")
        if kind == "node" and not slurm_calls.await_node(
            node, lambda: bool(self.stopping), is_silent=bool(self.lost)
        ):
            return False
        self.storage.await_ready()
        pause_s = min(LONGEST_PAUSE_S, 2.0 ** self.retries["faults"])
        where = f" on {node}" if node != "-" else ""
        count = f"{self.retries['faults']} of {MAX_FAULTS}; it is not counted against max-restarts"
        spool.write(f"[RESTART] after a fault of the {kind}{where} in {pause_s:.0f} s, {count}")
        for _ in range(int(pause_s / _SLICE_S)):
            if not self.stopping:
                slurm_calls.pause(_SLICE_S)
        self.again += 1
        return not self.stopping

    def _swap(self, bad: list[str]) -> bool:
        """Put the ranks on spare nodes of this job in place of bad ones, once; return whether there are enough."""
        left = [host for host in self.allocated if host not in bad]
        if self.removed or self.host in bad or len(left) < self.num_nodes:
            return False
        self._count("faults")
        self.removed = bad
        self._take(left)
        self.again += 1
        spool.write(f"[RESTART] on {' '.join(self.hosts)}, without {' '.join(bad)}")
        return True

    def _is_spare(self, bad: list[str]) -> bool:
        """Return whether the partition has enough nodes without these and those excluded already."""
        if set(bad) & set(self.job.nodelist):
            return False  # nodelist names it
        usable = slurm_calls.usable_nodes(self.env["SLURM_JOB_PARTITION"], self.job.reservation)
        return len(usable - {*bad, *self.job.exclude, *self._left_out()}) >= self.num_nodes

    def _left_out(self) -> list[str]:
        return self._read(f"{self.control}/{self.job_id}.excluded").split()

    def _leave_out(self, bad: list[str]) -> None:
        self._write(
            f"{self.control}/{self.job_id}.excluded",
            "".join(f"{node}\n" for node in bad),
            append=True,
        )
        fewest = (
            [f"NumNodes={self.num_nodes}-{self.env['SLURM_JOB_NUM_NODES']}"]
            if self.job.nodes
            else []
        )
        slurm_calls.exclude(
            self.slurm_id, ",".join(sorted({*self.job.exclude, *self._left_out(), *bad})), fewest
        )

    def _requeue(self) -> bool:
        self.comes_back = True
        is_ending = self.is_ending
        is_interrupted = (lambda: False) if is_ending else (lambda: self.is_ending)
        self.is_requeued = slurm_calls.requeue(
            self.slurm_id, self.restarts, is_interrupted, is_ending=is_ending
        )
        return self.is_requeued

    def _make_way(self) -> None:
        """Wait for Slurm's TERM, so that the job can wait in the queue."""
        self.output.flush()
        for _ in range(int(LEAVING_S / _SLICE_S)):
            if not self.is_ending:
                slurm_calls.pause(_SLICE_S)

    def _count(self, what: str) -> None:
        self.retries[what] += 1
        self._write(f"{self.control}/{self.job_id}.retries", json.dumps(self.retries) + "\n")

    def _leave_outcome(self, outcome: str) -> None:
        """Write an outcome where the ranks wrote none: without accounting, Slurm soon forgets a job."""
        if not self.outcome:
            found = {"outcome": outcome, "exit_code": self.code}
            if self.cause:
                found["cause"] = self.cause
            text = json.dumps(found)
            self._write(f"{self.control}/{self.attempt_id}.outcome", f"{text}\n")

    def _forget_token(self) -> None:
        """Remove the secrets when this job ends by itself; where it may be requeued, they are removed later."""
        paths = [path for path in (self.job.token_path, self.job.secrets_path) if path]
        if not paths or self.stopping or self.comes_back:
            return
        array = (
            (self.env["SLURM_ARRAY_JOB_ID"], self.env["SLURM_ARRAY_TASK_ID"])
            if self.job.is_sweep
            else None
        )
        if array and not slurm_calls.is_last_task(*array):
            return  # other runs of the sweep use it
        for path in paths:
            with contextlib.suppress(OSError):
                storage.within(functools.partial(os.unlink, path), storage.CALL_S)

    def _secrets(self) -> dict[str, str]:
        """Read the variables that stand in no script. Raises FatalError."""
        path = self.job.secrets_path
        try:
            found: dict[str, str] = json.loads(self.storage.do(lambda: _text(path))) if path else {}
        except OSError as e:
            hint = "submit the run again with env-file"
            raise exit_codes.FatalError(
                f"{path}, the job's secret variables: {storage.reason(e)}; {hint}"
            ) from e
        return found

    def _read(self, path: str) -> str:
        """Return the text of a file, "" where it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return self.storage.do(lambda: _text(path))
        return ""

    def _write(self, path: str, text: str, *, append: bool = False) -> None:
        with contextlib.suppress(OSError):  # the log holds the same
            self.storage.do(lambda: _write(path, text, append=append))


def _ports(count: int) -> list[int]:
    """Choose ports for torchrun's store that nobody foresees: it asks no one who they are."""
    return random.SystemRandom().sample(range(PORT, PORT + PORTS), count)


def _begin(outcome: str, stop: str, latest: str) -> bool:
    """Remove the files of an earlier attempt of this name; return whether the run has a checkpoint."""
    for path in (outcome, stop):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    try:
        os.stat(latest)
    except FileNotFoundError:
        return False
    return True


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(1 << 20)


def _write(path: str, text: str, *, append: bool = False) -> None:
    with open(path, "a" if append else "w", encoding="utf-8") as file:
        file.write(text)


def main(spec_path: str) -> int:
    """Run a job and return its exit code."""
    job = spec.load(spec.JobSpec, spec_path)
    supervisor = Supervisor(job, spec_path, dict(os.environ))
    os.chdir("/")  # Slurm's choice is on the shared filesystem
    return supervisor.run()

"""A task of the job's step, one on each node, which runs torchrun's agent.

It prepares the environment and the network's variables, runs the agent, and copies the ranks' logs
from this node's disk to the run's folder. Of the shared filesystem it reads the environment's
archive, once on each node.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time

from ddp.node import (
    accelerate_settings,
    exit_codes,
    interpreter,
    lifelines,
    memory_kills,
    network,
    output_metrics,
    processes,
    rank_command,
    rank_connections,
    slurm_calls,
    spec,
    spool,
    storage,
    time_limit,
    torchrun,
)

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_NOT_OURS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# srun ends all tasks when one exits: the others get this long to print their errors
LAST_LINES_S = 3.0
SAVING_S = 5.0  # for a task to exit after another one has failed
_INSTANCE = re.compile(r"\(UUID: (MIG-[^)]+)\)")


class Task:
    """One task of the job's step."""

    def __init__(self, job: spec.JobSpec, spec_path: str, env: dict[str, str]) -> None:
        self.job = job
        self.spec_path = spec_path
        self.env = env
        self.host = env.get("SLURMD_NODENAME") or env.get("HOSTNAME", "node")
        self.run_dir = env["RUN_DIR"]
        self.attempt = env["RUN_ATTEMPT_ID"]
        self.number = env["SLURM_NODEID"]
        self._failed = f"{self.run_dir}/control/{self.attempt}.failed"
        self._agent: subprocess.Popen[bytes] | None = None
        self._is_leaving = False  # the ranks were asked to save and end
        self._forwarder: spool.Forwarder | None = None
        self._connections: rank_connections.Watch | None = None

    def run(self, words: list[str]) -> int:
        """Run the job's command on this node and return the exit code. Raises FatalError."""
        python = interpreter.find(self.job, self.host, f"{self.run_dir}/control", self.env)
        num_nodes = int(self.env.get("SLURM_STEP_NUM_NODES", "1"))
        fabric = network.choose(self.job, num_nodes)
        network.use(fabric, self.job, self.env, num_nodes)
        self._connect(fabric)
        logs = self._logs()
        self._listen()

        witness = storage.Witness(self.spec_path)
        agent = self._start_agent(python, words, logs)
        scanner = self._scanner(logs, words)
        code = self._end(exit_codes.exit_code(agent.wait()))
        if code:
            self._report_failure(witness)
        if scanner is not None:
            scanner.close()
        self._end_logs(logs)
        if code:
            time.sleep(LAST_LINES_S)
        return code

    def _listen(self) -> None:
        """Take the signals of Slurm and of the supervisor."""
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGABRT, lambda number, _frame: self._signal_ranks(number))
        for number in _NOT_OURS:
            signal.signal(number, lambda _number, _frame: None)  # children would inherit SIG_IGN

    def _end(self, code: int) -> int:
        """Note that the agent has ended; return this task's exit code."""
        self._agent = None
        if self._connections is not None:
            self._connections.close(is_done=code == 0)
        if code and self._is_leaving:  # srun would end the other tasks, whose ranks may still save
            ended = f"the ranks here ended with code {code} when they were asked to stop"
            spool.write(f"[PREEMPT] {self.host}: {ended}")
            return 0
        return code

    def _report_failure(self, witness: storage.Witness) -> None:
        """Log what this node knows about a failure; let the other tasks exit without saving."""
        if shortage := memory_kills.shortage(self.host):
            spool.write(f"[ENV] {shortage}")
        if trouble := witness.trouble():
            lost = f"{self.job.workspace} lost the files that were open ({trouble})"
            spool.write(f"[ENV] {self.host}: {lost}")
        with contextlib.suppress(OSError):
            storage.within(self._leave_failed, storage.CALL_S)

    def _leave_failed(self) -> None:
        with open(self._failed, "w", encoding="ascii"):
            pass

    def _connect(self, fabric: spec.Fabric) -> None:
        """Set this node's address and interface, and connect to the supervisor.

        Raises FatalError. gloo takes one exact name; "=" makes NCCL match exactly.
        """
        env = self.env
        head = env["HEAD_IP"]
        head_node = env["HEAD_NODE"]
        address, interface = network.find_way(head, head_node, fabric.interface)
        if self.host != head_node:
            network.check_head(head, int(env["HEAD_PORT"]), head_node)
        if connection := lifelines.hold(head, env["LIFELINE"], self.host):
            threading.Thread(target=self._follow, args=(connection,), daemon=True).start()

        env["MY_IP"] = address
        if interface:
            env["GLOO_SOCKET_IFNAME"] = env.get("GLOO_SOCKET_IFNAME") or interface
            env["NCCL_SOCKET_IFNAME"] = env.get("NCCL_SOCKET_IFNAME") or f"={interface}"
        gloo = env.get("GLOO_SOCKET_IFNAME", "")
        nccl = env.get("NCCL_SOCKET_IFNAME", "")
        spool.write(
            f"[ENV] node={self.host} address={address} fabric={fabric.name} gloo={gloo} nccl={nccl}"
        )

    def _logs(self) -> str:
        """Return the folder for this node's logs: on its own disk, or else in the run's folder."""
        below = f"node-{self.number}"
        note = spool.note(self.host)
        shared = f"{self.run_dir}/logs/{self.attempt}/{below}"
        cache = self.job.cache
        try:
            logs = spool.folder(cache, self.env["SLURM_JOB_ID"], "logs", self.attempt, below)
        except OSError as e:
            why = f"logs cannot be written to {cache} ({e.strerror})"
            note(f"{why}; they are written to {shared}")
            return shared
        self._forwarder = spool.Forwarder(note)
        self._forwarder.add_tree(logs, shared, below=f"{self.run_dir}/logs")
        return logs

    def _end_logs(self, logs: str) -> None:
        """Copy the rest of the logs, and remove them from this node's disk."""
        if self._forwarder is None or not self._forwarder.close():
            return
        shutil.rmtree(logs, ignore_errors=True)
        above = os.path.dirname(logs)
        with contextlib.suppress(OSError):  # as far up as they are empty now, with the job's folder
            while os.path.basename(above) != "jobs":
                os.rmdir(above)
                above = os.path.dirname(above)

    def _scanner(self, logs: str, words: list[str]) -> output_metrics.Scanner | None:
        """Start to read numbers from the output of a user's program, if this node has rank 0."""
        if self.number != "0" or self.job.leaves_outcome:
            return None
        places = time_limit.folders(self.run_dir, self.job.workdir, words)
        target = f"{self.run_dir}/metrics.jsonl"
        return output_metrics.Scanner(logs, target, self.job.metrics, places)

    def _start_agent(
        self, python: interpreter.Interpreter, words: list[str], logs: str
    ) -> subprocess.Popen[bytes]:
        """Start torchrun's agent, which starts the ranks."""
        if self.job.leaves_outcome:
            # Imports of the payload ignore the run's folder; a user's program has its files there
            self.env["PYTHONSAFEPATH"] = "1"
        self._set_variables(python)
        words = rank_command.of(self.job, python.path, words, self.env)
        self._connections = self._watch_connections(words)
        pipe = self._connections.pipe if self._connections is not None else None
        argv = torchrun.command(
            python.path,
            self.job,
            self.env,
            logs,
            pipe=pipe,
            has_instances=self._use_instances(),
        )
        inherited = python.locks if pipe is None else (*python.locks, pipe)
        agent = subprocess.Popen([*argv, *words], env=self.env, pass_fds=inherited)
        self._agent = agent
        if self._connections is not None:
            self._connections.start(agent.pid)
        return agent

    def _set_variables(self, python: interpreter.Interpreter) -> None:
        """Set the variables that the ranks of this node share. Raises FatalError."""
        env = self.env
        num_ranks = rank_command.num_launched(self.job)
        share = int(env["SLURM_CPUS_PER_TASK"]) // num_ranks
        env["OMP_NUM_THREADS"] = env.get("OMP_NUM_THREADS") or str(max(1, share))
        env["NNODES"] = env["SLURM_STEP_NUM_NODES"]
        env["NODE_RANK"] = self.number
        if self.job.launcher == "node":
            env.setdefault("NPROC_PER_NODE", str(num_ranks))

        settings = self.job.accelerate
        if settings is None:
            return
        total = int(env["NNODES"]) * self.job.ranks_per_node
        found = accelerate_settings.variables(settings, python.path, env, num_ranks=total)
        kept = {"ACCELERATE_USE_CPU", *dict(self.job.variables)}  # of ddp, and the user's own
        for name, value in found.items():
            if name not in kept or name not in env:
                env[name] = value
        spool.write(f"[ENV] {self.host}: accelerate launch sets {' '.join(sorted(found))}")

    def _watch_connections(self, words: list[str]) -> rank_connections.Watch | None:
        """Watch on the first node whether a user's program connects its ranks."""
        if self.job.launcher == "node":  # it may start ranks of its own, which meet elsewhere
            return None
        num_nodes = int(self.env["SLURM_STEP_NUM_NODES"])
        is_alone = num_nodes * self.job.ranks_per_node == 1
        if self.number != "0" or self.job.leaves_outcome or is_alone:
            return None
        path = f"{self.run_dir}/control/{self.attempt}{rank_connections.SUFFIX}"
        port = int(self.env["HEAD_PORT"])
        return rank_connections.Watch(path, num_nodes, self.job.ranks_per_node, words, port)

    def _use_instances(self) -> bool:
        """Give each rank a MIG instance, if the job got some; return whether it did.

        CUDA shows a process one instance, and takes no number for it.
        """
        if self.job.gpus_per_node <= 1 or self.job.launcher == "node":
            return False
        instances = _INSTANCE.findall(slurm_calls.call("nvidia-smi", "-L").stdout)
        if len(instances) < self.job.ranks_per_node:
            return False
        self.env["CUDA_VISIBLE_DEVICES"] = ",".join(instances)
        return True

    def _on_term(self, _number: int, _frame: object) -> None:
        """Let the agent exit once its ranks have saved, unless another task has failed."""
        self._is_leaving = True
        if self._agent is not None:
            threading.Thread(target=self._kill_if_failed, args=(self._agent,), daemon=True).start()

    def _kill_if_failed(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill the agent after a while if another task has failed."""
        has_failed = False
        with contextlib.suppress(OSError):
            has_failed = storage.within(lambda: os.path.exists(self._failed), storage.CALL_S)
        if has_failed:
            self._is_leaving = False
            time.sleep(SAVING_S)
            agent.kill()

    def _follow(self, connection: socket.socket) -> None:
        """Pass on the supervisor's signals, and end the ranks when it ends the step."""
        lifelines.follow(connection, self._pass_on)
        self._signal_ranks(signal.SIGKILL)
        if self._agent is None:
            os._exit(1)
        self._agent.kill()

    def _pass_on(self, number: int) -> None:
        """Pass on a signal; before SIGABRT log the ranks' states, as not all can print more."""
        if number != signal.SIGABRT:
            self._signal_ranks(number)
            return
        for process, rank in self._ranks().items():
            if state := processes.state_of(process):
                spool.write(f"[ENV] {self.host}: rank {rank} {state}")
        self._signal_ranks(number)
        self._signal_ranks(signal.SIGCONT)  # one that is stopped prints its stack only then

    def _signal_ranks(self, number: int) -> None:
        """Send a signal to the ranks alone, not to torchrun's agent or other processes."""
        if number in _STOPS:
            self._is_leaving = True
        for process in self._ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def _ranks(self) -> dict[int, int]:
        """Return the ranks by process id."""
        ranks: dict[int, int] = {}
        agent = self._agent
        if agent is None:
            return ranks
        first = int(self.number) * self.job.ranks_per_node
        for process in processes.children(agent.pid):
            local = processes.local_rank(process)
            if local is not None:
                ranks[process] = first + local
        return ranks


def main(spec_path: str, words: list[str]) -> int:
    """Run a task of the step and return its exit code."""
    job = spec.load(spec.JobSpec, spec_path)
    task = Task(job, spec_path, dict(os.environ))
    try:
        if job.container is None:
            _enter(job.workdir)
        return task.run(words)
    except exit_codes.FatalError as e:
        os.write(2, f"[FATAL] {task.host}: {e}\n".encode())
        return exit_codes.FATAL


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as e:
        hint = "is the shared filesystem mounted here?"
        raise exit_codes.FatalError(f"{folder} cannot be entered ({e.strerror}); {hint}") from e

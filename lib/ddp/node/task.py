"""A task of the job's step, one on each node: torchrun's agent.

It prepares the environment and the network's variables, runs the agent, and copies the ranks' logs from this node's
disk to the run's folder. Of the shared filesystem it reads the environment's archive, once on each node.
"""

import contextlib
import glob
import os
import re
import signal
import socket
import subprocess
import threading
import time

from ddp.node import (
    caches,
    exit_codes,
    lifelines,
    memory_kills,
    network,
    output_metrics,
    processes,
    rank_connections,
    slurm_calls,
    spec,
    spool,
    storage,
    torchrun,
    unpacking,
)

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"  # torchrun forwards them, so that the ranks save
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_NOT_OURS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
LAST_LINES_S = (
    3.0  # srun ends all tasks when one exits: the others get this long to print their errors
)
SAVING_S = 5.0  # for a task to exit after another one has failed


class Node:
    """One task of the job's step."""

    def __init__(self, job: spec.JobSpec, spec_path: str, env: dict[str, str]) -> None:
        self.job, self.env, self.spec_path = job, env, spec_path
        self.host = env.get("SLURMD_NODENAME") or env.get("HOSTNAME", "node")
        self.run_dir, self.attempt = env["RUN_DIR"], env["RUN_ATTEMPT_ID"]
        self.number = env["SLURM_NODEID"]
        self._failed = f"{self.run_dir}/control/{self.attempt}.failed"
        self._child: subprocess.Popen[bytes] | None = None
        self._is_leaving = False  # the ranks were asked to save and end
        self._locks: tuple[int, ...] = ()
        self.forwarder: spool.Forwarder | None = None
        self._meeting: rank_connections.Watch | None = None

    def run(self, words: list[str]) -> int:
        """Run the job's command on this node and return the exit code. Raises FatalError."""
        python = self._python()
        num_nodes = int(self.env.get("SLURM_STEP_NUM_NODES", "1"))
        fabric = network.choose(self.job, num_nodes)
        network.use(fabric, self.job, self.env, num_nodes)
        self._connect(fabric)
        logs = self._logs()
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGABRT, lambda number, _frame: self._signal_ranks(number))
        for number in _NOT_OURS:
            signal.signal(number, lambda _number, _frame: None)  # children would inherit SIG_IGN
        witness = storage.Witness(self.spec_path)
        self._start_agent(python, words, logs)
        scanner = self._scanner(logs)
        assert self._child is not None
        code = exit_codes.exit_code(self._child.wait())
        self._child = None
        if self._meeting is not None:
            self._meeting.close(is_done=code == 0)
        if code and self._is_leaving:  # srun would end the other tasks, whose ranks may still save
            spool.write(
                f"[PREEMPT] {self.host}: the ranks here ended with code {code} when they were asked to stop"
            )
            code = 0
        if code:
            if shortage := memory_kills.shortage(self.host):
                spool.write(f"[ENV] {shortage}")
            if lost := witness.trouble():
                spool.write(
                    f"[ENV] {self.host}: {self.job.workspace} lost the files that were open ({lost})"
                )
            with contextlib.suppress(
                OSError
            ):  # the file at which the other tasks exit without saving
                storage.within(
                    lambda: open(self._failed, "w", encoding="ascii").close(), storage.CALL_S
                )
        if scanner is not None:
            scanner.close()
        self._end_logs(logs)
        if code:
            time.sleep(LAST_LINES_S)
        return code

    def _python(self) -> str:
        if self.job.container is not None:
            import shutil

            if image := self.job.environment:
                self._locks = unpacking.use(image, self.host)[1]
            found = shutil.which("python3") or shutil.which("python")
            if found is None:
                raise exit_codes.FatalError(
                    f"{self.job.container.image} has no python3; use an image with torch"
                )
        else:
            caches.keep_local(self.env, self.job.cache)
            if found := self.job.python:
                self._use_own(found)
            else:
                assert self.job.environment is not None
                found, self._locks = unpacking.use(
                    self.job.environment, self.host, f"{self.run_dir}/control"
                )
                programs = os.path.dirname(found)
                self.env.update(
                    PATH=f"{programs}:{self.env['PATH']}" if self.env.get("PATH") else programs
                )
        if not self.job.leaves_outcome and (
            not self.job.gpus_per_node or unpacking.is_for_cpus(found, self.env)
        ):
            self.env.setdefault("ACCELERATE_USE_CPU", "true")  # else its ranks on CPUs train alone
        if payload := self.job.payload:
            self.env["PYTHONPATH"] = ":".join(filter(None, (self.env.get("PYTHONPATH"), payload)))
        return found

    def _use_own(self, python: str) -> None:
        """Check the user's own interpreter, and put its folder on PATH. Raises FatalError."""
        try:
            storage.within(
                lambda: os.stat(python), storage.CALL_S
            )  # in a virtual environment a link to the host's own
        except OSError as e:
            hint = "each node needs this path, and the Python that it links to; or give python=none"
            raise exit_codes.FatalError(
                f"{python} cannot be started ({storage.reason(e)}); {hint}"
            ) from e
        if "PATH" not in dict(self.job.variables):
            self.env["PATH"] = f"{os.path.dirname(python)}:{self.env.get('PATH', os.defpath)}"

    def _connect(self, fabric: spec.Fabric) -> None:
        """Set the address and the interface of this node: gloo takes one exact name; "=" makes NCCL match exactly."""
        head, port, head_node = (
            self.env["HEAD_IP"],
            int(self.env["HEAD_PORT"]),
            self.env["HEAD_NODE"],
        )
        address, interface = network.find_way(head, head_node, fabric.interface)
        if self.host != head_node:
            network.check_head(head, port, head_node)
        if connection := lifelines.hold(head, self.env["LIFELINE"], self.host):
            threading.Thread(target=self._follow, args=(connection,), daemon=True).start()
        self.env["MY_IP"] = address
        if interface:
            self.env["GLOO_SOCKET_IFNAME"] = self.env.get("GLOO_SOCKET_IFNAME") or interface
            self.env["NCCL_SOCKET_IFNAME"] = self.env.get("NCCL_SOCKET_IFNAME") or f"={interface}"
        gloo, nccl = (self.env.get(f"{name}_SOCKET_IFNAME", "") for name in ("GLOO", "NCCL"))
        spool.write(
            f"[ENV] node={self.host} address={address} fabric={fabric.name} gloo={gloo} nccl={nccl}"
        )

    def _logs(self) -> str:
        """Return the folder for this node's logs: on its own disk, else in the run's folder."""
        below, note = f"node-{self.number}", spool.note(self.host)
        shared = f"{self.run_dir}/logs/{self.attempt}/{below}"
        try:
            logs = spool.folder(
                self.job.cache, self.env["SLURM_JOB_ID"], "logs", self.attempt, below
            )
        except OSError as e:
            note(
                f"logs cannot be written to {self.job.cache} ({e.strerror}); they are written to {shared}"
            )
            return shared
        self.forwarder = spool.Forwarder(note)
        self.forwarder.add_tree(logs, shared, below=f"{self.run_dir}/logs")
        return logs

    def _scanner(self, logs: str) -> output_metrics.Scanner | None:
        """Start to read the quantities in rank 0's output, if this node has it and the job names any."""
        if self.number != "0" or not self.job.metrics:
            return None
        return output_metrics.Scanner(logs, f"{self.run_dir}/metrics.jsonl", self.job.metrics)

    def _end_logs(self, logs: str) -> None:
        import shutil

        if self.forwarder is not None and self.forwarder.close():
            shutil.rmtree(logs, ignore_errors=True)
            above = os.path.dirname(logs)
            with contextlib.suppress(
                OSError
            ):  # as far up as they are empty now, the job's folder included
                while os.path.basename(above) != "jobs":
                    os.rmdir(above)
                    above = os.path.dirname(above)

    def _start_agent(self, python: str, words: list[str], logs: str) -> None:
        if (
            self.job.leaves_outcome
        ):  # imports of the payload ignore the run's folder; a user's program has its files there
            self.env["PYTHONSAFEPATH"] = "1"
        share = int(self.env["SLURM_CPUS_PER_TASK"]) // self.job.ranks_per_node
        self.env["OMP_NUM_THREADS"] = self.env.get("OMP_NUM_THREADS") or str(max(1, share))
        self._meeting = self._watch_meeting(words)
        argv = [
            python,
            "-c",
            torchrun.agent(self._meeting.pipe if self._meeting else None),
            f"--signals-to-handle={_SIGNALS}",
            "--shutdown-timeout=120",
            f"--nnodes={self.env['SLURM_STEP_NUM_NODES']}",
            f"--nproc-per-node={self.job.ranks_per_node}",
            f"--node-rank={self.number}",
            "--rdzv-backend=static",
            f"--master-addr={self.env['HEAD_IP']}",
            f"--master-port={self.env['HEAD_PORT']}",
            f"--rdzv-id={self.attempt}",
            f"--local-addr={self.env['MY_IP']}",
            "--max-restarts=0",
            f"--log-dir={logs}",
            "--redirects=3",
            "--tee=3",
            *(["--virtual-local-rank"] if self._use_instances() else []),
            *words,
        ]
        if self._meeting is None:
            self._child = subprocess.Popen(argv, env=self.env, pass_fds=self._locks)
            return
        self._child = subprocess.Popen(
            argv, env=self.env, pass_fds=(*self._locks, self._meeting.pipe)
        )
        self._meeting.start(self._child.pid)

    def _watch_meeting(self, words: list[str]) -> rank_connections.Watch | None:
        """Watch on the first node whether a user's program connects its ranks, if it has several."""
        num_nodes = int(self.env["SLURM_STEP_NUM_NODES"])
        is_alone = num_nodes * self.job.ranks_per_node == 1
        if self.number != "0" or self.job.leaves_outcome or is_alone:
            return None
        path = f"{self.run_dir}/control/{self.attempt}{rank_connections.SUFFIX}"
        return rank_connections.Watch(
            path, num_nodes, self.job.ranks_per_node, words, int(self.env["HEAD_PORT"])
        )

    def _use_instances(self) -> bool:
        """Give each rank a MIG instance, if the job got some: CUDA shows a process one, and takes no number for it."""
        listed = slurm_calls.call("nvidia-smi", "-L").stdout if self.job.gpus_per_node > 1 else ""
        instances = re.findall(r"\(UUID: (MIG-[^)]+)\)", listed)
        if len(instances) < self.job.ranks_per_node:
            return False
        self.env["CUDA_VISIBLE_DEVICES"] = ",".join(instances)
        return True

    def _on_term(self, _number: int, _frame: object) -> None:
        """Kill the child where another task has failed; else it exits by itself once its ranks have saved."""
        child = self._child
        self._is_leaving = True
        if child is not None:
            threading.Thread(target=self._end, args=(child,), daemon=True).start()

    def _follow(self, connection: socket.socket) -> None:
        """Pass on the supervisor's signals; end the ranks when it ends the step, as after the loss of another node."""
        lifelines.follow(connection, self._pass_on)
        self._signal_ranks(signal.SIGKILL)
        if self._child is None:
            os._exit(1)
        self._child.kill()

    def _pass_on(self, number: int) -> None:
        """Pass on a signal of the supervisor's. Before SIGABRT the log gets the ranks' states: not all can say more."""
        if number != signal.SIGABRT:
            self._signal_ranks(number)
            return
        for process, rank in self._ranks().items():
            if state := processes.state_of(process):
                spool.write(f"[ENV] {self.host}: rank {rank} {state}")
        self._signal_ranks(number)
        self._signal_ranks(signal.SIGCONT)  # one that is stopped prints its stack only then

    def _signal_ranks(self, number: int) -> None:
        """Send a signal to the ranks alone: not to torchrun's agent, nor to what it or they started."""
        if number in _STOPS:
            self._is_leaving = True
        for rank in self._ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)

    def _ranks(self) -> dict[int, int]:
        """Return the ranks by process id: the agent's children whose environment has a rank's number."""
        ranks: dict[int, int] = {}
        agent = self._child
        if agent is None:
            return ranks
        for path in glob.iglob("/proc/[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError):  # it ended meanwhile
                parent = int(_bytes(path).rpartition(b")")[2].split()[1])
                if parent != agent.pid:
                    continue
                process = path.split("/")[2]
                if found := re.search(
                    rb"\0LOCAL_RANK=(\d+)\0", b"\0" + _bytes(f"/proc/{process}/environ")
                ):
                    ranks[int(process)] = int(self.number) * self.job.ranks_per_node + int(found[1])
        return ranks

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        is_lost = False
        with contextlib.suppress(OSError):
            is_lost = storage.within(lambda: os.path.exists(self._failed), storage.CALL_S)
        if is_lost:
            self._is_leaving = False
            time.sleep(SAVING_S)
            child.kill()


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def main(spec_path: str, words: list[str]) -> int:
    """Run a task of the step and return its exit code."""
    job = spec.load(spec.JobSpec, spec_path)
    node = Node(job, spec_path, dict(os.environ))
    try:
        if job.container is None:
            _enter(job.workdir)
        return node.run(words)
    except exit_codes.FatalError as e:
        os.write(2, f"[FATAL] {node.host}: {e}\n".encode())
        return exit_codes.FATAL


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as e:
        hint = "is the shared filesystem mounted here?"
        raise exit_codes.FatalError(f"{folder} cannot be entered ({e.strerror}); {hint}") from e

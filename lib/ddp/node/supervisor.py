"""The batch script's program: start the ranks on all nodes, and decide on retries when they end.

Slurm sends its signals to this process. All imports are done before the ranks start, and output goes to this node's own
disk first, so that this program survives the death of the shared filesystem's client and waits for it.
"""

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import threading
import time

from ddp.node import network, parcel, spec, spool, storage

FATAL, COMES_BACK = 78, 75  # EX_CONFIG; EX_TEMPFAIL: the job has saved
ASKING_S = (1, 2, 4, 8, 15, 30, 60, 0)  # pauses while the controller restarts
REQUEUEING_S = (1, 2, 4, 8, 15, 15, 30, 30, 60)
LEAVING_S = 30.0  # Slurm's KillWait
LAST_FLUSH_S = 5.0  # for output, after an earlier wait or when Slurm is about to kill this process
_SLICE_S = 0.1  # of a pause that a signal ends
MAX_FAULTS = 8  # attempts after faults of the filesystem, a node or the network, over all starts of the job
LONGEST_PAUSE_S = 60.0
EXPLAINING_S = 120.0
NODE_BACK_S = 600.0
PORT, PORTS = 20000, 10000  # below the range of outgoing connections
PYTHON = "/usr/bin/python3"
# Starts the program on a node, once the shared filesystem is readable. In a container, with the image's interpreter.
_START = f"""\
n=0
until [ -r "$1/__main__.py" ]; do
  [ $n -gt 0 ] || echo "[ENV] $SLURMD_NODENAME: $1 does not respond (it cannot be read); waiting for it, 0 s"
  n=$((n + 1))
  if [ $n -gt 60 ]; then
    echo "[FATAL] $SLURMD_NODENAME: $1 cannot be read; is the shared filesystem mounted here?" >&2
    exit 78
  fi
  sleep 2
done
p=$0
[ -x "$p" ] || p=$(command -v python3 || command -v python) || {{
  echo "[FATAL] $SLURMD_NODENAME: there is no python3 here; use an image with torch" >&2
  exit 78
}}
[ -z "${parcel.VARIABLE}" ] || exec "$p" -I -S -B -c "{parcel.START}" "$@"
exec "$p" -I -S -B "$@"
"""


class _FatalError(Exception):
    """The job cannot run; `str()` is one line."""


class _Leave(Exception):
    """The job ends here, with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def pause(seconds: float) -> None:
    """Sleep; tests replace it."""
    time.sleep(seconds)


class Supervisor:
    """One start of the job."""

    def __init__(self, job: spec.JobSpec, spec_path: str, env: dict[str, str]) -> None:
        self.job, self.spec_path, self.env = job, spec_path, env
        self.host, self.job_id = env["SLURMD_NODENAME"], env["SLURM_JOB_ID"]
        self.run_dir = f"{job.job_dir}-{env['SLURM_ARRAY_TASK_ID']}" if job.is_sweep else job.job_dir
        self.control = f"{self.run_dir}/control"
        self.num_nodes = int(env["SLURM_JOB_NUM_NODES"])
        self.restarts = int(env.get("SLURM_RESTART_COUNT") or 0)
        self.again = 0  # attempts within this start of the job
        self.retries = {"program": 0, "faults": 0}
        self.hosts: list[str] = []
        self.stopping = ""  # the first signal
        self.is_cancelled = False  # TERM was received, after whatever signal
        self.comes_back = False  # the job is requeued and needs its token
        self.attempt_id = ""
        self.code = 0
        self.outcome = ""
        self.output = spool.Output(job.cache, self.job_id, self._note)
        self.storage = storage.Storage(self.control, self._note, is_cancelled=lambda: self.is_cancelled)
        self.fabric = network.choose(job, self.num_nodes)
        self._stop_file = ""

    def _note(self, text: str) -> None:
        spool.write(f"[ENV] {self.host}: {text}")

    # -- the job -------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the job and return its exit code."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            code = self._run()
        except _Leave as e:
            code = e.code
        except (_FatalError, network.NetworkError, storage.GoneError) as e:
            spool.write(f"[FATAL] {self.host}: {e}")
            code = FATAL
        except Exception:  # a bug: print it while this process still copies its output to the log
            import traceback

            traceback.print_exc()
            code = 1
        self._forget_token()
        is_stuck = bool(self.output.forwarder and self.output.forwarder.trouble)
        self.output.close(LAST_FLUSH_S if is_stuck or self.is_cancelled else spool.FLUSH_S)
        return code

    def _run(self) -> int:
        self._prepare()
        while True:
            self._attempt()
            if self.outcome == "done":
                return 0
            if self.outcome == "preempted":
                # Only the early warning requeues: TERM is a cancellation.
                if self.stopping == "USR1" and self.restarts < self.job.max_requeues and self._requeue():
                    self._make_way()
                return COMES_BACK
            if self.code == 0 and not self.job.leaves_outcome:
                self._leave_outcome("done")
                return 0
            self.code = self.code or 1
            if self.stopping:
                self._leave_outcome("cancelled" if self.is_cancelled else "failed")
                return self.code
            if not self._retry():
                self._leave_outcome("cancelled" if self.is_cancelled else "failed")
                return self.code

    def _prepare(self) -> None:
        job, env = self.job, self.env
        env.update(job.variables)
        env |= {
            "JOB_DIR": job.job_dir,
            "RUN_DIR": self.run_dir,
            "NPROC": str(job.ranks_per_node),
            "LAUNCHER": job.launcher,
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: ",
        }
        env.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # else each rank connects with each other one (gloo)
        if not job.gpus_per_node:
            env["CUDA_VISIBLE_DEVICES"] = ""
        if job.profile is not None:
            env |= {"PROFILE": job.profile.kind, "PROFILE_RANKS": job.profile.ranks}
            env["PROFILE_WINDOW"] = "1" if job.profile.has_window else ""
        if job.token_path and not self.storage.do(lambda: os.access(job.token_path, os.R_OK)):
            where = "does not exist, so this job has no Hugging Face token"
            spool.write(f"[ENV] {job.token_path} {where}; submit the run with the trainer to get one")
        self.words = [self._word(word) for word in job.command]
        if job.is_sweep:
            try:
                self.words += self.storage.do(lambda: _lines(f"{self.run_dir}/args"))
            except OSError as e:
                hint = f"({storage.reason(e)}); is the shared filesystem mounted here?"
                raise _FatalError(f"{self.run_dir}/args cannot be read {hint}") from e
            self._write(f"{self.control}/job", f"{self.job_id}\n")
        nodelist = env["SLURM_JOB_NODELIST"]
        self.hosts = [self.host] if self.num_nodes == 1 and nodelist == self.host else self._hostnames(nodelist)
        self._write(f"{self.control}/{self.job_id}.hosts", " ".join(self.hosts) + "\n")  # in the order of the ranks
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self.storage.do(lambda: _text(f"{self.control}/{self.job_id}.retries")))
            self.retries = {name: int(found[name]) for name in self.retries}
        env["HEAD_IP"], env["HEAD_NODE"] = self._head_address(), self.host
        program = os.path.dirname(self.spec_path)
        env[parcel.VARIABLE] = self.storage.do(lambda: parcel.pack(program, spec.dump(job)))

    def _hostnames(self, nodelist: str) -> list[str]:
        shown = _slurm("scontrol", "show", "hostnames", nodelist)
        if shown.returncode or not shown.stdout.split():
            raise _FatalError(f"scontrol show hostnames {nodelist}: {shown.stderr.strip()[-300:]}")
        return shown.stdout.split()

    def _head_address(self) -> str:
        """Return this node's address for the others. Query Slurm now: a node may return with another address."""
        if name := self.fabric.interface:
            try:
                return network.interface_address(name)
            except OSError as e:
                why = f"fabric={self.fabric.name} needs the interface {name} with an address, which does not exist here"
                raise _FatalError(why) from e
        if self.num_nodes == 1:
            return "127.0.0.1"
        reason = ""
        for pause_s in ASKING_S:
            shown = _slurm("scontrol", "-o", "show", "node", self.env["SLURM_JOB_NODELIST"])
            if shown.returncode == 0:
                return network.head_address(self.host, self.hosts, shown.stdout)
            reason = (shown.stderr + shown.stdout).strip().rpartition("\n")[2]
            if pause_s:
                spool.write(f"[ENV] Slurm gave no addresses of the nodes ({reason}); asking again in {pause_s} s")
                pause(pause_s)
        raise _FatalError(f"Slurm gave no addresses of {' '.join(self.hosts)}: {reason}")

    # -- signals -------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _: object) -> None:
        name = "TERM" if number == signal.SIGTERM else "USR1"
        self.stopping = self.stopping or name
        self.is_cancelled = self.is_cancelled or name == "TERM"
        spool.write(f"[PREEMPT] {_stamp()} {name}: asking the ranks to save and leave")
        if self._stop_file:
            threading.Thread(target=self._ask_to_stop, args=(self._stop_file,), daemon=True).start()

    def _ask_to_stop(self, path: str) -> None:
        with contextlib.suppress(OSError, storage.GoneError):
            self.storage.do(lambda: _write(path, ""))

    # -- an attempt ----------------------------------------------------------------------------------------------------

    def _attempt(self) -> None:
        """Run the ranks once, on all nodes, until they end; set code and outcome."""
        self.attempt_id = f"{self.job_id}.r{self.restarts}" + (f"t{self.again}" if self.again else "")
        outcome, stop = (f"{self.control}/{self.attempt_id}.{name}" for name in ("outcome", "stop"))
        env = self.env
        env |= {"RUN_ATTEMPT_ID": self.attempt_id, "ATTEMPT_BEGAN": f"{time.time():.6f}", "STOP_FILE": stop}
        env["TORCH_FR_DUMP_TEMP_FILE"] = f"{self.run_dir}/logs/{self.attempt_id}.flight-"
        resumes = self.storage.do(lambda: _begin(outcome, stop, f"{self.run_dir}/latest"))
        self._stop_file = stop
        if self.stopping:  # the signal was received between two attempts
            self._ask_to_stop(stop)
        resume = "auto" if resumes else self.job.resume  # this run's own checkpoint goes before the one it began from
        words = [resume if word is None else word for word in self.words]
        options, launch = self._launch()
        self.code = 1
        for offset in range(3):
            number = int(self.job_id) * 8 + offset + 3 * (self.restarts + self.again)
            port = PORT + number % PORTS  # different for each job and attempt
            if not network.is_free(port):
                spool.write(f"[ENV] port {port} is taken, trying another")
                continue
            env["HEAD_PORT"] = str(port)
            spool.write(
                f"[ENV] job={self.job_id} attempt={self.attempt_id} nodes={' '.join(self.hosts)} "
                f"head={env['HEAD_IP']}:{port} ranks_per_node={self.job.ranks_per_node} launcher={self.job.launcher}"
            )
            process = subprocess.Popen([*self._srun(), *options, *launch, *words], env=env, cwd="/")
            self._preload()
            code = process.wait()
            self.code = code if code >= 0 else 128 - code
            break
        if self.code == 143 and not self.stopping:
            self.code = 1  # srun's TERM to the other tasks when one failed is not the reason
        self._settle()
        found = re.search(r'"outcome": *"([a-z]*)"', self.storage.do(lambda: _text(outcome, missing="")))
        self.outcome = found[1] if found else ""
        spool.write(f"[RESULT] rc={self.code} outcome={self.outcome or 'none'}")

    def _preload(self) -> None:
        """Import explain, and remove old output, while the ranks start."""
        with contextlib.suppress(ImportError, OSError):  # the shared filesystem has just failed
            from ddp.node import explain

            assert explain
        spool.remove_old(self.job.cache)

    def _settle(self) -> None:
        """After a failure, wait until all output is on the shared filesystem."""
        if self.code == 0 and not (self.output.forwarder and self.output.forwarder.trouble):
            return
        self.storage.await_ready()
        self.output.flush()

    def _srun(self) -> list[str]:
        job, by_rank = self.job, self.job.launcher == "srun"
        per_node = job.ranks_per_node if by_rank else 1  # one task for each rank, or for each node's agent
        argv = [
            "srun",
            f"--nodes={self.num_nodes}",
            f"--ntasks={self.num_nodes * per_node}",
            f"--ntasks-per-node={per_node}",
            f"--cpus-per-task={self.env['SLURM_CPUS_PER_TASK']}",
            f"--cpu-bind={'cores' if by_rank else 'none'}",
        ]
        if by_rank and job.gpus_per_node:
            argv.append("--gpu-bind=none")  # binding would cut the ranks' paths to each other
        return [*argv, "--kill-on-bad-exit=1", "--wait=300", "--label", "--chdir=/"]

    def _launch(self) -> tuple[list[str], list[str]]:
        """Return srun's further options, and the command that it starts on each node."""
        program, name = os.path.split(self.spec_path)
        container = self.job.container
        if container is None:
            return [], ["sh", "-c", _START, PYTHON, program, "node", name]
        launch = ["sh", "-c", _START, "", program, "node", name]
        found = [f"{path}:{path}" for path in self.fabric.mounts if os.path.exists(path)]
        mounts = ",".join([f"{self.job.workspace}:{self.job.workspace}", *found])
        if "--container-image" in _slurm("srun", "--help").stdout:  # pyxis
            options = [f"--container-image={container.image}", f"--container-mounts={mounts}"]
            options += [f"--container-workdir={self.run_dir}", f"--container-env={container.variables}"]
            return options, launch
        import shutil

        tool = shutil.which("apptainer") or shutil.which("singularity")
        if tool is None:
            why = "container-image needs pyxis in Slurm, or apptainer on the nodes, and neither is installed"
            raise _FatalError(f"{why}; omit container-image, or install one of them")
        image = container.image
        if not image.startswith("/") and "://" not in image:
            image = "docker://" + image.replace("#", "/")
        gpus = ["--nv"] if self.job.gpus_per_node else []
        return [], [tool, "exec", *gpus, "--bind", mounts, "--pwd", self.run_dir, image, *launch]

    def _word(self, word: spec.Word) -> str | None:
        """Return a word of the command; None for `resume`, which each attempt sets."""
        if not word.is_variable:
            return word.text
        return self.run_dir if word.text == "RUN_DIR" else None

    # -- after a failure -----------------------------------------------------------------------------------------------

    def _retry(self) -> bool:
        """Record why an attempt failed; requeue the job, or return True to try again here."""
        kind, node, words = self._explain()
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\t{self.attempt_id}\t{kind}\t{node}\t{words}\n"
        self._write(f"{self.control}/{self.job_id}.failures", line, append=True)
        spool.write(f"[FAILED] attempt={self.attempt_id} fault={kind} node={node}: {words}")
        if kind == "mistake" or self.is_cancelled:
            return False
        if kind in ("filesystem", "network"):
            return self._outwait(kind, node)
        if kind != "node" or node == "-":
            return self._restart()
        if self.retries["faults"] < MAX_FAULTS and self._is_spare(node):
            self._count("faults")
            if self._requeue():
                self._leave_out(node)
                self._make_way()
            return False
        untrusted = f"{node} is suspect, but partition {self.env['SLURM_JOB_PARTITION']} has no other node"
        if words == "Slurm lost the node":
            return self._outwait(kind, node)
        if "is the shared filesystem mounted" in words:
            return self._outwait("filesystem", node)
        return self._restart(f"{untrusted} for it; trying it again")

    def _explain(self) -> tuple[str, str, str]:
        def blame() -> tuple[str, str, str]:
            importlib.invalidate_caches()  # the file may have been missing when it was looked for
            from ddp.node import explain

            return explain.blame(self.run_dir, self.job_id, self.attempt_id, self.hosts)

        kind, node, words = "program", "-", ""
        with contextlib.suppress(ImportError, OSError, ValueError):
            kind, node, words = storage.within(blame, EXPLAINING_S)
        return kind, node, " ".join(words.split())[:300] or f"exit code {self.code}"

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
            spool.write(f"[RESTART] given up after {MAX_FAULTS} faults of the filesystem, the nodes or the network")
            return False
        self._count("faults")
        if kind == "node" and not self._await_node(node):
            return False
        self.storage.await_ready()
        pause_s = min(LONGEST_PAUSE_S, 2.0 ** self.retries["faults"])
        where = f" on {node}" if node != "-" else ""
        count = f"{self.retries['faults']} of {MAX_FAULTS}; it is not counted against max-restarts"
        spool.write(f"[RESTART] after a fault of the {kind}{where} in {pause_s:.0f} s, {count}")
        for _ in range(int(pause_s / _SLICE_S)):
            if not self.stopping:
                pause(_SLICE_S)
        self.again += 1
        return not self.is_cancelled

    def _await_node(self, node: str) -> bool:
        """Wait until Slurm can use a node again; after a longer time Slurm requeues the job by itself."""
        began = time.monotonic()
        reported = began - storage.REPORT_S
        while not self.stopping:
            state = _slurm("sinfo", "-h", "-N", "-n", node, "-o", "%T").stdout.split()
            if state and not re.search(r"down|\*|fail|not_resp|unknown", state[0]):
                return True
            waited = time.monotonic() - began
            if waited > NODE_BACK_S:
                return False
            if time.monotonic() - reported >= storage.REPORT_S:
                reported = time.monotonic()
                spool.write(f"[RESTART] {node} is {''.join(state[:1]) or 'unknown'}; waiting for it, {waited:.0f} s")
            pause(2.0)
        return not self.is_cancelled

    def _is_spare(self, node: str) -> bool:
        """Return whether the partition has enough nodes without this one and those excluded already."""
        if node in self.job.nodelist:
            return False  # nodelist names it
        states = "idle,mixed,allocated,completing"
        among: set[str] | None = None
        if self.job.reservation:  # the job runs on its nodes alone, whose states are others
            states += ",reserved,maint"
            shown = _slurm("scontrol", "-o", "show", "reservation", self.job.reservation).stdout
            found = re.search(r" Nodes=([^ ]*) ", shown)
            among = set(_slurm("scontrol", "show", "hostnames", found[1]).stdout.split()) if found else set()
        shown = _slurm("sinfo", "-h", "-N", "-p", self.env["SLURM_JOB_PARTITION"], "-t", states, "-o", "%N").stdout
        others = set(shown.split()) - {node, *self.job.exclude, *self._left_out()}
        return len(others if among is None else others & among) >= self.num_nodes

    def _left_out(self) -> list[str]:
        path = f"{self.control}/{self.job_id}.excluded"
        return self.storage.do(lambda: _text(path, missing="")).split()

    def _leave_out(self, node: str) -> None:
        """Exclude a node. Slurm allows that only while the job is pending: as soon as it is requeued."""
        self._write(f"{self.control}/{self.job_id}.excluded", f"{node}\n", append=True)
        names = ",".join(sorted({*self.job.exclude, *self._left_out(), node}))
        for _ in range(10):
            if _slurm("scontrol", "update", f"JobId={self.job_id}", f"ExcNodeList={names}").returncode == 0:
                spool.write(f"[RESTART] without {names}")
                return
            pause(1)
        spool.write(f"[RESTART] Slurm does not leave out {names}")

    def _requeue(self) -> bool:
        """Requeue this job, once; return whether that succeeded.

        Only while it is RUNNING: a cancelled job would return, and Slurm requeues a preempted job by itself. Repeat the
        request while the controller restarts; the state shows whether one whose reply was lost succeeded.
        """
        self.comes_back = True
        for pause_s in REQUEUEING_S:
            if self.is_cancelled:
                return False
            asked = _slurm("squeue", "-h", "-j", self.job_id, "-o", "%T")
            if asked.returncode == 0 and (state := asked.stdout.strip()):
                if state != "RUNNING":
                    return False
                if not self.is_cancelled and _slurm("scontrol", "requeue", self.job_id).returncode == 0:
                    spool.write(f"[REQUEUE] {_stamp()} job {self.job_id} is queued again")
                    return True
            spool.write(f"[REQUEUE] Slurm does not respond; trying again in {pause_s} s")
            pause(pause_s)
        return False

    def _make_way(self) -> None:
        """Exit at Slurm's TERM, so that the job can wait in the queue. Raises _Leave."""
        self.output.flush()
        for _ in range(int(LEAVING_S / _SLICE_S)):
            if not self.is_cancelled:
                pause(_SLICE_S)
        raise _Leave(COMES_BACK)

    def _count(self, what: str) -> None:
        self.retries[what] += 1
        self._write(f"{self.control}/{self.job_id}.retries", json.dumps(self.retries) + "\n")

    def _leave_outcome(self, outcome: str) -> None:
        """Write an outcome where the ranks wrote none: without accounting, Slurm soon forgets a job."""
        if not self.outcome:
            text = json.dumps({"outcome": outcome, "exit_code": self.code})
            self._write(f"{self.control}/{self.attempt_id}.outcome", f"{text}\n")

    def _forget_token(self) -> None:
        """Remove the token when this job ends by itself; where it may be requeued, the trainer removes it later."""
        if not self.job.token_path or self.stopping or self.comes_back:
            return
        if self.job.is_sweep:
            array, task = self.env["SLURM_ARRAY_JOB_ID"], self.env["SLURM_ARRAY_TASK_ID"]
            left = _slurm("squeue", "-h", "-r", "-j", array, "-o", "%i")
            if left.returncode or set(left.stdout.splitlines() or [""]) - {f"{array}_{task}"}:
                return  # other runs of the sweep use it
        with contextlib.suppress(OSError):
            storage.within(lambda: os.unlink(self.job.token_path), storage.CALL_S)

    def _write(self, path: str, text: str, *, append: bool = False) -> None:
        with contextlib.suppress(OSError):  # the log holds the same
            self.storage.do(lambda: _write(path, text, append=append))


def _slurm(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command; one that is missing or hangs has failed with 127."""
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, check=False, cwd="/", timeout=120, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return subprocess.CompletedProcess(argv, 127, "", f"{argv[0]}: {e}")


def _stamp() -> str:
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"


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


def _text(path: str, *, missing: str | None = None) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except FileNotFoundError:
        if missing is None:
            raise
        return missing


def _lines(path: str) -> list[str]:
    return _text(path).splitlines()


def _write(path: str, text: str, *, append: bool = False) -> None:
    with open(path, "a" if append else "w", encoding="utf-8") as file:
        file.write(text)


def main(spec_path: str) -> int:
    """Run a job and return its exit code."""
    job = spec.load(spec.JobSpec, spec_path)
    supervisor = Supervisor(job, spec_path, dict(os.environ))
    os.chdir("/")  # Slurm's choice is on the shared filesystem
    return supervisor.run()

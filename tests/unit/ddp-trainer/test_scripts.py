"""The scripts of a run: rendered, and run by a real bash with doubles of Slurm's commands around them."""

import hashlib
import io
import os
import pathlib
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time

import pytest

import trainer_params
import trainer_plan
import trainer_scripts
import trainer_workspace
from trainer_base import Settings
from trainer_environment import Environment

MANIFEST = trainer_workspace.Manifest(
    key="0" * 16, hash="ab" * 8, sha256="ab" * 32, size_bytes=10, unpacked_bytes=20,
    python=f"3.{sys.version_info[1]}", torch="2.13.0+cpu", build="cpu", created="2026-11-20T00:00:00Z",
)  # fmt: skip
REQUEST = trainer_plan.Request("main", 2, 1, 4, 8000, "02:00:00", 180)


def texts(
    settings: Settings, request: trainer_plan.Request = REQUEST, *, outcome: bool = True, **given: object
) -> dict[str, str]:
    params = trainer_params.parse(trainer_params.SubmitDdp, {k.replace("_", "-"): v for k, v in given.items()})
    archive = str(settings.environments / "abababababababab.tar.zst")
    return trainer_scripts.training(
        settings, request, params, Environment(MANIFEST, archive), run="first",
        command=("--module", "ddptrain", "smoke", "--lr", "3e-3"), leaves_outcome=outcome,
    )  # fmt: skip


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_the_job_asks_for_what_was_planned(settings: Settings):
    script = texts(settings, constraint="a100&ib", account="physics", qos="high", reservation="r1")["job.sbatch"]
    run_dir = settings.runs / "first"
    assert directives(script) == [
        "job-name=first", "partition=main", "nodes=2", "ntasks-per-node=1", "cpus-per-task=4", "mem=8000M",
        "gpus-per-node=1", "time=02:00:00", "account=physics", "qos=high", "reservation=r1", "constraint=a100&ib",
        f"chdir={run_dir}", f"output={run_dir}/logs/%j.out", "open-mode=append", "requeue", "propagate=NONE", "signal=B:USR1@180",
    ]  # fmt: skip


def test_what_is_not_wanted_is_not_asked_for(settings: Settings):
    script = texts(settings, trainer_plan.Request("main", 1, 0, 4, 8000, None, 180))["job.sbatch"]
    assert not [line for line in directives(script) if line.startswith(("gpus", "time", "account"))]
    assert "export CUDA_VISIBLE_DEVICES=\n" in script, "no GPUs asked for means none used"
    assert "CUDA_VISIBLE_DEVICES" not in texts(settings)["job.sbatch"]


def test_directives_come_before_the_first_command(settings: Settings):
    lines = texts(settings)["job.sbatch"].splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]


@pytest.mark.parametrize("name", ["job.sbatch", "node.sh", "environment.sh"])
def test_bash_understands_the_scripts(settings: Settings, name: str):
    done = subprocess.run(
        ["bash", "-n"], input=texts(settings, env="A=b")[name], text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_value_that_slipped_through_would_still_be_quoted(settings: Settings, tmp_path: pathlib.Path):
    evil = f"$(touch {tmp_path}/pwned) `touch {tmp_path}/pwned`; touch {tmp_path}/pwned '\" {{{{ 7*7 }}}}"
    params = trainer_params.SubmitDdp.model_construct(
        env="", account=None, qos=None, reservation=None, constraint=None, max_requeues=1
    )
    script = trainer_scripts.training(
        settings, REQUEST, params, Environment(MANIFEST, evil), run="first", command=("x", evil), leaves_outcome=True
    )["job.sbatch"]
    shown = script.split("restarts=")[0] + 'printf "%s\\n" "$ENVIRONMENT_ARCHIVE" "${command[1]}"\n'
    done = subprocess.run(["bash"], input=shown, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines() == [evil, evil]
    assert not (tmp_path / "pwned").exists()


class Node:
    """A place where a job's script runs: Slurm's variables, and doubles of the commands it calls."""

    def __init__(self, folder: pathlib.Path, run_dir: pathlib.Path) -> None:
        self.bin = folder / "commands"
        self.bin.mkdir()
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.run_dir = run_dir
        self.hosts = "localhost"
        self.add(
            "scontrol",
            f'case $1 in show) for h in $HOSTS; do echo "$h"; done ;; *) echo "$*" >> {self.notes}/scontrol ;; esac',
        )
        self.add("squeue", "echo ${STATE:-RUNNING}")
        self.add("sleep", "exit 0")

    def add(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(stat.S_IRWXU)

    def env(self, **more: str) -> dict[str, str]:
        slurm = {
            "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "x", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "4",
            "SLURMD_NODENAME": "slurmd-0", "HOSTS": self.hosts,
        }  # fmt: skip
        return {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": "/", "NOTES": str(self.notes), **slurm, **more}

    def start(self, script: str, **more: str) -> subprocess.Popen[str]:
        for name in ("logs", "control"):
            (self.run_dir / name).mkdir(parents=True, exist_ok=True)
        path = self.run_dir / "job.sbatch"
        path.write_text(script)
        return subprocess.Popen(
            ["/bin/bash", path], env=self.env(**more), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, script: str, **more: str) -> tuple[int, str]:
        process = self.start(script, **more)
        output, _ = process.communicate(timeout=30)
        return process.returncode, output

    def requeued(self) -> bool:
        notes = self.notes / "scontrol"
        return notes.exists() and "requeue 12" in notes.read_text()


@pytest.fixture
def node(tmp_path: pathlib.Path, settings: Settings) -> Node:
    return Node(tmp_path, settings.runs / "first")


ENDS = 'echo "{\\"outcome\\": \\"%s\\", \\"step\\": 5}" > "$RUN_DIR/control/$RUN_ATTEMPT_ID.outcome"'
WAITS = 'touch "$NOTES/started"; for i in $(seq 400); do [ -e "$STOP_FILE" ] && break; /bin/sleep 0.05; done; '


def test_torchrun_gets_exactly_the_command(settings: Settings, node: Node):
    node.add("srun", 'printf "%s\\0" "$@" > "$NOTES/argv"; ' + ENDS % "done")
    code, output = node.run(texts(settings)["job.sbatch"])
    assert code == 0, output
    argv = (node.notes / "argv").read_text().split("\0")[:-1]
    assert argv == [
        "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=4", "--cpu-bind=none", "--kill-on-bad-exit=1",
        "--wait=300", "--label", "bash", str(node.run_dir / "node.sh"), "--module", "ddptrain", "smoke", "--lr", "3e-3",
    ]  # fmt: skip
    lines = output.splitlines()
    assert len(lines) == 2, "nothing else is said"
    assert lines[1] == "[RESULT] rc=0 outcome=done"
    assert lines[0] == "[ENV] job=12 attempt=12.r0 nodes=localhost head=127.0.0.1:20096 ranks_per_node=1"


@pytest.mark.parametrize(
    ("srun", "outcome", "code"),
    [
        (ENDS % "done", True, 0),
        (ENDS % "done" + "; exit 1", True, 0),  # torchrun masks codes: the outcome decides
        (ENDS % "failed" + "; exit 2", True, 2),
        ("exit 0", True, 1),  # a workload of ours that ended without saying so has failed
        ("exit 0", False, 0),
        ("exit 9", False, 9),
        ("exit 143", False, 1),  # what srun did to the other ranks
        ("exit 137", False, 137),  # out of memory
    ],
)
def test_the_exit_code_says_how_it_ended(settings: Settings, node: Node, srun: str, outcome: bool, code: int):
    node.add("srun", srun)
    assert node.run(texts(settings, outcome=outcome)["job.sbatch"])[0] == code
    assert not node.requeued()


def stop(node: Node, script: str, number: signal.Signals, **more: str) -> tuple[int, str]:
    process = node.start(script, **more)
    for _ in range(200):
        if (node.notes / "started").exists():
            break
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def test_a_warning_saves_and_requeues(settings: Settings, node: Node):
    node.add("srun", WAITS + ENDS % "preempted")
    code, output = stop(node, texts(settings)["job.sbatch"], signal.SIGUSR1)
    assert code == 75
    assert node.requeued()
    assert "USR1: asking the ranks to save and leave" in output
    assert (node.run_dir / "control" / "12.r0.stop").exists()


def test_a_cancelled_job_saves_and_stays_away(settings: Settings, node: Node):
    node.add("srun", WAITS + ENDS % "preempted")
    assert stop(node, texts(settings)["job.sbatch"], signal.SIGTERM)[0] == 75
    assert not node.requeued()


def test_a_job_that_is_no_longer_running_is_not_requeued(settings: Settings, node: Node):
    node.add("srun", WAITS + ENDS % "preempted")
    assert stop(node, texts(settings)["job.sbatch"], signal.SIGUSR1, STATE="COMPLETING")[0] == 75
    assert not node.requeued()


def test_a_job_is_requeued_only_so_often(settings: Settings, node: Node):
    node.add("srun", WAITS + ENDS % "preempted")
    script = texts(settings, max_requeues=2)["job.sbatch"]
    assert stop(node, script, signal.SIGUSR1, SLURM_RESTART_COUNT="2")[0] == 75
    assert not node.requeued()
    (node.notes / "started").unlink()
    assert stop(node, script, signal.SIGUSR1, SLURM_RESTART_COUNT="1")[0] == 75
    assert node.requeued()


def test_a_warning_at_the_very_end_does_not_requeue_a_finished_job(settings: Settings, node: Node):
    node.add("srun", WAITS + ENDS % "done")
    assert stop(node, texts(settings)["job.sbatch"], signal.SIGUSR1)[0] == 0
    assert not node.requeued()


def test_an_earlier_attempts_stop_file_is_taken_away(settings: Settings, node: Node):
    (node.run_dir / "control").mkdir(parents=True)
    (node.run_dir / "control" / "12.r0.stop").touch()
    node.add("srun", '[ -e "$STOP_FILE" ] && exit 5; ' + ENDS % "done")
    assert node.run(texts(settings)["job.sbatch"])[0] == 0


def test_another_node_over_loopback_is_an_error_that_says_what_to_mend(settings: Settings, node: Node):
    node.hosts = "localhost localhost"
    node.add("srun", "exit 99")
    code, output = node.run(texts(settings)["job.sbatch"], SLURM_JOB_NUM_NODES="2")
    assert code == 78
    assert "[FATAL] slurmd-0 reaches localhost over loopback: mend the name resolution on slurmd-0" in output


def test_the_way_is_looked_for_to_another_node_than_this_one(settings: Settings, node: Node):
    node.hosts = "127.0.0.9 slurmd-0"  # the batch node need not be the first by name
    code, output = node.run(texts(settings)["job.sbatch"], SLURM_JOB_NUM_NODES="2")
    assert code == 78
    assert "[FATAL] slurmd-0 reaches 127.0.0.9 over loopback" in output


def test_a_port_that_is_taken_is_passed_over(settings: Settings, node: Node):
    node.add("srun", 'echo "port=$HEAD_PORT"; ' + ENDS % "done")
    with socket.socket() as taken:
        taken.bind(("", 20000 + 12 * 8 % 10000))
        taken.listen()
        _, output = node.run(texts(settings)["job.sbatch"])
    assert "[ENV] port 20096 is taken, trying another" in output
    assert "port=20097" in output


def test_the_users_variables_reach_the_job(settings: Settings, node: Node):
    node.add("srun", 'echo "got $NCCL_DEBUG $OMP_NUM_THREADS"; ' + ENDS % "done")
    _, output = node.run(texts(settings, env="NCCL_DEBUG=INFO OMP_NUM_THREADS=3")["job.sbatch"])
    assert "got INFO 3" in output


# -- node.sh -----------------------------------------------------------------------------------------------------------


def run_node(settings: Settings, node: Node, agent: str, **more: str) -> subprocess.Popen[str]:
    """Start node.sh with a double of the environment, whose interpreter runs `agent` in torchrun's place."""
    node.run_dir.mkdir(parents=True, exist_ok=True)
    node.add("python", f'if [ "$1" = - ]; then exec {sys.executable} "$@"; fi; {agent}')
    (node.run_dir / "environment.sh").write_text(f"use_environment() {{ PY={node.bin}/python; }}\n")
    (node.run_dir / "node.sh").write_text(texts(settings)["node.sh"])
    slurm = {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": "1",
        "RUN_ATTEMPT_ID": "12.r0",
        "HEAD_IP": "127.0.0.1",
        "HEAD_PORT": "20100",
    }
    env = node.env(RUN_DIR=str(node.run_dir), NPROC="2", **slurm, **more)
    argv = ["/bin/bash", node.run_dir / "node.sh", "script.py", "--flag"]
    return subprocess.Popen(argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_the_agent_is_told_its_place(settings: Settings, node: Node):
    process = run_node(settings, node, 'printf "%s\n" "$OMP_NUM_THREADS $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME" "$@"')
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert output.splitlines() == [
        "2 lo =lo", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--rdzv-backend=static",
        "--master-addr=127.0.0.1", "--master-port=20100", "--rdzv-id=12.r0", "--local-addr=127.0.0.1", "--max-restarts=0",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2", "--shutdown-timeout=120",
        f"--log-dir={node.run_dir}/logs/12.r0/node-1", "--redirects=3", "--tee=3", "script.py", "--flag",
    ]  # fmt: skip


def test_the_users_interface_and_threads_win(settings: Settings, node: Node):
    agent = 'echo "$OMP_NUM_THREADS $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"'
    process = run_node(settings, node, agent, OMP_NUM_THREADS="7", GLOO_SOCKET_IFNAME="ib0", NCCL_SOCKET_IFNAME="eth")
    assert process.communicate(timeout=30)[0] == "7 ib0 eth\n"


def test_a_failed_agent_gives_the_others_time_and_keeps_its_code(settings: Settings, node: Node):
    node.add("sleep", 'echo "slept $1"')
    process = run_node(settings, node, "exit 3")
    assert process.communicate(timeout=30)[0] == "slept 3\n"
    assert process.returncode == 3


def test_a_signal_to_the_step_waits_for_the_agent_to_save(settings: Settings, node: Node):
    agent = "trap 'echo saved; exit 0' TERM; touch $NOTES/started; while :; do /bin/sleep 0.05; done"
    process = run_node(settings, node, agent)
    for _ in range(200):
        if (node.notes / "started").exists():
            break
        time.sleep(0.05)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], text=True, capture_output=True, check=True
    ).stdout.split()
    process.send_signal(signal.SIGTERM)  # Slurm signals every process of the step
    time.sleep(0.3)
    assert process.poll() is None
    for child in children:
        os.kill(int(child), signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "saved\n"
    assert process.returncode == 0


# -- environment.sh ----------------------------------------------------------------------------------------------------


def zstd_frame(data: bytes) -> bytes:
    """Return a zstd frame of raw blocks (RFC 8878, 3.1.1), so that no test needs the zstd program to make one."""
    frame = b"\x28\xb5\x2f\xfd" + b"\x00\x58"  # magic; no checksum, no size; window of 2 MiB
    size = 1 << 16
    blocks = [data[i : i + size] for i in range(0, len(data), size)] or [b""]
    for number, block in enumerate(blocks):
        last = number == len(blocks) - 1
        frame += (last | len(block) << 3).to_bytes(3, "little") + block
    return frame


class Store:
    """An archive in a workspace, and a node that unpacks it."""

    def __init__(self, tmp_path: pathlib.Path, settings: Settings) -> None:
        self.cache = tmp_path / "cache"
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            interpreter = tarfile.TarInfo("./bin/python")
            interpreter.type, interpreter.linkname = tarfile.SYMTYPE, sys.executable
            tar.addfile(interpreter)
            big = tarfile.TarInfo("./lib/data")
            big.size = 200000
            tar.addfile(big, io.BytesIO(os.urandom(big.size)))
        data = zstd_frame(packed.getvalue())
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.archive = settings.environments / f"{self.sha256[:16]}.tar.zst"
        self.archive.write_bytes(data)
        self.script = tmp_path / "environment.sh"
        self.script.write_text(texts(settings)["environment.sh"])
        self.home = self.cache / self.sha256[:16]
        self.path = "/usr/bin:/bin"

    def use(self, then: str = 'echo "PY=$PY"', **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/bash", "-c", self.line(then)], env=self.env(**more), text=True, capture_output=True, check=False
        )

    def line(self, then: str) -> str:
        return f"set -euo pipefail; . {shlex.quote(str(self.script))}; use_environment; {then}"

    def env(self, **more: str) -> dict[str, str]:
        values = {
            "ENVIRONMENT_ARCHIVE": str(self.archive), "ENVIRONMENT_CACHE": str(self.cache), "ENVIRONMENT_SHA256": self.sha256,
            "ENVIRONMENT_BYTES": "300000", "ENVIRONMENT_PYTHON": f"3.{sys.version_info[1]}", "SLURMD_NODENAME": "slurmd-0",
            "PATH": self.path,
        }  # fmt: skip
        return {**values, **more}


@pytest.fixture
def store(tmp_path: pathlib.Path, settings: Settings) -> Store:
    return Store(tmp_path, settings)


def test_the_environment_is_unpacked_once(store: Store):
    first = store.use()
    assert first.returncode == 0, first.stderr
    assert f"PY={store.home}/bin/python" in first.stdout
    assert "unpacked the environment" in first.stdout
    again = store.use()
    assert again.stdout == f"PY={store.home}/bin/python\n"
    assert stat.S_IMODE(store.cache.stat().st_mode) == 0o700


def test_a_node_without_the_zstd_program_uses_the_library(store: Store, tmp_path: pathlib.Path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for path in pathlib.Path(folder).iterdir():
            if path.name not in ("zstd", "zstdmt") and not (tools / path.name).exists():
                (tools / path.name).symlink_to(path)
    store.path = str(tools)
    done = store.use()
    assert done.returncode == 0, done.stderr
    assert (store.home / "lib" / "data").stat().st_size == 200000


def test_jobs_that_start_together_unpack_once(store: Store):
    processes = [
        subprocess.Popen(["/bin/bash", "-c", store.line("echo ok")], env=store.env(), text=True, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert all(output.endswith("ok\n") for output in outputs)
    assert sum("unpacked the environment" in output for output in outputs) == 1


def test_a_damaged_archive_is_never_used(store: Store):
    data = bytearray(store.archive.read_bytes())
    data[1000] ^= 1
    store.archive.write_bytes(bytes(data))
    done = store.use()
    assert done.returncode == 78
    assert done.stderr == (
        f"[FATAL] slurmd-0: {store.archive} is damaged; remove it, then: juju run trainer/0 install-environment\n"
    )
    assert not store.home.exists()


def test_a_half_written_archive_is_never_used(store: Store):
    store.archive.write_bytes(store.archive.read_bytes()[:100000])
    assert store.use().returncode == 78
    assert not store.home.exists()


def test_a_missing_archive_says_that_the_filesystem_may_be_missing(store: Store):
    store.archive.unlink()
    done = store.use()
    assert done.stderr == f"[FATAL] slurmd-0: {store.archive} cannot be read; is the shared filesystem mounted here?\n"


def test_an_unpacking_that_was_interrupted_is_done_again(store: Store):
    assert store.use().returncode == 0
    (store.cache / f"{store.home.name}.complete").unlink()
    (store.home / "lib" / "data").write_text("half")
    (store.cache / f".{store.home.name}.AbCdEf").mkdir()
    assert store.use().returncode == 0
    assert (store.home / "lib" / "data").stat().st_size == 200000
    assert not (store.cache / f".{store.home.name}.AbCdEf").exists()


def test_after_the_node_booted_again_the_environment_is_unpacked_again(store: Store):
    assert store.use().returncode == 0
    complete = store.cache / f"{store.home.name}.complete"
    complete.write_text(f"{store.sha256} 00000000-0000-0000-0000-000000000000\n")
    assert "unpacked the environment" in store.use().stdout


def test_a_cache_of_somebody_else_is_refused(store: Store, tmp_path: pathlib.Path):
    real = tmp_path / "elsewhere"
    real.mkdir()
    store.cache.symlink_to(real)
    done = store.use()
    assert done.returncode == 78
    assert f"[FATAL] slurmd-0: {store.cache} is not a folder of " in done.stderr
    assert not list(real.iterdir())


def test_another_python_is_refused_by_its_version(store: Store):
    done = store.use(ENVIRONMENT_PYTHON="3.7")
    mine = f"3.{sys.version_info[1]}"
    assert done.stderr == f"[FATAL] slurmd-0: this node has Python {mine}, the environment was made for 3.7\n"


def test_a_full_disk_is_told_before_anything_is_unpacked(store: Store):
    done = store.use(ENVIRONMENT_BYTES=str(1 << 60))
    assert done.returncode == 78
    assert f"bytes free; the environment needs {1 << 60}" in done.stderr


def test_an_old_environment_goes_unless_a_job_holds_it(store: Store):
    store.cache.mkdir(mode=0o700)
    for name in ("old", "held", "young"):
        (store.cache / name).mkdir()
        (store.cache / f"{name}.complete").touch()
        if name != "young":
            long_ago = time.time() - 15 * 86400
            os.utime(store.cache / f"{name}.complete", (long_ago, long_ago))
    holder = subprocess.Popen(["flock", "-s", str(store.cache / "held.lock"), "sleep", "60"])
    try:
        for _ in range(100):
            taken = subprocess.run(["flock", "-n", str(store.cache / "held.lock"), "true"], check=False).returncode
            if taken:
                break
            time.sleep(0.05)
        assert store.use().returncode == 0
    finally:
        holder.terminate()
        holder.wait(timeout=10)
    assert not (store.cache / "old").exists()
    assert (store.cache / "held").exists()
    assert (store.cache / "young").exists()


def test_a_running_job_keeps_the_lock_through_exec(store: Store):
    process = subprocess.Popen(
        ["/bin/bash", "-c", store.line("exec sleep 60")], env=store.env(), text=True, stdout=subprocess.PIPE
    )
    try:
        lock = store.cache / f"{store.home.name}.lock"
        for _ in range(200):
            if (store.cache / f"{store.home.name}.complete").exists():
                break
            time.sleep(0.05)
        time.sleep(0.3)
        assert subprocess.run(["flock", "-n", str(lock), "true"], check=False).returncode == 1
        assert subprocess.run(["flock", "-n", "-s", str(lock), "true"], check=False).returncode == 0
    finally:
        process.kill()
        process.communicate(timeout=10)

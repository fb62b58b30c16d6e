"""The part of a job that runs on each node, started for real: torchrun, containers, quantities."""

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import signal
import stat
import subprocess
import sys
import time
import typing

import environments
import pytest
from script_texts import MANIFEST, REQUEST, texts, wait_for

from batch_host import Node
from ddp.node import lifelines, torchrun
from ddp.project import copies
from ddp.run import metrics
from ddp.settings import Settings
from ddp.submit import resources

NODE_DRIVER = """
import os, socket, sys, time
sys.path.insert(0, sys.argv[1] + "/ddp.pyz")
from ddp.node import task
def refuse(*_, **__): raise eval(os.environ['REFUSES'])
if 'REFUSES' in os.environ: socket.create_connection = refuse
slept = time.sleep
time.sleep = lambda s: os.write(1, f"slept {s:g}\\n".encode()) if s in (1, 3) else slept(s if "QUICK" not in os.environ else 0)
code = task.main(sys.argv[1] + "/job.json", sys.argv[2:])
os._exit(code)
"""


def run_node(
    settings: Settings,
    node: Node,
    agent: str,
    *,
    given: dict[str, typing.Any] | None = None,
    about: dict[str, typing.Any] | None = None,
    **more: str,
) -> subprocess.Popen[str]:
    """Start a node's part with a double of the environment, whose interpreter runs `agent`.

    It replaces torchrun. `about` are fields of the job's specification.
    """
    files = texts(settings, **(given or {}))
    home = node.cache / ("ab" * 8)
    (home / "bin").mkdir(parents=True, exist_ok=True)
    node.cache.chmod(0o700)
    version = f"python3.{sys.version_info[1]}"
    (home / "bin" / version).write_text(f"#!/bin/bash\n{agent}\n")
    (home / "bin" / version).chmod(stat.S_IRWXU)
    if not (home / "bin" / "python").exists():
        (home / "bin" / "python").symlink_to(version)
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    home.with_suffix(".complete").write_text(f"{MANIFEST.sha256} {boot}\n")
    job = json.loads(files["program/job.json"]) | {"ranks_per_node": 2} | (about or {})
    if job["environment"]:
        job["environment"]["cache"] = str(node.cache)
    elif job["container"]:
        job["payload"] = "/mnt/payload"
    node.write(files | {"program/job.json": json.dumps(job)})
    slurm = {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": "1",
        "RUN_ATTEMPT_ID": "12.r0",
        "HEAD_IP": "127.0.0.1",
        "HEAD_PORT": "20100",
        "LIFELINE": "9 x",
        "HEAD_NODE": "slurmd-0",
        "RUN_DIR": str(node.run_dir),
    }
    argv = [
        sys.executable,
        "-I",
        "-S",
        "-B",
        "-c",
        NODE_DRIVER,
        str(node.run_dir / "program"),
        "script.py",
        "--flag",
    ]
    return subprocess.Popen(
        argv,
        env=node.env(**{**slurm, **more}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_the_agent_gets_its_place(settings: Settings, node: Node):
    process = run_node(
        settings,
        node,
        'printf "%s\n" "$OMP_NUM_THREADS $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME" "$@"',
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.splitlines() == [
        "[ENV] node=slurmd-0 address=127.0.0.1 fabric=auto gloo=lo nccl==lo",
        "2 lo =lo",
        "-c",
        *torchrun.AGENT.split("\n"),
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
        "--shutdown-timeout=120",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--node-rank=1",
        "--rdzv-backend=static",
        "--master-addr=127.0.0.1",
        "--master-port=20100",
        "--rdzv-id=12.r0",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        f"--log-dir={node.cache}/jobs/12/logs/12.r0/node-1",
        "--redirects=3",
        "--tee=3",
        "script.py",
        "--flag",
    ]


def test_a_program_of_the_node_has_its_place_and_all_cores(settings: Settings, node: Node):
    agent = 'echo "$NNODES $NODE_RANK $NPROC_PER_NODE $OMP_NUM_THREADS"; printf "%s\n" "$@"'
    about = {"launcher": "node", "ranks_per_node": 1, "gpus_per_node": 2, "leaves_outcome": False}
    process = run_node(settings, node, agent, about=about, PROGRAM_PORT="20200")
    printed = process.communicate(timeout=120)[0].splitlines()
    assert printed[1] == "2 1 2 2"
    assert "MASTER_PORT=20200" in printed
    assert printed[-2:] == ["script.py", "--flag"]


ACCELERATE = """\
case "$2" in
*launch_command*) cat >&2; echo '{"FSDP_VERSION": "2", "ACCELERATE_USE_CPU": "False", "A": "theirs"}' ;;
*) echo "<$FSDP_VERSION $ACCELERATE_USE_CPU $A>" ;;
esac
"""


def test_the_settings_of_accelerate_are_the_ranks_variables_and_the_users_own_win(
    settings: Settings, node: Node
):
    about = {
        "accelerate": {"words": ["--use_fsdp"], "configuration": "", "suffix": ""},
        "gpus_per_node": 0,
        "leaves_outcome": False,
        "variables": [["A", "mine"]],
    }
    process = run_node(settings, node, ACCELERATE, about=about, A="mine")
    printed = process.communicate(timeout=120)[0].splitlines()
    assert printed[-1] == "<2 true mine>", "on CPUs its ranks would train alone without ours"
    assert printed[-2] == (
        "[ENV] slurmd-0: accelerate launch sets A ACCELERATE_USE_CPU FSDP_VERSION"
    )


def test_settings_that_accelerate_refuses_are_a_mistake_in_the_options(
    settings: Settings, node: Node
):
    about = {"accelerate": {"words": ["--x"], "configuration": "", "suffix": ""}}
    process = run_node(settings, node, "echo 'error: no --x' >&2; exit 2", about=about)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 78
    assert printed.splitlines()[-1] == "[FATAL] slurmd-0: accelerate launch: error: no --x"


@pytest.mark.parametrize(
    ("is_payload", "gpus", "variables", "wanted"),
    [
        (False, 0, {}, "true"),
        (False, 0, {"ACCELERATE_USE_CPU": "false"}, "false"),
        (False, 1, {}, ""),  # whose torch is not known to be for CPUs
        (True, 0, {}, ""),
    ],
)
def test_accelerate_connects_its_ranks_on_cpus_unless_the_user_sets_it(
    settings: Settings,
    node: Node,
    *,
    is_payload: bool,
    gpus: int,
    variables: dict[str, str],
    wanted: str,
):
    request = dataclasses.replace(REQUEST, gpus_per_node=gpus)
    given = {"request": request, "outcome": is_payload}
    agent = 'echo "<$ACCELERATE_USE_CPU>"'
    process = run_node(settings, node, agent, given=given, about=None, **variables)
    assert process.communicate(timeout=120)[0].splitlines()[-1] == f"<{wanted}>"


def test_a_users_own_python_is_first_on_the_path_and_one_that_is_missing_is_named(
    settings: Settings, node: Node
):
    place = settings.workspace.path / "venv"
    python = environments.make(place, agent='echo "${PATH%%:*} $0"')
    output = run_node(settings, node, "", given={"python": str(python)}).communicate(timeout=120)[0]
    assert output.splitlines()[-1] == f"{place}/bin {python}"
    (place / "bin" / "python3").unlink()
    output = run_node(settings, node, "", given={"python": str(python)}).communicate(timeout=120)[0]
    line = f"[FATAL] slurmd-0: {python} cannot be started (No such file or directory); each node needs this path, "
    assert line in output


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("TimeoutError('timed out')", "cannot reach 127.0.0.1:20100 (slurmd-0): timed out"),
        (
            "OSError(113, 'No route to host')",
            "cannot reach 127.0.0.1:20100 (slurmd-0): No route to host",
        ),
        ("ConnectionRefusedError(111, 'Connection refused')", None),
    ],
)
def test_a_head_that_cannot_be_reached_is_named_with_both_nodes_and_its_port(
    settings: Settings, node: Node, error: str, words: str | None
):
    """A head that refuses does not listen yet; one that does not respond is behind a firewall."""
    process = run_node(settings, node, "echo started", SLURMD_NODENAME="slurmd-1", REFUSES=error)
    output, _ = process.communicate(timeout=120)
    if words is None:
        assert (process.returncode, output.splitlines()[-1]) == (0, "started")
    else:
        how = "let TCP through between the nodes (firewall, security group)"
        assert (process.returncode, output.splitlines()[-1]) == (
            78,
            f"[FATAL] slurmd-1: {words}; {how}",
        )
        assert output.splitlines()[:-1] == ["slept 1"] * 4


@pytest.mark.parametrize("num", [0, 1, 2, 3])
def test_each_rank_gets_a_mig_instance_of_those_that_the_job_got(
    settings: Settings, node: Node, num: int
):
    listed = [f"  MIG 1g.10gb     Device  {i}: (UUID: MIG-{i}a1)" for i in range(num)]
    node.add(
        "nvidia-smi",
        "".join(f"echo '{row}'\n" for row in ["GPU 0: NVIDIA H100 (UUID: GPU-5c)", *listed]),
    )
    given = {"request": resources.Request("main", 2, 2, 8, 8000, None, 180)}
    process = run_node(
        settings, node, "echo $CUDA_VISIBLE_DEVICES $*", given=given, CUDA_VISIBLE_DEVICES="0,1"
    )
    visible, *words = process.communicate(timeout=120)[0].splitlines()[-1].split()
    assert visible == ("0,1" if num < 2 else ",".join(f"MIG-{i}a1" for i in range(num)))
    assert ("--virtual-local-rank" in words) == (num >= 2)


def test_the_users_interface_and_threads_win(settings: Settings, node: Node):
    agent = 'echo "$OMP_NUM_THREADS $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"'
    process = run_node(
        settings,
        node,
        agent,
        OMP_NUM_THREADS="7",
        GLOO_SOCKET_IFNAME="ib0",
        NCCL_SOCKET_IFNAME="eth",
    )
    assert process.communicate(timeout=120)[0].endswith("gloo=ib0 nccl=eth\n7 ib0 eth\n")


def test_a_failed_agent_gives_the_others_time_and_keeps_its_code(settings: Settings, node: Node):
    process = run_node(settings, node, "exit 3")
    assert process.communicate(timeout=120)[0].endswith("\nslept 3\n")
    assert process.returncode == 3


def test_a_signal_to_the_step_waits_for_the_agent_to_save(settings: Settings, node: Node):
    agent = (
        "trap 'echo saved; exit 0' TERM; touch $NOTES/started; while :; do /bin/sleep 0.05; done"
    )
    process = run_node(settings, node, agent)
    for _ in range(1800):
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
    assert process.communicate(timeout=120)[0].endswith("\nsaved\n")
    assert process.returncode == 0


def test_a_signal_of_the_supervisor_reaches_the_ranks_alone(settings: Settings, node: Node):
    joined: queue.Queue[str] = queue.Queue()
    lines = lifelines.Lifelines(joined.put, joined.put)
    waiting = node.notes / "waiting"
    waiting.write_text(
        "trap 'echo $1 got it; exit 3' USR1; echo $1 is ready; while :; do /bin/sleep 0.05; done"
    )
    starts = [
        f"LOCAL_RANK=0 bash {waiting} rank &",
        "rank=$!",
        f"bash {waiting} helper &",
        "trap 'echo the agent got it' USR1",
        "wait $rank; code=$?; kill -9 $!; exit $code",
    ]
    process = run_node(settings, node, "\n".join(starts), LIFELINE=lines.place, QUICK="")
    assert process.stdout is not None
    seen: list[str] = []
    while not {"rank is ready", "helper is ready"} <= set(seen):
        seen.append(process.stdout.readline().strip())
    assert joined.get(timeout=120) == "slurmd-0"
    assert lines.signal(signal.SIGUSR1) == ["slurmd-0"]
    output, _ = process.communicate(timeout=120)
    lines.close()
    assert process.returncode == 0, (
        "else srun would end the other tasks, whose ranks may still save"
    )
    assert (
        "[PREEMPT] slurmd-0: the ranks here ended with code 3 when they were asked to stop"
        in output
    )
    assert [line for line in output.splitlines() if line.endswith("got it")] == ["rank got it"]
    assert " rank " not in output, "its state is of interest where it stands still"


def test_before_a_rank_is_asked_for_its_stack_its_state_is_printed_and_a_stopped_one_goes_on(
    settings: Settings, node: Node
):
    joined: queue.Queue[str] = queue.Queue()
    lines = lifelines.Lifelines(joined.put, joined.put)
    waiting = node.notes / "waiting"
    waiting.write_text(
        "trap 'echo its stack; exit 3' ABRT; kill -STOP $$; while :; do /bin/sleep 0.05; done"
    )
    starts = f"LOCAL_RANK=1 bash {waiting} & rank=$!; trap 'echo the agent got it' ABRT; wait $rank; exit $?"
    process = run_node(settings, node, starts, LIFELINE=lines.place, QUICK="", SLURM_NODEID="2")
    assert joined.get(timeout=120) == "slurmd-0"
    until = time.monotonic() + 120
    while "T (stopped)" not in "".join(path.read_text() for path in statuses(waiting)):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert lines.signal(signal.SIGABRT) == ["slurmd-0"]
    output, _ = process.communicate(timeout=120)
    lines.close()
    assert process.returncode == 3, output
    printed_lines = [
        line
        for line in output.splitlines()
        if " rank " in line or "stack" in line or "got it" in line
    ]
    assert [line.partition(" (T")[0] for line in printed_lines] == [
        "[ENV] slurmd-0: rank 5 is stopped",
        "its stack",
    ]


def statuses(script: pathlib.Path) -> list[pathlib.Path]:
    """Return the status files of the processes that run a script."""
    found: list[pathlib.Path] = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"\0{script}\0".encode() in path.read_bytes():
                found.append(path.with_name("status"))
    return found


def test_a_task_that_another_one_took_down_does_not_wait_to_save(settings: Settings, node: Node):
    agent = "trap : TERM; touch $NOTES/started; for i in $(seq 1800); do /bin/sleep 0.05; done; echo saved"
    process = run_node(settings, node, agent, QUICK="1")
    wait_for(node.notes / "started")
    (node.run_dir / "control" / "12.r0.failed").touch()
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert time.monotonic() - began < 10
    assert process.returncode == 137
    assert "saved" not in output


@pytest.mark.parametrize("outcome", [True, False])
def test_ranks_start_in_the_submission_s_folder_and_only_the_payload_is_kept_from_it(
    settings: Settings, node: Node, tmp_path: pathlib.Path, outcome: bool
):
    agent = 'echo "in $PWD safe=$PYTHONSAFEPATH"'
    start = None if outcome else copies.Start(str(tmp_path / "with blank"), "")
    printed = run_node(
        settings, node, agent, given={"outcome": outcome, "start": start}
    ).communicate(timeout=120)[0]
    if not outcome:
        assert (
            f"[FATAL] slurmd-0: {tmp_path}/with blank cannot be entered (No such file or directory)"
            in printed
        )
        (tmp_path / "with blank").mkdir()
        printed = run_node(
            settings, node, agent, given={"outcome": outcome, "start": start}
        ).communicate(timeout=120)[0]
    assert printed.endswith(
        f"in {node.run_dir} safe=1\n" if outcome else f"in {tmp_path}/with blank safe=\n"
    )


@pytest.mark.parametrize("is_first", [True, False])
def test_quantities_are_read_from_rank_0_alone(settings: Settings, node: Node, *, is_first: bool):
    logs = f"{node.cache}/jobs/12/logs/12.r0/node-{0 if is_first else 1}/x/attempt_0/0"  # where torchrun writes them
    agent = f'mkdir -p {logs}; for n in 1 2 3; do echo "loss = 0.$n"; done >{logs}/stdout.log; echo lr=0.5 >{logs}/stderr.log'
    given = {"outcome": False, "metric": "loss=loss = {}\nlr=lr={}"}
    process = run_node(settings, node, agent, given=given, SLURM_NODEID="0" if is_first else "1")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    found = metrics.Reader(node.run_dir / "metrics.jsonl").read()
    wanted = ([(1, 0.1), (2, 0.2), (3, 0.3)], [(3, 0.5)]) if is_first else ([], [])
    assert (found.points("loss", 9), found.points("lr", 9)) == wanted


def test_in_a_container_the_images_python_runs_the_payload(settings: Settings, node: Node):
    node.add("python3", 'echo "$PYTHONPATH $1"')
    given = {"container_image": "x:1"}
    process = run_node(settings, node, "exit 99", given=given, PYTHONPATH="/opt")
    assert process.communicate(timeout=120)[0].splitlines()[-1] == "/opt:/mnt/payload -c"

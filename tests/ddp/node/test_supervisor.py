"""A job's state machine under cluster faults, with doubles of Slurm; the rest: tests/ddp/submit."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import typing

import pytest
from job_specs import job_files, make

from batch_host import Node
from ddp.node import recovery, spec, srun

# An attempt whose rank leaves an error file as @record writes it.
RAISES = (
    "d=$RUN_DIR/logs/$RUN_ATTEMPT_ID/node-0/x/attempt_0/0; mkdir -p $d; "
    'printf \'{"message": {"message": "%s", "extraInfo": {"py_callstack": "Traceback (most recent call last):\\\\n'
    '  File \\\\"x.py\\\\", line 1, in main\\\\n%s\\\\n", "timestamp": "1000"}}}\' "$1" "$1" > $d/error.json; exit 1'
)
COUNTS = 'echo "$RUN_ATTEMPT_ID" >> "$NOTES/attempts"; n=$(wc -l < "$NOTES/attempts"); '


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Node:
    return Node(tmp_path, tmp_path / "shared" / "runs" / "first")


def files(node: Node, **more: typing.Any) -> dict[str, str]:
    return job_files(make(node.run_dir, **more))


def attempts(node: Node) -> list[str]:
    return (node.notes / "attempts").read_text().split()


def failures(node: Node) -> list[list[str]]:
    text = (node.run_dir / "control" / "12.failures").read_text()
    return [line.split("\t")[1:] for line in text.splitlines()]


def raises(words: str) -> str:
    return f"set -- {words!r}; {RAISES}"


# the filesystem's client dies under a running job, and is there again later
AWAY = 'mv "$RUN_DIR" "$RUN_DIR.away"; (/bin/sleep {0}; mv "$RUN_DIR.away" "$RUN_DIR") & '


def test_a_run_outlives_its_filesystem_and_no_line_is_lost(node: Node):
    lines = "for i in $(seq 5); do echo line $i; /bin/sleep 0.3; done; "
    node.add(
        "srun", COUNTS + f"if [ $n = 1 ]; then {AWAY.format(3)} {lines} exit 1; fi; echo line 6"
    )
    code, output = node.run(files(node))
    assert code == 0, output
    assert [line for line in output.splitlines() if line.startswith("line ")] == [
        f"line {n}" for n in range(1, 7)
    ]
    assert attempts(node) == ["12.r0", "12.r0t1"], "though max-restarts is 0"
    ((_, kind, host, words),) = failures(node)
    assert (kind, host) == ("filesystem", "slurmd-0")
    assert words == "the shared filesystem did not respond on slurmd-0 (No such file or directory)"
    assert "control does not respond (No such file or directory); waiting for it, 0 s" in output
    assert (
        "[RESTART] after a fault of the filesystem on slurmd-0 in 2 s, 1 of 8; it is not counted"
        in output
    )
    assert json.loads((node.run_dir / "control" / "12.retries").read_text()) == {
        "program": 0,
        "faults": 1,
    }
    assert not list((node.cache / "jobs").glob("*")), (
        "what was copied is removed from the node's disk"
    )


def test_a_users_variables_and_words_reach_the_ranks_as_they_are(node: Node):
    node.add(
        "srun", 'export PATH=/usr/bin; env -0 > $NOTES/env; printf "%s\\0" "$@" > $NOTES/words'
    )
    odd = ("", "a b", "it's $(id) `id` \\ \"\n#", "é\x1b[31m", "*")
    given = {f"V{number}": text for number, text in enumerate(odd)} | {
        "PATH": "/nowhere",
        "BASH_ENV": "/nowhere",
    }
    job = {"command": tuple(map(spec.Word, ("train.py", *odd))), "variables": tuple(given.items())}
    code, output = node.run(files(node, **job))
    assert code == 0, output
    found = dict(
        pair.split("=", 1) for pair in (node.notes / "env").read_text().split("\0") if pair
    )
    assert {name: found[name] for name in given} == given | {"PATH": "/usr/bin"}, (
        "srun is found all the same"
    )
    assert (node.notes / "words").read_text().split("\0")[-6:-1] == list(odd)


def test_the_nodes_get_the_program_in_one_file(node: Node):
    node.add("srun", 'shift 9; while [ $1 != /bin/sh ]; do shift; done; exec "${@:1:5}" nothing x')
    output = node.run(files(node))[1]
    assert f"{node.run_dir}/program/ddp.pyz/__main__.py" in output
    assert "KeyError: 'nothing'" in output


def test_faults_of_the_filesystem_have_a_bound_of_their_own(node: Node):
    node.add(
        "srun",
        COUNTS + raises("OSError: [Errno 107] Transport endpoint is not connected: '/x/shared/a'"),
    )
    job = make(node.run_dir, max_restarts=1, workspace="/x/shared")
    code, output = node.run(job_files(dataclasses.replace(job)))
    assert code == 1
    assert len(attempts(node)) == 1 + 1, (
        "the path is not in the workspace, so a node's disk is at fault"
    )
    assert failures(node)[0][1] == "program"
    node.notes.joinpath("attempts").unlink()
    words = f"OSError: [Errno 107] Transport endpoint is not connected: '{node.run_dir}/latest'"
    node.add("srun", COUNTS + raises(words))
    (node.run_dir / "control" / "12.retries").unlink()
    shutil.rmtree(node.run_dir / "logs" / "12.r0t1")
    code, output = node.run(job_files(job))
    assert code == 1
    assert len(attempts(node)) == 1 + recovery.MAX_FAULTS
    assert failures(node)[-1][1:3] == ["filesystem", "slurmd-0"]
    assert failures(node)[-1][3] == f"the shared filesystem failed: {words}"
    assert "[RESTART] given up after 8 faults" in output
    pauses = [
        int(line.split(" in ")[1].split()[0])
        for line in output.splitlines()
        if "[RESTART] after" in line
    ]
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60], "a growing pause"


@pytest.mark.parametrize(
    "error",
    [
        "OSError: [Errno 5] Input/output error",
        "ConnectionAbortedError: [Errno 103] Software caused connection abort",
    ],
)
def test_a_fault_of_the_filesystem_does_not_use_up_the_programs_restarts(node: Node, error: str):
    gone = raises(f"{error}: '{node.run_dir}/x'")
    node.add(
        "srun",
        COUNTS + f"case $n in 1|3) {gone} ;; 5) exit 0 ;; *) {raises('ValueError: boom')} ;; esac",
    )
    code, output = node.run(files(node, max_restarts=2))
    assert code == 0, output
    assert [row[1] for row in failures(node)] == ["filesystem", "program", "filesystem", "program"]
    assert [
        line for line in output.splitlines() if line.startswith("[RESTART]") and " of 2" in line
    ] == ["[RESTART] 1 of 2", "[RESTART] 2 of 2"]


def test_a_filesystem_that_stays_away_ends_the_job_with_its_name(node: Node):
    node.add("srun", 'mv "$RUN_DIR" "$RUN_DIR.away"; exit 1')
    process = node.start(files(node), PATIENCE_S="1")
    process.wait(timeout=90)
    assert process.returncode == 78
    (spooled,) = (node.cache / "jobs" / "12").iterdir()
    last = spooled.read_text().splitlines()[-1]
    assert last.startswith(f"[FATAL] slurmd-0: {node.run_dir}/control has not responded for ")
    assert last.endswith(": No such file or directory; is the shared filesystem mounted here?")


def test_a_cancellation_while_the_filesystem_is_awaited_ends_the_job(node: Node):
    node.add("srun", 'mv "$RUN_DIR" "$RUN_DIR.away"; touch "$NOTES/moved"; exit 1')
    process = node.start(files(node))
    for _ in range(1800):
        if (node.notes / "moved").exists():
            break
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=90)
    assert process.returncode != 0
    assert not node.requeued()


def test_a_rank_s_own_error_is_reported_before_its_log(node: Node):
    noise = (
        "d=$RUN_DIR/logs/$RUN_ATTEMPT_ID/node-0/x/attempt_0/0; mkdir -p $d; "
        "printf 'Traceback (most recent call last):\\nKeyError: lived on with\\n' > $d/stderr.log; "
    )
    node.add("srun", noise + raises("ValueError: boom"))
    assert node.run(files(node))[0] == 1
    assert failures(node) == [["12.r0", "program", "slurmd-0", "ValueError: boom"]]


def test_a_node_that_slurm_lost_is_awaited(node: Node):
    node.hosts, node.addresses = (
        "slurmd-0 slurmd-1",
        {"slurmd-0": "127.0.0.1", "slurmd-1": "192.0.2.7"},
    )
    node.add(
        "scontrol", 'case $2 in hostnames) printf "%s\\n" $HOSTS ;; *) cat "$NOTES/nodes" ;; esac'
    )
    node.add(
        "sinfo",
        'case "$*" in *"-n slurmd-1"*) echo x >> "$NOTES/asked"; '
        '[ $(wc -l < "$NOTES/asked") -gt 2 ] && echo idle || echo "down*" ;; *) printf "%s\\n" slurmd-0 ;; esac',
    )
    lost = "echo 'srun: error: Node failure on slurmd-1'; exit 1"
    node.add("srun", COUNTS + f"if [ $n = 1 ]; then {lost}; fi")
    code, output = node.run(files(node, fabrics=LOOPBACK, fabric="own"), SLURM_JOB_NUM_NODES="2")
    assert code == 0, output
    assert failures(node)[0][1:] == ["node", "slurmd-1", "Slurm lost the node"]
    assert "[RESTART] slurmd-1 is down*; waiting for it, 0 s" in output
    assert "[RESTART] after a fault of the node on slurmd-1 in 2 s, 1 of 8" in output


LOOPBACK = (spec.Fabric("own", (), "lo", (), (), "", "", "", (), ()),)


def test_a_mistake_of_the_programs_own_reaches_the_log(node: Node):
    node.add("srun", "exit 0")
    checks_port = "def is_free(port: int) -> bool:\n"
    node.change("network.py", checks_port, f"{checks_port}    raise KeyError('a bug')\n")
    code, output = node.run(files(node))
    assert code == 1
    assert output.endswith("KeyError: 'a bug'\n")


PREPARE = """
import os, sys
sys.path.insert(0, sys.argv[1] + "/ddp.pyz")
from ddp.node import dataset_preparation, unpacking
unpacking.use = lambda *_: (os.environ["NOTES"] + "/python", (os.open("/dev/null", os.O_RDONLY),))
os._exit(dataset_preparation.main(sys.argv[1] + "/prepare.json"))
"""


@pytest.mark.parametrize(("fails", "elements"), [("", 0), ("prepare", 0), ("inspect", 0), ("", 4)])
def test_a_preparation_runs_its_commands_in_turn(node: Node, fails: str, elements: int):
    made = spec.Environment((), str(node.cache), "3.11", ())
    commands = (
        ("ddptrain", "prepare", "--to", "$(id) x"),
        *([] if elements else [("ddptrain", "inspect", "--json")]),
    )
    job = spec.PrepareSpec(str(node.run_dir), str(node.cache), made, commands, elements)
    node.write({**job_files(make(node.run_dir)), "program/prepare.json": spec.dump(job)})
    python = node.notes / "python"
    python.write_text(
        f'#!/bin/sh\nshift; echo "$@"; case "$2" in "{fails or "-"}") exit 3 ;; esac\n'
    )
    python.chmod(0o755)
    log = node.run_dir / "logs" / "12.out"
    argv = [sys.executable, "-I", "-S", "-B", "-c", PREPARE, str(node.run_dir / "program")]
    with log.open("ab") as output:
        env = node.env(SLURM_ARRAY_TASK_ID="2")
        done = subprocess.run(argv, env=env, stdout=output, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == (3 if fails else 0)
    task = " --task 2/4" if elements else ""
    assert log.read_text() == f"ddptrain prepare --to $(id) x{task}\n"
    found = node.run_dir / "inspection.json"
    assert found.exists() == (not fails and not elements)
    if found.exists():
        assert found.read_text() == "ddptrain inspect --json\n"


@pytest.mark.parametrize(("kill", "is_sent"), [(subprocess.Popen.kill, True), (srun.kill, False)])
def test_srun_s_second_process_tells_slurmctld_nothing(
    tmp_path: pathlib.Path, kill: typing.Callable[[subprocess.Popen[bytes]], None], is_sent: bool
):
    """It waits for the first, then has the step killed (srun_job.c, _shepherd_spawn())."""
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "output")
    shepherd = (
        "exec >output; (exec 3<pipe; echo ready; read word <&3; echo sent) & exec 4>pipe; sleep 60"
    )
    process = srun.start(["/bin/bash", "-c", f"cd {tmp_path}; {shepherd}"], {"PATH": os.defpath})
    with (tmp_path / "output").open() as output:
        assert output.readline() == "ready\n"
        kill(process)
        process.wait(10)
        assert output.read() == ("sent\n" if is_sent else "")


@pytest.mark.parametrize("leaves_outcome", [False, True])
def test_a_job_that_was_done_does_nothing_when_slurm_queues_it_again(
    node: Node, leaves_outcome: bool
):
    """Slurm up to 25.11 does, if an earlier start has ended in the grace time of a preemption."""
    done = 'echo "{\\"outcome\\": \\"done\\"}" > "$RUN_DIR/control/$RUN_ATTEMPT_ID.outcome"'
    node.add("srun", f"{COUNTS} [ $n = 1 ] && exit 1; {done if leaves_outcome else 'exit 0'}")
    secrets = node.run_dir / "control" / "12.env"
    more = {"leaves_outcome": leaves_outcome, "max_restarts": 1, "secrets_path": str(secrets)}
    given = files(node, **more)
    code, output = node.run({**given, "control/12.env": "{}"})
    assert code == 0, output
    assert attempts(node) == ["12.r0", "12.r0t1"]
    assert not secrets.exists()

    code, output = node.run(given, SLURM_RESTART_COUNT="1")
    assert code == 0, output
    assert "[REQUEUE] nothing to do: the job was done before Slurm queued it again" in output
    assert attempts(node) == ["12.r0", "12.r0t1"]


def test_a_spare_node_takes_the_place_of_a_lost_one_without_the_queue(node: Node):
    node.hosts = "slurmd-0 slurmd-1 slurmd-2"
    lost = "echo 'srun: error: Node failure on slurmd-1'; exit 1"
    node.add("srun", COUNTS + f'echo "$*" > "$NOTES/srun-$n"; if [ $n = 1 ]; then {lost}; fi')
    code, output = node.run(
        files(node, fabrics=LOOPBACK, fabric="own", nodes=2), SLURM_JOB_NUM_NODES="3"
    )
    assert code == 0, output
    assert failures(node)[0][1:] == ["node", "slurmd-1", "Slurm lost the node"]
    assert not node.requeued()
    assert attempts(node) == ["12.r0", "12.r0t1"], "though max-restarts is 0"
    assert "--nodelist=slurmd-0,slurmd-1 --overlap" in (node.notes / "srun-1").read_text()
    assert "--nodelist=slurmd-0,slurmd-2 --overlap" in (node.notes / "srun-2").read_text()
    assert (node.run_dir / "control" / "12.hosts").read_text() == "slurmd-0 slurmd-2\n"
    assert "[RESTART] on slurmd-0 slurmd-2, without slurmd-1" in output

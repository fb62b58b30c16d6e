"""The scripts of a run: rendered, and run by a real bash with doubles of Slurm's commands around them."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import typing

import pytest
from script_texts import ENDS, MANIFEST, REQUEST, WAITS, stop, texts, wait_for

from batch_host import Node
from ddp.base import ParameterError, Settings
from ddp.node import network, spec
from ddp.options import fields, models
from ddp.submit import fabrics, resources, scripts


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_the_job_asks_for_what_was_planned(settings: Settings):
    script = texts(settings, constraint="a100&ib", account="physics", qos="high", reservation="r1")["job.sbatch"]
    run_dir = settings.runs / "first"
    assert directives(script) == [
        "job-name=first",
        "partition=main",
        "nodes=2",
        "ntasks-per-node=1",
        "cpus-per-task=4",
        "mem=8000M",
        "gpus-per-node=1",
        "time=02:00:00",
        "account=physics",
        "qos=high",
        "reservation=r1",
        "constraint=a100&ib",
        f"chdir={run_dir}",
        f"output={run_dir}/logs/%j.out",
        "open-mode=append",
        "requeue",
        "propagate=NONE",
        "signal=B:USR1@180",
    ]


def test_what_is_not_wanted_is_not_asked_for(settings: Settings):
    script = texts(settings, resources.Request("main", 1, 0, 4, 8000, None, 180))["job.sbatch"]
    assert not [line for line in directives(script) if line.startswith(("gpus", "time", "account"))]


def test_what_has_no_option_of_its_own_reaches_sbatch_as_it_is(settings: Settings):
    script = texts(settings, sbatch="--nice=100 --spread-job --switches=1@60")["job.sbatch"]
    assert {"nice=100", "spread-job", "switches=1@60"} <= set(directives(script))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("--output=/x", "sbatch: --output is set by the job itself, which relies on it; omit it"),
        ("--outp=/x", "sbatch: --output is set by the job itself, which relies on it; omit it"),
        ("--nice=1 --wrap=id", "sbatch: --wrap is set by the job itself, which relies on it; omit it"),
        ("--time=5", "sbatch: --time has its own option; use time-limit"),
        ("--mem=5", "sbatch: --mem has its own option; use memory"),
        (
            "-t5",
            "sbatch: '-t5' is not allowed; sbatch's own long options, separated by blanks, such as --nice=100 --switches=1",
        ),
        (
            "nice=100",
            "sbatch: 'nice=100' is not allowed; sbatch's own long options, separated by blanks, such as --nice=100 --switches=1",
        ),
    ],
)
def test_what_would_break_the_job_is_refused(given: str, line: str):
    with pytest.raises(ParameterError) as caught:
        fields.parse(models.SubmitDdp, {"sbatch": given})
    assert str(caught.value) == line


def test_the_script_is_directives_and_one_command(settings: Settings):
    lines = texts(settings, env="A=b")["job.sbatch"].splitlines()
    program = f"{settings.runs}/first/program"
    assert [line for line in lines if not line.startswith("#")] == [
        f"exec /usr/bin/python3 -I -S -B {program} job job.json"
    ]


def test_what_the_job_runs_lies_in_its_own_folder(settings: Settings):
    """Nobody else can write there, and nothing is taken from elsewhere: -I, and no site-packages."""
    files = texts(settings)
    assert {name.partition("/")[0] for name in files} == {"job.sbatch", "program"}
    for name, text in files.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
    job = spec.load(spec.JobSpec, write(settings, files))
    assert (job.run, job.job_dir, job.cache) == ("first", str(settings.runs / "first"), str(settings.node_cache))
    assert job.environment is not None
    assert job.environment.trusted_uids == (settings.uid,)


def write(settings: Settings, files: dict[str, str]) -> str:
    path = settings.runs / "spec.json"
    path.write_text(files["program/job.json"])
    return str(path)


def test_a_value_that_slipped_through_would_still_be_quoted(settings: Settings, node: Node, tmp_path: pathlib.Path):
    evil = f"$(touch {tmp_path}/pwned) `touch {tmp_path}/pwned`; touch {tmp_path}/pwned '\" {{{{ 7*7 }}}}"
    params = models.SubmitDdp.model_construct()
    files = scripts.training(
        settings,
        REQUEST,
        params,
        MANIFEST.model_copy(update={"folder": evil}),
        run="first",
        program=scripts.Program(("x", evil), leaves_outcome=True),
    )
    node.add("srun", 'printf "%s\\n" "${!#}"; ' + ENDS % "done")
    code, output = node.run(files)
    assert code == 0, output
    assert output.splitlines()[1] == evil
    assert (job := spec.load(spec.JobSpec, str(node.run_dir / "program" / "job.json"))).environment is not None
    assert job.environment.archive == f"{evil}/{MANIFEST.hash}.tar.zst"
    assert not (tmp_path / "pwned").exists()


def test_torchrun_gets_exactly_the_command(settings: Settings, node: Node):
    node.add("srun", 'printf "%s\\0" "$@" > "$NOTES/argv"; ' + ENDS % "done")
    code, output = node.run(texts(settings), waits=True)
    assert code == 0, output
    argv = (node.notes / "argv").read_text().split("\0")[:-1]
    assert argv[:10] == [
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=4",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        "--wait=300",
        "--label",
        "--chdir=/",
        "sh",
    ]
    assert argv[12:] == [
        "/usr/bin/python3",
        str(node.run_dir / "program"),
        "node",
        "job.json",
        "--module",
        "ddptrain",
        "smoke",
        "--lr",
        "3e-3",
    ]
    lines = output.splitlines()
    assert len(lines) == 2, "nothing else is printed"
    assert lines[1] == "[RESULT] rc=0 outcome=done"
    assert (
        lines[0] == "[ENV] job=12 attempt=12.r0 nodes=slurmd-0 head=127.0.0.1:20096 ranks_per_node=1 launcher=torchrun"
    )


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
    assert node.run(texts(settings, outcome=outcome))[0] == code
    assert not node.requeued()


def test_a_warning_saves_and_requeues(settings: Settings, node: Node):
    node.add("srun", WAITS + ENDS % "preempted")
    code, output = stop(node, texts(settings), signal.SIGUSR1)
    assert code == 75
    assert node.requeued()
    stamp = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.search(rf"^\[PREEMPT\] {stamp} USR1: asking the ranks to save and leave$", output, re.MULTILINE)
    assert re.search(rf"^\[REQUEUE\] {stamp} job 12 is queued again$", output, re.MULTILINE)
    assert (node.run_dir / "control" / "12.r0.stop").exists()


@pytest.mark.parametrize(
    ("number", "outcome", "state", "code"),
    [
        pytest.param(signal.SIGTERM, "preempted", "RUNNING", 75, id="cancelled"),
        pytest.param(signal.SIGUSR1, "preempted", "COMPLETING", 75, id="no longer running"),
        pytest.param(signal.SIGUSR1, "done", "RUNNING", 0, id="warned at the very end"),
    ],
)
def test_a_job_that_has_ended_is_not_requeued(
    settings: Settings, node: Node, number: signal.Signals, outcome: str, state: str, code: int
):
    node.add("srun", WAITS + ENDS % outcome)
    assert stop(node, texts(settings), number, STATE=state)[0] == code
    assert not node.requeued()


def test_a_job_is_requeued_only_so_often(settings: Settings, node: Node):
    node.add("srun", WAITS + ENDS % "preempted")
    files = texts(settings, max_requeues=2)
    assert stop(node, files, signal.SIGUSR1, SLURM_RESTART_COUNT="2")[0] == 75
    assert not node.requeued()
    (node.notes / "started").unlink()
    assert stop(node, files, signal.SIGUSR1, SLURM_RESTART_COUNT="1")[0] == 75
    assert node.requeued()


def test_an_earlier_attempts_stop_file_is_removed(settings: Settings, node: Node):
    (node.run_dir / "control").mkdir(parents=True)
    (node.run_dir / "control" / "12.r0.stop").touch()
    node.add("srun", '[ -e "$STOP_FILE" ] && exit 5; ' + ENDS % "done")
    assert node.run(texts(settings))[0] == 0


def route(address: str) -> str:
    """Return this machine's own address on the way to another one; nothing without a route there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return probe.getsockname()[0]


@pytest.mark.parametrize("hosts", ["slurmd-0 slurmd-1", "slurmd-1 slurmd-0"])
def test_nodes_are_reached_by_the_addresses_that_slurm_has_not_by_their_names(
    settings: Settings, node: Node, hosts: str
):
    """The batch node need not be the first by name."""
    for name in hosts.split():
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo(name, None)
    node.hosts, node.addresses = hosts, {"slurmd-0": "203.0.113.6", "slurmd-1": "203.0.113.7"}
    node.add("srun", 'echo "head=$HEAD_IP of $HEAD_NODE"; ' + ENDS % "done")
    code, output = node.run(texts(settings), SLURM_JOB_NUM_NODES="2")
    if own := route("203.0.113.7"):
        assert code == 0, output
        assert f"head={own} of slurmd-0" in output.splitlines()
    else:
        assert code == 78
        assert "[FATAL] slurmd-0: no route to 203.0.113.7 (slurmd-1): Network is unreachable; see: ip" in output


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.1.1", "is 127.0.1.1, a loopback address"),
        ("nowhere.invalid", "is nowhere.invalid, which is no IPv4 address and does not resolve ("),
        ("fd00::7", "is fd00::7, which is no IPv4 address and does not resolve ("),
    ],
)
def test_an_address_in_slurm_that_cannot_be_used_is_an_error_with_the_command_that_changes_it(
    settings: Settings, node: Node, address: str, words: str
):
    node.hosts, node.addresses = "slurmd-0 slurmd-1", {"slurmd-0": "203.0.113.6", "slurmd-1": address}
    node.add("srun", "exit 99")
    code, output = node.run(texts(settings), SLURM_JOB_NUM_NODES="2")
    assert code == 78
    assert f"[FATAL] slurmd-0: the address of slurmd-1 in Slurm (NodeAddr) {words}" in output
    assert output.rstrip().endswith("; as an administrator: scontrol update nodename=slurmd-1 nodeaddr=ADDRESS")


def test_a_node_whose_address_slurm_does_not_give_is_an_error(settings: Settings, node: Node):
    node.hosts, node.addresses = "slurmd-0 slurmd-1", {"slurmd-0": "203.0.113.6"}
    code, output = node.run(texts(settings), SLURM_JOB_NUM_NODES="2")
    assert (code, output) == (78, "[FATAL] slurmd-0: Slurm gave no address of slurmd-1\n")


def test_a_controller_that_restarts_is_asked_again_for_the_addresses(settings: Settings, node: Node):
    node.hosts = "slurmd-0 slurmd-1"
    silent = "slurm_load_node error: Unable to contact slurm controller (connect failure)"
    node.add("scontrol", f'case $2 in hostnames) printf "%s\\n" $HOSTS ;; *) echo "{silent}" >&2; exit 1 ;; esac')
    code, output = node.run(texts(settings), SLURM_JOB_NUM_NODES="2")
    assert code == 78
    assert [line for line in output.splitlines() if line.startswith("slept")] == [
        f"slept {pause}" for pause in (1, 2, 4, 8, 15, 30, 60)
    ]
    assert f"[ENV] Slurm gave no addresses of the nodes ({silent}); asking again in 1 s" in output
    assert output.endswith(f"[FATAL] slurmd-0: Slurm gave no addresses of slurmd-0 slurmd-1: {silent}\n")


def test_a_port_that_is_taken_is_passed_over(settings: Settings, node: Node):
    node.add("srun", 'echo "port=$HEAD_PORT"; ' + ENDS % "done")
    with socket.socket() as taken:
        taken.bind(("", 20000 + 12 * 8 % 10000))
        taken.listen()
        _, output = node.run(texts(settings))
    assert "[ENV] port 20096 is taken, trying another" in output
    assert "port=20097" in output


def test_the_users_variables_reach_the_job(settings: Settings, node: Node):
    node.add("srun", 'echo "got $NCCL_DEBUG $OMP_NUM_THREADS"; ' + ENDS % "done")
    _, output = node.run(texts(settings, env="NCCL_DEBUG=INFO OMP_NUM_THREADS=3"))
    assert "got INFO 3" in output


# -- failures, and what is tried again ---------------------------------------------------------------------------------

FAILS = 'echo "1: [FATAL] $FAULTY: its disk is full"; exit 78'  # as the program says it, of a node
BOOM = (
    "d=$RUN_DIR/logs/$RUN_ATTEMPT_ID/node-0/x/attempt_0/0; mkdir -p $d; "
    'printf "Traceback (most recent call last):\\nValueError: boom\\n" > $d/stderr.log; exit 1'
)
COUNTS = 'echo "$RUN_ATTEMPT_ID" >> "$NOTES/attempts"; '


def attempts(node: Node) -> list[str]:
    return (node.notes / "attempts").read_text().split()


def failures(node: Node) -> list[list[str]]:
    text = (node.run_dir / "control" / "12.failures").read_text()
    return [line.split("\t")[1:] for line in text.splitlines()]


def test_a_failure_is_noted_and_by_default_not_tried_again(settings: Settings, node: Node):
    node.add("srun", COUNTS + BOOM)
    code, output = node.run(texts(settings, outcome=False))
    assert code == 1
    assert attempts(node) == ["12.r0"]
    assert failures(node) == [["12.r0", "program", "slurmd-0", "ValueError: boom"]]
    assert output.splitlines()[-1] == "[FAILED] attempt=12.r0 fault=program node=slurmd-0: ValueError: boom"


def test_a_program_that_failed_is_started_again_in_the_same_place(settings: Settings, node: Node):
    node.add("srun", COUNTS + f'if [ $(wc -l < "$NOTES/attempts") -lt 3 ]; then {BOOM}; fi')
    code, output = node.run(texts(settings, outcome=False, max_restarts=2))
    assert code == 0, output
    assert attempts(node) == ["12.r0", "12.r0t1", "12.r0t2"]
    assert [line for line in output.splitlines() if line.startswith("[RESTART]")] == [
        "[RESTART] 1 of 2",
        "[RESTART] 2 of 2",
    ]
    assert not node.requeued()
    ports = {line.split("head=")[1].split()[0] for line in output.splitlines() if line.startswith("[ENV] job=")}
    assert len(ports) == 3, "an attempt never meets what is left of the one before"


def test_it_is_started_again_only_so_often_over_all_starts_of_the_job(settings: Settings, node: Node):
    node.add("srun", COUNTS + BOOM)
    files = texts(settings, outcome=False, max_restarts=2)
    assert node.run(files)[0] == 1
    assert node.run(files, SLURM_RESTART_COUNT="1")[0] == 1
    assert attempts(node) == ["12.r0", "12.r0t1", "12.r0t2", "12.r1"]


@pytest.mark.parametrize(
    ("srun", "code", "outcome"),
    [("exit 0", 0, "done"), ("exit 9", 9, "failed"), (ENDS % "failed" + "; exit 2", 2, "failed")],
)
def test_a_script_that_leaves_no_outcome_has_one_left_for_it(
    settings: Settings, node: Node, srun: str, code: int, outcome: str
):
    node.add("srun", srun)
    assert node.run(texts(settings, outcome=False))[0] == code
    left = json.loads((node.run_dir / "control" / "12.r0.outcome").read_text())
    assert left["outcome"] == outcome
    assert left.get("exit_code", code) == code
    assert ("step" in left) == ("echo" in srun), "its own is kept"


def test_a_cancelled_script_is_distinguished_from_one_that_failed(settings: Settings, node: Node):
    node.add("srun", WAITS + "exit 143")
    assert stop(node, texts(settings, outcome=False), signal.SIGTERM)[0] == 143
    assert json.loads((node.run_dir / "control" / "12.r0.outcome").read_text())["outcome"] == "cancelled"


def test_a_mistake_of_the_users_is_not_tried_again(settings: Settings, node: Node):
    outcome = '{\\"outcome\\": \\"failed\\", \\"error\\": \\"--batch 0: at least 1\\", \\"retry\\": false}'
    node.add("srun", COUNTS + f'echo "{outcome}" > "$RUN_DIR/control/$RUN_ATTEMPT_ID.outcome"; exit 2')
    assert node.run(texts(settings, max_restarts=5))[0] == 2
    assert attempts(node) == ["12.r0"]
    assert failures(node) == [["12.r0", "mistake", "-", "--batch 0: at least 1"]]


def test_a_node_that_failed_is_left_out_of_the_next_start(settings: Settings, node: Node):
    node.add("srun", COUNTS + FAILS)
    node.add("sinfo", "printf '%s\\n' slurmd-0 other slurmd-0 third")
    code, output = node.run(texts(settings, max_restarts=1), FAULTY="slurmd-0")
    assert code == 75
    assert (node.notes / "scontrol").read_text().splitlines() == [
        "requeue 12",
        "update JobId=12 ExcNodeList=slurmd-0",
    ], "Slurm takes the list only while the job waits"
    assert attempts(node) == ["12.r0"], "it goes on elsewhere"
    assert failures(node) == [["12.r0", "node", "slurmd-0", "its disk is full"]]
    assert output.splitlines()[-1] == "[RESTART] without slurmd-0"


def test_a_second_node_is_left_out_beside_the_first(settings: Settings, node: Node):
    node.add("srun", COUNTS + FAILS)
    node.add("sinfo", "printf '%s\\n' slurmd-0 other third")
    files = texts(settings, max_restarts=5)
    (node.run_dir / "control").mkdir(parents=True)
    (node.run_dir / "control" / "12.excluded").write_text("other\n")
    node.run(files, FAULTY="slurmd-0", SLURM_RESTART_COUNT="1")
    assert (node.notes / "scontrol").read_text().splitlines()[-1] == "update JobId=12 ExcNodeList=other,slurmd-0"


def test_nodes_that_the_user_excluded_stay_left_out(settings: Settings, node: Node):
    """ExcNodeList replaces what the job was submitted with."""
    node.add("srun", COUNTS + FAILS)
    node.add("sinfo", "printf '%s\\n' slurmd-0 other third")
    request = dataclasses.replace(REQUEST, num_nodes=1, exclude=("third", "fourth"))
    files = texts(settings, request, max_restarts=5, exclude="third,fourth")
    assert node.run(files, FAULTY="slurmd-0")[0] == 75
    assert (node.notes / "scontrol").read_text().splitlines()[-1] == "update JobId=12 ExcNodeList=fourth,slurmd-0,third"


@pytest.mark.parametrize(
    ("usable", "option", "name"),
    [
        pytest.param("slurmd-0 third", "exclude", "third", id="what the user excluded is no spare node"),
        pytest.param("slurmd-0 other third", "nodelist", "slurmd-0", id="a named node must be among the job's"),
    ],
)
def test_a_faulty_node_is_tried_again_where_no_other_may_stand_in(
    settings: Settings, node: Node, usable: str, option: str, name: str
):
    node.add("srun", COUNTS + FAILS)
    node.add("sinfo", f"printf '%s\\n' {usable}")
    request = dataclasses.replace(REQUEST, num_nodes=1, **{option: (name,)})
    chosen: dict[str, typing.Any] = {option: name}
    node.run(texts(settings, request, max_restarts=1, **chosen), FAULTY="slurmd-0")
    assert not node.requeued()
    assert attempts(node) == ["12.r0", "12.r0t1"]


@pytest.mark.parametrize(("reserved", "requeues"), [("slurmd-0,third", True), ("slurmd-0", False)])
def test_only_a_node_of_its_reservation_may_stand_in(settings: Settings, node: Node, reserved: str, requeues: bool):
    node.add("srun", COUNTS + FAILS)
    node.add("sinfo", "printf '%s\\n' slurmd-0 other third")
    shown = f"ReservationName=team StartTime=2026-11-22T10:00:00 Nodes={reserved} NodeCnt=2 Flags=MAINT"
    node.add(
        "scontrol",
        f'case "$*" in *"show reservation team") echo "{shown}" ;; "show hostnames {reserved}") echo {reserved} | tr , "\\n" ;;'
        f' show*) echo slurmd-0 ;; *) echo "$*" >> {node.notes}/scontrol ;; esac',
    )
    node.run(texts(settings, max_restarts=1, reservation="team"), FAULTY="slurmd-0")
    assert node.requeued() == requeues


def test_which_nodes_and_after_which_jobs(settings: Settings):
    waits = "afterok:40:41,afterany:42"
    files = texts(settings, nodelist="n[1-2]", exclude="n3", exclusive=True, dependency=waits)
    lines = directives(files["job.sbatch"])
    for line in ("nodelist=n[1-2]", "exclude=n3", "exclusive", "dependency=afterok:40:41,afterany:42"):
        assert line in lines
    assert "kill-on-invalid-dep=yes" in lines, "or it would wait for ever"


def test_the_last_node_is_not_left_out(settings: Settings, node: Node):
    node.add("srun", COUNTS + FAILS)
    node.add("sinfo", "echo slurmd-0")
    code, output = node.run(texts(settings, max_restarts=1), FAULTY="slurmd-0")
    assert code == 78
    assert not node.requeued()
    assert attempts(node) == ["12.r0", "12.r0t1"]
    assert "[RESTART] slurmd-0 is suspect, but partition main has no other node for it" in output


def test_what_every_node_complains_of_is_no_nodes_fault(settings: Settings, node: Node):
    node.hosts, node.addresses = "slurmd-0 slurmd-1", {"slurmd-0": "192.0.2.1", "slurmd-1": "192.0.2.2"}
    node.add("srun", COUNTS + 'for h in $HOSTS; do echo "0: [FATAL] $h: the archive is damaged"; done; exit 78')
    assert node.run(texts(settings, max_restarts=3), SLURM_JOB_NUM_NODES="2")[0] == 78
    assert failures(node)[0][1:3] == ["mistake", "-"]


def test_no_restart_after_a_cancellation(settings: Settings, node: Node):
    node.add("srun", COUNTS + WAITS + BOOM)
    assert stop(node, texts(settings, max_restarts=9), signal.SIGTERM)[0] == 1
    assert attempts(node) == ["12.r0"]
    assert not node.requeued()


def test_a_cancellation_while_a_warned_job_saves_wins(settings: Settings, node: Node):
    node.add(
        "srun",
        'touch "$NOTES/started"; for i in $(seq 400); do [ -e "$NOTES/go" ] && break; /bin/sleep 0.05; done; '
        + ENDS % "preempted",
    )
    process = node.start(texts(settings))
    wait_for(node.notes / "started")
    process.send_signal(signal.SIGUSR1)
    wait_for(node.run_dir / "control" / "12.r0.stop")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    (node.notes / "go").touch()
    assert node.finish(process)[0] == 75
    assert not node.requeued()


def test_a_controller_that_is_away_is_asked_again_and_the_job_is_queued_once(settings: Settings, node: Node):
    node.add("srun", WAITS + ENDS % "preempted")
    node.add("squeue", 'echo x >> "$NOTES/asked"; [ $(wc -l < "$NOTES/asked") -gt 3 ] && echo RUNNING')
    code, output = stop(node, texts(settings), signal.SIGUSR1)
    assert code == 75
    assert (node.notes / "scontrol").read_text() == "requeue 12\n"
    assert output.count("[REQUEUE] Slurm does not respond") == 3


def test_a_requeue_whose_answer_was_lost_is_not_asked_for_twice(settings: Settings, node: Node):
    node.add("srun", WAITS + ENDS % "preempted")
    node.add(
        "scontrol",
        'case $1 in show) echo slurmd-0 ;; *) echo "$*" >> "$NOTES/scontrol"; touch "$NOTES/queued"; exit 1 ;; esac',
    )
    node.add("squeue", 'if [ -e "$NOTES/queued" ]; then echo PENDING; else echo RUNNING; fi')
    assert stop(node, texts(settings), signal.SIGUSR1)[0] == 75
    assert (node.notes / "scontrol").read_text() == "requeue 12\n"


def test_what_the_run_has_saved_goes_before_what_it_began_from(settings: Settings, node: Node):
    node.add("srun", 'echo "${!#}"; ' + ENDS % "done")
    program = scripts.Program(("x", scripts.RESUME), leaves_outcome=True, resume="/mnt/runs/base")
    params = fields.parse(models.SubmitDdp, {})
    made = MANIFEST.model_copy(update={"folder": str(settings.environments)})
    files = scripts.training(settings, REQUEST, params, made, run="first", program=program)
    assert "/mnt/runs/base" in node.run(files)[1].splitlines()
    (node.run_dir / "latest").symlink_to("epoch-1")
    (node.run_dir / "epoch-1").mkdir()
    assert "auto" in node.run(files)[1].splitlines()


# -- on each node ------------------------------------------------------------------------------------------------------

NODE_DRIVER = """
import os, socket, sys, time
sys.path.insert(0, sys.argv[1])
from ddp.node import node
def refuse(*_, **__): raise eval(os.environ['REFUSES'])
if 'REFUSES' in os.environ: socket.create_connection = refuse
slept = time.sleep
time.sleep = lambda s: os.write(1, f"slept {s:g}\\n".encode()) if s in (1, 3) else slept(s if "QUICK" not in os.environ else 0)
code = node.main(sys.argv[1] + "/job.json", sys.argv[2:])
os._exit(code)
"""


def run_node(
    settings: Settings, node: Node, agent: str, *, given: dict[str, typing.Any] | None = None, **more: str
) -> subprocess.Popen[str]:
    """Start a node's part with a double of the environment, whose interpreter runs `agent` in torchrun's place."""
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
    job = json.loads(files["program/job.json"]) | {"ranks_per_node": 2}
    if job["environment"]:
        job["environment"]["cache"] = str(node.cache)
    else:
        job["container"]["payload"] = "/mnt/payload"
    node.write(files | {"program/job.json": json.dumps(job)})
    slurm = {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": "1",
        "RUN_ATTEMPT_ID": "12.r0",
        "HEAD_IP": "127.0.0.1",
        "HEAD_PORT": "20100",
        "HEAD_NODE": "slurmd-0",
        "RUN_DIR": str(node.run_dir),
    }
    argv = [sys.executable, "-I", "-S", "-B", "-c", NODE_DRIVER, str(node.run_dir / "program"), "script.py", "--flag"]
    return subprocess.Popen(
        argv, env=node.env(**{**slurm, **more}), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_the_agent_gets_its_place(settings: Settings, node: Node):
    process = run_node(settings, node, 'printf "%s\n" "$OMP_NUM_THREADS $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME" "$@"')
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert output.splitlines() == [
        "[ENV] node=slurmd-0 address=127.0.0.1 fabric=auto gloo=lo nccl==lo",
        "2 lo =lo",
        "-P",
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--node-rank=1",
        "--rdzv-backend=static",
        "--master-addr=127.0.0.1",
        "--master-port=20100",
        "--rdzv-id=12.r0",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
        "--shutdown-timeout=120",
        f"--log-dir={node.cache}/jobs/12/logs/12.r0/node-1",
        "--redirects=3",
        "--tee=3",
        "script.py",
        "--flag",
    ]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("TimeoutError('timed out')", "cannot reach 127.0.0.1:20100 (slurmd-0): timed out"),
        ("OSError(113, 'No route to host')", "cannot reach 127.0.0.1:20100 (slurmd-0): No route to host"),
        ("ConnectionRefusedError(111, 'Connection refused')", None),
    ],
)
def test_a_head_that_cannot_be_reached_is_named_with_both_nodes_and_its_port(
    settings: Settings, node: Node, error: str, words: str | None
):
    """A head that refuses does not listen yet; one that does not respond is behind a firewall."""
    process = run_node(settings, node, "echo started", SLURMD_NODENAME="slurmd-1", REFUSES=error)
    output, _ = process.communicate(timeout=60)
    if words is None:
        assert (process.returncode, output.splitlines()[-1]) == (0, "started")
    else:
        how = "let TCP through between the nodes (firewall, security group)"
        assert (process.returncode, output.splitlines()[-1]) == (78, f"[FATAL] slurmd-1: {words}; {how}")
        assert output.splitlines()[:-1] == ["slept 1"] * 4


def test_the_users_interface_and_threads_win(settings: Settings, node: Node):
    agent = 'echo "$OMP_NUM_THREADS $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"'
    process = run_node(settings, node, agent, OMP_NUM_THREADS="7", GLOO_SOCKET_IFNAME="ib0", NCCL_SOCKET_IFNAME="eth")
    assert process.communicate(timeout=30)[0].endswith("gloo=ib0 nccl=eth\n7 ib0 eth\n")


def test_a_failed_agent_gives_the_others_time_and_keeps_its_code(settings: Settings, node: Node):
    process = run_node(settings, node, "exit 3")
    assert process.communicate(timeout=30)[0].endswith("\nslept 3\n")
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
    assert process.communicate(timeout=30)[0].endswith("\nsaved\n")
    assert process.returncode == 0


def test_a_task_that_another_one_took_down_does_not_wait_to_save(settings: Settings, node: Node):
    agent = "trap : TERM; touch $NOTES/started; for i in $(seq 400); do /bin/sleep 0.05; done; echo saved"
    process = run_node(settings, node, agent, QUICK="1")
    wait_for(node.notes / "started")
    (node.run_dir / "control" / "12.r0.failed").touch()
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == 137
    assert "saved" not in output


SLURM_RANK: dict[str, str] = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_CPUS_PER_TASK": "2",
}


BY_SRUN: dict[str, typing.Any] = {"launcher": "srun"}


def test_under_srun_a_rank_finds_what_torchrun_would_tell_it(settings: Settings, node: Node):
    agent = 'echo "$1 $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK $MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS"; echo oh >&2'
    process = run_node(settings, node, agent, given=BY_SRUN, **SLURM_RANK)
    output, _ = process.communicate(timeout=30)
    assert sorted(output.splitlines()) == ["oh", "script.py 3/4 1/2 1 127.0.0.1:20100 2"]
    logs = node.run_dir / "logs" / "12.r0" / "node-1" / "srun" / "attempt_0" / "1"
    assert (logs / "stdout.log").read_text() == "script.py 3/4 1/2 1 127.0.0.1:20100 2\n"
    assert (logs / "stderr.log").read_text() == "oh\n"


def test_under_srun_a_ranks_exit_code_is_kept(settings: Settings, node: Node):
    process = run_node(settings, node, "echo last words; exit 9", given=BY_SRUN, **SLURM_RANK)
    assert process.communicate(timeout=30)[0] == "last words\nslept 3\n"
    assert process.returncode == 9
    assert (node.run_dir / "control" / "12.r0.failed").exists()


def test_under_srun_each_rank_is_a_task_with_its_share_of_the_cores(settings: Settings, node: Node):
    request = resources.Request("main", 2, 2, 8, 8000, None, 180)
    script = texts(settings, request, launcher="srun")["job.sbatch"]
    assert {"ntasks-per-node=2", "cpus-per-task=4", "gpus-per-node=2"} <= set(directives(script))
    node.add("srun", 'printf "%s\\0" "$@" > "$NOTES/argv"; ' + ENDS % "done")
    assert node.run(texts(settings, request, launcher="srun"))[0] == 0
    argv = (node.notes / "argv").read_text().split("\0")[:-1]
    assert argv[:8] == [
        "--nodes=1",
        "--ntasks=2",
        "--ntasks-per-node=2",
        "--cpus-per-task=4",
        "--cpu-bind=cores",
        "--gpu-bind=none",
        "--kill-on-bad-exit=1",
        "--wait=300",
    ]


# -- fabrics, containers, profiles -------------------------------------------------------------------------------------


FABRIC_DRIVER = """
import json, os, sys
from ddp.node import network, spec
job, nodes = spec.load(spec.JobSpec, sys.argv[1]), int(sys.argv[2])
found = network.choose(job, nodes)
env = dict(os.environ)
try:
    network.use(found, job, env, nodes)
except network.NetworkError as e:
    sys.exit(f"[FATAL] gpu-0: {e}")
print(" ".join(found.name if name == "FABRIC" else env.get(name, "unset") for name in sys.argv[3:]))
"""


def fabric(settings: Settings, wanted: str, *show: str, nodes: int = 2, **env: str) -> tuple[int, list[str]]:
    """Make a fabric's variables ready as a node does; return the exit code and what was printed, those variables last."""
    given = " ".join(f"{name}={value}" for name, value in env.items())
    path = write(settings, texts(settings, fabric=wanted, env=given))
    run = subprocess.run(
        [sys.executable, "-c", FABRIC_DRIVER, path, str(nodes), *show],
        text=True,
        capture_output=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(pathlib.Path(network.__file__).parents[2]), **env},
    )
    return run.returncode, (run.stderr + run.stdout).splitlines()


@pytest.mark.parametrize("wanted", fabrics.NAMES)
def test_every_fabric_says_which_it_is_or_what_is_missing(settings: Settings, wanted: str):
    code, printed = fabric(settings, wanted, "FABRIC")
    if code == 1:
        assert printed[0].startswith(f"[FATAL] gpu-0: fabric={wanted} needs /")
        assert "; " in printed[0], "and what to do about it"
    else:
        assert (code, printed) == (0, [wanted])


def test_one_node_needs_no_fabric(settings: Settings):
    assert fabric(settings, "efa", "FI_PROVIDER", nodes=1) == (0, ["unset"])


def test_a_fabrics_variables_are_set_and_the_users_go_before(settings: Settings):
    show = "NCCL_IB_DISABLE"
    assert fabric(settings, "tcp", show) == (0, ["1"])
    assert fabric(settings, "tcp", show, NCCL_IB_DISABLE="0") == (0, ["0"])


def with_paths(monkeypatch: pytest.MonkeyPatch, top: pathlib.Path, name: str) -> spec.Fabric:
    """Let a fabric's paths be below a folder of the test's."""

    def moved(text: str) -> str:
        return f"{top}{text}" if text.startswith("/") else text

    found = next(fabric for fabric in fabrics.FABRICS if fabric.name == name)
    there = dataclasses.replace(
        found,
        found_by=tuple(map(moved, found.found_by)),
        needs=tuple(map(moved, found.needs)),
        profile=moved(found.profile),
        library_path=moved(found.library_path),
        mounts=tuple(map(moved, found.mounts)),
    )
    others = (fabric for fabric in fabrics.FABRICS if fabric.name != name)
    monkeypatch.setattr(fabrics, "FABRICS", (there, *others))
    for path in (*there.found_by, *there.needs):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(path).touch()
    return there


def test_tcpxo_is_found_sourced_and_tamed(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    found = with_paths(monkeypatch, tmp_path, "tcpxo")
    pathlib.Path(found.profile).write_text(
        "export NCCL_PROTO=Simple NCCL_BUFFSIZE=8388608 NCCL_SOCKET_IFNAME=x CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\n"
        'echo "lib $NCCL_LIB_DIR"; [ "$UNSET_IN_THE_PROFILE" = x ]\n'
    )
    show = "FABRIC NCCL_PROTO NCCL_BUFFSIZE NCCL_SOCKET_IFNAME NCCL_FASTRAK_CTRL_DEV CUDA_VISIBLE_DEVICES".split()
    lib = f"lib {found.library_path}"
    assert fabric(settings, "auto", *show) == (0, [lib, "tcpxo Simple 8388608 enp0s12 enp0s12 unset"])
    code, printed = fabric(
        settings, "tcpxo", *show, NCCL_BUFFSIZE="1", NCCL_SOCKET_IFNAME="eth9", CUDA_VISIBLE_DEVICES="3"
    )
    assert (code, printed) == (0, [lib, "tcpxo Simple 1 eth9 enp0s12 3"]), "the user's, and what Slurm gave the job"


def test_roots_part_of_tcpxo_is_a_prolog_and_an_epilog():
    roots = fabrics.root_scripts("tcpxo")
    assert set(roots) == {"prolog", "epilog"}
    for text in roots.values():
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert not fabrics.root_scripts("efa")


def test_the_interface_is_tailscales_own(settings: Settings, node: Node):
    code, output = node.run(texts(settings, fabric="tailscale"))
    assert code == 78
    assert "[FATAL] slurmd-0: fabric=tailscale needs the interface tailscale0 with an address" in output


CONTAINED: dict[str, typing.Any] = {"container_image": "nvcr.io#nvidia/pytorch:25.01-py3"}
SAVES_ARGV = 'if [ "$1" = --help ]; then echo "$HELP"; exit; fi; printf "%s\\0" "$@" > "$NOTES/argv"; ' + ENDS % "done"


def test_a_container_runs_under_pyxis_where_slurm_has_it(settings: Settings, node: Node):
    node.add("srun", SAVES_ARGV)
    files = texts(settings, **CONTAINED, env="NCCL_DEBUG=INFO")
    code, output = node.run(files, HELP="  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
    assert code == 0, output
    argv = (node.notes / "argv").read_text().split("\0")
    workspace = settings.workspace
    assert "--container-image=nvcr.io#nvidia/pytorch:25.01-py3" in argv
    assert f"--container-mounts={workspace}:{workspace}" in argv
    assert f"--container-workdir={node.run_dir}" in argv
    assert "--container-env=PYTHONUNBUFFERED,CUDA_VISIBLE_DEVICES,NCCL_DEBUG" in argv
    assert argv.index("sh") > argv.index(f"--container-workdir={node.run_dir}")


def test_a_container_runs_under_apptainer_where_there_is_no_pyxis(settings: Settings, node: Node):
    node.add("srun", SAVES_ARGV)
    node.add("apptainer", "exit 99")
    assert node.run(texts(settings, **CONTAINED), HELP="no such option")[0] == 0
    argv = (node.notes / "argv").read_text().split("\0")
    at = argv.index(f"{node.bin}/apptainer")
    workspace = settings.workspace
    assert argv[at + 1 : at + 7] == ["exec", "--nv", "--bind", f"{workspace}:{workspace}", "--pwd", str(node.run_dir)]
    assert argv[at + 7 : at + 9] == ["docker://nvcr.io/nvidia/pytorch:25.01-py3", "sh"]


def test_without_pyxis_and_apptainer_the_job_says_so(settings: Settings, node: Node):
    node.add("srun", SAVES_ARGV)
    code, output = node.run(texts(settings, **CONTAINED), HELP="")
    assert code == 78
    assert "[FATAL] slurmd-0: container-image needs pyxis in Slurm, or apptainer on the nodes" in output


def test_in_a_container_the_images_python_runs_the_payload(settings: Settings, node: Node):
    node.add("python3", 'echo "$PYTHONPATH $2"')
    given = {"container_image": "x:1"}
    process = run_node(settings, node, "exit 99", given=given, PYTHONPATH="/opt")
    assert process.communicate(timeout=30)[0].splitlines()[-1] == "/mnt/payload:/opt torch.distributed.run"


def nsys(ranks: str) -> dict[str, typing.Any]:
    return {**BY_SRUN, "profile": "nsys", "profile_ranks": ranks}


def test_nsight_records_the_chosen_ranks(settings: Settings, node: Node):
    node.add("nsys", 'echo "nsys $*"')
    given = nsys("0,3")
    printed = run_node(settings, node, 'echo "bare $1"', given=given, **SLURM_RANK).communicate(timeout=30)[0]
    assert printed.startswith(f"nsys profile --output={node.run_dir}/profile/12.r0.rank-3 ")
    assert printed.rstrip().endswith(f"{node.cache}/{'ab' * 8}/bin/python script.py --flag")
    more = {**SLURM_RANK, "SLURM_PROCID": "2"}
    printed = run_node(settings, node, 'echo "bare $1"', given=given, **more).communicate(timeout=30)[0]
    assert printed == "bare script.py\n"


def test_a_node_without_nsight_says_so(settings: Settings, node: Node):
    process = run_node(settings, node, "exit 99", given=nsys("3"), **SLURM_RANK)
    assert "[FATAL] slurmd-0: profile=nsys needs Nsight Systems" in process.communicate(timeout=30)[0]
    assert process.returncode == 78

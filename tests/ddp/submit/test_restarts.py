"""Failures of a job and its retries, with doubles of Slurm's commands around the real program."""

import dataclasses
import json
import signal
import time
import typing

import pytest
from script_texts import ENDS, REQUEST, WAITS, stop, texts, wait_for

from batch_host import Node
from ddp.settings import Settings

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
    assert (
        output.splitlines()[-1]
        == "[FAILED] attempt=12.r0 fault=program node=slurmd-0: ValueError: boom"
    )


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
    ports = {
        line.split("head=")[1].split()[0]
        for line in output.splitlines()
        if line.startswith("[ENV] job=")
    }
    assert len(ports) == 3, "an attempt never meets what is left of the one before"


def test_it_is_started_again_only_so_often_over_all_starts_of_the_job(
    settings: Settings, node: Node
):
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
    assert (
        json.loads((node.run_dir / "control" / "12.r0.outcome").read_text())["outcome"]
        == "cancelled"
    )


def test_a_mistake_of_the_users_is_not_tried_again(settings: Settings, node: Node):
    outcome = '{\\"outcome\\": \\"failed\\", \\"error\\": \\"--batch 0: at least 1\\", \\"retry\\": false}'
    node.add(
        "srun", COUNTS + f'echo "{outcome}" > "$RUN_DIR/control/$RUN_ATTEMPT_ID.outcome"; exit 2'
    )
    assert node.run(texts(settings, max_restarts=5))[0] == 2
    assert attempts(node) == ["12.r0"]
    assert failures(node) == [["12.r0", "parameters", "-", "--batch 0: at least 1"]]


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


def test_nodes_that_the_user_or_an_earlier_start_excluded_stay_left_out(
    settings: Settings, node: Node
):
    """ExcNodeList replaces the list that the job was submitted with."""
    node.add("srun", COUNTS + FAILS)
    node.add("sinfo", "printf '%s\\n' slurmd-0 other third")
    request = dataclasses.replace(REQUEST, num_nodes=1, exclude=("third", "fourth"))
    files = texts(settings, request, max_restarts=5, exclude="third,fourth")
    (node.run_dir / "control").mkdir(parents=True)
    (node.run_dir / "control" / "12.excluded").write_text("fifth\n")
    assert node.run(files, FAULTY="slurmd-0")[0] == 75
    assert (node.notes / "scontrol").read_text().splitlines()[
        -1
    ] == "update JobId=12 ExcNodeList=fifth,fourth,slurmd-0,third"


@pytest.mark.parametrize(
    ("usable", "option", "name"),
    [
        pytest.param(
            "slurmd-0 third", "exclude", "third", id="what the user excluded is not a spare node"
        ),
        pytest.param(
            "slurmd-0 other third",
            "nodelist",
            "slurmd-0",
            id="a named node must be among the job's",
        ),
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
def test_only_a_node_of_its_reservation_may_stand_in(
    settings: Settings, node: Node, reserved: str, requeues: bool
):
    node.add("srun", COUNTS + FAILS)
    node.add("sinfo", "printf '%s\\n' slurmd-0 other third")
    shown = (
        f"ReservationName=team StartTime=2026-11-22T10:00:00 Nodes={reserved} NodeCnt=2 Flags=MAINT"
    )
    node.add(
        "scontrol",
        f'case "$*" in *"show reservation team") echo "{shown}" ;; "show hostnames {reserved}") echo {reserved} | tr , "\\n" ;;'
        ' *"show job 12") echo "JobId=12 JobState=RUNNING Restarts=0" ;;'
        f' show*) echo slurmd-0 ;; *) echo "$*" >> {node.notes}/scontrol ;; esac',
    )
    node.run(texts(settings, max_restarts=1, reservation="team"), FAULTY="slurmd-0")
    assert node.requeued() == requeues


def test_the_last_node_is_not_left_out(settings: Settings, node: Node):
    node.add("srun", COUNTS + FAILS)
    node.add("sinfo", "echo slurmd-0")
    code, output = node.run(texts(settings, max_restarts=1), FAULTY="slurmd-0")
    assert code == 78
    assert not node.requeued()
    assert attempts(node) == ["12.r0", "12.r0t1"]
    assert "[RESTART] slurmd-0 is suspect, but partition main has no other node for it" in output


def test_a_complaint_of_every_node_blames_none(settings: Settings, node: Node):
    node.hosts, node.addresses = (
        "slurmd-0 slurmd-1",
        {"slurmd-0": "192.0.2.1", "slurmd-1": "192.0.2.2"},
    )
    node.add(
        "srun",
        COUNTS + 'for h in $HOSTS; do echo "0: [FATAL] $h: the archive is damaged"; done; exit 78',
    )
    assert node.run(texts(settings, max_restarts=3), SLURM_JOB_NUM_NODES="2")[0] == 78
    assert failures(node)[0][1:3] == ["parameters", "-"]


def test_no_restart_after_a_cancellation(settings: Settings, node: Node):
    node.add("srun", COUNTS + WAITS + BOOM)
    assert stop(node, texts(settings, max_restarts=9), signal.SIGTERM)[0] == 1
    assert attempts(node) == ["12.r0"]
    assert not node.requeued()


def test_a_cancellation_while_a_warned_job_saves_wins(settings: Settings, node: Node):
    node.add(
        "srun",
        'touch "$NOTES/started"; for i in $(seq 1800); do [ -e "$NOTES/go" ] && break; /bin/sleep 0.05; done; '
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


def test_a_controller_that_is_away_is_asked_again_and_the_job_is_queued_once(
    settings: Settings, node: Node
):
    node.add("srun", WAITS + ENDS % "preempted")
    node.add(
        "scontrol",
        'case "$*" in *"show job 12") echo x >> "$NOTES/asked"; [ $(wc -l < "$NOTES/asked") -gt 3 ] || exit 1; '
        'echo "JobId=12 JobState=RUNNING Restarts=0" ;; show*) echo slurmd-0 ;; *) echo "$*" >> "$NOTES/scontrol" ;; esac',
    )
    code, output = stop(node, texts(settings), signal.SIGUSR1)
    assert code == 75
    assert (node.notes / "scontrol").read_text() == "requeue 12\n"
    assert output.count("[REQUEUE] Slurm does not respond") == 3


def test_a_requeue_whose_answer_was_lost_is_not_asked_for_twice(settings: Settings, node: Node):
    node.add("srun", WAITS + ENDS % "preempted")
    node.add(
        "scontrol",
        'case "$*" in *"show job 12") queued=0; [ -e "$NOTES/queued" ] && queued=1; '
        'echo "JobId=12 JobState=PENDING Restarts=$queued" | sed "s/PENDING Restarts=0/RUNNING Restarts=0/" ;; '
        'show*) echo slurmd-0 ;; *) echo "$*" >> "$NOTES/scontrol"; touch "$NOTES/queued"; exit 1 ;; esac',
    )
    code, output = stop(node, texts(settings), signal.SIGUSR1)
    assert code == 75
    assert (node.notes / "scontrol").read_text() == "requeue 12\n"
    assert output.count("job 12 is queued again") == 1


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (
            "echo 'Requested operation is presently disabled' >&2; exit 1",
            "scontrol: Requested operation is presently disabled",
        ),
        ("kill -TERM $$", "scontrol was ended by signal 15"),
        ("exit 1", "Slurm does not respond"),
    ],
)
def test_a_requeue_that_failed_says_why_and_is_tried_again(
    settings: Settings, node: Node, fails: str, why: str
):
    node.add("srun", WAITS + ENDS % "preempted")
    node.add(
        "scontrol",
        'case "$*" in *"show job 12") echo "JobId=12 JobState=RUNNING Restarts=0" ;; show*) echo slurmd-0 ;; '
        f'*) echo "$*" >> "$NOTES/scontrol"; [ $(wc -l < "$NOTES/scontrol") -gt 1 ] || {{ {fails}; }} ;; esac',
    )
    code, output = stop(node, texts(settings), signal.SIGUSR1)
    assert code == 75
    assert f"[REQUEUE] {why}; trying again in 1 s\n" in output
    assert output.count("job 12 is queued again") == 1

"""The first failure of a job, found in the ranks' logs and in the job's own."""

import json
import os
import pathlib

import pytest

from ddp.node import explain

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    boom()\n{}\n'
RANKED = "".join(f"[rank1]: {line}\n" for line in TRACE.splitlines())
CUT = TRACE.format("RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1234")
BOOM = TRACE.format("ValueError: boom")
LIVED_ON = TRACE.format("ValueError: sample 7 is skipped")
CRASH = """Fatal Python error: Segmentation fault

Thread 0x00001 (most recent call first):
  File "/lib/threading.py", line 320 in wait

Current thread 0x00002 (most recent call first):
  File "/s/x.py", line 4 in inner
  File "/s/x.py", line 9 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""
WATCHDOG = """[rank{0}]:[E1122 21:03:11.184 ProcessGroupNCCL.cpp:683] [Rank {0}] Watchdog caught collective operation timeout
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4) ran for 60011 milliseconds.
Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f83f296c1b6 in libc10.so)

Fatal Python error: Aborted

Thread 0x00007f2 (most recent call first):
  <no Python frame>
"""
WATCHED = "what():  [PG ID 0 Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4) ran for"
KILLED = "killed by signal 9 (SIGKILL)"
NO_MEMORY = "killed: it took more memory than the job has; submit it with a larger memory"
EARLY = "1: E1123 03:40:34.271000 23 torch/distributed/elastic/agent/server/api.py:1008] Error waiting on exit barrier."
OOM = "1: slurmstepd-slurmd-1: error: Detected 1 oom_kill event in StepId=12.0. Some of the tasks have been OOM Killed."
BEGIN = "[ENV] job=12 attempt=12.r0 nodes=n0 n1"


def agent(node: int, code: int, local: int) -> str:
    where = "torch/distributed/elastic/multiprocessing/api.py:1002]"
    return f"{node}: E1120 20:23:35.969000 26319 {where} failed (exitcode: {code}) local_rank: {local} (pid: 2)"


def exits(task: int, code: int) -> str:
    return f"srun: error: n{task}: task {task}: Exited with exit code {code}"


def make_run(folder: pathlib.Path, logs: dict[int, str], merged: list[str]) -> pathlib.Path:
    """Make a run of two ranks on each node; its ranks' logs are written one second after the other."""
    (folder / "control").mkdir(exist_ok=True)
    (folder / "job.json").write_text(json.dumps({"job_id": 12, "ranks_per_node": 2}))
    for when, (rank, text) in enumerate(logs.items(), 1_800_000_000):
        path = folder / "logs" / "12.r0" / f"node-{rank // 2}" / "x" / "attempt_0" / str(rank % 2) / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        os.utime(path, (when, when))
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "12.out").write_text("\n".join(merged))
    return folder


@pytest.mark.parametrize(
    ("logs", "rank", "last"),
    [
        pytest.param({0: CUT, 3: BOOM}, 3, "ValueError: boom", id="a reason of its own goes before a lost peer"),
        pytest.param({2: BOOM, 0: TRACE.format("ValueError: late")}, 2, "ValueError: boom", id="the first of equals"),
        pytest.param(
            {2: "rank 2 leaves: rank 0 gave up\n", 0: "INFO x\nERROR:ddptrain:[FATAL] --batch 0: must be at least 1\n"},
            0,
            "ERROR:ddptrain:[FATAL] --batch 0: must be at least 1",
            id="an error for the user, and ranks that follow",
        ),
        pytest.param(
            {1: TRACE.format("[rank1]: KeyError: 'x'") + "W1120 something about a destructor\n"},
            1,
            "[rank1]: KeyError: 'x'",
            id="what came after the reason",
        ),
        pytest.param(
            {0: "fine\n", 1: "Segmentation fault (core dumped)\n"}, 1, "Segmentation fault (core dumped)", id="no trace"
        ),
        pytest.param(
            {1: RANKED.format("__main__.Diverged: loss is nan") + "[rank1]:[W1120 x.cpp:9] Warning: not destroyed\n"},
            1,
            "[rank1]: __main__.Diverged: loss is nan",
            id="an exception whose name need not end in Error",
        ),
        pytest.param(
            {
                2: RANKED.format("RuntimeError: Error(s) in loading state_dict for GPT:")
                + '[rank1]: \tMissing key(s): "a".\n[rank1]: \n[rank1]: \tsize mismatch for b.\n[rank1]: end\n'
            },
            2,
            '[rank1]: RuntimeError: Error(s) in loading state_dict for GPT: Missing key(s): "a". size mismatch for b.',
            id="a message of several lines",
        ),
        pytest.param(
            {
                0: "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: two\n"
                "  +-+--- 1 ---\n    | KeyError: 'b'\n    +---\n"
            },
            0,
            "    | KeyError: 'b'",
            id="several exceptions at once",
        ),
        pytest.param(
            {1: TRACE.format("ValueError: caught") + CRASH},
            1,
            'Fatal Python error: Segmentation fault, File "/s/x.py", line 4 in inner',
            id="where it crashed",
        ),
    ],
)
def test_the_rank_that_failed_first_is_found(tmp_path: pathlib.Path, logs: dict[int, str], rank: int, last: str):
    found = explain.first_failure(make_run(tmp_path, logs, []), 12, 5)
    assert (found.rank, found.node, found.lines[-1]) == (rank, rank // 2, last)
    assert len(found.lines) <= 5


@pytest.mark.parametrize(
    ("logs", "merged", "rank", "last"),
    [
        pytest.param({0: CUT}, [agent(0, -15, 1), agent(1, -9, 1), agent(0, 1, 0)], 3, KILLED, id="killed"),
        pytest.param({0: CUT}, [agent(0, -11, 1)], 1, "killed by signal 11 (SIGSEGV)", id="crashed"),
        pytest.param({0: CUT}, [agent(1, -9, 1), agent(0, 1, 0), OOM], 3, NO_MEMORY, id="out of memory"),
        pytest.param({0: CUT}, [agent(0, -9, 1), OOM], 1, KILLED, id="another node ran out of memory"),
        pytest.param(
            {0: CUT}, [agent(1, -9, 1), "srun: error: n1: task 1: Out Of Memory"], 3, NO_MEMORY, id="srun's line alone"
        ),
        pytest.param(
            dict.fromkeys(range(4), f"{LIVED_ON}step 8\n"),
            [agent(0, -15, 1), agent(1, -9, 1)],
            3,
            KILLED,
            id="an exception that a rank lived on with",
        ),
        pytest.param(
            {0: LIVED_ON, 3: CRASH},
            [agent(1, -11, 1)],
            3,
            'Fatal Python error: Segmentation fault, File "/s/x.py", line 4 in inner',
            id="a crash says more than its signal",
        ),
        pytest.param(
            {2: LIVED_ON, 0: LIVED_ON},
            [agent(0, -9, 1), agent(1, 1, 0)],
            2,
            "ValueError: sample 7 is skipped",
            id="who left with it did not live on",
        ),
        pytest.param(
            {0: CUT}, [agent(0, 1, 0), exits(1, 137), exits(0, 143)], 2, f"its torchrun was {KILLED}", id="agent"
        ),
        pytest.param(
            {0: CUT},
            [agent(0, 1, 0), exits(0, 1), exits(1, 137)],
            0,
            CUT.splitlines()[-1],
            id="an agent that did not end in time",
        ),
        pytest.param(
            {0: CUT, 3: "loading\nno such column: text\n"},
            [agent(0, 1, 0), agent(1, 1, 1), agent(0, -15, 1)],
            3,
            "no such column: text",
            id="sys.exit with a text",
        ),
        pytest.param(
            {0: CUT},
            [BEGIN, agent(0, -9, 1), BEGIN, agent(1, 3, 0)],
            2,
            "exited with code 3 and no error output",
            id="no output; what ended an attempt before is over",
        ),
        pytest.param(
            {0: CUT, 1: CUT},
            [agent(0, 1, 0), EARLY],
            2,
            "exited with code 0 while others went on; do all ranks get the same number of batches?",
            id="left well before the others",
        ),
        pytest.param(
            {0: BOOM}, [agent(0, 1, 0), EARLY], 0, "ValueError: boom", id="a failure goes before who left well"
        ),
        pytest.param(
            {0: CUT, 2: "no more data\n"},
            [
                agent(0, -9, 0),
                BEGIN,
                *["0: [rank0]: working"] * 50_000,
                agent(1, 1, 0),
                *["0: [rank0]: working"] * 50_000,
                agent(0, 1, 0),
            ],
            2,
            "no more data",
            id="much output of the others",
        ),
        pytest.param(
            {2: WATCHDOG.format(2), 0: WATCHDOG.format(0)},
            [agent(0, -6, 0), agent(1, -6, 0)],
            2,
            f"  {WATCHED} 60011 milliseconds.",
            id="NCCL's watchdog printed why it ended the ranks",
        ),
        pytest.param(
            {2: WATCHDOG.format(2)},
            [agent(0, -6, 0), agent(1, -9, 1)],
            3,
            KILLED,
            id="one was killed, so others waited",
        ),
        pytest.param({}, [agent(1, -6, 0)], 2, "killed by signal 6 (SIGABRT)", id="an abort that says nothing"),
    ],
)
def test_how_ranks_ended_is_taken_into_account(
    tmp_path: pathlib.Path, logs: dict[int, str], merged: list[str], rank: int, last: str
):
    found = explain.first_failure(make_run(tmp_path, logs, merged), 12, 5)
    assert (found.rank, found.node, found.lines[-1]) == (rank, rank // 2, last)


def test_a_message_longer_than_what_is_read_of_a_log_is_reported(tmp_path: pathlib.Path):
    long = TRACE.format(f"ValueError: {'x' * 100_000}") + "[W1120 x.cpp:9] Warning: not destroyed\n"
    found = explain.first_failure(make_run(tmp_path, {0: CUT, 2: long}, [agent(0, 1, 0), agent(1, 1, 0)]), 12, 5)
    assert found.rank == 2
    assert found.lines[-1].startswith("ValueError: xxxx")


def test_of_a_line_without_end_its_last_part_is_read(tmp_path: pathlib.Path):
    path = tmp_path / "log"
    path.write_text(f"begin\n{'x' * 2 * explain.MAX_JSON_BYTES}")
    (line,) = explain.tail(path, 1000)
    assert len(line) == explain.MAX_JSON_BYTES


def test_what_a_rank_writes_as_it_leaves_comes_last(tmp_path: pathlib.Path):
    folder = make_run(tmp_path, {2: "no more data\n"}, [agent(1, 1, 0)])
    (log,) = folder.glob("logs/12.r0/node-1/*/attempt_0/0/*.log")
    log.with_name("stdout.log").write_text("step 7\n")
    assert explain.first_failure(folder, 12, 5).lines == ["step 7", "no more data"]


@pytest.mark.parametrize(
    ("merged", "lines"),
    [
        ([], []),
        (
            ["0: [FATAL] slurmd-0: /mnt/x is damaged", exits(0, 78), "[RESULT] rc=78"],
            ["[FATAL] slurmd-0: /mnt/x is damaged"],
        ),
        *(
            (["1: sh: 1: nope: not found", exits(1, 127), f"0: {message}"], ["sh: 1: nope: not found"])
            for message in (
                "slurmstepd: error: *** STEP 20.0 ON n0 CANCELLED AT 2026-11-22T19:48:01 ***",  # 24.11
                "slurmstepd-n0: error: *** STEP 20.0 ON n0 CANCELLED AT 2026-11-22T19:48:01 ***",
                "[2026-11-22T19:46:28.227] error: *** STEP 44.0 ON n0 CANCELLED AT 2026-11-22T19:46:28 ***",  # 26.05
            )
        ),
    ],
)
def test_a_failure_before_any_rank_is_found_in_the_jobs_log(
    tmp_path: pathlib.Path, merged: list[str], lines: list[str]
):
    found = explain.first_failure(make_run(tmp_path, {}, ["[ENV] job=12", *merged] if merged else []), 12, 5)
    assert (found.rank, found.node, found.lines) == (None, None, lines)


def came(*hosts: str) -> list[str]:
    return [
        f"{BEGIN} n2",
        *(f"{at}: [ENV] node={host} address=10.0.0.{at} fabric=tcp" for at, host in enumerate(hosts)),
    ]


VAIN = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 2/3 clients joined."


@pytest.mark.parametrize(
    ("message", "merged", "ranks", "nodes"),
    [
        (
            "[FATAL] 3 of 6 ranks never joined within 120 s: 2, 3, 5; look at their logs",
            came(),
            [2, 3, 5],
            ["n1", "n2"],
        ),
        ("[FATAL] rank 0 published no address in /x within 120 s; is --run-dir shared?", came(), [0], ["n0"]),
        (VAIN, came("n0", "n2"), [2, 3], ["n1"]),
        (VAIN, came("n0", "n1", "n2"), [], []),
        (VAIN, came("n0", "n2") + came("n0", "n1", "n2"), [], []),  # they were absent in an earlier attempt
        (VAIN, came(), [], []),  # nobody came so far, so nobody is to blame
        ("ValueError: boom", came("n0", "n2"), [], []),  # it failed of something else
    ],
)
def test_ranks_that_never_came_are_named_with_their_nodes(
    tmp_path: pathlib.Path, message: str, merged: list[str], ranks: list[int], nodes: list[str]
):
    hosts = ["n0", "n1", "n2"]
    folder = make_run(tmp_path, {0: TRACE.format(message)}, [*merged, f"0: {message}"])
    assert explain.absentees(folder, 12, explain.first_failure(folder, 12, 5).lines, hosts) == (ranks, nodes)
    kind, node, words = explain.blame(str(folder), "12", "12.r0", hosts)
    if len(nodes) == 1:
        answer = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} never joined the rendezvous"
        assert (kind, node, words) == ("node", nodes[0], answer), "the next attempt is made without it"
    else:
        assert kind == "program"

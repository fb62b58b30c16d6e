"""The first failure of a job, found in the ranks' logs and in the job's own."""

import json
import os
import pathlib
import shutil
import typing

import pytest

from ddp.base import Settings
from ddp.node import explain


def make_run(settings: Settings, run: str = "first", **job: object) -> pathlib.Path:
    folder = settings.runs / run
    for name in ("logs", "control"):
        (folder / name).mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"job_id": 12, "ranks_per_node": 2, **job}))
    return folder


def rank_log(
    folder: pathlib.Path, node: int, local: int, text: str, *, age_s: float = 0, attempt: str = "12.r0"
) -> None:
    path = folder / "logs" / attempt / f"node-{node}" / f"{attempt}_x" / "attempt_0" / str(local) / "stderr.log"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    when = 1_800_000_000 - age_s
    os.utime(path, (when, when))


TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    boom()\n{}\n'


RANKED = "".join(f"[rank1]: {line}\n" for line in TRACE.splitlines())


CRASH = """Fatal Python error: Segmentation fault

Thread 0x00001 (most recent call first):
  File "/lib/threading.py", line 320 in wait

Current thread 0x00002 (most recent call first):
  File "/s/x.py", line 4 in inner
  File "/s/x.py", line 9 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


@pytest.mark.parametrize(
    ("logs", "rank", "last"),
    [
        # the rank with a reason of its own, though another stopped responding before it
        (
            [
                (0, 0, TRACE.format("RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1234"), 5),
                (1, 1, TRACE.format("ValueError: boom"), 1),
            ],
            3,
            "ValueError: boom",
        ),
        # among equals the first
        (
            [(0, 0, TRACE.format("ValueError: late"), 1), (1, 0, TRACE.format("ValueError: early"), 9)],
            2,
            "ValueError: early",
        ),
        # an error for the user, and ranks that only follow
        (
            [
                (0, 0, "INFO x\nERROR:ddptrain:[FATAL] --batch 0: must be at least 1\n", 1),
                (1, 0, "rank 2 leaves: rank 0 gave up\n", 9),
            ],
            0,
            "ERROR:ddptrain:[FATAL] --batch 0: must be at least 1",
        ),
        # what came after the reason is not the reason
        (
            [(0, 1, TRACE.format("[rank1]: KeyError: 'x'") + "W1120 something about a destructor\n", 1)],
            1,
            "[rank1]: KeyError: 'x'",
        ),
        ([(0, 0, "fine\n", 1), (0, 1, "Segmentation fault (core dumped)\n", 1)], 1, "Segmentation fault (core dumped)"),
        # an exception of the script's own, whose name need not end in Error
        (
            [
                (
                    0,
                    1,
                    RANKED.format("__main__.Diverged: loss is nan")
                    + "[rank1]:[W1120 x.cpp:9] Warning: not destroyed\n",
                    1,
                )
            ],
            1,
            "[rank1]: __main__.Diverged: loss is nan",
        ),
        # a message of several lines
        (
            [
                (
                    1,
                    0,
                    RANKED.format("RuntimeError: Error(s) in loading state_dict for GPT:")
                    + '[rank1]: \tMissing key(s): "a".\n[rank1]: \n[rank1]: \tsize mismatch for b.\n[rank1]: end\n',
                    1,
                )
            ],
            2,
            '[rank1]: RuntimeError: Error(s) in loading state_dict for GPT: Missing key(s): "a". size mismatch for b.',
        ),
        # several exceptions at once
        (
            [
                (
                    0,
                    0,
                    "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: two\n  +-+--- 1 ---\n    | KeyError: 'b'\n    +---\n",
                    1,
                )
            ],
            0,
            "    | KeyError: 'b'",
        ),
        # where it crashed
        (
            [(0, 1, TRACE.format("ValueError: caught") + CRASH, 1)],
            1,
            'Fatal Python error: Segmentation fault, File "/s/x.py", line 4 in inner',
        ),
    ],
)
def test_the_rank_that_failed_first_is_found(
    settings: Settings, logs: list[tuple[int, int, str, float]], rank: int, last: str
):
    folder = make_run(settings)
    for node, local, text, age_s in logs:
        rank_log(folder, node, local, text, age_s=age_s)
    found = explain.first_failure(settings.runs / "first", 12, 5)
    assert (found.rank, found.node, found.lines[-1]) == (rank, rank // 2, last)
    assert len(found.lines) <= 5


AGENT = "{}: E1120 20:23:35.969000 26319 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {}) local_rank: {} (pid: 2)"


def failure(settings: Settings) -> dict[str, object]:
    found = explain.first_failure(settings.runs / "first", 12, 5)
    return {"rank": found.rank, "node": found.node, "lines": found.lines}


def test_a_rank_that_was_killed_is_found_though_it_could_say_nothing(settings: Settings):
    folder = make_run(settings)
    rank_log(folder, 0, 0, TRACE.format("RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1234"))
    lines = [AGENT.format(0, -15, 1), AGENT.format(1, -9, 1), AGENT.format(0, 1, 0)]
    (folder / "logs" / "12.out").write_text("\n".join(lines))
    found = failure(settings)
    assert found == {
        "rank": 3,
        "node": 1,
        "lines": ["killed by signal 9 (SIGKILL)"],
    }
    (folder / "logs" / "12.out").write_text(AGENT.format(0, -11, 1))
    found = failure(settings)
    assert found == {"rank": 1, "node": 0, "lines": ["killed by signal 11 (SIGSEGV)"]}


OOM = """\
srun: error: slurmd-0: task 0: Exited with exit code 1
srun: Terminating StepId=12.0
1: Terminated
1: slurmstepd-slurmd-1: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.
srun: error: slurmd-1: task 1: Out Of Memory
[RESULT] rc=1 outcome=none
"""


@pytest.mark.parametrize("cut", [0, 4], ids=["all", "srun's line alone"])
def test_a_rank_that_took_more_memory_than_the_job_has_gets_that_reason(settings: Settings, cut: int):
    folder = make_run(settings)
    rank_log(folder, 0, 0, TRACE.format("RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1234"))
    agents = [AGENT.format(1, -9, 1), AGENT.format(0, 1, 0)]
    (folder / "logs" / "12.out").write_text("\n".join([*agents, *OOM.splitlines()[cut:]]))
    words = "killed: it took more memory than the job has; submit it with a larger memory"
    assert failure(settings) == {"rank": 3, "node": 1, "lines": [words]}
    (folder / "logs" / "12.out").write_text("\n".join([AGENT.format(0, -9, 1), *OOM.splitlines()[cut:]]))
    assert "SIGKILL" in str(failure(settings)["lines"]), "another node's"


def test_an_exception_that_a_rank_lived_on_with_is_not_the_reason(settings: Settings):
    folder = make_run(settings)
    for node, local in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        rank_log(folder, node, local, TRACE.format("ValueError: sample 7 is skipped") + "step 8\n")
    (folder / "logs" / "12.out").write_text("\n".join([AGENT.format(0, -15, 1), AGENT.format(1, -9, 1)]))
    killed = "killed by signal 9 (SIGKILL)"
    assert failure(settings) == {"rank": 3, "node": 1, "lines": [killed]}
    shutil.rmtree(folder / "logs" / "12.r0" / "node-1")
    rank_log(folder, 1, 0, TRACE.format("ValueError: sample 7 is skipped"))
    rank_log(folder, 1, 1, CRASH)
    (folder / "logs" / "12.out").write_text(AGENT.format(1, -11, 1))
    frames = ['  File "/s/x.py", line 9 in <module>', '  File "/s/x.py", line 4 in inner']
    crash = 'Fatal Python error: Segmentation fault, File "/s/x.py", line 4 in inner'
    assert failure(settings) == {"rank": 3, "node": 1, "lines": [*frames, crash]}
    # who left with it did not live on
    (folder / "logs" / "12.out").write_text("\n".join([AGENT.format(0, -9, 1), AGENT.format(1, 1, 0)]))
    found = failure(settings)
    assert found["lines"] == [*TRACE.splitlines()[:-1], "ValueError: sample 7 is skipped"]


def test_a_message_longer_than_what_is_read_of_a_log_is_reported(settings: Settings):
    folder = make_run(settings)
    rank_log(folder, 0, 0, CUT)
    rank_log(folder, 1, 0, TRACE.format(f"ValueError: {'x' * 100_000}") + "[W1120 x.cpp:9] Warning: not destroyed\n")
    (folder / "logs" / "12.out").write_text("\n".join([AGENT.format(0, 1, 0), AGENT.format(1, 1, 0)]))
    found = failure(settings)
    assert found["rank"] == 2
    assert str(typing.cast("list[str]", found["lines"])[-1]).startswith("ValueError: xxxx")


def test_of_a_line_without_end_its_last_part_is_read(tmp_path: pathlib.Path):
    path = tmp_path / "log"
    path.write_text(f"begin\n{'x' * 2 * explain.MAX_JSON_BYTES}")
    (line,) = explain.tail(path, 1000)
    assert len(line) == explain.MAX_JSON_BYTES


CUT = TRACE.format("RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1234")


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_rank_that_left_with_a_word_of_its_own_comes_before_those_that_lost_it(settings: Settings, launcher: str):
    folder = make_run(settings, launcher=launcher)
    rank_log(folder, 0, 0, CUT)
    rank_log(folder, 1, 0, CUT)
    rank_log(folder, 1, 1, "loading\nno such column: text\n")  # sys.exit("no such column: text")
    if launcher == "torchrun":
        lines = [AGENT.format(0, 1, 0), AGENT.format(1, 1, 1), AGENT.format(0, -15, 1)]
    else:
        lines = [f"srun: error: n{task}: task {task}: Exited with exit code {code}" for task, code in ((0, 1), (3, 1))]
    (folder / "logs" / "12.out").write_text("\n".join(lines))
    assert failure(settings) == {"rank": 3, "node": 1, "lines": ["loading", "no such column: text"]}


def test_a_torchrun_that_was_killed_is_found(settings: Settings):
    folder = make_run(settings)
    for node in range(2):
        rank_log(folder, node, 0, CUT)
    exits = [f"srun: error: n{task}: task {task}: Exited with exit code {code}" for task, code in ((1, 137), (0, 143))]
    (folder / "logs" / "12.out").write_text("\n".join([AGENT.format(0, 1, 0), *exits]))
    words = "killed by signal 9 (SIGKILL)"
    assert failure(settings) == {"rank": 2, "node": 1, "lines": [f"its torchrun was {words}"]}
    # one that did not end in time after another had failed
    exits = [f"srun: error: n{task}: task {task}: Exited with exit code {code}" for task, code in ((0, 1), (1, 137))]
    (folder / "logs" / "12.out").write_text("\n".join([AGENT.format(0, 1, 0), *exits]))
    assert str(failure(settings)["lines"]).endswith("Connection closed by peer [10.0.0.2]:1234']")


def test_srun_tells_which_rank_was_killed_or_left_with_no_output(settings: Settings):
    folder = make_run(settings, launcher="srun")
    begin = "[ENV] job=12 attempt=12.r0 nodes=n0 n1\n0: [ENV] node=n0 address=10.0.0.1\n"
    end = "srun: error: n{0}: task {1}: Exited with exit code {2}\n[RESULT] rc=1 outcome=none\n"
    (folder / "logs" / "12.out").write_text(begin + end.format(1, 3, 4))
    assert failure(settings) == {"rank": 3, "node": 1, "lines": ["exited with code 4 and no error output"]}
    rank_log(folder, 0, 1, TRACE.format("ValueError: caught"))
    (folder / "logs" / "12.out").write_text(begin + end.format(1, 2, 137) + end.format(0, 1, 143))
    words = "killed by signal 9 (SIGKILL)"
    assert failure(settings) == {"rank": 2, "node": 1, "lines": [words]}


def test_a_rank_that_left_well_before_the_others_is_found(settings: Settings):
    folder = make_run(settings)
    for local in range(2):
        rank_log(folder, 0, local, CUT)
    early = "1: E1123 03:40:34.271000 23 torch/distributed/elastic/agent/server/api.py:1008] Error waiting on exit barrier. Elapsed: 0.2"
    (folder / "logs" / "12.out").write_text("\n".join([AGENT.format(0, 1, 0), early]))
    message = "exited with code 0 while others went on; do all ranks get the same number of batches?"
    assert failure(settings) == {"rank": 2, "node": 1, "lines": [message]}
    assert explain.blame(str(folder), "12", "12.r0", ["n0", "n1"]) == ("program", "n1", message), "not the node's"
    shutil.rmtree(folder / "logs" / "12.r0")
    rank_log(folder, 0, 0, TRACE.format("ValueError: boom"))
    assert failure(settings)["rank"] == 0, "one that failed by itself goes before"


def test_what_a_rank_says_as_it_leaves_comes_last(settings: Settings):
    folder = make_run(settings)
    rank_log(folder, 1, 0, "no more data\n")
    (log,) = folder.glob("logs/12.r0/node-1/*/attempt_0/0/*.log")
    log.with_name("stderr.log").write_text("no more data\n")
    log.with_name("stdout.log").write_text("step 7\n")
    (folder / "logs" / "12.out").write_text(AGENT.format(1, 1, 0))
    assert failure(settings)["lines"] == ["step 7", "no more data"]


def test_much_output_of_the_others_does_not_hide_who_left(settings: Settings):
    folder = make_run(settings)
    rank_log(folder, 0, 0, CUT)
    rank_log(folder, 1, 0, "no more data\n")
    much = "0: [rank0]: working\n" * 50_000
    lines = [AGENT.format(0, -9, 0), "[ENV] job=12 attempt=12.r0 nodes=n0 n1", much, AGENT.format(1, 1, 0), much]
    (folder / "logs" / "12.out").write_text("\n".join([*lines, AGENT.format(0, 1, 0)]))
    assert failure(settings) == {"rank": 2, "node": 1, "lines": ["no more data"]}
    assert explain.blame(str(folder), "12", "12.r0", ["n0", "n1"])[:2] == ("program", "n1")


def test_a_rank_that_left_with_no_output_is_named_with_its_exit_code(settings: Settings):
    folder = make_run(settings)
    rank_log(folder, 0, 0, CUT)
    earlier = f"[ENV] job=12 attempt=12.r0 \n{AGENT.format(0, -9, 1)}\n"  # what ended an attempt before is over
    (folder / "logs" / "12.out").write_text(f"{earlier}[ENV] job=12 attempt=12.r0t1 \n{AGENT.format(1, 3, 0)}")
    assert failure(settings) == {"rank": 2, "node": 1, "lines": ["exited with code 3 and no error output"]}
    assert explain.blame(str(folder), "12", "12.r0t1", ["n0", "n1"])[:2] == ("program", "n1")


WATCHDOG = """[rank{0}]:[E1122 21:03:11.184 ProcessGroupNCCL.cpp:683] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank {0}] Process group watchdog thread terminated with exception: [Rank {0}] \
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=60000) \
ran for 60011 milliseconds before timing out.
Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f83f296c1b6 in libc10.so)

Fatal Python error: Aborted

Thread 0x00007f2 (most recent call first):
  <no Python frame>
"""


def test_what_nccls_watchdog_printed_before_it_ended_the_ranks_is_shown(settings: Settings):
    folder = make_run(settings)
    for node, local in [(0, 0), (0, 1), (1, 0)]:
        rank_log(folder, node, local, WATCHDOG.format(2 * node + local), age_s=9 if node else 1)
    (folder / "logs" / "12.out").write_text("\n".join([AGENT.format(0, -6, 0), AGENT.format(1, -6, 0)]))
    found = failure(settings)
    assert (found["rank"], found["node"]) == (2, 1)
    last = str(typing.cast("list[str]", found["lines"])[-1])
    assert last.lstrip().startswith("what():  [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog")
    assert last.endswith(
        "OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=60000) ran for 60011 milliseconds before timing out."
    )
    # one that was killed is why the others waited
    (folder / "logs" / "12.out").write_text("\n".join([AGENT.format(0, -6, 0), AGENT.format(1, -9, 1)]))
    assert failure(settings)["rank"] == 3
    # of an abort that says nothing the signal is all there is
    shutil.rmtree(folder / "logs" / "12.r0")
    (folder / "logs" / "12.out").write_text(AGENT.format(1, -6, 0))
    assert failure(settings) == {"rank": 2, "node": 1, "lines": ["killed by signal 6 (SIGABRT)"]}


def test_a_failure_before_any_rank_is_found_in_the_jobs_log(settings: Settings):
    folder = make_run(settings)
    (folder / "logs" / "12.out").write_text(
        "[ENV] job=12\n0: [FATAL] slurmd-0: /mnt/x is damaged\nsrun: error: slurmd-0: task 0: Exited with exit code 78\n[RESULT] rc=78\n"
    )
    found = failure(settings)
    assert found == {"rank": None, "node": None, "lines": ["[FATAL] slurmd-0: /mnt/x is damaged"]}


@pytest.mark.parametrize(
    "message",
    [
        "slurmstepd: error: *** STEP 20.0 ON n0 CANCELLED AT 2026-11-22T19:48:01 ***",
        "slurmstepd-n0: error: *** STEP 20.0 ON n0 CANCELLED AT 2026-11-22T19:48:01 ***",
        "[2026-11-22T19:46:28.227] error: *** STEP 44.0 ON n0 CANCELLED AT 2026-11-22T19:46:28 DUE TO TASK FAILURE ***",
    ],
)  # 24.11, and where a node's name is not its host's; 26.05
def test_what_slurm_says_of_the_end_is_not_why_it_came(settings: Settings, message: str):
    folder = make_run(settings)
    text = (
        f"[ENV] job=12\n1: sh: 1: nope: not found\nsrun: error: n1: task 1: Exited with exit code 127\n0: {message}\n"
    )
    (folder / "logs" / "12.out").write_text(text)
    assert failure(settings)["lines"] == ["sh: 1: nope: not found"]


def test_a_failure_that_left_no_trace_says_nothing(settings: Settings):
    make_run(settings)
    found = failure(settings)
    assert found == {"rank": None, "node": None, "lines": []}


CAME = "[ENV] job=12 attempt=12.r0 nodes=n0 n1 n2 head=10.0.0.1:20096 ranks_per_node=2 launcher=torchrun\n"


VAIN = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 2/3 clients joined."


def came(*hosts: str) -> str:
    return CAME + "".join(
        f"{at}: [ENV] node={host} address=10.0.0.{at} fabric=tcp gloo=eth0 nccl=\n" for at, host in enumerate(hosts)
    )


@pytest.mark.parametrize(
    ("message", "merged", "ranks", "nodes"),
    [
        ("[FATAL] 3 of 6 ranks never joined within 120 s: 2, 3, 5; look at their logs", CAME, [2, 3, 5], ["n1", "n2"]),
        ("[FATAL] rank 0 published no address in /x within 120 s; is --run-dir shared?", CAME, [0], ["n0"]),
        (VAIN, came("n0", "n2"), [2, 3], ["n1"]),
        (VAIN, came("n0", "n1", "n2"), [], []),
        (VAIN, came("n0", "n2") + came("n0", "n1", "n2"), [], []),  # they were absent in an earlier attempt
        (VAIN, CAME, [], []),  # nobody came so far, so nobody is to blame
        ("ValueError: boom", came("n0", "n2"), [], []),  # it failed of something else
    ],
)
def test_ranks_that_never_came_are_named_with_their_nodes(
    settings: Settings, message: str, merged: str, ranks: list[int], nodes: list[str]
):
    folder = make_run(settings)
    (folder / "control" / "12.hosts").write_text("n0 n1 n2\n")
    (folder / "logs" / "12.out").write_text(merged + f"0: {message}\n")
    rank_log(folder, 0, 0, TRACE.format(message))
    found = explain.first_failure(settings.runs / "first", 12, 5)
    assert explain.absentees(folder, 12, found.lines, ["n0", "n1", "n2"]) == (ranks, nodes)
    kind, node, words = explain.blame(str(folder), "12", "12.r0", ["n0", "n1", "n2"])
    if len(nodes) == 1:
        answer = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} never joined the rendezvous"
        assert (kind, node, words) == ("node", nodes[0], answer), "the next attempt is made without it"
    else:
        assert kind == "program"

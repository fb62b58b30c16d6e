"""The first failure of a job, found in the ranks' logs and in the job's own."""

import json
import os
import pathlib
import typing

import pytest
import yaml

from ddp.node.diagnosis import absent_ranks, evidence, first_failure, rank_errors, verdicts

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    boom()\n{}\n'
CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
TEXTS: dict[str, str] = CASES["texts"]
RANKS: dict[str, dict[str, typing.Any]] = CASES["the_rank_that_failed_first_is_found"]
CUT, BEGIN = TEXTS["CUT"], TEXTS["BEGIN"]


def agent(node: int, code: int, local: int) -> str:
    where = "torch/distributed/elastic/multiprocessing/api.py:1002]"
    return f"{node}: E1120 20:23:35.969000 26319 {where} failed (exitcode: {code}) local_rank: {local} (pid: 2)"


def exits(task: int, code: int) -> str:
    return f"srun: error: n{task}: task {task}: Exited with exit code {code}"


def text(name: str) -> str:
    """Return a text by name: a line of torch's agent or of srun, or the name itself."""
    word, *numbers = name.split(" ")
    made = {"agent": agent, "exits": exits}.get(word)
    return TEXTS.get(name, name) if made is None else made(*map(int, numbers))


def make_run(folder: pathlib.Path, logs: dict[int, str], merged: list[str]) -> pathlib.Path:
    """Make a run of two ranks on each node; the ranks' logs are written a second apart."""
    (folder / "control").mkdir(exist_ok=True)
    (folder / "job.json").write_text(json.dumps({"job_id": 12, "ranks_per_node": 2}))
    for when, (rank, text) in enumerate(logs.items(), 1_800_000_000):
        path = (
            folder
            / "logs"
            / "12.r0"
            / f"node-{rank // 2}"
            / "x"
            / "attempt_0"
            / str(rank % 2)
            / "stderr.log"
        )
        path.parent.mkdir(parents=True)
        path.write_text(text)
        os.utime(path, (when, when))
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "12.out").write_text("\n".join(merged))
    return folder


def first(folder: pathlib.Path, job_id: int, lines: int) -> rank_errors.Failure:
    return first_failure.find(evidence.gather(folder, job_id, hosts=[], max_lines=lines))


def absent(folder: pathlib.Path, hosts: list[str]) -> tuple[list[int], list[str]]:
    found = evidence.gather(folder, 12, hosts=hosts, max_lines=5)
    ranks = absent_ranks.find(found, first_failure.find(found).lines)
    return ranks.ranks, ranks.hosts


@pytest.mark.parametrize("case", RANKS.values(), ids=RANKS)
def test_the_rank_that_failed_first_is_found(tmp_path: pathlib.Path, case: dict[str, typing.Any]):
    logs = {rank: text(log) for rank, log in case["logs"].items()}
    found = first(make_run(tmp_path, logs, [text(line) for line in case.get("merged", [])]), 12, 5)
    assert (found.rank, found.node, found.lines[-1]) == (
        case["rank"],
        case["rank"] // 2,
        text(case["last"]),
    )
    assert len(found.lines) <= 5


def test_much_output_of_the_others_hides_no_rank(tmp_path: pathlib.Path):
    much = ["0: [rank0]: working"] * 50_000
    merged = [agent(0, -9, 0), BEGIN, *much, agent(1, 1, 0), *much, agent(0, 1, 0)]
    found = first(make_run(tmp_path, {0: CUT, 2: "no more data\n"}, merged), 12, 5)
    assert (found.rank, found.lines[-1]) == (2, "no more data")


def test_a_message_longer_than_what_is_read_of_a_log_is_reported(tmp_path: pathlib.Path):
    long = TRACE.format(f"ValueError: {'x' * 100_000}") + "[W1120 x.cpp:9] Warning: not destroyed\n"
    found = first(make_run(tmp_path, {0: CUT, 2: long}, [agent(0, 1, 0), agent(1, 1, 0)]), 12, 5)
    assert found.rank == 2
    assert found.lines[-1].startswith("ValueError: xxxx")


def test_errors_of_a_leaving_rank_come_last(tmp_path: pathlib.Path):
    folder = make_run(tmp_path, {2: "no more data\n"}, [agent(1, 1, 0)])
    (log,) = folder.glob("logs/12.r0/node-1/*/attempt_0/0/*.log")
    log.with_name("stdout.log").write_text("step 7\n")
    assert first(folder, 12, 5).lines == ["step 7", "no more data"]


@pytest.mark.parametrize(
    ("merged", "lines"),
    [
        ([], []),
        (
            ["0: [FATAL] slurmd-0: /mnt/x is damaged", exits(0, 78), "[RESULT] rc=78"],
            ["[FATAL] slurmd-0: /mnt/x is damaged"],
        ),
        *(
            (
                ["1: sh: 1: nope: not found", exits(1, 127), f"0: {message}"],
                ["sh: 1: nope: not found"],
            )
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
    found = first(make_run(tmp_path, {}, ["[ENV] job=12", *merged] if merged else []), 12, 5)
    assert (found.rank, found.node, found.lines) == (None, None, lines)


def came(*hosts: str) -> list[str]:
    return [
        f"{BEGIN} n2",
        *(
            f"{at}: [ENV] node={host} address=10.0.0.{at} fabric=tcp"
            for at, host in enumerate(hosts)
        ),
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
        (
            "[FATAL] rank 0 published no address in /x within 120 s; is --run-dir shared?",
            came(),
            [0],
            ["n0"],
        ),
        (VAIN, came("n0", "n2"), [2, 3], ["n1"]),
        (VAIN, came("n0", "n1", "n2"), [], []),
        (
            VAIN,
            came("n0", "n2") + came("n0", "n1", "n2"),
            [],
            [],
        ),  # they were absent in an earlier attempt
        (VAIN, came(), [], []),  # no rank has come so far, so no rank is to blame
        ("ValueError: boom", came("n0", "n2"), [], []),  # it failed of something else
    ],
)
def test_ranks_that_never_came_are_named_with_their_nodes(
    tmp_path: pathlib.Path, message: str, merged: list[str], ranks: list[int], nodes: list[str]
):
    hosts = ["n0", "n1", "n2"]
    folder = make_run(tmp_path, {0: TRACE.format(message)}, [*merged, f"0: {message}"])
    assert absent(folder, hosts) == (ranks, nodes)
    kind, node, words, _ = verdicts.blame(str(folder), "12", "12.r0", hosts)
    if len(nodes) == 1:
        answer = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} never joined the rendezvous"
        assert (kind, node, words) == ("node", nodes[0], answer), (
            "the next attempt is made without it"
        )
    else:
        assert kind == "program"

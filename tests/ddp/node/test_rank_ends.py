"""How ranks ended, by the lines of torchrun's agents and of srun."""

import pytest

from ddp.node.diagnosis import rank_ends

AGENT = "{node}: E1120 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: {local}"
EXITED = "srun: error: gpu-1: task 1: Exited with exit code {code}"


def test_an_agent_reports_each_of_its_ranks():
    log = [AGENT.format(node=1, code=1, local=0), AGENT.format(node=1, code=-9, local=1)]
    ends = rank_ends.parse(log, per_node=2)
    assert [(end.rank, end.node, end.code) for end in ends] == [(2, 1, 1), (3, 1, -9)]
    assert ends[1].words == "killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("srun: error: gpu-1: task 1: Killed", -9, "killed by signal 9 (SIGKILL)"),
        ("srun: error: gpu-1: task 1: Segmentation fault", -11, "killed by signal 11 (SIGSEGV)"),
        (EXITED.format(code=139), -11, "its torchrun was killed by signal 11 (SIGSEGV)"),
    ],
)
def test_a_task_that_was_killed_stands_for_its_first_rank(line: str, code: int, words: str):
    (end,) = rank_ends.parse([line], per_node=4)
    assert (end.rank, end.code, end.words) == (4, code, words)


def test_an_agents_own_exit_code_is_not_its_ranks():
    assert not rank_ends.parse([EXITED.format(code=1), EXITED.format(code=137)], per_node=1)


def test_a_kill_for_memory_has_its_details():
    short = f"1: [ENV] gpu-1{rank_ends.SHORTAGE}had 1 MiB"
    (end,) = rank_ends.parse([AGENT.format(node=1, code=-9, local=0), short], per_node=1)
    assert end.words == f"{rank_ends.NO_MEMORY}: had 1 MiB"

"""shell: its request to Slurm and its leftovers; a double of Slurm's commands has the terminal."""

import dataclasses
import pathlib
import sys
import zipfile

import pytest
from cluster import Cluster
from harness import Trainer
from run_verbs import Program

from ddp.actions import verbs
from ddp.host import foreground
from ddp.options import fields
from ddp.problem import Problem
from ddp.settings import Settings
from slurm_ddp.slurm import times


@dataclasses.dataclass
class Terminal:
    """The terminal, which a command of Slurm's has until it ends."""

    words: list[str] = dataclasses.field(default_factory=list[str])
    spec: str = ""
    code: int = 0

    def run(self, argv: list[str], env: dict[str, str]) -> int:
        """Stand in for ddp.host.foreground.run."""
        assert env["PATH"]
        program, part, specification = argv[-3:]
        assert zipfile.is_zipfile(program)
        assert part == "shell"
        self.words, self.spec = argv, pathlib.Path(specification).read_text()
        return self.code


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Be at a terminal."""
    terminal = Terminal()
    monkeypatch.setattr(foreground, "run", terminal.run)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    return terminal


def shell(settings: Settings, **given: object) -> None:
    verb = verbs.ALL["shell"]
    options = {name.replace("_", "-"): value for name, value in given.items()}
    verb.do_when_ready(settings, fields.parse(verb.options, options), print)


def fails(settings: Settings, **given: object) -> str:
    with pytest.raises(Problem) as caught:
        shell(settings, **given)
    return str(caught.value)


@pytest.fixture
def night(settings: Settings, program: Program, cluster: Cluster) -> pathlib.Path:
    """A run of two ranks on each of two nodes."""
    cluster.states = [("RUNNING", 0)]
    program.run("submit-ddp", workload="smoke", run="night", ranks_per_node=2)
    folder = program.workspace / "runs" / "night"
    (folder / "control" / "40.hosts").write_text("slurmd-1 slurmd-0\n")
    return folder


def test_without_a_run_it_is_one_node_for_as_long_as_the_prompt_is_there(
    settings: Settings, ready: Trainer, asked: Terminal
):
    shell(settings, time_limit="30")
    found = asked.words
    step = found.index(next(word for word in found if word.endswith("srun")))
    assert {"--nodes=1", "--cpus-per-task=2", f"--time={times.format_time(1800)}"} <= set(
        found[:step]
    )
    assert {"--pty", "--overlap", "--nodes=1"} <= set(found[step:])
    names = [pathlib.PurePath(word).name for word in found[-3:]]
    assert names == ["ddp.pyz", "shell", "job.json"]
    assert list((settings.workspace.runs).iterdir()) == []


def test_what_slurm_refuses_is_a_problem_and_leaves_nothing(
    settings: Settings, ready: Trainer, asked: Terminal
):
    asked.code = 1
    assert fails(settings) == "salloc ended with exit status 1; its reason is above"
    assert list((settings.workspace.runs).iterdir()) == []


@pytest.mark.parametrize(("rank", "node"), [(None, "slurmd-1"), (1, "slurmd-1"), (2, "slurmd-0")])
def test_with_a_run_it_is_the_node_of_the_rank(
    settings: Settings,
    ready: Trainer,
    asked: Terminal,
    night: pathlib.Path,
    rank: int | None,
    node: str,
):
    given = {} if rank is None else {"rank": rank}
    shell(settings, run="night", **given)
    assert {"--jobid=40", f"--nodelist={node}", "--overlap", "--pty"} <= set(asked.words)
    assert "--job-name=night" in asked.words, "else SLURM_JOB_NAME is python3"
    assert asked.spec == (night / "program" / "job.json").read_text()


def test_what_a_running_job_cannot_give_is_refused_by_name(
    settings: Settings, ready: Trainer, asked: Terminal, night: pathlib.Path
):
    assert fails(settings, run="night", rank=4) == "rank: no rank 4; night has 4, from 0"
    text = "gpus-per-node: the job of night has its own; omit it"
    assert fails(settings, run="night", gpus_per_node="1") == text
    assert fails(settings, rank=1) == "rank: only a running job has ranks; name its run, too"


def test_without_a_terminal_it_names_the_command_for_programs(settings: Settings):
    text = "a prompt needs a terminal; for a command on nodes: ddp submit"
    verb = verbs.ALL["shell"]
    with pytest.raises(Problem, match=text):
        verb.do(settings, fields.parse(verb.options, {}), print)

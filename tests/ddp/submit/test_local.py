"""submit --local: a program's ranks on this machine, started by torchrun's own command line."""

import json
import os
import pathlib
import sys
import typing

import pytest

from ddp.actions import verbs
from ddp.options import fields, models
from ddp.problem import Problem
from ddp.settings import Settings

# Takes what torchrun takes, and starts the ranks one after the other
TORCHRUN = """
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--standalone", action="store_true", required=True)
parser.add_argument("--local-addr", required=True)
parser.add_argument("--nproc-per-node", type=int, required=True)
parser.add_argument("--no-python", action="store_true", required=True)
parser.add_argument("command", nargs=argparse.REMAINDER)
given = parser.parse_args()
codes = []
for rank in range(given.nproc_per_node):
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(given.nproc_per_node)}
    codes.append(subprocess.run(given.command, env=env).returncode)
sys.exit(max(codes))
"""
PROGRAM = """
import json, os, pathlib, sys
kept = ("RANK", "WORLD_SIZE", "RUN_DIR", "STOP_FILE", "LR", "PYTHONBREAKPOINT")
seen = {name: os.environ.get(name) for name in kept}
seen |= {"argv": sys.argv[1:], "folder": os.getcwd(), "typed": os.path.sameopenfile(0, 2)}
pathlib.Path(f"rank-{seen['RANK']}.json").write_text(json.dumps(seen))
sys.exit(3 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def python(tmp_path: pathlib.Path) -> pathlib.Path:
    """Make an environment with a torch that only starts ranks."""
    home = tmp_path / "own"
    site = home / "lib" / "python3" / "site-packages"
    (site / "torch" / "distributed").mkdir(parents=True)
    for package in ("torch", "torch/distributed"):
        (site / package / "__init__.py").touch()
    (site / "torch" / "version.py").write_text("__version__ = '2.13.0'\n")
    (site / "torch" / "distributed" / "run.py").write_text(TORCHRUN)
    program = home / "bin" / "python"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={site}:$PYTHONPATH exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


@pytest.fixture
def typed_in(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    return folder


def submit(settings: Settings, folder: pathlib.Path, *arguments: str, **given: typing.Any) -> None:
    """Submit the folder's program, as typed there, without Slurm."""
    options = {name.replace("_", "-"): value for name, value in given.items()}
    params = fields.parse(
        models.SubmitDdp, {"workload": str(folder / "train.py"), "local": True, **options}
    )
    facts = {"typed_in": str(folder), "arguments": arguments}
    verbs.ALL["submit"].do_when_ready(settings, params.model_copy(update=facts), print)


def test_the_ranks_run_here_as_a_job_would_run_them(
    settings: Settings, python: pathlib.Path, typed_in: pathlib.Path
):
    submit(settings, typed_in, "--lr", "0 1", ranks=2, python=str(python), env="LR=3")
    ranks = [json.loads((typed_in / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for rank, seen in enumerate(ranks):
        assert (seen["RANK"], seen["WORLD_SIZE"], seen["LR"]) == (str(rank), "2", "3")
        assert (seen["argv"], seen["folder"]) == (["--lr", "0 1"], str(typed_in))
        assert seen["STOP_FILE"].startswith(seen["RUN_DIR"])
        assert not os.path.lexists(seen["RUN_DIR"])  # nothing is left
    assert list((settings.workspace.path / "runs").iterdir()) == []


def test_only_rank_0_stops_at_a_breakpoint(
    settings: Settings, python: pathlib.Path, typed_in: pathlib.Path
):
    submit(settings, typed_in, ranks=2, python=str(python))
    ranks = [json.loads((typed_in / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [seen["PYTHONBREAKPOINT"] for seen in ranks] == [None, "0"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"workload": "smoke"}, "local: smoke runs in jobs; name a program of yours"),
        (
            {"container-image": "/x.sqsh"},
            "local: an image runs in jobs; omit container-image",
        ),
        ({"python": "none"}, "no Python with torch on this machine; activate an environment"),
        ({"local": False, "ranks": 2}, "ranks: counts only with local; use ranks-per-node"),
    ],
)
def test_what_cannot_run_here_is_refused_by_name(
    settings: Settings, typed_in: pathlib.Path, given: dict[str, typing.Any], line: str
):
    params = fields.parse(
        models.SubmitDdp, {"workload": str(typed_in / "train.py"), "local": True, **given}
    )
    with pytest.raises(Problem) as caught:
        verbs.ALL["submit"].do(settings, params, print)
    assert str(caught.value).startswith(line)


def test_a_program_that_fails_makes_the_command_fail(
    settings: Settings, python: pathlib.Path, typed_in: pathlib.Path
):
    with pytest.raises(Problem, match="the program ended with exit status 3"):
        submit(settings, typed_in, "fail", python=str(python))

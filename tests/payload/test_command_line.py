"""A command line is looked at without torch or numpy, by the parser that takes it later."""

import json
import pathlib
import subprocess
import sys

import pytest
import ranks
import yaml

from ddptrain.options import command_line

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

FOLDER = pathlib.Path(command_line.__file__).parents[2]


def test_neither_torch_nor_numpy_is_needed():
    code = f"import sys; sys.path[:] = [{str(FOLDER)!r}, *(p for p in sys.path if 'site-packages' not in p)]\n"
    code += "from ddptrain.options import command_line; command_line.main()"
    request = {
        "folder": "/nowhere",
        "command": "train",
        "prog": "ddp submit gpt",
        "lines": [["--steps", "3"], ["--run-dir", "r", "--data", "d"]],
    }
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [
        "--run-dir is missing; see `python -m ddptrain train --help`",
        None,
    ]


@pytest.mark.parametrize(("line", "words"), CASES["mistakes"])
def test_a_mistake_is_one_line_on_all_ranks_and_known_before_they_start(
    tmp_path: pathlib.Path, line: str, words: str
):
    command, *rest = line.format(tmp=tmp_path).split()
    result = ranks.run(2, command, *rest)
    assert result.codes == [2, 2]
    (fatal,) = result.fatal()
    assert words in fatal
    if command != "collectives":  # which no user submits with arguments
        problem = command_line.check(command, "ddp submit gpt", rest)
        assert problem is not None
        assert fatal.startswith(problem.partition("; see")[0])


def test_a_smoke_test_needs_a_sample_for_each_rank():
    result = ranks.run(2, "smoke --samples 1")
    assert result.codes == [2, 2]
    assert "fewer than the 2 ranks" in result.fatal()[0]

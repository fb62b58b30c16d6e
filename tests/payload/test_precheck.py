"""A command line is looked at without torch or numpy, by the parser that takes it later."""

import json
import pathlib
import subprocess
import sys

import pytest
import ranks

from ddptrain import precheck

FOLDER = pathlib.Path(precheck.__file__).parents[1]


def test_neither_torch_nor_numpy_is_needed():
    code = f"import sys; sys.path[:] = [{str(FOLDER)!r}, *(p for p in sys.path if 'site-packages' not in p)]\n"
    code += "from ddptrain import precheck; precheck.main()"
    request = {
        "folder": "/nowhere",
        "command": "train",
        "prog": "ddp submit gpt",
        "lines": [["--steps", "3"], ["--run-dir", "r", "--data", "d"]],
    }
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], input=json.dumps(request), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == ["--run-dir is missing; see `python -m ddptrain train --help`", None]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--run-dir", "{tmp}", "--data", "d", "--bogus"],
        ["train", "--run-dir", "{tmp}", "--data", "d", "--lr", "0"],
        ["train", "--run-dir", "{tmp}", "--data", "d", "--steps", "1", "--epochs", "1"],
        ["smoke", "--epochs", "0"],
        ["smoke", "--device", "tpu"],
    ],
)
def test_it_says_what_the_command_itself_would(tmp_path: pathlib.Path, words: list[str]):
    command, *rest = [word.format(tmp=tmp_path) for word in words]
    problem = precheck.check(command, "ddp submit gpt", rest)
    assert problem is not None
    result = ranks.run(1, command, *rest)
    assert result.codes == [2]
    assert result.fatal()[0].startswith(problem.partition("; see")[0])

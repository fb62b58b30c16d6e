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


MISTAKES = [
    ("train --run-dir {tmp} --data d --bogus", "unrecognized arguments: --bogus"),
    ("train --run-dir {tmp} --data d --lr 0", "--lr 0.0: must be above 0"),
    ("train --run-dir {tmp} --data d --steps 1 --epochs 1", "exclude each other"),
    ("train --run-dir {tmp} --data d --timeout-minutes 0", "must be at least 0.1"),
    ("smoke --epochs 0", "--epochs 0: must be at least 1"),
    ("smoke --device tpu", "invalid choice: 'tpu'"),
    ("smoke --batch x", "invalid int value"),
    ("smoke --timeout-minutes 1441", "must be at most 1440"),
    ("collectives --timeout-minutes nan", "a finite"),
    ("collectives --collective gossip", "--collective gossip: must be one of"),
    ("collectives -b 1X", "--min-bytes 1X: give a number of bytes"),
    ("collectives -b 0", "--min-bytes 0"),
    ("collectives -b 2M -e 1M", "--min-bytes is above --max-bytes"),
    ("collectives -f 1", "--step-factor 1: must be at least 2"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES)
def test_a_mistake_is_one_line_on_all_ranks_and_known_before_they_start(tmp_path: pathlib.Path, line: str, words: str):
    command, *rest = line.format(tmp=tmp_path).split()
    result = ranks.run(2, command, *rest)
    assert result.codes == [2, 2]
    (fatal,) = result.fatal()
    assert words in fatal
    if command != "collectives":  # which no user submits with arguments
        problem = precheck.check(command, "ddp submit gpt", rest)
        assert problem is not None
        assert fatal.startswith(problem.partition("; see")[0])


def test_a_smoke_test_needs_a_sample_for_each_rank():
    result = ranks.run(2, "smoke --samples 1")
    assert result.codes == [2, 2]
    assert "fewer than the 2 ranks" in result.fatal()[0]

"""Each rank's error file, in the format of torch.distributed.elastic, which the job reads for why it failed."""

import json
import pathlib

import pytest

from ddptrain import cli


def test_a_mistake_and_a_bug_are_left_for_the_launcher(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert cli.main(["train", "--data", str(tmp_path / "none"), "--run-dir", str(tmp_path / "run")]) == 2
    error = json.loads(path.read_text())["message"]
    fatal = next(line for line in capsys.readouterr().out.splitlines() if "[FATAL] " in line)
    assert fatal.endswith(f"[FATAL] {error['message']}")
    assert error["extraInfo"]["py_callstack"] == f"[FATAL] {error['message']}\n", "a mistake needs no stack"
    assert int(error["extraInfo"]["timestamp"]) > 0
    monkeypatch.setattr(cli, "_parser", lambda argv: {}["bug"])
    assert cli.main(["train"]) == 1
    stack = json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]
    assert stack.startswith("Traceback (most recent call last):\n")
    assert stack.endswith("[FATAL] KeyError: 'bug'\n")

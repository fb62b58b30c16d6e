"""`python -m ddptrain` as a process: how it ends."""

import os
import pathlib
import subprocess
import sys

CUSTOMIZE = """
import os, sys
class Last:
    def __del__(self, write=os.write):
        write(1, b"finalized")
sys.kept = Last()
"""


def test_it_ends_with_its_code_before_the_interpreter_is_finalized(tmp_path: pathlib.Path):
    """During finalization, a torch thread that needs the interpreter would raise SIGABRT."""
    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZE)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    argv = [sys.executable, "-m", "ddptrain", "inspect", str(tmp_path / "none")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "[FATAL] " in done.stdout + done.stderr
    assert "finalized" not in done.stdout

    other = subprocess.run(
        [sys.executable, "-m", "this"], env=env, capture_output=True, text=True, check=False
    )
    assert other.stdout.endswith("finalized"), "the test sees a finalization"

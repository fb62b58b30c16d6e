"""torchrun as a job starts it: the log of a cancellation."""

import pathlib
import signal
import subprocess
import sys
import time

from ddp.node import torchrun

WAITS = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
time.sleep(100)
"""


def test_a_cancelled_agent_prints_no_traceback(tmp_path: pathlib.Path):
    script, started = tmp_path / "train.py", tmp_path / "started"
    script.write_text(WAITS)
    options = ["--standalone", "--nproc-per-node=1", str(script), str(started)]
    argv = [sys.executable, "-c", torchrun.AGENT, *options]
    with subprocess.Popen(
        argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path
    ) as agent:
        for _ in range(1200):
            if started.exists() or agent.poll() is not None:
                break
            time.sleep(0.05)
        agent.send_signal(signal.SIGTERM)
        output, _ = agent.communicate(timeout=60)
    assert started.exists(), output
    assert "Traceback" not in output
    assert agent.returncode == 1


def test_a_failed_rank_is_reported_by_the_agent_as_before(tmp_path: pathlib.Path):
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(3)\n")
    argv = [sys.executable, "-c", torchrun.AGENT, "--standalone", "--nproc-per-node=1", str(script)]
    done = subprocess.run(
        argv, text=True, capture_output=True, check=False, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 1
    assert "failed (exitcode: 3) local_rank: 0" in done.stderr

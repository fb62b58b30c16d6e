"""Running `ddptrain` from a measure."""

# pyright: basic, reportPrivateImportUsage=false
import os
import subprocess
import sys

# A training of some milliseconds a step
TINY = (
    "--layers 2 --heads 2 --width 64 --seq-len 64 --batch 4 --warmup 3 --precision fp32"
    " --eval-rows 16 --log-every 1"
)


def run_ddptrain(*args: object, timeout_s: float, num_threads: int = 1) -> str:
    """Run `ddptrain` in one process and return its output. Raises RuntimeError if it fails."""
    argv = [sys.executable, "-m", "ddptrain", *(str(arg) for arg in args)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        argv,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-1000:])
    return done.stdout

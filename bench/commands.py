"""Running `ddptrain` from a measure."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib
import socket
import subprocess
import sys

TINY = "--layers 2 --heads 2 --width 64 --seq-len 64 --batch 4 --warmup 3 --precision fp32 --eval-rows 16 --log-every 1"


def free_port() -> int:
    """Return a port of the loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(ranks: int) -> list[str]:
    """Return torchrun's command for so many ranks on this machine."""
    meeting = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *meeting]


def argv(ranks: int, *args: object) -> list[str]:
    """Return the command on so many ranks, under torchrun when there are several."""
    launcher = [sys.executable] if ranks == 1 else torchrun(ranks)
    return [*launcher, "-m", "ddptrain", *(str(arg) for arg in args)]


def start(ranks: int, *args: object, **env: str) -> subprocess.Popen[str]:
    """Start `ddptrain`, one thread per rank, its output in a pipe."""
    return popen(argv(ranks, *args), **env)


def popen(command: list[str], **env: str) -> subprocess.Popen[str]:
    """Start a command, one thread per process, its output in a pipe."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Return the first line with a text in it. Raises RuntimeError when the process ends without one."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        if text in line:
            return line
        seen.append(line)
    raise RuntimeError(f"no {text!r} in: {''.join(seen)[-2000:]}")


def tiny(data: pathlib.Path, run_dir: pathlib.Path) -> list[object]:
    """Return the arguments of a training of some milliseconds a step."""
    return ["train", "--data", data, "--run-dir", run_dir, *TINY.split(), "--epoch-steps", 10]

"""Runs `ddptrain` on several ranks quickly: a server that has imported torch forks them, so a run costs no start-up.

They meet as under any launcher that sets RANK and the rest, but there is no launcher: nobody ends a rank for another's sake.
"""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import dataclasses
import functools
import importlib
import multiprocessing
import os
import pathlib
import random
import re
import signal
import socket
import sys
import tempfile
import time

import torch

from ddptrain import cli

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "numpy",
        "torch",
        "ddptrain.cli",
        "ddptrain.train",
        "ddptrain.smoke",
        "ddptrain.collectives",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "torch.distributed.checkpoint.state_dict",
        "transformers.models.gpt2.modeling_gpt2",
    ]
)


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended: the exit code of each rank, and what they all printed."""

    codes: list[int]
    output: str

    @property
    def returncode(self) -> int:
        """Return 0 when every rank did."""
        return max(abs(code) for code in self.codes)

    def marked(self, marker: str) -> list[dict[str, str]]:
        """Return the fields of the lines with a marker."""
        lines = [line for line in self.output.splitlines() if f":[{marker}]" in line]
        return [dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)) for line in lines]

    def fatal(self) -> list[str]:
        """Return the texts of the [FATAL] lines; torchrun's own summary, which quotes the error file, is none."""
        return [line.split(":[FATAL] ", 1)[1] for line in self.output.splitlines() if ":[FATAL] " in line]


_LIMIT_S = 200.0  # for a run on a busy machine
_given: set[int] = set()


def free_port() -> int:
    """Return a port that nobody listens on, and that the kernel gives nobody by itself before it is used."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)  # below net.ipv4.ip_local_port_range
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def run(ranks: int, *args: object, timeout: float = _LIMIT_S, accident: str | None = None, **env: str) -> Result:
    """Run the command on so many ranks; `accident` names a module of this folder to import in each first."""
    _await_server()
    began = time.monotonic()
    meeting = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        processes = []
        for rank in range(ranks):
            place = {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            process = CONTEXT.Process(target=_rank, args=([str(a) for a in args], {**place, **env}, log.name, accident))
            process.start()
            processes.append(process)
        late = []
        for process in processes:
            process.join(max(0.1, timeout - (time.monotonic() - began)))
            if process.exitcode is None:
                late.append(process)
                process.kill()
                process.join()
        output = pathlib.Path(log.name).read_text()
    assert not late, f"{len(late)} ranks were still there after {timeout} s:\n{output}"
    return Result([process.exitcode or 0 for process in processes], output)


@functools.cache
def _await_server() -> None:
    """Let the server import everything, once: on a busy machine that takes longer than a run may."""
    process = CONTEXT.Process(target=_nothing)
    process.start()
    process.join()


def _nothing() -> None:
    pass


def succeed(ranks: int, *args: object, accident: str | None = None, **env: str) -> Result:
    """Run, and show everything if it does not end well."""
    result = run(ranks, *args, timeout=_LIMIT_S, accident=accident, **env)
    assert result.returncode == 0, result.output
    return result


def _rank(argv: list[str], env: dict[str, str], log: str, accident: str | None) -> None:
    for name in [n for n in os.environ if n.startswith(("SLURM", "RANK", "WORLD", "MASTER", "RUN_", "STOP_"))]:
        del os.environ[name]
    os.environ.update(env)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    if accident:
        importlib.import_module(accident)
    code = cli.main(argv)
    sys.stdout.flush()
    os._exit(code)


def killed(code: int) -> bool:
    """Return whether an exit code means SIGKILL."""
    return code == -signal.SIGKILL

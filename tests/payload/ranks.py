"""Run `ddptrain` on several ranks quickly: a server that has imported torch forks them.

So a run has no start-up cost. The ranks meet as under any launcher that sets RANK and the rest, but
without a launcher: no rank is ended because of another.
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
import traceback
import typing

import torch

from ddptrain import cli
from ddptrain.world import alarm

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = """numpy torch ddptrain.cli ddptrain.train ddptrain.smoke ddptrain.world.collectives torch.distributed.checkpoint
fsspec.core matplotlib.figure matplotlib.backends.backend_agg transformers.models.gpt2.modeling_gpt2
transformers.trainer"""
CONTEXT.set_forkserver_preload([str(name) for name in PRELOADED.split()])


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a run: the exit code of each rank, and their combined output."""

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
        """Return the texts of [FATAL] lines, without torchrun's own summary of the error file."""
        return [
            line.split(":[FATAL] ", 1)[1]
            for line in self.output.splitlines()
            if ":[FATAL] " in line
        ]


SCRIPT = "accident_script"  # the accident that runs the script which the arguments begin with
_LIMIT_S = 200.0  # for a run on a busy machine
_given: set[int] = set()


def free_port() -> int:
    """Return a free port that the kernel does not assign by itself before it is used."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)  # below net.ipv4.ip_local_port_range
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def run(
    ranks: int, *args: object, timeout: float = _LIMIT_S, accident: str | None = None, **env: str
) -> Result:
    """Run the command on this many ranks.

    `accident` names a module of this folder to import in each first, and may add variables: `name
    A=1`. A variable's `{rank}` is the rank's number.
    """
    accident, variables = parse(accident)
    _await_server()
    began = time.monotonic()
    meeting = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    meeting |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        processes = []
        for rank in range(ranks):
            place = {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            own = {
                name: value.replace("{rank}", str(rank))
                for name, value in {**variables, **env}.items()
            }
            process = CONTEXT.Process(
                target=_rank, args=(words(args), {**place, **own}, log.name, accident)
            )
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
    """Let the server import everything once: on a busy machine that can outlast a run's limit."""
    process = CONTEXT.Process(target=os.getpid)
    process.start()
    process.join()


def succeed(ranks: int, *args: object, accident: str | None = None, **env: str) -> Result:
    """Run, and show everything if it does not end well."""
    result = run(ranks, *args, timeout=_LIMIT_S, accident=accident, **env)
    assert result.returncode == 0, result.output
    return result


def train(
    size: int, data: pathlib.Path, run_dir: pathlib.Path, *args: object, **more: typing.Any
) -> Result:
    """Run a training."""
    return run(size, "train --data", data, "--run-dir", run_dir, *args, **more)


def trained(
    size: int, data: pathlib.Path, run_dir: pathlib.Path, *args: object, **more: typing.Any
) -> Result:
    """Run a training that must end well."""
    return succeed(size, "train --data", data, "--run-dir", run_dir, *args, **more)


def parse(accident: str | None) -> tuple[str | None, dict[str, str]]:
    """Return the module and the variables of an accident."""
    name, *settings = (accident or "").split() or [""]
    return name or None, dict(
        typing.cast(tuple[str, str], setting.split("=", 1)) for setting in settings
    )


def words(args: tuple[object, ...]) -> list[str]:
    """Return a command line of words, paths and texts of several words."""
    return [word for arg in args for word in (arg.split() if isinstance(arg, str) else [str(arg)])]


def _rank(argv: list[str], env: dict[str, str], log: str, accident: str | None) -> None:
    for name in [
        n for n in os.environ if n.startswith(("SLURM", "RANK", "WORLD", "MASTER", "RUN_", "STOP_"))
    ]:
        del os.environ[name]
    os.environ.update(env)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    cli._GRACE_S, alarm.WATCH_S = 0.1, 0.2  # no rank is ended because of another here
    sys.argv = ["ddptrain", *argv]
    code = 0
    try:
        if accident:
            importlib.import_module(accident)
        if accident != SCRIPT:
            code = cli.main(argv)
    except SystemExit as e:
        code = int(e.code or 0)
    except Exception:  # of a script
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def killed(code: int) -> bool:
    """Return whether an exit code means SIGKILL."""
    return code == -signal.SIGKILL

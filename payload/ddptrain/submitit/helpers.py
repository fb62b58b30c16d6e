"""submitit's helpers that functions and their programs use."""

import collections.abc
import os
import subprocess
import time
import typing

from ddptrain.functions import calls, jobs
from ddptrain.submitit.environment import JobEnvironment
from ddptrain.submitit.jobs import as_completed

__all__ = [
    "Checkpointable",
    "CommandFunction",
    "DelayedSubmission",
    "JobEnvironment",
    "TorchDistributedEnvironment",
    "as_completed",
    "monitor_jobs",
]


def DelayedSubmission(  # noqa: N802 - submitit's name
    function: collections.abc.Callable[..., typing.Any], *args: typing.Any, **kwargs: typing.Any
) -> calls.Call:
    """Return a call of a function."""
    return calls.Call(function, args, kwargs)


class Checkpointable:
    """A callable that keeps its state: before a stop, `checkpoint` returns the next call."""

    def checkpoint(self, *args: typing.Any, **kwargs: typing.Any) -> calls.Call:
        """Return the call for the job's next start: this object now, with the same arguments."""
        return calls.Call(typing.cast(typing.Any, self), args, kwargs)


class CommandFunction:
    """A command as a function, which returns the command's output."""

    def __init__(
        self,
        command: list[str],
        *,
        verbose: bool = True,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.command = command
        self.verbose = verbose
        self.cwd = cwd
        self.env = env

    def __call__(self, *args: typing.Any, **kwargs: typing.Any) -> str:
        """Run the command with more arguments. Raises CalledProcessError."""
        words = [*self.command, *map(str, args)]
        words += [f"--{name}={value}" for name, value in kwargs.items()]
        done = subprocess.run(
            words, stdout=subprocess.PIPE, text=True, check=True, cwd=self.cwd, env=self.env
        )
        if self.verbose:
            print(done.stdout, end="", flush=True)
        return done.stdout.strip()


class TorchDistributedEnvironment:
    """The variables of torch.distributed, which torchrun has set in every rank."""

    def __init__(self) -> None:
        self.master_addr = os.environ["MASTER_ADDR"]
        self.master_port = int(os.environ["MASTER_PORT"])
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])

    def export(
        self, *, set_cuda_visible_devices: bool = True, overwrite: bool = False
    ) -> "TorchDistributedEnvironment":
        """Return itself: the variables are set. With one device shown, it is number 0."""
        del overwrite
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        cards = [str(self.local_rank)] if shown is None else shown.split(",")[self.local_rank :]
        if set_cuda_visible_devices and cards:
            os.environ["CUDA_VISIBLE_DEVICES"] = cards[0]
        return self


def monitor_jobs(
    given: collections.abc.Sequence[jobs.Job[typing.Any]], poll_frequency: float = 30
) -> None:
    """Print how many jobs have ended, until all have."""
    while True:
        ended = [job for job in given if job.done()]
        failed = [job.run for job in ended if job.exception() is not None]
        print(f"{len(ended)} of {len(given)} jobs have ended; failed: {' '.join(failed) or 'none'}")
        if len(ended) == len(given):
            return
        time.sleep(poll_frequency)

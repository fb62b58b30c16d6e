"""What some ranks do in some steps, recorded with torch's profiler."""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import pathlib
import typing

import torch

from ddptrain.ground import log
from ddptrain.options import config


def recording(settings: config.Config, rank: int, begin: int, path: pathlib.Path) -> typing.Any:
    """Return a context manager whose value records the chosen steps; None if none of the rank's are to be recorded.

    `begin` is the first step of this training: one that is resumed behind the first chosen step records the rest.
    """
    first, last = config.profiled_steps(settings.profile_steps)
    first = max(first, begin)
    if (
        not settings.profile
        or rank not in config.profiled_ranks(settings.profile_ranks)
        or first > last
    ):
        return contextlib.nullcontext()

    def write(trace: torch.profiler.profile) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
            log.every_rank("PROFILE", steps=f"{first}-{last}", trace=path)
        except (OSError, RuntimeError) as e:  # a training never ends for its profile
            log.warn("PROFILE", f"{path} could not be written: {e}")

    before = first - begin
    warmup = min(before, 1)
    plan = torch.profiler.schedule(
        wait=before - warmup, warmup=warmup, active=last - first + 1, repeat=1
    )
    return torch.profiler.profile(schedule=plan, on_trace_ready=write)

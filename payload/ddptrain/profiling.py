"""What some ranks do in some steps, recorded with torch's profiler."""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import pathlib
import typing

import torch

from ddptrain import markers


class Recorder(contextlib.AbstractContextManager["Recorder"]):
    """Records the steps from `first` to `last` of this training's count; a context manager.

    A resumed training that begins behind `first` records as many steps from where it begins, if `last` lies ahead.
    """

    def __init__(self, is_wanted: bool, steps: tuple[int, int], path: pathlib.Path, device: torch.device) -> None:
        self.is_wanted, (self.first, self.last), self.path, self.device = is_wanted, steps, path, device
        self._trace: typing.Any = None

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Begin where this is the first step to record."""
        if not self.is_wanted or self._trace is not None or not self.first <= step <= self.last:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._trace = torch.profiler.profile(activities=activities)
        self._trace.start()

    def after(self, step: int) -> None:
        """End where this was the last step to record."""
        if step >= self.last:
            self._stop()

    def _stop(self) -> None:
        if self._trace is None:
            return
        trace, self._trace, self.is_wanted = self._trace, None, False
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            trace.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self.path))
            markers.every_rank("PROFILE", steps=f"{self.first}-{self.last}", trace=self.path)
        except (OSError, RuntimeError) as e:  # a training never ends for its profile
            markers.warn("PROFILE", f"{self.path} could not be written: {e}")

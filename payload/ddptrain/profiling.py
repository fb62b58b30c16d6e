"""What some ranks do in some steps, recorded: torch's own trace, or Nsight Systems' around this process."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib
import typing

import torch

from ddptrain import markers


class Recorder:
    """Records the steps from `first` to `last` of this training's count; a context manager.

    A resumed training that begins behind `first` records as many steps from where it begins, if `last` lies ahead.
    """

    def __init__(self, kind: str | None, steps: tuple[int, int], path: pathlib.Path, device: torch.device) -> None:
        self.kind, (self.first, self.last), self.path, self.device = kind, steps, path, device
        self._trace: typing.Any = None
        self._running = False

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Begin where this is the first step to record."""
        if self.kind is None or self._running or not self.first <= step <= self.last:
            return
        self._running = True
        if self.kind == "nsys":
            self._tell_nsys("cudaProfilerStart")
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._trace = torch.profiler.profile(activities=activities)
        self._trace.start()

    def after(self, step: int) -> None:
        """End where this was the last step to record."""
        if self._running and step >= self.last:
            self._stop()

    def _stop(self) -> None:
        if not self._running:
            return
        self._running, self.kind = False, None
        if self._trace is None:
            self._tell_nsys("cudaProfilerStop")
            return
        trace, self._trace = self._trace, None
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            trace.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self.path))
            markers.every_rank("PROFILE", steps=f"{self.first}-{self.last}", trace=self.path)
        except (OSError, RuntimeError) as e:  # a training never ends for its profile
            markers.warn("PROFILE", f"{self.path} could not be written: {e}")

    def _tell_nsys(self, call: str) -> None:
        if self.device.type == "cuda":  # without a GPU nsys records the process from its start to its end
            getattr(torch.cuda.cudart(), call)()

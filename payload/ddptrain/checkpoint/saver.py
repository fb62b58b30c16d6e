"""Checkpoints written while training goes on.

A thread copies the tensors into a persistent host buffer and then writes that out, while forward
and backward passes go on. The training loop only waits, before it changes the tensors, until they
are copied.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import dataclasses
import pathlib
import queue
import threading
import time
import typing

import torch
from torch import Tensor

from ddptrain.checkpoint import draft, parts, stored, tensors
from ddptrain.ground import files, log

State = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class _Job:
    name: str
    state: State  # live
    meta: State
    is_best: bool
    began: float
    computed: typing.Any  # a CUDA event: the tensors have their values


class Saver:
    """Writes a run's checkpoints from a thread, on rank 0; with several sites on each one's leader.

    In that thread `before_commit` is called before a checkpoint appears, and `on_saved` gets a
    record of it once it is complete.
    """

    def __init__(
        self,
        run_dir: pathlib.Path,
        *,
        keep: int,
        attempt: str,
        pin: bool = False,
        before_commit: collections.abc.Callable[[], None] = lambda: None,
        on_saved: collections.abc.Callable[[State], None] = lambda _: None,
        place: parts.Place = parts.ALONE,
    ) -> None:
        self.run_dir = run_dir
        self._place = place
        self.keep = keep
        self.attempt = attempt
        self.last: str | None = None  # the newest checkpoint on disk
        # How long each save held up the caller, in `save` and in `before_update`
        self.stall_s: list[float] = []
        self._pin = pin
        self._before_commit = before_commit
        self._on_saved = on_saved
        self._buffer: list[Tensor] = []
        self._copied = threading.Event()
        self._copied.set()
        self._closing = threading.Event()  # an unfinished checkpoint is not waited for
        self._idle = threading.Event()
        self._idle.set()
        self._stream = torch.cuda.Stream() if pin else None
        self._error: Exception | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="saver", daemon=True)
        self._thread.start()
        if place.is_main:
            draft.remove_leftovers(run_dir)

    def prepare(self, live: State) -> None:
        """Allocate and touch the buffer: lacking memory shows now, and the first save is fast."""
        shapes = [(t.shape, t.dtype) for t in tensors.leaves(live)]
        if [(t.shape, t.dtype) for t in self._buffer] != shapes:
            self._buffer = [
                torch.zeros(shape, dtype=dtype, pin_memory=self._pin) for shape, dtype in shapes
            ]

    def save(self, name: str, live: State, meta: State, *, is_best: bool = False) -> None:
        """Begin to copy the state and return; the checkpoint `name` appears some time later.

        The state must not change until `before_update` returns; forward and backward passes may go
        on. Waits for an earlier save that is not on disk yet, and raises its error.
        """
        began = time.perf_counter()
        if not self._idle.is_set():
            what = "waiting: the checkpoint before is still being written"
            log.emit("CKPT", what, checkpoint=name)
        self.wait()
        self.prepare(live)
        self._idle.clear()
        self._copied.clear()
        computed = torch.cuda.current_stream().record_event() if self._stream else None
        self.stall_s.append(time.perf_counter() - began)  # before the writing thread may ask for it
        self._jobs.put(_Job(name, live, meta, is_best, began, computed))

    def before_update(self) -> None:
        """Return when the last save has its copy. Call it before each update."""
        if not self._copied.is_set():
            began = time.perf_counter()
            self._copied.wait()
            self.stall_s[-1] += time.perf_counter() - began

    def check(self) -> None:
        """Raise the error that the writing thread met."""
        if self._error is None:
            return
        reason = str(self._error)
        if isinstance(self._error, OSError):
            reason = files.explain(self._error)
        what = f"a checkpoint could not be written: {reason}"
        raise stored.CheckpointError(what) from self._error

    def wait(self) -> None:
        """Return when everything is on disk. Raises the error that the writing thread met."""
        self._idle.wait()
        self.check()

    def close(self) -> None:
        """Finish the writing and end the thread.

        Raises nothing, because it also runs on the way out of a failure.
        """
        self._closing.set()
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        if self._stream is not None:
            # Waiting in a new thread would otherwise wake GPU 0
            torch.cuda.set_device(self._stream.device)
        while (job := self._jobs.get()) is not None:
            try:
                self._copy(job)
                self._copied.set()
                self._write(job)
            except Exception as e:  # any: it would be lost here, so check() raises it in the loop
                self._error = e
            finally:
                self._copied.set()
                self._idle.set()

    def _copy(self, job: _Job) -> None:
        pairs = zip(self._buffer, tensors.leaves(job.state), strict=True)
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(job.computed)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._stream.synchronize()

    def _write(self, job: _Job) -> None:
        state = tensors.replaced(job.state, iter(self._buffer))
        if not self._place.is_main:
            name = parts.name_of(job.name, self._place.site)
            with draft.Draft(self.run_dir, name, self.attempt) as made:
                made.add_dcp(state)
                made.commit({**job.meta, "attempt": self.attempt})
            return

        with draft.Draft(self.run_dir, job.name, self.attempt) as made:
            made.add_dcp(state)
            for site in range(1, self._place.count):
                parts.adopt(made, job.name, site, self.attempt, self._closing)
            self._before_commit()
            path = made.commit(job.meta)
        draft.settle(self.run_dir, path, is_best=job.is_best, keep=self.keep)
        self.last = str(path)
        figures = {
            "step": job.meta["step"],
            "stall_s": self.stall_s[-1],
            "seconds": time.perf_counter() - job.began,
        }
        self._on_saved({"kind": "checkpoint", "time": time.time(), "name": job.name, **figures})
        log.emit(
            "CKPT",
            saved=job.name,
            **figures,
            mib=made.size_bytes / 2**20,
            best=job.is_best or None,
        )

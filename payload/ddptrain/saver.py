"""Checkpoints written while training goes on.

The training loop only waits while tensors are copied into one of two persistent host buffers; a thread writes them out.
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

from ddptrain import checkpoint, errors, files, markers

NUM_BUFFERS = 2

State = dict[str, typing.Any]  # nested; its leaves are tensors


@dataclasses.dataclass
class _Slot:
    """A persistent copy of the state in host memory."""

    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    free: threading.Event = dataclasses.field(default_factory=threading.Event)
    copied: threading.Event = dataclasses.field(default_factory=threading.Event)
    ready: typing.Any = None  # a CUDA event: the copies from the GPU have landed


@dataclasses.dataclass(frozen=True)
class _Job:
    slot: _Slot
    name: str
    state: State  # the slot's tensors, by name
    meta: State
    rngs: list[State]
    is_best: bool
    began: float
    number: int  # of the save, from 0


class Saver:
    """Writes checkpoints of a run from a thread. Rank 0 alone has one.

    `on_saved` gets a record of each checkpoint once it is complete, in that thread.
    """

    def __init__(
        self,
        run_dir: pathlib.Path,
        *,
        keep: int,
        attempt: str,
        pin: bool = False,
        on_saved: collections.abc.Callable[[State], None] = lambda _: None,
    ) -> None:
        if keep < 2:
            text = f"--keep-checkpoints {keep}: must be at least 2, or a crash while saving could leave none"
            raise errors.UserError(text)
        self.run_dir, self.keep, self.attempt, self._pin, self._on_saved = run_dir, keep, attempt, pin, on_saved
        self.last: str | None = None  # the newest checkpoint on disk
        self.stall_s: list[float] = []  # how long each save held up the caller, in `save` and in `before_update`
        self._slots = [_Slot() for _ in range(NUM_BUFFERS)]
        for slot in self._slots:
            slot.free.set()
        self._stream = torch.cuda.Stream() if pin else None
        self._fence: typing.Any = None
        self._copying: _Slot | None = None
        self._error: Exception | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="saver", daemon=True)
        self._thread.start()
        checkpoint.remove_leftovers(run_dir)

    def prepare(self, state: State) -> None:
        """Allocate the buffers: a lack of memory shows at the start, and the first save is as quick as the rest."""
        for slot in self._slots:
            self._fit(slot, state)

    def save(self, name: str, state: State, meta: State, rngs: list[State], *, is_best: bool = False) -> None:
        """Begin to copy the state and return; the checkpoint `name` appears some time later.

        The state must stay as it is until `before_update` returns: forward and backward passes may go on meanwhile.
        Raises the error that an earlier save met.
        """
        began = time.perf_counter()
        self.before_update()
        self.check()
        slot = self._slots[len(self.stall_s) % NUM_BUFFERS]
        if not slot.free.is_set():
            markers.emit("CKPT", "waiting: both buffers are still being written", checkpoint=name)
            slot.free.wait()
            self.check()
        slot.free.clear()
        self._fit(slot, state)
        pairs = list(zip(slot.tensors, tensors(state), strict=True))
        if self._stream is None:
            slot.copied.clear()
            self._copying = slot
            threading.Thread(target=self._copy, args=(slot, pairs), name="copier", daemon=True).start()
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                slot.ready = torch.cuda.Event()
                slot.ready.record(self._stream)
            slot.copied.set()
            self._fence = slot.ready
        number, copies = len(self.stall_s), _with(state, iter(slot.tensors))
        self.stall_s.append(time.perf_counter() - began)  # before the writing thread may ask for it
        self._jobs.put(_Job(slot, name, copies, meta, rngs, is_best, began, number))

    def before_update(self) -> None:
        """Return when the last save has its copy; a GPU only queues a wait. Call it before each update."""
        if self._copying is not None:
            began = time.perf_counter()
            self._copying.copied.wait()
            self._copying = None
            self.stall_s[-1] += time.perf_counter() - began
        if self._fence is not None:
            torch.cuda.current_stream().wait_event(self._fence)
            self._fence = None

    def check(self) -> None:
        """Raise the error that the writing thread met."""
        if self._error is not None:
            reason = files.explain(self._error) if isinstance(self._error, OSError) else str(self._error)
            raise checkpoint.CheckpointError(f"a checkpoint could not be written: {reason}") from self._error

    def wait(self) -> None:
        """Return when everything is on disk. Raises the error that the writing thread met."""
        for slot in self._slots:
            slot.free.wait()
        self.check()

    def close(self) -> None:
        """Finish the writing and end the thread. Raises nothing: it also runs on the way out of a failure."""
        self._jobs.put(None)
        self._thread.join()

    def _fit(self, slot: _Slot, state: State) -> None:
        """Give the slot buffers of the state's shapes, touched once so that the memory is really there."""
        sources = tensors(state)
        if [(t.shape, t.dtype) for t in slot.tensors] != [(t.shape, t.dtype) for t in sources]:
            try:
                slot.tensors = [torch.zeros(t.shape, dtype=t.dtype, pin_memory=self._pin) for t in sources]
            except RuntimeError as e:
                size = sum(t.nbytes for t in sources)
                text = f"no memory for checkpoint buffers of {NUM_BUFFERS} x {size >> 20} MiB; give the job more --mem"
                raise errors.UserError(text) from e

    def _copy(self, slot: _Slot, pairs: list[tuple[Tensor, Tensor]]) -> None:
        try:
            for target, source in pairs:
                target.copy_(source)
        except Exception as e:  # a thread's would be lost, whatever it is: check() raises it in the training loop
            self._error = e
        finally:
            slot.copied.set()

    def _work(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)  # waiting in a new thread would otherwise wake GPU 0
        while (job := self._jobs.get()) is not None:
            try:
                job.slot.copied.wait()
                if self._error is not None:
                    continue
                if job.slot.ready is not None:
                    job.slot.ready.synchronize()
                self._write(job)
            except Exception as e:  # whatever it is: the thread goes on to free the buffers, check() raises it
                self._error = e
            finally:
                job.slot.free.set()

    def _write(self, job: _Job) -> None:
        size = sum(tensor.nbytes for tensor in job.slot.tensors)
        with checkpoint.Draft(self.run_dir, job.name, self.attempt) as draft, draft.room_for(size):
            draft.add_dcp(job.state)
            draft.add(checkpoint.RANDOM, job.rngs)
            path = draft.commit(job.meta)
        checkpoint.settle(self.run_dir, path, is_best=job.is_best, keep=self.keep)
        self.last = str(path)
        seconds = time.perf_counter() - job.began
        figures = {"step": job.meta["step"], "stall_s": self.stall_s[job.number], "seconds": seconds}
        self._on_saved({"kind": "checkpoint", "time": time.time(), "name": job.name, **figures})
        markers.emit("CKPT", saved=job.name, **figures, mib=draft.size_bytes / 2**20, best=job.is_best or None)


def tensors(tree: State) -> list[Tensor]:
    """Return the tensors of nested dictionaries, in order."""
    return [t for value in tree.values() for t in (tensors(value) if isinstance(value, dict) else [value.detach()])]


def _with(tree: State, copies: collections.abc.Iterator[Tensor]) -> State:
    return {key: _with(value, copies) if isinstance(value, dict) else next(copies) for key, value in tree.items()}

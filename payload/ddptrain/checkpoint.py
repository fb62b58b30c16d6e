"""Checkpoints that are whole or absent, written while training goes on.

    epoch-0003.tmp-<attempt>/        everything is written, synced and counted here ...
    epoch-0003/                      ... and appears under this name by one rename
        rank-0000/model.pt optimizer.pt
        rng.pt                       the list of all ranks' random states
        manifest.json                step, settings, and size and CRC-32 of every file
    latest -> epoch-0003   best -> epoch-0002

Ranks hold the same model, so rank 0 writes, for all: one writer is one commit, with nothing to agree upon. The
training loop only waits while tensors are copied into one of two persistent host buffers; a thread writes them out.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import queue
import random
import shutil
import threading
import time
import typing
import uuid
import zlib

import numpy as np
import torch
from torch import Tensor, nn

from ddptrain import distributed, errors, files, markers

FORMAT = 1
MANIFEST, RANDOM = "manifest.json", "rng.pt"
LATEST, BEST = "latest", "best"
NUM_BUFFERS = 2
_TMP, _TRASH = ".tmp-", ".trash-"
_PATTERNS = ("epoch-*", "checkpoint-*")  # the latter are those of transformers' Trainer, see resume.py

State = dict[str, typing.Any]


class CheckpointError(errors.UserError):
    """A checkpoint is not whole; the text names the file."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was verified."""

    path: pathlib.Path
    meta: State

    @property
    def step(self) -> int:
        """Return the number of optimiser steps it has behind it."""
        return int(self.meta["step"])


def name_of(epoch: int, step: int, *, ends_epoch: bool) -> str:
    """Return a checkpoint's folder name."""
    return f"epoch-{epoch:04d}" if ends_epoch else f"epoch-{epoch:04d}-step-{step:06d}"


def random_states() -> State:
    """Return the states of every random number generator of this process, as plain values and tensors."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: State = {
        "python": [version, list(words), gauss],
        "numpy": [
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_states(state: State) -> None:
    """Set every random number generator of this process."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# --- reading ---------------------------------------------------------------------------------------------------------


def verify(path: pathlib.Path, *, contents: bool = True) -> Checkpoint:
    """Return a checkpoint whose files were all checked. Raises CheckpointError naming the first bad one."""
    manifest_path = path / MANIFEST
    try:
        manifest = files.retried(lambda: files.read_json(manifest_path))
        listed = manifest["files"]
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{manifest_path} has format {manifest['format']}, this program reads {FORMAT}")
        if manifest["crc32"] != _manifest_crc32(manifest):
            raise CheckpointError(f"{manifest_path} is corrupted: its CRC-32 does not match")
        for entry in listed:
            file = path / entry["file"]
            if not file.is_file():
                raise CheckpointError(f"{file} is missing")
            if (size := file.stat().st_size) != entry["bytes"]:
                raise CheckpointError(f"{file} has {size} bytes, the manifest says {entry['bytes']}")
            if contents and files.retried(lambda file=file: files.crc32(file)) != entry["crc32"]:
                raise CheckpointError(f"{file} is corrupted: its CRC-32 is not the manifest's")
        return Checkpoint(path, manifest["meta"])
    except FileNotFoundError as e:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}") from e
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{manifest_path} cannot be read: {e}") from e


def candidates(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Return the checkpoints of a run, `latest` first, then the newest first; nothing of it is verified."""
    found: list[tuple[int, pathlib.Path]] = []
    for path in (path for pattern in _PATTERNS for path in run_dir.glob(pattern)):
        if _TMP in path.name or _TRASH in path.name or not path.is_dir():
            continue
        try:
            step = int(files.read_json(path / MANIFEST)["meta"]["step"])
        except (OSError, ValueError, KeyError, TypeError):
            step = -1  # still a candidate, so that a damaged one is named
        found.append((step, path))
    found.sort(key=lambda pair: (pair[0], pair[1].name), reverse=True)
    ordered = [path for _, path in found]
    link = run_dir / LATEST
    if link.is_symlink() and (target := run_dir / link.readlink()) in ordered:
        ordered.remove(target)
        ordered.insert(0, target)
    return ordered


def choose(run_dir: pathlib.Path, resume: str) -> Checkpoint | None:
    """Return the checkpoint to go on from: `never` is none, `auto` the run's newest whole one, else the given path.

    Raises CheckpointError when a given one is damaged, or when the run has checkpoints and none is whole.
    """
    if resume == "never":
        return None
    if resume != "auto":
        path = pathlib.Path(resume)
        if not path.is_dir():
            raise errors.UserError(f"--resume {resume}: no such folder; give a run, a checkpoint, auto or never")
        if (path / MANIFEST).exists() or not candidates(path):
            return verify(path)
        run_dir = path
    return newest(run_dir, "start over with --resume never")


def newest(run_dir: pathlib.Path, remedy: str) -> Checkpoint | None:
    """Return the run's newest whole checkpoint. Raises CheckpointError when it has checkpoints and none is whole."""
    refused: list[str] = []
    for path in candidates(run_dir):
        try:
            return verify(path)
        except CheckpointError as e:
            refused.append(str(e))
            markers.warn("CKPT", "skipped a damaged checkpoint", checkpoint=path.name, error=str(e))
    if refused:
        raise CheckpointError(f"no checkpoint in {run_dir} is whole ({refused[0]}); {remedy}")
    return None


def load(path: pathlib.Path, what: str) -> State:
    """Return model.pt or optimizer.pt of a checkpoint, its tensors mapped from the file."""
    return files.retried(
        lambda: torch.load(path / "rank-0000" / f"{what}.pt", map_location="cpu", mmap=True, weights_only=True)
    )


def load_random_states(path: pathlib.Path, ranks: int) -> list[State]:
    """Return each rank's random states. An older checkpoint has a file for each rank."""
    whole = path / RANDOM
    if whole.exists():
        return torch.load(whole, map_location="cpu", weights_only=True)
    return [
        torch.load(path / f"rank-{rank:04d}" / RANDOM, map_location="cpu", weights_only=True) for rank in range(ranks)
    ]


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Slot:
    """A persistent copy of the state in host memory."""

    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    tree: typing.Any = None
    free: threading.Event = dataclasses.field(default_factory=threading.Event)
    copied: threading.Event = dataclasses.field(default_factory=threading.Event)
    ready: typing.Any = None  # a CUDA event: the copies from the GPU have landed


@dataclasses.dataclass(frozen=True)
class _Job:
    slot: _Slot
    name: str
    meta: State
    rngs: list[State]
    is_best: bool
    asked: float
    number: int  # of the save, from 0


class Saver:
    """Writes checkpoints of a run from a thread. Rank 0 alone has one."""

    def __init__(self, run_dir: pathlib.Path, *, keep: int, attempt: str, pin: bool = False) -> None:
        if keep < 2:
            raise errors.UserError(
                f"--keep-checkpoints {keep}: must be at least 2, or a crash while saving could leave none"
            )
        self.run_dir, self.keep, self.attempt, self._pin = run_dir, keep, attempt, pin
        self.last: str | None = None  # the newest one on disk
        self.stall_s: list[float] = []  # how long each save held up the caller, in `save` and in `before_update`
        self.write_s: list[float] = []
        self._slots = [_Slot() for _ in range(NUM_BUFFERS)]
        for slot in self._slots:
            slot.free.set()
        self._next = 0
        self._stream = torch.cuda.Stream() if pin else None
        self._fence: typing.Any = None
        self._copying: _Slot | None = None
        self._error: Exception | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="saver", daemon=True)
        self._thread.start()
        remove_leftovers(run_dir)

    def prepare(self, model: State, optimizer: State) -> None:
        """Allocate the buffers now: want of memory shows at the start, and the first save is as quick as the rest."""
        for slot in self._slots:
            self._fit(slot, {"model": model, "optimizer": optimizer})

    def save(
        self, name: str, model: State, optimizer: State, meta: State, rngs: list[State], *, is_best: bool = False
    ) -> None:
        """Begin to copy the state and return; the checkpoint `name` appears some time later.

        The state must stay as it is until `before_update` returns: forward and backward passes may go on meanwhile.
        Raises what an earlier save met.
        """
        began = time.perf_counter()
        self.before_update()
        self.check()
        slot = self._slots[self._next]
        self._next = (self._next + 1) % NUM_BUFFERS
        if not slot.free.is_set():
            markers.emit("CKPT", "waiting: both buffers are still being written", checkpoint=name)
            slot.free.wait()
            self.check()
        slot.free.clear()
        state = {"model": model, "optimizer": optimizer}
        self._fit(slot, state)
        sources = _distinct(state)
        pairs = list(zip(slot.tensors, sources.values(), strict=True))
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
        copies = dict(zip(sources, slot.tensors, strict=True))
        slot.tree = _mapped(state, lambda tensor: copies[_key(tensor)])
        self.stall_s.append(time.perf_counter() - began)  # before the writing thread may ask for it
        self._jobs.put(_Job(slot, name, meta, rngs, is_best, time.perf_counter(), len(self.stall_s) - 1))

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
        """Raise what the writing thread met."""
        if self._error is not None:
            reason = files.explain(self._error) if isinstance(self._error, OSError) else str(self._error)
            raise CheckpointError(f"a checkpoint could not be written: {reason}") from self._error

    def wait(self) -> None:
        """Return when everything is on disk. Raises what the writing thread met."""
        for slot in self._slots:
            slot.free.wait()
        self.check()

    def close(self) -> None:
        """Finish what is being written and end the thread. Raises nothing: it also runs on the way out of a failure."""
        self._jobs.put(None)
        self._thread.join()

    def _fit(self, slot: _Slot, state: State) -> None:
        """Give the slot buffers of the state's shapes, touched once so that the memory is really there."""
        wanted = [(t.shape, t.dtype) for t in _distinct(state).values()]
        if [(t.shape, t.dtype) for t in slot.tensors] != wanted:
            try:
                slot.tensors = [torch.zeros(shape, dtype=dtype, pin_memory=self._pin) for shape, dtype in wanted]
            except RuntimeError as e:
                size = sum(t.numel() * t.element_size() for t in _distinct(state).values())
                raise errors.UserError(
                    f"no memory for checkpoint buffers of 2 x {size >> 20} MiB; give the job more --mem"
                ) from e

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
        with Draft(self.run_dir, job.name, self.attempt) as draft, draft.room_for(size):
            draft.add("rank-0000/model.pt", job.slot.tree["model"])
            draft.add("rank-0000/optimizer.pt", job.slot.tree["optimizer"])
            draft.add(RANDOM, job.rngs)
            path = draft.commit(job.meta)
        settle(self.run_dir, path, is_best=job.is_best, keep=self.keep)
        self.last = str(path)
        self.write_s.append(time.perf_counter() - job.asked)
        markers.emit(
            "CKPT", saved=job.name, step=job.meta["step"], mib=draft.size_bytes / 2**20,
            stall_s=self.stall_s[job.number], write_s=self.write_s[-1], best=job.is_best or None,
        )  # fmt: skip


class Draft:
    """A checkpoint in the making: files under a name that no reader looks for, until `commit`."""

    def __init__(self, run_dir: pathlib.Path, name: str, attempt: str) -> None:
        self.final = run_dir / name
        self.path = run_dir / f"{name}{_TMP}{attempt}"
        self.size_bytes = 0
        self.listed: list[State] = []  # what goes into the manifest

    def __enter__(self) -> "Draft":
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def room_for(self, size_bytes: int) -> collections.abc.Iterator[None]:
        """Say, when the block finds no room, how much was needed and what there was. Raises CheckpointError then."""
        try:
            yield
        except OSError as e:
            if e.errno not in files.FULL:
                raise
            written = sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())
            free = f", {(files.free_bytes(self.path) + written) >> 20} MiB were free" if e.errno == errno.ENOSPC else ""
            raise CheckpointError(
                f"{self.final}: {e.strerror}: it needs {-(-size_bytes >> 20)} MiB{free}; "
                f"{files.make_room(self.path)}; the checkpoints before it are whole"
            ) from e

    def add(self, name: str, value: object) -> None:
        """Write one file with torch.save, durable and counted."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        with files.naming(path), path.open("wb", buffering=0) as raw:
            counted = _Counted(raw)
            try:
                torch.save(value, counted)  # type: ignore[arg-type]
            except RuntimeError as e:  # torch's own error hides the filesystem's
                raise counted.error or e from e
            os.fsync(raw.fileno())
        self._list(name, counted.size_bytes, counted.crc32)

    def adopt(self, folder: pathlib.Path | None = None) -> None:
        """Sync and count the files that someone else wrote into the draft, or into a folder of it."""
        known = {entry["file"] for entry in self.listed}
        for entry in _entries(self.path, folder or self.path):
            if entry["file"] not in known:
                self._list(entry["file"], entry["bytes"], entry["crc32"])

    def commit(self, meta: State) -> pathlib.Path:
        """Write the manifest and rename the draft to its final name, which is returned."""
        _write_manifest(self.path, meta, self.listed)
        trash = None
        if self.final.exists():  # the same step again, after a crash and a resume from before it
            trash = self.final.with_name(f"{self.final.name}{_TRASH}{uuid.uuid4().hex[:8]}")
            self.final.rename(trash)
        files.retried(lambda: self.path.rename(self.final))
        files.sync_directory(self.final.parent)
        if trash is not None:
            shutil.rmtree(trash, ignore_errors=True)
        return self.final

    def _list(self, name: str, size: int, crc: int) -> None:
        self.listed.append({"file": name, "bytes": size, "crc32": crc})
        self.size_bytes += size


def seal(path: pathlib.Path, meta: State) -> None:
    """Make a checkpoint whole that someone else wrote under its final name: sync its files and write the manifest."""
    (path / MANIFEST).unlink(missing_ok=True)
    _write_manifest(path, meta, _entries(path, path))


def _entries(root: pathlib.Path, folder: pathlib.Path) -> list[State]:
    """Return the manifest's lines for the files below a folder of a checkpoint, once they are on disk."""
    found: list[State] = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with files.naming(path), path.open("rb") as file:
            os.fsync(file.fileno())
        name = str(path.relative_to(root))
        found.append({"file": name, "bytes": path.stat().st_size, "crc32": files.crc32(path)})
    return found


def _write_manifest(path: pathlib.Path, meta: State, listed: list[State]) -> None:
    manifest: State = {"format": FORMAT, "meta": meta, "files": listed}
    manifest["crc32"] = _manifest_crc32(manifest)
    files.write_json(path / MANIFEST, manifest)
    for folder in {inner.parent for inner in path.rglob("*")}:
        files.sync_directory(folder)


def settle(run_dir: pathlib.Path, path: pathlib.Path, *, is_best: bool, keep: int) -> None:
    """Point the links at a new checkpoint and remove those that are neither best nor among the last `keep`."""
    files.replace_link(run_dir / LATEST, path.name)
    if is_best:
        files.replace_link(run_dir / BEST, path.name)
    best = (run_dir / BEST).readlink().name if (run_dir / BEST).is_symlink() else None
    for old in candidates(run_dir)[keep:]:
        if old.name != best:
            trash = old.with_name(f"{old.name}{_TRASH}{uuid.uuid4().hex[:8]}")
            with contextlib.suppress(OSError):  # another attempt, or the user, was quicker
                old.rename(trash)
                shutil.rmtree(trash, ignore_errors=True)


def remove_leftovers(run_dir: pathlib.Path) -> None:
    """Remove what killed attempts left unfinished; one run has one attempt at a time."""
    for pattern in (f"epoch-*{_TMP}*", f"epoch-*{_TRASH}*"):
        for path in run_dir.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def save_dcp(
    run_dir: pathlib.Path, name: str, *, attempt: str, module: nn.Module, optimizer: torch.optim.Optimizer, meta: State,
    rngs: list[State], world: distributed.World, is_best: bool, keep: int,
) -> str:  # fmt: skip
    """Write a checkpoint with torch's distributed one, all ranks together, under the same commit. Returns its path."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    final = run_dir / name
    with contextlib.ExitStack() as stack:
        draft = Draft(run_dir, name, attempt)
        with world.together():
            if world.is_main:
                stack.enter_context(draft)
        model_state, optimizer_state = state_dict.get_state_dict(module, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        size = sum(tensor.nbytes for tensor in _distinct(state).values())
        with world.together(), draft.room_for(size), _plain_errors():
            dcp.save(
                state, checkpoint_id=str(draft.path / "dcp"), process_group=world.control if world.size > 1 else None
            )
        with world.together(), draft.room_for(size):
            if world.is_main:
                draft.add(RANDOM, rngs)
                draft.adopt()
                draft.commit(meta)
                settle(run_dir, final, is_best=is_best, keep=keep)
                markers.emit(
                    "CKPT",
                    saved=name,
                    step=meta["step"],
                    mib=draft.size_bytes / 2**20,
                    format="dcp",
                    best=is_best or None,
                )
    return str(final)


def load_dcp(path: pathlib.Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take over a checkpoint of torch's distributed format; every rank reads."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    model_state, optimizer_state = state_dict.get_state_dict(module, optimizer)
    with _plain_errors():
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(path / "dcp"))
    state_dict.set_state_dict(module, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


@contextlib.contextmanager
def _plain_errors() -> collections.abc.Iterator[None]:
    """Raise what torch's distributed checkpoint met first on any rank, and not its wrapping, a BaseException."""
    from torch.distributed.checkpoint import api

    try:
        yield
    except api.CheckpointException as e:
        first, _ = next(iter(e.failures.values()))
        raise (first if isinstance(first, Exception) else CheckpointError(str(first))) from e


class _Counted:
    """A raw file that knows the size and CRC-32 of what went through it."""

    def __init__(self, raw: typing.Any) -> None:
        self._raw = raw
        self.error: OSError | None = None
        self.size_bytes = 0
        self.crc32 = 0

    def write(self, data: typing.Any) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        done = 0
        try:
            while done < view.nbytes:
                done += self._raw.write(view[done:])
        except OSError as e:
            self.error = e
            raise
        self.size_bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Nothing is held back."""


def _manifest_crc32(manifest: State) -> int:
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _tensors(tree: typing.Any) -> collections.abc.Iterator[Tensor]:
    """Yield the tensors of nested dicts and lists, in order."""
    if isinstance(tree, Tensor):
        yield tree.detach()
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _key(tensor: Tensor) -> tuple[object, ...]:
    """Identify a tensor by its memory; tied weights are one."""
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.dtype


def _distinct(tree: typing.Any) -> dict[tuple[object, ...], Tensor]:
    """Return the tensors of a tree, tied ones once."""
    return {_key(tensor): tensor for tensor in _tensors(tree)}


def _mapped(tree: typing.Any, change: collections.abc.Callable[[Tensor], Tensor]) -> typing.Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_mapped(value, change) for value in tree]
    return tree

"""Checkpoints that are whole or absent.

    epoch-0003.tmp-<attempt>/        everything is written, synced and counted here ...
    epoch-0003/                      ... and appears under this name by one rename
        dcp/                         weights and moments, in the format of torch.distributed.checkpoint
        manifest.json                step, settings, and size and CRC-32 of every file
    latest -> epoch-0003   best -> epoch-0002

Ranks hold the same model, so rank 0 writes, for all: one writer is one commit, with nothing to agree upon (saver.py).
Checkpoints of slurm-ddp 0.1 before November 2026 have `rank-0000/model.pt` and `optimizer.pt` instead of `dcp/`.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import dataclasses
import errno
import functools
import io
import json
import os
import pathlib
import shutil
import typing
import uuid
import warnings
import zlib

import torch
from torch import nn

from ddptrain.ground import errors, files, log

FORMAT = 1
DCP = "dcp"  # the folder of weights and moments, and the name of their format
MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
_TMP, _TRASH = ".tmp-", ".trash-"
_AWAY = errors.OF_FILESYSTEM - {errno.EIO}  # proves no damage; EIO may
_PATTERNS = (
    "epoch-*",
    "checkpoint-*",
)  # the latter are those of transformers' Trainer, see resume.py

State = dict[str, typing.Any]


class CheckpointError(errors.UserError):
    """A checkpoint is damaged; the text names the file."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was verified."""

    path: pathlib.Path
    meta: State

    @property
    def step(self) -> int:
        """Return the number of optimiser steps behind it."""
        return int(self.meta["step"])


def name_of(epoch: int, step: int, *, ends_epoch: bool) -> str:
    """Return a checkpoint's folder name."""
    return f"epoch-{epoch:04d}" if ends_epoch else f"epoch-{epoch:04d}-step-{step:06d}"


def verify(path: pathlib.Path) -> Checkpoint:
    """Return a checkpoint whose files were all checked. Raises CheckpointError naming the first bad one."""
    manifest_path = path / MANIFEST
    try:
        manifest = files.retried(lambda: files.read_json(manifest_path))
        listed = manifest["files"]
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{manifest_path} has format {manifest['format']}, this program reads {FORMAT}"
            )
        if manifest["crc32"] != _manifest_crc32(manifest):
            raise CheckpointError(f"{manifest_path} is corrupted: its CRC-32 does not match")
        for entry in listed:
            file = path / entry["file"]
            if not file.is_file():
                raise CheckpointError(f"{file} is missing")
            if (size := file.stat().st_size) != entry["bytes"]:
                raise CheckpointError(
                    f"{file} has {size} bytes, the manifest says {entry['bytes']}"
                )
            if files.retried(lambda file=file: files.crc32(file)) != entry["crc32"]:
                raise CheckpointError(f"{file} is corrupted: its CRC-32 is not the manifest's")
        return Checkpoint(path, manifest["meta"])
    except FileNotFoundError as e:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}") from e
    except (OSError, ValueError, KeyError, TypeError) as e:
        if isinstance(e, OSError) and e.errno in _AWAY:
            e.filename = e.filename or str(path)
            raise
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
    """Return the checkpoint to go on from: by `never` none, by `auto` the newest whole one. Raises CheckpointError."""
    if resume == "never":
        return None
    if resume != "auto":
        path = pathlib.Path(resume)
        if not path.is_dir():
            raise errors.UserError(
                f"--resume {resume}: no such folder; give a run, a checkpoint, auto or never"
            )
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
            log.warn("CKPT", "skipped a damaged checkpoint", checkpoint=path.name, error=str(e))
    if refused:
        raise CheckpointError(f"no checkpoint in {run_dir} is whole ({refused[0]}); {remedy}")
    return None


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the live tensors of a model and its optimiser, as they are saved; tied weights appear once.

    The names are those of torch.distributed.checkpoint.state_dict.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    weights: dict[typing.Any, State] = {}
    for name, tensor in module.state_dict().items():  # tied ones share their memory
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape
        weights.setdefault(place, {name: tensor})
    moments = {
        names[p]: optimizer.state[p] for group in optimizer.param_groups for p in group["params"]
    }
    return {
        "model": {name: tensor for one in weights.values() for name, tensor in one.items()},
        "optimizer": {"state": moments},
    }


def read_into(path: pathlib.Path, state: State) -> None:
    """Copy a checkpoint's tensors into those of `state`; other processes are not needed."""
    from torch.distributed import checkpoint as dcp

    with _plain_errors():
        files.retried(lambda: dcp.load(state, checkpoint_id=str(path / DCP), no_dist=True))


def restore(found: Checkpoint, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a model and its optimiser, which has its state tensors already, the values of a checkpoint.

    Learning rate, decay and the like stay as they are set.
    """
    if found.meta["format"] == DCP:
        read_into(found.path, state_of(module, optimizer))
        return
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for what, part in (("model", module), ("optimizer", optimizer)):
        path = found.path / "rank-0000" / f"{what}.pt"
        load = functools.partial(torch.load, path, map_location="cpu", mmap=True, weights_only=True)
        part.load_state_dict(files.retried(load))
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(settings)


@contextlib.contextmanager
def _plain_errors(
    opened: collections.abc.Sequence["Counted"] = (),
) -> collections.abc.Iterator[None]:
    """Raise what torch's distributed checkpoint met, and not its wrapping, a BaseException, nor torch.save's."""
    from torch.distributed.checkpoint import api

    warnings.filterwarnings(
        "ignore", "torch.distributed is disabled, unavailable", UserWarning
    )  # of no_dist, too
    try:
        yield
    except api.CheckpointException as e:
        first, _ = next(iter(e.failures.values()))
        refused = next((file.error for file in opened if file.error), first)
        raise (refused if isinstance(refused, Exception) else CheckpointError(str(refused))) from e


class Counted(io.FileIO):
    """A new file that knows the size and CRC-32 of its contents, so that the manifest needs no second look at them."""

    error: OSError | None = None  # torch.save raises another in its place
    size_bytes = crc32 = 0

    def write(self, data: typing.Any) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        done = 0
        try:
            while done < view.nbytes:
                done += super().write(view[done:]) or 0
        except OSError as e:
            e.filename = str(self.name)
            self.error = e
            raise
        self.size_bytes += done
        return done


class Draft:
    """A checkpoint in the making: files under a name that no reader looks for, until `commit`."""

    def __init__(self, run_dir: pathlib.Path, name: str, attempt: str) -> None:
        self.final = run_dir / name
        self.path = run_dir / f"{name}{_TMP}{attempt}"
        self.listed: list[State] = []  # the manifest's lines

    @property
    def size_bytes(self) -> int:
        """Return the size of the files so far."""
        return sum(entry["bytes"] for entry in self.listed)

    def __enter__(self) -> "Draft":
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def add_dcp(self, state: State) -> None:
        """Write tensors in host memory in torch's distributed format, durable and counted."""
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint import filesystem

        opened: list[Counted] = []

        class Counting(filesystem.FileSystem):
            @contextlib.contextmanager
            def create_stream(
                self, path: typing.Any, mode: str
            ) -> collections.abc.Generator[typing.Any, None, None]:
                with Counted(path, mode) as file:
                    opened.append(file)
                    yield file

        writer = dcp.FileSystemWriter(self.path / DCP)
        writer.fs = Counting()
        with _plain_errors(opened):
            dcp.save(state, storage_writer=writer, no_dist=True)
        for file in opened:
            name = pathlib.Path(file.name).name.removesuffix(".tmp")
            self.listed.append(
                {"file": f"{DCP}/{name}", "bytes": file.size_bytes, "crc32": file.crc32}
            )

    def adopt(self, folder: pathlib.Path) -> None:
        """Sync and count the files that someone else wrote into a folder of the draft."""
        self.listed += _entries(self.path, folder)

    def commit(self, meta: State) -> pathlib.Path:
        """Write the manifest and rename the draft to its final name, which is returned."""
        _write_manifest(self.path, meta, self.listed)
        trash = _trash(self.final)
        if self.final.exists():  # the same step again, after a crash and a resume from before it
            self.final.rename(trash)
        files.retried(lambda: self.path.rename(self.final))
        files.sync_directory(self.final.parent)
        shutil.rmtree(trash, ignore_errors=True)
        return self.final


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
            with contextlib.suppress(OSError):  # another attempt, or the user, was quicker
                shutil.rmtree(old.rename(_trash(old)), ignore_errors=True)


def _trash(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}{_TRASH}{uuid.uuid4().hex[:8]}")


def remove_leftovers(run_dir: pathlib.Path) -> None:
    """Remove what killed attempts left unfinished; one run has one attempt at a time."""
    for pattern in (f"epoch-*{_TMP}*", f"epoch-*{_TRASH}*"):
        for path in run_dir.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _manifest_crc32(manifest: State) -> int:
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())

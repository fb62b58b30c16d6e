"""Checkpoints in a run's folder: found, verified, chosen to go on from."""

import dataclasses
import errno
import json
import pathlib
import typing
import zlib

from ddptrain.ground import errors, files, log

FORMAT = 1
MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
TMP, TRASH = ".tmp-", ".trash-"
_AWAY = errors.OF_FILESYSTEM - {errno.EIO}  # proves no damage; EIO may
_PATTERNS = ("epoch-*", "checkpoint-*")  # the latter are transformers' (see resume.py)

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
    """Return a checkpoint after a check of all files.

    Raises CheckpointError, which names the first bad one.
    """
    manifest_path = path / MANIFEST
    try:
        manifest = files.retried(lambda: files.read_json(manifest_path))
        listed = manifest["files"]
        if manifest["format"] != FORMAT:
            what = f"has format {manifest['format']}, this program reads {FORMAT}"
            raise CheckpointError(f"{manifest_path} {what}")
        if manifest["crc32"] != manifest_crc32(manifest):
            raise CheckpointError(f"{manifest_path} is corrupted: its CRC-32 does not match")
        for entry in listed:
            _verify_file(path, entry)
        return Checkpoint(path, manifest["meta"])
    except FileNotFoundError as e:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}") from e
    except (OSError, ValueError, KeyError, TypeError) as e:
        if isinstance(e, OSError) and e.errno in _AWAY:
            e.filename = e.filename or str(path)
            raise
        raise CheckpointError(f"{manifest_path} cannot be read: {e}") from e


def _verify_file(path: pathlib.Path, entry: State) -> None:
    file = path / entry["file"]
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(f"{file} has {size} bytes, the manifest says {entry['bytes']}")
    if files.retried(lambda: files.crc32(file)) != entry["crc32"]:
        raise CheckpointError(f"{file} is corrupted: its CRC-32 is not the manifest's")


def candidates(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Return a run's checkpoints, not verified: `latest` first, then the newest first."""
    found: list[tuple[int, pathlib.Path]] = []
    for pattern in _PATTERNS:
        for path in run_dir.glob(pattern):
            is_left = TMP in path.name or TRASH in path.name
            if path.is_dir() and not is_left:
                found.append((_step_of(path), path))
    found.sort(key=lambda pair: (pair[0], pair[1].name), reverse=True)
    ordered = [path for _, path in found]

    link = run_dir / LATEST
    target = run_dir / link.readlink() if link.is_symlink() else None
    if target in ordered:
        ordered.remove(target)
        ordered.insert(0, target)
    return ordered


def best_name(run_dir: pathlib.Path, newest_path: pathlib.Path) -> str:
    """Return the name of a run's best checkpoint: by its link, or by the newest one's manifest."""
    link = run_dir / BEST
    if link.is_symlink():
        return link.readlink().name
    try:
        step = files.read_json(newest_path / MANIFEST)["meta"]["progress"]["best_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    for path in candidates(run_dir):
        if step is not None and _step_of(path) == step:
            return path.name
    return ""


def _step_of(path: pathlib.Path) -> int:
    """Return a checkpoint's step, or -1 for a damaged one, which stays a candidate to be named."""
    try:
        return int(files.read_json(path / MANIFEST)["meta"]["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def choose(run_dir: pathlib.Path, resume: str) -> Checkpoint | None:
    """Return the checkpoint to continue from: `never` means none, `auto` the newest whole one.

    Raises CheckpointError.
    """
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
    """Return the run's newest whole checkpoint.

    Raises CheckpointError if it has checkpoints and none of them is whole.
    """
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


def manifest_crc32(manifest: State) -> int:
    """Return the CRC-32 of a manifest's other entries."""
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())

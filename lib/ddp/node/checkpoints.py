"""The newest checkpoint of a run, as its writers leave it (payload/ddptrain/checkpoint)."""

import contextlib
import pathlib
import typing

from ddp.node import small_files

LATEST, BEST = "latest", "best"
MANIFEST = "manifest.json"
_UNFINISHED = (".tmp-", ".trash-")
_PATTERNS = ("epoch-*", "checkpoint-*")


def newest(run_dir: pathlib.Path) -> pathlib.Path | None:
    """Return the checkpoint that `latest` names, or without it the one of the last step.

    A filesystem without symbolic links has no `latest`. Raises OSError if it cannot be looked at.
    """
    link = run_dir / LATEST
    with contextlib.suppress(FileNotFoundError):
        link.stat()
        return run_dir / link.readlink().name if link.is_symlink() else link

    found = complete(run_dir)
    return found[-1] if found else None


def complete(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """List the checkpoints with a manifest, the one of the first step first."""
    found: list[tuple[int, str, pathlib.Path]] = []
    for pattern in _PATTERNS:
        for path in run_dir.glob(pattern):
            step = meta(path).get("step")
            if isinstance(step, int):
                found.append((step, path.name, path))
    return [path for _, _, path in sorted(found)]


def unfinished(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """List the remains of checkpoints that killed attempts were writing or removing."""
    found: list[pathlib.Path] = []
    for pattern in _PATTERNS:
        for path in run_dir.glob(pattern):
            if any(mark in path.name for mark in _UNFINISHED):
                found.append(path)
    return found


def best(run_dir: pathlib.Path) -> pathlib.Path | None:
    """Return the checkpoint that `best` names, or without it the newest one's manifest."""
    link = run_dir / BEST
    if link.is_symlink():
        return run_dir / link.readlink().name
    last = newest(run_dir)
    progress = _object(meta(last).get("progress")) if last is not None else {}
    step = progress.get("best_step")
    if step is None:
        return None
    for path in run_dir.glob("epoch-*"):
        if meta(path).get("step") == step:
            return path
    return None


def meta(path: pathlib.Path) -> small_files.Json:
    """Read the facts in a checkpoint's manifest; {} if it has none, or is unfinished."""
    if any(mark in path.name for mark in _UNFINISHED):
        return {}
    with contextlib.suppress(OSError, ValueError):
        manifest = small_files.read_object(path / MANIFEST)
        return _object(manifest.get("meta")) or manifest
    return {}


def _object(value: object) -> small_files.Json:
    return typing.cast(small_files.Json, value) if isinstance(value, dict) else {}

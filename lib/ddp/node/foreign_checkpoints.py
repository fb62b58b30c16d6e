"""The checkpoints that other programs than the payload leave below some folders."""

import os
import pathlib
import re
import typing

MAX_DEPTH = 8  # of folders: project, outputs, Hydra's date and time, lightning_logs, version
MAX_FOLDERS = 20_000
_NO_FOLDERS = frozenset(("__pycache__", "wandb", "mlruns", ".git"))
_OURS_AT_THE_TOP = frozenset(("control", "logs", "program", "profile"))
_OURS = "manifest.json"

# A folder of such a name with this file in it is a checkpoint; the writer leaves the file last, or
# nearly so: transformers/trainer.py (_save_checkpoint), torch/distributed/checkpoint/filesystem.py
# (finish), which torchtitan, Megatron and FSDP write by, accelerate/checkpointing.py
# (save_accelerator_state), deepspeed/runtime/engine.py (save_checkpoint). Sources of November 2026.
_FOLDERS = (
    (re.compile(r"checkpoint-\d+"), "trainer_state.json"),
    (re.compile(r".*"), ".metadata"),
    (re.compile(r".*"), "random_states_0.pkl"),
    (re.compile(r"global_step\d+"), "mp_rank_00_model_states.pt"),
)
# A file that is a checkpoint: Lightning's, and what programs with torch.save call theirs
_FILE = re.compile(r".*\.ckpt|.*(ckpt|checkpoint).*\.(pt|pth|safetensors)", re.IGNORECASE)


class ForeignCheckpoint(typing.NamedTuple):
    """A checkpoint: a folder, or a single file."""

    path: pathlib.Path
    marker: pathlib.Path  # the file that identified it
    changed: float  # when that was written, in seconds since 1970


def find(places: list[str]) -> list[ForeignCheckpoint]:
    """List the checkpoints below these folders, the oldest first; links are not followed."""
    found: dict[pathlib.Path, ForeignCheckpoint] = {}
    for place in places:
        for one in _walk(place):
            found[one.path] = one
    return sorted(found.values(), key=lambda one: (one.changed, one.path))


def _walk(place: str) -> typing.Iterator[ForeignCheckpoint]:
    num_folders = 0
    for folder, inner, names in os.walk(place):
        num_folders += 1
        if num_folders > MAX_FOLDERS:
            return
        marker = _marker(os.path.basename(folder), names)
        is_whole = bool(marker) or _OURS in names
        depth = os.path.relpath(folder, place).count(os.sep)
        left_out = _NO_FOLDERS | _OURS_AT_THE_TOP if folder == place else _NO_FOLDERS
        kept = [name for name in inner if name not in left_out]
        inner[:] = [] if is_whole or depth >= MAX_DEPTH else kept
        if marker and folder != place:
            yield from _stated(folder, marker)
        if is_whole:
            continue
        for name in filter(_FILE.fullmatch, names):
            yield from _stated(os.path.join(folder, name), "")


def _marker(folder: str, names: list[str]) -> str:
    """Return the file that makes a folder a checkpoint, or ""."""
    for pattern, name in _FOLDERS:
        if name in names and pattern.fullmatch(folder):
            return name
    return ""


def _stated(path: str, marker: str) -> typing.Iterator[ForeignCheckpoint]:
    """Yield a checkpoint unless it has just vanished, or is a link."""
    file = os.path.join(path, marker) if marker else path
    try:
        about = os.lstat(file)
    except OSError:
        return
    if not os.path.islink(file):
        yield ForeignCheckpoint(pathlib.Path(path), pathlib.Path(file), about.st_mtime)

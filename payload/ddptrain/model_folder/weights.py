"""The weights in a model's folder, judged by their headers and sizes. Standard library only.

The format of safetensors is in its README, section "Format":
https://github.com/huggingface/safetensors
"""

import collections.abc
import math
import pathlib
import typing
import zipfile

from ddptrain.ground import errors
from ddptrain.model_folder import saved_files

Shapes = dict[str, tuple[int, ...]]  # of each tensor by its name

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# In transformers' order (modeling_utils.py, _get_resolved_checkpoint_files)
_NAMES = (_WHOLE[0], _INDEXES[0], _WHOLE[1], _INDEXES[1])
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


def check(folder: pathlib.Path) -> Shapes:
    """Check the weights that transformers reads from a folder, and return the shapes it can know.

    Raises UserError.
    """
    for name in _NAMES:
        path = folder / name
        if path.exists() or path.is_symlink():
            return _check_sharded(path) if name in _INDEXES else _check_file(path)
    raise errors.UserError(f"{folder} holds no weights that transformers reads; {_remedy(folder)}")


def _remedy(folder: pathlib.Path) -> str:
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if found:
        return f"{found[0]} is for llama.cpp: download the model that it was made from"
    return f"download {_WHOLE[0]}, or {_INDEXES[0]} and the files that it lists"


def _check_file(path: pathlib.Path) -> Shapes:
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    _check_zip(path)
    return {}


def _check_sharded(index: pathlib.Path) -> Shapes:
    """Check the files that an index lists, and that each holds the tensors that it should."""
    content = saved_files.parse(index, saved_files.read(index))
    listed = content.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        saved_files.refuse(index, "lists no weights: it has no weight_map")

    names_in: dict[str, set[str]] = {}
    for tensor, name in typing.cast(dict[str, object], listed).items():
        if not isinstance(name, str) or "/" in name:
            saved_files.refuse(index, f"lists {tensor} in a file without a name")
        names_in.setdefault(name, set()).add(tensor)

    shapes: Shapes = {}
    for name, expected in sorted(names_in.items()):
        path = index.parent / name
        found = _check_file(path)
        if found and found.keys() != expected:
            other = sorted(found.keys() ^ expected)[0]
            what = f"does not hold the tensors that {index.name} lists, such as {other}"
            saved_files.refuse(path, what)
        shapes |= found
    return shapes


def _read_safetensors(path: pathlib.Path) -> Shapes:
    """Return the shapes in a safetensors file. Raises UserError unless it has its full length."""
    start = saved_files.read_start(path)
    size = path.stat().st_size
    header_bytes = int.from_bytes(start[:8], "little")
    if header_bytes > _MOST_HEADER_BYTES or start[8:9] not in (b"{", b""):
        saved_files.refuse(path, "is not a safetensors file")
    if size < 8 + header_bytes:
        saved_files.refuse(path, "is cut short: it ends within its header")

    with path.open("rb") as file:
        file.seek(8)
        header = saved_files.parse(path, file.read(header_bytes))
    header.pop("__metadata__", None)
    try:
        shapes, end = _described(header)
    except (KeyError, TypeError, ValueError) as e:
        saved_files.refuse(path, f"has a damaged header ({type(e).__name__}: {e})")

    whole = 8 + header_bytes + end
    if size < whole:
        saved_files.refuse(path, f"is cut short: it has {size} of {whole} bytes")
    if size > whole:
        saved_files.refuse(path, f"has {size} bytes, but its header describes {whole}")
    return shapes


def _described(header: collections.abc.Mapping[str, typing.Any]) -> tuple[Shapes, int]:
    """Return the shapes that a header describes, and the end of the last tensor.

    Raises KeyError, TypeError or ValueError if it contradicts itself.
    """
    shapes: Shapes = {}
    places: list[tuple[int, int]] = []
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        shape = tuple(int(length) for length in tensor["shape"])
        bits = _BITS.get(tensor["dtype"])
        if bits is not None and math.prod(shape) * bits != 8 * (end - begin):
            raise ValueError(f"the size of {name} is not that of its shape")
        shapes[name] = shape
        places.append((begin, end))

    at = 0
    for begin, end in sorted(places):
        if begin != at:
            raise ValueError("its tensors have gaps")
        at = end
    return shapes, at


def _check_zip(path: pathlib.Path) -> None:
    """Check that torch.save's file is whole; the format before torch 1.6, a pickle, is torch's."""
    start = saved_files.read_start(path)
    if start.startswith(b"\x80"):
        return
    if not start.startswith(b"PK"):
        saved_files.refuse(path, "is not a file of torch.save")
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        saved_files.refuse(path, "is cut short or damaged")
    if not any(name.endswith("/data.pkl") for name in names):
        saved_files.refuse(path, "is not a file of torch.save")

"""One file of a model's folder: whole, or refused in one line that names it.

Standard library only: it also runs on the submitting host.
"""

import json
import pathlib
import re
import typing

from ddptrain.ground import errors

AGAIN = "download it again"
# Left by a clone without Git LFS in place of a large file:
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER = b"version https://git-lfs.github.com/spec/"
_BLOCK = re.compile(r"\{%[-+]?\s*(end)?(if|for|macro|call|filter|block|generation)\b")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


def refuse(path: pathlib.Path, what: str, remedy: str = AGAIN) -> typing.NoReturn:
    """Raise UserError: the file, the problem with it, and the remedy."""
    raise errors.UserError(f"{path} {what}; {remedy}")


def read_start(path: pathlib.Path, size: int = 64) -> bytes:
    """Read the first bytes of a file.

    Raises UserError if it is empty, a Git LFS pointer, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            start = file.read(max(size, len(_POINTER)))
    except OSError as e:
        refuse(path, f"cannot be read: {e.strerror}", "check that it is there and its mode")
    if not start.strip():
        refuse(path, "is empty")
    if start.startswith(_POINTER):
        remedy = f"fetch it with: git -C {path.parent} lfs pull"
        refuse(path, "is a Git LFS pointer, not the file itself", remedy)
    return start


def read(path: pathlib.Path) -> bytes:
    """Read a file of text. Raises UserError as `read_start` does."""
    read_start(path)
    return path.read_bytes()


def parse(path: pathlib.Path, content: bytes) -> dict[str, typing.Any]:
    """Parse a JSON object. Raises UserError."""
    try:
        value = json.loads(content)
    except ValueError as e:
        refuse(path, f"is cut short or damaged ({e})")
    if not isinstance(value, dict):
        refuse(path, "holds no JSON object")
    return typing.cast(dict[str, typing.Any], value)


def kind_of(content: dict[str, typing.Any]) -> str:
    """Return the name of the file that a JSON object is, or "" if that is unclear."""
    keys = content.keys()
    if "weight_map" in keys:
        return "model.safetensors.index.json"
    if {"model", "added_tokens"} <= keys:
        return "tokenizer.json"
    if "model_type" in keys and ("architectures" in keys or "tokenizer_class" not in keys):
        return "config.json"
    if keys & {"tokenizer_class", "added_tokens_decoder"}:
        return "tokenizer_config.json"
    return ""


def check_template(path: pathlib.Path, content: bytes) -> None:
    """Check that a chat template is a template, and is not cut short. Raises UserError."""
    text = _COMMENT.sub("", content.decode(errors="replace"))
    if "{{" not in text and "{%" not in text:
        refuse(path, "is not a chat template")
    num_open = 0
    for match in _BLOCK.finditer(text):
        num_open += -1 if match[1] else 1
    is_cut = text.rfind("{{") > text.rfind("}}") or text.rfind("{%") > text.rfind("%}")
    if is_cut or num_open > 0:
        refuse(path, "is cut short")

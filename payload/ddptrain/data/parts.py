"""The parts of a dataset: one worker makes each in one go, with the same bytes on any host.

A part becomes at most one training and one validation shard, whose names and contents depend on the
part alone, and a note in `parts/` that names its inputs. A part with a valid note is kept.
"""

import collections.abc
import dataclasses
import hashlib
import json
import pathlib
import typing
import zlib

import numpy as np

from ddptrain.data import documents, lessons, names, segments, shards, sources, tokenizers, unread
from ddptrain.ground import errors, files

CODE_VERSION = 4  # raise it when the same text would become other tokens
FOLDER = "parts"

_MILLION = 1_000_000

Note = dict[str, typing.Any]  # of a part: its inputs and its shards
Items = collections.abc.Sequence[sources.Item]


@dataclasses.dataclass(frozen=True)
class Part:
    """The work that one worker does in one go."""

    number: int
    items: tuple[sources.Item, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of the sources, as stored."""
        return total_bytes(self.items)

    def __str__(self) -> str:
        first = self.items[0]
        begin = f" from byte {first.begin}" if first.begin else ""
        more = f" and {len(self.items) - 1} more" if len(self.items) > 1 else ""
        return f"{self.number} ({first.path}{begin}{more})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """All parts, and the settings that make their bytes the same on any host."""

    parts: tuple[Part, ...]
    identity: tokenizers.Identity
    masked: bool
    val_share: float
    has_val_files: bool
    unread: unread.Unread  # outside archives

    @property
    def dtype(self) -> str:
        """Return the tokens' dtype."""
        return shards.dtype_for(self.identity.vocab, masked=self.masked)

    @property
    def num_bytes(self) -> int:
        """Return the size of all sources, as stored."""
        return sum(part.num_bytes for part in self.parts)

    def note_path(self, output: pathlib.Path, part: Part) -> pathlib.Path:
        """Return the file of a part's note."""
        return output / FOLDER / f"part-{part.number:05d}.json"

    def wanted(self, part: Part) -> dict[str, typing.Any]:
        """Identify the inputs of a part; a note with another value is stale."""
        return {
            "sources": _digest(part),
            "tokenizer": self.identity.as_record(),
            "masked": self.masked,
            "val_share": None if self.has_val_files else self.val_share,
            "code_version": CODE_VERSION,
        }

    def is_held_out(self, item: sources.Item, text: bytes) -> bool:
        """Return whether a text is for validation, by itself: workers do not know the others."""
        if self.has_val_files:
            return item.validation
        return zlib.crc32(text) % _MILLION < self.val_share * _MILLION


def total_bytes(items: Items) -> int:
    """Return the size of sources, as stored."""
    return sum(item.num_bytes for item in items)


def _digest(part: Part) -> str:
    described: list[list[object]] = []
    for item in part.items:
        span = [item.begin, item.end]
        file = [str(item.path), item.size_bytes, item.mtime_ns]
        described.append([*file, *span, item.validation, item.errors])
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def grouped(items: Items, part_bytes: int) -> tuple[Part, ...]:
    """Return the parts: consecutive sources up to a size, a piece of a big file, or an archive."""
    groups: list[list[sources.Item]] = []
    size = 0
    for whole in items:
        for item in sources.cut(whole, part_bytes):
            is_full = size + item.num_bytes > part_bytes
            if not groups or is_full or item.kind in names.ARCHIVES:
                groups.append([])
                size = 0
            groups[-1].append(item)
            size += item.num_bytes
    return tuple(Part(number, tuple(group)) for number, group in enumerate(groups))


def valid_note(output: pathlib.Path, plan: Plan, part: Part) -> Note | None:
    """Return the part's note if it matches the plan and its shards have their sizes."""
    try:
        note = files.read_json(plan.note_path(output, part))
        if note["wanted"] != plan.wanted(part):
            return None
        for entry in note["shards"]:
            if shards.read_header(output / entry["file"]).tokens != entry["tokens"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, errors.UserError):
        return None
    return note


def tokenize(output: pathlib.Path, plan: Plan, part: Part, tokenizer: tokenizers.Tokenizer) -> Note:
    """Write the part's shards and its note, and return the note."""
    drafts = {split: _Draft(plan, tokenizer) for split in shards.SPLITS}
    found = lessons.Lessons()
    for item in part.items:
        for document in documents.documents(item, found, tokenizer.form):
            _add(document, item, plan, drafts)

    entries: list[dict[str, object]] = []
    for split, draft in drafts.items():
        if draft.tokens:
            name = f"{split}/shard-{part.number:05d}.bin"
            facts = shards.write(output / name, draft.tokens, plan.dtype)
            entries.append({"split": split, "file": name, "docs": draft.docs, **facts})

    note = {
        "wanted": plan.wanted(part),
        "shards": entries,
        "unread": found.left_out,
        "lessons": found.as_record(),
    }
    files.write_json(plan.note_path(output, part), note)
    return note


class _Draft:
    """The tokens that a part gives to one split."""

    def __init__(self, plan: Plan, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokens: list[shards.Tokens] = []
        self.docs = 0
        self._plan = plan
        self._tokenizer = tokenizer
        self._end = np.array([plan.identity.eot_id], dtype=plan.dtype)

    def begin(self) -> None:
        """Begin another document."""
        self.docs += 1
        self.tokens.append(self._end)

    def add(self, document: segments.Document) -> None:
        """Add a piece's tokens to the document."""
        for ids, learned in tokenizers.encode(self._tokenizer, document):
            marked = ids.astype(self._plan.dtype, copy=False)
            if self._plan.masked and learned is not True:
                top_bit = marked.dtype.type(1 << (marked.itemsize * 8 - 1))
                marked = np.where(learned, marked, marked | top_bit)
            self.tokens.append(typing.cast(shards.Tokens, marked))


Drafts = dict[str, _Draft]  # by split


def _add(document: segments.Document, item: sources.Item, plan: Plan, drafts: Drafts) -> None:
    """Add a document to the drafts; the pieces of a long one may go to both."""
    started: set[str] = set()
    for piece in documents.pieces(document):
        text = "".join(segment.text for segment in piece).encode()
        split = "val" if plan.is_held_out(item, text) else "train"
        draft = drafts[split]
        if split not in started:
            started.add(split)
            draft.begin()
        draft.add(piece)

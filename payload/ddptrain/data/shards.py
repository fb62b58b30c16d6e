"""Token files and the dataset made of them.

A shard is llm.c's: 256 little-endian int32 (magic, version, number of tokens, zeros) and then the
tokens, uint16 under magic 20240520 version 1, or uint32 under magic 20240801 version 7. llm.c and
modded-nanogpt read the 16-bit ones as they are. `dataset.json` in the same folder is written last:
a folder without it is not a dataset yet.
"""

import collections.abc
import dataclasses
import itertools
import pathlib
import typing
import zlib

import numpy as np
import numpy.typing as npt

from ddptrain.ground import errors, files

FORMAT = 1
HEADER_BYTES = 1024
MANIFEST = "dataset.json"
SPLITS = ("train", "val")
_KINDS: dict[int, tuple[int, str]] = {
    20240520: (1, "<u2"),
    20240801: (7, "<u4"),
}  # magic: (version, dtype)

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class ShardError(errors.UserError):
    """A token file or a manifest is missing or wrong; the text names it."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """One token file."""

    path: pathlib.Path
    tokens: int
    dtype: str  # "<u2" or "<u4"
    crc32: int | None = None  # of the whole file

    @property
    def size_bytes(self) -> int:
        """Return the size that the file must have."""
        return HEADER_BYTES + self.tokens * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A folder of shards, described by its manifest."""

    root: pathlib.Path
    name: str
    tokenizer: dict[str, typing.Any]  # kind, vocab, eot, eot_id, sha256
    dtype: str
    masked: bool  # the top bit of a token says that it is read but not learned (a prompt)
    splits: dict[str, tuple[Shard, ...]]
    fingerprint: str  # of tokenizer and contents: the same text prepared twice has the same
    not_learned: tuple[str, ...] = ()  # a line for each kind of thing of its sources

    @property
    def vocab(self) -> int:
        """Return the number of token ids, unpadded."""
        return int(self.tokenizer["vocab"])

    def tokens(self, split: str) -> int:
        """Return the number of tokens in a split."""
        return sum(shard.tokens for shard in self.splits[split])


def dtype_for(vocab: int, *, masked: bool = False) -> str:
    """Return the narrowest dtype that holds the ids, and the mask bit above them, if any."""
    bits = 15 if masked else 16
    return "<u2" if vocab <= 1 << bits else "<u4"


def write(
    path: pathlib.Path, parts: collections.abc.Iterable[Tokens], dtype: str
) -> dict[str, int]:
    """Write one shard from arrays of tokens; return tokens, bytes and crc32.

    It appears whole or not at all.
    """
    magic, (version, _) = next((m, kind) for m, kind in _KINDS.items() if kind[1] == dtype)
    body = [np.ascontiguousarray(part, dtype=dtype) for part in parts]
    count = sum(part.size for part in body)
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = magic, version, count
    crc = 0
    size = 0
    with files.replacing(path) as file:
        for block in (header, *body):
            view = block.view(np.uint8).data
            file.write(view)
            crc = zlib.crc32(view, crc)
            size += view.nbytes
    return {"tokens": count, "bytes": size, "crc32": crc}


def num_learned(shard: Shard, eot_id: int, *, masked: bool) -> int:
    """Return how many of a shard's tokens are learned, ends of texts not counted."""
    tokens = np.fromfile(shard.path, dtype=shard.dtype, offset=HEADER_BYTES)
    bit = tokens.itemsize * 8 - 1 if masked else None
    return int(np.count_nonzero((tokens != eot_id) & (bit is None or tokens >> bit == 0)))


def highest_id(shard: Shard, *, masked: bool) -> int:
    """Return the highest token id in a shard; -1 for one without tokens."""
    tokens = np.fromfile(shard.path, dtype=shard.dtype, offset=HEADER_BYTES)
    if masked:
        tokens &= (1 << (tokens.itemsize * 8 - 1)) - 1
    return int(tokens.max(initial=0)) if tokens.size else -1


def read_header(path: pathlib.Path) -> Shard:
    """Return the shard that a file describes.

    Raises ShardError if it is not one, or has another length.
    """
    try:
        with path.open("rb") as file:
            header = np.frombuffer(file.read(HEADER_BYTES), dtype="<i4")
        size = path.stat().st_size
    except OSError as e:
        raise ShardError(f"shard {path} cannot be read: {e.strerror}") from e
    is_whole = header.size == HEADER_BYTES // 4
    version, dtype = _KINDS.get(int(header[0]), (None, "")) if is_whole else (None, "")
    if version is None or header[1] != version:
        raise ShardError(f"{path} is not a token shard (llm.c format); prepare the dataset again")
    shard = Shard(path, int(header[2]), dtype)
    if size != shard.size_bytes:
        text = f"shard {path} has {size} bytes, its header says {shard.size_bytes}"
        raise ShardError(f"{text}; prepare the dataset again")
    return shard


def open_dataset(root: pathlib.Path) -> Dataset:
    """Return the dataset in a folder, its files' sizes checked.

    Raises ShardError, which names the file that is missing or wrong.
    """
    dataset = _described(root)
    for shard in itertools.chain.from_iterable(dataset.splits[split] for split in SPLITS):
        found = read_header(shard.path)
        if (found.tokens, found.dtype) != (shard.tokens, shard.dtype):
            held = f"{found.tokens} tokens ({found.dtype})"
            recorded = f"{shard.tokens} tokens ({shard.dtype})"
            what = f"shard {shard.path} holds {held}, {MANIFEST} records {recorded}"
            raise ShardError(f"{what}; prepare it again")
    return dataset


def fingerprint(root: pathlib.Path) -> str:
    """Return the fingerprint of the dataset in a folder, by its manifest alone.

    Raises ShardError.
    """
    return _described(root).fingerprint


def _described(root: pathlib.Path) -> Dataset:
    manifest = _manifest(root)
    path = root / MANIFEST
    try:
        dtype = str(manifest["dtype"])
        splits: dict[str, tuple[Shard, ...]] = {}
        for split in SPLITS:
            entries = manifest["splits"][split]
            splits[split] = tuple(_listed(root, entry, dtype) for entry in entries)
        tokenizer = dict(manifest["tokenizer"])
        int(tokenizer["vocab"])
        digest = _digest(str(tokenizer["sha256"]), splits)
        name = str(manifest["name"])
        not_learned = tuple(str(line) for line in manifest.get("not_learned", ()))
        masked = bool(manifest["masked"])
        return Dataset(root, name, tokenizer, dtype, masked, splits, digest, not_learned)
    except (KeyError, TypeError, ValueError) as e:
        what = f"{path} is damaged ({type(e).__name__}: {e})"
        raise ShardError(f"{what}; prepare the dataset again") from e


def _manifest(root: pathlib.Path) -> dict[str, typing.Any]:
    """Return the content of dataset.json. Raises ShardError."""
    path = root / MANIFEST
    if not root.is_dir():
        remedy = f"make one with `python -m ddptrain prepare --output {root}`"
        raise ShardError(f"--data {root}: no such folder; {remedy}")
    try:
        manifest = files.read_json(path)
    except FileNotFoundError as e:
        what = f"--data {root} has no {MANIFEST}"
        why = "it is not a dataset, or `prepare` has not finished there"
        raise ShardError(f"{what}: {why}") from e
    except (OSError, ValueError) as e:
        raise ShardError(f"{path} cannot be read: {e}; prepare the dataset again") from e
    if manifest.get("format") != FORMAT:
        what = f"{path} has format {manifest.get('format')!r}, this program reads {FORMAT}"
        raise ShardError(f"{what}; prepare it again")
    return manifest


def _digest(tokenizer: str, splits: dict[str, tuple[Shard, ...]]) -> str:
    """Return the fingerprint of a dataset: of its tokenizer, and of each shard's content."""
    parts = [tokenizer]
    for split in SPLITS:
        for shard in splits[split]:
            parts.append(f"{split} {shard.crc32}")
    return f"{zlib.crc32(' '.join(parts).encode()):08x}"


def damaged(dataset: Dataset) -> list[str]:
    """Read every byte of a dataset; return a line for each shard that differs from the manifest."""
    found: list[str] = []
    for shard in itertools.chain.from_iterable(dataset.splits[split] for split in SPLITS):
        try:
            if files.crc32(shard.path) != shard.crc32:
                what = f"shard {shard.path} is corrupted: its CRC-32 is not the manifest's"
                found.append(f"{what}; prepare the dataset again")
        except OSError as e:
            found.append(f"shard {files.explain(e, shard.path)}")
    return found


def _listed(root: pathlib.Path, entry: dict[str, typing.Any], dtype: str) -> Shard:
    name = str(entry["file"])
    if pathlib.PurePath(name).is_absolute() or ".." in pathlib.PurePath(name).parts:
        raise ValueError(f"file {name!r} is outside the dataset")
    return Shard(root / name, int(entry["tokens"]), dtype, int(entry["crc32"]))

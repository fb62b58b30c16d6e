"""Compression, kind of content and split of a file, by its name."""

import dataclasses
import pathlib
import re

KINDS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".tex": "text",
    ".html": "text",
    ".py": "text",
    ".c": "text",
    ".h": "text",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".tar": "tar",
    ".zip": "zip",
}
ARCHIVES = frozenset({"tar", "zip"})
TABLES = frozenset({"parquet", "arrow"})
RECORDS = frozenset({"lines", "json", "parquet", "arrow"})
COMPRESSED = frozenset({".gz", ".bz2", ".zst"})
READS = "text, .jsonl, .json and .tar, each also with .gz, .bz2 or .zst, .parquet, .arrow and .zip"

_ALIASES = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".tzst": ".tar.zst"}
_ONLY_PLAIN = frozenset({"parquet", "arrow", "zip"})  # these compress their contents themselves

_SPLITS = {
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "eval": "val",
    "evaluation": "val",
    "test": "test",
    "testing": "test",
    "holdout": "test",
    "heldout": "test",
    "train": "train",
    "training": "train",
}
# Any word of such a name may name a split. Code is named for much else: `test_parser.py`.
_NAMED_FREELY = frozenset({".txt", ".text", ".tar", ".zip", ""})

# What describes a dataset on Hugging Face's hub; what `save_to_disk`, `map` and `filter` leave.
_CARD = re.compile(
    r"(readme|licen[cs]e|citation|notice)([^a-z].*)?"
    r"|(dataset_infos?|dataset_dict|state)\.json"
    r"|cache-.*\.arrow"
)

# img2dataset's `00000_stats.json`, `metadata.jsonl` of the hub's folders of images
_METADATA = re.compile(r"(.*[-_.])?(meta|metadata|stats|infos?)\.(json|jsonl|ndjson|csv|parquet)")


@dataclasses.dataclass(frozen=True)
class Name:
    """The parts of a file's name: `a.jsonl.gz` and `a.tgz` have the stem `a`."""

    stem: str
    suffix: str  # ".jsonl"
    compression: str  # ".gz", or nothing

    @property
    def kind(self) -> str | None:
        """Return a value of KINDS, or None if such a file is not read."""
        kind = KINDS.get(self.suffix)
        if self.compression and kind in _ONLY_PLAIN:
            return None
        return kind

    @property
    def suffixes(self) -> str:
        """Return both suffixes, as lists of unread files show them."""
        return self.suffix + self.compression or "no suffix"


def parse(name: str) -> Name:
    """Return the parts of a file's name."""
    path = pathlib.PurePath(name)
    last = path.suffix.lower()
    if last in _ALIASES:
        path = path.with_suffix(_ALIASES[last])
        last = path.suffix
    if last not in COMPRESSED:
        return Name(path.stem, last, "")

    inner = pathlib.PurePath(path.stem)
    return Name(inner.stem, inner.suffix.lower(), last)


def split_of(path: pathlib.PurePath) -> str:
    """Return train, val or test if the file or a folder of it is named for that, or "".

    The last word that names a split counts, as in `train-eval`.
    """
    name = parse(path.name)
    words = _words(name.stem)
    if name.kind not in RECORDS and name.suffix not in _NAMED_FREELY:
        words = words[-1:]

    parts = [words]
    for folder in reversed(path.parts[:-1]):
        parts.append(_words(folder))

    for part in parts:
        for word in reversed(part):
            if word in _SPLITS:
                return _SPLITS[word]
    return ""


def _words(name: str) -> list[str]:
    """Return the words of a name; `testset` is `test`."""
    words = re.split(r"[-._= 0-9]+", name.lower())
    return [word.removesuffix("set") for word in words if word not in ("", "of", "set")]


def is_card(path: pathlib.PurePath) -> bool:
    """Return whether a file, by its path in a dataset's folder, describes the dataset."""
    is_loader = path.suffix == ".py" and len(path.parts) == 1
    return is_loader or _CARD.fullmatch(path.name.lower()) is not None


def is_metadata(path: pathlib.PurePath) -> bool:
    """Return whether a file without records describes others, by its name."""
    return is_card(path) or _METADATA.fullmatch(path.name.lower()) is not None

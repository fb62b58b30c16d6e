"""Text to token ids, offline.

- `byte`: the text's UTF-8 bytes, and 256 for the end of a text. Needs nothing.
- `gpt2`: GPT-2's byte-pair encoding from the packaged vocabulary.
- `hf`: a tokenizer that transformers or tokenizers saved in a local folder.
"""

import array
import collections.abc
import dataclasses
import hashlib
import importlib.resources
import importlib.util
import json
import lzma
import os
import pathlib
import re
import typing

import numpy as np
import numpy.typing as npt

from ddptrain.data import chats, segments, shards, templates
from ddptrain.ground import errors

BYTE_END = 256
AUTO_GPT2_BYTES = 256 << 20  # less text teaches little about 50 257 ids
GPT2_END = 50256
GPT2_VOCAB = 50257
# Of vocab.bpe as OpenAI published it with GPT-2 (modified MIT licence); tiktoken asks for the same
# hash.
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# Of models: GPT-2's, Llama's, Gemma's, Llama 3's, Qwen's, BERT's
_USUAL_ENDS = ["<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]"]
_SAVED_SUFFIXES = frozenset({".json", ".txt", ".model", ".bpe", ".jinja"})
_FLAG = "--tokenizer-local-dir"
_PACKAGED = "gpt2-vocab.bpe.xz"
# How GPT-2 cuts text before merging (Radford et al. 2019, section 2.2), in the form without
# backtracking.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# The same cut for ASCII text, in Python's syntax; its \s would count the separators U+001C to
# U+001F as space. Each alternative begins with a required character, so that Python skips it at
# once without that.
_ASCII = (
    r"'(?:[sdmt]|ll|ve|re)|[A-Za-z]++| [A-Za-z]++|[0-9]++| [0-9]++|[^ \t-\rA-Za-z0-9]++| [^ \t-\rA-Za-z0-9]++"
    r"|[ \t-\r]+(?![^ \t-\r])|[ \t-\r]"
)
_ASCII_WORDS = re.compile(_ASCII).findall
# A run between spaces that has any other character is left whole, with the one space before it: a
# cut never lies in it.
_MIXED_WORDS = re.compile(
    r" ?[!-~\x00-\x08\x0e-\x1f\x7f]*+[^\x00-\x7f][^ \t-\r]*+|" + _ASCII
).findall
_FOREIGN_SPACE = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]").search
_SPACE_AFTER_WORD = re.compile(r"(?<=[^ \t-\r])[ \t-\r]").search
_STRETCH = 1 << 12  # characters cut at a time: their words still fit into a core's cache
_MOST_KNOWN, _LONGEST_KNOWN = 1 << 18, 64


Encoded = tuple[shards.Tokens, bool | npt.NDArray[np.bool_]]


@dataclasses.dataclass(frozen=True)
class Identity:
    """The properties that make two tokenizers the same; datasets and checkpoints record them."""

    kind: str
    vocab: int  # number of ids, the end-of-text one included
    eot_id: int
    sha256: str
    eot: str = "prefix"  # llm.c's way: the end-of-text id stands before each document

    def as_record(self) -> dict[str, typing.Any]:
        """Return the JSON object."""
        return dataclasses.asdict(self)


class ByteTokenizer:
    """One id per UTF-8 byte."""

    form = chats.Plain()
    identity = Identity(
        "byte", 257, BYTE_END, hashlib.sha256(b"utf-8 bytes, 256 ends a text").hexdigest()
    )

    def encode(self, text: str) -> shards.Tokens:
        """Return a document's ids, without the end-of-text id."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding, merged by tiktoken.

    Text repeats its words, so each is merged once and remembered: cutting with Python's regular
    expressions and looking words up is nearly twice as quick as merging them all. Text that is not
    ASCII goes to tiktoken, which knows Unicode's letters; the cuts around it are places where
    GPT-2's own cut is certain.
    """

    form = chats.Plain()
    identity = Identity("gpt2", GPT2_VOCAB, GPT2_END, GPT2_SHA256)

    def __init__(self) -> None:
        import tiktoken

        ranks = _gpt2_ranks(gpt2_merges())
        self._core = tiktoken.Encoding(
            "gpt2",
            pat_str=_GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={"<|endoftext|>": GPT2_END},
        )
        self._known = _Known(self._merge)

    def encode(self, text: str) -> shards.Tokens:
        """Return a document's ids."""
        plain = text.isascii()
        if not plain and _FOREIGN_SPACE(text) is not None:
            return self._core.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

        known = self._known.__getitem__
        found: list[bytes] = []
        begin = 0
        while begin < len(text):
            cut = _SPACE_AFTER_WORD(text, begin + _STRETCH)
            end = cut.start() if cut else len(text)
            stretch = text[begin:end]
            words = _ASCII_WORDS if plain or stretch.isascii() else _MIXED_WORDS
            found.append(b"".join(map(known, words(stretch))))
            begin = end
        return np.frombuffer(b"".join(found), dtype=np.uint16)

    def _merge(self, word: str) -> bytes:
        return array.array("H", self._core.encode_ordinary(word)).tobytes()


class _Known(dict[str, bytes]):
    """The ids of words met before, as bytes; of so many that it stays below some 60 MB."""

    def __init__(self, merge: collections.abc.Callable[[str], bytes]) -> None:
        super().__init__()
        self._merge = merge

    def __missing__(self, word: str) -> bytes:
        ids = self._merge(word)
        if len(word) <= _LONGEST_KNOWN and len(self) < _MOST_KNOWN:
            self[word] = ids
        return ids


class HfTokenizer:
    """A tokenizer saved by transformers, or by tokenizers alone.

    In the second case a usual name, or an additional id, ends a text.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        if not folder.exists():
            raise errors.UserError(
                f"{_FLAG} {folder}: no such folder; copy a saved tokenizer there"
            )
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        is_alone = file.is_file() and not (file.parent / "tokenizer_config.json").is_file()

        library = errors.need("tokenizers", _FLAG) if is_alone else need_transformers(_FLAG)
        try:
            self._core = _load_alone(library, file) if is_alone else _load(library, folder)
        except Exception as e:  # tokenizers raises nothing narrower
            what = " ".join(str(e).split())[:300]
            raise errors.UserError(f"{_FLAG} {folder} holds no tokenizer: {what}") from e

        size = (
            max(self._core.get_vocab().values(), default=-1) + 1
        )  # not their number: ids may have gaps
        end = _usual_end(self._core, size) if is_alone else self._core.eos_token_id
        if end is None:
            what = f"the tokenizer in {folder} has no end-of-text token"
            raise errors.UserError(f"{what}; set eos_token in its configuration")
        self.identity = Identity("hf", max(size, end + 1), int(end), _digest(folder))
        self.form = chats.Plain() if is_alone else templates.form_of(self._core)

    @property
    def has_unused_template(self) -> bool:
        """Return whether it has a chat template that leaves the assistant's part unclear."""
        has_template = bool(getattr(self._core, "chat_template", None))
        return has_template and isinstance(self.form, chats.Plain)

    def encode(self, text: str) -> shards.Tokens:
        """Return a document's ids."""
        found = self._core.encode(text, add_special_tokens=False)
        return np.array(getattr(found, "ids", found), dtype=np.uint32)

    def encode_joined(self, document: segments.Document) -> Encoded:
        """Return the ids of segments that a chat template wrote, and which of them are learned.

        A token belongs to the segment that its text begins in.
        """
        text = "".join(segment.text for segment in document)
        found = self._core(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)

        ends = np.cumsum([len(segment.text) for segment in document])
        learned = np.array([segment.learned for segment in document])
        number = np.searchsorted(ends, offsets[:, 0], side="right")
        ids = np.array(found["input_ids"], dtype=np.uint32)
        return ids, learned[np.minimum(number, len(document) - 1)]

    def save(self, folder: pathlib.Path) -> None:
        """Save it in a folder, as the library that loaded it does."""
        if hasattr(self._core, "save_pretrained"):
            self._core.save_pretrained(str(folder))
        else:
            self._core.save(str(folder / "tokenizer.json"))


def _load_alone(library: typing.Any, file: pathlib.Path) -> typing.Any:
    """Return the tokenizer in a tokenizer.json."""
    core = library.Tokenizer.from_file(str(file))
    core.no_truncation()  # models for embeddings are saved with both
    core.no_padding()
    return core


def _load(library: typing.Any, folder: pathlib.Path) -> typing.Any:
    """Return the tokenizer that transformers saved in a folder."""
    return library.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def _usual_end(core: typing.Any, size: int) -> int:
    """Return the id of the first usual name for the end of a text, or the first free id."""
    for name in _USUAL_ENDS:
        found = core.token_to_id(name)
        if found is not None:
            return found
    return size


def _digest(folder: pathlib.Path) -> str:
    """Return the SHA-256 of a saved tokenizer's files."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file() and path.suffix in _SAVED_SUFFIXES:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


Tokenizer = ByteTokenizer | Gpt2Tokenizer | HfTokenizer


def encode(tokenizer: Tokenizer, document: segments.Document) -> collections.abc.Iterator[Encoded]:
    """Yield a document's ids, and which of them are learned: all, none, or a mask."""
    if isinstance(tokenizer, HfTokenizer) and document[0].joined:
        yield tokenizer.encode_joined(document)
        return
    for segment in document:
        yield tokenizer.encode(segment.text), segment.learned


def need_transformers(flag: str) -> typing.Any:
    """Return the transformers module, made to stay offline.

    Raises UserError, which names the flag that needs it.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return errors.need("transformers", flag)


def make(kind: str, *, local_dir: pathlib.Path | None = None, text_bytes: int = 0) -> Tokenizer:
    """Return a tokenizer: `byte`, `gpt2`, or `auto`.

    `auto` is gpt2 for much text if tiktoken is installed, and byte otherwise.
    """
    if local_dir is not None:
        return HfTokenizer(local_dir)
    has_tiktoken = importlib.util.find_spec("tiktoken") is not None
    if kind == "auto":
        kind = "gpt2" if has_tiktoken and text_bytes >= AUTO_GPT2_BYTES else "byte"
    if kind == "byte":
        return ByteTokenizer()
    if has_tiktoken:
        return Gpt2Tokenizer()
    what = "--tokenizer gpt2 needs the package tiktoken, which is not installed"
    raise errors.UserError(f"{what}; use --tokenizer byte")


def gpt2_merges() -> str:
    """Return the text of vocab.bpe. Raises UserError if it is not GPT-2's."""
    packaged = importlib.resources.files("ddptrain.data").joinpath(_PACKAGED)
    data = lzma.decompress(packaged.read_bytes())
    if hashlib.sha256(data).hexdigest() != GPT2_SHA256:
        raise errors.UserError(
            f"{_PACKAGED} is not GPT-2's: its SHA-256 differs from the published one"
        )
    return data.decode()


def save_gpt2(folder: pathlib.Path, longest: int) -> None:
    """Save GPT-2's tokenizer as transformers reads it, for texts of at most so many tokens."""
    merges = gpt2_merges()
    known: dict[str, int] = {}
    for character in (*_gpt2_alphabet(), *merges.splitlines()[1:]):
        known.setdefault(character.replace(" ", "", 1), len(known))
    known["<|endoftext|>"] = GPT2_END
    about = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": longest}
    (folder / "vocab.json").write_text(json.dumps(known))
    (folder / "merges.txt").write_text(merges)
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _gpt2_alphabet() -> list[str]:
    """List the characters of vocab.bpe for the 256 bytes, in the order of their ids."""
    printable = [chr(b) for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    return [*printable, *(chr(256 + n) for n in range(256 - len(printable)))]


def _gpt2_ranks(merges: str) -> dict[bytes, int]:
    """Return each token's bytes and id from the text of vocab.bpe.

    The file writes bytes as printable characters: Latin-1's printable ones stand for themselves,
    the other 68 are moved to U+0100 and up in order. Ids are: the printable bytes, the moved ones,
    then one per merge in the file's order.
    """
    printable: list[int] = []
    moved: list[int] = []
    for byte in range(256):
        is_shown = chr(byte).isprintable() and chr(byte) != " "
        (printable if is_shown else moved).append(byte)

    meaning = {chr(byte): byte for byte in printable}
    for number, byte in enumerate(moved):
        meaning[chr(256 + number)] = byte
    meaning[" "] = ord(" ")

    ranks = {bytes([byte]): rank for rank, byte in enumerate(printable + moved)}
    for line in merges.splitlines()[1:]:  # the first line is a version
        token = line.replace(" ", "", 1)  # the space parts the two that are merged
        token = token.replace("\u0120", " ")  # a token that is now ASCII needs no table
        if not token:
            continue
        as_bytes = token.encode()
        if not token.isascii():
            as_bytes = bytes([meaning[c] for c in token])
        ranks[as_bytes] = len(ranks)
    return ranks

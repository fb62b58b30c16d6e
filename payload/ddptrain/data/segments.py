"""Pieces of documents: text that a model learns, or only reads."""

import dataclasses
import re

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class Segment:
    """Text of a document, without surrogates.

    `learned` is false for text that a model reads but need not produce. `joined` says that it is
    tokenised in one go with the segment before it, as a chat template's text is.
    """

    text: str
    learned: bool = True
    joined: bool = False

    def __post_init__(self) -> None:
        if not self.text.isascii():
            object.__setattr__(self, "text", _SURROGATE.sub("\ufffd", self.text))


Document = tuple[Segment, ...]


def learns(document: Document) -> bool:
    """Return whether anything of a document is learned."""
    return any(segment.learned and segment.text for segment in document)

"""Records to documents: the text of an object or row, and which of it a model learns."""

import collections.abc
import dataclasses
import re
import typing

from ddptrain.ground import errors

COLUMNS = (
    "messages",
    "conversations",
    "system",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "text",
)
SHAPES = (
    '"text", "prompt" and "completion", "messages", "conversations", or "instruction" and "output"'
)
ASSISTANT = "assistant"

_SHAPES = (
    {"text"},
    {"prompt", "completion"},
    {"messages"},
    {"conversations"},
    {"instruction", "output"},
)
_ROLES = {"human": "user", "gpt": ASSISTANT}  # ShareGPT's names
_SURROGATE = re.compile("[\ud800-\udfff]")

Record = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Text of a document, without surrogates.

    `learned` is false for what a model reads but need not produce.
    """

    text: str
    learned: bool = True
    role: str = ""  # of the message whose content this is

    def __post_init__(self) -> None:
        if not self.text.isascii():
            object.__setattr__(self, "text", _SURROGATE.sub("\ufffd", self.text))


Document = tuple[Segment, ...]


def has_shape(value: object) -> bool:
    """Return whether a JSON value is an object with the keys of a record."""
    if not isinstance(value, dict):
        return False
    keys = typing.cast(Record, value).keys()
    return any(shape <= keys for shape in _SHAPES)


def document(value: object, where: str) -> Document:
    """Return the document in a JSON object or row, empty if all is null. Raises UserError."""
    record = typing.cast(Record, value) if isinstance(value, dict) else {}
    if _is_null(record):
        return ()

    for key in ("messages", "conversations"):
        if isinstance(record.get(key), list):
            return _chat(record[key], where, record.get("system"))

    match record:
        case {"prompt": str(prompt), "completion": str(completion)}:
            return (Segment(prompt, learned=False), Segment(completion))
        case {"prompt": [*turns], "completion": [*answer]}:  # TRL's
            return _unlearned(_chat(turns, where, record.get("system"))) + _chat(answer, where)
        case {"instruction": str(instruction), "output": str(output)}:  # Alpaca's
            asked = _with_input(instruction, record.get("input"))
            turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": output}]
            return _chat(turns, where, record.get("system"))
        case {"text": str(text)}:
            return (Segment(text),)
        case _:
            raise errors.UserError(f"{where}: expected an object with {SHAPES}")


def _is_null(record: Record) -> bool:
    held = [record[name] for name in COLUMNS if name in record]
    return bool(held) and all(value is None for value in held)


def _unlearned(segments: Document) -> Document:
    return tuple(dataclasses.replace(segment, learned=False) for segment in segments)


def _with_input(instruction: str, more: object) -> str:
    if isinstance(more, str) and more:
        return f"{instruction}\n{more}"
    return instruction


def _chat(messages: list[typing.Any], where: str, system: object = None) -> Document:
    segments: list[Segment] = []
    if isinstance(system, str) and system:
        segments += _message({"role": "system", "content": system}, where)
    for message in messages:
        segments += _message(message, where)
    return tuple(segments)


def _message(message: object, where: str) -> Document:
    match message:
        case {"role": str(role), "content": object() as content}:
            pass
        case {"from": str(role), "value": object() as content}:
            pass
        case _:
            needs = 'each message needs "role" and "content", or "from" and "value"'
            raise errors.UserError(f"{where}: {needs}")

    role = _ROLES.get(role, role)
    text = "".join(_parts(content, where)) + "\n"
    learned = _is_learned(typing.cast(Record, message), role, where)
    learned = learned and not text.isspace()  # an empty answer teaches nothing
    return Segment(f"<{role}>\n", learned=False), Segment(text, learned, role)


def _is_learned(message: Record, role: str, where: str) -> bool:
    """Return whether a message is learned, by its marks if it has any. Raises UserError."""
    weight = message.get("weight")
    train = message.get("train")
    is_known = weight in (None, 0, 1) and isinstance(train, bool | None)
    if not is_known or message.get("train_detail"):
        rule = 'of a message "weight" is 0 or 1, and "train" is true or false'
        found = f"not {weight!r}, {train!r}"
        raise errors.UserError(f'{where}: {rule}, {found}; "train_detail" is not read')

    if weight == 0:
        return False
    return role == ASSISTANT if train is None else train


def _parts(content: object, where: str) -> collections.abc.Iterator[str]:
    """Yield the texts of a content, which is a text or a list of such parts. Raises UserError."""
    parts = typing.cast(list[object], content) if isinstance(content, list) else [content]
    for part in parts:
        match part:
            case str(text) | {"type": "text", "text": str(text)}:
                yield text
            case _:
                kind = typing.cast(Record, part).get("type") if isinstance(part, dict) else part
                what = f"{where}: a message's content is {kind!r:.60}"
                raise errors.UserError(f"{what}; only text is read: remove the record")

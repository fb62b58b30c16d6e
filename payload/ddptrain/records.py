"""One record to a document: its text, and which of it a model learns."""

import dataclasses
import json
import re
import typing

from ddptrain import errors

COLUMNS = ("messages", "conversations", "system", "prompt", "completion", "instruction", "input", "output", "text")
SHAPES = '"text", "prompt" and "completion", "messages", "conversations", or "instruction" and "output"'
ASSISTANT = "assistant"
_ROLES = {"human": "user", "gpt": ASSISTANT}  # ShareGPT's names
_SURROGATE = re.compile("[\ud800-\udfff]")

Record = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Text of a document, without surrogates; `learned` is false for what a model reads but need not produce."""

    text: str
    learned: bool = True
    role: str = ""  # of the message whose content this is

    def __post_init__(self) -> None:
        if not self.text.isascii():
            object.__setattr__(self, "text", _SURROGATE.sub("\ufffd", self.text))


Document = tuple[Segment, ...]


def parse(data: bytes, where: str, encoding_errors: str = "strict") -> object:
    """Return the value of JSON text in UTF-8. Raises UserError with `where`."""
    try:
        return json.loads(data.decode("utf-8", encoding_errors))
    except (ValueError, RecursionError) as e:
        raise errors.UserError(f"{where} is not JSON: {e}") from e


def from_object(value: object, where: str) -> Document:
    """Return the document in one JSON object or row, in any of the shapes. Raises UserError with `where`."""
    match value:
        case {"messages": [*messages]} | {"conversations": [*messages]}:
            return _chat(typing.cast(Record, value), typing.cast(list[object], messages), where)
        case {"prompt": str(prompt), "completion": str(completion)}:
            return (Segment(prompt, learned=False), Segment(completion))
        case {"instruction": str(instruction), "output": str(output)}:  # Alpaca's; its "text" repeats them
            more: object = typing.cast(Record, value).get("input")
            asked = f"{instruction}\n{more}" if isinstance(more, str) and more else instruction
            turns: list[object] = [{"from": "human", "value": asked}, {"from": "gpt", "value": output}]
            return _chat(typing.cast(Record, value), turns, where)
        case {"text": str(text)}:
            return (Segment(text),)
        case _:
            raise errors.UserError(f"{where}: expected an object with {SHAPES}")


def _chat(record: Record, messages: list[object], where: str) -> Document:
    if isinstance(system := record.get("system"), str) and system:
        messages = [{"role": "system", "content": system}, *messages]
    return tuple(segment for message in messages for segment in _message(message, where))


def _message(message: object, where: str) -> tuple[Segment, Segment]:
    match message:
        case {"role": str(role), "content": str(content)} | {"from": str(role), "value": str(content)}:
            role, weight = _ROLES.get(role, role), typing.cast(Record, message).get("weight")
        case _:
            raise errors.UserError(f'{where}: each message needs "role" and "content", or "from" and "value", as text')
    if weight not in (None, 0, 1):
        raise errors.UserError(f'{where}: the "weight" of a message is 0 or 1, not {weight!r}')
    learned = role == ASSISTANT and weight != 0
    return Segment(f"<{role}>\n", learned=False), Segment(f"{content}\n", learned, role)

"""Records to documents: the text of an object or row, and which of it a model learns."""

import dataclasses
import json
import typing

from ddptrain.data import chats, lessons, segments
from ddptrain.ground import errors

CHATS = ("messages", "conversations")
COLUMNS = (
    *CHATS,
    "tools",
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

_SHAPES = (
    {"text"},
    {"prompt", "completion"},
    {"messages"},
    {"conversations"},
    {"instruction", "output"},
)

Record = dict[str, typing.Any]


def has_shape(value: object) -> bool:
    """Return whether a JSON value is an object with the keys of a record."""
    if not isinstance(value, dict):
        return False
    keys = typing.cast(Record, value).keys()
    return any(shape <= keys for shape in _SHAPES)


def document(
    value: object, where: str, form: chats.Form, found: lessons.Lessons
) -> segments.Document | None:
    """Return the document in a JSON object or row, empty if all is null. Raises UserError.

    Other content is counted; None for a conversation that cannot be written in the form.
    """
    record = typing.cast(Record, value) if isinstance(value, dict) else {}
    if _is_null(record):
        return ()

    for key in CHATS:
        turns = _turns(record.get(key))
        if turns is not None:
            messages = _system(record) + chats.read(turns, where, found)
            _leave(record, {key, "system", "tools"}, found)
            return form.write(chats.Chat(tuple(messages), _tools(record)), found)

    match record:
        case {"prompt": str(prompt), "completion": str(completion)}:
            _leave(record, {"prompt", "completion"}, found)
            asked = segments.Segment(prompt, learned=False)
            return (asked, segments.Segment(completion))
        case {"prompt": [*turns], "completion": [*answer]}:  # TRL's
            messages = _unlearned(_system(record) + chats.read(turns, where, found))
            messages += chats.read(answer, where, found)
            _leave(record, {"prompt", "completion", "system", "tools"}, found)
            return form.write(chats.Chat(tuple(messages), _tools(record)), found)
        case {"instruction": str(instruction), "output": str(output)}:  # Alpaca's
            asked = _with_input(instruction, record.get("input"))
            messages = _system(record)
            messages.append(chats.Message("user", asked, learned=False))
            messages.append(chats.Message(chats.ASSISTANT, output, learned=True))
            _leave(record, {"instruction", "input", "output", "system"}, found)
            return form.write(chats.Chat(tuple(messages)), found)
        case {"text": str(text)}:
            _leave(record, {"text"}, found)
            return (segments.Segment(text),)
        case _:
            raise errors.UserError(
                f"{where}: expected an object with {SHAPES}{_not_a_list(record)}"
            )


def _is_null(record: Record) -> bool:
    held = [record[name] for name in COLUMNS if name in record]
    return bool(held) and all(value is None for value in held)


def _turns(value: object) -> list[typing.Any] | None:
    """Return the list of a conversation's messages, also from JSON text or a list for each key."""
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, dict):
        value = _transposed(typing.cast(Record, value))
    return typing.cast(list[typing.Any], value) if isinstance(value, list) else None


def _not_a_list(record: Record) -> str:
    """Return which key should have a list of messages, and its type instead, or ""."""
    for key in CHATS:
        if record.get(key) is not None:
            kind = type(record[key]).__name__
            return f'; "{key}" is of the type {kind}, not a list of messages or one in JSON'
    return ""


def _parsed(text: str) -> object:
    """Return the list or object in a JSON text, or the text itself."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return typing.cast(object, value) if isinstance(value, list | dict) else text


def _transposed(columns: Record) -> object:
    """Return a message for each place of lists of equal length, or the columns as they are."""
    lists: dict[str, list[object]] = {}
    for key, value in columns.items():
        if not isinstance(value, list | None):
            return columns
        if value:  # a key that only other rows have is null here
            lists[key] = typing.cast(list[object], value)

    if len({len(values) for values in lists.values()}) > 1:
        return columns
    rows = zip(*lists.values(), strict=True)
    return [dict(zip(lists, row, strict=True)) for row in rows]


def _system(record: Record) -> list[chats.Message]:
    system = record.get("system")
    if isinstance(system, str) and system:
        return [chats.Message("system", system, learned=False)]
    return []


def _tools(record: Record) -> object:
    """Return the tools of a record, which may be in JSON."""
    tools = record.get("tools")
    return _parsed(tools) if isinstance(tools, str) else tools


def _unlearned(messages: list[chats.Message]) -> list[chats.Message]:
    return [dataclasses.replace(message, learned=False) for message in messages]


def _with_input(instruction: str, more: object) -> str:
    if isinstance(more, str) and more:
        return f"{instruction}\n{more}"
    return instruction


def _leave(record: Record, read: set[str], found: lessons.Lessons) -> None:
    """Count the keys of a record that are not read."""
    for key, value in record.items():
        is_text = isinstance(value, str) or key not in ("system", "input")
        if key not in read or not is_text:
            found.leave("key", key, value)

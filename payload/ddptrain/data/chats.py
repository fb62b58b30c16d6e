"""Conversations: each message's role and text, and whether it is learned."""

import collections.abc
import dataclasses
import typing

from ddptrain.data import lessons, segments
from ddptrain.ground import errors

ASSISTANT = "assistant"

# Exporters' names for the parties: OpenAI's and Anthropic's words, ShareGPT's and its
# collectors' (the ShareGPT_V3_unfiltered set has chatgpt, bing and bard), Google's `model`,
# Cohere's `chatbot`, OpenAssistant's `prompter`, LLaMA-Factory's `function_call` and
# `observation`, ms-swift's `tool_call` and `tool_response`, Llama 3.1's `ipython`.
_NAMES = {
    ASSISTANT: (
        "assistant gpt chatgpt gpt-3.5 gpt-4 openai bing bard gemini claude copilot llama mistral"
        " model bot chatbot ai llm function_call tool_call"
    ),
    "user": "user human prompter",
    "system": "system",
    "developer": "developer",
    "tool": "tool function observation tool_response ipython",
}
ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}

_MARKS = frozenset({"weight", "train", "train_detail"})
# OpenAI's Chat Completions and Responses
_TEXTS = frozenset({"text", "input_text", "output_text"})
# Parts that a model wrote or got in addition to text; others, such as images, are refused.
_BESIDE_TEXT = frozenset(
    {"refusal", "thinking", "redacted_thinking", "reasoning", "tool_use", "tool_call", "tool_calls"}
    | {"function_call", "tool_result", "function_call_output"}
)

Record = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of a conversation."""

    role: str  # a value of ROLES, or the record's own
    text: str
    learned: bool
    more: Record = dataclasses.field(default_factory=dict[str, typing.Any])
    """What else it holds: tool calls, reasoning, names."""


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation, and the tools that the model may call in it."""

    messages: tuple[Message, ...]
    tools: object = None


class Form(typing.Protocol):
    """How conversations are written as text."""

    def write(self, chat: Chat, found: lessons.Lessons) -> segments.Document | None:
        """Return the document, or None for a conversation that cannot be written; count it."""
        ...


class Plain:
    """The form without a chat template: `<role>`, a line break and the text."""

    def write(self, chat: Chat, found: lessons.Lessons) -> segments.Document:
        """Return the document; only text is taken into it."""
        found.leave("key", "tools", chat.tools)
        written: list[segments.Segment] = []
        for message in chat.messages:
            written.append(segments.Segment(f"<{message.role}>\n", learned=False))
            # An empty answer teaches nothing
            is_learned = message.learned and not message.text.isspace() and message.text != ""
            written.append(segments.Segment(f"{message.text}\n", is_learned))
            for key, value in message.more.items():
                found.leave("key", key, value)

        document = tuple(written)
        teach(chat, document, found)
        return document


def read(messages: list[typing.Any], where: str, found: lessons.Lessons) -> list[Message]:
    """Return the messages in a record's list. Raises UserError."""
    return [_message(message, where, found) for message in messages]


def teach(chat: Chat, document: segments.Document, found: lessons.Lessons) -> None:
    """Count a conversation, with the reason if its document teaches nothing."""
    if not chat.messages:
        return
    roles = {message.role for message in chat.messages}
    if ASSISTANT not in roles:
        found.unanswered += not segments.learns(document)
    found.teach("" if segments.learns(document) else _why_idle(chat, roles))


def _why_idle(chat: Chat, roles: set[str]) -> str:
    """Return why nothing of a conversation is learned."""
    unknown = sorted(roles - set(ROLES.values()))
    if unknown:
        return f"{'role' if len(unknown) == 1 else 'roles'} {', '.join(unknown)}"
    if ASSISTANT not in roles:
        return lessons.NO_ANSWER

    answers = [message for message in chat.messages if message.role == ASSISTANT]
    keys: set[str] = set()
    for answer in answers:
        keys.update(answer.more)
    if not any(answer.learned for answer in answers):
        return "answers marked as not to be learned"
    return f"answers without text (key {', '.join(sorted(keys))})" if keys else "empty answers"


def _message(message: object, where: str, found: lessons.Lessons) -> Message:
    record = typing.cast(Record, message) if isinstance(message, dict) else {}
    match record:
        case {"role": str(name)}:
            key = "content"
            more = _more(record, {"role", "content"})
        case {"from": str(name), "value": _}:
            key = "value"
            more = _more(record, {"from", "value"})
        case _:
            key = ""
            name = ""
            more = {}
    if key not in record and not more:
        needs = 'each message needs "role" and "content", or "from" and "value"'
        raise errors.UserError(f"{where}: {needs}")

    role = ROLES.get(name.strip().lower())
    if role is None:
        role = name
        found.meet(name)
    content = record.get(key)
    if content is None and more:
        content = ""  # as OpenAI writes it next to tool calls
    text = "".join(_texts(content, where, found))
    return Message(role, text, _is_learned(record, role, where), more)


def _more(record: Record, read: set[str]) -> Record:
    """Return the entries that hold something and are not read."""
    keys = record.keys() - read - _MARKS
    return {key: record[key] for key in record if key in keys and _is_held(record[key])}


def _is_held(value: object) -> bool:
    return value is not None and value not in ("", [], {})


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


def _texts(content: object, where: str, found: lessons.Lessons) -> collections.abc.Iterator[str]:
    """Yield the texts of a content, which is a text or a list of parts. Raises UserError."""
    parts = typing.cast(list[object], content) if isinstance(content, list) else [content]
    for part in parts:
        match part:
            case str(text):
                yield text
            case {"type": str(kind), "text": str(text)} if kind in _TEXTS:
                yield text
            case {"type": str(kind)} if kind in _BESIDE_TEXT:
                found.leave("part", kind, _without_type(typing.cast(Record, part)))
            case _:
                kind = typing.cast(Record, part).get("type") if isinstance(part, dict) else part
                what = f"{where}: a message's content is {kind!r:.60}"
                raise errors.UserError(f"{what}; only text is read: remove the record")


def _without_type(part: Record) -> object:
    held = {key: value for key, value in part.items() if key != "type" and _is_held(value)}
    return next(iter(held.values())) if len(held) == 1 else held

"""Conversations written by a tokenizer's own chat template, as transformers renders it."""

import collections.abc
import json
import typing

from ddptrain.data import chats, lessons, segments
from ddptrain.ground import errors

_PROBE = (
    chats.Message("user", "one", learned=False),
    chats.Message(chats.ASSISTANT, "two", learned=True),
    chats.Message("user", "three", learned=False),
    chats.Message(chats.ASSISTANT, "four", learned=True),
)
_GENERATION = "generation"  # the tag that marks the assistant's part: transformers' chat templates
# A model's output in addition to text, as templates name it
_ANSWERS = frozenset({"tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"})

Spans = list[tuple[int, int]]  # of characters
Json = dict[str, typing.Any]


class _RefusedError(Exception):
    """The template cannot write a conversation; the text says why."""


class Template:
    """A chat template that makes the assistant's part clear.

    Either it marks that part with transformers' tag `generation`, or it writes the messages one
    after the other, so that each one adds its own text to the text of the earlier ones.
    """

    def __init__(self, core: typing.Any) -> None:
        self._core = core
        self._library = errors.need("transformers.utils.chat_template_utils", "a chat template")
        # Errors of a template: its own words, or a filter's failure on a value
        jinja2 = errors.need("jinja2", "a chat template")
        self._failures = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)

    def can_be_learned(self) -> bool:
        """Return whether it parts the messages of a usual conversation."""
        try:
            _, spans = self._learned(chats.Chat(_PROBE), None)
        except _RefusedError:
            return False
        return len(spans) == 2

    def write(self, chat: chats.Chat, found: lessons.Lessons) -> segments.Document | None:
        """Return the document, or None if the template refuses the conversation; count it."""
        if not chat.messages:
            return ()
        tools = _as_tools(chat.tools)
        try:
            text, spans = self._learned(chat, tools)
        except _RefusedError as e:
            texts = [message.text for message in chat.messages]
            found.refuse(str(e), "".join(texts))
            for message in chat.messages:
                _leave(message.more, found)
            found.leave("key", "tools", chat.tools)
            return None

        self._count_unread(chat, tools, text, found)
        document = _cut(text, spans)
        chats.teach(chat, document, found)
        return document

    def _learned(self, chat: chats.Chat, tools: list[Json] | None) -> tuple[str, Spans]:
        """Return the text of a conversation, and where in it the learned messages are."""
        messages = chat.messages
        text, marked = self._rendered(messages, tools)
        is_learned = [_teaches(message) for message in messages]
        if self._has_tag(tools):
            return text, _chosen(messages, is_learned, marked)

        spans: Spans = []
        for number, message in enumerate(messages):
            if is_learned[number]:
                begin = self._begin_of(number, message, messages, tools)
                through, _ = self._rendered(messages[: number + 1], tools)
                if not text.startswith(through) or not through.startswith(begin):
                    raise _RefusedError("it does not write the messages one after the other")
                spans.append((len(begin), len(through)))
        return text, spans

    def _begin_of(
        self,
        number: int,
        message: chats.Message,
        messages: tuple[chats.Message, ...],
        tools: list[Json] | None,
    ) -> str:
        """Return the text up to a message, for one of the assistant with its header."""
        is_answer = message.role == chats.ASSISTANT
        if not number and not is_answer:
            return ""
        text, _ = self._rendered(messages[:number], tools, is_asked=is_answer)
        return text

    def _rendered(
        self,
        messages: collections.abc.Sequence[chats.Message],
        tools: list[Json] | None,
        *,
        is_asked: bool = False,
    ) -> tuple[str, Spans]:
        """Return the text of messages, with the header of an answer if it `is_asked` for."""
        try:
            texts, marked = self._library.render_jinja_template(
                conversations=[[_as_json(message) for message in messages]],
                tools=tools,
                chat_template=self._core.get_chat_template(None, tools),
                return_assistant_tokens_mask=self._has_tag(tools),
                add_generation_prompt=is_asked,
                **self._core.special_tokens_map,
            )
        except self._failures as e:
            raise _RefusedError(" ".join(str(e).split())) from e
        return texts[0], marked[0] if marked else []

    def _has_tag(self, tools: list[Json] | None) -> bool:
        source = self._core.get_chat_template(None, tools)
        return any(_GENERATION in tag.split() for tag in _tags(source))

    def _count_unread(
        self, chat: chats.Chat, tools: list[Json] | None, text: str, found: lessons.Lessons
    ) -> None:
        """Count data that makes no difference to the text: the template does not read it."""
        if tools is None or self._is_same(chat.messages, None, text):
            found.leave("key", "tools", chat.tools)
        for number, message in enumerate(chat.messages):
            for key, value in message.more.items():
                less = {name: one for name, one in message.more.items() if name != key}
                without = chats.Message(message.role, message.text, message.learned, less)
                messages = (*chat.messages[:number], without, *chat.messages[number + 1 :])
                if self._is_same(messages, tools, text):
                    found.leave("key", key, value)

    def _is_same(
        self, messages: tuple[chats.Message, ...], tools: list[Json] | None, text: str
    ) -> bool:
        try:
            return self._rendered(messages, tools)[0] == text
        except _RefusedError:
            return False


def form_of(core: typing.Any) -> chats.Form:
    """Return the form of a tokenizer's conversations: its chat template, or the plain one."""
    has_template = bool(getattr(core, "chat_template", None))
    if not has_template or not core.is_fast:  # a slow one knows no offsets
        return chats.Plain()
    template = Template(core)
    return template if template.can_be_learned() else chats.Plain()


def _tags(source: str) -> collections.abc.Iterator[str]:
    """Yield the contents of a template's statements, `{% ... %}`."""
    for part in source.split("{%")[1:]:
        yield part.split("%}")[0].strip("-+ \n\t")


def _teaches(message: chats.Message) -> bool:
    """Return whether a message is learned; an empty answer teaches nothing."""
    has_answer = bool(message.text.strip()) or not _ANSWERS.isdisjoint(message.more)
    return message.learned and has_answer


def _chosen(messages: tuple[chats.Message, ...], is_learned: list[bool], marked: Spans) -> Spans:
    """Return the marked parts that are learned: of the assistant's messages, one each."""
    answers = [message.role == chats.ASSISTANT for message in messages]
    if is_learned == answers:
        return marked
    if sum(answers) != len(marked):
        raise _RefusedError("it does not mark each message of the assistant by itself")

    spans = iter(marked)
    chosen: Spans = []
    for is_answer, teaches in zip(answers, is_learned, strict=True):
        if teaches and not is_answer:
            raise _RefusedError(f"it marks only messages of the {chats.ASSISTANT}")
        span = next(spans) if is_answer else None
        if span and teaches:
            chosen.append(span)
    return chosen


def _cut(text: str, spans: Spans) -> segments.Document:
    """Return a text as segments that are tokenised in one go."""
    document: list[segments.Segment] = []
    at = 0
    for begin, end in spans:
        document.append(segments.Segment(text[at:begin], learned=False, joined=True))
        document.append(segments.Segment(text[begin:end], joined=True))
        at = end
    document.append(segments.Segment(text[at:], learned=False, joined=True))
    return tuple(document)


def _leave(more: Json, found: lessons.Lessons) -> None:
    for key, value in more.items():
        found.leave("key", key, value)


def _as_json(message: chats.Message) -> Json:
    """Return a message as chat templates read it."""
    record: Json = {"role": message.role, "content": message.text, **message.more}
    calls = record.get("tool_calls")
    if calls is None and isinstance(record.get("function_call"), dict):
        calls = [{"type": "function", "function": record["function_call"]}]  # OpenAI's first form
    if isinstance(calls, list):
        record["tool_calls"] = [_with_arguments(call) for call in typing.cast(list[object], calls)]
    return record


def _with_arguments(call: object) -> object:
    """Return a tool call with its arguments as an object: OpenAI sends them as JSON text."""
    held = _object(call)
    function = _object(held.get("function"))
    if not isinstance(function.get("arguments"), str):
        return call
    return {**held, "function": {**function, "arguments": _parsed(function["arguments"])}}


def _object(value: object) -> Json:
    return typing.cast(Json, value) if isinstance(value, dict) else {}


def _parsed(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return typing.cast(object, value) if isinstance(value, dict) else text


def _as_tools(tools: object) -> list[Json] | None:
    """Return the tools if they are descriptions as transformers takes them."""
    if not isinstance(tools, list) or not tools:
        return None
    listed = typing.cast(list[object], tools)
    if not all(isinstance(tool, dict) for tool in listed):
        return None
    return typing.cast(list[Json], listed)

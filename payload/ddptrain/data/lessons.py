"""Counts of what records teach, and of data that is left out, made while they are read."""

import collections
import collections.abc
import dataclasses
import json
import typing

from ddptrain.data import unread

REFUSED = "conversation that the chat template refuses"
NO_ANSWER = "no message of the assistant"

_MOST_NAMES = 100  # of keys and roles: a record may have its own
_OTHERS = "others"
_LONGEST_NAME = 40
_LONGEST_REASON = 160

Json = dict[str, typing.Any]


@dataclasses.dataclass
class Lessons:
    """Numbers of conversations, of messages, and of data that is not learned."""

    left_out: unread.Unread = dataclasses.field(default_factory=unread.Unread)
    conversations: int = 0
    idle: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
    """Conversations that teach nothing, by the reason."""
    unanswered: int = 0
    """Those of them without a message of the assistant, and those that are refused."""
    unknown: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
    """Messages that are read and not learned, by their role, which is not a known one."""

    def leave(self, kind: str, name: str, value: object) -> None:
        """Count a key, a part or a conversation that is not read, unless it is empty."""
        size_bytes = _size_bytes(value)
        if size_bytes:
            what = _bounded(f"{kind} {_short(name)}", self.left_out, f"{kind} (others)")
            self.left_out.add(what, size_bytes)

    def refuse(self, reason: str, value: object) -> None:
        """Count a conversation that is not read at all."""
        self.conversations += 1
        self.unanswered += 1
        why = _short(f"{REFUSED}: {reason}", _LONGEST_REASON)
        self.idle[_bounded(why, self.idle, REFUSED)] += 1
        self.left_out.add(REFUSED, _size_bytes(value))

    def meet(self, role: str) -> None:
        """Count a message of an unknown role."""
        self.unknown[_bounded(_short(role), self.unknown, _OTHERS)] += 1

    def teach(self, reason: str) -> None:
        """Count a conversation that is read; with a reason, one that teaches nothing."""
        self.conversations += 1
        if reason:
            why = _short(reason, _LONGEST_REASON)
            self.idle[_bounded(why, self.idle, _OTHERS)] += 1

    @property
    def idle_text(self) -> str:
        """The number of conversations that teach nothing, with the reasons, or ""."""
        if not self.idle:
            return ""
        reasons = ", ".join(self.idle) if len(self.idle) == 1 else _listed(self.idle)
        what = f"{self.idle.total()} of {self.conversations} conversations teach nothing"
        return f"{what}: {reasons}"

    def as_record(self) -> Json:
        """Return the JSON object, without `left_out`."""
        return {
            "conversations": self.conversations,
            "teach_nothing": dict(self.idle),
            "unanswered": self.unanswered,
            "unknown_roles": dict(self.unknown),
        }

    def merge(self, record: Json) -> None:
        """Add the numbers of another's record."""
        self.conversations += record["conversations"]
        self.idle.update(record["teach_nothing"])
        self.unanswered += record["unanswered"]
        self.unknown.update(record["unknown_roles"])


def describe(found: Lessons, *, masked: bool) -> list[str]:
    """Return a line for each kind of thing that is not learned; without masks all text is."""
    lines: list[str] = []
    if masked and found.idle:
        lines.append(found.idle_text)
    if masked and found.unknown:
        what = "messages of unknown roles, read but not learned"
        lines.append(f"{what}: {_listed(found.unknown)}")
    if found.left_out:
        lines.append(f"not read: {found.left_out}")
    return lines


def _listed(counts: collections.abc.Mapping[str, int]) -> str:
    most_first = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{name} {count}" for name, count in most_first)


def _bounded(name: str, counts: collections.abc.Collection[str], others: str) -> str:
    """Return a name, or `others` if there are too many names."""
    return name if name in counts or len(counts) < _MOST_NAMES else others


def _short(name: str, length: int = _LONGEST_NAME) -> str:
    text = "".join(char if char.isprintable() else "?" for char in " ".join(name.split()))
    return text[:length] or '""'


def _size_bytes(value: object) -> int:
    """Return the size of a value as text, 0 if it is empty."""
    if value is None or value in ("", [], {}):
        return 0
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return len(text.encode(errors="replace"))

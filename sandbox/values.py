"""Parse parameters of actions as `juju run` does, with go-yaml 2.4. PyYAML differs."""

import collections.abc
import math
import re
import typing

import yaml

from sandbox.store import SandboxError

_WORDS: dict[str, object] = {
    **dict.fromkeys("y Y yes Yes YES true True TRUE on On ON".split(), True),
    **dict.fromkeys("n N no No NO false False FALSE off Off OFF".split(), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **{
        sign + word: float(sign + "inf")
        for sign in ("", "+", "-")
        for word in (".inf", ".Inf", ".INF")
    },
}
_INTEGER = re.compile(r"([+-]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+|0[0-7]*|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


def parse(text: str) -> object:
    """Parse the VALUE of `key=VALUE`: null, a boolean, a number, a text, a list or an object.

    Raises:
        SandboxError: for what Juju refuses, in one line.
    """
    try:
        parse_events: typing.Any = yaml.parse  # untyped
        events: collections.abc.Iterator[yaml.Event] = parse_events(
            text.encode(errors="surrogateescape"), yaml.CSafeLoader
        )
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                return _value(
                    next(events), events, {}
                )  # what comes behind the document's end is not read
    except (yaml.YAMLError, ValueError) as e:
        problem = (isinstance(e, yaml.MarkedYAMLError) and e.problem) or str(e)
        raise SandboxError(f"not YAML: {' '.join(problem.split())}") from e
    except RecursionError as e:
        raise SandboxError("not YAML: nested too deeply") from e
    return None  # nothing, or a comment


def _value(
    event: yaml.Event, events: collections.abc.Iterator[yaml.Event], anchors: dict[str, object]
) -> object:
    if isinstance(event, yaml.AliasEvent):
        if event.anchor not in anchors:  # also for a list that contains itself
            raise ValueError(f"unknown anchor {event.anchor!r} referenced")
        return anchors[event.anchor]
    found: object
    if isinstance(event, yaml.ScalarEvent):
        if (event.tag or "").startswith("tag:") and event.tag != "tag:yaml.org,2002:str":
            raise ValueError(f"the sandbox does not read values of {event.tag}")  # harder than Juju
        found = _plain(event.value) if event.implicit[0] and not event.tag else event.value
    else:
        items: list[object] = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent | yaml.MappingEndEvent):
            items.append(_value(item, events, anchors))
        found = (
            items
            if isinstance(event, yaml.SequenceStartEvent)
            else _object(items[::2], items[1::2])
        )
    anchor: str | None = typing.cast(typing.Any, event).anchor
    if anchor is not None:
        anchors[anchor] = found
    return found


def _object(keys: list[object], values: list[object]) -> dict[str, object]:
    for key in keys:
        if not isinstance(key, str):
            raise ValueError("map keyed with non-string value")
    return dict(zip(typing.cast("list[str]", keys), values, strict=True))


def _plain(text: str) -> object:
    """Resolve an unquoted text. Times and dates stay text: go-yaml lacks sexagesimal numbers."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    plain = text if text[0] == "." else text.replace("_", "")
    if match := _INTEGER.fullmatch(plain):
        sign, digits = match.groups()
        number = int(digits, 8 if re.fullmatch("0[0-7]+", digits) else 0) * (
            -1 if sign == "-" else 1
        )
        if -(1 << 63) <= number < 1 << (63 if sign else 64):
            return number
    if _FLOAT.fullmatch(plain) and math.isfinite(float(plain)):
        return float(plain)
    return text

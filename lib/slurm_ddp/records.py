"""Frozen dataclasses as JSON files, with the standard library only."""

import dataclasses
import json
import pathlib
import types
import typing


class _Dataclass(typing.Protocol):
    __dataclass_fields__: typing.ClassVar[dict[str, "dataclasses.Field[typing.Any]"]]


Record = typing.TypeVar("Record", bound=_Dataclass)


def read(kind: type[Record], path: pathlib.Path) -> Record:
    """Read a record; unknown keys are ignored, and arrays become tuples.

    Raises `OSError` and `ValueError`.
    """
    raw: object = json.loads(path.read_text())
    if not isinstance(raw, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return parse(kind, typing.cast("dict[str, object]", raw), path.name)


def parse(kind: type[Record], given: dict[str, object], name: str) -> Record:
    """Make a record of an object's values.

    Raises `ValueError`, which begins with the file's name.
    """
    hints = typing.get_type_hints(kind)
    values = {
        field.name: _tuples(given[field.name])
        for field in dataclasses.fields(kind)
        if field.name in given
    }
    for key, value in values.items():
        if not _fits(value, hints[key]):
            raise ValueError(f"{name} holds {key}={value!r:.60}")
    try:
        return kind(**values)
    except TypeError as e:
        raise ValueError(f"{name}: {e}") from e


def load(default: Record, path: pathlib.Path) -> Record:
    """Read a record of the default's kind; return the default if the file cannot be read."""
    try:
        return read(type(default), path)
    except (OSError, ValueError):
        return default


def text(record: _Dataclass) -> str:
    """Write the content of a record's file."""
    return json.dumps(dataclasses.asdict(record)) + "\n"


def _tuples(value: object) -> object:
    if isinstance(value, list):
        return tuple(map(_tuples, typing.cast("list[object]", value)))
    return value


def _fits(value: object, hint: typing.Any) -> bool:
    """Report whether a value has the type of its field.

    The items of a tuple or a mapping are not checked.
    """
    kinds = (typing.get_origin(hint) or hint,)
    if isinstance(hint, types.UnionType):
        kinds = typing.get_args(hint)
    if float in kinds:
        kinds = (*kinds, int)
    return isinstance(value, kinds)

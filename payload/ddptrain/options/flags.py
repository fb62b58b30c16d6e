"""Flags declared as fields of a dataclass: name, type, help, default and bounds, each once."""

import argparse
import dataclasses
import operator
import pathlib
import typing

from ddptrain.ground import errors

TIMEOUT_MINUTES = 30.0
_TIMEOUT = (
    "how long ranks wait for one another, as for a first compilation, before a hang ends the run"
)
_METAVARS: dict[object, str] = {int: "N", float: "X", pathlib.Path: "PATH"}
_BOUNDS = (
    ("least", "at least", operator.ge),
    ("most", "at most", operator.le),
    ("above", "above", operator.gt),
    ("below", "below", operator.lt),
)


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as everything else is reported."""

    def error(self, message: str) -> typing.NoReturn:
        """Raise UserError."""
        raise errors.SharedError(f"{message}; see `{self.prog} --help`")


def option(
    default: typing.Any, text: str, kind: type | None = None, **more: typing.Any
) -> typing.Any:
    """Make an option's field; `more` are bounds, choices, `short` and argparse's arguments."""
    about = {"text": text, "kind": kind or type(default), "default": default, **more}
    return dataclasses.field(default=default, metadata=about)


def setting(
    default: typing.Any, text: str, kind: type | None = None, **more: typing.Any
) -> typing.Any:
    """Make the field of an option that is None until it is given."""
    about = {"text": text, "kind": kind or type(default), "default": default, **more}
    return dataclasses.field(default=None, metadata=about)


def timeout() -> typing.Any:
    """Make the field of `timeout_minutes`."""
    return option(TIMEOUT_MINUTES, _TIMEOUT, least=0.1, most=1440.0)


def declare(
    parser: argparse.ArgumentParser,
    options: typing.Any,
    groups: typing.Any = (),
    hidden: tuple[str, ...] = (),
) -> None:
    """Declare a flag for every field of a dataclass of options; one that is not given is None.

    `groups` has the title of each group by its first option. The help leaves out `hidden`.
    """
    group: typing.Any = parser
    for field in dataclasses.fields(options):
        if not field.metadata:
            continue
        if field.name in groups:
            group = parser.add_argument_group(groups[field.name])
        text = argparse.SUPPRESS if field.name in hidden else _help(field)
        _declare_one(group, field, text)


def _declare_one(group: typing.Any, field: typing.Any, text: str) -> None:
    meta = field.metadata
    names = [_flag(field.name)]
    if "short" in meta:
        names.insert(0, meta["short"])
    if meta["kind"] is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, help=text)
        return

    more: dict[str, typing.Any] = {"type": meta["kind"], "help": text}
    if "choices" not in meta:
        more["metavar"] = _METAVARS.get(meta["kind"], "TEXT")
    for key in ("choices", "metavar", "nargs", "required"):
        if key in meta:
            more[key] = meta[key]
    group.add_argument(*names, **more)


def _help(field: typing.Any) -> str:
    """Return the help of an option with its default, unless the text says it."""
    text: str = field.metadata["text"]
    default = field.metadata["default"]
    if default in (None, dataclasses.MISSING) or "default" in text:
        return text
    if isinstance(default, bool):
        default = "yes" if default else "no"
    return f"{text} [default: {default}]"


def given(args: argparse.Namespace, options: typing.Any) -> typing.Any:
    """Return the options that `declare` has declared, each checked.

    Raises UserError, which names the first invalid one.
    """
    values: dict[str, typing.Any] = {}
    for field in dataclasses.fields(options):
        value = getattr(args, field.name)
        if value is None:
            continue
        check(field, value)
        if isinstance(value, list):
            value = tuple(typing.cast(list[object], value))
        values[field.name] = value
    return options(**values)


def check(field: typing.Any, value: typing.Any) -> None:
    """Raise UserError naming the option if the value breaks one of its rules."""
    meta = field.metadata
    flag = f"{_flag(field.name)} {value}"
    if "choices" in meta and value not in meta["choices"]:
        raise errors.UserError(f"{flag}: must be one of {', '.join(meta['choices'])}")
    if isinstance(value, float) and not -1e300 < value < 1e300:
        raise errors.UserError(f"{flag}: must be a finite number")
    for bound, words, holds in _BOUNDS:
        if bound in meta and not holds(value, meta[bound]):
            raise errors.UserError(f"{flag}: must be {words} {meta[bound]}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

"""Options as data: all that a flag, an action's parameter and the reference need of each."""

import dataclasses
import pathlib
import typing

import pydantic

from ddp.node import spec
from ddp.options import fields
from ddp.problem import ParameterError
from slurm_ddp import backports

Kind = typing.Literal["string", "integer", "boolean"]
TEXTS = backports.read_toml(pathlib.Path(__file__).with_name("options.toml"))
_KINDS: dict[type, Kind] = {str: "string", int: "integer", bool: "boolean"}


@dataclasses.dataclass(frozen=True)
class Text:
    """An entry of options.toml."""

    help: str
    default: str = ""
    group: str = ""
    short: str = ""
    argument: str = ""
    many: bool = False
    separator: str = " "
    is_path: bool = False
    may_be_path: bool = False
    words: tuple[str, ...] = ()
    terminal: int | None = None
    only_terminal: bool = False


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a verb."""

    model: type[fields.Parsed]
    name: str  # with hyphens
    kind: Kind
    text: Text
    default: str | int | bool | None = None  # None: there is none
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    is_required: bool = False

    @property
    def takes_number(self) -> bool:
        """Whether it is a text that may be a whole number or a year, which YAML does not read as a text."""
        return self.kind == "string" and any(self._takes(number) for number in (30, 2026))

    def _takes(self, value: object) -> bool:
        try:
            fields.parse(self.model, {self.name: value})
        except ParameterError as e:
            return e.name != self.name
        return True

    @property
    def shown_default(self) -> str:
        """The default in words; empty for none."""
        if self.text.default or self.default is None or self.default is False or self.default == "":
            return self.text.default
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    def schema(self) -> dict[str, object]:
        """Declare it as a parameter in charmcraft.yaml."""
        declared: dict[str, object] = {
            "type": ["string", "integer"] if self.takes_number else self.kind
        }
        declared |= {"enum": list(self.choices)} if self.choices else {}
        for name, value in (
            ("minimum", self.minimum),
            ("maximum", self.maximum),
            ("default", self.default),
        ):
            if value is not None:
                declared[name] = value
        shown = f" [default: {self.text.default}]" if self.text.default else ""
        return declared | {"description": self.text.help + shown}


def options(model: type[fields.Parsed]) -> tuple[Option, ...]:
    """List the options of a model, in the order of declaration."""
    found = (
        (str(field.alias), field) for field in model.model_fields.values() if not field.exclude
    )
    return tuple(_option(model, name, field) for name, field in found)


def directives(params: fields.Parsed) -> list[tuple[str, str]]:
    """List sbatch's options that are given as they are, those of `sbatch` too, with their values; a flag has none."""
    found: list[tuple[str, str]] = []
    for name, directive in fields.directives(type(params)).items():
        value = getattr(params, name)
        is_given = value is not None and value is not False and value != ""
        if is_given and not directive.is_computed:
            found.append((directive.name, "" if value is True else str(value)))
    words = (word[2:].partition("=") for word in getattr(params, "sbatch", "").split())
    return [*found, *((name, value) for name, _, value in words)]


def _text(model: type[fields.Parsed], name: str) -> Text:
    entry = next(
        (TEXTS[c.__name__][name] for c in model.__mro__ if name in TEXTS.get(c.__name__, {})), None
    )
    return spec.build(Text, TEXTS[name] if entry is None else entry)


def _option(model: type[fields.Parsed], name: str, field: pydantic.fields.FieldInfo) -> Option:
    base, marks = fields.base_of(field.annotation)
    limits = next(
        (mark for mark in (*field.metadata, *marks) if isinstance(mark, fields.Limits)), None
    )
    return Option(
        model=model,
        name=name,
        kind=_KINDS[base],
        text=_text(model, name),
        default=None if field.is_required() else field.default,
        minimum=limits.least if limits else None,
        maximum=limits.most if limits else None,
        choices=limits.choices if limits else (),
        is_required=field.is_required(),
    )

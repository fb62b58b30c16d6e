"""Options as data, for flags, the parameters of actions and the reference."""

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
    default: str | int | bool | None = None  # None: no default
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    is_required: bool = False

    @property
    def takes_number(self) -> bool:
        """Whether it is a text that YAML may read as a number, such as 30 or 2026."""
        return self.kind == "string" and (self._takes(30) or self._takes(2026))

    def _takes(self, value: object) -> bool:
        try:
            fields.parse(self.model, {self.name: value})
        except ParameterError as e:
            return e.name != self.name
        return True

    @property
    def shown_default(self) -> str:
        """The default in words, or ""."""
        has_none = self.default is None or self.default is False or self.default == ""
        if self.text.default or has_none:
            return self.text.default
        return "true" if self.default is True else str(self.default)

    def schema(self) -> dict[str, object]:
        """Return its declaration as a parameter in charmcraft.yaml."""
        declared: dict[str, object] = {"type": self.kind}
        if self.takes_number:
            declared["type"] = ["string", "integer"]
        if self.choices:
            declared["enum"] = list(self.choices)

        bounds = {"minimum": self.minimum, "maximum": self.maximum, "default": self.default}
        for name, value in bounds.items():
            if value is not None:
                declared[name] = value

        declared["description"] = self.text.help
        if self.text.default:
            declared["description"] = f"{self.text.help} [default: {self.text.default}]"
        return declared


def options(model: type[fields.Parsed]) -> tuple[Option, ...]:
    """List the options of a model, in the order of declaration."""
    fields_shown = [field for field in model.model_fields.values() if not field.exclude]
    return tuple(_option(model, str(field.alias), field) for field in fields_shown)


def directives(params: fields.Parsed) -> list[tuple[str, str]]:
    """List the options to hand to sbatch as they are, with their values; a flag's is "".

    The words of the option `sbatch` come last.
    """
    found: list[tuple[str, str]] = []
    for name, directive in fields.directives(type(params)).items():
        value = getattr(params, name)
        is_given = value is not None and value is not False and value != ""
        if is_given and not directive.is_computed:
            found.append((directive.name, "" if value is True else str(value)))

    for word in getattr(params, "sbatch", "").split():
        name, _, value = word.removeprefix("--").partition("=")
        found.append((name, value))
    return found


def _text(model: type[fields.Parsed], name: str) -> Text:
    """Find an option's entry in options.toml: the one of its verb, or the one that verbs share."""
    for parent in model.__mro__:
        own = TEXTS.get(parent.__name__, {})
        if name in own:
            return spec.build(Text, own[name])
    return spec.build(Text, TEXTS[name])


def _option(model: type[fields.Parsed], name: str, field: pydantic.fields.FieldInfo) -> Option:
    base, marks = fields.base_of(field.annotation)
    limits = _limits([*field.metadata, *marks])
    return Option(
        model=model,
        name=name,
        kind=_KINDS[base],
        text=_text(model, name),
        default=None if field.is_required() else field.default,
        minimum=limits.least,
        maximum=limits.most,
        choices=limits.choices,
        is_required=field.is_required(),
    )


def _limits(marks: list[object]) -> fields.Limits:
    """Return the first bounds or choices among an option's annotations."""
    for mark in marks:
        if isinstance(mark, fields.Limits):
            return mark
    return fields.Limits(str)  # anything goes

"""Options as data: what an action's parameter, a flag of the command line and the reference say of each."""

import dataclasses
import typing

import pydantic

from ddp.options import fields


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a verb."""

    name: str  # with hyphens
    kind: typing.Literal["string", "integer", "boolean"]
    description: str
    default: str | int | bool | None = None  # None: there is none
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    is_required: bool = False

    def schema(self) -> dict[str, object]:
        """Return it as charmcraft.yaml declares a parameter."""
        declared: dict[str, object] = {"type": self.kind}
        declared |= {"enum": list(self.choices)} if self.choices else {}
        for name, value in (("minimum", self.minimum), ("maximum", self.maximum), ("default", self.default)):
            if value is not None:
                declared[name] = value
        return declared | {"description": self.description}


_KINDS: dict[type, typing.Literal["string", "integer", "boolean"]] = {str: "string", int: "integer", bool: "boolean"}


def options(model: type[fields.Parsed]) -> tuple[Option, ...]:
    """Return the options of a model, in the order in which it declares them."""
    return tuple(_option(str(field.alias), field) for field in model.model_fields.values() if not field.exclude)


def directives(params: fields.Parsed, *, is_judged: bool = False) -> list[tuple[str, str]]:
    """Return the options of sbatch(1) that are given as they are, with their values; a flag has none.

    With `is_judged` they are for `sbatch --test-only`.
    """
    found: list[tuple[str, str]] = []
    for name, directive in fields.directives(type(params)).items():
        value = getattr(params, name)
        is_given = value is not None and value is not False and value != ""
        if is_given and not directive.is_computed and (directive.is_judged or not is_judged):
            found += [(directive.name, "" if value is True else str(value)), *directive.more]
    return found


def shared(params: fields.Parsed, model: type[fields.Parsed]) -> dict[str, object]:
    """Select the given options that set a directive of sbatch and that `model` has, too, by their names."""
    names = fields.directives(type(params)).keys() & fields.directives(model).keys()
    given = {str(model.model_fields[name].alias): getattr(params, name) for name in sorted(names)}
    return {name: value for name, value in given.items() if value is not None}


def _option(name: str, field: pydantic.fields.FieldInfo) -> Option:
    base, marks = _parts(field.annotation)
    marks = [*field.metadata, *marks]
    bound = next((mark for mark in marks if isinstance(mark, fields.Bound)), None)
    one_of = next((mark for mark in marks if isinstance(mark, fields.OneOf)), None)
    assert field.description, name
    return Option(
        name=name,
        kind=_KINDS[base],
        description=field.description,
        default=None if field.is_required() else field.default,
        minimum=bound.least if bound else None,
        maximum=bound.most if bound else None,
        choices=one_of.choices if one_of else (),
        is_required=field.is_required(),
    )


def _parts(annotation: typing.Any) -> tuple[type, list[object]]:
    """Return the type behind `X | None` and `Annotated`, and what it is annotated with."""
    arguments = typing.get_args(annotation)
    if not arguments:
        return annotation, []
    if hasattr(annotation, "__metadata__"):
        base, marks = _parts(arguments[0])
        return base, [*marks, *annotation.__metadata__]
    (inner,) = (argument for argument in arguments if argument is not type(None))
    return _parts(inner)

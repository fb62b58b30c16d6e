"""Code that all charms share: statuses, a table of actions, and errors that name an option.

This module does not import ops: charm.py passes in ops' objects, and makes ops' status with
`ops.StatusBase.from_name`.
"""

import collections.abc
import contextlib
import dataclasses
import enum
import logging
import os
import typing

import pydantic

# Characters of a message in `juju status` (cmd/juju/status/output_tabular.go, maxMessageLength)
MESSAGE_LIMIT = 120

logger = logging.getLogger(__name__)

Results = dict[str, str]
Log = collections.abc.Callable[[str], object]
S = typing.TypeVar("S")


class Level(str, enum.Enum):  # noqa: UP042 - enum.StrEnum came with Python 3.11
    """The level of a status: active, maintenance, waiting, or blocked until the operator acts."""

    ACTIVE = "active"
    MAINTENANCE = "maintenance"
    WAITING = "waiting"
    BLOCKED = "blocked"


@dataclasses.dataclass(frozen=True)
class Status:
    """A unit's status: one line that states the problem and what to type."""

    level: Level
    text: str


def shown(status: Status, before: str = "") -> str:
    """Cut a status's text to what `juju status` shows.

    All of it is logged, unless the unit's last message is the same.
    """
    if len(status.text) <= MESSAGE_LIMIT:
        return status.text
    cut = f"{status.text[: MESSAGE_LIMIT - 3]}..."
    if cut != before:
        logger.warning("the whole status: %s", status.text)
    return cut


class StatusError(Exception):
    """An obstacle to the unit's work, as the status that reports it."""

    def __init__(self, level: Level, text: str, *, retry: bool = False) -> None:
        super().__init__(text)
        self.status = Status(level, text)
        self.retry = retry  # no event of Juju's announces the end of it


class ActionError(Exception):
    """The action failed. `str()` is one line: what failed, why, what to type."""


class Parameters(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The base of all models of an action's parameters.

    Juju's `big-file-size` is the field `big_file_size`.
    """

    model_config = pydantic.ConfigDict(alias_generator=lambda name: name.replace("_", "-"))

    @pydantic.model_validator(mode="before")
    @classmethod
    def _as_texts(cls, given: dict[str, object]) -> dict[str, object]:
        """Turn integers into texts: Juju passes `branch=580` as a number.

        A field that is a number reads its text.
        """
        integers = {name: str(value) for name, value in given.items() if type(value) is int}
        return given | integers


@dataclasses.dataclass(frozen=True)
class Action(typing.Generic[S]):
    """An action: its parameters, and the function that runs it on the volume or the mount."""

    parameters: type[pydantic.BaseModel]
    run: collections.abc.Callable[[S, typing.Any, Log], Results]


class ActionEvent(typing.Protocol):
    """The part of `ops.ActionEvent` that is used here."""

    params: dict[str, typing.Any]
    set_results: collections.abc.Callable[[dict[str, typing.Any]], None]
    fail: collections.abc.Callable[[str], None]
    log: collections.abc.Callable[[str], None]


def is_principal(app: str) -> bool:
    """Report whether this subordinate unit accompanies the application.

    Juju before 3 names none, so any counts.

    Juju 4 shows a subordinate the container-scoped relations of other machines' principals, too.
    """
    return os.environ.get("JUJU_PRINCIPAL_UNIT", "").partition("/")[0] in ("", app)


def action_name(kind: str) -> str:
    """Convert the kind of an event's handle to the action's name in charmcraft.yaml."""
    return kind.removesuffix("_action").replace("_", "-")


def run_action(
    action: Action[S],
    subject: collections.abc.Callable[[], S],
    event: ActionEvent,
    *,
    within: contextlib.AbstractContextManager[object] | None = None,
    failures: tuple[type[Exception], ...] = (),
) -> None:
    """Run the action on the subject; set its results, or fail it with one line.

    `within` is entered around subject and action, and may convert their errors to `StatusError`.
    `failures` fail the action like `StatusError`, `ActionError` and `ValueError`.
    """
    try:
        parameters = action.parameters.model_validate(event.params)
        with within or contextlib.nullcontext():
            event.set_results(action.run(subject(), parameters, event.log))
    except (StatusError, ActionError, ValueError, *failures) as e:
        event.fail(problem(e))


@contextlib.contextmanager
def config_errors() -> collections.abc.Generator[None]:
    """Turn an error inside into a blocked `StatusError` that names the option.

    The errors are `pydantic.ValidationError` and `ValueError`.
    """
    try:
        yield
    except ValueError as e:  # pydantic's errors are among them
        raise StatusError(Level.BLOCKED, problem(e)) from e


@contextlib.contextmanager
def naming(option: str) -> collections.abc.Generator[None]:
    """Put the option's name in front of a `ValueError` inside."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f"{option}: {e}") from e


def problem(error: Exception) -> str:
    """Write an error as one line; pydantic's begins with the name of the option or parameter."""
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"])).replace("_", "-")
    return f"{name}: {first['msg'].removeprefix('Value error, ').lower()}"

import dataclasses
import pathlib
import typing

import pydantic
import pytest
import yaml

from slurm_ddp import charm

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())


class Copy(charm.Parameters, frozen=True):
    source_path: str
    count: int = pydantic.Field(default=1, ge=1)


def copy(volume: str, wanted: Copy, log: charm.Log) -> charm.Results:
    log(f"copying {wanted.source_path}")
    if wanted.source_path == "/gone":
        raise charm.ActionError("source-path: /gone does not exist")
    return {"copied": f"{wanted.count} of {wanted.source_path} on {volume}"}


@dataclasses.dataclass
class Event:
    """An action's event as ops has it."""

    params: dict[str, typing.Any]
    seen: list[object] = dataclasses.field(default_factory=list[object])

    def set_results(self, results: dict[str, typing.Any]) -> None:
        self.seen.append(results)

    def fail(self, message: str = "") -> None:
        self.seen.append(f"failed: {message}")

    def log(self, message: str) -> None:
        self.seen.append(message)


def ran(subject: typing.Callable[[], str] = lambda: "v", /, **params: object) -> list[object]:
    event = Event({key.replace("_", "-"): value for key, value in params.items()})
    charm.run_action(charm.Action[str](Copy, copy), subject, event, failures=(KeyError,))
    return event.seen


def test_an_action_gets_its_parameters_and_sets_its_results():
    assert ran(source_path="/a", count=2) == ["copying /a", {"copied": "2 of /a on v"}]


@pytest.mark.parametrize(
    ("params", "message"),
    CASES["parameters_that_cannot_be_fail_it_by_name_before_anything_is_done"],
)
def test_parameters_that_cannot_be_fail_it_by_name_before_anything_is_done(
    params: dict[str, object], message: str
):
    def never() -> str:
        raise AssertionError

    assert ran(never, **params) == [f"failed: {message}"]


def test_whatever_fails_is_one_line():
    def raising(error: Exception) -> typing.Callable[[], str]:
        def subject() -> str:
            raise error

        return subject

    assert ran(source_path="/gone")[-1] == "failed: source-path: /gone does not exist"
    waiting = charm.StatusError(charm.Level.WAITING, "waiting for the leader")
    assert ran(raising(waiting), source_path="/a") == ["failed: waiting for the leader"]
    assert ran(raising(ValueError("path: no")), source_path="/a") == ["failed: path: no"]
    assert ran(raising(KeyError("x")), source_path="/a") == ["failed: 'x'"]
    with pytest.raises(ZeroDivisionError):  # our own mistakes stay visible
        ran(raising(ZeroDivisionError()), source_path="/a")


class Config(pydantic.BaseModel, frozen=True):
    block_size: int = 4

    @pydantic.field_validator("block_size")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("an even number is needed")
        return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x", "block-size: input should be a valid integer"),
        (3, "block-size: an even number is needed"),
    ],
)
def test_an_option_that_cannot_be_is_a_blocked_status_that_names_it(value: object, message: str):
    with pytest.raises(charm.StatusError) as caught, charm.config_errors():
        Config.model_validate({"block_size": value})
    assert caught.value.status.level == charm.Level.BLOCKED
    assert caught.value.status.text.startswith(message)
    with (
        pytest.raises(charm.StatusError, match=r"^bucket: set it$"),
        charm.config_errors(),
        charm.naming("bucket"),
    ):
        raise ValueError("set it")


@pytest.mark.parametrize("length", [0, 120, 121, 400])
def test_a_status_is_as_long_as_juju_shows_and_the_rest_is_logged_once(
    length: int, caplog: pytest.LogCaptureFixture
):
    status = charm.Status(charm.Level.BLOCKED, "set volume-name: ".ljust(length, "x")[:length])
    shown = charm.shown(status, "active before")
    assert len(shown) <= charm.MESSAGE_LIMIT
    assert status.text.startswith(shown.removesuffix("..."))
    whole = [f"the whole status: {status.text}"] if length > charm.MESSAGE_LIMIT else []
    assert caplog.messages == whole
    assert charm.shown(status, shown) == shown
    assert caplog.messages == whole, "it is logged again only when the message changes"

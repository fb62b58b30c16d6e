"""Fixtures for the tests of every charm."""

# pyright: reportPrivateUsage=false

import collections.abc
import dataclasses
import logging
from typing import Any

import pytest
import scenario._consistency_checker as checker
import scenario.mocking
import yaml

import messages

# Scenario writes and reads charmcraft.yaml for every event; with pure Python that is most of a
# test's time
yaml.SafeLoader, yaml.SafeDumper = yaml.CSafeLoader, yaml.CSafeDumper

_check_types = checker._check_action_param_types
_NAMES: dict[type, str] = {str: "string", int: "integer", bool: "boolean"}


def _check(charm_spec: Any, action: Any, *found: list[str]) -> None:
    """Check parameters. Scenario lacks unions: one is checked as its value's type if it fits."""
    declared = charm_spec.actions[action.name] or {}
    params = {
        name: schema | _one(schema, action.params.get(name))
        for name, schema in declared.get("params", {}).items()
    }
    spec = dataclasses.replace(charm_spec, actions={action.name: declared | {"params": params}})
    _check_types(spec, action, *found)


def _one(schema: dict[str, Any], value: object) -> dict[str, str]:
    if not isinstance(schema["type"], list):
        return {}
    name = _NAMES.get(type(value), "string")
    return {"type": name if name in schema["type"] else schema["type"][0]}


checker._check_action_param_types = _check


@pytest.fixture(autouse=True)
def messages_fit(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> collections.abc.Generator[list[str]]:
    """Fail a test in which a charm sets a message that `juju status` or the charm itself cuts.

    The marker `cut` is for messages that end with another program's words, which may be cut.
    """
    shown, cut = list[str](), list[str]()
    backend: Any = scenario.mocking._MockModelBackend
    status_set = backend.status_set

    def watched(self: Any, status: Any, message: str = "", **named: Any) -> None:
        shown.append(message)
        status_set(self, status, message, **named)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            cut.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("slurm_ddp.charm")
    monkeypatch.setattr(backend, "status_set", watched)
    logger.addHandler(handler)
    yield shown
    logger.removeHandler(handler)
    assert [message for message in shown if len(message) > messages.SHOWN] == []
    if request.node.get_closest_marker("cut") is None:
        uncut = [message for message in shown if not message.endswith("...")]
        whole = [*uncut, *(message.removeprefix("the whole status: ") for message in cut)]
        assert [
            message for message in map(messages.at_length, whole) if len(message) > messages.SHOWN
        ] == []

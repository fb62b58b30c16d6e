"""The two ways to a controller: pytest-operator for Juju 3.6, jubilant for 4.

pytest-operator's library refuses to connect to Juju 4. Both run the juju client; what differs is who makes the model.
"""

import asyncio
import collections.abc
import contextlib
import importlib
import json
import subprocess
import typing

import pytest

Answer = tuple[int, str, str]  # exit status, standard output, standard error


class Client(typing.Protocol):
    """The juju client on the model of the tests."""

    major: int  # of the controller's version

    def juju(self, *args: str) -> Answer:
        """Run the juju client on the model; return its exit status, standard output and standard error."""
        ...


class OpsTest(typing.Protocol):
    """The part of pytest-operator's `ops_test` that is used here."""

    model_full_name: str | None

    async def juju(self, *args: str) -> Answer:
        """Run the juju client."""
        ...


class WithPytestOperator:
    """The model that pytest-operator made."""

    def __init__(self, ops_test: OpsTest, loop: asyncio.AbstractEventLoop, major: int) -> None:
        self._ops_test, self._loop, self.major = ops_test, loop, major

    def juju(self, *args: str) -> Answer:
        """Run the juju client on the model."""
        command, *rest = args
        return self._loop.run_until_complete(
            self._ops_test.juju(command, "--model", str(self._ops_test.model_full_name), *rest)
        )


class WithJubilant:
    """A model that jubilant made."""

    def __init__(self, juju: typing.Any, major: int) -> None:
        self._juju, self.major = juju, major

    def juju(self, *args: str) -> Answer:
        """Run the juju client on the model."""
        try:
            return 0, self._juju.cli(*args), ""
        except subprocess.CalledProcessError as e:  # jubilant's CLIError is one
            return e.returncode, e.stdout, e.stderr


def controller_major() -> int | None:
    """Return the major version of the current controller's Juju, or None without a controller."""
    asked = subprocess.run(
        ["juju", "show-controller", "--format", "json"], check=False, capture_output=True, text=True
    )
    if asked.returncode != 0 or not asked.stdout.strip("{}\n "):
        return None
    (controller,) = json.loads(asked.stdout).values()
    return int(controller["details"]["agent-version"].partition(".")[0])


@contextlib.contextmanager
def connected(request: pytest.FixtureRequest) -> collections.abc.Generator[Client]:
    """Yield the client for the current controller, on a new model unless --model names one."""
    major = controller_major()
    assert major is not None
    if major < 4:
        ops_test: OpsTest = request.getfixturevalue("ops_test")
        yield WithPytestOperator(ops_test, request.getfixturevalue("event_loop"), major)
        return
    jubilant = importlib.import_module("jubilant")
    if model := request.config.getoption("--model"):
        yield WithJubilant(jubilant.Juju(model=model), major)
        return
    with jubilant.temp_model(keep=request.config.getoption("--keep-models")) as juju:
        yield WithJubilant(juju, major)

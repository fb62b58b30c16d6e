"""A deployed bundle as the tests see it: units, actions, commands on machines. All of pytest-operator's API is here."""

import asyncio
import collections.abc
import json
import logging
import pathlib
import time
import typing

ROOT = pathlib.Path(__file__).resolve().parents[2]
SETTLE_S = 3600  # from `juju deploy` to active: machines, packages, a database
JOB_S = 1200
_POLL_S = 10

logger = logging.getLogger(__name__)


class OpsTest(typing.Protocol):
    """The part of pytest-operator's `ops_test` that is used here."""

    model_full_name: str | None

    async def juju(self, *args: str) -> tuple[int, str, str]:
        """Run the juju client; return its exit status, standard output and standard error."""
        ...


class ActionError(Exception):
    """The action failed; `str()` is its message."""


class Cluster:
    """A model in which the bundle is deployed."""

    def __init__(self, ops_test: OpsTest) -> None:
        self._ops_test = ops_test

    async def juju(self, *args: str) -> str:
        """Run the juju client on this model; return what it printed."""
        command, *rest = args
        code, out, err = await self._ops_test.juju(command, "--model", str(self._ops_test.model_full_name), *rest)
        assert code == 0, f"juju {' '.join(args)} exited {code}: {err or out}"
        return out

    async def status(self) -> dict[str, typing.Any]:
        """Return `juju status`."""
        return json.loads(await self.juju("status", "--format", "json"))

    async def units(self) -> dict[str, dict[str, typing.Any]]:
        """Return every unit, subordinates too, by name."""
        found: dict[str, dict[str, typing.Any]] = {}
        for application in (await self.status())["applications"].values():
            for name, unit in (application.get("units") or {}).items():
                found[name] = unit
                found.update(unit.get("subordinates") or {})
        return found

    async def wait_until_active(self, *, timeout_s: float = SETTLE_S) -> None:
        """Wait until every unit is active and idle; fail at once when one is in error."""

        async def settled() -> bool:
            units = await self.units()
            states = {name: unit["workload-status"]["current"] for name, unit in units.items()}
            assert "error" not in states.values(), states
            idle = all(unit["juju-status"]["current"] == "idle" for unit in units.values())
            waiting = {
                name: unit["workload-status"].get("message") for name, unit in units.items() if states[name] != "active"
            }
            logger.info("%d units, waiting for %s", len(units), waiting or "agents to be idle")
            return bool(units) and not waiting and idle

        await self.wait_until(settled, "every unit is active", timeout_s=timeout_s)

    async def wait_until(
        self, condition: collections.abc.Callable[[], collections.abc.Awaitable[bool]], what: str, *, timeout_s: float
    ) -> None:
        """Wait until `condition()` holds."""
        deadline = time.monotonic() + timeout_s
        while not await condition():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
            await asyncio.sleep(_POLL_S)

    async def run(self, unit: str, action: str, **params: object) -> dict[str, typing.Any]:
        """Run an action and return its results. Parameters are written with underscores here.

        Raises:
            ActionError: the action failed.
        """
        arguments = [f"{name.replace('_', '-')}={_text(value)}" for name, value in params.items()]
        code, out, err = await self._ops_test.juju(
            "run",
            "--model",
            str(self._ops_test.model_full_name),
            "--format",
            "json",
            "--wait",
            f"{JOB_S}s",
            unit,
            action,
            *arguments,
        )
        try:
            (answer,) = json.loads(out).values()
        except ValueError:  # refused by the controller, before the charm saw it
            raise ActionError(err.strip() or out.strip()) from None
        if code != 0 or answer["status"] != "completed":
            raise ActionError(answer.get("message") or answer.get("results", {}).get("stderr", out))
        return answer["results"]

    async def exec(self, unit: str, command: str) -> str:
        """Run a shell command as root on a unit's machine and return what it printed."""
        answers = json.loads(await self.juju("exec", "--format", "json", "--unit", unit, "--", command))
        (answer,) = answers.values()
        assert answer["results"]["return-code"] == 0, answer
        return str(answer["results"].get("stdout", "")).strip()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

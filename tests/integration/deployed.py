"""A deployed bundle as the tests see it: units, actions, commands on machines."""

import collections.abc
import json
import logging
import os
import pathlib
import time
import typing

import clients

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIST = pathlib.Path(os.environ.get("SLURM_DDP_DIST", ROOT / "dist"))
SETTLE_S = 3600  # from `juju deploy` to active: machines, packages, a database
JOB_S = 1200
_POLL_S = float(os.environ.get("SLURM_DDP_POLL_S", "10"))

logger = logging.getLogger(__name__)


class ActionError(Exception):
    """The action failed; `str()` is its message."""


class Cluster:
    """A model with the deployed bundle."""

    def __init__(self, client: clients.Client) -> None:
        self._client = client

    def juju(self, *args: str) -> str:
        """Run the juju client on this model; return its output."""
        code, out, err = self._client.juju(*args)
        assert code == 0, f"juju {' '.join(args)} exited {code}: {err or out}"
        return out

    def status(self) -> dict[str, typing.Any]:
        """Return `juju status`."""
        return json.loads(self.juju("status", "--format", "json"))

    def deploy(self, *overlays: pathlib.Path) -> None:
        """Deploy the bundle: on LXD with the overlay for virtual machines, on Juju 4 with a database of ours."""
        (details,) = json.loads(self.juju("show-model", "--format", "json")).values()
        names = [
            *(["lxd"] if details["type"] == "lxd" else []),
            *(["juju4"] if self._client.major >= 4 else []),
        ]
        words: list[str] = []
        for path in [*(ROOT / f"overlays/{name}.yaml" for name in names), *overlays]:
            words += ["--overlay", str(path)]
        self.juju("deploy", str(ROOT / "bundle.yaml"), *words)

    def revisions(self) -> dict[str, int]:
        """Return the revision of each application's charm."""
        return {
            name: application["charm-rev"]
            for name, application in self.status()["applications"].items()
        }

    def units(self) -> dict[str, dict[str, typing.Any]]:
        """Return every unit, subordinates too, by name."""
        found: dict[str, dict[str, typing.Any]] = {}
        for application in (self.status())["applications"].values():
            for name, unit in (application.get("units") or {}).items():
                found[name] = unit
                found.update(unit.get("subordinates") or {})
        return found

    def started(self) -> set[str]:
        """Return the units whose machine runs their agent."""
        return {
            name
            for name, unit in self.units().items()
            if unit["juju-status"]["current"] not in {"", "allocating"}
        }

    def wait_until_active(self, *, timeout_s: float = SETTLE_S) -> None:
        """Wait until every unit is active and idle; fail at once when one is in error."""

        def settled() -> bool:
            units = self.units()
            states = {name: unit["workload-status"]["current"] for name, unit in units.items()}
            assert "error" not in states.values(), states
            idle = all(unit["juju-status"]["current"] == "idle" for unit in units.values())
            waiting = {
                name: unit["workload-status"].get("message")
                for name, unit in units.items()
                if states[name] != "active"
            }
            logger.info("%d units, waiting for %s", len(units), waiting or "agents to be idle")
            return bool(units) and not waiting and idle

        self.wait_until(settled, "every unit is active", timeout_s=timeout_s)

    def wait_until(
        self, condition: collections.abc.Callable[[], bool], what: str, *, timeout_s: float
    ) -> None:
        """Wait until `condition()` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
            time.sleep(_POLL_S)

    def run(self, unit: str, action: str, **params: object) -> dict[str, typing.Any]:
        """Run an action and return its results. Parameters are written with underscores here.

        Raises:
            ActionError: the action failed.
        """
        arguments = [f"{name.replace('_', '-')}={_text(value)}" for name, value in params.items()]
        code, out, err = self._client.juju(
            "run", "--format", "json", "--wait", f"{JOB_S}s", unit, action, *arguments
        )
        try:
            (answer,) = json.loads(out).values()
        except ValueError:  # refused by the controller, before the charm saw it
            raise ActionError(err.strip() or out.strip()) from None
        if code != 0 or answer["status"] != "completed":
            raise ActionError(answer.get("message") or answer.get("results", {}).get("stderr", out))
        return answer["results"]

    def exec(self, unit: str, command: str) -> str:
        """Run a shell command as root on a unit's machine and return its output."""
        answers = json.loads(self.juju("exec", "--format", "json", "--unit", unit, "--", command))
        (answer,) = answers.values()
        assert answer["results"]["return-code"] == 0, answer
        return str(answer["results"].get("stdout", "")).strip()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

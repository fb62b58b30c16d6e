"""A model without hosts, whose charms answer as a test wants."""

import copy
import pathlib
import typing

import yaml

from sandbox import hook
from sandbox import model as rules
from sandbox.store import Application, Event, Model, Relation, Unit

_CHARMS: dict[str, dict[str, typing.Any]] = yaml.safe_load(
    pathlib.Path(__file__).with_suffix(".yaml").read_text()
)
SERVER, CLIENT, AGENT = _CHARMS["server"], _CHARMS["client"], _CHARMS["agent"]


def app(name: str, metadata: dict[str, typing.Any]) -> Application:
    return Application(name=name, charm=metadata["name"], source="/nowhere", metadata=metadata)


class World:
    """Runs queued events with a charm that answers what `answers` says, and records the order."""

    def __init__(self) -> None:
        self.model = Model(name="t")
        self.ran: list[str] = []
        self.answers: dict[str, typing.Any] = {}

    def add(self, name: str, metadata: dict[str, typing.Any], units: int = 1) -> Application:
        application = app(name, metadata)
        rules.add_application(self.model, application)
        for _ in range(units):
            rules.add_unit(self.model, application).address = f"10.0.0.{len(self.model.units)}"
        return application

    def pair(self, servers: int = 1, clients: int = 1) -> Relation:
        """Return the relation of servers and clients that met; their hooks so far do not count."""
        self.add("server", SERVER, servers)
        self.add("client", CLIENT, clients)
        relation = rules.relate(self.model, "server:api", "client:api")
        self.settle()
        self.ran.clear()
        return relation

    def agents(self, servers: int = 1) -> Relation:
        """Return the relation of servers and their subordinates."""
        self.add("server", SERVER, servers)
        rules.add_application(self.model, app("agent", AGENT))
        return rules.relate(self.model, "agent:juju-info", "server:juju-info")

    def state(self, unit: Unit | str, event: Event | None = None) -> dict[str, typing.Any]:
        """Return a unit's view of the model in a hook."""
        target = self.model.units[unit] if isinstance(unit, str) else unit
        event = event or Event(kind="update-status", sequence=10**6)
        return hook.describe(self.model, target, event, source="/c", cidr="", resources={})["state"]

    def settle(self) -> None:
        for _ in range(1000):
            waiting = [unit for unit in self.model.units.values() if unit.events]
            if not waiting:
                return
            unit = min(waiting, key=lambda unit: unit.events[0].sequence)
            self.step(unit)
        raise AssertionError("the model does not settle")

    def step(self, unit: Unit) -> None:
        event = unit.events[0]
        self.ran.append(f"{unit.name} {event.label}")
        given, result = self.begin(unit, event)
        if answer := self.answers.get(unit.app):
            answer(event, given, result)
        hook.apply(self.model, unit, event, given, result)

    def begin(
        self, unit: Unit, event: Event
    ) -> tuple[dict[str, typing.Any], dict[str, typing.Any]]:
        """Return a hook's view of the model, and the result of a hook that changes nothing."""
        given = copy.deepcopy(self.state(unit, event))
        state = copy.deepcopy(given)
        databags = {
            str(relation["id"]): {
                "app": relation["local_app_data"],
                "unit": relation["local_unit_data"],
            }
            for relation in state["relations"]
        }
        unchanged = {
            key: state[key]
            for key in ("app_status", "version", "ports", "deferred", "stored", "secrets")
        }
        return given, unchanged | {"status": ["active", ""], "relations": databags}

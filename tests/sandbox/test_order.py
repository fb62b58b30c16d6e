"""The order of hooks: of several relations, after a failure, after a reboot."""

import typing

from world import SERVER, World

from sandbox import model as rules
from sandbox import settings
from sandbox.store import Event, Unit

HTTP = {"interface": "http"}
BOTH: dict[str, typing.Any] = {"name": "both", "requires": {"api": HTTP, "spare": HTTP}}


class Agents(World):
    """Delivers events as the engine does; hooks in `fails` raise."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: set[str] = set()

    def settle(self) -> None:
        for _ in range(1000):
            ready: list[tuple[Event, Unit]] = []
            for unit in self.model.units.values():
                event = rules.next_event(unit)
                if event is not None and event.attempts < 3:
                    ready.append((event, unit))
            if not ready:
                return
            event, unit = min(ready, key=lambda pair: pair[0].sequence)
            unit.events = [event, *(other for other in unit.events if other is not event)]
            if f"{unit.name} {event.label}" in self.fails:
                self.ran.append(f"{unit.name} {event.label} failed")
                rules.failed(unit, event, "as asked", 0.0)
                continue
            self.step(unit)
        raise AssertionError("the model does not settle")

    def of(self, unit: str) -> list[str]:
        """List the hooks that a unit ran."""
        return [line.removeprefix(f"{unit} ") for line in self.ran if line.startswith(f"{unit} ")]


def test_relations_are_created_before_and_joined_after_the_start():
    world = Agents()
    world.add("server", SERVER)
    world.add("both", BOTH)
    rules.relate(world.model, "server:api", "both:api")
    rules.relate(world.model, "server:api", "both:spare")
    world.settle()
    assert world.of("both/0") == [
        "install",
        "api-relation-created",
        "spare-relation-created",
        "leader-elected",
        "config-changed",
        "start",
        "api-relation-joined server/0",
        "api-relation-changed server/0",
        "spare-relation-joined server/0",
        "spare-relation-changed server/0",
    ]


def test_what_a_removed_unit_wrote_is_read_until_it_departs():
    world = Agents()
    relation = world.pair(clients=2)
    server = world.model.units["server/0"]
    relation.unit_data["client/1"] = {"port": "80"}
    rules.remove_unit(world.model, world.model.units["client/1"])
    client = world.model.units["client/1"]
    while client.events:
        world.step(client)
    assert "client/1" not in world.model.units
    (seen,) = [one for one in world.state(server)["relations"] if one["id"] == relation.id]
    assert seen["remote_units_data"]["1"] == {"port": "80"}
    world.settle()
    assert world.of("server/0") == ["api-relation-departed client/1"]
    assert server.members[relation.id] == ["client/0"]


def test_a_unit_in_error_gets_its_hook_again_and_actions_and_keeps_the_units_that_left():
    """As on Juju 4.0.15: a server that refuses to go because of its clients keeps seeing them."""
    world = Agents()
    relation = world.pair()
    server = world.model.units["server/0"]
    world.fails.add("server/0 storage-detaching")
    rules.remove_applications(world.model, ["client", "server"])
    settings.request_action(world.model, server, "dump", {"path": "/x"})
    world.settle()
    assert list(world.model.units) == ["server/0"]
    assert world.of("server/0") == [
        "storage-detaching failed",
        "action dump",
        *["storage-detaching failed"] * 2,
    ]
    assert server.members[relation.id] == ["client/0"]
    (seen,) = [
        seen
        for seen in world.state(server, server.events[0])["relations"]
        if seen["id"] == relation.id
    ]
    assert list(seen["remote_units_data"]) == ["0"], "relation.units does not shrink"
    world.fails.clear()
    world.ran.clear()
    server.events[0].attempts = 1
    world.settle()
    last = [
        "storage-detaching",
        "api-relation-departed client/0",
        "api-relation-broken",
        "stop",
        "remove",
    ]
    assert world.of("server/0") == last
    assert world.model.applications == {}
    assert world.model.relations == {}


def test_after_a_reboot_each_unit_starts_before_what_waits_and_the_principal_is_first():
    world = Agents()
    world.agents()
    world.settle()
    world.ran.clear()
    server = world.model.units["server/0"]
    rules.enqueue(world.model, server, "update-status")
    rules.enqueue(world.model, server, "update-status", asked=True)
    rules.rebooted(world.model, 0)
    world.settle()
    assert world.of("server/0") == ["start", "update-status"]
    assert [line for line in world.ran if line.endswith(" start")] == [
        "server/0 start",
        "agent/0 start",
    ]

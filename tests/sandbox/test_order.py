"""What Juju leaves open: the order of hooks, what comes late and what never comes, decided by a seed."""

import collections.abc
import typing

from world import AGENT, SERVER, World, app

from sandbox import model as rules
from sandbox import order, settings
from sandbox.store import Event, Unit

STORE: dict[str, typing.Any] = SERVER | {"name": "store"}
BOTH: dict[str, typing.Any] = {
    "name": "both",
    "requires": {"api": {"interface": "http"}, "spare": {"interface": "http"}},
}


class Hostile(World):
    """Delivers events as the engine does, in the order that the seed gives; hooks in `fails` raise."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model.seed = seed
        self.fails: set[str] = set()
        self.now = 0.0

    def settle(self) -> None:
        for _ in range(1000):
            ready: list[tuple[Event, Unit]] = []
            for unit in self.model.units.values():
                event = order.next_event(self.model, unit)
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
            order.ran(self.model, unit)
        raise AssertionError("the model does not settle")

    def of(self, unit: str) -> list[str]:
        """List the hooks that a unit ran, without update-status."""
        hooks = [line.removeprefix(f"{unit} ") for line in self.ran if line.startswith(f"{unit} ")]
        return [hook for hook in hooks if hook != "update-status"]

    def subordinates(self) -> None:
        """Add a subordinate on two servers and one store, whose hosts are machines 0, 1 and 2."""
        self.add("server", SERVER, units=2)
        self.add("store", STORE)
        rules.add_application(self.model, app("agent", AGENT))
        for principal in ("server", "store"):
            rules.relate(self.model, "agent:juju-info", f"{principal}:juju-info")
        self.settle()
        self.ran.clear()


def seeds(see: collections.abc.Callable[[Hostile], str]) -> set[str]:
    """Collect what thirty seeds show; each shows the same when it is used again."""
    found = {seed: see(Hostile(seed)) for seed in range(30)}
    assert found == {seed: see(Hostile(seed)) for seed in range(30)}
    return set(found.values())


def test_hooks_of_several_relations_come_in_any_order_but_joined_before_changed():
    def see(world: Hostile) -> str:
        world.add("server", SERVER)
        world.add("both", BOTH)
        rules.relate(world.model, "server:api", "both:api")
        rules.relate(world.model, "server:api", "both:spare")
        world.settle()
        hooks = world.of("both/0")
        assert hooks[0] == "install"
        assert hooks.index("leader-elected") < hooks.index("config-changed") < hooks.index("start")
        for endpoint in ("api", "spare"):
            created = hooks.index(f"{endpoint}-relation-created")
            joined = hooks.index(f"{endpoint}-relation-joined server/0")
            assert created < hooks.index("leader-elected")
            assert hooks.index("start") < joined < hooks.index(f"{endpoint}-relation-changed server/0")
        return " ".join(hook.split("-")[0] for hook in hooks)

    assert len(seeds(see)) > 4


def test_update_status_comes_between_other_hooks_with_some_seeds():
    def see(world: Hostile) -> str:
        world.add("server", SERVER)
        world.settle()
        assert world.ran.index("server/0 start") < ([*world.ran, "server/0 update-status"]).index(
            "server/0 update-status"
        )
        return str(world.ran.count("server/0 update-status"))

    assert {"0", "1"} <= seeds(see)
    world = Hostile(0)
    world.add("server", SERVER)
    world.settle()
    unit = world.model.units["server/0"]
    for _ in range(100):
        order.ran(world.model, unit, update_status=False)
    assert unit.events == []
    for _ in range(100):
        order.ran(world.model, unit)
    assert [event.kind for event in unit.events] == ["update-status"]


def test_relation_departed_of_a_removed_unit_comes_at_once_or_late():
    def see(world: Hostile) -> str:
        relation = world.pair(clients=2)
        server = world.model.units["server/0"]
        rules.remove_unit(world.model, world.model.units["client/1"])
        world.settle()
        assert "client/1" not in world.model.units
        if "api-relation-departed client/1" in world.of("server/0"):
            return "at once"
        assert server.members[relation.id] == ["client/0", "client/1"], "the removed one is still there"
        for _ in range(4):
            rules.enqueue(world.model, server, "update-status")
            world.settle()
        assert world.of("server/0")[-1] == "api-relation-departed client/1"
        assert server.members[relation.id] == ["client/0"]
        return "late"

    assert seeds(see) == {"at once", "late"}


def test_a_late_relation_departed_comes_before_the_relation_breaks():
    for seed in range(30):
        world = Hostile(seed)
        relation = world.pair()
        rules.remove_unit(world.model, world.model.units["client/0"])
        world.settle()
        rules.remove_relation(world.model, relation)
        world.settle()
        assert world.of("server/0") == ["api-relation-departed client/0", "api-relation-broken"]
        assert relation.id not in world.model.relations


def test_what_a_removed_unit_wrote_is_read_until_its_relation_departed():
    world = Hostile(0)
    relation = world.pair()
    relation.unit_data["client/0"] = {"port": "80"}
    rules.remove_unit(world.model, world.model.units["client/0"])
    world.settle()
    for _ in range(4):
        rules.enqueue(world.model, world.model.units["server/0"], "update-status")
        world.settle()
    (departed,) = [
        request
        for request in world.requests
        if (request["unit"], request["event"]["kind"]) == ("server/0", "relation-departed")
    ]
    (seen,) = [seen for seen in departed["state"]["relations"] if seen["id"] == relation.id]
    assert seen["remote_units_data"] == {"0": {"port": "80"}}


def test_a_unit_in_error_gets_its_hook_again_and_actions_and_keeps_the_units_that_left():
    """As on Juju 4.0.15: a server that refuses to go because of its clients sees them for ever."""
    world = Hostile(1)
    relation = world.pair()
    server = world.model.units["server/0"]
    world.fails.add("server/0 storage-detaching")
    rules.remove_applications(world.model, ["client", "server"])
    settings.request_action(world.model, server, "dump", {"path": "/x"})
    world.settle()
    assert list(world.model.units) == ["server/0"]
    assert world.of("server/0") == ["storage-detaching failed", "action dump", *["storage-detaching failed"] * 2]
    assert server.members[relation.id] == ["client/0"]
    (seen,) = [seen for seen in world.state(server, server.events[0])["relations"] if seen["id"] == relation.id]
    assert list(seen["remote_units_data"]) == ["0"], "relation.units does not shrink"
    world.fails.clear()
    world.ran.clear()
    server.events[0].attempts = 1
    world.settle()
    last = ["storage-detaching", "api-relation-departed client/0", "api-relation-broken", "stop", "remove"]
    assert world.of("server/0") == last
    assert world.model.applications == {}
    assert world.model.relations == {}


def test_pauses_grow_up_to_a_limit():
    assert [order.pause_s(attempt) for attempt in (1, 2, 3, 4, 9)] == [2, 4, 8, 16, 16]


def test_after_a_reboot_units_start_in_any_order():
    def see(world: Hostile) -> str:
        world.subordinates()
        order.rebooted(world.model, 0)
        world.settle()
        starts = [line for line in world.ran if line.endswith(" start")]
        assert sorted(starts) == ["agent/0 start", "server/0 start"]
        for line in starts:
            first = next(hook for hook in world.of(line.split()[0]))
            assert first == "start", "Juju's uniter looks for a reboot before all else"
        return " ".join([*starts, str("agent/0 config-changed" in world.ran)])

    assert len(seeds(see)) == 4


def test_after_a_reboot_a_hook_that_was_interrupted_comes_before_start():
    world = Hostile(0)
    world.subordinates()
    server = world.model.units["server/0"]
    rules.enqueue(world.model, server, "config-changed")
    rules.enqueue(world.model, server, "update-status")
    server.agent.name = "executing"
    order.rebooted(world.model, 0)
    server.agent.name = "idle"
    assert [event.kind for event in server.events[:2]] == ["config-changed", "start"]
    assert server.events[-1].kind == "update-status"

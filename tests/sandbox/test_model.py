"""Juju's order of events, secrets and subordinates, on a model without hosts."""

import pathlib
import typing

import pytest
import yaml
from world import CLIENT, SERVER, World, app

from sandbox import hook, settings
from sandbox import model as rules
from sandbox.store import Event, Relation, SandboxError

Json = dict[str, typing.Any]
CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())


def test_only_the_first_unit_leads_and_peers_meet(world: World):
    world.add("server", SERVER, units=2)
    world.settle()
    assert "server/1 leader-elected" not in world.ran
    assert "server/0 cluster-relation-joined server/1" in world.ran
    assert "server/1 cluster-relation-joined server/0" in world.ran
    assert world.ran.index("server/0 cluster-relation-joined server/1") > world.ran.index(
        "server/1 start"
    )


def test_written_data_wakes_the_other_side_once_and_nobody_else(world: World):
    world.pair(servers=2)

    def write(event: Event, state: Json, result: Json) -> None:
        for relation in state["relations"]:
            if relation["endpoint"] == "api":
                result["relations"][str(relation["id"])]["unit"] = {"port": "80"}

    world.answers["server"] = write
    rules.enqueue(world.model, world.model.units["server/0"], "update-status")
    world.settle()
    assert world.ran == ["server/0 update-status", "client/0 api-relation-changed server/0"]
    rules.enqueue(world.model, world.model.units["server/0"], "update-status")
    world.settle()
    assert world.ran[2:] == ["server/0 update-status"], "the same data again wakes nobody"


def test_a_unit_is_met_between_its_install_and_relation_created_with_addresses_only(world: World):
    relation = world.pair()
    seen: list[tuple[str, bool]] = []

    def write(event: Event, state: Json, result: Json) -> None:
        assert bool(state["relations"]) == (event.kind not in ("storage-attached", "install")), (
            event.label
        )
        if event.kind == "relation-created":
            result["relations"][str(relation.id)]["unit"]["port"] = "80"

    def read(event: Event, state: Json, result: Json) -> None:
        seen.append((event.label, "port" in state["relations"][0]["remote_units_data"]["1"]))

    server, client = (
        rules.add_unit(world.model, world.model.applications["server"]),
        world.model.units["client/0"],
    )
    world.answers |= {"server": write, "client": read}
    while server.events:
        world.step(server)
        while client.events:
            world.step(client)
    changed = "api-relation-changed server/1"
    assert seen == [("api-relation-joined server/1", False), (changed, False), (changed, True)]
    installed = world.ran.index("server/1 install")
    assert world.ran[installed + 1 : installed + 3] == [
        f"client/0 {label}" for label, _ in seen[:2]
    ]


def test_what_an_application_wrote_comes_before_any_of_its_units(world: World):
    relation = world.pair(servers=2)
    relation.app_data["server"] = {"port": "80"}
    rules.add_unit(world.model, world.model.applications["client"])
    late = world.model.units["client/1"]
    while late.events[0].kind != "start":
        world.step(late)

    def write(event: Event, state: Json, result: Json) -> None:
        result["relations"][str(relation.id)]["app"] = {"port": "81"}

    changed, *met = [event.label for event in late.events[1:]]
    assert changed == "api-relation-changed"
    assert met[0] == "api-relation-joined server/0"
    late.events = [event for event in late.events if event.label != changed]
    world.answers["server"] = write
    rules.enqueue(world.model, world.model.units["server/0"], "update-status")
    world.step(world.model.units["server/0"])
    assert [event.label for event in late.events[1:]] == [changed, *met], (
        "it comes before those that wait"
    )


def test_a_subordinate_is_born_with_its_principal_and_sees_only_that_one(world: World):
    relation = world.agents(servers=2)
    seen: dict[str, set[str]] = {}

    def look(event: Event, state: Json, result: Json) -> None:
        for rel in state["relations"]:
            if rel["id"] == relation.id:
                seen.setdefault(",".join(rel["remote_units_data"]), set()).add(event.kind)

    world.answers["agent"] = look
    while not world.model.units["server/0"].installed:
        world.step(world.model.units["server/0"])
    assert "agent/0" in world.model.units, "before its principal starts"
    world.settle()
    assert {unit.principal for unit in world.model.units.values() if unit.app == "agent"} == {
        "server/0",
        "server/1",
    }
    assert set(seen) == {"0", "1"}
    assert not any(line.startswith("server") and "juju-info" in line for line in world.ran)
    assert "agent/0 juju-info-relation-joined server/0" in world.ran
    assert "agent/0 juju-info-relation-joined server/1" not in world.ran


def test_removing_a_unit_ends_its_subordinates_first_and_departs_from_the_others(world: World):
    world.agents(servers=2)
    world.add("client", CLIENT)
    rules.relate(world.model, "server:api", "client:api")
    world.settle()
    world.ran.clear()
    rules.remove_unit(world.model, world.model.units["server/0"])
    world.settle()
    order = {line: index for index, line in enumerate(world.ran)}
    agent = "agent/0" if "agent/0 remove" in order else "agent/1"
    assert order[f"{agent} remove"] < order["server/0 stop"] < order["server/0 remove"]
    assert order["server/0 api-relation-departed client/0"] < order["server/0 api-relation-broken"]
    assert "client/0 api-relation-departed server/0" in order
    assert "client/0 api-relation-broken" not in order
    assert "server/1 leader-elected" in order
    assert "server/0" not in world.model.units
    assert world.model.leader("server") == "server/1"


def test_removing_a_relation_breaks_it_and_takes_its_subordinates(world: World):
    relation = world.agents()
    world.settle()
    world.ran.clear()
    rules.remove_relation(world.model, relation)
    world.settle()
    kinds = [line.split(" ", 1)[1] for line in world.ran]
    assert kinds == [
        "juju-info-relation-departed server/0",
        "juju-info-relation-broken",
        "stop",
        "remove",
    ]
    assert not [unit for unit in world.model.units.values() if unit.app == "agent"]
    assert relation.id not in world.model.relations


@pytest.mark.parametrize("is_container", [False, True], ids=["regular", "container"])
def test_no_event_shows_a_relation_whose_relation_broken_ran(world: World, is_container: bool):
    """As under Juju, though the other end's unit is still there: its own last hooks may come much later."""
    scope = {"scope": "container"} if is_container else {}
    world.add("server", SERVER | {"provides": {"metrics": {"interface": "http"} | scope}})
    wants: Json = {"name": "client", "requires": {"metrics": {"interface": "http"} | scope}}
    if is_container:
        rules.add_application(world.model, app("client", wants | {"subordinate": True}))
    else:
        world.add("client", wants)
    relation = rules.relate(world.model, "client:metrics", "server:metrics")
    world.settle()
    server = world.model.units["server/0"]

    def seen() -> set[int]:
        return {one["id"] for one in world.state(server)["relations"]}

    assert relation.id in seen()
    rules.remove_applications(world.model, ["client"])
    while server.events:
        assert relation.id in seen()
        world.step(server)
    assert world.ran[-1] == "server/0 metrics-relation-broken"
    assert world.model.units["client/0"].events
    assert relation.id not in seen()


def secret_world(world: World) -> tuple[Relation, dict[str, str]]:
    """Let a server's leader grant a secret to its client; return relation and content."""
    relation = world.pair(servers=2)
    world.add("other", CLIENT | {"name": "other"})
    content = {"password": "one"}

    def serve(event: Event, state: Json, result: Json) -> None:
        if not state["leader"]:
            return
        own: list[Json] = [secret for secret in result["secrets"] if secret["owner"] == "app"]
        if not own:
            own = [
                {"id": "secret:" + "a" * 20, "owner": "app", "label": "l", "tracked_revision": 1}
            ]
            result["secrets"] += own
        own[0] |= {"latest_content": dict(content), "grants": {str(relation.id): ["client"]}}

    world.answers["server"] = serve
    rules.enqueue(world.model, world.model.units["server/0"], "update-status")
    world.settle()
    return relation, content


def test_a_secret_is_seen_where_it_was_granted_and_nowhere_else(world: World):
    relation, _ = secret_world(world)
    assert world.state("client/0")["secrets"][0]["tracked_content"] == {"password": "one"}
    assert world.state("other/0")["secrets"] == []
    assert [secret["owner"] for secret in world.state("server/1")["secrets"]] == ["app"]
    rules.remove_relation(world.model, relation)
    world.settle()
    assert world.state("client/0")["secrets"] == []


def test_what_others_changed_while_a_hook_ran_is_kept(world: World):
    """During a follower's long action, the leader writes, leaves, and makes it the leader."""
    relation, content = secret_world(world)
    leader, follower = world.model.units["server/0"], world.model.units["server/1"]
    relation.app_data["server"] = {"port": "80", "old": "x"}
    event = settings.request_action(world.model, follower, "dump", {"path": "/x"})
    given, result = world.begin(follower, event)
    content["password"] = "two"
    rules.enqueue(world.model, leader, "update-status")
    world.step(leader)
    relation.app_data["server"] = {"port": "81"}
    settings.add_secret(world.model, "mine", {"key": "value"})
    made = world.model.secrets["secret:" + "a" * 20]
    assert (made.latest, made.contents[2]) == (2, {"password": "two"})
    new = made.model_copy(update={"id": "secret:" + "b" * 20})
    world.model.secrets[new.id] = new
    leader.dying = True
    result["status"] = ["active", "acted"]
    result["relations"][str(relation.id)]["app"]["host"] = "a"
    result["relations"][str(relation.id)]["unit"]["up"] = "yes"
    hook.apply(world.model, follower, event, given, result)
    assert follower.status.message == "acted"
    assert relation.unit_data["server/1"]["up"] == "yes"
    assert relation.app_data["server"] == {"port": "81", "host": "a"}, (
        "what it did not write stays as it is now"
    )
    assert (made.latest, made.contents[made.latest]) == (2, {"password": "two"})
    assert set(world.model.secrets) == {
        made.id,
        new.id,
        settings.find_secret(world.model, "mine").id,
    }
    del world.model.secrets[made.id]
    hook.apply(world.model, follower, event, given, result)
    assert made.id not in world.model.secrets, "what its owner removed does not come back"


def test_a_users_secret_reaches_the_application_it_was_granted_to(world: World):
    server = world.add("server", SERVER)
    world.settle()
    secret = settings.add_secret(world.model, "mine", {"key": "v"})
    settings.set_options(world.model, server, {"token": "mine"})
    assert settings.options(server)["token"] == secret.id
    world.settle()
    assert world.state("server/0")["secrets"] == []
    world.ran.clear()
    settings.grant_secret(world.model, "mine", server)
    world.settle()
    assert world.ran == ["server/0 config-changed"]
    assert world.state("server/0")["secrets"][0]["latest_content"] == {"key": "v"}
    world.ran.clear()
    settings.update_secret(world.model, "mine", {"key": "w"})
    settings.update_secret(world.model, "mine", {"key": "w"})
    world.settle()
    assert world.ran == ["server/0 secret-changed"]


@pytest.mark.parametrize(
    ("values", "reset", "message"), CASES["a_wrong_option_is_named_and_nothing_changes"]
)
def test_a_wrong_option_is_named_and_nothing_changes(
    world: World, values: dict[str, str], reset: list[str], message: str
):
    server = world.add("server", SERVER)
    with pytest.raises(SandboxError) as error:
        settings.set_options(world.model, server, values, reset=reset)
    assert str(error.value) == message
    assert server.options == {}


def test_an_option_is_set_back_to_its_default_or_to_none(world: World):
    server = world.add("server", SERVER)
    secret = settings.add_secret(world.model, "mine", {"key": "v"})
    settings.set_options(world.model, server, {"port": "81", "token": secret.id})
    world.settle()
    world.ran.clear()
    settings.set_options(world.model, server, {}, reset=["port", "token"])
    settings.set_options(world.model, server, {}, reset=["port"])
    world.settle()
    assert world.ran == ["server/0 config-changed"], "the second time nothing changes"
    assert settings.options(server)["port"] == 80
    assert "token" not in settings.options(server)


@pytest.mark.parametrize(
    ("action", "values", "message"), CASES["the_controller_refuses_wrong_parameters_by_name"]
)
def test_the_controller_refuses_wrong_parameters_by_name(
    world: World, action: str, values: dict[str, str], message: str
):
    server = world.add("server", SERVER)
    with pytest.raises(SandboxError) as error:
        settings.action_params(server, action, values)
    assert str(error.value) == message


def test_a_limited_endpoint_takes_no_second_relation(world: World):
    world.add("server", SERVER)
    world.add("second", SERVER)
    world.add("client", CLIENT)
    rules.relate(world.model, "server:api", "client:api")
    with pytest.raises(SandboxError, match="client:api takes 1 relation at most"):
        rules.relate(world.model, "second:api", "client:api")
    with pytest.raises(SandboxError, match="related already"):
        rules.relate(world.model, "client:api", "server:api")

"""The agent: a real charm class under ops.testing, spoken to over its pipe as the engine does."""

import pathlib
import typing

import pytest
import yaml
from folder_hosts import FolderHosts
from world import World

from sandbox import agent as agent_process
from sandbox import hook
from sandbox import model as rules
from sandbox.store import Event, Secret

CHARM = """
import ops

INSTALLS = []
with open("imports", "a") as file:
    file.write("x")


class TheCharm(ops.CharmBase):
    stored = ops.StoredState()

    def __init__(self, framework):
        super().__init__(framework)
        self.stored.set_default(count=0)
        hooks = "install start update_status secret_changed server_relation_departed server_relation_changed talk_action"
        for hook in hooks.split():
            framework.observe(getattr(self.on, hook), getattr(self, f"_on_{hook}"))

    def _on_install(self, event):
        print("a stray line on standard output")
        self.stored.count += 1
        INSTALLS.append(event)
        self.unit.status = ops.ActiveStatus(f"{len(INSTALLS)} here, imported {len(open('imports').read())} times")

    def _on_start(self, event):
        if self.stored.count < 2:
            self.stored.count += 1
            event.defer()
        else:
            self.unit.status = ops.ActiveStatus("started")

    def _on_update_status(self, event):
        raise ValueError("as asked")

    def _on_secret_changed(self, event):
        content = event.secret.get_content(refresh=True)
        event.secret.set_content(dict(content))
        self.unit.status = ops.ActiveStatus(content["key"])

    def _on_server_relation_departed(self, event):
        self.unit.status = ops.ActiveStatus(f"{event.unit.name}: {event.departing_unit.name} leaves")

    def _on_server_relation_changed(self, event):
        self.unit.status = ops.ActiveStatus(f"{event.unit} wrote {dict(event.relation.data[event.app])}")

    def _on_talk_action(self, event):
        event.log("first")
        event.set_results({"text": event.params["text"], "place": str(self.model.storages["data"][0].location)})
        try:
            self.model.resources.fetch("tool")
        except ops.ModelError as e:
            event.set_results({"resource": str(e)})
        event.fail("as asked")


if __name__ == "__main__":
    ops.main(TheCharm)
"""
METADATA = """
name: thing
type: charm
requires: {server: {interface: http}}
resources: {tool: {type: file}}
storage: {data: {type: filesystem}}
actions: {talk: {params: {text: {type: string}}}}
"""
Json = dict[str, typing.Any]


class Agent:
    """The agent on a host that is a folder, and a model with two units of the charm."""

    def __init__(self, root: pathlib.Path) -> None:
        self.source = root / "source"
        (self.source / "src").mkdir(parents=True)
        (self.source / "charmcraft.yaml").write_text(METADATA)
        (self.source / "src" / "charm.py").write_text(CHARM)
        self.host = FolderHosts(root).create("host")
        self.agent = agent_process.Agent(typing.cast(typing.Any, self.host), "agent.py")
        self.world = World()
        self.world.add("thing", yaml.safe_load(METADATA), units=2)
        self.state: Json = {}  # overrides the model's

    def run(
        self, kind: str, *, unit: str = "thing/0", **event: typing.Any
    ) -> tuple[Json, list[Json]]:
        """Return the result and the messages before it."""
        described = Event(kind=kind, sequence=0, **event)
        target = self.world.model.units[unit]
        request = hook.describe(
            self.world.model,
            target,
            described,
            source=str(self.source),
            cidr="10.0.0.0/24",
            resources={},
        )
        request["state"] |= self.state
        messages: list[Json] = []
        return self.agent.ask(request, messages.append), messages

    def keep(self, result: Json) -> None:
        self.state |= {key: result["state"][key] for key in ("deferred", "stored", "status")}


@pytest.fixture
def agent(tmp_path: pathlib.Path) -> typing.Iterator[Agent]:
    one = Agent(tmp_path)
    yield one
    one.agent.close()


def test_stored_state_and_deferred_events_come_back(agent: Agent):
    agent.keep(agent.run("install")[0])
    first, _ = agent.run("start")
    assert len(first["state"]["deferred"]) == 1
    agent.keep(first)
    second, _ = agent.run("update-status")
    assert second["error"] == "ValueError: as asked", (
        "the deferred start runs first, then update-status fails"
    )
    assert "Traceback" in second["trace"]
    third, messages = agent.run("start")
    assert [line["message"] for line in messages if line["kind"] == "status"] == [
        "started",
        "started",
    ]
    assert third["state"]["deferred"] == []


def test_events_share_the_import_of_their_unit_s_charm_and_nothing_else(agent: Agent):
    for _ in range(2):
        for unit in ("thing/0", "thing/1"):
            result, _ = agent.run("install", unit=unit)
            assert result["state"]["status"] == ["active", "1 here, imported 1 times"]


@pytest.mark.parametrize("departing", ["thing/0", "web/1"])
def test_a_unit_reads_which_unit_leaves_be_it_itself(agent: Agent, departing: str):
    agent.world.add("web", {"name": "web", "provides": {"api": {"interface": "http"}}}, units=2)
    relation = rules.relate(agent.world.model, "thing:server", "web:api")
    result, _ = agent.run(
        "relation-departed", relation=relation.id, remote="web/1", departing=departing
    )
    assert result["ok"], result
    assert result["state"]["status"] == ["active", f"web/1: {departing} leaves"]


def test_changes_of_application_data_name_no_unit(agent: Agent):
    agent.world.add("web", {"name": "web", "provides": {"api": {"interface": "http"}}})
    relation = rules.relate(agent.world.model, "thing:server", "web:api")
    relation.app_data["web"] = {"port": "80"}
    for members in ([], ["web/0"]):
        agent.world.model.units["thing/0"].members[relation.id] = members
        result, _ = agent.run("relation-changed", relation=relation.id)
        assert result["ok"], result
        assert result["state"]["status"] == ["active", "None wrote {'port': '80'}"]


def test_equal_content_makes_no_revision(agent: Agent):
    contents = {2: {"key": "old"}, 3: {"key": "new"}}
    secret = Secret(
        id="secret:" + "a" * 20,
        owner="application:thing",
        latest=3,
        contents=contents,
        tracked={"thing/0": 2},
    )
    agent.world.model.secrets[secret.id] = secret
    result, _ = agent.run("secret-changed", secret=secret.id)
    assert result["ok"], result
    assert result["state"]["status"] == ["active", "new"]
    (after,) = result["state"]["secrets"]
    assert (after["latest_revision"], after["tracked_revision"]) == (3, 3)


def test_an_action_that_fails_streams_its_log_finds_its_storage_and_keeps_its_results(agent: Agent):
    result, messages = agent.run(
        "action", action={"name": "talk", "id": "1", "params": {"text": "hi"}}
    )
    assert [line["message"] for line in messages if line["kind"] == "action-log"] == ["first"]
    assert (result["ok"], result["action"]["failure"]) == (True, "as asked")
    assert result["action"]["results"]["text"] == "hi"
    assert result["action"]["results"]["place"] == str(
        agent.host.root / "var/lib/juju/storage/data-0"
    )
    assert "tool" in result["action"]["results"]["resource"]

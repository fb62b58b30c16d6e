"""The agent: a real charm class under ops.testing, spoken to over its pipe as the engine does."""

import json
import pathlib
import subprocess
import sys
import typing

import pytest
import yaml
from world import World

from sandbox import hook
from sandbox.store import Event

CHARM = """
import ops


class TheCharm(ops.CharmBase):
    stored = ops.StoredState()

    def __init__(self, framework):
        super().__init__(framework)
        self.stored.set_default(count=0)
        framework.observe(self.on.install, self._on_install)
        framework.observe(self.on.start, self._on_start)
        framework.observe(self.on.update_status, self._on_update_status)
        framework.observe(self.on.config_changed, self._on_config_changed)
        framework.observe(self.on.secret_changed, self._on_secret_changed)
        framework.observe(self.on["server"].relation_departed, self._on_departed)
        framework.observe(self.on.talk_action, self._on_talk)

    def _on_install(self, event):
        print("a stray line on standard output")
        self.unit.status = ops.MaintenanceStatus("installing")
        self.stored.count += 1
        (self.charm_dir / "made").write_text("x")
        self.unit.status = ops.ActiveStatus(f"count {self.stored.count}")

    def _on_start(self, event):
        if self.stored.count < 2:
            self.stored.count += 1
            event.defer()
        else:
            self.unit.status = ops.ActiveStatus("started")

    def _on_update_status(self, event):
        raise ValueError("two\\nlines")

    def _on_config_changed(self, event):
        self.unit.reboot(now=self.config["now"])

    def _on_secret_changed(self, event):
        content = event.secret.get_content(refresh=True)
        event.secret.set_content(dict(content))
        self.unit.status = ops.ActiveStatus(content["key"])

    def _on_departed(self, event):
        self.unit.status = ops.ActiveStatus(f"{event.unit.name}: {event.departing_unit.name} leaves")

    def _on_talk(self, event):
        event.log("first")
        event.set_results({"text": event.params["text"], "place": str(self.model.storages["data"][0].location)})
        try:
            self.model.resources.fetch("tool")
        except ops.ModelError as e:
            event.set_results({"resource": str(e)})
        if event.params["text"] == "fail":
            event.fail("as asked")


if __name__ == "__main__":
    ops.main(TheCharm)
"""
METADATA = """
name: thing
type: charm
config: {options: {now: {type: boolean, default: false}}}
requires: {server: {interface: http}}
resources: {tool: {type: file}}
storage: {data: {type: filesystem}}
actions: {talk: {params: {text: {type: string}}}}
"""
Json = dict[str, typing.Any]


class Agent:
    """The agent in a child process, its unit's folder under `root`."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.source = self.write("source", CHARM)
        code = (
            "import pathlib, sandbox.guest.agent as agent;"
            f"agent.AGENTS = pathlib.Path({str(root / 'agents')!r}); agent.STORAGE = pathlib.Path({str(root / 'disk')!r});"
            "agent.main()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.world = World()
        self.world.add("thing", yaml.safe_load(METADATA), units=2)
        self.state: Json = {}  # overrides the model's

    def write(self, name: str, code: str) -> pathlib.Path:
        """Return the folder of a charm with this code."""
        source = self.root / name
        (source / "src").mkdir(parents=True)
        (source / "charmcraft.yaml").write_text(METADATA)
        (source / "src" / "charm.py").write_text(code)
        return source

    def run(self, kind: str, *, unit: str = "thing/0", **event: typing.Any) -> tuple[Json, list[Json]]:
        """Return the result and the messages before it."""
        described = Event(kind=kind, sequence=0, **event)
        target = self.world.model.units[unit]
        request = hook.describe(
            self.world.model, target, described, source=str(self.source), cidr="10.0.0.0/24", resources={}
        )
        request["state"] |= self.state
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        messages: list[Json] = []
        for line in self.process.stdout:
            message = json.loads(line)
            if message["kind"] == "result":
                return message, messages
            messages.append(message)
        raise AssertionError("the agent ended")

    def keep(self, result: Json) -> None:
        self.state |= {key: result["state"][key] for key in ("deferred", "stored", "status")}


@pytest.fixture
def agent(tmp_path: pathlib.Path) -> typing.Iterator[Agent]:
    one = Agent(tmp_path)
    yield one
    assert one.process.stdin and one.process.stdout
    one.process.stdin.close()
    one.process.wait(10)
    one.process.stdout.close()


def test_a_hook_has_real_effects_and_shows_its_progress(agent: Agent):
    result, messages = agent.run("install")
    assert result["ok"], result
    assert [(line["status"], line["message"]) for line in messages if line["kind"] == "status"] == [
        ("maintenance", "installing"),
        ("active", "count 1"),
    ]
    assert (agent.root / "agents" / "unit-thing-0" / "charm" / "made").read_text() == "x"
    assert result["state"]["status"] == ["active", "count 1"]


def test_stored_state_and_deferred_events_come_back(agent: Agent):
    agent.keep(agent.run("install")[0])
    first, _ = agent.run("start")
    assert len(first["state"]["deferred"]) == 1
    agent.keep(first)
    second, _ = agent.run("update-status")
    assert not second["ok"], "the deferred start runs first, then update-status fails"
    agent.state["config"] = {}
    third, messages = agent.run("start")
    assert [line["message"] for line in messages if line["kind"] == "status"] == ["started", "started"]
    assert third["state"]["deferred"] == []


def test_a_crash_is_one_line_and_a_trace(agent: Agent):
    result, _ = agent.run("update-status")
    assert result["error"] == "ValueError: two\nlines"
    assert "Traceback" in result["trace"]
    assert agent.run("install")[0]["ok"], "the agent serves on"


COUNTING = """
import ops

EVENTS = []
with open("imports", "a") as file:
    file.write("x")


class Counting(ops.CharmBase):
    def __init__(self, framework):
        super().__init__(framework)
        framework.observe(self.on.install, self._on_install)

    def _on_install(self, event):
        EVENTS.append(event)
        self.unit.status = ops.ActiveStatus(f"{len(EVENTS)} here, imported {len(open('imports').read())} times")


if __name__ == "__main__":
    ops.main(Counting)
"""


def test_events_share_the_import_of_their_unit_s_charm_and_nothing_else(agent: Agent):
    agent.source = agent.write("counting", COUNTING)
    for _ in range(2):
        for unit in ("thing/0", "thing/1"):
            result, _ = agent.run("install", unit=unit)
            assert result["state"]["status"] == ["active", "1 here, imported 1 times"]


def test_another_source_of_a_charm_takes_its_place_and_one_that_cannot_be_imported_is_reported(agent: Agent):
    assert agent.run("install")[0]["ok"]
    agent.source = agent.write("broken", "raise RuntimeError('no such luck')")
    for _ in range(2):
        result, _ = agent.run("install")
        assert (result["ok"], result["error"]) == (False, "RuntimeError: no such luck")
    agent.source = agent.write("counting", COUNTING)
    assert agent.run("install")[0]["state"]["status"] == ["active", "1 here, imported 1 times"]


def test_reboot_now_ends_the_hook_and_reboot_after_does_not(agent: Agent):
    after, _ = agent.run("config-changed")
    assert (after["ok"], after["reboot"]) == (True, "after")
    assert after["state"] is not None
    agent.state["config"] = {"now": True}
    now, _ = agent.run("config-changed")
    assert (now["ok"], now["reboot"], now["state"]) == (True, "now", None)


@pytest.mark.parametrize("departing", ["thing/0", "web/1"])
def test_a_unit_reads_which_unit_leaves_be_it_itself(agent: Agent, departing: str):
    relation = {
        "id": 4,
        "endpoint": "server",
        "type": "regular",
        "local_app_data": {},
        "local_unit_data": {},
        "remote_app": "web",
        "remote_app_data": {},
        "remote_units_data": {"1": {}},
    }
    agent.state["relations"] = [relation]
    result, _ = agent.run("relation-departed", relation=4, remote="web/1", departing=departing)
    assert result["ok"], result
    assert result["state"]["status"] == ["active", f"web/1: {departing} leaves"]


def test_equal_content_makes_no_revision(agent: Agent):
    identifier = "secret:" + "a" * 20
    secret = {
        "id": identifier,
        "owner": "app",
        "label": None,
        "tracked_revision": 2,
        "latest_revision": 3,
        "tracked_content": {"key": "old"},
        "latest_content": {"key": "new"},
        "grants": {},
    }
    agent.state["secrets"] = [secret]
    result, _ = agent.run("secret-changed", secret=identifier)
    assert result["ok"], result
    assert result["state"]["status"] == ["active", "new"]
    (after,) = result["state"]["secrets"]
    assert (after["latest_revision"], after["tracked_revision"]) == (3, 3)


@pytest.mark.parametrize(("text", "failure"), [("hi", None), ("fail", "as asked")])
def test_an_action_streams_its_log_finds_its_storage_and_keeps_its_results(
    agent: Agent, text: str, failure: str | None
):
    result, messages = agent.run("action", action={"name": "talk", "id": "1", "params": {"text": text}})
    assert [line["message"] for line in messages if line["kind"] == "action-log"] == ["first"]
    assert (result["ok"], result["action"]["failure"]) == (True, failure)
    assert result["action"]["results"]["text"] == text
    assert result["action"]["results"]["place"] == str(agent.root / "disk" / "data-0")
    assert "tool" in result["action"]["results"]["resource"]

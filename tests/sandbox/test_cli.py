"""The command line speaks Juju's words: what it prints of a model without hosts, and what it refuses."""

import json
import pathlib
import typing

import click.testing
import pytest
import yaml
from test_model import AGENT, CLIENT, SERVER, World

from sandbox import cli
from sandbox import model as rules
from sandbox.store import Status, Store


class Prompt:
    """Runs commands on a model in a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.store = Store("t", folder)
        world = World()
        world.add("server", {**SERVER, "resources": {"tool": {"type": "file"}}}, 2)
        world.add("client", CLIENT)
        world.add("agent", AGENT, 0)
        rules.relate(world.model, "server:api", "client:api")
        rules.relate(world.model, "agent:juju-info", "server:juju-info")
        world.settle()
        for unit in world.model.units.values():
            unit.status = Status(name="active", message=f"{unit.name} works")
        self.store.save(world.model)
        self.names = list(world.model.units)

    def run(self, *words: str) -> click.testing.Result:
        return click.testing.CliRunner().invoke(cli.cli, list(words))

    def ok(self, *words: str) -> str:
        result = self.run(*words)
        assert result.exit_code == 0, result.output
        return result.stdout


@pytest.fixture
def prompt(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Prompt:
    one = Prompt(tmp_path)
    monkeypatch.setattr(cli, "Store", lambda _: one.store)
    return one


def columns(text: str) -> list[list[str]]:
    """Return the words of each table's head."""
    heads = [block.splitlines()[0] for block in text.strip().split("\n\n")]
    return [[word for word in head.split("  ") if word] for head in heads]


def test_status_has_the_sections_and_columns_of_juju(prompt: Prompt):
    text = prompt.ok("status", "--relations")
    assert [[word.strip() for word in head] for head in columns(text)] == [
        ["Model", "Controller", "Cloud/Region", "Version", "SLA", "Timestamp", "Notes"],
        ["App", "Version", "Status", "Scale", "Charm", "Channel", "Rev", "Exposed", "Message"],
        ["Unit", "Workload", "Agent", "Machine", "Public address", "Ports", "Message"],
        ["Machine", "State", "Address", "Inst id", "Base", "AZ", "Message"],
        ["Integration provider", "Requirer", "Interface", "Type", "Message"],
    ]
    rows = [line.split() for line in text.splitlines()]
    assert ["server:api", "client:api", "http", "regular"] in rows
    assert ["server:juju-info", "agent:juju-info", "juju-info", "subordinate"] in rows
    assert ["server:cluster", "server:cluster", "cluster", "peer"] in rows
    assert "Integration" not in prompt.ok("status")


def test_status_of_some_names_shows_them_and_where_they_stand(prompt: Prompt):
    assert "client/0*" not in prompt.ok("status", "agent")
    shown = json.loads(prompt.ok("status", "agent/0", "--format", "json"))
    assert list(shown["applications"]) == ["server", "agent"]
    (unit,) = shown["applications"]["server"]["units"].values()
    assert list(unit["subordinates"]) == ["agent/0"]
    assert set(shown["machines"]) == {unit["machine"]}
    wrong = prompt.run("status", "severer")
    assert wrong.exit_code == 1
    assert wrong.stderr.startswith("ERROR unit 'severer' not found (there are: server/0")


def test_config_shows_one_value_or_all_as_juju_does(prompt: Prompt):
    assert prompt.ok("config", "server", "port") == "80\n"
    assert prompt.ok("config", "server", "fast") == "false\n"
    assert prompt.ok("config", "server", "name") == "\n"
    shown = yaml.safe_load(prompt.ok("config", "server"))
    assert (shown["application"], shown["charm"]) == ("server", "server")
    assert shown["settings"]["port"] == {"default": 80, "source": "default", "type": "int", "value": 80}
    assert shown["settings"]["name"] == {"source": "unset", "type": "string"}
    assert json.loads(prompt.ok("config", "server", "--format", "json")) == shown
    wrong = prompt.run("config", "server", "prot")
    assert (wrong.exit_code, wrong.stderr) == (
        1,
        "ERROR server has no option 'prot' (there are: fast, name, port, token)\n",
    )


def test_config_takes_files(prompt: Prompt, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    given: list[dict[str, typing.Any]] = []

    class Session(cli._Session):
        def settle(self, *_: object, **__: object) -> None:
            given.append(rules.options(self.store.load().application("server")))

    def set_options(*_: object, **__: object) -> None:
        given.append({"values": _[2], **__})

    monkeypatch.setattr(cli, "_Session", Session)
    monkeypatch.setattr(cli.rules, "set_options", set_options)
    (tmp_path / "text").write_text("two\nlines")
    (tmp_path / "all.yaml").write_text("server: {port: 81, fast: true, name: a}\nother: {x: 1}\n")
    prompt.ok("config", "server", f"name=@{tmp_path}/text", "--file", f"{tmp_path}/all.yaml", "--reset", "token")
    assert given[0] == {"values": {"port": "81", "fast": "true", "name": "two\nlines"}, "reset": ["token"]}
    wrong = prompt.run("config", "client", "--file", f"{tmp_path}/all.yaml")
    assert (wrong.exit_code, wrong.stderr) == (1, f"ERROR {tmp_path}/all.yaml: has no options below the name client\n")


class Acting(cli._Session):
    """Answers actions without hosts."""

    asked: typing.ClassVar[list[tuple[str, str, dict[str, str]]]] = []

    def action(
        self, model: object, engine: object, name: str, action: str, values: typing.Any
    ) -> dict[str, typing.Any]:
        """Fail on the second unit."""
        self.asked.append((name, action, dict(values)))
        failure = "no disk" if name == "server/1" else None
        return {"id": "7", "results": {"path": "/x", "text": "a\nb"}, "failure": failure}


@pytest.fixture
def acting(monkeypatch: pytest.MonkeyPatch) -> type[Acting]:
    monkeypatch.setattr(Acting, "asked", [])
    monkeypatch.setattr(cli, "_Session", Acting)
    return Acting


def test_run_prints_results_plainly_and_whole_in_yaml_and_json(prompt: Prompt, acting: type[Acting]):
    assert prompt.ok("run", "server/leader", "dump", "path=/x", "--wait", "1h30m") == "path: /x\ntext: |-\n  a\n  b\n"
    assert acting.asked == [("server/0", "dump", {"path": "/x"})]
    whole = {
        "server/0": {"id": "7", "unit": "server/0", "status": "completed", "results": {"path": "/x", "text": "a\nb"}}
    }
    assert json.loads(prompt.ok("run", "server/0", "dump", "--format", "json")) == whole
    assert yaml.safe_load(prompt.ok("run", "server/0", "dump", "--format", "yaml")) == whole


def test_run_takes_several_units_and_parameters_from_a_file(
    prompt: Prompt, acting: type[Acting], tmp_path: pathlib.Path
):
    (tmp_path / "p.yaml").write_text("path: /a\nlines: 3\n")
    result = prompt.run("run", "server/0", "server/1", "dump", "--params", f"{tmp_path}/p.yaml", "path=/b")
    assert acting.asked == [(name, "dump", {"path": "/b", "lines": "3"}) for name in ("server/0", "server/1")]
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "ERROR server/1: dump: no disk"
    assert yaml.safe_load(result.stdout)["server/1"]["message"] == "no disk"


@pytest.mark.parametrize(
    "words",
    [["run", "server/0"], ["run", "dump"], ["run", "server/0", "path=/x"], ["run", "server/0", "dump", "--background"],
     ["run", "server/0", "dump", "--wait", "soon"], ["run", "server/0", "dump", "path"], ["exec", "server/0", "--"]],
    ids=" ".join,
)  # fmt: skip
def test_what_is_no_command_line_is_usage(prompt: Prompt, acting: type[Acting], words: list[str]):
    assert prompt.run(*words).exit_code == 2
    assert acting.asked == []


def test_actions_are_listed(prompt: Prompt):
    assert prompt.ok("actions", "server").split() == ["dump"]


def test_the_log_is_chosen_by_unit_application_and_level(prompt: Prompt):
    for who, level, text in (
        ("server/0", "DEBUG", "one"), ("server/1", "WARNING", "two"), ("agent/0", "ERROR", "three"), ("client/0", "ACTION", "four"),
    ):  # fmt: skip
        prompt.store.log(who, level, text)

    def shown(*words: str) -> list[str]:
        return [line.split()[-1] for line in prompt.ok("debug-log", *words).splitlines()]

    assert shown() == ["one", "two", "three", "four"]
    assert shown("server/1") == shown("--include", "unit-server-1") == ["two"]
    assert shown("--include", "server", "--exclude", "server/0") == ["two"]
    assert shown("--level", "WARNING") == ["two", "three"]
    assert shown("--level", "info") == ["two", "three", "four"], "an action's progress is as an INFO"
    assert shown("-n", "1") == ["four"]
    assert shown("-n", "1", "--replay", "--no-tail") == ["one", "two", "three", "four"]
    assert prompt.run("debug-log", "--include", "nobody").exit_code == 1


def test_a_resource_is_attached_and_the_units_told(
    prompt: Prompt, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    class Session(cli._Session):
        def settle(self, model: typing.Any, *_: object, **__: object) -> None:
            self.store.save(model)

    monkeypatch.setattr(cli, "_Session", Session)
    (tmp_path / "file").write_text("content")
    prompt.ok("attach-resource", "server", f"tool={tmp_path}/file")
    model = prompt.store.load()
    assert pathlib.Path(model.applications["server"].resources["tool"]).read_text() == "content"
    assert all("upgrade-charm" in [event.kind for event in model.units[f"server/{n}"].events] for n in (0, 1))
    for words, said in (
        ((f"tool={tmp_path}/none",), f"ERROR resource 'tool': no file {tmp_path}/none\n"),
        ((f"tol={tmp_path}/file",), "ERROR server has no resource 'tol' (there are: tool)\n"),
    ):
        wrong = prompt.run("attach-resource", "server", *words)
        assert (wrong.exit_code, wrong.stderr) == (1, said)

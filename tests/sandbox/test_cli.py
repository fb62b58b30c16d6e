"""The command line speaks Juju's words: what it prints of a model without hosts, and what it refuses."""

import json
import pathlib
import typing

import click.testing
import pytest
import yaml
from world import AGENT, CLIENT, SERVER, World

from sandbox import cli
from sandbox import model as rules
from sandbox.store import SandboxError, Status, Store


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


def test_status_names_machines_by_number_and_instance(prompt: Prompt):
    text, model = prompt.ok("status"), prompt.store.load()
    rows = [line.split() for line in text.splitlines()]
    host = f"juju-{model.uuid[-6:]}-1"
    assert ["1", "started", "10.0.0.1", host, "debian@12"] in rows
    assert ["server/1", "active", "allocating", "1", "10.0.0.1", "server/1", "works"] in rows
    assert ["agent/1", "active", "allocating", "10.0.0.1", "agent/1", "works"] in rows, "a subordinate's is left out"
    shown = json.loads(prompt.ok("status", "--format", "json"))
    assert shown["machines"]["1"]["instance-id"] == shown["machines"]["1"]["hostname"] == host
    unit = shown["applications"]["server"]["units"]["server/1"]
    assert unit["machine"] == "1"
    assert "machine" not in unit["subordinates"]["agent/1"]


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
        def settle(self, engine: object, **_: object) -> None:
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

    def action(self, engine: object, name: str, action: str, values: typing.Any) -> dict[str, typing.Any]:
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
    prompt.store.log("gone/0", "INFO", "five")
    assert shown("--include", "gone") == shown("gone/0") == ["five"], "a unit that was removed has its lines still"


def test_a_resource_is_attached_and_the_units_notified(
    prompt: Prompt, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    class Session(cli._Session):
        def settle(self, engine: object, **_: object) -> None:
            pass

    monkeypatch.setattr(cli, "_Session", Session)
    (tmp_path / "file").write_text("content")
    prompt.ok("attach-resource", "server", f"tool={tmp_path}/file")
    model = prompt.store.load()
    assert pathlib.Path(model.applications["server"].resources["tool"]).read_text() == "content"
    assert all("upgrade-charm" in [event.kind for event in model.units[f"server/{n}"].events] for n in (0, 1))
    for words, message in (
        ((f"tool={tmp_path}/none",), f"ERROR resource 'tool': no file {tmp_path}/none\n"),
        ((f"tol={tmp_path}/file",), "ERROR server has no resource 'tol' (there are: tool)\n"),
    ):
        wrong = prompt.run("attach-resource", "server", *words)
        assert (wrong.exit_code, wrong.stderr) == (1, message)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, typing.Any]]:
    """Let commands change the model without running what follows; return what they settled with."""
    given: list[dict[str, typing.Any]] = []

    class Session(cli._Session):
        def settle(self, engine: object, **options: typing.Any) -> None:
            given.append(options)

    monkeypatch.setattr(cli, "_Session", Session)
    return given


def test_resolved_retries_or_skips_the_failed_hook(prompt: Prompt, settled: list[dict[str, typing.Any]]):
    def fail() -> None:
        model = prompt.store.load()
        for name in ("server/0", "client/0"):
            unit = model.units[name]
            event = rules.enqueue(model, unit, "config-changed")
            assert event is not None
            rules.failed(unit, event, "hook failed", 10.0**12)
        prompt.store.save(model)

    fail()
    prompt.ok("resolved", "server/0")
    (event,) = prompt.store.load().units["server/0"].events
    assert (event.kind, event.attempts, event.retry_at) == ("config-changed", 1, 0.0)
    prompt.ok("resolved", "--all", "--no-retry")
    units = prompt.store.load().units
    assert [(units[name].agent.name, units[name].events) for name in ("server/0", "client/0")] == [("idle", [])] * 2
    wrong = prompt.run("resolved", "server/0")
    assert (wrong.exit_code, wrong.stderr) == (1, "ERROR unit 'server/0' is not in an error state\n")
    assert prompt.run("resolved").exit_code == prompt.run("resolved", "--all", "server/0").exit_code == 2
    assert len(settled) == 2


def test_remove_application_begins_the_end_of_its_units(prompt: Prompt, settled: list[dict[str, typing.Any]]):
    prompt.ok("remove-application", "--no-prompt", "client", "server")
    model = prompt.store.load()
    assert {name for name, app in model.applications.items() if app.dying} == {"client", "server"}
    assert all(unit.dying for unit in model.units.values()), "subordinates go with their principals"
    assert [event.kind for event in model.units["client/0"].events][-2:] == ["stop", "remove"]
    wrong = prompt.run("remove-application", "severer")
    assert wrong.stderr.startswith("ERROR application 'severer' not found")
    assert len(settled) == 1


def test_a_deployments_seed_is_given_or_drawn_kept_and_logged(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, settled: list[dict[str, typing.Any]]
):
    store = Store("new", tmp_path / "state")
    monkeypatch.setattr(cli, "Store", lambda _: store)
    (tmp_path / "thing" / "src").mkdir(parents=True)
    (tmp_path / "thing" / "charmcraft.yaml").write_text("name: thing\ntype: charm\n")
    path = tmp_path / "bundle.yaml"
    path.write_text("applications:\n  thing: {charm: ./thing, num_units: 1}\n")

    def deploy(*words: str, env: dict[str, str] | None = None) -> int:
        result = click.testing.CliRunner().invoke(cli.cli, ["deploy", str(path), *words], env=env)
        assert result.exit_code == 0, result.output
        assert settled
        return store.load().seed

    drawn = deploy("--once")
    assert settled.pop() == {"once": True}
    assert deploy() == drawn
    assert deploy("--seed", "7") == deploy() == 7
    assert deploy(env={"SLURM_DDP_SEED": "8"}) == 8
    seeds = [line.partition("drawn from ")[2].partition(":")[0] for line in store.log_lines() if "seed" in line]
    assert seeds == [f"seed {drawn}", "seed 7", "seed 8"], "once for each"


def test_once_sends_no_update_status(prompt: Prompt):
    class Engine:
        model = prompt.store.load()
        update_status = True

        def settle(self) -> None: ...

        def errors(self) -> list[str]:
            return []

    unit = Engine.model.units["server/0"]
    unit.status, unit.started = Status(name="waiting"), True
    engine: typing.Any = Engine()
    cli._Session(prompt.store).settle(engine, once=True)  # would fail on a change to the model
    assert not engine.update_status


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        "config server port=81",
        "integrate server:api agent:api",
        "remove-relation server:api client:api",
        "add-unit client",
        "remove-unit client/0",
        "remove-application client",
        "update-status server/0",
    ],
)
def test_commands_that_change_the_model_can_do_without_update_status(
    prompt: Prompt, monkeypatch: pytest.MonkeyPatch, words: str, *, once: bool
):
    """Each changes the model first; then it works off what follows, without update-status where `--once` is given."""
    seen: list[tuple[bool, list[str]]] = []

    def settle(_: object, engine: cli.Engine, *, once: bool) -> None:
        waiting = [event.label for unit in engine.model.units.values() for event in unit.events]
        seen.append((once, waiting))

    monkeypatch.setattr(cli._Session, "settle", settle)
    prompt.ok(*words.split(), *(["--once"] if once else []))
    ((given, waiting),) = seen
    assert given == once
    assert waiting, "what the command asks for"


def test_destroy_ends_a_model_whatever_wrote_it(prompt: Prompt, monkeypatch: pytest.MonkeyPatch):
    ended: list[str] = []

    class Hosts:
        def __init__(self, name: str) -> None:
            self.name = name

        def destroy(self) -> None:
            with pytest.raises(SandboxError, match=r"^model 't' is being destroyed$"), prompt.store.change():
                pass
            ended.append(self.name)

    monkeypatch.setattr(cli, "Hosts", Hosts)
    prompt.ok("destroy", "--no-prompt")
    assert ended == ["t"]
    assert not prompt.store.directory.exists()
    prompt.store.directory.mkdir()
    prompt.store.path.write_text("{}")
    monkeypatch.setattr(Hosts, "destroy", lambda _: None)
    prompt.ok("destroy", "--no-prompt")
    assert not prompt.store.directory.exists()

"""The command line speaks Juju's words: its output for a model without hosts, and its refusals."""

import json
import pathlib
import types
import typing

import click.testing
import pytest
import yaml
from world import AGENT, CLIENT, SERVER, World

from sandbox import cli, session
from sandbox import model as rules
from sandbox.store import Status, Store

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())


class Prompt:
    """Runs commands on a model in a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.store = Store("t", folder)
        world = World()
        world.add("server", SERVER, 2)
        world.add("client", CLIENT)
        world.add("agent", AGENT, 0)
        rules.relate(world.model, "server:api", "client:api")
        rules.relate(world.model, "agent:juju-info", "server:juju-info")
        world.settle()
        for unit in world.model.units.values():
            unit.status = Status(name="active", message=f"{unit.name} works")
        self.store.save(world.model)
        self.settled: list[
            tuple[bool, list[str]]
        ] = []  # of each command: --once, and the events that wait
        self.acted: list[tuple[str, str, dict[str, str]]] = []

    def run(self, words: str) -> click.testing.Result:
        return click.testing.CliRunner().invoke(cli.cli, words.split())

    def ok(self, words: str) -> str:
        result = self.run(words)
        assert result.exit_code == 0, result.output
        return result.stdout


@pytest.fixture
def prompt(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Prompt:
    one = Prompt(tmp_path)
    monkeypatch.setattr(cli, "Store", lambda _name, **_options: one.store)

    def settle(engine: typing.Any, *, once: bool, **_: object) -> None:
        one.settled.append(
            (once, [event.label for unit in engine.model.units.values() for event in unit.events])
        )

    def act(_: object, name: str, action: str, values: dict[str, str]) -> dict[str, typing.Any]:
        one.acted.append((name, action, values))
        failure = "no disk" if name == "server/1" else None
        return {"id": "7", "results": {"path": "/x", "text": "a\nb"}, "failure": failure}

    monkeypatch.setattr(session, "settle", settle)
    monkeypatch.setattr(cli.Engine, "act", act)
    return one


def test_status_has_the_tables_and_as_data_the_shape_of_juju(prompt: Prompt):
    text, model = prompt.ok("status"), prompt.store.load()
    heads = [" ".join(block.splitlines()[0].split()) for block in text.strip().split("\n\n")]
    assert heads == CASES["heads_of_status"]
    rows = [line.split() for line in text.splitlines()]
    host = f"juju-{model.uuid[-6:]}-1"
    assert ["1", "started", "10.0.0.1", host, "debian@12"] in rows
    assert ["server/1", "active", "allocating", "1", "10.0.0.1", "server/1", "works"] in rows
    assert ["agent/1", "active", "allocating", "10.0.0.1", "agent/1", "works"] in rows, (
        "a subordinate's is left out"
    )
    data = json.loads(prompt.ok("status --format json"))
    assert data["machines"]["1"]["instance-id"] == data["machines"]["1"]["hostname"] == host
    unit = data["applications"]["server"]["units"]["server/1"]
    assert unit["machine"] == "1"
    assert unit["workload-status"] == {"current": "active", "message": "server/1 works"}
    assert "machine" not in unit["subordinates"]["agent/1"]


def test_config_shows_all_options_as_juju_does(prompt: Prompt):
    data = yaml.safe_load(prompt.ok("config server"))
    assert (data["application"], data["charm"]) == ("server", "server")
    assert data["settings"]["port"] == {
        "default": 80,
        "source": "default",
        "type": "int",
        "value": 80,
    }
    assert data["settings"]["name"] == {"source": "unset", "type": "string"}
    assert (prompt.ok("config server port"), prompt.ok("config server name")) == ("80\n", "\n")
    assert prompt.run("config server ports").stderr.startswith(
        'ERROR key "ports" not found in "server"'
    )


@pytest.mark.parametrize("words", ["--reset port,name", "--reset port --reset name,"])
def test_reset_takes_several_options_as_juju_does(prompt: Prompt, words: str):
    prompt.ok("config server port=81 name=x")
    prompt.ok(f"config server {words}")
    assert prompt.store.load().application("server").options == {}


def test_run_prints_results_plainly_or_whole_and_fails_with_the_action(prompt: Prompt):
    assert prompt.ok("run server/leader dump path=/x --wait 1h") == "path: /x\ntext: |-\n  a\n  b\n"
    assert prompt.acted == [("server/0", "dump", {"path": "/x"})]
    whole = {
        "id": "7",
        "unit": "server/0",
        "results": {"path": "/x", "text": "a\nb"},
        "status": "completed",
    }
    assert json.loads(prompt.ok("run server/0 dump --format json")) == {"server/0": whole}
    failed = prompt.run("run server/1 dump --format json")
    assert (failed.exit_code, failed.stderr) == (1, "ERROR dump: no disk\n")
    assert json.loads(failed.stdout)["server/1"]["message"] == "no disk"


@pytest.mark.parametrize(("words", "code", "error"), CASES["wrong_words_change_nothing"])
def test_wrong_words_change_nothing(prompt: Prompt, words: str, code: int, error: str):
    result = prompt.run(words)
    assert (result.exit_code, result.stderr[: len(error)]) == (code, error or result.stderr[:0])
    assert (prompt.acted, prompt.settled) == ([], [])


def test_the_log_is_chosen_by_unit_and_application(prompt: Prompt):
    for line in (
        "server/0 DEBUG one",
        "server/1 WARNING two",
        "agent/0 ERROR three",
        "gone/0 INFO four",
    ):
        prompt.store.log(*line.split())

    def texts(words: str) -> list[str]:
        return [line.split()[-1] for line in prompt.ok(f"debug-log {words}").splitlines()]

    assert texts("") == texts("-n 1 --replay") == ["one", "two", "three", "four"]
    assert texts("--include server") == ["one", "two"]
    assert texts("--include server/1 --include gone/0") == ["two", "four"], (
        "a removed unit's lines stay"
    )
    assert texts("-n 1") == ["four"]
    assert texts("--replay --no-tail --level WARNING") == ["two", "three"]


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("words", CASES["commands_change_the_model"])
def test_commands_change_the_model_and_then_wait_with_or_without_update_status(
    prompt: Prompt, words: str, once: bool
):
    prompt.ok(f"{words} --once" if once else words)
    ((given, waiting),) = prompt.settled
    assert given == once
    assert waiting, "the command's events"


def test_destroy_ends_a_model_whatever_wrote_it(prompt: Prompt, monkeypatch: pytest.MonkeyPatch):
    ended: list[str] = []

    monkeypatch.setattr(
        session, "Hosts", lambda name: types.SimpleNamespace(destroy=lambda: ended.append(name))
    )
    for _ in range(2):
        prompt.ok("destroy --no-prompt")
        assert not prompt.store.directory.exists()
        prompt.store.directory.mkdir()
        prompt.store.path.write_text("{}")  # of another version
    assert ended == ["t", "t"]

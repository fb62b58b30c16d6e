"""The engine: Juju's locks, retries and interrupted hooks, with the real agent and a small charm.

A host here is a folder: its agent runs as a process on this machine instead of in a container.
"""

import collections.abc
import pathlib
import shutil
import subprocess
import sys
import threading
import time
import typing

import pytest

from sandbox import engine as engines
from sandbox import model as rules
from sandbox.engine import Engine, Progress
from sandbox.store import Application, Model, SandboxError, Store

CHARM = """
import pathlib
import time

import ops

ROOM = pathlib.Path({room!r})


def wait_for(name):
    deadline = time.monotonic() + 30
    while not (ROOM / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.02)


class TheCharm(ops.CharmBase):
    def __init__(self, framework):
        super().__init__(framework)
        for event in (self.on.start, self.on.config_changed, self.on.update_status, self.on.stop, self.on.remove):
            framework.observe(event, self._on_hook)
        if "api" in self.meta.relations:
            framework.observe(self.on.api_relation_departed, self._on_hook)
            framework.observe(self.on.api_relation_broken, self._on_hook)
        if self.meta.actions:
            framework.observe(self.on.wait_action, self._on_action)
            framework.observe(self.on.hold_action, self._on_action)
        framework.observe(self.on.collect_unit_status, self._on_collect)

    def _on_hook(self, event):
        with (ROOM / "hooks").open("a") as file:
            file.write(f"{{self.unit.name}} {{event.handle.kind}}\\n")
        if self.config.get("slow") and event.handle.kind == "config_changed":
            (ROOM / "began").write_text("")
            wait_for("go")
        if (ROOM / f"fail-{{self.unit.name.replace('/', '-')}}-{{event.handle.kind}}").exists():
            raise RuntimeError("as asked")

    def _on_collect(self, event):
        event.add_status(ops.ActiveStatus())

    def _on_action(self, event):
        event.log("waits")
        (ROOM / "began").write_text("")
        wait_for("go")
        event.set_results({{"done": "yes"}})


if __name__ == "__main__":
    ops.main(TheCharm)
"""
ACTIONS = {"wait": {"parallel": True}, "hold": {}}
SERVER: dict[str, typing.Any] = {
    "name": "server", "type": "charm", "actions": ACTIONS, "provides": {"api": {"interface": "http"}},
    "config": {"options": {"slow": {"type": "boolean", "default": False}, "n": {"type": "int"}}},
}  # fmt: skip
AGENT: dict[str, typing.Any] = {
    "name": "agent", "type": "charm", "subordinate": True, "actions": ACTIONS,
    "config": {"options": {"slow": {"type": "boolean", "default": False}, "n": {"type": "int"}}},
    "requires": {"juju-info": {"interface": "juju-info", "scope": "container"}, "api": {"interface": "http"}},
}  # fmt: skip


class FolderHost:
    """A host whose agent is a process here."""

    def __init__(self, hosts: "FolderHosts", name: str) -> None:
        self.name = name
        self.address = f"10.0.0.{list(hosts.made).index(name) + 2 if name in hosts.made else len(hosts.made) + 2}"
        self.root = hosts.folder / name
        self.agents: list[subprocess.Popen[bytes]] = []

    def is_running(self) -> bool:
        return True

    def popen(self, argv: list[str], **options: typing.Any) -> subprocess.Popen[bytes]:
        assert argv[1].endswith("agent.py")
        agents = str(self.root / "var/lib/juju/agents")
        code = f"import pathlib, sandbox.guest.agent as a; a.AGENTS = pathlib.Path({agents!r}); a.main()"
        process = typing.cast("subprocess.Popen[bytes]", subprocess.Popen([sys.executable, "-c", code], **options))
        self.agents.append(process)
        return process

    def reboot(self, timeout: float) -> None:
        for process in self.agents:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
            process.wait(timeout)
        self.agents.clear()
        shutil.rmtree(self.root / "var/lib/sandbox", ignore_errors=True)  # as systemd-tmpfiles does


class FolderHosts:
    """The hosts of a model, shared by every engine of a test."""

    cidr = "10.0.0.0/24"

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.made: dict[str, FolderHost] = {}

    def up(self, _: object) -> None: ...

    def recover(self, _: object) -> None: ...

    def names(self) -> list[str]:
        return sorted(self.made)

    def get(self, name: str) -> FolderHost:
        return self.made[name]

    def create(self, name: str, **_: object) -> FolderHost:
        self.made[name] = FolderHost(self, name)
        return self.made[name]

    def destroy_host(self, name: str) -> None:
        del self.made[name]


class Bench:
    """A model with a small charm, and as many commands at work on it as a test starts."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = folder / "room"
        self.room.mkdir()
        self.store = Store("t", folder / "state")
        self.lines: list[str] = []
        hosts = FolderHosts(folder / "hosts")
        self.hosts = hosts
        monkeypatch.setattr(engines, "Hosts", lambda _: hosts)
        monkeypatch.setattr(engines, "GUEST", self.store.directory)
        monkeypatch.setattr(engines.order, "_RETRY_S", 0.1)
        monkeypatch.setattr(engines, "_POLL_S", 0.05)
        with self.engine(create=True) as engine:
            with engine.change() as model:
                model.uuid = "5a7d8c3e-52ab-4b1c-8f6e-9d0c772586ad"
                model.seed = 3
                self.add(model, SERVER)
                rules.add_unit(model, model.applications["server"])
                self.add(model, AGENT)
                rules.relate(model, "agent:juju-info", "server:juju-info")
            engine.settle()
        self.clear()

    def engine(self, *, create: bool = False) -> Engine:
        store = Store("t", self.store.directory.parent)
        return Engine(store, Progress(self.lines.append), (lambda: Model(name="t")) if create else None)

    def add(self, model: Model, metadata: dict[str, typing.Any], name: str = "") -> None:
        source = self.store.directory / "charms" / f"{name or metadata['name']}-0"
        (source / "src").mkdir(parents=True)
        (source / "src" / "charm.py").write_text(CHARM.format(room=str(self.room)))
        (source / "charmcraft.yaml").write_text(engines.yaml.safe_dump(metadata | {"name": name or metadata["name"]}))
        charm = Application(
            name=name or metadata["name"], charm=metadata["name"], source=str(source), metadata=metadata
        )
        rules.add_application(model, charm)

    def hooks(self) -> list[str]:
        path = self.room / "hooks"
        return path.read_text().splitlines() if path.exists() else []

    def clear(self) -> None:
        (self.room / "hooks").unlink(missing_ok=True)
        (self.room / "began").unlink(missing_ok=True)
        self.lines.clear()

    def begin(self, work: collections.abc.Callable[[Engine], object]) -> "Command":
        return Command(self.engine(), work)

    def act(self, unit: str, action: str) -> "Command":
        """Begin an action in a command of its own, and wait until it runs."""
        command = self.begin(lambda engine: engine.act(unit, action, {}))
        self.wait("began")
        return command

    def wait(self, name: str) -> None:
        deadline = time.monotonic() + 30
        while not (self.room / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.02)

    def config(self, app: str, **values: str) -> None:
        """Set options as a command of its own does, from begin to end."""
        with self.engine() as engine:
            with engine.change() as model:
                rules.set_options(model, model.applications[app], values)
            engine.settle()


class Command:
    """A command in a thread of its own."""

    def __init__(self, engine: Engine, work: collections.abc.Callable[[Engine], object]) -> None:
        self.result: typing.Any = None
        self.engine = engine

        def run() -> None:
            try:
                with engine:
                    self.result = work(engine)
            except SandboxError as e:
                self.result = e

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def end(self) -> typing.Any:
        self.thread.join(40)
        assert not self.thread.is_alive()
        return self.result


@pytest.fixture
def bench(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_hosts_are_named_as_juju_names_machines(bench: Bench):
    assert bench.hosts.names() == ["juju-2586ad-0"]
    with bench.engine() as engine:
        with engine.change() as model:
            rules.add_unit(model, model.applications["server"])
        engine.settle()
        assert {unit.address for unit in model.machine_units(1)} == {"10.0.0.3"}
        with engine.change() as model:
            rules.remove_unit(model, model.units["server/0"])
        engine.settle()
    assert bench.hosts.names() == ["juju-2586ad-1"]


def test_a_model_that_was_not_made_leaves_nothing(tmp_path: pathlib.Path):
    store = Store("none", tmp_path / "state")
    with (
        pytest.raises(SandboxError, match=r"^wrong$"),
        Engine(store, Progress(print), lambda: Model(name="none")) as engine,
        engine.change(),
    ):
        raise SandboxError("wrong")
    assert not store.directory.exists()


def test_hooks_of_other_units_run_beside_a_parallel_action(bench: Bench):
    waiting = bench.act("server/0", "wait")
    bench.config("agent", n="1")
    assert "agent/0 config_changed" in bench.hooks()
    assert waiting.thread.is_alive()
    (bench.room / "go").write_text("")
    assert waiting.end()["results"] == {"done": "yes"}


def test_a_units_own_hooks_and_actions_wait_for_its_action_even_a_parallel_one(bench: Bench):
    waiting = bench.act("server/0", "wait")
    bench.config("server", n="1")
    assert bench.hooks() == [], "the command ends, the hook waits for the action of the other one"
    assert any("config-changed waits for the unit: server/0 runs action wait" in line for line in bench.lines)
    second = bench.begin(lambda engine: engine.act("server/0", "wait", {}))
    time.sleep(0.5)
    assert second.result is None
    (bench.room / "go").write_text("")
    assert waiting.end()["results"] == second.end()["results"] == {"done": "yes"}
    assert bench.hooks() == ["server/0 config_changed"]


def test_a_plain_action_holds_the_machine(bench: Bench):
    holding = bench.act("server/0", "hold")
    bench.config("agent", n="1")
    assert bench.hooks() == []
    wanted = "config-changed waits for the machine lock of machine 0: server/0 runs action hold"
    assert any(wanted in line and "agent/0" in line for line in bench.lines)
    (bench.room / "go").write_text("")
    holding.end()
    with bench.engine() as engine:
        engine.settle()
    assert "agent/0 config_changed" in bench.hooks()


def test_a_parallel_action_runs_beside_a_plain_one_of_another_unit(bench: Bench):
    holding = bench.act("server/0", "hold")
    (bench.room / "began").unlink()
    waiting = bench.act("agent/0", "wait")
    (bench.room / "go").write_text("")
    assert holding.end()["results"] == waiting.end()["results"] == {"done": "yes"}


def test_an_action_changes_nothing_that_others_changed_meanwhile(bench: Bench):
    waiting = bench.act("agent/0", "wait")
    bench.config("server", n="7")
    with bench.engine() as engine, engine.change() as model:
        rules.add_user_secret(model, "mine", {"key": "value"})
    (bench.room / "go").write_text("")
    waiting.end()
    model = bench.store.load()
    assert model.applications["server"].options == {"n": 7}
    assert [secret.name for secret in model.secrets.values()] == ["mine"]
    assert model.units["agent/0"].events == []


def test_two_commands_share_the_work_and_each_ends_when_all_is_done(bench: Bench):
    commands = [bench.begin(lambda engine, n=n: _configure(engine, n)) for n in range(3)]
    for command in commands:
        command.end()
    assert {line for line in bench.hooks() if "config_changed" in line} == {"server/0 config_changed"}
    assert all(unit.agent.name == "idle" for unit in bench.store.load().units.values())


def _configure(engine: Engine, n: int) -> None:
    with engine.change() as model:
        rules.set_options(model, model.applications["server"], {"n": str(n)})
    engine.settle()


def test_a_unit_in_error_gets_its_hook_again_and_nothing_else(bench: Bench):
    fault = bench.room / "fail-server-0-config_changed"
    fault.write_text("")
    with bench.engine() as engine:
        with engine.change() as model:
            rules.set_options(model, model.applications["server"], {"n": "1"})
            rules.enqueue(model, model.units["server/0"], "update-status")
        engine.settle()
        (error,) = engine.errors()
    assert error == (
        'server/0: hook failed: "config-changed": RuntimeError: as asked '
        "(each command tries it again; ./sandboxctl resolved --no-retry server/0 skips it)"
    )
    tries = [line for line in bench.hooks() if line.startswith("server")]
    assert tries == ["server/0 config_changed"] * 4, "the first time and three times again"
    pauses = [line.rpartition("again in ")[2] for line in bench.lines if "again in" in line]
    assert pauses == ["0 s"] * 3
    (bench.room / "go").write_text("")
    with bench.engine() as engine:
        assert engine.act("server/0", "hold", {})["results"] == {"done": "yes"}, "actions run on a unit in error"
        assert engine.model.units["server/0"].agent.name == "error"
    fault.unlink()
    with bench.engine() as engine:
        engine.settle()
        assert engine.errors() == []
    assert bench.hooks()[-1] == "server/0 update_status"


def test_a_failed_hook_is_skipped_by_resolved(bench: Bench):
    (bench.room / "fail-server-0-config_changed").write_text("")
    bench.config("server", n="1")
    before = bench.hooks()
    with bench.engine() as engine:
        with engine.change() as model:
            rules.resolve(model, model.units["server/0"], retry=False)
        engine.settle()
        assert engine.errors() == []
        with pytest.raises(SandboxError, match=r"^unit 'server/0' is not in an error state$"), engine.change() as model:
            rules.resolve(model, model.units["server/0"], retry=True)
    assert bench.hooks().count("server/0 config_changed") == before.count("server/0 config_changed")


def test_a_hook_killed_by_a_reboot_runs_again_from_its_start_and_then_start(bench: Bench):
    slow = bench.begin(_slow)
    bench.wait("began")
    with bench.engine() as engine:
        engine.reboot("server/0")
        (bench.room / "go").write_text("")
        engine.settle()
    slow.end()
    hooks = [line for line in bench.hooks() if line.startswith("server") and "update" not in line]
    assert hooks[:3] == ["server/0 config_changed", "server/0 config_changed", "server/0 start"]
    assert "agent/0 start" in bench.hooks()
    assert [unit.failed for unit in bench.store.load().units.values()] == [None, None]


def _slow(engine: Engine) -> None:
    with engine.change() as model:
        rules.set_options(model, model.applications["server"], {"slow": "true"})
    engine.settle()


def test_the_action_of_a_command_that_was_killed_is_dropped_and_its_hook_runs_again(bench: Bench):
    with bench.engine() as engine, engine.change() as model:
        unit = model.units["server/0"]
        rules.request_action(model, unit, "hold", {})  # nobody holds its lock
        rules.enqueue(model, model.units["agent/0"], "config-changed")
        model.units["agent/0"].agent.name = "executing"
    with bench.engine() as engine:
        engine.settle()
        assert [event.label for unit in engine.model.units.values() for event in unit.events] == []
    assert "agent/0 config_changed" in bench.hooks()
    log = "\n".join(bench.store.log_lines())
    assert "server/0 WARNING action hold was interrupted: nobody waits for it" in log
    assert "agent/0 WARNING config-changed was interrupted: it runs again" in log


def test_a_subordinate_removed_with_the_other_end_is_deleted_behind_its_last_relation_hook(bench: Bench):
    with bench.engine() as engine:
        with engine.change() as model:
            bench.add(model, {**SERVER, "subordinate": True, "requires": AGENT["requires"] | {"api": {"interface": "x"}},
                              "provides": {"feed": {"interface": "http"}}}, "half")  # fmt: skip
            rules.relate(model, "half:juju-info", "server:juju-info")
            rules.relate(model, "half:feed", "agent:api")
        engine.settle()
        bench.clear()
        with engine.change() as model:
            rules.remove_applications(model, ["agent", "half"])
        engine.settle()
        assert engine.errors() == []
        assert list(engine.model.applications) == ["server"]
    ran = [line for line in bench.hooks() if line.startswith("agent")]
    assert sorted(ran) == ["agent/0 api_relation_broken", "agent/0 api_relation_departed"]
    assert 'ERROR unit "agent/0" not found' in "\n".join(bench.store.log_lines())


def test_a_subordinate_removed_alone_gets_stop_and_remove(bench: Bench):
    with bench.engine() as engine:
        with engine.change() as model:
            rules.remove_applications(model, ["agent"])
        engine.settle()
        assert list(engine.model.applications) == ["server"]
    assert bench.hooks()[-2:] == ["agent/0 stop", "agent/0 remove"]


def test_a_model_that_is_destroyed_ends_the_other_commands(bench: Bench):
    waiting = bench.act("server/0", "wait")
    bench.store.end()
    assert str(waiting.end()) == "model 't' is being destroyed"
    lock = bench.store.lock("session", wait=False)
    assert lock is not None, "nobody works on it any more"
    lock.close()

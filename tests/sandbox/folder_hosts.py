"""The engine on hosts that are folders: an agent runs as a process on this machine instead of in a container."""

import collections.abc
import concurrent.futures
import pathlib
import shutil
import subprocess
import sys
import time
import types
import typing

import pytest
import yaml

from sandbox import engine as engines
from sandbox import model as rules
from sandbox import settings
from sandbox.engine import Engine, Progress
from sandbox.store import Application, Model, Store

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
        framework.observe(self.on.wait_action, self._on_action)
        framework.observe(self.on.hold_action, self._on_action)
        framework.observe(self.on.collect_unit_status, self._on_collect)

        self.waits = ROOM / f"waits-{{self.unit.name.replace('/', '-')}}"  # the name of a status

    def _on_hook(self, event):
        if event.handle.kind == "update_status" and (ROOM / "time-heals").exists():
            self.waits.unlink(missing_ok=True)
        with (ROOM / "hooks").open("a") as file:
            file.write(f"{{self.unit.name}} {{event.handle.kind}}\\n")
        if self.config.get("slow") and event.handle.kind == "config_changed":
            (ROOM / "began").write_text("")
            wait_for("go")
        if (ROOM / f"fail-{{self.unit.name.replace('/', '-')}}-{{event.handle.kind}}").exists():
            raise RuntimeError("as asked")

    def _on_collect(self, event):
        name = self.waits.read_text() if self.waits.exists() else "active"
        event.add_status(ops.StatusBase.from_name(name, ""))

    def _on_action(self, event):
        event.log("waits")
        (ROOM / "began").write_text("")
        wait_for("go")
        event.set_results({{"done": "yes"}})


if __name__ == "__main__":
    ops.main(TheCharm)
"""
SERVER, AGENT = yaml.safe_load_all("""
name: server
type: charm
actions: {wait: {parallel: true}, hold: {}}
config: {options: {slow: {type: boolean, default: false}, n: {type: int}}}
provides: {api: {interface: http}}
---
name: agent
type: charm
subordinate: true
actions: {wait: {parallel: true}, hold: {}}
config: {options: {slow: {type: boolean, default: false}, n: {type: int}}}
requires: {juju-info: {interface: juju-info, scope: container}, api: {interface: http}}
""")


Command = concurrent.futures.Future[typing.Any]


class FolderHost:
    """A host whose agent is a process here."""

    def __init__(self, hosts: "FolderHosts", name: str) -> None:
        self.name = name
        self.record = types.SimpleNamespace(address=f"10.0.0.{len(hosts.made) + 2}")
        self.root = hosts.folder / name
        self.agents: list[subprocess.Popen[bytes]] = []

    def is_running(self) -> bool:
        return True

    def popen(self, argv: list[str], **options: typing.Any) -> subprocess.Popen[bytes]:
        assert argv[1].endswith("agent.py")
        code = f"import pathlib, sandbox.guest.agent as a; juju = pathlib.Path({str(self.root)!r}, 'var/lib/juju');"
        code += "a.AGENTS, a.STORAGE = juju / 'agents', juju / 'storage'; a.main()"
        process = typing.cast(
            "subprocess.Popen[bytes]", subprocess.Popen([sys.executable, "-c", code], **options)
        )
        self.agents.append(process)
        return process

    def reboot(self) -> None:
        for process in self.agents:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
            process.wait(30)
        self.agents.clear()
        shutil.rmtree(self.root / "var/lib/sandbox", ignore_errors=True)  # as systemd-tmpfiles does


class FolderHosts:
    """The hosts of a model, shared by every engine of a test."""

    network = types.SimpleNamespace(cidr="10.0.0.0/24")

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.made: dict[str, FolderHost] = {}

    def up(self, _: object) -> None: ...

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

    def __init__(
        self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, juju: str | None = None
    ) -> None:
        self.room = folder / "room"
        self.room.mkdir()
        self.store = Store("t", folder / "state", juju=juju)
        self.juju = juju
        self.lines: list[str] = []
        self.threads = concurrent.futures.ThreadPoolExecutor()
        hosts = FolderHosts(folder / "hosts")
        self.hosts = hosts
        monkeypatch.setattr(engines, "Hosts", lambda _: hosts)
        monkeypatch.setattr(engines, "GUEST", self.store.directory)
        for name, seconds in (("_RETRY_S", 0.1), ("_RETRY_MAX_S", 0.2), ("_POLL_S", 0.05)):
            monkeypatch.setattr(engines, name, seconds)
        with self.engine(create=True) as engine:
            with engine.change() as model:
                model.uuid = "5a7d8c3e-52ab-4b1c-8f6e-9d0c772586ad"
                self.add(model, SERVER)
                rules.add_unit(model, model.applications["server"])
                self.add(model, AGENT)
                rules.relate(model, "agent:juju-info", "server:juju-info")
            engine.settle()
        self.clear()

    def engine(self, *, create: bool = False) -> Engine:
        store = Store("t", self.store.directory.parent, juju=self.juju)
        return Engine(store, Progress(self.lines.append), create=create)

    def add(self, model: Model, metadata: dict[str, typing.Any]) -> None:
        name: str = metadata["name"]
        source = self.store.directory / "charms" / f"{name}-0"
        (source / "src").mkdir(parents=True)
        (source / "src" / "charm.py").write_text(CHARM.format(room=str(self.room)))
        (source / "charmcraft.yaml").write_text(yaml.safe_dump(metadata))
        rules.add_application(
            model, Application(name=name, charm=name, source=str(source), metadata=metadata)
        )

    def hooks(self) -> list[str]:
        path = self.room / "hooks"
        return path.read_text().splitlines() if path.exists() else []

    def clear(self) -> None:
        (self.room / "hooks").unlink(missing_ok=True)
        (self.room / "began").unlink(missing_ok=True)
        self.lines.clear()

    def begin(self, work: collections.abc.Callable[[Engine], typing.Any]) -> Command:
        """Begin a command in its own thread."""

        def run() -> typing.Any:
            with self.engine() as engine:
                return work(engine)

        return self.threads.submit(run)

    def act(self, unit: str, action: str) -> Command:
        """Begin an action in a separate command, and wait until it runs."""
        command = self.begin(lambda engine: engine.act(unit, action, {}))
        self.wait("began")
        return command

    def wait(self, name: str) -> None:
        deadline = time.monotonic() + 30
        while not (self.room / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.02)

    def config(self, app: str, **values: str) -> None:
        """Set options as a complete command."""
        with self.engine() as engine:
            self.configure(engine, app, **values)

    def configure(self, engine: Engine, app: str, **values: str) -> None:
        with engine.change() as model:
            settings.set_options(model, model.applications[app], values)
        engine.settle()

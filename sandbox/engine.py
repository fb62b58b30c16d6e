"""Running what waits: hosts come up and work off their units' events, one at a time per host as under Juju."""

import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import json
import pathlib
import queue
import shutil
import subprocess
import threading
import time
import typing

import yaml

from sandbox import model as rules
from sandbox.hosts import Gpus, Host, HostError, Hosts
from sandbox.store import Event, Model, SandboxError, Status, Store, Unit

GUEST = pathlib.Path("/var/lib/sandbox")  # where a host finds the agent, the charms and the resources
_AGENT = pathlib.Path(__file__).parent / "guest" / "agent.py"
_ATTEMPTS = 3  # Juju retries a failed hook for ever; the sandbox gives up so that a command ends
_RETRY_S = 5.0
_TICK_S = 9.5  # a line at least this often while something runs
_SLOW_S = 3.0  # a hook that took longer than this is worth a line
_REBOOT_S = 120.0

Json = dict[str, typing.Any]


class Progress:
    """Lines for a person: elapsed time since the command began, who, what."""

    def __init__(self, write: collections.abc.Callable[[str], None]) -> None:
        self._write = write
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self.last = time.monotonic()

    def __call__(self, who: str, what: str) -> None:
        """Print one line."""
        with self._lock:
            self.last = time.monotonic()
            self._write(f"[{self.last - self._begin:6.1f}s] {who:<28} {what}")


@dataclasses.dataclass
class _Running:
    unit: str
    what: str
    since: float


class Engine:
    """Executes one model on its hosts. Use as a context manager: leaving it ends the agents, not the hosts."""

    def __init__(self, store: Store, model: Model, progress: Progress) -> None:
        self.store = store
        self.model = model
        self.progress = progress
        self.hosts = Hosts(store.name, slurm=model.slurm)
        self._agents: dict[str, _Agent] = {}
        self._running: dict[str, _Running] = {}
        self._retry_at: dict[str, float] = {}
        self._results: dict[str, Json] = {}  # action id -> {results, failure, log}
        self._done: queue.SimpleQueue[tuple[str, collections.abc.Callable[[], None]]] = queue.SimpleQueue()

    def __enter__(self) -> "Engine":
        """Bring the network and the hosts that should be there up."""
        for unit in self.model.units.values():
            unit.attempts = 0  # a new command tries again what failed in an earlier one
            if unit.agent.name == "executing":  # that command was interrupted: the event is still queued
                unit.agent = Status(name="idle")
            unit.events = [event for event in unit.events if event.action is None]  # nobody waits for its actions
        return self

    def __exit__(self, *_: object) -> None:
        """End the agents."""
        for agent in self._agents.values():
            agent.close()

    def settle(self, until: collections.abc.Callable[[], bool] = lambda: False) -> None:
        """Work until no event waits or `until` holds. A hook that fails three times leaves its unit in error."""
        self.hosts.up(lambda text: self.progress("sandbox", text))
        self.hosts.recover(lambda text: self.progress("sandbox", text))
        with concurrent.futures.ThreadPoolExecutor(max_workers=16) as pool:
            while not until():
                self._destroy_empty_hosts()
                for host in self._idle_hosts():
                    task = self._next_task(host)
                    if task is not None:
                        pool.submit(self._guarded, host, task)
                if not self._running and not self._retry_pending():
                    break
                self._wait()
            while self._running:  # `until` held: let what runs come to its end
                self._wait()

    def wait_for(self, event: Event, unit: Unit) -> Json:
        """Settle until the action `event` ended; return {"results", "failure"}."""
        assert event.action is not None
        identifier: str = event.action["id"]
        with contextlib.suppress(HostError):  # one that does not run is booted below
            self._agent(unit.host)  # it starts while the network is looked at
        self.settle(
            until=lambda: (
                identifier in self._results or unit.name not in self.model.units or bool(unit.attempts >= _ATTEMPTS)
            )
        )
        if identifier not in self._results:
            self._drop(unit, event)
            raise SandboxError(f"{unit.name}: {unit.agent.message or 'the action did not run'}")
        return self._results[identifier]

    def errors(self) -> list[str]:
        """Return one line for each unit in error."""
        return [
            f"{unit.name}: {unit.agent.message}" for unit in self.model.units.values() if unit.agent.name == "error"
        ]

    def reboot(self, unit: Unit) -> None:
        """Reboot the unit's host; afterwards its units get config-changed and start, as under Juju."""
        host = self._host(unit.host)
        self.progress(unit.host, "rebooting")
        self._close_agent(unit.host)
        host.reboot(_REBOOT_S)
        self._after_reboot(unit.host)

    def _after_reboot(self, host: str) -> None:
        for other in self.model.units.values():
            if other.host == host and other.started and not other.dying:
                rules.enqueue(self.model, other, "config-changed")
                rules.enqueue(self.model, other, "start")
        self.progress(host, "is up again")

    def _drop(self, unit: Unit, event: Event) -> None:
        if event in unit.events:
            unit.events.remove(event)
            unit.attempts = 0
            unit.agent = Status(name="idle", since=time.time())
            self.store.save(self.model)

    def _host(self, name: str) -> Host:
        return self.hosts.get(name)

    def _idle_hosts(self) -> list[str]:
        hosts = dict.fromkeys(unit.host for unit in self.model.units.values())
        return [host for host in hosts if host not in self._running]

    def _destroy_empty_hosts(self) -> None:
        wanted = {unit.host for unit in self.model.units.values()}
        for name in self.hosts.names():
            if name not in wanted and name not in self._running:
                self._close_agent(name)
                self.hosts.destroy_host(name)
                self.progress(name, "host removed")

    def _retry_pending(self) -> bool:
        return any(name in self.model.units for name in self._retry_at)

    def _next_task(self, host: str) -> collections.abc.Callable[[], None] | None:
        units = [unit for unit in self.model.units.values() if unit.host == host]
        principal = next(unit for unit in units if unit.principal is None)
        if host not in self.hosts.names() or not principal.address or not self.hosts.get(host).is_running():
            self._begin(host, principal, "host starts")
            return lambda: self._create_host(host, principal.app)
        ready: list[Unit] = []
        for unit in units:
            if not unit.events or unit.attempts >= _ATTEMPTS:
                continue
            if time.monotonic() < self._retry_at.get(unit.name, 0):
                continue
            self._retry_at.pop(unit.name, None)
            ready.append(unit)
        if not ready:
            return None
        unit = min(ready, key=lambda unit: unit.events[0].sequence)
        event = unit.events[0]
        self._begin(host, unit, event.label)
        unit.agent = Status(name="executing", message=f"running {event.label}", since=time.time())
        source = self.model.applications[unit.app].source
        request = rules.describe(
            self.model,
            unit,
            event,
            source=str(GUEST / "charms" / pathlib.Path(source).name),
            machine=str(list(dict.fromkeys(other.host for other in self.model.units.values())).index(host)),
            cidr=self.hosts.cidr,
            resources={
                name: str(GUEST / "resources" / unit.app / pathlib.Path(path).name)
                for name, path in self.model.applications[unit.app].resources.items()
            },
        )
        self.store.save(self.model)
        return lambda: self._run_event(host, unit.name, event, request)

    def _begin(self, host: str, unit: Unit, what: str) -> None:
        self._running[host] = _Running(unit.name, what, time.monotonic())

    def _guarded(self, host: str, task: collections.abc.Callable[[], None]) -> None:
        try:
            task()
        except BaseException as e:  # raised again in the thread that waits
            self._done.put((host, lambda e=e: _raise(e)))

    def _wait(self) -> None:
        """Apply the next finished task, printing that something still runs; return early when a retry is due."""
        while True:
            with contextlib.suppress(queue.Empty):
                host, apply = self._done.get(timeout=0.5)
                self._running.pop(host, None)
                apply()
                self.store.save(self.model)
                return
            if time.monotonic() - self.progress.last >= _TICK_S:
                for running in list(self._running.values()):
                    self.progress(running.unit, f"{running.what} ... {time.monotonic() - running.since:.0f} s")
            if any(time.monotonic() >= at for at in self._retry_at.values()):
                return

    def _create_host(self, name: str, app: str) -> None:
        binds = {
            str(GUEST / "agent.py"): str(_AGENT),
            str(GUEST / "charms"): str(self._directory("charms")),
            str(GUEST / "resources"): str(self._directory("resources")),
        }
        gpus = parse_gpus(self.model.applications[app].annotations.get("sandbox-mock-gpus", ""))
        host = self.hosts.create(name, gpus=gpus, binds=binds, progress=lambda text: self.progress(name, text))
        if not host.is_running():
            host.start()

        def apply() -> None:
            for unit in self.model.units.values():
                if unit.host == name:
                    unit.address = host.address
                    if unit.status.message == "waiting for machine":
                        unit.status = Status(name="waiting", message="installing agent", since=time.time())
            self.progress(name, f"host is up at {host.address}")

        self._done.put((name, apply))

    def _directory(self, name: str) -> pathlib.Path:
        directory = self.store.directory / name
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _run_event(self, host: str, unit: str, event: Event, request: Json) -> None:
        begin = time.monotonic()
        answer = self._agent(host).ask(request, lambda message: self._show(unit, message))
        took = time.monotonic() - begin
        self._done.put((host, lambda: self._finish(unit, event, answer, took)))

    def _show(self, unit: str, message: Json) -> None:
        if message["kind"] == "status":
            self._note_status(unit, message["status"], message["message"])
        elif message["kind"] == "action-log":
            self.store.log(unit, "ACTION", message["message"])
            self.progress(unit, message["message"])
        else:
            self.store.log(unit, message["level"], message["message"])

    def _note_status(self, unit: str, status: str, text: str) -> None:
        old = self.model.units[unit].status
        if (old.name, old.message) != (status, text):
            self.model.units[unit].status = Status(name=status, message=text, since=time.time())
            self.progress(unit, f"{status}: {text}" if text else status)

    def _finish(self, name: str, event: Event, answer: Json, took: float) -> None:
        unit = self.model.units[name]
        if not answer["ok"] and event.action is None:
            self._fail(unit, event, answer)
            return
        if not answer["ok"] and event.action is not None:  # Juju: an action that crashes has failed, its unit has not
            self.store.log(name, "ERROR", answer["trace"])
            self._results[event.action["id"]] = {"results": {}, "failure": f"the action crashed: {answer['error']}"}
            self._drop(unit, event)
            return
        unit.agent = Status(name="idle", since=time.time())
        if answer["reboot"] == "now":
            self._reboot_for(unit)
            return
        if event.action:
            self._results[event.action["id"]] = answer["action"]
        self.store.log(name, "DEBUG", f"ran {event.label} in {took:.1f} s")
        if took >= _SLOW_S and not event.action:
            self.progress(name, f"{event.label} took {took:.1f} s")
        rules.apply(self.model, unit, event, answer["state"])
        if answer["reboot"]:
            self._reboot_for(unit)

    def _reboot_for(self, unit: Unit) -> None:
        """Reboot because the charm asked for it; an interrupted hook is still queued and runs again."""
        self.store.log(unit.name, "INFO", "the charm asked for a reboot")
        if unit.name in self.model.units:
            self.reboot(unit)

    def _fail(self, unit: Unit, event: Event, answer: Json) -> None:
        unit.attempts += 1
        unit.agent = Status(name="error", message=f'hook failed: "{event.label}": {answer["error"]}', since=time.time())
        self.store.log(unit.name, "ERROR", answer["trace"])
        again = unit.attempts < _ATTEMPTS
        self.progress(unit.name, f"error: {event.label}: {answer['error']}{'; trying again' if again else ''}")
        if again:
            self._retry_at[unit.name] = time.monotonic() + _RETRY_S

    def _agent(self, host: str) -> "_Agent":
        agent = self._agents.get(host)
        if agent is None or not agent.alive():
            agent = _Agent(self._host(host))
            self._agents[host] = agent
        return agent

    def _close_agent(self, host: str) -> None:
        agent = self._agents.pop(host, None)
        if agent:
            agent.close()


class _Agent:
    """The agent process inside one host."""

    def __init__(self, host: Host) -> None:
        argv = ["/opt/sandbox/venv/bin/python", str(GUEST / "agent.py")]
        self._process = host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._said: list[str] = []
        threading.Thread(target=self._read_stderr, daemon=True).start()

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said = [*self._said[-20:], line.decode(errors="replace").rstrip()]

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Json, show: collections.abc.Callable[[Json], None]) -> Json:
        """Run one event; `show` gets what the hook says meanwhile."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            for line in stdout:
                message = json.loads(line)
                if message["kind"] == "result":
                    return message
                show(message)
        except BrokenPipeError:
            pass
        said = self._said[-1] if self._said else "no word"
        return {
            "ok": False,
            "error": f"the host went away in the middle of the hook ({said})",
            "trace": "\n".join(self._said),
        }

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _raise(error: BaseException) -> typing.NoReturn:
    if isinstance(error, HostError):
        raise SandboxError(str(error)) from error
    raise error


def parse_gpus(text: str) -> Gpus | None:
    """Return the mock GPUs that a text like `2 x Mock GPU` asks for."""
    if text in ("", "0"):
        return None
    count, _, name = text.partition(" x ")
    if not count.isdigit() or not name:
        raise SandboxError(f"mock GPUs {text!r}: write '2 x Mock GPU', or 0 for none")
    return Gpus(count=int(count), model=name)


def stage_charm(
    store: Store, app: str, revision: int, fill: collections.abc.Callable[[pathlib.Path], object]
) -> pathlib.Path:
    """Make the sandbox's own copy of a charm's files as `fill(directory)` writes them; return its folder."""
    directory = store.directory / "charms" / f"{app}-{revision}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    fill(directory)
    return directory


def read_metadata(directory: pathlib.Path) -> Json:
    """Return a charm's charmcraft.yaml."""
    return yaml.safe_load((directory / "charmcraft.yaml").read_text())

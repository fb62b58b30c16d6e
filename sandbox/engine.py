"""Run waiting events: hosts come up, and units run their hooks and actions, under Juju's locks.

A hook, and an action that is not parallel, holds its machine's lock; a unit runs one thing at a
time, parallel or not (Juju: internal/worker/uniter/operation/executor.go). Several commands may
work on one model at once: the locks are files, the model is held only while it is read or changed,
and the command that gets a lock runs the events that wait for it.
"""

import collections.abc
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import pathlib
import queue
import shutil
import threading
import time
import typing

import click

from sandbox import gpus, hook, introspection, settings, storage
from sandbox import model as rules
from sandbox.agent import Agent
from sandbox.guest import juju_exec
from sandbox.hosts import Hosts
from sandbox.store import Event, Lock, Model, SandboxError, Status, Store, Unit

# The folder in a host with the agent, the charms and the resources
GUEST = pathlib.Path("/var/lib/sandbox")
_AGENT = pathlib.Path(__file__).parent / "guest" / "agent.py"
_ATTEMPTS = 4  # Juju retries a failed hook without end; a command stops after this many tries
_RETRY_S, _RETRY_MAX_S = 2.0, 16.0  # Juju: 5 s, doubled up to 5 min
_POLL_S = 0.5  # how often a command looks for changes by others
_TICK_S = 9.5  # a line at least this often while something runs
_SLOW_S = 3.0  # a hook that took longer than this is worth a line

Json = dict[str, typing.Any]


class Progress:
    """Progress lines: seconds since the command began, unit or machine, text."""

    def __init__(self, write: collections.abc.Callable[[str], None] | None = None) -> None:
        """Write lines to standard error, or give them to `write`."""
        self._write = write or functools.partial(click.echo, err=True)
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self.last = time.monotonic()

    def __call__(self, who: str, what: str) -> None:
        """Print one line."""
        with self._lock:
            self.last = time.monotonic()
            self._write(f"[{self.last - self._begin:6.1f}s] {who:<28} {what}")


@dataclasses.dataclass
class _Task:
    """A hook, an action or a step of a machine, with the locks that it holds."""

    key: str  # the unit, or "machine 3"
    what: str
    locks: list[Lock]
    run: collections.abc.Callable[[], None]
    since: float = dataclasses.field(default_factory=time.monotonic)


class Engine:
    """Run one model on its hosts. A context manager: leaving it ends the agents, not the hosts."""

    def __init__(self, store: Store, progress: Progress, *, create: bool = False) -> None:
        """Work on the model in `store`; with `create`, the first change makes a missing model."""
        self.store = store
        self.progress = progress
        self.hosts = Hosts(store.name)
        self._create = create
        self._agents: dict[str, Agent] = {}  # "machine 3" or, for a parallel action, the unit
        self._running: dict[str, _Task] = {}
        self._failures: dict[str, int] = {}  # unit -> attempts that failed during this command
        self._actions: set[str] = set()  # the ids of those that this command waits for
        self._results: dict[str, Json] = {}  # action id -> {results, failure}
        self._noted: dict[
            tuple[str, int], float
        ] = {}  # unit, event -> since when it waits for an action
        self._sockets = introspection.Sockets()
        self._done: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()

    def __enter__(self) -> "Engine":
        """Load the model; `destroy` waits for its end from now on."""
        if self._create:
            self.store.directory.mkdir(parents=True, exist_ok=True)
        self._session = self.store.lock("session", shared=True)
        if not self._create:
            self.model = self.store.load()
        return self

    def __exit__(self, *_: object) -> None:
        """End the agents, and leave nothing behind if no model was made."""
        self._sockets.close()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(Agent.close, self._agents.values()))
        if not self.store.path.exists():
            self.store.forget()
        self._session.close()

    @contextlib.contextmanager
    def change(self) -> collections.abc.Generator[Model]:
        """Hold the model, yield its state and save the changes; `model` stays the same object."""
        with self.store.change(create=self._create) as model:
            self.model = model
            yield model

    def settle(
        self, until: collections.abc.Callable[[], bool] = lambda: False, *, listen_s: float = 0.0
    ) -> None:
        """Work until no hook may run, or `until` holds; leave hooks that wait for another command.

        Listen for at least `listen_s` seconds to units' requests by juju-exec, unless `until` holds
        earlier.
        """
        deadline = time.monotonic() + listen_s
        self.hosts.up(lambda text: self.progress("sandbox", text))
        with concurrent.futures.ThreadPoolExecutor(max_workers=32) as pool:
            try:
                while not until():
                    with self.change() as model:
                        self._drop_orphans(model)
                        self.take_requests(model)
                        self._cancel(model)
                        tasks = self._ready_tasks(model)
                        waits = self._waits(model)
                        self._introspect(model)
                    for task in tasks:
                        pool.submit(self._execute, task)
                    if not self._running and not waits and time.monotonic() >= deadline:
                        break
                    self._wait()
                while self._running:  # `until` held: let what runs come to its end
                    self._wait()
            except BaseException:
                for agent in self._agents.values():
                    agent.kill()
                raise

    def act(self, name: str, action: str, values: collections.abc.Mapping[str, str]) -> Json:
        """Run a unit's action and everything that follows; return {"id", "results", "failure"}."""
        with self.change() as model:
            unit = model.unit(name)
            if unit.dying:
                raise SandboxError(f"unit {name!r} is being removed")
            event = settings.request_action(model, unit, action, values)
            assert event.action is not None
            identifier: str = event.action["id"]
            self._actions.add(identifier)
            lock = self.store.lock(f"action-{identifier}")  # others see by it that a command waits
        self.progress(unit.name, f"task {identifier}: {action}")
        try:
            self.settle(until=lambda: identifier in self._results or name not in self.model.units)
        finally:
            self._actions.remove(identifier)
            lock.close()
            lock.path.unlink(missing_ok=True)
        if identifier not in self._results:
            raise SandboxError(f"{name} was removed before the action ran")
        self.settle()
        return {"id": identifier, **self._results[identifier]}

    def errors(self) -> list[str]:
        """Return one line for each unit in error."""
        return [
            f"{unit.name}: {unit.agent.message} (each command tries it again)"
            for unit in self.model.units.values()
            if unit.agent.name == "error"
        ]

    def is_held(self, unit: Unit) -> bool:
        """Check whether the unit's next hook waits for an action of another command."""
        _, action = _obstacle(self.model, unit)
        return action is not None and action["id"] not in self._actions

    def reboot(self, unit: str) -> None:
        """Reboot the unit's machine now; a hook on it is killed and runs again, as under Juju."""
        machine = self.model.unit(unit).machine
        lock = self.store.try_lock(f"machine-{machine}")
        with contextlib.closing(lock) if lock else contextlib.nullcontext():
            host = self.hosts.get(self.model.host(machine))
            self.progress(_who(machine), f"{host.name} reboots")
            host.reboot()
            with self.change() as model:
                rules.rebooted(model, machine)
            self.progress(_who(machine), "is up again")

    # --- what may run
    # ------------------------------------------------------------------------------

    def _drop_orphans(self, model: Model) -> None:
        """Drop the actions of commands that ended before them."""
        for unit in model.units.values():
            for event in list(unit.events):
                if event.action is None or event.action["id"] in self._actions:
                    continue
                if lock := self.store.try_lock(f"action-{event.action['id']}"):
                    lock.close()
                    lock.path.unlink(missing_ok=True)
                    self.store.log(
                        unit.name,
                        "WARNING",
                        f"{event.label} was interrupted: no command waits for it",
                    )
                    _take_off(unit, event)

    def _cancel(self, model: Model) -> None:
        """End those actions of this command that someone cancelled."""
        for unit in model.units.values():
            for event in list(unit.events):
                action = event.action
                if (
                    action is None
                    or not action.get("cancelled")
                    or action["id"] not in self._actions
                ):
                    continue
                if unit.name not in self._running:
                    _take_off(unit, event)
                    self._results[action["id"]] = {
                        "results": {},
                        "failure": f"task {action['id']} was cancelled",
                    }
                elif agent := self._agents.get(unit.name if event.parallel else _who(unit.machine)):
                    agent.kill()

    def take_requests(self, model: Model) -> None:
        """Queue what units ask for with juju-exec."""
        there = self.hosts.names()
        for machine in {unit.machine for unit in model.units.values()}:
            if (host := model.host(machine)) not in there:
                continue
            for name in juju_exec.take_requests(self.hosts.get(host).root):
                if name in model.units and not model.units[name].dying:
                    rules.enqueue(model, model.units[name], "update-status", asked=True)
                    self.store.log(name, "INFO", "juju-exec asks for update-status")

    def _ready_tasks(self, model: Model) -> list[_Task]:
        """Take the locks of everything that may run now, and mark it as running."""
        there = self.hosts.names()
        wanted = {unit.machine for unit in model.units.values()}
        tasks: list[_Task] = []
        for machine in sorted(wanted):
            tasks += self._tasks_of(model, machine, there)
        for machine in range(model.next_machine):
            host = model.host(machine)
            if machine in wanted or host not in there:
                continue
            locks = self._take(f"machine-{machine}")
            if locks:
                remove = functools.partial(self._remove_host, machine, host)
                tasks.append(_Task(_who(machine), "ends", locks, remove))
        self._running |= {task.key: task for task in tasks}
        return tasks

    def _tasks_of(
        self, model: Model, machine: int, there: collections.abc.Collection[str]
    ) -> collections.abc.Iterator[_Task]:
        """Yield what may run on a machine now: its start, or events of its units."""
        units = model.machine_units(machine)
        host = model.host(machine)
        candidates = sorted(self._candidates(units), key=lambda pair: pair[1].sequence)
        is_made = units[0].address and host in there
        if not is_made or (candidates and not self.hosts.get(host).is_running()):
            locks = self._take(f"machine-{machine}")
            if locks:
                principal = units[0]
                create = functools.partial(
                    self._create_host, machine, host, principal.name, principal.app
                )
                yield _Task(_who(machine), "starts", locks, create)
            return
        for unit, event in candidates:
            names = [f"unit-{unit.name.replace('/', '-')}"]
            if not event.parallel:
                names.insert(0, f"machine-{machine}")
            locks = self._take(*names)
            if locks:
                yield self._task(model, unit, event, locks)

    def _candidates(self, units: list[Unit]) -> collections.abc.Iterator[tuple[Unit, Event]]:
        for unit in units:
            event = rules.next_event(unit)
            if event is None or unit.name in self._running:
                continue
            if event.action is not None and event.action["id"] not in self._actions:
                continue  # of another command
            if not event.attempts or self._failures.get(unit.name, 0) < _ATTEMPTS:
                yield unit, event

    def _take(self, *names: str) -> list[Lock]:
        """Return these locks, or none if one is held."""
        held: list[Lock] = []
        for name in names:
            lock = self.store.try_lock(name)
            if lock is None:
                for other in held:
                    other.close()
                return []
            held.append(lock)
        return held

    def _task(self, model: Model, unit: Unit, event: Event, locks: list[Lock]) -> _Task:
        if unit.executing is not None:
            self.store.log(unit.name, "WARNING", f"{event.label} was interrupted: it runs again")
        unit.events = [event, *(other for other in unit.events if other is not event)]
        unit.agent = Status(name="executing", message=f"running {event.label}")
        app = model.applications[unit.app]
        source = str(GUEST / "charms" / pathlib.Path(app.source).name)
        resources = {
            name: str(GUEST / "resources" / app.name / pathlib.Path(path).name)
            for name, path in app.resources.items()
        }
        cidr = self.hosts.network.cidr
        described = hook.describe(model, unit, event, source=source, cidr=cidr, resources=resources)
        request = copy.deepcopy(described)  # the model changes while the hook runs
        run = functools.partial(
            self._run_event, unit.machine, model.host(unit.machine), unit.name, event, request
        )
        return _Task(unit.name, event.label, locks, run)

    def _waits(self, model: Model) -> bool:
        """Check whether this command waits for something that it does not run; print it."""
        waits = any(identifier not in self._results for identifier in self._actions)
        for unit in model.units.values():
            if unit.name in self._running or (unit.executing and unit.executing.action):
                behind = unit.events[1:]
            else:
                event = rules.next_event(unit)
                behind = [event] if event else []
                given_up = unit.failed is not None and self._failures.get(unit.name, 0) >= _ATTEMPTS
                waits = waits or (
                    (event or unit.failed) is not None and not given_up and not self.is_held(unit)
                )
            for event in behind:
                self._note(model, unit, event)
        return waits

    def _note(self, model: Model, unit: Unit, event: Event) -> None:
        """Print once that a hook or an action waits for an action."""
        obstacle, action = _obstacle(model, unit)
        if obstacle and action and (unit.name, event.sequence) not in self._noted:
            self._noted[unit.name, event.sequence] = time.monotonic()
            lock = "the unit" if obstacle is unit else f"the machine lock of machine {unit.machine}"
            self.progress(
                unit.name,
                f"{event.label} waits for {lock}: {obstacle.name} runs action {action['name']}",
            )

    def _introspect(self, model: Model) -> None:
        """Let the agents of this command's units, and of waiting ones, report the lock."""
        texts: dict[pathlib.Path, str] = {}
        now = time.monotonic()
        for unit in introspection.served(
            model, [name for name in self._running if name in model.units]
        ):
            task = self._running.get(unit.name)
            event = None if task else rules.next_event(unit)
            noted = self._noted.get((unit.name, event.sequence)) if event else None
            waiting = (event, now - noted) if event and noted is not None else None
            agents = self.hosts.get(model.host(unit.machine)).root / juju_exec.AGENTS.relative_to(
                "/"
            )
            folder = introspection.agent_folder(agents, unit.name)
            texts[folder] = introspection.report(unit, now - task.since if task else 0.0, waiting)
        self._sockets.serve(texts)

    def _wait(self) -> None:
        """Wait a moment for a task to end, and print what has been running for long."""
        with contextlib.suppress(queue.Empty):
            key, error = self._done.get(timeout=_POLL_S)
            del self._running[key]
            if error is not None:
                raise error
            return
        if time.monotonic() - self.progress.last >= _TICK_S:
            for task in list(self._running.values()):
                self.progress(task.key, f"{task.what} ... {time.monotonic() - task.since:.0f} s")

    # --- tasks, each in its own thread
    # --------------------------------------------------------------

    def _execute(self, task: _Task) -> None:
        error: BaseException | None = None
        try:
            task.run()
        except BaseException as e:  # raised again in the thread that waits
            error = e
        for lock in task.locks:
            lock.close()
        self._done.put((task.key, error))

    def _create_host(self, machine: int, name: str, principal: str, app: str) -> None:
        binds = {str(GUEST / "agent.py"): str(_AGENT), juju_exec.PATH: juju_exec.__file__}
        for folder in ("charms", "resources"):
            source = self.store.directory / folder
            source.mkdir(exist_ok=True)
            binds[str(GUEST / folder)] = str(source)
        cards = gpus.parse(self.model.applications[app].annotations.get("sandbox-mock-gpus", ""))
        host = self.hosts.create(
            name, gpus=cards, binds=binds, progress=lambda text: self.progress(_who(machine), text)
        )
        with self.change() as model:
            storage.bring(self.store, model, machine, host.root)
            for unit in model.machine_units(machine):
                unit.address = host.record.address
                if unit.status.message == "waiting for machine":
                    unit.status = Status(name="waiting", message="installing agent")
        self.progress(_who(machine), f"{name} is up at {host.record.address} for {principal}")

    def _remove_host(self, machine: int, name: str) -> None:
        self._close_agent(_who(machine))
        with self.change() as model:
            storage.keep(self.store, model, machine, self.hosts.get(name).root)
        self.hosts.destroy_host(name)
        self.progress(_who(machine), f"{name} removed")

    def _run_event(self, machine: int, host: str, name: str, event: Event, request: Json) -> None:
        begin = time.monotonic()
        agent = self._agent(name if event.parallel else _who(machine), host)
        answer = agent.ask(request, lambda message: self._relay(name, message))
        with self.change() as model:
            self._finish(
                model, model.units[name], event, request, answer, took_s=time.monotonic() - begin
            )
        if name not in model.units:
            agents = self.hosts.get(host).root / juju_exec.AGENTS.relative_to("/")
            shutil.rmtree(agents / f"unit-{name.replace('/', '-')}", ignore_errors=True)

    def _relay(self, unit: str, message: Json) -> None:
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
            with self.change() as model:
                model.units[unit].status = Status(name=status, message=text)
            self.progress(unit, f"{status}: {text}" if text else status)

    def _finish(
        self, model: Model, unit: Unit, event: Event, request: Json, answer: Json, *, took_s: float
    ) -> None:
        given = request["state"]
        if event.action is not None:
            if answer["ok"]:
                self._results[event.action["id"]] = answer["action"]
                hook.apply(model, unit, event, given, answer["state"])
            else:  # Juju: an action that crashes has failed, its unit has not
                self.store.log(unit.name, "ERROR", answer["trace"])
                current = next(
                    (other.action for other in unit.events if other.sequence == event.sequence),
                    None,
                )
                failure = f"the action crashed: {answer['error']}"
                if current and current.get("cancelled"):
                    failure = f"task {current['id']} was cancelled"
                self._results[event.action["id"]] = {"results": {}, "failure": failure}
            _take_off(unit, event)
            return
        if not answer["ok"]:
            self._fail(unit, event, answer)
            return
        unit.agent = Status(name="idle")
        self.store.log(unit.name, "DEBUG", f"ran {event.label} in {took_s:.1f} s")
        if took_s >= _SLOW_S:
            self.progress(unit.name, f"{event.label} took {took_s:.1f} s")
        hook.apply(model, unit, event, given, answer["state"])

    def _fail(self, unit: Unit, event: Event, answer: Json) -> None:
        self._failures[unit.name] = self._failures.get(unit.name, 0) + 1
        pause = min(_RETRY_S * 2**event.attempts, _RETRY_MAX_S)
        problem = f'hook failed: "{event.label}": {answer["error"]}'
        rules.failed(unit, event, problem, time.time() + pause)
        self.store.log(unit.name, "ERROR", answer["trace"])
        again = self._failures[unit.name] < _ATTEMPTS
        later = f"; again in {pause:.0f} s" if again else ""
        self.progress(unit.name, f"error: {event.label}: {answer['error']}{later}")

    def _agent(self, key: str, host: str) -> Agent:
        agent = self._agents.get(key)
        if agent is None or agent.process.poll() is not None:
            self._close_agent(key)
            agent = Agent(self.hosts.get(host), str(GUEST / "agent.py"))
            self._agents[key] = agent
        return agent

    def _close_agent(self, key: str) -> None:
        agent = self._agents.pop(key, None)
        if agent:
            agent.close()


def _obstacle(model: Model, unit: Unit) -> tuple[Unit | None, Json | None]:
    """Return the unit that blocks `unit`, itself or the machine lock's holder, and its action."""
    holders = [unit] if unit.executing else model.machine_units(unit.machine)
    for other in holders:
        if other.executing and (other is unit or not other.executing.parallel):
            return other, other.executing.action
    return None, None


def _take_off(unit: Unit, event: Event) -> None:
    """Take an action off the queue; if it ran, a unit that was in error before it is so again."""
    has_run = unit.executing is not None and unit.executing.sequence == event.sequence
    unit.events = [other for other in unit.events if other.sequence != event.sequence]
    if not has_run:
        return
    if unit.failed is not None:
        unit.agent = Status(name="error", message=unit.failed.problem)
    else:
        unit.agent = Status(name="idle")


def _who(machine: int) -> str:
    """Return the name of a machine in progress lines."""
    return f"machine {machine}"

"""A model as data: a JSON file, replaced after every event, so an interrupted command resumes."""

import collections.abc
import contextlib
import fcntl
import os
import pathlib
import shutil
import time
import typing
import uuid

import pydantic

from sandbox import juju as versions
from slurm_ddp import files

ROOT = pathlib.Path("/var/lib/slurm-ddp")


class SandboxError(Exception):
    """A command cannot be done. `str()` is one line, with what to do instead."""


def section(metadata: dict[str, typing.Any], name: str) -> dict[str, dict[str, typing.Any]]:
    """Return a mapping of a charm's metadata; an empty one when it is missing or null."""
    return metadata.get(name) or {}


class _Record(pydantic.BaseModel, extra="forbid"):
    pass


class Status(_Record):
    """A workload, application or agent status as `juju status` shows it."""

    name: str = "unknown"
    message: str = ""


class Event(_Record):
    """One event for one unit. The set fields depend on `kind`, Juju's own name of the hook."""

    kind: str
    sequence: int
    relation: int | None = None
    endpoint: str | None = None  # the unit's own end of the relation
    remote: str | None = None  # the remote unit of a relation event
    departing: str | None = None
    secret: str | None = None
    storage: tuple[str, int] | None = None
    action: dict[str, typing.Any] | None = None  # {name, id, params, parallel, cancelled}
    asked: bool = False  # by juju-exec
    attempts: int = 0  # that failed; the unit is in error until this one is done
    retry_at: float = 0.0  # when it runs again by itself
    problem: str = ""  # why it failed

    def same_as(self, other: "Event") -> bool:
        """Check whether `other` asks for the same thing, so that one of the two is enough."""
        kept = other.model_dump(include={"sequence", "attempts", "retry_at", "problem"})
        return self.model_copy(update=kept) == other

    @property
    def parallel(self) -> bool:
        """Whether it is an action that runs without the machine lock."""
        return self.action is not None and bool(self.action.get("parallel"))

    @property
    def label(self) -> str:
        """The event's name in progress lines."""
        if self.action:
            return f"action {self.action['name']}"
        if self.asked:
            return f"{self.kind} (juju-exec)"
        hook = f"{self.endpoint}-{self.kind}" if self.endpoint else self.kind
        return f"{hook} {self.remote}" if self.remote else hook


class Application(_Record):
    """A deployed charm and its configuration."""

    name: str
    charm: str  # the charm's name
    source: (
        str  # where its files lie on this machine: the sandbox's own copy, one folder per revision
    )
    revision: int = 0
    metadata: dict[str, typing.Any]  # charmcraft.yaml
    options: dict[str, typing.Any] = {}  # only what differs from the defaults
    resources: dict[str, str] = {}
    annotations: dict[str, str] = {}
    constraints: str = ""
    dying: bool = False
    status: Status = Status()

    def section(self, name: str) -> dict[str, dict[str, typing.Any]]:
        """Return a mapping of the metadata, such as `peers`; empty when the charm has none."""
        return section(self.metadata, name)

    def declared_options(self) -> dict[str, dict[str, typing.Any]]:
        """Return the options that the charm declares."""
        return section(self.section("config"), "options")

    @property
    def subordinate(self) -> bool:
        """Whether its units live on other applications' hosts."""
        return bool(self.metadata.get("subordinate"))


class Unit(_Record):
    """A unit: the machine it is on, its last status, and the events that wait for it."""

    name: str
    app: str
    machine: int  # Juju's machine number; a subordinate is on its principal's
    address: str = ""  # known once the host is up
    principal: str | None = None
    status: Status = Status()
    agent: Status = Status(name="allocating")
    version: str = ""
    ports: list[tuple[str, int | None]] = []
    deferred: list[dict[str, typing.Any]] = []
    stored: list[dict[str, typing.Any]] = []
    storages: list[tuple[str, int]] = []
    members: dict[
        int, list[str]
    ] = {}  # relation id -> remote units whose relation-joined was delivered
    events: list[Event] = []  # the one that runs now is the first
    started: bool = False
    dying: bool = False

    @property
    def number(self) -> int:
        """The part after the slash."""
        return int(self.name.split("/")[1])

    @property
    def installed(self) -> bool:
        """Whether its install ran: from then on it is in the scope of its relations."""
        return not any(event.kind == "install" for event in self.events)

    @property
    def executing(self) -> Event | None:
        """The event that runs now."""
        return self.events[0] if self.agent.name == "executing" and self.events else None

    def has_started(self, event: Event) -> bool:
        """Check whether one of its events runs now or failed, so that it cannot be dropped."""
        return bool(event.attempts) or event is self.executing

    @property
    def failed(self) -> Event | None:
        """The event whose hook failed; the unit is in error until it runs or is skipped."""
        return next((event for event in self.events if event.attempts), None)


class Storage(_Record):
    """A storage: Juju's id of it is like volume/0."""

    name: str
    index: int
    unit: str | None = None  # that has it
    machine: int | None = None  # its host has the files; None for kept ones
    destroy: bool = False  # together with its unit

    @property
    def id(self) -> str:
        """Its name for Juju and the operator."""
        return f"{self.name}/{self.index}"


class Relation(_Record):
    """A relation with its databags. A peer relation has one end, every other two."""

    id: int
    ends: list[tuple[str, str]]  # (application, endpoint)
    container: bool = False
    app_data: dict[str, dict[str, str]] = {}
    unit_data: dict[str, dict[str, str]] = {}  # holds exactly the units in scope
    left: dict[
        str, dict[str, str]
    ] = {}  # what units wrote that have left: readable until the relation ends
    dying: bool = False

    @property
    def peer(self) -> bool:
        """Whether it relates an application's units with each other."""
        return len(self.ends) == 1

    def endpoint_of(self, app: str) -> str:
        """Return `app`'s endpoint."""
        return next(endpoint for name, endpoint in self.ends if name == app)

    def remote_of(self, app: str) -> str:
        """Return the application at the other end of `app`; its own name in a peer relation."""
        return next((name for name, _ in self.ends if name != app), app)


class Secret(_Record):
    """A secret with its revisions, its readers, and the revision that each unit tracks."""

    id: str
    owner: str  # "application:NAME", "unit:NAME/0" or "user"
    label: str | None = None
    name: str | None = None  # of a user's secret
    latest: int = 1
    contents: dict[int, dict[str, str]]
    grants: dict[int, list[str]] = {}  # relation id -> applications and units
    granted_apps: list[str] = []  # a user's secret is granted to applications as such
    tracked: dict[str, int] = {}  # unit -> revision
    labels: dict[str, str] = {}  # unit -> the label it gave as an observer


class Model(_Record):
    """The whole state of one deployment."""

    name: str
    juju: str = versions.DEFAULT  # the Juju that it is played on
    uuid: str = pydantic.Field(default_factory=lambda: str(uuid.uuid4()))
    applications: dict[str, Application] = {}
    units: dict[str, Unit] = {}
    relations: dict[int, Relation] = {}
    secrets: dict[str, Secret] = {}
    next_machine: int = 0
    next_relation: int = 0
    next_sequence: int = 0
    next_storage: int = 0
    next_units: dict[
        str, int
    ] = {}  # application -> number; Juju goes on counting when one is deployed again
    storage: dict[str, Storage] = {}  # also storage without a unit
    next_task: int = 1

    @property
    def version(self) -> versions.Juju:
        """The rules of its Juju."""
        return versions.VERSIONS[self.juju]

    def app_units(self, app: str) -> list[Unit]:
        """Return the units of `app` by number."""
        return sorted(
            (unit for unit in self.units.values() if unit.app == app), key=lambda unit: unit.number
        )

    def leader(self, app: str) -> str | None:
        """Return the leader of `app`: its lowest unit that is staying."""
        return next((unit.name for unit in self.app_units(app) if not unit.dying), None)

    def app_relations(self, app: str) -> list[Relation]:
        """Return the relations of `app`, oldest first."""
        return [
            relation
            for relation in self.relations.values()
            if any(name == app for name, _ in relation.ends)
        ]

    def neighbours(self, relation: Relation, unit: Unit) -> list[Unit]:
        """Return the units that `unit` meets in `relation`; in container scope, on its machine."""
        remote = relation.remote_of(unit.app)
        found = [
            self.units[name]
            for name in relation.unit_data
            if name != unit.name and name in self.units
        ]
        return [
            other
            for other in sorted(found, key=lambda other: other.number)
            if other.app == remote and (not relation.container or other.machine == unit.machine)
        ]

    def host(self, machine: int) -> str:
        """Return a machine's host name, as Juju makes it from the model's UUID and a number."""
        return f"juju-{self.uuid[-6:]}-{machine}"

    def host_of(self, unit: str) -> str:
        """Return the name of a unit's host. Raises `SandboxError` if there is no such unit."""
        return self.host(self.unit(unit).machine)

    def machine_units(self, machine: int) -> list[Unit]:
        """Return the units on a machine, the principal first."""
        found = [unit for unit in self.units.values() if unit.machine == machine]
        return sorted(found, key=lambda unit: unit.principal is not None)

    def application(self, name: str) -> Application:
        """Return the application, or raise `SandboxError` naming those that exist."""
        if name not in self.applications:
            raise SandboxError(
                f"application {name!r} not found (there are: {', '.join(self.applications) or 'none'})"
            )
        return self.applications[name]

    def unit(self, name: str) -> Unit:
        """Return the unit NAME/0, or the leader for NAME/leader. Raises `SandboxError`."""
        app, _, number = name.partition("/")
        if number == "leader":
            name = self.leader(self.application(app).name) or name
        if name not in self.units:
            raise SandboxError(
                f"unit {name!r} not found (there are: {', '.join(self.units) or 'none'})"
            )
        return self.units[name]


def new_id() -> str:
    """Return a fresh identifier in the form of Juju's secret ids: 20 characters of 0-9a-z."""
    return uuid.uuid4().hex[:20]


class Store:
    """The files of one model. `name` becomes part of paths and of host and bridge names."""

    def __init__(self, name: str, root: pathlib.Path = ROOT, juju: str | None = None) -> None:
        """Name the model; `juju` is the version that it must have, or gets when it is made."""
        self.name = name
        self._juju = juju
        self.directory = root / name
        self.path = self.directory / "model.json"
        self.log_path = self.directory / "debug.log"
        self._model: Model | None = (
            None  # as last saved; another command may have changed the file since
        )
        self._saved = ""

    def load(self) -> Model:
        """Read the model, or raise `SandboxError` if it does not exist."""
        try:
            model = Model.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            raise SandboxError(
                f"model {self.name!r} does not exist: ./sandboxctl deploy ./bundle.yaml makes it"
            ) from None
        except pydantic.ValidationError as e:
            raise SandboxError(
                f"{self.path} was written by another version of the sandbox: ./sandboxctl destroy, then deploy again"
            ) from e
        if self._juju not in (None, model.juju):
            raise SandboxError(
                f"model {self.name!r} is on Juju {model.juju} since its first deployment: "
                f"./sandboxctl --juju {self._juju} --model OTHER deploy ./bundle.yaml makes another"
            )
        return model

    def save(self, model: Model) -> None:
        """Replace the model's file; it holds secrets, so only root reads it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._saved = model.model_dump_json()
        files.ensure_file(self.path, self._saved, mode=0o600)

    def forget(self) -> None:
        """Remove every file of the model."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def log(self, unit: str, level: str, message: str) -> None:
        """Append to the log that `debug-log` shows."""
        stamp = time.strftime("%H:%M:%S")
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a") as file:
            file.writelines(
                f"{stamp} {unit} {level} {line}\n" for line in message.splitlines() or [""]
            )

    @contextlib.contextmanager
    def change(self, *, create: bool = False) -> collections.abc.Generator[Model]:
        """Lock the model, yield it, and write it back.

        An exception in the block leaves the file unchanged. `create` makes a model if none exists.
        """
        with contextlib.closing(self.lock("model")):
            if (
                self._model is None
                or not self.path.exists()
                or self.path.read_text() != self._saved
            ):
                self._model = self._new() if create and not self.path.exists() else self.load()
            model, self._model = (
                self._model,
                None,
            )  # an exception drops half-made changes
            yield model
            self.save(model)
            self._model = model

    def _new(self) -> Model:
        return Model(name=self.name, juju=self._juju or versions.DEFAULT)

    def _lock_file(self, name: str) -> pathlib.Path:
        """Return the file behind a lock. Raises `SandboxError` when the model does not exist."""
        if not self.directory.is_dir():
            self.load()  # raises
        (self.directory / "locks").mkdir(exist_ok=True)
        return self.directory / "locks" / name

    def lock(self, name: str, *, shared: bool = False) -> "Lock":
        """Wait for a lock, and take it; it ends with `close`, or with this process."""
        return Lock(self._lock_file(name), fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def try_lock(self, name: str) -> "Lock | None":
        """Take a lock; return None if another holds it."""
        with contextlib.suppress(BlockingIOError):
            return Lock(self._lock_file(name), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None


class Lock:
    """An advisory lock on a file, of this process as of others, until `close`."""

    def __init__(self, path: pathlib.Path, mode: int) -> None:
        """Take the lock with flock(2). Raises `BlockingIOError` with LOCK_NB if it is taken."""
        self.path = path
        self._file = path.open("w")
        try:
            fcntl.flock(self._file, mode)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._file.close()

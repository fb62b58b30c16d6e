"""Random orders of events on one unit: hooks fail, hang or die in between, and in the end the unit must settle.

A test describes its unit by a subclass of `Unit`: the events that Juju may send, what else may happen (`changes`), and
how it settles. `check` runs SLURM_DDP_ORDERS random orders (25; the same ones every time, unless the variable is set).
After each order the unit settles, and must be in the state of a unit that settled without any.
"""

import collections.abc
import contextlib
import copy
import dataclasses
import difflib
import functools
import itertools
import os
import pathlib
import pprint
import tempfile
import time
import typing

import hypothesis
import ops
import yaml
from hypothesis import strategies
from ops import testing
from scenario import _ops_main_mock, _runtime

from slurm_ddp import files
from slurm_ddp.commands import CommandError, CommandTimeout, Completed

ORDERS = int(os.environ.get("SLURM_DDP_ORDERS", "25"))
LONGEST = 12  # steps of an order
_CALLS = 40  # a fault hits one of so many calls of a hook
FAULTS = ("dies", "fails", "hangs")


class Killed(BaseException):
    """The hook's process ends here: its writes to Juju are lost, changes to the machine stay."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One event or change; with a fault, it is at the event's call of this number."""

    what: str
    fault: str = ""
    call: int = 0


class Calls:
    """All calls by which a charm acts on its machine. One fails, hangs, or ends the process."""

    def __init__(self) -> None:
        self._fault, self._left = "", 0

    def arm(self, fault: str, call: int) -> None:
        """Let the call of this number fail, counted from 0; an empty fault is none."""
        self._fault, self._left = fault, call

    def due(self) -> str:
        """Count a call; return the fault that it meets. Raises `Killed`."""
        if not self._fault:
            return ""
        self._left -= 1
        if self._left >= 0:
            return ""
        fault, self._fault = self._fault, ""
        if fault == "dies":
            raise Killed
        return fault

    def watch(
        self,
        function: collections.abc.Callable[..., typing.Any],
        *,
        fails: collections.abc.Callable[[], typing.Any] | None = None,
        hangs: collections.abc.Callable[[], typing.Any] | None = None,
    ) -> collections.abc.Callable[..., typing.Any]:
        """Return `function` as a call that may fail.

        Args:
            function: a double's function.
            fails: returns or raises the function's failure; None if it never fails.
            hangs: as `fails`, for no answer in time.
        """

        @functools.wraps(function)
        def watched(*args: typing.Any, **named: typing.Any) -> typing.Any:
            failure = {"fails": fails, "hangs": hangs or fails}.get(self.due())
            return failure() if failure is not None else function(*args, **named)

        return watched

    def watch_answers(self, double: typing.Any) -> None:
        """Watch the commands of a double whose `_answer` returns `Completed`."""
        double._answer = self.watch(
            double._answer, fails=lambda: Completed(1, "", "error: it failed\n"), hangs=_hang
        )

    def watch_run(
        self, run: collections.abc.Callable[..., Completed]
    ) -> collections.abc.Callable[..., Completed]:
        """Watch a double of `slurm_ddp.commands.run`."""

        @functools.wraps(run)
        def watched(*argv: typing.Any, check: bool = True, **named: typing.Any) -> Completed:
            fault = self.due()
            if fault == "hangs":
                _hang()
            if fault and check:
                raise CommandError(
                    f"{argv[0]} exited 1: it failed", returncode=1, stderr="error: it failed\n"
                )
            return (
                Completed(1, "", "error: it failed\n")
                if fault
                else run(*argv, check=check, **named)
            )

        return watched

    def watch_files(self, patch: typing.Any) -> None:
        """Let the process end before any file is written or removed."""
        for name in ("ensure_file", "ensure_absent"):
            patch.setattr(files, name, self.watch(getattr(files, name)))


class Clock:
    """The machine's clock, for all users of the module `time`; sleeps and `passes` advance it."""

    def __init__(self, patch: typing.Any) -> None:
        self._start = time.time()
        self.restart()
        patch.setattr(time, "time", lambda: self.now)
        patch.setattr(time, "monotonic", lambda: self.now - self._start)
        patch.setattr(time, "clock_gettime", lambda _: self.now - self._start)
        patch.setattr(time, "sleep", self.passes)

    def restart(self) -> None:
        """Begin again."""
        self.now = self._start

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class Place:
    """A folder and doubles, restored to their present state before each order."""

    def __init__(self, root: pathlib.Path, *doubles: object) -> None:
        self._root, self._doubles = root, doubles
        self._before = [self._copy(vars(double)) for double in doubles]
        self._tree = {
            name: (about, path.read_bytes()) for name, path, about in self._walk() if path.is_file()
        }
        self._folders = {name for name, path, _ in self._walk() if path.is_dir()}
        self._links = {name: path.readlink() for name, path, _ in self._walk() if path.is_symlink()}

    def restore(self) -> None:
        """Put everything back."""
        for double, before in zip(self._doubles, self._before, strict=True):
            vars(double).clear()
            vars(double).update(self._copy(before))
        same: set[str] = set()
        for name, path, about in reversed(list(self._walk())):
            if path.is_dir() and not path.is_symlink():
                if name not in self._folders:
                    path.rmdir()
            elif name in self._tree and self._tree[name][0] == about:
                same.add(name)
            else:
                path.unlink()
        for name in sorted(self._folders):
            (self._root / name).mkdir(exist_ok=True)
        for name, target in self._links.items():
            if name not in same:
                (self._root / name).symlink_to(target)
        for name, (_, content) in self._tree.items():
            path = self._root / name
            if name not in same and name not in self._links:
                path.write_bytes(content)
                self._tree[name] = (_about(path), content)

    def files(self, *but: str) -> dict[str, str]:
        """Return the files' contents, without those that match one of the patterns."""
        return {
            name: path.read_text(errors="replace")
            for name, path, _ in self._walk()
            if path.is_file() and not any(pathlib.PurePath(name).match(pattern) for pattern in but)
        }

    def _copy(self, attributes: dict[str, typing.Any]) -> dict[str, typing.Any]:
        return copy.deepcopy(attributes, {id(double): double for double in self._doubles})

    def _walk(self) -> collections.abc.Iterator[tuple[str, pathlib.Path, tuple[int, ...]]]:
        """Yield the folder's content: name, path, changing facts; folders first."""
        for folder, folders, names in os.walk(self._root):
            for name in (*folders, *names):
                path = pathlib.Path(folder, name)
                yield str(path.relative_to(self._root)), path, _about(path)


def _about(path: pathlib.Path) -> tuple[int, ...]:
    about = path.lstat()
    return about.st_ino, about.st_size, about.st_mtime_ns, about.st_mode


class Unit:
    """One unit: what Juju keeps of it, and the machine under it.

    A subclass says what may happen to them.
    """

    relations: typing.ClassVar[dict[str, testing.RelationBase]] = {}  # as they begin, by endpoint
    actions: typing.ClassVar[dict[str, dict[str, typing.Any]]] = {}  # parameters, by name
    hooks: typing.ClassVar[tuple[str, ...]] = (
        "install",
        "start",
        "config_changed",
        "update_status",
        "upgrade_charm",
        "leader_elected",
        "stop",
        "remove",
    )

    refusals: typing.ClassVar[
        tuple[type[Exception], ...]
    ] = ()  # the failures that a hook raises on purpose, so that Juju repeats it

    def __init__(
        self, ctx: testing.Context[typing.Any], state: testing.State, calls: Calls
    ) -> None:
        self.ctx, self.state, self.calls = ctx, state, calls
        self._ids = itertools.count(100)

    @classmethod
    def events(cls) -> list[str]:
        """Return the names of all events."""
        kinds = ("created", "joined", "changed", "departed", "broken")
        return [
            *cls.hooks,
            *(f"{endpoint} {kind}" for endpoint in cls.relations for kind in kinds),
            *(f"action {name}" for name in cls.actions),
        ]

    def changes(self) -> dict[str, collections.abc.Callable[[], object]]:
        """Return the other things that may happen between two hooks, by name."""
        return {}

    def settle(self) -> object:
        """Repair faults, let Juju send its events; return the order-independent state."""
        raise NotImplementedError

    def take(self, step: Step) -> None:
        """Let it happen."""
        change = self.changes().get(step.what)
        if change is not None:
            change()
        else:
            self.emit(step.what, step.fault, step.call)

    def emit(self, name: str, fault: str = "", call: int = 0) -> None:
        """Run the hook or action, if Juju could now."""
        event = self.event(name)
        if event is None:
            return
        self.calls.arm(fault, call)
        try:
            out = self.ctx.run(event, self.state)
        except testing.ActionFailed as e:
            out = typing.cast(testing.State, e.state)
        except Killed:
            return
        except testing.errors.UncaughtCharmError as e:
            if not isinstance(e.__cause__, self.refusals):
                raise
            return
        finally:
            self.calls.arm("", 0)
            for log in (self.ctx.juju_log, self.ctx.emitted_events, self.ctx.action_logs):
                log.clear()
        self.state = out
        self.ended(name)

    def ended(self, name: str) -> None:
        """Take in that the hook ended."""
        endpoint, _, kind = name.partition(" ")
        relation = self.relation(endpoint) if kind == "broken" else None
        if relation is not None:
            self.drop(endpoint)
            if (
                not self.state.leader
            ):  # who cannot revoke: Juju removes a relation's grants with it (its secret-grant)
                self.replace(
                    secrets={_without_grants(secret, relation.id) for secret in self.state.secrets}
                )

    def event(self, name: str) -> typing.Any:
        """Return the event, None where Juju could not send it now."""
        first, _, second = name.partition(" ")
        if first == "action":
            return self.ctx.on.action(second.split()[0], params=self.actions[second])
        if not second:
            if name == "leader_elected":
                self.replace(leader=True)
            return getattr(self.ctx.on, name)()
        relation = self.relation(first)
        if relation is None and second == "created":
            relation = dataclasses.replace(self.relations[first], id=next(self._ids))
            self.replace(relations={*self.state.relations, relation})
        if relation is None:
            return None
        emit = getattr(self.ctx.on, f"relation_{second}")
        if second in ("created", "broken"):
            return emit(relation)
        number = self._remote_unit(first, relation, second)
        if number is None:
            return None
        relation = self.relation(first)
        return emit(
            relation,
            remote_unit=number,
            **({"departing_unit": number} if second == "departed" else {}),
        )

    def _remote_unit(self, endpoint: str, relation: typing.Any, kind: str) -> int | None:
        """Return the number of the unit that an event is about: it joins if it must, and is removed when it departs.

        Data of an application change before any unit has joined, too; Scenario names a unit even then.
        """
        field = {testing.Relation: "remote_units_data", testing.PeerRelation: "peers_data"}.get(
            type(relation)
        )
        if field is None:
            return 0
        units = dict(getattr(relation, field))
        if kind == "joined" and not units:
            units = getattr(self.relations[endpoint], field)
        if not units:
            return 0 if kind == "changed" and getattr(relation, "remote_app_data", None) else None
        number = max(units) if kind == "departed" else min(units)
        if kind == "departed":
            del units[number]
        self.write(endpoint, **{field: units})
        return number

    def replace(self, **fields: typing.Any) -> None:
        """Change what Juju keeps."""
        self.state = dataclasses.replace(self.state, **fields)

    def relation(self, endpoint: str) -> typing.Any:
        """Return the endpoint's relation, None when there is none."""
        return next(iter(self.state.get_relations(endpoint)), None)

    def drop(self, endpoint: str) -> None:
        """Remove the endpoint's relation."""
        self.replace(relations={one for one in self.state.relations if one.endpoint != endpoint})

    def write(self, endpoint: str, **fields: typing.Any) -> None:
        """Change the data of the endpoint's relation, if there is one."""
        relation = self.relation(endpoint)
        if relation is not None:
            self.drop(endpoint)
            self.replace(relations={*self.state.relations, dataclasses.replace(relation, **fields)})


def check(patch: typing.Any, make: collections.abc.Callable[[], Unit]) -> None:
    """Run the orders.

    `make` returns the unit on its machine as both begin, `patch` is pytest's monkeypatch.
    """
    with tempfile.TemporaryDirectory(prefix="charm-") as folder:
        hasten(patch, pathlib.Path(folder))
        _check(make)


def _check(make: collections.abc.Callable[[], Unit]) -> None:
    first = make()
    wanted = first.settle()
    assert isinstance(first.state.unit_status, testing.ActiveStatus), first.state.unit_status
    events = strategies.sampled_from(first.events())
    changes = first.changes()
    step = strategies.one_of(
        events.map(Step),
        strategies.builds(
            Step, events, strategies.sampled_from(FAULTS), strategies.integers(0, _CALLS - 1)
        ),
        *([strategies.sampled_from(sorted(changes)).map(Step)] if changes else []),
    )

    @hypothesis.settings(
        max_examples=ORDERS,
        database=None,
        derandomize="SLURM_DDP_ORDERS" not in os.environ,
        report_multiple_bugs=False,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    @hypothesis.given(strategies.lists(step, min_size=1, max_size=LONGEST))
    def order(steps: list[Step]) -> None:
        unit = make()
        for one in steps:
            unit.take(one)
        found = unit.settle()
        assert found == wanted, difference(wanted, found)

    order()


def hasten(patch: typing.Any, folder: pathlib.Path) -> None:
    """Have Scenario write and read a charm's metadata once, in a folder, not in each hook."""
    roots: dict[int, pathlib.Path] = {}
    metas: dict[pathlib.Path, ops.CharmMeta] = {}
    load = _ops_main_mock.Ops._load_charm_meta

    @contextlib.contextmanager
    def charm_root(runtime: typing.Any) -> collections.abc.Generator[pathlib.Path]:
        spec = runtime._charm_spec
        if id(spec) not in roots:
            root = roots[id(spec)] = folder / str(len(roots))
            root.mkdir()
            for name, text in (
                ("metadata", spec.meta),
                ("config", spec.config),
                ("actions", spec.actions),
            ):
                (root / f"{name}.yaml").write_text(yaml.safe_dump(text or {}))
        yield roots[id(spec)]

    def charm_meta(manager: typing.Any) -> ops.CharmMeta:
        root = manager._charm_root
        if root not in metas:
            metas[root] = load(manager)
        return metas[root]

    patch.setattr(_runtime.Runtime, "_virtual_charm_root", charm_root)
    patch.setattr(_ops_main_mock.Ops, "_load_charm_meta", charm_meta)


def raising(
    error: collections.abc.Callable[[], Exception],
) -> collections.abc.Callable[[], typing.NoReturn]:
    """Return a function that raises such an error."""

    def fail() -> typing.NoReturn:
        raise error()

    return fail


def difference(wanted: object, found: object) -> str:
    """Show what differs, line by line."""
    before, after = (pprint.pformat(one, width=150).splitlines() for one in (wanted, found))
    rows = difflib.unified_diff(before, after, "without an order", "after it", n=0, lineterm="")
    return "\n".join(["it settled otherwise:", *rows])


def _without_grants(secret: testing.Secret, relation_id: int) -> testing.Secret:
    grants = {key: grantees for key, grantees in secret.remote_grants.items() if key != relation_id}
    return dataclasses.replace(secret, remote_grants=grants)


def _hang() -> typing.NoReturn:
    raise CommandTimeout("no answer within 60 s")

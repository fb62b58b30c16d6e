"""./sandboxctl: Juju's words for the bundle on one machine. Exit status: 0 fine, 1 what was asked failed, 2 usage."""

import collections.abc
import contextlib
import functools
import itertools
import json
import pathlib
import re
import signal
import sys
import time
import typing

import click
import yaml

from sandbox import bundle as bundles
from sandbox import demo as demonstration
from sandbox import deploy as deployment
from sandbox import model as rules
from sandbox import view
from sandbox.engine import Engine, Progress, parse_gpus
from sandbox.hosts import HostError, Hosts
from sandbox.store import Application, Model, SandboxError, Store, Unit

_OVERLAY = pathlib.Path(__file__).parent / "overlay.yaml"
_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_SETTLED = ("active", "blocked", "error", "terminated")
_UPDATE_ROUNDS = 6  # update-status rounds after a command, for units that wait for something that time brings
_UPDATE_PAUSE_S = 5.0
_LOCK_WAIT_S = 600.0


def _errors(command: collections.abc.Callable[..., typing.Any]) -> collections.abc.Callable[..., typing.Any]:
    """Turn what went wrong into one line and exit status 1."""

    @functools.wraps(command)
    def wrapped(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        try:
            return command(*args, **kwargs)
        except (SandboxError, HostError) as e:
            click.echo(f"ERROR {e}", err=True)
            sys.exit(1)

    return wrapped


def _assignments(items: collections.abc.Iterable[str]) -> dict[str, str]:
    """Split `key=value`s."""
    parsed: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise click.UsageError(f"{item!r} is not key=value")
        parsed[key] = value
    return parsed


class _Session:
    """One command's work on the model, with hosts and agents, and progress on standard error."""

    def __init__(self, store: Store, *, create: bool = False, seed: int | None = None) -> None:
        self.store = store
        self.progress = Progress(lambda line: click.echo(line, err=True))
        self._create = create
        self._seed = seed

    @contextlib.contextmanager
    def open(self) -> collections.abc.Generator[Engine]:
        """Yield the engine; where the session creates, the model is made by the first change."""
        with Engine(self.store, self.progress, self._make if self._create else None) as engine:
            yield engine

    def _make(self) -> Model:
        return Model(name=self.store.name)

    @contextlib.contextmanager
    def change(self, *, once: bool) -> collections.abc.Generator[Model]:
        """Yield the model for a change, and wait until what follows from it settles."""
        with self.open() as engine:
            with engine.change() as model:
                yield model
            self.settle(engine, once=once)

    def deploy(self, engine: Engine, bundle: bundles.Bundle, *, once: bool = False) -> None:
        """Bring the model to what the bundle says, and wait until it settles."""
        with engine.change() as model:
            new = not model.applications
            deployment.Deployment(self.store, model, self.progress).apply(bundle)
            if self._seed is not None and self._seed != model.seed:
                model.seed, new = self._seed, True
            if new:
                text = f"what Juju leaves open is drawn from seed {model.seed}: deploy --seed {model.seed} repeats it"
                self.store.log("sandbox", "INFO", text)
                self.progress("sandbox", text)
        self.settle(engine, once=once)
        self.progress("sandbox", view.summary(engine.model))

    def settle(self, engine: Engine, *, once: bool) -> None:
        """Work off every event, then, unless `once`, update-status for units that still wait; fail for one in error."""

        def waiting() -> set[str]:
            return {
                name
                for name, unit in engine.model.units.items()
                if unit.started and not _is_settled(unit) and not engine.is_held(unit)
            }

        engine.update_status = not once
        engine.settle()
        for _ in range(0 if once else _UPDATE_ROUNDS):
            if not waiting() or engine.errors():
                break
            engine.settle(until=lambda: not waiting(), listen_s=_UPDATE_PAUSE_S)  # a unit may wake itself
            with engine.change() as model:
                for name in sorted(waiting() & set(model.units)):
                    rules.enqueue(model, model.units[name], "update-status")
                    self.progress(name, "still waits: update-status, which Juju sends within five minutes")
            engine.settle()
        if engine.errors():
            raise SandboxError(engine.errors()[0])

    def action(
        self, engine: Engine, name: str, action: str, values: collections.abc.Mapping[str, str]
    ) -> dict[str, typing.Any]:
        """Run an action and what follows from it; return {"id", "results", "failure"}."""
        outcome = engine.act(name, action, values)
        engine.settle()
        return outcome


def _is_settled(unit: Unit) -> bool:
    return unit.status.name in _SETTLED or unit.agent.name == "error"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-m", "--model", default="default", show_default=True, envvar="SLURM_DDP_MODEL", help="Which deployment.")
@click.pass_context
def cli(context: click.Context, model: str) -> None:
    """Run the bundle on this machine, without Juju: systemd hosts, the charms' own code, Debian's Slurm."""
    if not (model.isalnum() and model.islower() and len(model) <= 8):
        raise click.UsageError(f"--model {model!r}: up to 8 lower-case letters and digits")
    context.obj = Store(model)


class _Duration(click.ParamType[float]):
    """Seconds, written as Juju does: 90s, 5m, 1h30m."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds."""
        parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", str(value))
        if parts is None or not any(parts.groups()):
            self.fail(f"{value!r} is no duration such as 90s, 5m or 1h30m", param, ctx)
        hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        return float(hours * 3600 + minutes * 60 + seconds)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, as `juju run` does."""


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return typing.cast(typing.Any, dumper).represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _as_block)


def _as_yaml(results: dict[str, typing.Any]) -> str:
    return yaml.dump(results, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


_seed_option = click.option(
    "--seed",
    type=click.IntRange(0),
    envvar="SLURM_DDP_SEED",
    help="Of what Juju leaves open, such as the order of relations' hooks; debug-log shows the one that was drawn.",
)


_once_option = click.option(
    "--once", is_flag=True, help="Send no update-status, neither by chance nor to units that still wait at the end."
)


@cli.command()
@click.argument("bundle", type=click.Path(path_type=pathlib.Path))
@click.option(
    "--overlay", "overlays", multiple=True, type=click.Path(path_type=pathlib.Path), help="Merged over the bundle."
)
@_seed_option
@_once_option
@click.pass_obj
@_errors
def deploy(
    store: Store, bundle: pathlib.Path, overlays: tuple[pathlib.Path, ...], seed: int | None, *, once: bool
) -> None:
    """Deploy BUNDLE with the sandbox's own overlay and yours, and wait until it settles."""
    merged = bundles.load(bundle, overlays, defaults=_OVERLAY)
    session = _Session(store, create=True, seed=seed)
    with session.open() as engine:
        session.deploy(engine, merged, once=once)


@cli.command()
@click.argument("names", nargs=-1)
@click.option("--format", "form", type=click.Choice(["tabular", "json", "yaml"]), default="tabular")
@click.option("--relations", "--integrations", is_flag=True, help="Also show what is related.")
@click.option(
    "--watch", is_flag=False, flag_value="2s", type=_Duration(), help="Show it again every so often, such as 5s."
)
@click.pass_obj
@_errors
def status(store: Store, names: tuple[str, ...], form: str, *, relations: bool, watch: float | None) -> None:
    """Show applications, units and machines; only those of NAMES where some are given."""
    while True:
        model = view.select(store.load(), names)
        if form == "tabular":
            text = view.as_text(model, relations=relations)
        else:
            data = view.as_data(model)
            text = json.dumps(data, indent=2) if form == "json" else yaml.safe_dump(data, sort_keys=False)
        if watch is not None:
            click.clear()
        click.echo(text)
        if watch is None:
            return
        time.sleep(watch)


@cli.command()
@click.argument("bundle", type=click.Path(path_type=pathlib.Path), default=deployment.REPOSITORY / "bundle.yaml")
@_seed_option
@click.pass_obj
@_errors
def demo(store: Store, bundle: pathlib.Path, seed: int | None) -> None:
    """Deploy, prepare a dataset, train a model on two nodes, and show the result."""
    merged = bundles.load(bundle, defaults=_OVERLAY)
    phases = demonstration.Phases()
    session = _Session(store, create=True, seed=seed)
    with session.open() as engine:
        with phases.phase("deploy the bundle"):
            session.deploy(engine, merged)

        def act(action: str, **params: str) -> dict[str, typing.Any]:
            outcome = session.action(engine, "trainer/0", action, params)
            if outcome["failure"] is not None:
                raise SandboxError(f"{action}: {outcome['failure']}")
            return outcome["results"]

        with phases.phase("install the training environment"):
            demonstration.offer_environment(engine.hosts, engine.model)
            made = act("install-environment")
            demonstration.keep_environment(engine.hosts, engine.model, made["environment"])
        with phases.phase("prepare a dataset"):
            act("prepare-dataset")
        with phases.phase("train on two nodes"):
            result = act("submit-ddp", **demonstration.TRAINING)
        click.echo(demonstration.show(engine.hosts, engine.model, result, phases))


@cli.command()
@click.argument("words", nargs=-1, required=True, metavar="UNIT... ACTION [KEY=VALUE]...")
@click.option("--format", "form", type=click.Choice(["plain", "yaml", "json"]), default="plain", show_default=True)
@click.option("--params", "file", type=click.Path(path_type=pathlib.Path), help="YAML with parameters; KEY=VALUE wins.")
@click.option(
    "--wait", type=_Duration(), help="As in Juju, which gives up after it; here the end is always waited for."
)
@click.pass_obj
@_errors
def run(store: Store, words: tuple[str, ...], form: str, file: pathlib.Path | None, wait: float | None) -> None:
    """Run ACTION on each UNIT (`trainer/0`, or `trainer/leader`) with key=value parameters, and show its results."""
    del wait
    names = list(itertools.takewhile(lambda word: "/" in word and "=" not in word, words))
    action, *params = [*words[len(names) :], ""] if len(words) == len(names) else words[len(names) :]
    if not names or not action or "=" in action:
        raise click.UsageError("say which unit, and which action: trainer/0 submit-ddp nodes=2")
    values = (_from_file(file) if file else {}) | _assignments(params)
    shown: dict[str, dict[str, typing.Any]] = {}
    session = _Session(store)
    with session.open() as engine:
        for name in names:
            app, model = name.removesuffix("/leader"), engine.model
            unit = (model.leader(model.application(app).name) or name) if app != name else name
            outcome = session.action(engine, unit, action, values)
            failed = outcome["failure"] is not None
            shown[unit] = {
                "id": outcome["id"],
                "unit": unit,
                "status": "failed" if failed else "completed",
                "results": outcome["results"],
                **({"message": outcome["failure"]} if failed else {}),
            }
    if form == "json":
        click.echo(json.dumps(shown, indent=2))
    elif form == "yaml" or len(shown) > 1:
        click.echo(_as_yaml(shown), nl=False)
    else:
        (only,) = shown.values()
        click.echo(_as_yaml(only["results"]) if only["results"] else "", nl=False)
    for outcome in shown.values():
        if outcome["status"] == "failed":
            who = "" if len(shown) == 1 else f"{outcome['unit']}: "
            click.echo(f"ERROR {who}{action}: {outcome['message']}", err=True)
    if any(outcome["status"] == "failed" for outcome in shown.values()):
        sys.exit(1)


def _from_file(path: pathlib.Path) -> dict[str, str]:
    """Return the plain values in a YAML file, as texts."""
    try:
        read: object = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as e:
        raise SandboxError(f"{path}: {str(e).splitlines()[0]}") from e
    if not isinstance(read, dict):
        raise SandboxError(f"{path}: is no mapping of names to values")
    values = typing.cast("dict[str, object]", read)
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


@cli.command()
@click.argument("app")
@click.pass_obj
@_errors
def actions(store: Store, app: str) -> None:
    """List the actions of APP."""
    declared = store.load().application(app).section("actions")
    width = max(map(len, declared), default=0)
    for name in sorted(declared):
        text = " ".join(str((declared[name] or {}).get("description", "")).split())
        click.echo(f"{name:<{width}}  {text}".rstrip())


@cli.command()
@click.argument("app")
@click.argument("settings", nargs=-1)
@click.option(
    "--file", type=click.Path(path_type=pathlib.Path), help="YAML: the options to set, below the name of APP."
)
@click.option("--format", "form", type=click.Choice(["yaml", "json"]), default="yaml")
@click.option("--reset", default="", metavar="KEY[,KEY]", help="Options to set back to their defaults.")
@_once_option
@click.pass_obj
@_errors
def config(
    store: Store, app: str, settings: tuple[str, ...], *, file: pathlib.Path | None, form: str, reset: str, once: bool
) -> None:
    """Show the options of APP, or one by its name, or set some with key=value (key=@FILE takes a file's text)."""
    if len(settings) <= 1 and not (reset or file or any("=" in item for item in settings)):
        _show_options(store.load().application(app), settings, form)
        return
    values = _assignments(settings)
    for name, value in values.items():
        if value.startswith("@"):
            values[name] = _text(pathlib.Path(value[1:]))
    if file is not None:
        try:
            below: object = typing.cast("dict[str, object]", yaml.safe_load(_text(file)) or {}).get(app)
        except (yaml.YAMLError, AttributeError) as e:
            raise SandboxError(f"{file}: is no YAML with the options of {app} below its name") from e
        if not isinstance(below, dict):
            raise SandboxError(f"{file}: has no options below the name {app}")
        given = typing.cast("dict[str, object]", below)
        values = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()
        } | values
    with _Session(store).change(once=once) as model:
        names = [name for name in reset.split(",") if name]
        rules.set_options(model, model.application(app), values, reset=names)


def _show_options(app: Application, names: collections.abc.Sequence[str], form: str) -> None:
    declared, values = app.declared_options(), rules.options(app)
    if names:
        if names[0] not in declared:
            raise SandboxError(f"{app.name} has no option {names[0]!r} (there are: {', '.join(sorted(declared))})")
        value = values.get(names[0], "")
        click.echo(str(value).lower() if isinstance(value, bool) else value)
        return
    shown: dict[str, dict[str, typing.Any]] = {}
    for name in sorted(declared):
        about = {key: declared[name][key] for key in ("default", "description") if key in declared[name]}
        source = "user" if name in app.options else "default" if "default" in about else "unset"
        value = {"value": values[name]} if values.get(name) is not None else {}
        shown[name] = {**about, "source": source, "type": declared[name]["type"], **value}
    data = {"application": app.name, "charm": app.charm, "settings": shown}
    click.echo(json.dumps(data, indent=2) if form == "json" else _as_yaml(data).rstrip("\n"))


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError as e:
        raise SandboxError(f"{path}: {e.strerror}") from e


@cli.command("attach-resource")
@click.argument("app")
@click.argument("resource", metavar="NAME=FILE")
@_once_option
@click.pass_obj
@_errors
def attach_resource(store: Store, app: str, resource: str, *, once: bool) -> None:
    """Give APP a resource; its units get upgrade-charm, as in Juju."""
    ((name, path),) = _assignments([resource]).items()
    session = _Session(store)
    with session.change(once=once) as model:
        deployment.Deployment(store, model, session.progress).attach(model.application(app), name, pathlib.Path(path))


@cli.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-u", "--unit", help="The unit; as in Juju, in place of the first word.")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[UNIT] -- COMMAND...")
@click.pass_obj
@_errors
def exec_(store: Store, unit: str | None, words: tuple[str, ...]) -> None:
    """Run a command as root on the host of UNIT: ./sandboxctl exec slurmd/0 -- sinfo."""
    name, *argv = (unit, *words) if unit else words
    argv = argv[1:] if argv[:1] == ["--"] else argv
    if not argv:
        raise click.UsageError("say which command: exec slurmd/0 -- sinfo")
    host = Hosts(store.name).get(store.load().host_of(name))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command gets it, too
    sys.exit(0 if host.popen(argv, stdin=None, stdout=None, stderr=None).wait() == 0 else 1)


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("unit")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
@_errors
def ssh(store: Store, unit: str, command: tuple[str, ...]) -> None:
    """Open a shell as user ubuntu on the host of UNIT (sudo works there), or run COMMAND in one."""
    host = Hosts(store.name).get(store.load().host_of(unit))
    words = command[1:] if command[:1] == ("--",) else command
    run_it = ["-c", " ".join(words)] if words else []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    argv = ["/bin/su", "-", "ubuntu", *run_it]
    sys.exit(0 if host.popen(argv, stdin=None, stdout=None, stderr=None).wait() == 0 else 1)


@cli.command("add-unit")
@click.argument("app")
@click.option("-n", "--num-units", default=1, type=click.IntRange(1, 16))
@_once_option
@click.pass_obj
@_errors
def add_unit(store: Store, app: str, num_units: int, *, once: bool) -> None:
    """Add units to APP, each on a host of its own."""
    with _Session(store).change(once=once) as model:
        application = model.application(app)
        if application.subordinate:
            raise SandboxError(f"{app} is subordinate: its units come with those of the applications it is related to")
        for _ in range(num_units):
            rules.add_unit(model, application)


@cli.command("remove-unit")
@click.argument("units", nargs=-1, required=True)
@_once_option
@click.pass_obj
@_errors
def remove_unit(store: Store, units: tuple[str, ...], *, once: bool) -> None:
    """Remove UNITS, their subordinates and their hosts."""
    with _Session(store).change(once=once) as model:
        for name in units:
            unit = model.unit(name)
            if unit.principal:
                raise SandboxError(
                    f"{name} is subordinate: remove the relation to {unit.principal.split('/')[0]} instead"
                )
            rules.remove_unit(model, unit)


@cli.command("remove-application")
@click.argument("apps", nargs=-1, required=True)
@click.option("--no-prompt", is_flag=True, help="As in Juju, which asks without it; here nothing is asked.")
@_once_option
@click.pass_obj
@_errors
def remove_application(store: Store, apps: tuple[str, ...], *, no_prompt: bool, once: bool) -> None:
    """Remove APPS with their units, their hosts and their relations, all at the same time."""
    del no_prompt
    with _Session(store).change(once=once) as model:
        rules.remove_applications(model, apps)


@cli.command()
@click.argument("units", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every unit in error.")
@click.option("--no-retry", is_flag=True, help="Do not run the failed hook again: go on as if it had run.")
@_once_option
@click.pass_obj
@_errors
def resolved(store: Store, units: tuple[str, ...], *, every: bool, no_retry: bool, once: bool) -> None:
    """End the error of UNITS: the failed hook runs again at once, or not at all."""
    if bool(units) == every:
        raise click.UsageError("say which units, or --all")
    with _Session(store).change(once=once) as model:
        wrong = [name for name, unit in model.units.items() if unit.failed is not None]
        for name in wrong if every else units:
            rules.resolve(model, model.unit(name), retry=not no_retry)


@cli.command()
@click.argument("first")
@click.argument("second")
@_once_option
@click.pass_obj
@_errors
def integrate(store: Store, first: str, second: str, *, once: bool) -> None:
    """Relate two APP:ENDPOINT."""
    with _Session(store).change(once=once) as model:
        rules.relate(model, first, second)


@cli.command("remove-relation")
@click.argument("first")
@click.argument("second")
@_once_option
@click.pass_obj
@_errors
def remove_relation(store: Store, first: str, second: str, *, once: bool) -> None:
    """End the relation between two APP:ENDPOINT."""
    with _Session(store).change(once=once) as model:
        ends = sorted(tuple(end.partition(":")[::2]) for end in (first, second))
        found = [relation for relation in model.relations.values() if sorted(relation.ends) == ends]
        if not found:
            raise SandboxError(f"{first} and {second} are not related")
        rules.remove_relation(model, found[0])


@cli.command()
@click.argument("app")
@_once_option
@click.pass_obj
@_errors
def refresh(store: Store, app: str, *, once: bool) -> None:
    """Upgrade APP to the charm's present files."""
    session = _Session(store)
    with session.change(once=once) as model:
        if not deployment.Deployment(store, model, session.progress).refresh(model.application(app)):
            session.progress(app, "runs the present files already")


@cli.command("add-secret")
@click.argument("name")
@click.argument("content", nargs=-1, required=True)
@click.pass_obj
@_errors
def add_secret(store: Store, name: str, content: tuple[str, ...]) -> None:
    """Add a secret of yours with key=value content; prints its id."""
    with _Session(store).open() as engine, engine.change() as model:
        click.echo(rules.add_user_secret(model, name, _secret_content(content)).id)


@cli.command("update-secret")
@click.argument("name")
@click.argument("content", nargs=-1, required=True)
@_once_option
@click.pass_obj
@_errors
def update_secret(store: Store, name: str, content: tuple[str, ...], *, once: bool) -> None:
    """Give a secret of yours new content."""
    with _Session(store).change(once=once) as model:
        rules.update_user_secret(model, name, _secret_content(content))


@cli.command("grant-secret")
@click.argument("name")
@click.argument("app")
@_once_option
@click.pass_obj
@_errors
def grant_secret(store: Store, name: str, app: str, *, once: bool) -> None:
    """Let APP read a secret of yours."""
    with _Session(store).change(once=once) as model:
        rules.grant_user_secret(model, name, model.application(app))


def _secret_content(items: collections.abc.Iterable[str]) -> dict[str, str]:
    """Return the content; `key#file=PATH` takes the value from a file, as Juju does."""
    return {
        key.removesuffix("#file"): _text(pathlib.Path(value)) if key.endswith("#file") else value
        for key, value in _assignments(items).items()
    }


@cli.command("debug-log")
@click.argument("unit", required=False)
@click.option("-i", "--include", multiple=True, metavar="ENTITY", help="Only of this unit or application; repeatable.")
@click.option("-x", "--exclude", multiple=True, metavar="ENTITY", help="Not of this unit or application; repeatable.")
@click.option("-l", "--level", type=click.Choice(_LEVELS, case_sensitive=False), help="Only this serious, or more.")
@click.option("-n", "--lines", "--limit", default=500, show_default=True, type=click.IntRange(1))
@click.option("--replay", is_flag=True, help="All there is, from the beginning.")
@click.option("--tail/--no-tail", default=False, help="Also show what comes, until interrupted.")
@click.pass_obj
@_errors
def debug_log(
    store: Store, unit: str | None, *, include: tuple[str, ...], exclude: tuple[str, ...],
    level: str | None, lines: int, replay: bool, tail: bool,
) -> None:  # fmt: skip
    """Show what the charms logged, of one unit or of all."""
    model, every = store.load(), store.log_lines()
    logged = {line.split(" ")[1] for line in every}
    wanted = {_entity(model, logged, name) for name in (*include, *((unit,) if unit else ()))}
    unwanted = {_entity(model, logged, name) for name in exclude}
    least = _LEVELS.index(level.upper()) if level else 0

    def is_shown(line: str) -> bool:
        _, who, grade, *_ = [*line.split(" ", 3), "", ""]
        names = {who, who.partition("/")[0]}
        rank = _LEVELS.index(grade) if grade in _LEVELS else _LEVELS.index("INFO")
        return (not wanted or bool(names & wanted)) and not names & unwanted and rank >= least

    shown = [line for line in every if is_shown(line)]
    for line in shown if replay else shown[-lines:]:
        click.echo(line)
    seen = len(every)
    while tail:
        time.sleep(1)
        every = store.log_lines()
        for line in every[seen:]:
            if is_shown(line):
                click.echo(line)
        seen = len(every)


def _entity(model: Model, logged: collections.abc.Collection[str], name: str) -> str:
    """Return the name of a unit or an application that exists or has logged; Juju also takes unit-trainer-0."""
    if (tag := re.fullmatch(r"unit-(.+)-(\d+)", name)) is not None:
        name = f"{tag[1]}/{tag[2]}"
    known = {who.partition("/")[0] for who in logged}.union(model.applications, logged)
    return name if name in known else model.unit(name).name


@cli.command()
@click.argument("unit")
@_once_option
@click.pass_obj
@_errors
def reboot(store: Store, unit: str, *, once: bool) -> None:
    """Reboot the host of UNIT now, also in the middle of a hook, and wait until its units have settled again."""
    session = _Session(store)
    with session.open() as engine:
        engine.reboot(unit)
        session.settle(engine, once=once)


@cli.command()
@click.argument("unit")
@click.argument("gpus")
@click.pass_obj
@_errors
def gpus(store: Store, unit: str, gpus: str) -> None:
    """Put mock GPUs into the host of UNIT, or take them out: '2 x Mock GPU', 'NVIDIA L40S, Tesla T4', or 0 for none.

    The cards are named by slot; `empty` is a slot without a card, and `@ 1` after a card the NUMA node that it is
    beside. As when a card fails or a driver appears, no charm gets an event: the next one notices, such as
    update-status.
    """
    Hosts(store.name).get(store.load().host_of(unit)).set_gpus(parse_gpus(gpus))


@cli.command("update-status")
@click.argument("units", nargs=-1)
@_once_option
@click.pass_obj
@_errors
def update_status(store: Store, units: tuple[str, ...], *, once: bool) -> None:
    """Deliver update-status to UNITS (all of them by default), which Juju does every five minutes."""
    with _Session(store).change(once=once) as model:
        for unit in [model.unit(name) for name in units] or [unit for unit in model.units.values() if unit.started]:
            rules.enqueue(model, unit, "update-status")


@cli.command("wait-for")
@click.argument("kind", type=click.Choice(["application", "unit"]), metavar="application|unit")
@click.argument("name")
@click.option("--timeout", type=_Duration(), default="10m", show_default=True, help="Give up after so long.")
@click.pass_obj
@_errors
def wait_for(store: Store, kind: str, name: str, timeout: float) -> None:
    """Wait until the unit NAME, or every unit of the application NAME, is active and idle.

    Meanwhile units get the hooks that they ask for themselves (juju-exec), and no update-status.
    """

    def reached() -> bool:
        model = engine.model
        found = [model.unit(name)] if kind == "unit" else model.app_units(model.application(name).name)
        return all(unit.status.name == "active" and unit.agent.name == "idle" for unit in found)

    with _Session(store).open() as engine:
        engine.update_status = False
        reached()  # refuses a name that there is none of
        engine.settle(until=reached, listen_s=timeout)
        if not reached():
            raise SandboxError(f"timed out waiting for {name!r} to reach goal state")


@cli.command()
@click.option("--no-prompt", is_flag=True, help="Do not ask for the model's name.")
@click.pass_obj
@_errors
def destroy(store: Store, no_prompt: bool) -> None:
    """Remove the hosts, their network and everything in them."""
    if not no_prompt:
        if not sys.stdin.isatty():
            raise click.UsageError("destroy needs --no-prompt without a terminal")
        if click.prompt(f"This removes all data of the model. Its name, to confirm ({store.name})") != store.name:
            raise SandboxError("not the model's name: nothing was removed")
    progress = Progress(lambda line: click.echo(line, err=True))
    if store.directory.exists():
        with _alone(store, progress):
            Hosts(store.name).destroy()
            store.forget()
    else:
        Hosts(store.name).destroy()
    progress("sandbox", f"model {store.name} was removed")


@contextlib.contextmanager
def _alone(store: Store, progress: Progress) -> collections.abc.Generator[None]:
    """End what other commands do on the model, and hold it against new ones."""
    store.end()
    deadline = time.monotonic() + _LOCK_WAIT_S
    lock = store.lock("session", wait=False)
    if lock is None:
        progress("sandbox", "waits for another sandboxctl command to end")
    while lock is None:
        if time.monotonic() >= deadline:
            raise SandboxError(f"another sandboxctl works on model {store.name!r}: wait for it to end")
        time.sleep(0.2)
        lock = store.lock("session", wait=False)
    with lock:
        yield


def _exit(_: int, __: object) -> None:
    """Leave as after Ctrl-C, so that the agents end and release what they hold."""
    sys.exit(1)


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _exit)
    cli(prog_name="./sandboxctl")

"""./sandboxctl: Juju's words for the bundle on one machine. Exit status: 0 fine, 1 what was asked failed, 2 usage."""

import collections.abc
import contextlib
import functools
import json
import pathlib
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
from sandbox.store import Model, SandboxError, Store, Unit

_OVERLAY = pathlib.Path(__file__).parent / "overlay.yaml"
_SETTLED = ("active", "blocked", "error", "terminated")
_UPDATE_ROUNDS = 6  # update-status rounds after a command, for units that wait for something that time brings
_UPDATE_PAUSE_S = 5.0
_LOCK_WAIT_S = 3600.0


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
    """One command's hold on the model: locked, with hosts and agents, progress on standard error."""

    def __init__(self, store: Store, *, create: bool = False) -> None:
        self.store = store
        self.progress = Progress(lambda line: click.echo(line, err=True))
        self._create = create

    @contextlib.contextmanager
    def open(self) -> collections.abc.Generator[tuple[Model, Engine]]:
        if not self._create and not self.store.exists():
            self.store.load()
        busy = functools.partial(self.progress, "sandbox", "waits for another sandboxctl command to end")
        with self.store.locked(_LOCK_WAIT_S, busy):
            model = self.store.load() if self.store.exists() else Model(name=self.store.name)
            with Engine(self.store, model, self.progress) as engine:
                yield model, engine

    def settle(self, model: Model, engine: Engine, *, rounds: int = _UPDATE_ROUNDS) -> None:
        """Work off every event, then update-status for units that still wait; fail when a unit is in error."""
        engine.settle()
        for _ in range(rounds):
            waiting = [unit for unit in model.units.values() if unit.started and not _is_settled(unit)]
            if not waiting or engine.errors():
                break
            time.sleep(_UPDATE_PAUSE_S)
            for unit in waiting:
                rules.enqueue(model, unit, "update-status")
            engine.settle()
        self.store.save(model)
        if engine.errors():
            raise SandboxError(engine.errors()[0])

    def action(
        self, model: Model, engine: Engine, name: str, action: str, values: collections.abc.Mapping[str, str]
    ) -> dict[str, typing.Any]:
        """Run an action and what follows from it; return {"id", "results", "failure"}."""
        unit = model.unit(name)
        if unit.dying:
            raise SandboxError(f"unit {name!r} is being removed")
        event = rules.request_action(model, unit, action, values)
        outcome = engine.wait_for(event, unit)
        engine.settle()
        self.store.save(model)
        assert event.action is not None
        return {"id": event.action["id"], **outcome}


def _is_settled(unit: Unit) -> bool:
    return unit.status.name in _SETTLED or unit.agent.name == "error"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-m", "--model", default="default", show_default=True, envvar="SLURM_DDP_MODEL", help="Which deployment.")
@click.pass_context
def cli(context: click.Context, model: str) -> None:
    """Run the bundle on this machine, without Juju: systemd hosts, the charms' own code, the distribution's Slurm."""
    if not (model.isalnum() and model.islower() and len(model) <= 8):
        raise click.UsageError(f"--model {model!r}: up to 8 lower-case letters and digits")
    context.obj = Store(model)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, as `juju run` does."""


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return typing.cast(typing.Any, dumper).represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _as_block)


def _as_yaml(results: dict[str, typing.Any]) -> str:
    return yaml.dump(results, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


@cli.command()
@click.argument("bundle", type=click.Path(path_type=pathlib.Path))
@click.option(
    "--overlay", "overlays", multiple=True, type=click.Path(path_type=pathlib.Path), help="Merged over the bundle."
)
@click.pass_obj
@_errors
def deploy(store: Store, bundle: pathlib.Path, overlays: tuple[pathlib.Path, ...]) -> None:
    """Deploy BUNDLE with the sandbox's own overlay and yours, and wait until it settles."""
    merged = bundles.load(bundle, overlays, defaults=_OVERLAY)
    session = _Session(store, create=True)
    with session.open() as (model, engine):
        deployment.Deployment(store, model, session.progress).apply(merged)
        session.settle(model, engine)
        session.progress("sandbox", view.summary(model))


@cli.command()
@click.option("--format", "form", type=click.Choice(["tabular", "json", "yaml"]), default="tabular")
@click.option("--watch", is_flag=True, help="Show it again every two seconds, until interrupted.")
@click.pass_obj
@_errors
def status(store: Store, form: str, watch: bool) -> None:
    """Show applications and units."""
    while True:
        model = store.load()
        if form == "tabular":
            text = view.as_text(model)
        else:
            data = view.as_data(model)
            text = json.dumps(data, indent=2) if form == "json" else yaml.safe_dump(data, sort_keys=False)
        if watch:
            click.clear()
        click.echo(text)
        if not watch:
            return
        time.sleep(2)


@cli.command()
@click.argument("bundle", type=click.Path(path_type=pathlib.Path), default=deployment.REPOSITORY / "bundle.yaml")
@click.pass_obj
@_errors
def demo(store: Store, bundle: pathlib.Path) -> None:
    """Deploy, prepare a dataset, train a model on two nodes, and show the result."""
    merged = bundles.load(bundle, defaults=_OVERLAY)
    phases = demonstration.Phases()
    session = _Session(store, create=True)
    result: dict[str, typing.Any] = {}
    with session.open() as (model, engine):
        with phases.phase("deploy the bundle"):
            deployment.Deployment(store, model, session.progress).apply(merged)
            session.settle(model, engine)
            session.progress("sandbox", view.summary(model))
        for name, action, params in (
            ("install the training environment", "install-environment", {}),
            ("prepare a dataset", "prepare-dataset", {}),
            ("train on two nodes", "submit-ddp", {"nodes": "2", "wait": "true", "env": demonstration.ENVIRONMENT}),
        ):
            with phases.phase(name):
                outcome = session.action(model, engine, "trainer/0", action, params)
                if outcome["failure"] is not None:
                    raise SandboxError(f"{action}: {outcome['failure']}")
                result = outcome["results"]
        click.echo(demonstration.show(engine.hosts, model, result, phases))


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("unit")
@click.argument("action")
@click.argument("params", nargs=-1)
@click.option("--format", "form", type=click.Choice(["yaml", "json"]), default="yaml")
@click.pass_obj
@_errors
def run(store: Store, unit: str, action: str, params: tuple[str, ...], form: str) -> None:
    """Run ACTION on UNIT (`trainer/0`, or `trainer/leader`) with key=value parameters, and show its results."""
    values = _assignments(params)
    session = _Session(store)
    with session.open() as (model, engine):
        if unit.endswith("/leader"):
            unit = model.leader(model.application(unit.removesuffix("/leader")).name) or unit
        outcome = session.action(model, engine, unit, action, values)
    failure = outcome["failure"]
    shown: dict[str, typing.Any] = {
        "id": outcome["id"],
        "unit": unit,
        "status": "failed" if failure is not None else "completed",
        "results": outcome["results"],
    }
    if failure is not None:
        shown["message"] = failure
    if form == "json":
        click.echo(json.dumps({unit: shown}, indent=2))
    else:
        click.echo(_as_yaml(outcome["results"]) if outcome["results"] else "", nl=False)
    if failure is not None:
        click.echo(f"ERROR {action}: {failure}", err=True)
        sys.exit(1)


@cli.command()
@click.argument("app")
@click.argument("settings", nargs=-1)
@click.option("--reset", default="", metavar="KEY[,KEY]", help="Options to set back to their defaults.")
@click.pass_obj
@_errors
def config(store: Store, app: str, settings: tuple[str, ...], reset: str) -> None:
    """Show the options of APP, or set some of them with key=value."""
    if not settings and not reset:
        model = store.load()
        click.echo(yaml.safe_dump(rules.options(model.application(app)), sort_keys=True), nl=False)
        return
    session = _Session(store)
    with session.open() as (model, engine):
        names = [name for name in reset.split(",") if name]
        rules.set_options(model, model.application(app), _assignments(settings), reset=names)
        session.settle(model, engine)


@cli.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("unit")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
@_errors
def exec_(store: Store, unit: str, command: tuple[str, ...]) -> None:
    """Run a command as root on the host of UNIT: ./sandboxctl exec slurmd/0 -- sinfo."""
    host = Hosts(store.name).get(store.load().unit(unit).host)
    argv = command[1:] if command[0] == "--" else command
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command gets it, too
    sys.exit(0 if host.popen(list(argv), stdin=None, stdout=None, stderr=None).wait() == 0 else 1)


@cli.command()
@click.argument("unit")
@click.pass_obj
@_errors
def ssh(store: Store, unit: str) -> None:
    """Open a shell as user ubuntu on the host of UNIT (sudo works there)."""
    host = Hosts(store.name).get(store.load().unit(unit).host)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(0 if host.popen(["/bin/su", "-", "ubuntu"], stdin=None, stdout=None, stderr=None).wait() == 0 else 1)


@cli.command("add-unit")
@click.argument("app")
@click.option("-n", "--num-units", default=1, type=click.IntRange(1, 16))
@click.pass_obj
@_errors
def add_unit(store: Store, app: str, num_units: int) -> None:
    """Add units to APP, each on a host of its own."""
    session = _Session(store)
    with session.open() as (model, engine):
        application = model.application(app)
        if application.subordinate:
            raise SandboxError(f"{app} is subordinate: its units come with those of the applications it is related to")
        for _ in range(num_units):
            rules.add_unit(model, application)
        session.settle(model, engine)


@cli.command("remove-unit")
@click.argument("units", nargs=-1, required=True)
@click.pass_obj
@_errors
def remove_unit(store: Store, units: tuple[str, ...]) -> None:
    """Remove UNITS, their subordinates and their hosts."""
    session = _Session(store)
    with session.open() as (model, engine):
        for name in units:
            unit = model.unit(name)
            if unit.principal:
                raise SandboxError(
                    f"{name} is subordinate: remove the relation to {unit.principal.split('/')[0]} instead"
                )
            rules.remove_unit(model, unit)
        session.settle(model, engine)


@cli.command()
@click.argument("first")
@click.argument("second")
@click.pass_obj
@_errors
def integrate(store: Store, first: str, second: str) -> None:
    """Relate two APP:ENDPOINT."""
    session = _Session(store)
    with session.open() as (model, engine):
        rules.relate(model, first, second)
        session.settle(model, engine)


@cli.command("remove-relation")
@click.argument("first")
@click.argument("second")
@click.pass_obj
@_errors
def remove_relation(store: Store, first: str, second: str) -> None:
    """End the relation between two APP:ENDPOINT."""
    session = _Session(store)
    with session.open() as (model, engine):
        ends = sorted(tuple(end.partition(":")[::2]) for end in (first, second))
        found = [relation for relation in model.relations.values() if sorted(relation.ends) == ends]
        if not found:
            raise SandboxError(f"{first} and {second} are not related")
        rules.remove_relation(model, found[0])
        session.settle(model, engine)


@cli.command()
@click.argument("app")
@click.pass_obj
@_errors
def refresh(store: Store, app: str) -> None:
    """Upgrade APP to the charm's present files."""
    session = _Session(store)
    with session.open() as (model, engine):
        if not deployment.Deployment(store, model, session.progress).refresh(model.application(app)):
            session.progress(app, "runs the present files already")
        session.settle(model, engine)


@cli.command("add-secret")
@click.argument("name")
@click.argument("content", nargs=-1, required=True)
@click.pass_obj
@_errors
def add_secret(store: Store, name: str, content: tuple[str, ...]) -> None:
    """Add a secret of yours with key=value content; prints its id."""
    with _Session(store).open() as (model, _):
        click.echo(rules.add_user_secret(model, name, _secret_content(content)).id)
        store.save(model)


@cli.command("update-secret")
@click.argument("name")
@click.argument("content", nargs=-1, required=True)
@click.pass_obj
@_errors
def update_secret(store: Store, name: str, content: tuple[str, ...]) -> None:
    """Give a secret of yours new content."""
    session = _Session(store)
    with session.open() as (model, engine):
        rules.update_user_secret(model, name, _secret_content(content))
        session.settle(model, engine)


@cli.command("grant-secret")
@click.argument("name")
@click.argument("app")
@click.pass_obj
@_errors
def grant_secret(store: Store, name: str, app: str) -> None:
    """Let APP read a secret of yours."""
    session = _Session(store)
    with session.open() as (model, engine):
        rules.grant_user_secret(model, name, model.application(app))
        session.settle(model, engine)


def _secret_content(items: collections.abc.Iterable[str]) -> dict[str, str]:
    """Return the content; `key#file=PATH` takes the value from a file, as Juju does."""
    content: dict[str, str] = {}
    for key, value in _assignments(items).items():
        if key.endswith("#file"):
            try:
                content[key.removesuffix("#file")] = pathlib.Path(value).read_text()
            except OSError as e:
                raise SandboxError(f"{value}: {e.strerror}") from e
        else:
            content[key] = value
    return content


@cli.command("debug-log")
@click.argument("unit", required=False)
@click.option("-n", "--limit", default=500, show_default=True, type=click.IntRange(1))
@click.pass_obj
@_errors
def debug_log(store: Store, unit: str | None, limit: int) -> None:
    """Show what the charms logged, of one unit or of all."""
    model = store.load()
    if unit:
        model.unit(unit)
    for line in store.log_lines(unit, limit):
        click.echo(line)


@cli.command()
@click.argument("unit")
@click.pass_obj
@_errors
def reboot(store: Store, unit: str) -> None:
    """Reboot the host of UNIT and wait until its units have settled again."""
    session = _Session(store)
    with session.open() as (model, engine):
        engine.settle()
        engine.reboot(model.unit(unit))
        session.settle(model, engine)


@cli.command()
@click.argument("unit")
@click.argument("gpus")
@click.pass_obj
@_errors
def gpus(store: Store, unit: str, gpus: str) -> None:
    """Put mock GPUs into the host of UNIT, or take them out: '2 x Mock GPU', or 0 for none.

    As when a card fails or a driver appears: no charm is told. The next event notices, such as update-status.
    """
    with _Session(store).open() as (model, _):
        Hosts(store.name).get(model.unit(unit).host).set_gpus(parse_gpus(gpus))


@cli.command("update-status")
@click.argument("units", nargs=-1)
@click.option("--once", is_flag=True, help="Do not send it again to units that still wait for something.")
@click.pass_obj
@_errors
def update_status(store: Store, units: tuple[str, ...], *, once: bool) -> None:
    """Deliver update-status to UNITS (all of them by default), which Juju does every five minutes."""
    session = _Session(store)
    with session.open() as (model, engine):
        for unit in [model.unit(name) for name in units] or [unit for unit in model.units.values() if unit.started]:
            rules.enqueue(model, unit, "update-status")
        session.settle(model, engine, rounds=0 if once else _UPDATE_ROUNDS)


@cli.command()
@click.option("--no-prompt", is_flag=True, help="Do not ask for the model's name.")
@click.pass_obj
@_errors
def destroy(store: Store, no_prompt: bool) -> None:
    """Remove the hosts, their network and everything in them."""
    if not no_prompt:
        if not sys.stdin.isatty():
            raise click.UsageError("destroy needs --no-prompt when nobody can be asked")
        if click.prompt(f"This removes all data of the model. Its name, to confirm ({store.name})") != store.name:
            raise SandboxError("not the model's name: nothing was removed")
    progress = Progress(lambda line: click.echo(line, err=True))
    if store.directory.exists():
        with store.locked(_LOCK_WAIT_S, lambda: progress("sandbox", "waits for another sandboxctl command to end")):
            Hosts(store.name).destroy()
            store.forget()
    else:
        Hosts(store.name).destroy()
    progress("sandbox", f"model {store.name} is gone")


def main() -> None:
    """Run the command line."""
    cli(prog_name="./sandboxctl")

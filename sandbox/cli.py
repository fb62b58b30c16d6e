"""./sandboxctl: Juju's words for the bundle on one machine. Exit status: 0 success, 1 failure, 2 usage."""

import collections.abc
import contextlib
import functools
import json
import pathlib
import signal
import sys
import typing

import click
import yaml

from sandbox import bundle as bundles
from sandbox import demo as demonstration
from sandbox import deploy as deployment
from sandbox import gpus as mock_gpus
from sandbox import juju as versions
from sandbox import model as rules
from sandbox import session as sessions
from sandbox import settings as operator
from sandbox import storage as storages
from sandbox import values as yaml_values
from sandbox import view
from sandbox.engine import Engine, Progress
from sandbox.hosts import Hosts
from sandbox.store import Model, SandboxError, Store

LEVELS = (
    "TRACE",
    "DEBUG",
    "INFO",
    "ACTION",
    "WARNING",
    "ERROR",
    "CRITICAL",
)  # Juju's, and an action's own log
_OVERLAY = pathlib.Path(__file__).parent / "overlay.yaml"


class _Group(click.Group):
    """Turns a failure of a command into one line and exit status 1."""

    def invoke(self, ctx: click.Context) -> typing.Any:
        try:
            return super().invoke(ctx)
        except SandboxError as e:
            click.echo(f"ERROR {e}", err=True)
            ctx.exit(1)


@contextlib.contextmanager
def _change(store: Store, *, once: bool) -> collections.abc.Generator[Model]:
    """Yield the model for a change, and wait until everything that follows from it has run."""
    with Engine(store, Progress()) as engine:
        with engine.change() as model:
            yield model
        sessions.settle(engine, once=once)


def _assignments(items: collections.abc.Iterable[str]) -> dict[str, str]:
    """Split `key=value`s."""
    parsed: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise click.UsageError(f"{item!r} is not key=value")
        parsed[key] = value
    return parsed


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, as `juju run` does."""


def _as_block(dumper: typing.Any, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _as_block)


def _as_yaml(results: dict[str, typing.Any]) -> str:
    return yaml.dump(results, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


_once_option = click.option(
    "--once",
    is_flag=True,
    help="Send no update-status to units that still wait at the end.",
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-m",
    "--model",
    default="default",
    show_default=True,
    envvar="SLURM_DDP_MODEL",
    help="Which deployment.",
)
@click.option(
    "--juju",
    type=click.Choice(list(versions.VERSIONS)),
    envvar="SLURM_DDP_JUJU",
    help=f"The Juju to play, which the first deployment chooses. [default: {versions.DEFAULT}]",
)
@click.pass_context
def cli(context: click.Context, model: str, juju: str | None) -> None:
    """Run the bundle on this machine, without Juju: systemd hosts, the charms' own code, Debian's Slurm."""
    if not (model.isalnum() and model.islower() and len(model) <= 8):
        raise click.UsageError(f"--model {model!r}: use up to 8 lower-case letters and digits")
    context.obj = Store(model, juju=juju)


def _changes_model(
    function: collections.abc.Callable[..., None],
) -> collections.abc.Callable[..., None]:
    """Give a function the model to change, and wait until everything that follows has run."""

    @functools.wraps(function)
    def command(store: Store, *, once: bool, **words: typing.Any) -> None:
        with _change(store, once=once) as model:
            function(model, **words)

    return _once_option(click.pass_obj(command))


@cli.command()
@click.argument("bundle", metavar="BUNDLE|CHARM", type=click.Path(path_type=pathlib.Path))
@click.argument("app", required=False)
@click.option(
    "--overlay",
    "overlays",
    multiple=True,
    type=click.Path(path_type=pathlib.Path),
    help="Merge this over the bundle.",
)
@click.option(
    "--config",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set an option of the charm; repeatable.",
)
@click.option(
    "--attach-storage",
    "attach",
    multiple=True,
    metavar="ID",
    help="Give the charm's unit this storage.",
)
@_once_option
@click.pass_obj
def deploy(
    store: Store,
    bundle: pathlib.Path,
    app: str | None,
    *,
    overlays: tuple[pathlib.Path, ...],
    options: tuple[str, ...],
    attach: tuple[str, ...],
    once: bool,
) -> None:
    """Deploy BUNDLE with the sandbox's own overlay and yours, or one CHARM with one unit as APP.

    Waits until every unit is active.
    """
    if bundle.suffix == ".charm":
        if overlays:
            raise click.UsageError("--overlay is for bundles")
        merged = _single(store, bundle, app or bundle.stem, options, attach)
    else:
        for name, given in (("APP", app), ("--config", options), ("--attach-storage", attach)):
            if given:
                raise click.UsageError(f"{name} is for a charm, not for a bundle")
        merged = bundles.load(bundle, overlays, defaults=_OVERLAY)
    sessions.remove_abandoned(store, Progress())
    with Engine(store, Progress(), create=True) as engine:
        sessions.deploy(engine, merged, once=once)


def _single(
    store: Store, charm: pathlib.Path, app: str, options: tuple[str, ...], attach: tuple[str, ...]
) -> bundles.Bundle:
    """Describe the deployment of one charm. Raises `SandboxError` if the application exists."""
    if store.path.exists() and app in store.load().applications:
        raise SandboxError(f"application {app!r} already exists")
    chosen = {name: yaml_values.parse(value) for name, value in _assignments(options).items()}
    return bundles.single(charm, app, chosen, attach, _OVERLAY)


@cli.command()
@click.option("--format", "form", type=click.Choice(["tabular", "json", "yaml"]), default="tabular")
@click.pass_obj
def status(store: Store, form: str) -> None:
    """Show applications, units and machines; the table cuts messages at 120 characters, as Juju's does."""
    model = store.load()
    if form == "tabular":
        click.echo(view.as_text(model))
        return
    data = view.as_data(model)
    click.echo(json.dumps(data, indent=2) if form == "json" else _as_yaml(data).rstrip())


@cli.command()
@click.option(
    "--base",
    type=click.Choice(["24.04", "26.04"]),
    default="24.04",
    show_default=True,
    help="The Ubuntu whose charms of Slurm the stand-ins play.",
)
@click.pass_obj
def demo(store: Store, base: str) -> None:
    """Deploy bundle.yaml, prepare a dataset, train a model on two nodes, and show the result."""
    root = deployment.REPOSITORY
    overlays = [root / "overlays" / "2604.yaml"] if base == "26.04" else []
    merged = bundles.load(root / "bundle.yaml", overlays, defaults=_OVERLAY)
    sessions.remove_abandoned(store, Progress())
    with Engine(store, Progress(), create=True) as engine:
        click.echo(demonstration.run(engine, merged))


@cli.command()
@click.argument("unit")
@click.argument("action")
@click.argument("params", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--format", "form", type=click.Choice(["plain", "json"]), default="plain", show_default=True
)
@click.option(
    "--wait",
    expose_value=False,
    metavar="TIME",
    help="As in Juju; the sandbox waits for the end in any case.",
)
@click.pass_obj
def run(store: Store, unit: str, action: str, params: tuple[str, ...], form: str) -> None:
    """Run ACTION on UNIT (`trainer/0`, or `trainer/leader`) with key=value parameters, and show its results."""
    values = _assignments(params)
    with Engine(store, Progress()) as engine:
        unit = engine.model.unit(unit).name
        outcome = engine.act(unit, action, values)
    failure, results = outcome["failure"], outcome["results"]
    if form == "json":
        state = (
            {"status": "completed"} if failure is None else {"status": "failed", "message": failure}
        )
        click.echo(
            json.dumps(
                {unit: {"id": outcome["id"], "unit": unit, "results": results, **state}}, indent=2
            )
        )
    elif results:
        click.echo(_as_yaml(results), nl=False)
    if failure is not None:
        raise SandboxError(f"{action}: {failure}")


@cli.command()
@click.argument("app")
@click.argument("settings", nargs=-1, metavar="[KEY | KEY=VALUE...]")
@click.option(
    "--reset",
    multiple=True,
    metavar="KEY[,KEY]",
    help="Set these options back to their defaults; repeatable.",
)
@_once_option
@click.pass_obj
def config(
    store: Store, app: str, settings: tuple[str, ...], *, reset: tuple[str, ...], once: bool
) -> None:
    """Show the options of APP or, with the name of one, its value; or set some with key=value."""
    is_name = len(settings) == 1 and "=" not in settings[0]
    if not reset and (is_name or not settings):
        data = view.options_as_data(store.load().application(app))
        if is_name:
            if settings[0] not in data["settings"]:
                raise SandboxError(
                    f'key "{settings[0]}" not found in "{app}" application config or charm settings.'
                )
            click.echo(data["settings"][settings[0]].get("value", ""))
        else:
            click.echo(_as_yaml(data), nl=False)
        return
    values = _assignments(settings)
    with _change(store, once=once) as model:
        names = [name for name in ",".join(reset).split(",") if name]
        operator.set_options(model, model.application(app), values, reset=names)


def _run_on_host(store: Store, unit: str, argv: collections.abc.Sequence[str]) -> int:
    """Run a command on the host of a unit with this terminal, and return 0 or 1."""
    host = Hosts(store.name).get(store.load().host_of(unit))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command gets it, too
    return 0 if host.popen(argv, stdin=None, stdout=None, stderr=None).wait() == 0 else 1


@contextlib.contextmanager
def take_turn(store: Store, unit: str) -> collections.abc.Generator[None]:
    """Wait until an exec on a unit's machine may run; hold the machine's lock if execs take it."""
    model = store.load()
    machine = model.unit(unit).machine
    if model.version.honours_parallel:
        yield
        return
    lock = store.try_lock(f"machine-{machine}")
    if lock is None:
        Progress()(unit, f"exec waits for the machine lock of machine {machine}")
        lock = store.lock(f"machine-{machine}")
    with contextlib.closing(lock):
        yield


@cli.command(
    "exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("-u", "--unit", help="The unit; as in Juju, in place of the first word.")
@click.argument(
    "words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[UNIT] -- COMMAND..."
)
@click.pass_obj
def exec_(store: Store, unit: str | None, words: tuple[str, ...]) -> None:
    """Run a command as root on the host of UNIT: ./sandboxctl exec slurmd/0 -- sinfo."""
    name, *argv = (unit, *words) if unit else words
    argv = argv[1:] if argv[:1] == ["--"] else argv
    if not argv:
        raise click.UsageError("name the command: exec slurmd/0 -- sinfo")
    with take_turn(store, name):
        status = _run_on_host(store, name, argv)
    sys.exit(status)


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("unit")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def ssh(store: Store, unit: str, command: tuple[str, ...]) -> None:
    """Open a shell as user ubuntu on the host of UNIT (sudo works there), or run COMMAND in one."""
    words = command[1:] if command[:1] == ("--",) else command
    sys.exit(
        _run_on_host(
            store, unit, ["/bin/su", "-", "ubuntu", *(["-c", " ".join(words)] if words else [])]
        )
    )


@cli.command("cancel-task")
@click.argument("task")
@click.pass_obj
def cancel_task(store: Store, task: str) -> None:
    """Cancel TASK, which `run` printed; on Juju 4 only one that does not run yet."""
    with store.change() as model:
        if not operator.cancel_task(model, task):
            click.echo(
                f"WARNING The following tasks could not be canceled:\ntask: {task}, error: ",
                err=True,
            )


@cli.command("add-unit")
@click.argument("app")
@_changes_model
def add_unit(model: Model, app: str) -> None:
    """Add a unit to APP, on a host of its own."""
    application = model.application(app)
    if application.subordinate:
        raise SandboxError(
            f"{app} is subordinate: its units come with those of the applications it is related to"
        )
    rules.add_unit(model, application)


_destroy_option = click.option(
    "--destroy-storage",
    "destroy",
    is_flag=True,
    help="Destroy its storage, too; else it stays, detached.",
)


@cli.command("remove-unit")
@click.argument("unit")
@_destroy_option
@_changes_model
def remove_unit(model: Model, unit: str, *, destroy: bool) -> None:
    """Remove UNIT, its subordinates and its host."""
    principal = model.unit(unit).principal
    if principal:
        raise SandboxError(
            f"{unit} is subordinate: remove the relation to {principal.split('/')[0]} instead"
        )
    if destroy:
        storages.destroy_with(model, [model.unit(unit)])
    rules.remove_unit(model, model.unit(unit))


@cli.command("remove-application")
@click.argument("apps", nargs=-1, required=True)
@click.option(
    "--no-prompt", is_flag=True, expose_value=False, help="As in Juju; the sandbox does not ask."
)
@_destroy_option
@_changes_model
def remove_application(model: Model, apps: tuple[str, ...], *, destroy: bool) -> None:
    """Remove APPS with their units, their hosts and their relations, all at the same time."""
    if destroy:
        storages.destroy_with(model, [unit for app in apps for unit in model.app_units(app)])
    rules.remove_applications(model, apps)


@cli.command("storage")
@click.pass_obj
def storage(store: Store) -> None:
    """Show the storage that units have, and what was kept of removed ones."""
    click.echo(storages.as_text(store.load()), nl=False)


@cli.command("remove-storage")
@click.argument("identifiers", nargs=-1, required=True, metavar="ID...")
@click.pass_obj
def remove_storage(store: Store, identifiers: tuple[str, ...]) -> None:
    """Destroy detached storage with its data."""
    with store.change() as model:
        for identifier in identifiers:
            storages.remove(store, model, identifier)


@cli.command("integrate")
@click.argument("first")
@click.argument("second")
@_changes_model
def integrate(model: Model, first: str, second: str) -> None:
    """Relate two APP:ENDPOINT."""
    rules.relate(model, first, second)


@cli.command("remove-relation")
@click.argument("first")
@click.argument("second")
@_changes_model
def remove_relation(model: Model, first: str, second: str) -> None:
    """End the relation between two APP:ENDPOINT."""
    relation = rules.find_relation(model, first, second)
    if relation is None:
        raise SandboxError(f"{first} and {second} are not related")
    rules.remove_relation(model, relation)


@cli.command("update-secret")
@click.argument("name")
@click.argument("content", nargs=-1, required=True)
@_changes_model
def update_secret(model: Model, name: str, content: tuple[str, ...]) -> None:
    """Give a secret of yours new content."""
    operator.update_secret(model, name, _secret_content(content))


@cli.command("grant-secret")
@click.argument("name")
@click.argument("app")
@_changes_model
def grant_secret(model: Model, name: str, app: str) -> None:
    """Let APP read a secret of yours."""
    operator.grant_secret(model, name, model.application(app))


@cli.command("update-status")
@click.argument("units", nargs=-1)
@_changes_model
def update_status(model: Model, units: tuple[str, ...]) -> None:
    """Deliver update-status, which Juju sends every five minutes, to UNITS. [default: all]"""  # noqa: D415
    for unit in [model.unit(name) for name in units] or [
        unit for unit in model.units.values() if unit.started
    ]:
        rules.enqueue(model, unit, "update-status")


@cli.command("add-secret")
@click.argument("name")
@click.argument("content", nargs=-1, required=True)
@click.pass_obj
def add_secret(store: Store, name: str, content: tuple[str, ...]) -> None:
    """Add a secret of yours with key=value content; prints its id."""
    with Engine(store, Progress()) as engine, engine.change() as model:
        click.echo(operator.add_secret(model, name, _secret_content(content)).id)


def _secret_content(items: collections.abc.Iterable[str]) -> dict[str, str]:
    """Return the content; `key#file=PATH` takes the value from a file, as Juju does."""
    content: dict[str, str] = {}
    for key, value in _assignments(items).items():
        if not key.endswith("#file"):
            content[key] = value
            continue
        try:
            content[key.removesuffix("#file")] = pathlib.Path(value).read_text()
        except OSError as e:
            raise SandboxError(f"{e.filename}: {e.strerror}") from e
    return content


@cli.command("debug-log")
@click.option(
    "-i",
    "--include",
    multiple=True,
    metavar="ENTITY",
    help="Only this unit or application; repeatable.",
)
@click.option("-n", "--lines", "--limit", default=500, show_default=True, type=click.IntRange(1))
@click.option("--replay", is_flag=True, help="All lines, from the beginning.")
@click.option(
    "--no-tail", is_flag=True, expose_value=False, help="As in Juju; the sandbox follows no log."
)
@click.option(
    "-l",
    "--level",
    type=click.Choice(LEVELS, case_sensitive=False),
    default=LEVELS[0],
    help="The lowest level.",
)
@click.pass_obj
def debug_log(
    store: Store, *, include: tuple[str, ...], lines: int, replay: bool, level: str
) -> None:
    """Show the charms' log."""
    store.load()  # raises if the model does not exist
    logged = store.log_path.read_text().splitlines() if store.log_path.exists() else []
    levels = LEVELS[LEVELS.index(level) :]
    chosen: list[str] = []
    for line in logged:
        who, severity = line.split(" ")[1:3]
        is_included = not include or {who, who.partition("/")[0]} & {*include}
        if is_included and severity in levels:
            chosen.append(line)
    for line in chosen if replay else chosen[-lines:]:
        click.echo(line)


@cli.command()
@click.argument("unit")
@_once_option
@click.pass_obj
def reboot(store: Store, unit: str, *, once: bool) -> None:
    """Reboot the host of UNIT now, also in the middle of a hook, and wait until its units have settled again."""
    with Engine(store, Progress()) as engine:
        engine.reboot(unit)
        sessions.settle(engine, once=once)


@cli.command()
@click.argument("unit")
@click.argument("gpus")
@click.pass_obj
def gpus(store: Store, unit: str, gpus: str) -> None:
    """Put mock GPUs into the host of UNIT, or take them out: '2 x Mock GPU', 'NVIDIA L40S, Tesla T4', or 0 for none.

    The cards are named by slot; `empty` is a slot without a card, and `@ 1` after a card its NUMA
    node. As when a card fails or a driver appears, no charm gets an event: the next one notices,
    such as update-status.
    """
    Hosts(store.name).get(store.load().host_of(unit)).set_gpus(mock_gpus.parse(gpus))


@cli.command()
@click.option("--no-prompt", is_flag=True, help="Do not ask first.")
@click.pass_obj
def destroy(store: Store, no_prompt: bool) -> None:
    """Remove the hosts, their network and everything in them."""
    if not no_prompt:
        click.confirm(f"This removes all data of the model {store.name}. Continue?", abort=True)
    sessions.remove(store, Progress())


def main() -> None:
    """Run the command line."""
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # the agents end and release their locks
    cli(prog_name="./sandboxctl")

"""The command line: the verbs of ddp.verbs with a flag for each of their options, and what only people use."""

import collections.abc
import contextlib
import dataclasses
import os
import pathlib
import sys
import typing

import click

import ddp
from ddp import config, verbs
from ddp.base import ParameterError, Results, Settings, TrainerError, one_line
from ddp.options import declared, fields, models
from ddp.view import screen
from ddp.view.result import Result

OK, FAILED, USAGE = 0, 1, 2
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
# Of a verb, what is written without its flag: the option's name, and whether it may be repeated
_BARE = {
    "submit-ddp": "workload",
    "submit-sweep": "workload",
    "prepare-dataset": "source",
    "show-run": "run",
    "compare-runs": "runs",
    "run-log": "run",
    "resume-run": "run",
    "cancel-run": "run",
    "create-environment": "name",
    "show-environment": "name",
    "remove-environment": "name",
}
_METAVARS = {
    "workload": "[gpt|smoke|SCRIPT]",
    "run": "[RUN]",
    "runs": "[RUN]...",
    "source": "[SOURCE]",
    "name": "NAME",
}
_TAKES_ARGUMENTS = ("submit-ddp", "submit-sweep")  # of a script: everything behind its name
_PATHS = (
    "workload",
    "source",
    "wheelhouse",
    "file",
    "requirements",
)  # a relative one is below the folder where it is typed
_WORKLOADS = ("gpt", "smoke", "python-stdlib")
_NUMBERED = ("show-run", "run-log", "resume-run", "cancel-run")  # take a job's id in place of a run's name
_DEFAULTS = {"follow-timeout": 86400}  # of a user's command, which Ctrl-C ends; an action keeps its unit busy


@dataclasses.dataclass(frozen=True)
class Session:
    """What the flags before the verb say."""

    flags: dict[str, object]
    is_json: bool


@click.group(context_settings=_CONTEXT)
@click.option("--json", "is_json", is_flag=True, help="Write results as one JSON object, for programs.")
@click.option("--workspace", metavar="FOLDER", help="Folder on the shared filesystem; default is the configuration's.")
@click.version_option(ddp.__version__, prog_name="ddp", message="%(prog)s %(version)s")
@click.pass_context
def program(context: click.Context, *, is_json: bool, workspace: str | None) -> None:
    """Distributed PyTorch training on Slurm, under your own account.

    Settings come from /etc/slurm-ddp.toml, ~/.config/slurm-ddp.toml, DDP_* variables and flags, each before the last.
    """
    context.obj = Session({"workspace": workspace}, is_json)


def main() -> typing.NoReturn:
    """Run the command line, and leave without waiting for threads that a filesystem holds."""
    os.umask(0o022)
    code = OK
    try:
        if sys.argv[1:] == ["serve"]:  # the charm, which has no terminal
            from ddp import service  # noqa: PLC0415 - a user's command starts without it

            service.main()
        found = program.main(prog_name="ddp", standalone_mode=False)
        code = found if isinstance(found, int) else OK
    except click.exceptions.Abort:
        click.echo("ddp: interrupted; a job that was submitted goes on, see: ddp list", err=True)
        code = FAILED
    except click.UsageError as e:
        where = e.ctx.command_path if e.ctx is not None else "ddp"
        what = "name a command" if isinstance(e, click.exceptions.NoArgsIsHelpError) else e.format_message()
        click.echo(f"{where}: {one_line(what).rstrip('.')}; see: {where} --help", err=True)
        code = USAGE
    except click.ClickException as e:
        click.echo(f"ddp: {one_line(e.format_message())}", err=True)
        code = FAILED
    except SystemExit as e:  # click's: a word is completed, or what reads the output, such as head, has enough
        code = e.code if "_DDP_COMPLETE" in os.environ and isinstance(e.code, int) else OK
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def settings_of(session: Session) -> Settings:
    """Read the configuration and the command's flags. Raises click.UsageError where they are invalid, or for root."""
    try:
        found = config.settings(config.load(session.flags))
    except ParameterError as e:
        raise click.UsageError(str(e)) from e
    if found.uid == 0:
        raise click.UsageError("jobs never run as root; log in as an ordinary account: su - NAME")
    return found


def _command(verb: verbs.Verb) -> click.Command:
    """Return the command of a verb, with a flag for each option."""
    parameters: list[click.Parameter] = []
    bare = _BARE.get(verb.action)
    for option in _options(verb):
        if option.name == bare:
            parameters.append(_argument(verb, option))
        else:
            parameters.append(_flag(option))
    if verb.action in _TAKES_ARGUMENTS:
        parameters.append(click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]..."))
    parameters.append(_json_flag())

    @click.pass_context
    def run(context: click.Context, /, **given: object) -> None:
        session = _session(context, is_json=bool(given.pop("is_json")))
        arguments = typing.cast("tuple[str, ...]", given.pop("arguments", ()))
        context.exit(perform(session, verb, given, arguments))

    takes_rest = verb.action in _TAKES_ARGUMENTS
    context = {**_CONTEXT, "allow_interspersed_args": not takes_rest}
    return click.Command(
        verb.words[-1], context_settings=context, callback=run, params=parameters, help=verb.description
    )


def _options(verb: verbs.Verb) -> tuple[declared.Option, ...]:
    return tuple(
        dataclasses.replace(option, default=_DEFAULTS.get(option.name, option.default))
        for option in declared.options(verb.params)
    )


def _argument(verb: verbs.Verb, option: declared.Option) -> click.Argument:
    name = option.name.replace("-", "_")
    metavar = "[RUN|JOB]" if verb.action in _NUMBERED else _METAVARS[option.name]
    nargs = -1 if option.name == "runs" or verb.action == "cancel-run" else 1
    return click.Argument([name], required=False, nargs=nargs, metavar=metavar, type=click.STRING)


def _flag(option: declared.Option) -> click.Option:
    """Return the flag of an option; one that is not given is not passed on, so that the model's default counts."""
    shown = option.description
    if option.default not in (None, "", False):
        default = str(option.default).lower() if isinstance(option.default, bool) else option.default
        shown = f"{shown.rstrip('.')}.  [default: {default}]"
    if option.kind == "boolean":
        name = f"--{option.name}/--no-{option.name}" if option.default else f"--{option.name}"
        return click.Option([name, *_SHORT.get(option.name, ())], is_flag=True, default=None, help=shown)
    if option.choices:
        return click.Option([f"--{option.name}"], type=click.Choice(option.choices), help=shown)
    kind = click.INT if option.kind == "integer" else click.STRING
    aliases = [f"--{option.name}", *_SHORT.get(option.name, ())]
    metavar = "N" if option.kind == "integer" else "TEXT"
    many = option.name == "env"
    return click.Option(
        aliases, type=kind, help=shown, metavar=metavar, multiple=many, required=option.is_required and not many
    )


_SHORT = {"nodes": ("-N",), "partition": ("-p",), "time-limit": ("-t",), "lines": ("-n",), "follow": ("-f",)}


def perform(
    session: Session, verb: verbs.Verb, given: collections.abc.Mapping[str, object], arguments: tuple[str, ...] = ()
) -> int:
    """Do what a verb does with flags as they were parsed; return the exit status."""
    params = _parsed(verb, given, arguments)
    return _guarded(session, lambda settings, to: verb.do_when_ready(settings, params, to.log), verb=verb)


def _parsed(
    verb: verbs.Verb, given: collections.abc.Mapping[str, object], arguments: tuple[str, ...] = ()
) -> fields.Parsed:
    """Return a verb's options. Raises click.UsageError."""
    given = _environment_of(verb, given)
    values = {
        name.replace("_", "-"): " ".join(typing.cast("tuple[str, ...]", value)) if isinstance(value, tuple) else value
        for name, value in given.items()
        if value is not None and value != ()
    }
    for option in _options(verb):
        if option.name in _DEFAULTS:
            values.setdefault(option.name, option.default)
    try:
        params = fields.parse(verb.params, _resolved(values))
    except ParameterError as e:
        raise click.UsageError(_as_flag(verb, e)) from e
    return params.model_copy(update={"arguments": arguments}) if arguments else params


def _guarded(
    session: Session,
    work: collections.abc.Callable[[Settings, screen.Screen], Results | Result | None],
    *,
    verb: verbs.Verb | None = None,
) -> int:
    """Show what work returns, or why it failed; return the exit status."""
    from ddp.workspace import files  # noqa: PLC0415 - `ddp --help` is there at once
    from slurm_ddp import run  # noqa: PLC0415

    to = screen.Screen(is_json=session.is_json)
    settings = settings_of(session)
    try:
        results = work(settings, to)
    except ParameterError as e:
        to.fail(_as_flag(verb, e) if verb is not None else str(e), e.results)
    except TrainerError as e:
        to.fail(str(e), e.results)
    except (files.RefusedError, run.CommandError) as e:
        to.fail(str(e), {})
    else:
        if results is not None:
            to.show(results)
        return OK
    finally:
        to.close()
    return FAILED


def _resolved(values: dict[str, object]) -> dict[str, object]:
    """Return the options with relative paths made absolute."""
    found = dict(values)
    for name in _PATHS:
        text = found.get(name)
        if isinstance(text, str) and text and text not in _WORKLOADS and not text.startswith("/"):
            path = pathlib.Path.cwd() / text
            found[name] = str(path.resolve() if ".." in path.parts else path)
    return found


def _environment_of(
    verb: verbs.Verb, given: collections.abc.Mapping[str, object]
) -> collections.abc.Mapping[str, object]:
    """Return the flags where `--env NAME` is an environment; `--env NAME=value` stays a variable."""
    env = given.get("env")
    if "environment" not in verb.params.model_fields or not isinstance(env, tuple):
        return given
    words = typing.cast("tuple[str, ...]", env)
    names = [word for word in words if word and "=" not in word]
    if len(names) != 1:
        return given
    return {**given, "environment": names[0], "env": tuple(word for word in words if word != names[0])}


def _as_flag(verb: verbs.Verb, e: ParameterError) -> str:
    """Return an error with its option as it is typed here."""
    known = {option.name for option in declared.options(verb.params)}
    return f"--{e}" if e.name in known and e.name != _BARE.get(verb.action) else str(e)


def _json_flag() -> click.Option:
    return click.Option(["--json", "is_json"], is_flag=True, help="Write results as one JSON object.")


def _session(context: click.Context, *, is_json: bool) -> Session:
    session = typing.cast(Session, context.obj)
    return dataclasses.replace(session, is_json=is_json or session.is_json)


def _watch_command() -> click.Command:
    @click.command("watch", context_settings=_CONTEXT)
    @click.argument("run", required=False, metavar="[RUN|JOB]")
    @click.option("--json", "is_json", is_flag=True, help="Write each change as a line of JSON.")
    @click.pass_context
    def run_it(context: click.Context, run: str | None, *, is_json: bool) -> None:
        """Watch a run: state, step, loss, throughput, memory, time left. Ctrl-C ends the view, not the run."""
        from ddp.actions import watch  # noqa: PLC0415

        session = _session(context, is_json=is_json)
        params = _parsed_as(models.WatchRun, {"run": run})
        console = None if session.is_json else screen.console(sys.stdout)
        context.exit(_guarded(session, lambda settings, to: watch.watch(settings, params, to.log, console=console)))

    return run_it


def _report_command() -> click.Command:
    @click.command("report", context_settings=_CONTEXT)
    @click.argument("runs", nargs=-1, metavar="[RUN]...")
    @click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=pathlib.Path), help="Where to write it.")
    @click.pass_context
    def run_it(context: click.Context, runs: tuple[str, ...], output: pathlib.Path | None, *, is_json: bool) -> None:
        """Write one HTML page about runs, side by side: curves, settings, attempts, failures, the cluster.

        The page is self-contained, so you can mail it. Defaults to the newest run.
        """
        from ddp.actions import report  # noqa: PLC0415

        session = _session(context, is_json=is_json)
        params = _parsed_as(models.Report, {"runs": " ".join(runs) or None, "output": output and str(output.resolve())})
        context.exit(_guarded(session, lambda settings, to: report.report(settings, params, to.log)))

    run_it.params.append(_json_flag())
    return run_it


def _render_command() -> click.Command:
    """Return the command that writes what `submit` would hand over, with submit's options."""
    submit = _command(verbs.ALL["submit-ddp"])
    dropped = {"wait", "wait_timeout", "dry_run"}
    parameters = [parameter for parameter in submit.params if parameter.name not in dropped]
    parameters += [
        click.Option(["--kubernetes"], is_flag=True, help="Write Kubernetes manifests: a Job and its Service."),
        click.Option(["--claim"], default="shared", help="PersistentVolumeClaim that holds the workspace."),
        click.Option(["--namespace"], default="default", help="Namespace of the claim."),
    ]

    @click.pass_context
    def run_it(
        context: click.Context,
        /,
        *,
        kubernetes: bool,
        claim: str,
        namespace: str,
        arguments: tuple[str, ...],
        is_json: bool,
        **given: object,
    ) -> None:
        from ddp.actions import render  # noqa: PLC0415

        params = typing.cast(fields.SubmitDdp, _parsed(verbs.ALL["submit-ddp"], given, arguments))

        def write(settings: Settings, to: screen.Screen) -> None:
            if kubernetes:
                found = render.render_kubernetes(settings, params, to.log, claim=claim, namespace=namespace)
            else:
                found = render.render(settings, params)
            to.show_text(found, "manifests" if kubernetes else "script")

        context.exit(_guarded(_session(context, is_json=is_json), write, verb=verbs.ALL["submit-ddp"]))

    return click.Command(
        "render",
        context_settings={**_CONTEXT, "allow_interspersed_args": False},
        callback=run_it,
        params=parameters,
        help="Write the script that submit hands to Slurm, or a run as Kubernetes manifests. Submits nothing.",
    )


Params = typing.TypeVar("Params", bound=fields.Parsed)


def _parsed_as(model: type[Params], given: dict[str, object]) -> Params:
    try:
        return fields.parse(model, {name: value for name, value in given.items() if value is not None})
    except ParameterError as e:
        raise click.UsageError(str(e)) from e


def _groups() -> None:
    """Add a command for each verb, below a group where its words are two."""
    for verb in verbs.ALL.values():
        place: click.Group = program
        for word in verb.words[:-1]:
            inner = place.commands.get(word)
            if not isinstance(inner, click.Group):
                inner = click.Group(word, context_settings=_CONTEXT, help="Python environments of jobs.")
                place.add_command(inner)
            place = inner
        place.add_command(_command(verb))


_groups()
for _extra in (_watch_command(), _report_command(), _render_command()):
    program.add_command(_extra)

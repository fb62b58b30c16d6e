"""The terminal's front end: a command for each verb, a flag or argument for each of its options."""

import collections.abc
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import sys
import typing

import click
import cloup

import ddp
from ddp.actions import verbs
from ddp.options import config, declared, fields, models
from ddp.problem import ParameterError, Problem, one_line
from ddp.results.result import SCHEMA, Result, texts_of, values_of
from ddp.settings import Settings
from ddp.view import screen

OK, FAILED, USAGE = 0, 1, 2
_CONTEXT: dict[str, typing.Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 120,
    "formatter_settings": cloup.HelpFormatter.settings(col1_max_width=36, col2_min_width=40),
}
# Variables that set options of sbatch, and so ours (sbatch(1), input environment variables)
_SBATCH = {
    "account": "SBATCH_ACCOUNT",
    "constraint": "SBATCH_CONSTRAINT",
    "gpus-per-node": "SBATCH_GPUS_PER_NODE",
    "mem-per-cpu": "SBATCH_MEM_PER_CPU",
    "memory": "SBATCH_MEM_PER_NODE",
    "partition": "SBATCH_PARTITION",
    "qos": "SBATCH_QOS",
    "reservation": "SBATCH_RESERVATION",
    "time-limit": "SBATCH_TIMELIMIT",
}
_GROUP_HELP = {
    "env": "Make, list and remove environments of packages.",
    "image": "Import container images.",
    "user": "Let people use Slurm's accounts.",
}
_GROUPS = (
    "",
    "Sweep",
    "Resources",
    "Code and environment",
    "Running",
    "Faults",
    "Slurm",
    "Kubernetes",
)


@dataclasses.dataclass(frozen=True)
class Session:
    """The flags before the verb."""

    flags: dict[str, object]
    is_json: bool


@cloup.group(context_settings=_CONTEXT, invoke_without_command=True)
@cloup.option(
    "--json", "is_json", is_flag=True, help="Write results as one JSON object, for programs."
)
@cloup.option(
    "--workspace",
    metavar="FOLDER",
    help="Folder on the shared filesystem. [default: the configuration's]",
)
@cloup.option(
    "--node-cache",
    metavar="FOLDER",
    help="Folder on each node's own disk for unpacked environments. [default: the configuration's]",
)
@cloup.version_option(ddp.__version__, prog_name="ddp", message="%(prog)s %(version)s")
@click.pass_context
def program(
    context: click.Context, *, is_json: bool, workspace: str | None, node_cache: str | None
) -> None:
    """Distributed PyTorch training on Slurm, under your own account.

    Settings come from /etc/slurm-ddp.toml, ~/.config/slurm-ddp.toml, DDP_* variables and flags;
    later ones win.
    """
    context.obj = Session({"workspace": workspace, "node-cache": node_cache}, is_json)
    if context.invoked_subcommand is None:
        click.echo(_introduction())


def _introduction() -> str:
    """List the commands of every day, for someone who types `ddp` alone."""
    lines = ["The commands of every day:", ""]
    for verb in verbs.ALL.values():
        if verb.section == "Every day":
            command = f"ddp {verb.name}"
            lines.append(f"  {command:12}{_summary(verb)}")

    lines += ["", "All commands: ddp --help. Options of one: ddp submit --help."]
    return "\n".join(lines)


def main() -> typing.NoReturn:
    """Run the command line, and exit without waiting for threads that a filesystem blocks."""
    os.umask(0o022)
    if sys.argv[1:] == ["serve"]:  # for the charm
        from ddp import service  # noqa: PLC0415 - a user's command starts without it

        service.main()

    code = _run_program()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run_program() -> int:
    """Run the command that was typed, write any mistake in it, and return the exit status."""
    try:
        found = program.main(prog_name="ddp", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("ddp: interrupted; a submitted job goes on, see: ddp list", err=True)
        return FAILED
    except click.exceptions.NoArgsIsHelpError as e:  # a group of commands alone
        click.echo(e.message, err=True)
        return USAGE
    except click.UsageError as e:
        where = e.ctx.command_path if e.ctx is not None else "ddp"
        click.echo(f"{where}: {_mistake(e)} see: {where} --help", err=True)
        return USAGE
    except click.ClickException as e:
        click.echo(f"ddp: {one_line(e.format_message())}", err=True)
        return FAILED
    except SystemExit as e:
        # From click: it completes a word, or the reader of the output, such as head, has enough
        is_completion = "_DDP_COMPLETE" in os.environ
        return e.code if is_completion and isinstance(e.code, int) else OK
    return found if isinstance(found, int) else OK


def _mistake(e: click.UsageError) -> str:
    """Return click's message in our form, with the mark that ends it."""
    text = one_line(e.format_message()).rstrip(".").replace(". Did you mean", "; did you mean")
    if isinstance(e, click.NoSuchOption):
        text = f"no option {e.option_name}"
        if e.possibilities:  # the first one is the most similar
            text += f"; did you mean {e.possibilities[0]}?"
        text = one_line(text)

    text = text[:1].lower() + text[1:]
    return text if text.endswith("?") else f"{text};"


def read_settings(session: Session) -> Settings:
    """Read the configuration and the flags. Raises click.UsageError."""
    try:
        return config.settings(config.load(session.flags))
    except ParameterError as e:
        raise click.UsageError(str(e)) from e


def settings_of(session: Session) -> Settings:
    """Read the settings of an account that submits jobs. Raises click.UsageError, also for root."""
    found = read_settings(session)
    if found.workspace.uid == 0:
        raise click.UsageError("jobs never run as root; log in to an ordinary account: su - NAME")
    return found


def perform(
    session: Session,
    verb: verbs.Verb,
    given: collections.abc.Mapping[str, object],
    arguments: tuple[str, ...] = (),
) -> int:
    """Perform a verb with the flags that click parsed, and return the exit status."""
    from ddp.host import files  # noqa: PLC0415 - `ddp --help` starts without them
    from slurm_ddp import commands  # noqa: PLC0415

    params = _parse(session, verb, given, arguments)
    to = screen.Screen(is_json=session.is_json)
    try:
        if text := _help_of_workload(params, arguments):
            click.echo(text)
            return OK
        settings = read_settings(session) if verb.is_operators else settings_of(session)
        answer = verb.do_when_ready(settings, params, to.log)
        if answer is not None:  # else it was shown as it went on
            _write(session, to, verb, answer)
    except Problem as e:
        to.fail(_as_flag(verb, e), e.results)
    except (files.RefusedError, commands.CommandError) as e:
        to.fail(str(e), {})
    else:
        return OK
    finally:
        to.close()
    return FAILED


def _help_of_workload(params: fields.Parsed, arguments: tuple[str, ...]) -> str:
    """Return the help of the workload that `ddp submit gpt --help` asks for, or ""."""
    asks_for_help = "-h" in arguments or "--help" in arguments
    if not asks_for_help or not isinstance(params, models.Training):
        return ""
    from ddp.submit import payload_arguments  # noqa: PLC0415 - the other commands start without it

    return payload_arguments.help_of(config.payload(), params.workload, arguments) or ""


def _write(session: Session, to: screen.Screen, verb: verbs.Verb, answer: verbs.Answer) -> None:
    """Write the thing asked for on standard output, and its headers on standard error."""
    texts = texts_of(answer)
    to.close()
    if session.is_json:
        record = {"schema": SCHEMA, **values_of(texts)}
        if isinstance(answer, Result):
            record = answer.record()
        click.echo(json.dumps(record, indent=1))
        return

    shown = {name: text for name, text in texts.items() if name not in verb.hidden}
    if not isinstance(answer, Result) or answer.text is None:
        to.show(shown)
        return

    for name, text in shown.items():
        if text != answer.text:
            to.log(f"{name}: {text}")
    if answer.text:
        click.echo(answer.text.removesuffix("\n"))


# -- options as they are typed ---------------------------------------------------------------------


def _parse(
    session: Session,
    verb: verbs.Verb,
    given: collections.abc.Mapping[str, object],
    arguments: tuple[str, ...],
) -> fields.Parsed:
    """Parse a verb's options. Raises click.UsageError."""
    options = declared.options(verb.options)
    given, secrets = _without_secrets(verb, given)
    values = _values(options, given)
    context: dict[str, object] = {"is_json": session.is_json, "secrets": secrets}
    try:
        if "workload" in values:
            values, arguments, facts = _unwrap(values, arguments)
            context |= facts
        if "workload" in values or issubclass(verb.options, models.Session):
            context |= _place(context.get("active"))
        values, odd_paths = _resolve_paths(options, values)
        params = fields.parse(verb.options, values)
    except ParameterError as e:
        raise click.UsageError(_as_flag(verb, e)) from e

    context |= odd_paths
    context["arguments"] = arguments
    known = type(params).model_fields
    update = {name: value for name, value in context.items() if name in known and value}
    return params.model_copy(update=update)


def _without_secrets(
    verb: verbs.Verb, given: collections.abc.Mapping[str, object]
) -> tuple[collections.abc.Mapping[str, object], dict[str, str]]:
    """Take the names of exported secrets out of --env, whose words stand in the job's script.

    Returns the options without them, and the secrets with their values.
    """
    if "secrets" not in verb.options.model_fields:
        return given, {}
    words = typing.cast("tuple[str, ...]", given.get("env") or ())
    names = [word for word in words if fields.is_secret(word) and word in os.environ]
    secrets = {name: os.environ[name] for name in names}
    shown = tuple(word for word in words if word not in secrets)
    return {**given, "env": shown}, secrets


def _values(
    options: collections.abc.Iterable[declared.Option], given: collections.abc.Mapping[str, object]
) -> dict[str, object]:
    """Collect the options that have a value: flags, sbatch's variables and terminal defaults."""
    values: dict[str, object] = {}
    for option in options:
        value = given.get(_attribute(option))
        if isinstance(value, tuple):
            value = _joined(option, typing.cast("tuple[str, ...]", value)) or None
        if value is None and option.name in _SBATCH:
            value = os.environ.get(_SBATCH[option.name]) or None
        if value is None:
            value = option.text.terminal
        if value is not None:
            values[option.name] = value
    return values


def _unwrap(
    values: dict[str, object], arguments: tuple[str, ...]
) -> tuple[dict[str, object], tuple[str, ...], dict[str, object]]:
    """Replace a typed launcher by the program that it starts.

    Returns the options, the program's arguments, and facts that only a terminal knows.
    Raises ParameterError.
    """
    # The other commands start without them
    from ddp.submit import commands, own_python  # noqa: PLC0415

    python = own_python.typed(values.get("workload"))
    if python and values.get("python") in (None, "auto"):
        values = values | {"python": python}
    command = commands.unwrap(values, arguments)
    values = command.values
    facts = dict(command.facts)
    if facts.get("is_command"):  # a name is not a path: the model is checked with one in its place
        facts["workload"] = values["workload"]
        values = values | {"workload": "/command"}
    return values, command.arguments, facts


def _place(active: object) -> dict[str, object]:
    """Return the folder here, and the active environment unless a command names one."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = active or os.environ.get(variable)
    return {"typed_in": _here(), "active": active}


def _resolve_paths(
    options: collections.abc.Iterable[declared.Option], values: dict[str, object]
) -> tuple[dict[str, object], dict[str, object]]:
    """Resolve relative paths, and set aside paths with letters outside an action's alphabet.

    A path of this account may have them: the model is checked with another path in its place.
    """
    values = dict(values)
    odd_paths: dict[str, object] = {}
    for option in options:
        is_module_name = option.name == "workload" and bool(values.get("module"))
        if option.name not in values or is_module_name:
            continue
        value = _absolute(option, values[option.name])
        if _is_path(option, value) and _is_odd(value):
            odd_paths[_attribute(option)] = value
            value = "/path"
        values[option.name] = value
    return values, odd_paths


def _attribute(option: declared.Option) -> str:
    return option.name.replace("-", "_")


def _is_path(option: declared.Option, value: object) -> bool:
    return option.text.is_path or (option.text.may_be_path and str(value).startswith("/"))


def _joined(option: declared.Option, words: tuple[str, ...]) -> str:
    """Join the words of a repeated option. A variable without a value gets its value from here."""
    if option.name != "env":
        return option.text.separator.join(words)
    variables: list[str] = []
    for word in words:
        is_exported = word in os.environ
        variables.append(f"{word}={os.environ[word]}" if is_exported else word)
    return shlex.join(variables)


def _absolute(option: declared.Option, value: object) -> object:
    """Resolve a relative path against the current folder."""
    if not isinstance(value, str) or value in ("", *option.text.words) or value.startswith("/"):
        return value
    is_marked = value.startswith(("./", "../"))
    if not option.text.is_path and not (option.text.may_be_path and is_marked):
        return value
    path = pathlib.Path(_here()) / value
    if ".." in path.parent.parts:
        path = path.parent.resolve() / path.name  # a link keeps its own name
    return str(path)


def _is_odd(path: object) -> bool:
    """Return whether a path has blanks or unusual letters, but nothing that a terminal obeys."""
    if not isinstance(path, str) or not path.isprintable():
        return False
    return re.search(r"[^A-Za-z0-9._/+@=-]", path) is not None


def _here() -> str:
    try:
        return str(pathlib.Path.cwd())
    except FileNotFoundError:
        raise click.UsageError("the current folder was removed; change to another one") from None


def _as_flag(verb: verbs.Verb, e: Problem) -> str:
    """Format an error with its option as it is typed in a terminal."""
    flags = {option.name for option in declared.options(verb.options) if not option.text.argument}
    is_of_flag = isinstance(e, ParameterError) and e.name in flags
    return f"--{e}" if is_of_flag else str(e)


# -- commands --------------------------------------------------------------------------------------


def _command(verb: verbs.Verb) -> click.Command:
    @click.pass_context
    def run(context: click.Context, /, **given: object) -> None:
        session = typing.cast(Session, context.obj)
        is_json = bool(given.pop("is_json")) or session.is_json
        session = dataclasses.replace(session, is_json=is_json)
        arguments = typing.cast("tuple[str, ...]", given.pop("arguments", ()))
        context.exit(perform(session, verb, given, arguments))

    takes_workload = "workload" in verb.options.model_fields
    settings = {**_CONTEXT, "allow_interspersed_args": not takes_workload}
    examples = "\n".join(("\b", "Examples:", *(f"  {example}" for example in verb.examples)))
    return cloup.Command(
        verb.name.split()[-1],
        context_settings=settings,
        callback=run,
        params=_parameters(verb),
        help=verb.help,
        short_help=_summary(verb),
        epilog=examples if verb.examples else None,
    )


def _parameters(verb: verbs.Verb) -> list[click.Parameter]:
    """Make the flags and arguments of a verb, by group."""
    options = sorted(declared.options(verb.options), key=lambda one: _GROUPS.index(one.text.group))
    groups: dict[str, cloup.OptionGroup] = {}
    parameters: list[click.Parameter] = []
    for option in options:
        if option.text.argument:
            parameters.append(_argument(option))
            continue
        name = option.text.group
        if name not in groups:
            groups[name] = cloup.OptionGroup(name or "Options")
        parameters.append(_flag(option, groups[name]))

    if (rest := arguments_of(verb)) is not None:
        parameters.append(rest)
    as_json = "Write results as one JSON object."
    parameters.append(cloup.Option(["--json", "is_json"], is_flag=True, help=as_json))
    return parameters


def arguments_of(verb: verbs.Verb) -> cloup.Argument | None:
    """Return the argument for the words that follow the others, if the verb takes any."""
    if "arguments" not in verb.options.model_fields:
        return None
    metavar = "[PATH]..."
    text = "Files and folders to copy, relative to the folder that the run started in."
    if "workload" in verb.options.model_fields:
        metavar = "[ARGUMENTS]..."
        text = "Options and arguments of the workload; ddp submit gpt --help lists gpt's."
    return cloup.Argument(
        ["arguments"], nargs=-1, type=click.UNPROCESSED, metavar=metavar, help=text
    )


def _summary(verb: verbs.Verb) -> str:
    return re.split(r"[.:;]", verb.help)[0]


def _argument(option: declared.Option) -> click.Argument:
    return cloup.Argument(
        [_attribute(option)],
        type=click.STRING,
        metavar=option.text.argument,
        help=_help(option),
        required=option.is_required,
        nargs=-1 if option.text.many else 1,
    )


def _flag(option: declared.Option, group: cloup.OptionGroup) -> click.Option:
    """Make the flag of an option; without it the model's default counts."""
    flag = f"--{option.name}"
    if option.default is True:
        flag += f"/--no-{option.name}"
    names = [flag]
    if option.text.short:
        names.append(option.text.short)

    given: dict[str, typing.Any] = {"help": _help(option), "group": group}
    if option.kind == "boolean":
        return cloup.Option(names, is_flag=True, default=None, **given)
    if option.choices:
        given["type"] = click.Choice(option.choices)
    elif option.kind == "integer":
        given |= {"type": click.INT, "metavar": "N"}
    else:
        given["metavar"] = "TEXT"
    return cloup.Option(names, multiple=option.text.many, required=option.is_required, **given)


def _help(option: declared.Option) -> str:
    """Return an option's help with its default."""
    default = option.shown_default
    if option.default is True:  # the flag is the one that switches it off
        default = ""
    default = option.text.terminal or default
    return f"{option.text.help} [default: {default}]" if default else option.text.help


def _add_commands() -> None:
    """Add a command for each verb, below its section; the verbs of two words share a group."""
    sections: dict[str, cloup.Section] = {}
    for verb in verbs.ALL.values():
        section = sections.setdefault(verb.section, cloup.Section(verb.section))
        outer = verb.name.rpartition(" ")[0]
        if outer:
            _group(outer, section).add_command(_command(verb))
        else:
            program.add_command(_command(verb), section=section)


def _group(name: str, section: cloup.Section) -> cloup.Group:
    """Return the group of a verb's first word; make it for the first of its verbs."""
    known = program.commands.get(name)
    if isinstance(known, cloup.Group):
        return known
    group = cloup.Group(name, help=_GROUP_HELP[name])
    group.context_settings = _CONTEXT
    program.add_command(group, section=section)
    return group


_add_commands()

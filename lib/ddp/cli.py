"""The terminal's front end: a command for each verb, with a flag or an argument for each of its options."""

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
from ddp.options import config, declared, fields
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
_SBATCH = (
    "account",
    "partition",
    "qos",
    "reservation",
)  # that SBATCH_ACCOUNT and the like set (sbatch(1))
_GROUP_HELP = {
    "env": "Make, list and remove environments of packages.",
    "image": "Import container images.",
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
@cloup.version_option(ddp.__version__, prog_name="ddp", message="%(prog)s %(version)s")
@click.pass_context
def program(context: click.Context, *, is_json: bool, workspace: str | None) -> None:
    """Distributed PyTorch training on Slurm, under your own account.

    Settings come from /etc/slurm-ddp.toml, ~/.config/slurm-ddp.toml, DDP_* variables and flags; later ones win.
    """
    context.obj = Session({"workspace": workspace}, is_json)
    if context.invoked_subcommand is None:
        daily = (
            (f"ddp {verb.name}", _summary(verb))
            for verb in verbs.ALL.values()
            if verb.section == "Every day"
        )
        lines = "\n".join(f"  {command:12}{summary}" for command, summary in daily)
        click.echo(
            f"The commands of every day:\n\n{lines}\n\nAll commands: ddp --help. Options of one: ddp submit --help."
        )


def main() -> typing.NoReturn:
    """Run the command line, and exit without waiting for threads that a filesystem blocks."""
    os.umask(0o022)
    code = OK
    try:
        if sys.argv[1:] == ["serve"]:  # the charm, which has no terminal
            from ddp import service  # noqa: PLC0415 - a user's command starts without it

            service.main()
        found = program.main(prog_name="ddp", standalone_mode=False)
        code = found if isinstance(found, int) else OK
    except click.exceptions.Abort:
        click.echo("ddp: interrupted; a submitted job goes on, see: ddp list", err=True)
        code = FAILED
    except click.exceptions.NoArgsIsHelpError as e:  # a group of commands alone
        click.echo(e.message, err=True)
        code = USAGE
    except click.UsageError as e:
        where = e.ctx.command_path if e.ctx is not None else "ddp"
        click.echo(f"{where}: {_mistake(e)} see: {where} --help", err=True)
        code = USAGE
    except click.ClickException as e:
        click.echo(f"ddp: {one_line(e.format_message())}", err=True)
        code = FAILED
    except (
        SystemExit
    ) as e:  # click's: a word is completed, or the reader of the output, such as head, has enough
        code = e.code if "_DDP_COMPLETE" in os.environ and isinstance(e.code, int) else OK
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _mistake(e: click.UsageError) -> str:
    """Return click's message in the form of ours, with what separates it from the next."""
    text = one_line(e.format_message()).rstrip(".").replace(". Did you mean", "; did you mean")
    if isinstance(e, click.NoSuchOption):  # the first possibility is the most similar one
        meant = "".join(f"; did you mean {name}?" for name in (e.possibilities or ())[:1])
        text = one_line(f"no option {e.option_name}{meant}")
    return text[:1].lower() + text[1:] + ("" if text.endswith("?") else ";")


def settings_of(session: Session) -> Settings:
    """Read the configuration and the flags. Raises click.UsageError if they are invalid, or for root."""
    try:
        found = config.settings(config.load(session.flags))
    except ParameterError as e:
        raise click.UsageError(str(e)) from e
    if found.uid == 0:
        raise click.UsageError("jobs never run as root; log in to an ordinary account: su - NAME")
    return found


def perform(
    session: Session,
    verb: verbs.Verb,
    given: collections.abc.Mapping[str, object],
    arguments: tuple[str, ...] = (),
) -> int:
    """Do a verb with flags as click parsed them; return the exit status."""
    from ddp.host import files  # noqa: PLC0415 - `ddp --help` starts without them
    from slurm_ddp import commands  # noqa: PLC0415

    params = _parsed(session, verb, given, arguments)
    to = screen.Screen(is_json=session.is_json)
    try:
        if not {"-h", "--help"}.isdisjoint(arguments) and "workload" in verb.options.model_fields:
            from ddp.submit import precheck  # noqa: PLC0415

            if text := precheck.help_of(
                config.payload(), str(getattr(params, "workload", "")), arguments
            ):
                click.echo(text)
                return OK
        answer = verb.do_when_ready(settings_of(session), params, to.log)
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


def _write(session: Session, to: screen.Screen, verb: verbs.Verb, answer: verbs.Answer) -> None:
    """Write the thing asked for on standard output, and its headers on standard error."""
    texts = texts_of(answer)
    to.close()
    if session.is_json:
        record = (
            answer.record()
            if isinstance(answer, Result)
            else {"schema": SCHEMA, **values_of(texts)}
        )
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


def _parsed(
    session: Session,
    verb: verbs.Verb,
    given: collections.abc.Mapping[str, object],
    arguments: tuple[str, ...],
) -> fields.Parsed:
    """Parse a verb's options. Raises click.UsageError."""
    values: dict[str, object] = {}
    more: dict[str, object] = {"is_json": session.is_json}
    options = declared.options(verb.options)
    for option in options:
        value = given.get(option.name.replace("-", "_"))
        if option.name == "env" and "secrets" in verb.options.model_fields:
            words = typing.cast("tuple[str, ...]", value or ())
            hidden = [word for word in words if fields.is_secret(word) and word in os.environ]
            more["secrets"] = {word: os.environ[word] for word in hidden}
            value = tuple(word for word in words if word not in hidden)
        if isinstance(value, tuple):
            value = _joined(option, typing.cast("tuple[str, ...]", value)) or None
        if value is None and option.name in _SBATCH:
            value = os.environ.get(f"SBATCH_{option.name.upper()}") or None
        value = option.text.terminal if value is None else value
        if value is not None:
            values[option.name] = value
    try:
        if "workload" in values:
            from ddp.submit import typed  # noqa: PLC0415 - the other commands start without it

            values, arguments = typed.unwrap(values, arguments)
            active = (
                values.pop("active", None)
                or os.environ.get("VIRTUAL_ENV")
                or os.environ.get("CONDA_PREFIX")
            )
            more |= {"ranks": values.pop("ranks", None), "typed_in": _here(), "active": active}
        is_module = bool(values.get("module"))
        for option in (
            one
            for one in options
            if one.name in values and not (is_module and one.name == "workload")
        ):
            value = _absolute(option, values[option.name])
            may_be_odd = option.text.is_path or (
                option.text.may_be_path and str(value).startswith("/")
            )
            if may_be_odd and _is_odd(
                value
            ):  # a path of this account's; an action's is held to an alphabet
                more[option.name.replace("-", "_")], value = value, "/path"
            values[option.name] = value
        params = fields.parse(verb.options, values)
    except ParameterError as e:
        raise click.UsageError(_as_flag(verb, e)) from e
    known = type(params).model_fields
    more["arguments"] = arguments
    return params.model_copy(
        update={name: value for name, value in more.items() if name in known and value}
    )


def _joined(option: declared.Option, words: tuple[str, ...]) -> str:
    """Join the words of a repeated option. A variable without a value gets the one that it has here."""
    if option.name != "env":
        return option.text.separator.join(words)
    return shlex.join(
        f"{word}={os.environ[word]}" if word in os.environ else word for word in words
    )


def _absolute(option: declared.Option, value: object) -> object:
    """Resolve a relative path against the current folder."""
    if not isinstance(value, str) or value in ("", *option.text.words) or value[0] == "/":
        return value
    if not option.text.is_path and not (
        option.text.may_be_path and value.startswith(("./", "../"))
    ):
        return value
    path = pathlib.Path(_here()) / value
    return str(
        path.parent.resolve() / path.name if ".." in path.parent.parts else path
    )  # a link's own name stays


def _is_odd(path: object) -> bool:
    """Return whether a path has blanks or letters that few others have, but nothing that a terminal would obey."""
    return (
        isinstance(path, str)
        and path.isprintable()
        and re.search(r"[^A-Za-z0-9._/+@=-]", path) is not None
    )


def _here() -> str:
    try:
        return str(pathlib.Path.cwd())
    except FileNotFoundError:
        raise click.UsageError("the current folder was removed; change to another one") from None


def _as_flag(verb: verbs.Verb, e: Problem) -> str:
    """Format an error, with its option as a terminal's user types it."""
    named = {option.name for option in declared.options(verb.options) if not option.text.argument}
    return f"--{e}" if isinstance(e, ParameterError) and e.name in named else str(e)


def _command(verb: verbs.Verb) -> click.Command:
    groups: dict[str, cloup.OptionGroup] = {}
    parameters: list[click.Parameter] = []
    for option in sorted(
        declared.options(verb.options), key=lambda option: _GROUPS.index(option.text.group)
    ):
        group = groups.setdefault(
            option.text.group, cloup.OptionGroup(option.text.group or "Options")
        )
        parameters.append(_argument(option) if option.text.argument else _flag(option, group))
    as_json = cloup.Option(
        ["--json", "is_json"], is_flag=True, help="Write results as one JSON object."
    )
    parameters += filter(None, (arguments_of(verb), as_json))

    @click.pass_context
    def run(context: click.Context, /, **given: object) -> None:
        session = typing.cast(Session, context.obj)
        session = dataclasses.replace(
            session, is_json=bool(given.pop("is_json")) or session.is_json
        )
        context.exit(
            perform(
                session, verb, given, typing.cast("tuple[str, ...]", given.pop("arguments", ()))
            )
        )

    examples = "\n".join(("\b", "Examples:", *(f"  {example}" for example in verb.examples)))
    return cloup.Command(
        verb.name.split()[-1],
        context_settings={
            **_CONTEXT,
            "allow_interspersed_args": "workload" not in verb.options.model_fields,
        },
        callback=run,
        params=parameters,
        help=verb.help,
        short_help=_summary(verb),
        epilog=examples if verb.examples else None,
    )


def arguments_of(verb: verbs.Verb) -> cloup.Argument | None:
    """Make the argument for the words that follow the others, if any: a workload's own, or paths."""
    metavar, text = (
        "[PATH]...",
        "Files and folders to copy, relative to the folder that the run started in.",
    )
    if "workload" in verb.options.model_fields:
        metavar, text = (
            "[ARGUMENTS]...",
            "Options and arguments of the workload; ddp submit gpt --help lists gpt's.",
        )
    made = cloup.Argument(
        ["arguments"], nargs=-1, type=click.UNPROCESSED, metavar=metavar, help=text
    )
    return made if "arguments" in verb.options.model_fields else None


def _summary(verb: verbs.Verb) -> str:
    return re.split(r"[.:;]", verb.help)[0]


def _argument(option: declared.Option) -> click.Argument:
    given: dict[str, typing.Any] = {"metavar": option.text.argument, "help": _with_default(option)}
    given |= {"required": option.is_required, "nargs": -1 if option.text.many else 1}
    return cloup.Argument([option.name.replace("-", "_")], type=click.STRING, **given)


def _flag(option: declared.Option, group: cloup.OptionGroup) -> click.Option:
    """Make the flag of an option; without it the model's default counts."""
    names = [f"--{option.name}", *((option.text.short,) if option.text.short else ())]
    given: dict[str, typing.Any] = {"help": _with_default(option), "group": group}
    if option.kind == "boolean":
        names[0] += f"/--no-{option.name}" if option.default else ""
        return cloup.Option(names, is_flag=True, default=None, **given)
    if option.choices:
        given["type"] = click.Choice(option.choices)
    else:
        given |= (
            {"type": click.INT, "metavar": "N"} if option.kind == "integer" else {"metavar": "TEXT"}
        )
    return cloup.Option(names, multiple=option.text.many, required=option.is_required, **given)


def _with_default(option: declared.Option) -> str:
    default = option.text.terminal or ("" if option.default is True else option.shown_default)
    return f"{option.text.help} [default: {default}]" if default else option.text.help


def _add_commands() -> None:
    """Add a command for each verb, below its section; the verbs of two words share a group."""
    sections: dict[str, cloup.Section] = {}
    for verb in verbs.ALL.values():
        *outer, _ = verb.name.split()
        section = sections.setdefault(verb.section, cloup.Section(verb.section))
        group = program
        if outer:
            known = program.commands.get(outer[0])
            group = (
                known
                if isinstance(known, cloup.Group)
                else cloup.Group(outer[0], help=_GROUP_HELP[outer[0]])
            )
            if known is None:
                group.context_settings = _CONTEXT
                program.add_command(group, section=section)
            group.add_command(_command(verb))
        else:
            program.add_command(_command(verb), section=section)


_add_commands()

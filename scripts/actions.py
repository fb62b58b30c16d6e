"""Copy lib/ddp's options to charms/ddp-trainer/charmcraft.yaml and docs/reference/ddp.md.

`tox -e reference` runs it.
"""

import pathlib
import sys
import textwrap
import typing

import click
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "lib")]

from ddp import cli  # noqa: E402
from ddp.actions import verbs  # noqa: E402
from ddp.options import declared  # noqa: E402
from scripts import reference  # noqa: E402

CHARM = ROOT / "charms" / "ddp-trainer" / "charmcraft.yaml"
PAGE = ROOT / "docs" / "reference" / "ddp.md"
_COLUMNS = ["option", "value", "default", "meaning"]
_BEGIN, _END = "actions:", "\nparts:\n"
_HEAD = """\
<!-- Written by scripts/actions.py from lib/ddp: change that one. -->
# ddp

How to use it: [submit, follow and stop a job](../howto/submit.md). In `submit`, `sweep` and `render` options go before
the script: what follows its name is the script's. `ddp COMMAND --help` shows the same as this page.

Exit status: 0 done; 1 failed, with one line on standard error; 2 usage: an option, an argument or a configuration file
is wrong.

Standard output carries the thing asked for; progress and headers go to standard error. With `--json` standard output is
one object: `"schema": 1`, the results with numbers as numbers, times as ISO 8601 and tables as lists of objects, and
`"error"` with one line if it failed. `ddp watch --json` writes one object on each change. A later release may add keys;
the schema's number grows when a key goes or changes its meaning.
"""


class _Inline(list[object]):
    """A list that is written on one line."""


yaml.SafeDumper.add_representer(
    _Inline,
    lambda dumper, value: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", value, flow_style=True
    ),
)


def actions() -> str:
    """Render the section `actions` of charmcraft.yaml."""
    section = {name: _action(verb) for name, verb in verbs.ACTIONS.items()}
    lines = yaml.safe_dump(section, sort_keys=False, width=118)
    head = f"{_BEGIN}  # written by scripts/actions.py from lib/ddp: change that\n"
    return head + textwrap.indent(lines, "  ")


def _action(verb: verbs.Verb) -> dict[str, object]:
    params: dict[str, object] = {}
    for option in declared.options(verb.options):
        if option.text.only_terminal:
            continue
        schema: dict[str, object] = {}
        for key, value in option.schema().items():
            is_list = isinstance(value, list)
            schema[key] = _Inline(typing.cast("list[object]", value)) if is_list else value
        params[option.name] = schema

    action: dict[str, object] = {
        "parallel": True,  # each waits, only reads, or asks Slurm: none needs the machine
        "description": verb.help,
        "params": params,
    }
    required = _required(verb)
    if required:
        action["required"] = _Inline(required)
    action["additionalProperties"] = False
    return action


def _required(verb: verbs.Verb) -> list[str]:
    return [option.name for option in declared.options(verb.options) if option.is_required]


def updated(text: str) -> str:
    """Replace the actions in charmcraft.yaml."""
    begin, end = text.index(f"\n{_BEGIN}") + 1, text.index(_END)
    return text[:begin] + actions() + text[end:]


def page() -> str:
    """Render the reference page of the command line, in Markdown."""
    lines = [
        _HEAD,
        "## Before every command",
        *reference.table("", _COLUMNS, list(map(_flag_row, cli.program.params))),
    ]
    submit = {option.name for option in declared.options(verbs.ALL["submit"].options)}
    for verb in sorted(verbs.ALL.values(), key=lambda verb: verb.name):
        lines += _section(verb, submit)
    return "\n".join(lines) + "\n"


def _section(verb: verbs.Verb, submit: set[str]) -> list[str]:
    """Render a command; `render` shows only the options that `submit` lacks."""
    options = declared.options(verb.options)
    arguments = [option.text.argument for option in options if option.text.argument]
    last = cli.arguments_of(verb)
    if last:
        arguments.append(str(last.metavar))

    usage = " ".join(("ddp", verb.name, "[OPTIONS]", *arguments))
    lines = ["", f"## ddp {verb.name}", "", f"`{usage}`", ""]
    lines += textwrap.wrap(verb.help, 120, break_on_hyphens=False)
    if verb.action:
        lines += ["", f"The charm's action `{verb.action}` does the same."]
    if verb.examples:
        lines += ["", "```bash", *verb.examples, "```"]
    if verb.name == "render":
        lines += ["", "Takes the options of [submit](#ddp-submit), and:"]
        options = tuple(option for option in options if option.name not in submit)

    rows = [_row(option) for option in options]
    if last:
        rows.append([_code(str(last.metavar)), "text", "", reference.cell(last.help or "")])
    return [*lines, *reference.table("", _COLUMNS, rows)]


def _flag_row(parameter: click.Parameter) -> list[str]:
    assert isinstance(parameter, click.Option)
    return [_code(*parameter.opts), "" if parameter.is_flag else "text", "", parameter.help or ""]


def _row(option: declared.Option) -> list[str]:
    flags = [option.text.argument or f"--{option.name}"]
    if option.text.short:
        flags.append(option.text.short)
    if option.default is True:
        flags.append(f"--no-{option.name}")
    names = reference.cell(_code(*flags))
    return [names, _kind(option), _default(option), reference.cell(option.text.help)]


def _kind(option: declared.Option) -> str:
    if option.choices:
        return ", ".join(_code(choice) for choice in option.choices)
    kinds = {"boolean": "", "integer": f"{option.minimum} to {option.maximum}", "string": "text"}
    return kinds[option.kind]


def _default(option: declared.Option) -> str:
    if option.is_required:
        return "required"
    if option.text.default:
        return option.text.default
    return _code(option.shown_default) if option.shown_default else ""


def _code(*words: str) -> str:
    return " ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    CHARM.write_text(updated(CHARM.read_text()))
    PAGE.write_text(page())

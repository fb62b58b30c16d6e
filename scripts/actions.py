"""Write what repeats the options of lib/ddp: the actions in charms/ddp-trainer/charmcraft.yaml, docs/reference/ddp.md.

tox -e reference                 write them, and the charms' reference pages
python scripts/actions.py --check        say which are out of date, and exit 1 if one is
"""

import collections.abc
import pathlib
import sys
import textwrap

import click
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "lib"))

from ddp import cli, verbs  # noqa: E402
from ddp.options import declared  # noqa: E402

CHARM = ROOT / "charms" / "ddp-trainer" / "charmcraft.yaml"
PAGE = ROOT / "docs" / "reference" / "ddp.md"
_BEGIN, _END = "actions:", "\nparts:\n"
_HEAD = """\
<!-- Written by scripts/actions.py from lib/ddp: change that one. -->
# ddp

How to use it: [submit, follow and stop a job](../howto/submit.md). In `submit`, `sweep` and `render` options go before the
script: what follows its name is the script's. `ddp COMMAND --help` shows the same as this page.

Exit status: 0 done; 1 it failed, and one line on standard error says why; 2 usage: an option, an argument or a
configuration file is wrong.
"""


def render() -> str:
    """Return the section `actions`."""
    section = {
        name: {
            "parallel": True,  # each waits or only reads, or asks Slurm: none needs the machine for itself
            "description": verb.description,
            "params": {option.name: option.schema() for option in declared.options(verb.params)},
            "additionalProperties": False,
        }
        for name, verb in verbs.ACTIONS.items()
    }
    lines = yaml.safe_dump(section, sort_keys=False, width=118)
    return f"{_BEGIN}  # written by scripts/actions.py from lib/ddp/options: change those\n" + textwrap.indent(
        lines, "  "
    )


def replaced(text: str) -> str:
    """Return charmcraft.yaml with its actions as they should be."""
    begin, end = text.index(f"\n{_BEGIN}") + 1, text.index(_END)
    return text[:begin] + render() + text[end:]


def page() -> str:
    """Return the reference page of the command line, in Markdown."""
    lines = [_HEAD, "## Before every command", *_table(cli.program.params, {})]
    known = {verb.words: verb for verb in verbs.ALL.values()}
    submit = {parameter.name for parameter in cli.program.commands["submit"].params}
    for words, command in _leaves(cli.program, ()):
        verb = known.get(words)
        arguments = [str(p.metavar) for p in command.params if isinstance(p, click.Argument)]
        lines += ["", f"## ddp {' '.join(words)}", "", f"`{' '.join(('ddp', *words, '[OPTIONS]', *arguments))}`", ""]
        lines += textwrap.wrap(" ".join((command.help or "").split()), 120, break_on_hyphens=False)
        if verb is not None and verb.is_action:
            lines += ["", f"The charm's action `{verb.action}` does the same."]
        parameters = command.params
        if words == ("render",):
            lines += ["", "Takes the options of [submit](#ddp-submit) that say what runs and where, and:"]
            parameters = [parameter for parameter in parameters if parameter.name not in submit]
        options = {option.name: option for option in declared.options(verb.params)} if verb is not None else {}
        lines += _table(parameters, options)
    return "\n".join(lines) + "\n"


def _leaves(
    group: click.Group, words: tuple[str, ...]
) -> collections.abc.Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from _leaves(command, (*words, name))
        else:
            yield (*words, name), command


def _table(
    parameters: collections.abc.Sequence[click.Parameter], options: dict[str, declared.Option]
) -> collections.abc.Iterator[str]:
    rows = [_row(p, options) for p in parameters if isinstance(p, click.Option)]
    if rows:
        yield from ("", "| option | value | default | meaning |", "| --- | --- | --- | --- |", *rows)


def _row(parameter: click.Option, options: dict[str, declared.Option]) -> str:
    name = (parameter.name or "").replace("_", "-")
    option = options.get(name)
    flags = " ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
    meaning, default, kind = parameter.help or "", "", "" if parameter.is_flag else "text"
    if option is not None:
        meaning = option.description
        default = "required" if option.is_required else _shown(option.default)
        kind = {"boolean": "", "integer": _range(option), "string": "text"}[option.kind]
        kind = ", ".join(f"`{choice}`" for choice in option.choices) or kind
    elif not parameter.is_flag and isinstance(parameter.default, str):
        default = _shown(parameter.default)
    cells = (flags, kind, default, " ".join(meaning.split()).replace("|", "\\|"))
    return "| " + " | ".join(cells) + " |"


def _shown(value: str | int | bool | None) -> str:
    if value is None or value in ("", False):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _range(option: declared.Option) -> str:
    if option.minimum is not None and option.maximum is not None:
        return f"{option.minimum} to {option.maximum}"
    return f"at least {option.minimum}" if option.minimum is not None else "number"


def main() -> int:
    """Run the command line."""
    is_check = "--check" in sys.argv[1:]
    is_stale = False
    for path, wanted in ((CHARM, replaced(CHARM.read_text())), (PAGE, page())):
        if path.is_file() and path.read_text() == wanted:
            continue
        is_stale = True
        if is_check:
            print(f"{path.relative_to(ROOT)} is out of date; run: tox -e reference")
        else:
            path.write_text(wanted)
    return int(is_stale and is_check)


if __name__ == "__main__":
    sys.exit(main())

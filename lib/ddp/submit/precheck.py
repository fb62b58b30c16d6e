"""Check `args` and a sweep's options with the payload's own parser before anything is written."""

import collections.abc
import difflib
import json
import pathlib
import re

from ddp.problem import ParameterError, Problem
from ddp.settings import Settings
from ddp.slurm import remedies
from ddp.workspace import folders
from slurm_ddp.commands import CommandError, CommandTimeout, run

Choices = collections.abc.Sequence[collections.abc.Mapping[str, str]]
_LIMIT_S = 30.0
_COMMANDS = {
    "gpt": ("train", ("--run-dir", "run", "--data", "data")),
    "smoke": ("smoke", ("--run-dir", "run")),
}
_TAKEN = {"--run-dir": "run", "--data": "dataset"}  # set by submit, and the option for each
_HIDDEN = (
    "run_dir",
    "data",
    "resume",
    "local_files_only",
    "profile",
    "profile_ranks",
    "profile_steps",
)  # in help


def words(kind: str, choice: collections.abc.Mapping[str, str]) -> list[str]:
    """Format a run's options as a command line. A built-in workload's flag takes no value: true is --x, false --no-x.

    The form is --name=value, which argparse, click and absl know, and scripts such as nanoGPT's as the only one.
    """
    flags = {"true": "--", "false": "--no-"} if kind in _COMMANDS else {}
    return [
        f"{flags[value]}{name}" if value in flags else f"--{name}={value}"
        for name, value in choice.items()
    ]


def check(
    settings: Settings,
    kind: str,
    run_name: str,
    args: collections.abc.Sequence[str],
    choices: Choices,
) -> list[str]:
    """Check that the payload accepts `args`, with each of a sweep's `choices` appended. Raises ParameterError."""
    if kind not in _COMMANDS or not (args or choices):
        return []
    flags = {word.partition("=")[0] for word in args} | {
        f"--{name}" for choice in choices for name in choice
    }
    for flag, option in _TAKEN.items():
        if flag in flags:
            raise ParameterError("args", f"{flag} is set by ddp; use the option {option}")
    lines = [[*_COMMANDS[kind][1], *args, *words(kind, choice)] for choice in choices or ({},)]
    answer = _ask(
        settings.payload, kind, folder=str(settings.workspace.runs / run_name), lines=lines
    )
    for number, trouble in enumerate(json.loads(answer)):
        if found := re.match(r"unrecognized arguments: ([^\s=;]+)", trouble or ""):
            known = re.findall(r"--[a-z][\w-]+", _ask(settings.payload, kind, hidden=_HIDDEN))
            meant = "".join(
                f" did you mean {one}?" for one in difflib.get_close_matches(found[1], known, 1)
            )
            what = "has no option" if found[1].startswith("-") else "takes no argument"
            raise Problem(f"{kind} {what} {found[1]};{meant} see: ddp submit {kind} --help")
        if trouble:
            raise ParameterError(f"options of run {number}" if choices else "args", trouble)
    return [
        "args: accepted by the payload"
        + (f", with the options of each of {len(choices)} runs" if choices else "")
    ]


def changes(settings: Settings, run_name: str, args: collections.abc.Sequence[str]) -> list[str]:
    """List the changed settings of a gpt run that goes on, such as lr 0.003 -> 0.001."""
    words = [*_COMMANDS["gpt"][1], *args]
    found: list[str] = json.loads(
        _ask(
            settings.payload, "gpt", folder=str(settings.workspace.runs / run_name), continues=words
        )
    )
    return found


def help_of(payload: pathlib.Path, kind: str, args: collections.abc.Sequence[str]) -> str | None:
    """Return the help of a built-in workload if `args` ask for it, else None."""
    is_asked = kind in _COMMANDS and not {"-h", "--help"}.isdisjoint(args)
    return _ask(payload, kind, hidden=_HIDDEN) if is_asked else None


def _ask(payload: pathlib.Path, kind: str, **about: object) -> str:
    request = json.dumps({"command": _COMMANDS[kind][0], "prog": f"ddp submit {kind}", **about})
    argv = (folders.PYTHON, "-s", "-m", "ddptrain.precheck")
    try:
        return run(*argv, stdin=request, cwd=payload, timeout=_LIMIT_S).stdout
    except CommandTimeout as e:
        text = f"args: {e}; a file that they name is on the shared filesystem"
        raise Problem(text, remedy=remedies.CHECK_FILESYSTEM) from e
    except CommandError as e:
        raise Problem(f"args: the payload could not check them: {e}") from e

"""The arguments of gpt and smoke, checked by the payload's own parser."""

import collections.abc
import difflib
import json
import pathlib
import re

from ddp.options import declared, models
from ddp.problem import ParameterError, Problem
from ddp.slurm import remedies
from ddp.workspace import folders
from slurm_ddp.commands import CommandError, CommandTimeout, run

Choice = collections.abc.Mapping[str, str]  # the options of a sweep's run
Choices = collections.abc.Sequence[Choice]
Words = collections.abc.Sequence[str]
_LIMIT_S = 30.0
_COMMANDS = {
    "gpt": ("train", ("--run-dir", "run", "--data", "data")),
    "smoke": ("smoke", ("--run-dir", "run")),
}
_TAKEN = {"--run-dir": "run", "--data": "dataset"}  # set by submit, and the option for each
_HIDDEN = (  # in the help
    "run_dir",
    "data",
    "resume",
    "local_files_only",
    "profile",
    "profile_ranks",
    "profile_steps",
)


def words(choice: Choice) -> list[str]:
    """Format options for the payload, whose flags take no value: true is --x, false --no-x."""
    flags = {"true": "--", "false": "--no-"}
    written: list[str] = []
    for name, value in choice.items():
        is_flag = value in flags
        written.append(f"{flags[value]}{name}" if is_flag else f"--{name}={value}")
    return written


def check(payload: pathlib.Path, kind: str, folder: str, args: Words, choices: Choices) -> str:
    """Check that the payload accepts `args`, with each of a sweep's `choices` appended.

    Returns the check in words, "" if there is nothing to check. `folder` is the run's. Raises
    ParameterError.
    """
    if not args and not choices:
        return ""
    _refuse_taken(args, choices)

    lines = [[*_COMMANDS[kind][1], *args, *words(choice)] for choice in choices or ({},)]
    troubles: list[str | None] = json.loads(_ask(payload, kind, folder=folder, lines=lines))
    for number, trouble in enumerate(troubles):
        if trouble:
            _refuse_unknown(payload, kind, trouble)
            raise ParameterError(f"options of run {number}" if choices else "args", trouble)

    accepted = "args: accepted by the payload"
    if choices:
        return f"{accepted}, with the options of each of {len(choices)} runs"
    return accepted


def _refuse_taken(args: Words, choices: Choices) -> None:
    """Raise ParameterError if a flag is one that ddp sets itself."""
    flags = {word.partition("=")[0] for word in args}
    for choice in choices:
        flags |= {f"--{name}" for name in choice}
    for flag, option in _TAKEN.items():
        if flag in flags:
            raise ParameterError("args", f"{flag} is set by ddp; use the option {option}")


def _refuse_unknown(payload: pathlib.Path, kind: str, trouble: str) -> None:
    """Raise Problem for an unknown word, with the option that is most like it."""
    found = re.match(r"unrecognized arguments: ([^\s=;]+)", trouble)
    if found is None:
        return
    word = found[1]
    if _is_ours(word):
        raise Problem(f"{kind} has no option {word}; it is one of ddp: type it before {kind}")

    known = re.findall(r"--[a-z][\w-]+", _ask(payload, kind, hidden=_HIDDEN))
    close = difflib.get_close_matches(word, known, 1)
    meant = f" did you mean {close[0]}?" if close else ""
    what = "has no option" if word.startswith("-") else "takes no argument"
    raise Problem(f"{kind} {what} {word};{meant} see: ddp submit {kind} --help")


def _is_ours(word: str) -> bool:
    """Return whether a word is an option of `ddp submit` or `ddp sweep`."""
    known: set[str] = set()
    for model in (models.SubmitDdp, models.SubmitSweep):
        for option in declared.options(model):
            known |= {f"--{option.name}", option.text.short}
    return word in known - {""}


def changes(payload: pathlib.Path, folder: str, args: Words) -> list[str]:
    """List the changed settings of a gpt run that goes on, such as lr 0.003 -> 0.001."""
    line = [*_COMMANDS["gpt"][1], *args]
    found: list[str] = json.loads(_ask(payload, "gpt", folder=folder, continues=line))
    return found


def settings(payload: pathlib.Path, folder: str, args: Words) -> dict[str, object]:
    """Return the settings of a gpt run that `args`, which were checked, give; None for others."""
    line = [*_COMMANDS["gpt"][1], *args]
    found: dict[str, object] = json.loads(_ask(payload, "gpt", folder=folder, settings=line))
    return found


def help_of(payload: pathlib.Path, kind: str, args: Words) -> str | None:
    """Return the help of a built-in workload, or None if `args` do not ask for it."""
    is_asked = kind in _COMMANDS and not {"-h", "--help"}.isdisjoint(args)
    return _ask(payload, kind, hidden=_HIDDEN) if is_asked else None


def _ask(payload: pathlib.Path, kind: str, **about: object) -> str:
    request = json.dumps({"command": _COMMANDS[kind][0], "prog": f"ddp submit {kind}", **about})
    argv = (folders.PYTHON, "-s", "-m", "ddptrain.options.command_line")
    try:
        return run(*argv, stdin=request, cwd=payload, timeout=_LIMIT_S).stdout
    except CommandTimeout as e:
        text = f"args: {e}; a file that they name is on the shared filesystem"
        raise Problem(text, remedy=remedies.CHECK_FILESYSTEM) from e
    except CommandError as e:
        raise Problem(f"args: the payload could not check them: {e}") from e

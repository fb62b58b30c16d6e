"""Check a command line before its job waits in a queue, without torch, numpy or the data."""

import collections.abc
import contextlib
import io
import json
import os
import pathlib
import sys

from ddptrain.ground import errors
from ddptrain.model_folder import judge
from ddptrain.options import config, flags, recipe, smoke_options

_COMMANDS = {
    "train": (config.add_arguments, config.check),
    "smoke": (smoke_options.add_arguments, smoke_options.check),
}


def parser_of(command: str, prog: str, hidden: tuple[str, ...] = ()) -> flags.Parser:
    """Return the parser of a command, named as the user types it; its help leaves out `hidden`."""
    parser = flags.Parser(prog=prog, allow_abbrev=False)
    add_arguments, _ = _COMMANDS[command]
    add_arguments(parser, hidden=hidden)
    return parser


def check(command: str, prog: str, words: collections.abc.Sequence[str]) -> str | None:
    """Return in one line why `python -m ddptrain COMMAND WORDS` would fail at once, or None."""
    parser = parser_of(command, prog)
    _, take = _COMMANDS[command]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # of --help
            settings = take(parser.parse_args(words))
        _check_model(settings)
    except errors.UserError as e:
        return str(e)
    except SystemExit:
        return f"--help is not an option of a run; type: {prog} --help"
    return None


def _check_model(settings: config.Config | smoke_options.Options) -> None:
    """Check the folder of the model that is tuned, if there is one. Raises UserError."""
    if isinstance(settings, config.Config) and settings.model_local_dir is not None:
        judge.check(settings.model_local_dir, settings.tokenizer_local_dir)


def changes(words: collections.abc.Sequence[str]) -> list[str]:
    """Return the settings that a resumed training here changes, in words, with the step."""
    parser = parser_of("train", "train")
    asked = config.check(parser.parse_args(words))
    return [str(change) for change in recipe.announced(pathlib.Path(), asked)]


def settings_of(words: collections.abc.Sequence[str]) -> recipe.Record:
    """Return the settings of a training's command line, None for those that it does not give."""
    return config.as_record(config.check(parser_of("train", "train").parse_args(words)))


def main() -> None:
    """Answer a request on standard input.

    The answer is an error or null for each command line, the changes of a resumed run, the settings
    of a command line, or the help.
    """
    request = json.load(sys.stdin)
    command = request["command"]
    prog = request["prog"]
    if "hidden" in request:
        print(parser_of(command, prog, request["hidden"]).format_help(), end="")
        return
    # The run's folder, where its ranks start; a new run has none yet
    with contextlib.suppress(OSError):
        os.chdir(request["folder"])
    if "continues" in request:
        print(json.dumps(changes(request["continues"])))
        return
    if "settings" in request:
        print(json.dumps(settings_of(request["settings"])))
        return
    print(json.dumps([check(command, prog, words) for words in request["lines"]]))


if __name__ == "__main__":
    main()

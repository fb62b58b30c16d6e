"""The program `ddp` in this process, and its commands."""

import collections.abc
import os
import sys
import typing

import click
import pytest
from click.testing import CliRunner

from ddp import cli


def typed(*words: str) -> "tuple[int, str, str]":
    """Run the program in this process; return exit status, standard output and standard error."""
    ended: list[int] = []

    def leave(code: int) -> typing.NoReturn:
        ended.append(code)
        raise SystemExit(code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ddp", *words])
        patch.setattr(os, "_exit", leave)
        entry = click.Command("entry", callback=cli.main)
        result = CliRunner().invoke(entry, [])
    assert ended == [result.exit_code], result.output
    return result.exit_code, result.stdout, result.stderr


def _commands(
    group: click.Group, *words: str
) -> "collections.abc.Iterator[tuple[tuple[str, ...], click.Command]]":
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, *words, name)
        else:
            yield (*words, name), command


COMMANDS = dict(_commands(cli.program))

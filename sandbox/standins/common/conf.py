"""Slurm's configuration files, through slurmutils as upstream does: comments are lost."""

import collections.abc
import contextlib
import dataclasses
import importlib
import pathlib
import typing

import slurmutils

M = typing.TypeVar("M", bound=slurmutils.Model)


def _validate(instance: object, schema: dict[str, typing.Any]) -> None:
    """Validate as jsonschema does, but without validating the schema, which takes 0.6 s."""
    error = _jsonschema.exceptions.best_match(
        _jsonschema.Draft202012Validator(schema).iter_errors(instance)
    )
    if error is not None:
        raise error


_jsonschema: typing.Any = importlib.import_module("jsonschema")
_model: typing.Any = importlib.import_module("slurmutils.core.base")
_model.validate = _validate


class OptionsRefused(Exception):
    """Options that upstream refuses; `reasons` has the reason of each."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{option}: {reason}" for option, reason in reasons.items()))
        self.reasons = reasons


@dataclasses.dataclass(frozen=True)
class ConfigFile(typing.Generic[M]):
    """A file and its companions: `slurm.conf` comes with `slurm.conf.overrides`."""

    editor: typing.Any  # slurmutils' editor of the model; editors have no common base
    path: pathlib.Path
    owner: str
    mode: int = 0o644

    def load(self) -> M:
        """Return the file's settings."""
        return self.editor.load(self.path)

    def dump(self, model: M) -> None:
        """Replace the file."""
        self.editor.dump(model, self.path, mode=self.mode, user=self.owner, group=self.owner)

    def edit(self) -> contextlib.AbstractContextManager[M]:
        """Yield the settings for changes; the block's end writes them. A missing file is empty."""
        return self.editor.edit(self.path, mode=self.mode, user=self.owner, group=self.owner)

    def beside(self, suffix: str) -> "ConfigFile[M]":
        """Return the file that is called as this one with `.suffix` behind it."""
        return dataclasses.replace(self, path=self.path.with_name(f"{self.path.name}.{suffix}"))

    def all_beside(self) -> collections.abc.Iterator["ConfigFile[M]"]:
        """Yield the existing companions of this file, in the folder's order."""
        for path in self.path.parent.glob(f"{self.path.name}.*"):
            if path.suffix != ".snapshot":
                yield dataclasses.replace(self, path=path)

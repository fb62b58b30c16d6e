"""The verbs of the program: options, function and texts of each, as verbs.toml declares them."""

import collections.abc
import dataclasses
import importlib
import pathlib
import typing

from ddp.node import spec
from ddp.options import fields, models
from ddp.problem import Problem, UnfinishedError
from ddp.results.progress import Log, ahead
from ddp.results.result import Answer
from ddp.settings import Settings
from slurm_ddp import backports


@dataclasses.dataclass(frozen=True)
class Verb:
    """A command of the program, and the charm's action that does the same."""

    name: str  # as typed behind `ddp`, such as "env create"
    section: str
    options: type[fields.Parsed]
    where: str  # module:function, imported on use: each command starts without the others' code
    help: str
    action: str = ""
    asks_nodes: bool = False
    needs: typing.Literal["slurm", "workspace", "nothing"] = "slurm"
    hidden: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()

    def do(self, settings: Settings, params: fields.Parsed, log: Log) -> Answer | None:
        """Do it, or what can be done within the limit of its wait. Raises Problem."""
        settings.wait.limit_s = getattr(params, "wait_limit", None)
        try:
            return self._function()(settings, params, log)
        except UnfinishedError as e:
            return e.results

    def do_when_ready(self, settings: Settings, params: fields.Parsed, log: Log) -> Answer | None:
        """Do it once what it needs answers; its code is imported in the meantime. Raises Problem."""
        from ddp.actions import readiness  # noqa: PLC0415 - `ddp --help` starts without it

        with settings.workspace.claims, settings.wait:
            if self.needs == "workspace":
                readiness.require_workspace(settings.workspace)
            if self.needs == "slurm":
                imported = ahead(self._function)
                try:
                    readiness.require(settings.workspace, asks_nodes=self.asks_nodes)
                except Problem:
                    if isinstance(
                        params, models.Training
                    ):  # a mistake of the user's comes before Slurm's silence
                        importlib.import_module("ddp.submit.training").check_program(
                            settings, params
                        )
                    raise
                imported.result()
            return self.do(settings, params, log)

    def _function(self) -> collections.abc.Callable[..., Answer | None]:
        module, _, name = self.where.partition(":")
        return typing.cast(
            collections.abc.Callable[..., Answer | None],
            getattr(importlib.import_module(module), name),
        )


ALL: dict[str, Verb] = {
    name: spec.build(Verb, {**entry, "name": name, "options": getattr(models, entry["options"])})
    for name, entry in backports.read_toml(pathlib.Path(__file__).with_suffix(".toml")).items()
}
ACTIONS = {verb.action: verb for verb in ALL.values() if verb.action}

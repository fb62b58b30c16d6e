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
    where: str  # module:function, imported on use: a command starts without the others' code
    help: str
    where_local: str = ""  # the same with the option `local`, which needs no Slurm
    action: str = ""
    asks_nodes: bool = False
    needs: typing.Literal["slurm", "workspace", "nothing"] = "slurm"
    is_operators: bool = False  # the charm does it as root, and root may type it
    hidden: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()

    def do(self, settings: Settings, params: fields.Parsed, log: Log) -> Answer | None:
        """Do it, or as much of it as fits into the limit of its wait. Raises Problem."""
        settings.wait.limit_s = getattr(params, "wait_limit", None)
        try:
            return self._function(params)(settings, params, log)
        except UnfinishedError as e:
            go_on = settings.render(e.remedy)
            log(f"no longer waiting for {e.run}, which goes on; to follow it: {go_on}")
            return {**e.results, "to-follow": go_on}

    def do_when_ready(self, settings: Settings, params: fields.Parsed, log: Log) -> Answer | None:
        """Do it once Slurm and the workspace answer, as far as it needs them. Raises Problem."""
        with settings.workspace.claims, settings.wait:
            self._require(settings, params)
            return self.do(settings, params, log)

    def _require(self, settings: Settings, params: fields.Parsed) -> None:
        """Check that Slurm and the workspace answer while the verb's code is imported.

        Raises Problem.
        """
        from ddp.actions import prerequisites  # noqa: PLC0415 - `ddp --help` starts without it

        if self.needs == "workspace":
            prerequisites.require_workspace(settings.workspace)
        if self.needs != "slurm" or self._is_local(params):
            return
        imported = ahead(lambda: self._function(params))
        try:
            prerequisites.require(settings.workspace, asks_nodes=self.asks_nodes)
        except Problem:
            if isinstance(params, models.Training):  # the user's mistake before Slurm's silence
                training = importlib.import_module("ddp.submit.training")
                training.check_program(settings, params)
            raise
        imported.result()

    def _is_local(self, params: fields.Parsed) -> bool:
        return bool(self.where_local) and isinstance(params, models.SubmitDdp) and params.local

    def _function(self, params: fields.Parsed) -> collections.abc.Callable[..., Answer | None]:
        where = self.where_local if self._is_local(params) else self.where
        module, _, name = where.partition(":")
        function = getattr(importlib.import_module(module), name)
        return typing.cast(collections.abc.Callable[..., Answer | None], function)


def _read() -> dict[str, Verb]:
    found: dict[str, Verb] = {}
    for name, about in backports.read_toml(pathlib.Path(__file__).with_suffix(".toml")).items():
        options = getattr(models, about["options"])
        found[name] = spec.build(Verb, {**about, "name": name, "options": options})
    return found


ALL = _read()
ACTIONS = {verb.action: verb for verb in ALL.values() if verb.action}

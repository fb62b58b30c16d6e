"""What the program can do: the options of each verb, the function that does it, and the action of the same."""

import collections.abc
import dataclasses
import importlib
import typing

from ddp.base import VERBS, Ahead, Log, Results, Settings
from ddp.options import fields, models


@dataclasses.dataclass(frozen=True)
class Verb:
    """What can be asked for: an action of the charm, and the words of the command line that do the same."""

    action: str
    params: type[fields.Parsed]
    where: str  # module:function, imported when it is called: each command starts without the others' code
    description: str
    is_action: bool = True  # of the charm, too
    asks_nodes: bool = False  # whether it begins with a list of the cluster's nodes

    @property
    def words(self) -> tuple[str, ...]:
        """Return the command line's words, such as ("env", "install")."""
        return tuple(VERBS[self.action].split())

    def do(self, settings: Settings, params: fields.Parsed, log: Log) -> Results:
        """Do it. Raises TrainerError."""
        return self._function()(settings, params, log)

    def do_when_ready(self, settings: Settings, params: fields.Parsed, log: Log) -> Results:
        """Do it once Slurm and the workspace answer; its code is imported while they are asked. Raises TrainerError."""
        from ddp import readiness  # noqa: PLC0415 - `ddp --help` is there at once

        with settings.claims:
            imported = Ahead(self._function)
            readiness.require(settings, asks_nodes=self.asks_nodes)
            imported()
            return self.do(settings, params, log)

    def _function(self) -> collections.abc.Callable[..., Results]:
        module, _, name = self.where.partition(":")
        return typing.cast(collections.abc.Callable[..., Results], getattr(importlib.import_module(module), name))


ALL = {
    verb.action: verb
    for verb in (
        Verb(
            "install-environment",
            models.InstallEnvironment,
            "ddp.environment.environments:install_environment",
            "Make the jobs' Python environment and store it in the workspace, unless it is there.",
        ),
        Verb(
            "prepare-dataset",
            models.PrepareDataset,
            "ddp.submit.preparation:prepare_dataset",
            "Turn text into a dataset in the workspace, as a job or an array of them; every byte of the result is "
            "checked, and it is described. Parts that are done already are kept. Reads folders and files: "
            "OpenWebText's raw archives (tar of .xz), JSONL (text, prompt and completion, or messages), plain "
            "text, each also packed as .gz, .xz or .bz2.",
            asks_nodes=True,
        ),
        Verb(
            "submit-ddp",
            fields.SubmitDdp,
            "ddp.submit.training:submit_ddp",
            "Submit a distributed training job. Without parameters a small GPT is trained on Python's own source "
            "code, on all usable nodes of the default partition, with all their GPUs, or on CPUs where there are "
            "none. What the job needs and is not there yet, the environment and the default dataset, is made "
            "first.",
            asks_nodes=True,
        ),
        Verb(
            "submit-sweep",
            fields.SubmitSweep,
            "ddp.submit.sweeps:submit_sweep",
            "Submit one training many times with different options, as an array of jobs. Each is a run of its "
            "own, named after the sweep and its number; show-run run=<sweep> shows all of them.",
            asks_nodes=True,
        ),
        Verb(
            "list-runs",
            models.ListRuns,
            "ddp.actions.list:list_runs",
            "List the runs, the newest first: state, step, losses, rate, nodes, or position in the queue and reason.",
        ),
        Verb(
            "show-run",
            models.ShowRun,
            "ddp.actions.show:show_run",
            "Show a run's state, settings, metrics, best validation loss, checkpoints, attempts and loss curve, or why "
            "it failed; of a sweep, all its runs.",
        ),
        Verb(
            "run-log",
            models.RunLog,
            "ddp.actions.log:run_log",
            "Show the last lines of a run's log.",
        ),
        Verb(
            "compare-runs",
            models.CompareRuns,
            "ddp.actions.compare:compare_runs",
            "Show in which settings runs differ, and their results and losses side by side; of a sweep a line for "
            "each run, with the options that differ and the best marked.",
        ),
        Verb(
            "benchmark-collectives",
            models.BenchmarkCollectives,
            "ddp.measure.collectives:benchmark_collectives",
            "Measure how fast ranks talk over the chosen nodes, as a job: nccl-tests' table, a plot, and the cluster's "
            "baseline in the workspace (baselines/collectives.json), which plan uses and later measurements are "
            "compared with.",
            asks_nodes=True,
        ),
        Verb(
            "plan",
            models.Plan,
            "ddp.measure.plan:plan",
            "Predict a training step before it runs: computation, communication from the cluster's baseline, "
            "tokens per second and efficiency. Submits nothing.",
            asks_nodes=True,
        ),
        Verb(
            "doctor",
            models.Doctor,
            "ddp.doctor.examine:doctor",
            "Examine the nodes in one short job: the shared filesystem, names, routes, ports, clocks, versions, "
            "limits, processors, GPUs and the Python environment. Returns two tables with a line for each node, "
            "and findings with what to type; fails when something would break a run.",
            asks_nodes=True,
        ),
        Verb(
            "resume-run",
            models.ResumeRun,
            "ddp.actions.resume:resume_run",
            "Start a requeued job as soon as there is room; Slurm makes such a job wait two minutes.",
        ),
        Verb(
            "cancel-run",
            models.CancelRun,
            "ddp.actions.cancel:cancel_run",
            "Cancel runs. A training saves a checkpoint first, and is not requeued. A sweep is cancelled with all its "
            "runs, a dataset's preparation with all its jobs.",
        ),
        Verb(
            "create-environment",
            models.CreateEnvironment,
            "ddp.environment.named:create",
            "Make an environment of your own: torch, the payload's packages and yours, for ddp submit --env NAME.",
            is_action=False,
        ),
        Verb(
            "list-environments",
            models.ListEnvironments,
            "ddp.environment.named:list_all",
            "List the environments that your jobs can use, the newest first.",
            is_action=False,
        ),
        Verb(
            "show-environment",
            models.OneEnvironment,
            "ddp.environment.named:show",
            "Show what an environment of yours is made of.",
            is_action=False,
        ),
        Verb(
            "remove-environment",
            models.OneEnvironment,
            "ddp.environment.named:remove",
            "Remove an environment of yours, unless a job uses it.",
            is_action=False,
        ),
    )
}
ACTIONS = {name: verb for name, verb in ALL.items() if verb.is_action}

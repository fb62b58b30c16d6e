"""Sessions: an allocation that the user works in, at a prompt or in a notebook."""

import dataclasses

from ddp.environment import store
from ddp.options import models
from ddp.problem import ParameterError
from ddp.results.progress import Log
from ddp.settings import Settings
from ddp.slurm import cluster, partition_list
from ddp.submit import own_python, resources, training
from ddp.workspace.folders import Contents, Manifest

_MOST_CPUS = 4  # of a session without GPUs, which takes no whole node


@dataclasses.dataclass(frozen=True)
class Checked:
    """A session that passed every check; nothing is written yet."""

    settings: Settings
    params: models.Training
    request: resources.Request
    contents: Contents

    def provide(self, log: Log) -> Manifest:
        """Return its environment, made now if it is missing; the user's own Python needs none.

        Raises Problem.
        """
        if self.params.own_python:
            return store.NOT_INSTALLED
        has_gpus = self.request.gpus_per_node > 0
        return training.provide_environment(
            self.settings, self.params, self.contents, log, has_gpus=has_gpus
        )


def check(settings: Settings, params: models.Session, log: Log) -> Checked:
    """Check everything that can be known before anything is written. Raises ParameterError."""
    workspace = settings.workspace
    wanted = params.as_training()
    request = _request(wanted, cluster.partitions(params.reservation))
    contents = workspace.look()
    python, remark = own_python.choose(workspace, wanted, is_anywhere=settings.takes_any_script)
    if remark:
        log(remark)
    wanted = wanted.model_copy(update={"python": python or "none"})
    training.check_environment(settings, wanted, contents)
    return Checked(settings, wanted, request, contents)


def _request(
    params: models.Training, partitions: tuple[partition_list.Partition, ...]
) -> resources.Request:
    """Compute a session's request: one GPU, or a few cores. Raises ParameterError."""
    whole = resources.training(params, partitions)
    least: dict[str, object] = {}
    if params.gpus is None and whole.gpus_per_node > 1:
        least["gpus_per_node"] = "1"
    if params.cpus_per_task is None and not whole.gpus_per_node:
        least["cpus_per_task"] = min(_MOST_CPUS, whole.cpus_per_task)
    if not least:
        return whole
    return resources.training(params.model_copy(update=least), partitions)


def refuse_resources(params: models.Session, run: str) -> None:
    """Raise ParameterError for an option of a new allocation: a running job has its own."""
    for name in sorted(params.model_fields_set - {"run", "rank", "typed_in", "active"}):
        option = name.replace("_", "-")
        raise ParameterError(option, f"the job of {run} has its own; omit it")

"""prepare: the job that turns text into a dataset."""

import contextlib
import dataclasses
import functools
import pathlib

from ddp.environment import environments
from ddp.options import models
from ddp.problem import Command, Problem, Results, UnfinishedError
from ddp.results import tables
from ddp.results.progress import Log
from ddp.run import creation, logs, untrusted
from ddp.run.model import PREPARATION
from ddp.settings import Settings
from ddp.slurm import cluster, jobs
from ddp.submit import control, resources, scripts
from ddp.workspace import checks, folders, operations
from ddp.workspace.folders import Workspace

DEFAULT_DATASET = "python-stdlib"
_PART_BYTES, _ELEMENT_BYTES = 64 << 20, 256 << 20
_MOST_ELEMENTS = 64  # that it chooses by itself
_SUBMISSION_S = 600.0  # an environment may be made first


@dataclasses.dataclass(frozen=True)
class _Work:
    """A dataset to prepare, and the number of elements that share the work."""

    settings: Settings
    params: models.PrepareDataset
    request: resources.Request
    dataset: str
    elements: int

    @property
    def run(self) -> str:
        """The run's name."""
        return f"{PREPARATION}{self.dataset}"

    @property
    def output(self) -> str:
        """The dataset's folder."""
        return str(self.settings.workspace.datasets / self.dataset)

    def texts(self, environment: folders.Manifest) -> dict[str, str]:
        """Render the run's files: with several elements `parts.sbatch`, an array, and `job.sbatch`, which ends it."""
        flag = "--tokenizer-local-dir" if self.params.tokenizer.startswith("/") else "--tokenizer"
        given = (
            "--source",
            self.params.source,
            "--output",
            self.output,
            flag,
            self.params.tokenizer,
        )
        prepare = ("ddptrain", "prepare", *given, "--errors", self.params.errors)
        check = ("ddptrain", "inspect", "--json", self.output)
        about = (self.settings, self.request, self.params, environment)
        render = functools.partial(scripts.preparation, *about, run=self.run, dataset=self.dataset)
        if self.elements == 1:
            return render(commands=(prepare, check))
        array = scripts.Array(
            self.elements, min(self.params.parallel or self.elements, self.elements)
        )
        parts = render(commands=(prepare,), array=array)
        whole = render(commands=((*prepare, "--finalize"), check), follows=True)
        return parts | whole | {"parts.sbatch": parts["job.sbatch"]}


def prepare_dataset(
    settings: Settings, params: models.PrepareDataset, log: Log, *, is_automatic: bool = False
) -> Results:
    """Submit one job, or an array and a job that ends it. Finished parts are kept."""
    workspace = settings.workspace
    checks.trusted(workspace.look())
    partitions = cluster.partitions(params.reservation)
    name = params.name or checks.label(params.source.rstrip("/"))
    if params.source != DEFAULT_DATASET:
        checks.check_inside(workspace, "source", params.source, kinds=("file", "folder"))
    if params.tokenizer.startswith("/"):
        checks.check_inside(workspace, "tokenizer", params.tokenizer, kinds=("file", "folder"))
    request = resources.preparation(params, partitions)
    control.claim(workspace, f"{PREPARATION}{name}")
    control.refuse_if_active(workspace, f"{PREPARATION}{name}")
    limit = partitions[0].limits.max_array_size
    if params.elements and params.elements > 1:
        resources.check_array("elements", params.elements, partitions)
    largest = _MOST_ELEMENTS if limit is None else max(1, limit)
    elements = params.elements or min(_elements(workspace, params.source), largest)
    work = _Work(settings, params, request, name, elements)
    drafts = work.texts(environments.NOT_INSTALLED)
    for script in sorted(name for name in drafts if name.endswith(".sbatch")):
        cluster.judge(drafts[script], request.partition)
    environment = environments.ensure(settings, log)
    texts = work.texts(environment)
    path = workspace.runs / work.run
    again = workspace.locate(str(path)).kind != "absent"
    undo, array, waits_for = None, None, ""
    if work.elements > 1:  # before the job that waits for all jobs of this name
        former = workspace.do(creation.create, path=path, texts=texts, again=again)
        undo = functools.partial(workspace.do, creation.undo, path=path, former=former)
        with control.undone(workspace, work.run, undo):
            mark = control.new_mark()
            array, waits_for = control.send(
                workspace, work.run, "parts.sbatch", texts["parts.sbatch"], mark
            )
    facts: dict[str, object] = {
        "kind": "prepare",
        "dataset": name,
        "source": params.source,
        "elements": work.elements,
        "environment": environment.hash,
        "automatic": is_automatic,
        "array_job_id": array,
    }
    try:
        submitted = control.submit(
            settings, work.run, texts, facts, again=again or array is not None
        )
    except Problem as e:
        if array is not None and undo is not None:
            _cancel(array, e)
            undo()
        raise
    submitted = dataclasses.replace(submitted, limit=submitted.limit or waits_for)
    results = {**submitted.as_results(), "dataset": work.output}
    if array is not None:
        results |= {"array-job-id": str(array), "elements": str(work.elements)}
    log(
        f"job {submitted.job_id} prepares the dataset {name}"
        + (f" with {work.elements} elements" if array else "")
    )
    if not params.wait:
        return results
    try:
        return results | _follow(work, submitted, array, log, to_the_end=is_automatic)
    except UnfinishedError as e:
        raise UnfinishedError(results | e.results) from None


def _cancel(array: int, why: Problem) -> None:
    """Cancel the array of a preparation that failed. Raises Problem, for both, if Slurm does not."""
    try:
        jobs.cancel(array)
    except jobs.SlurmError as e:
        text = f"{why.what}; the array {array} could not be cancelled: {e}"
        raise Problem(text, remedy=Command("cancel", arguments=(str(array),))) from why


def ensure_default(settings: Settings, params: models.PrepareDataset, log: Log) -> None:
    """Make the default dataset; if a job or another command makes it already, wait for that."""
    workspace = settings.workspace
    run = f"{PREPARATION}{DEFAULT_DATASET}"
    if not workspace.claims.wait(run, timeout_s=_SUBMISSION_S):
        raise Problem(
            f"another command has been submitting {run} for {_SUBMISSION_S:g} s; try again"
        )
    with jobs.asking():
        active = [job for job in jobs.jobs(user=workspace.user, name=run) if job.is_active]
    if active:
        workspace.claims.drop(run)
        log(f"job {active[0].job_id} prepares it already; waiting for that")
        submitted = control.Submitted(active[0].job_id, workspace.runs / run)
        control.follow(settings, submitted, log, timeout_s=params.wait_timeout, to_the_end=True)
    elif DEFAULT_DATASET not in workspace.look().datasets:
        prepare_dataset(settings, params, log, is_automatic=True)


def _follow(
    work: _Work, submitted: control.Submitted, array: int | None, log: Log, *, to_the_end: bool
) -> Results:
    """Wait for the end, and describe the dataset. Raises Problem with the input at fault."""
    settings = work.settings

    def report(text: str) -> None:
        done = 0
        with contextlib.suppress(folders.WorkspaceError):
            parts = pathlib.Path(work.output, "parts")
            done = len(settings.workspace.do(lambda: [*parts.glob("part-*.json")], timeout_s=3))
        log(tables.Step(f"{text}, {done} parts done", work.run) if done else text)

    try:
        timeout_s = work.params.wait_timeout
        results = control.follow(
            settings, submitted, report, timeout_s=timeout_s, to_the_end=to_the_end
        )
    except Problem as e:
        if array is None:
            raise
        failed = settings.workspace.do(
            logs.find_failed_elements, path=settings.workspace.runs / work.run, array=array
        )
        if not failed:
            raise
        lines = [f"element {element}: {untrusted.printable(line)}" for element, line in failed]
        e.results["failed-elements"] = "\n".join(lines)
        text = (
            f"job {submitted.job_id}: {lines[0]}; correct the input and run the same command again"
        )
        raise Problem(text, results=e.results) from e
    return results | _describe(settings.workspace, submitted)


def _describe(workspace: Workspace, submitted: control.Submitted) -> Results:
    """Describe the dataset by the inspection of all its bytes."""
    try:
        found = workspace.read_json(f"{submitted.folder}/inspection.json")
    except folders.WorkspaceError:
        return {}
    facts = {
        name: found.get(name) for name in ("tokenizer", "vocabulary", "fingerprint", "not-read")
    }
    results = {
        name: untrusted.printable(str(value))[:200] for name, value in facts.items() if value
    }
    results |= {
        str(split): str(text) for split, text in untrusted.as_object(found.get("totals")).items()
    }
    if shards := untrusted.as_list(found.get("shards")):
        results["shards"] = str(len(shards))
    return results | {"verified": "every byte" if not found.get("damage") else "damaged"}


def _elements(workspace: Workspace, source: str) -> int:
    """Choose the number of elements of the array."""
    if source == DEFAULT_DATASET:
        return 1
    found = workspace.do(
        operations.measure_source, timeout_s=60, path=source, part_bytes=_PART_BYTES
    )
    return max(1, min(_MOST_ELEMENTS, found["parts"], -(-found["bytes"] // _ELEMENT_BYTES)))

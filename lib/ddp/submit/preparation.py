"""prepare: the job that turns text into a dataset."""

import collections.abc
import contextlib
import dataclasses
import functools
import pathlib

from ddp.environment import store
from ddp.options import models
from ddp.problem import Command, Problem, Results, UnfinishedError
from ddp.results import tables
from ddp.results.progress import Log
from ddp.run import creation, logs, untrusted
from ddp.run.model import PREPARATION
from ddp.settings import Settings
from ddp.slurm import cluster, jobs
from ddp.submit import control, following, job_program, resources, scripts
from ddp.workspace import checks, folders, operations
from ddp.workspace.folders import Workspace

DEFAULT_DATASET = "python-stdlib"
_PART_BYTES, _ELEMENT_BYTES = 64 << 20, 256 << 20
_MOST_ELEMENTS = 64  # that it chooses by itself
_SUBMISSION_S = 600.0  # an environment may be made first


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The array of a preparation, which Slurm has accepted."""

    array: int
    waits_for: str  # the limit that it waits for
    undo: collections.abc.Callable[[], object]  # of the run's folder

    def cancel(self, why: Problem) -> None:
        """Cancel the array, since the preparation failed.

        Raises Problem, for both, if Slurm does not.
        """
        try:
            jobs.cancel(self.array)
        except jobs.SlurmError as e:
            text = f"{why.what}; the array {self.array} could not be cancelled: {e}"
            raise Problem(text, remedy=Command("cancel", arguments=(str(self.array),))) from why
        self.undo()


@dataclasses.dataclass(frozen=True)
class _Preparation:
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
    def submission(self) -> control.Submission:
        """The run on its way to Slurm."""
        return control.Submission(self.workspace, self.run)

    @property
    def workspace(self) -> Workspace:
        """The workspace of the run and the dataset."""
        return self.settings.workspace

    @property
    def output(self) -> str:
        """The dataset's folder."""
        return str(self.workspace.datasets / self.dataset)

    def texts(self, environment: folders.Manifest) -> dict[str, str]:
        """Render the run's files.

        Several elements are an array, `parts.sbatch`, and a job that ends it.
        """
        params = self.params
        tokenizer = "--tokenizer-local-dir" if params.tokenizer.startswith("/") else "--tokenizer"
        given = ("--source", params.source, "--output", self.output, tokenizer, params.tokenizer)
        prepare = ("ddptrain", "prepare", *given, "--errors", params.errors)
        check = ("ddptrain", "inspect", "--json", self.output)
        about = (self.settings, self.request, params, environment)
        render = functools.partial(scripts.preparation, *about, run=self.run, dataset=self.dataset)
        if self.elements == 1:
            return render(commands=(prepare, check))

        parallel = min(params.parallel or self.elements, self.elements)
        parts = render(commands=(prepare,), array=scripts.Array(self.elements, parallel))
        whole = render(commands=((*prepare, "--finalize"), check), follows=True)
        return parts | whole | {"parts.sbatch": parts["job.sbatch"]}

    def judge(self) -> None:
        """Let Slurm judge the scripts. Raises ParameterError if it would not accept one."""
        drafts = self.texts(store.NOT_INSTALLED)
        for name in sorted(drafts):
            if name.endswith(".sbatch"):
                contact = self.settings.contact
                cluster.judge(drafts[name], self.request.partition, contact=contact)

    def submit(
        self, environment: folders.Manifest, *, is_automatic: bool
    ) -> tuple[control.Submitted, int | None]:
        """Submit the job, and before it the array if there is one, whose id is returned.

        Raises Problem.
        """
        texts = self.texts(environment)
        is_again = not self.submission.is_new()
        parts = None
        if self.elements > 1:  # before the job that waits for all jobs of this name
            parts = self._submit_parts(texts, is_again=is_again)
        array = None if parts is None else parts.array
        facts: dict[str, object] = {
            "kind": "prepare",
            "dataset": self.dataset,
            "source": self.params.source,
            "elements": self.elements,
            "environment": environment.hash,
            "automatic": is_automatic,
            "array_job_id": array,
        }
        again = is_again or parts is not None
        try:
            submitted = self.submission.submit(texts, facts, again=again)
        except Problem as e:
            if parts is not None:
                parts.cancel(e)
            raise
        if parts is not None and not submitted.limit:
            submitted = dataclasses.replace(submitted, limit=parts.waits_for)
        return submitted, array

    def _submit_parts(self, texts: dict[str, str], *, is_again: bool) -> _Parts:
        workspace, path = self.workspace, self.submission.path
        create = functools.partial(creation.create, program=job_program.archive(), again=is_again)
        former = workspace.do(create, path=path, texts=texts)
        undo = functools.partial(workspace.do, creation.undo, path=path, former=former)
        with self.submission.undone(undo):
            mark = control.new_mark()
            script = "parts.sbatch"
            array, waits_for = self.submission.send(script, texts[script], mark)
        return _Parts(array, waits_for, undo)

    def follow(
        self, submitted: control.Submitted, array: int | None, log: Log, *, to_the_end: bool
    ) -> Results:
        """Wait for the end, and describe the dataset. Raises Problem with the input at fault."""

        def report(text: str) -> None:
            done = self._count_parts()
            log(tables.Step(f"{text}, {done} parts done", self.run) if done else text)

        follower = following.follower(self.settings, submitted, report)
        try:
            results = follower.follow(timeout_s=self.params.wait_timeout, to_the_end=to_the_end)
        except Problem as e:
            lines = [] if array is None else self._failed_elements(array)
            if not lines:
                raise
            e.results["failed-elements"] = "\n".join(lines)
            how = "correct the input and run the same command again"
            text = f"job {submitted.job_id}: {lines[0]}; {how}"
            raise Problem(text, results=e.results) from e
        return results | _describe(self.workspace, submitted)

    def _count_parts(self) -> int:
        parts = pathlib.Path(self.output, "parts")
        with contextlib.suppress(folders.WorkspaceError):
            return len(self.workspace.do(lambda: [*parts.glob("part-*.json")], timeout_s=3))
        return 0

    def _failed_elements(self, array: int) -> list[str]:
        path = self.workspace.runs / self.run
        failed = self.workspace.do(logs.find_failed_elements, path=path, array=array)
        return [f"element {element}: {untrusted.printable(line)}" for element, line in failed]


def prepare_dataset(
    settings: Settings, params: models.PrepareDataset, log: Log, *, is_automatic: bool = False
) -> Results:
    """Submit one job, or an array and a job that ends it. Finished parts are kept."""
    work = _check(settings, params)
    work.judge()
    environment = store.Store(settings).ensure(log)
    submitted, array = work.submit(environment, is_automatic=is_automatic)

    results = {**submitted.as_results(), "dataset": work.output}
    what = f"job {submitted.job_id} prepares the dataset {work.dataset}"
    if array is not None:
        results |= {"array-job-id": str(array), "elements": str(work.elements)}
        what += f" with {work.elements} elements"
    log(what)
    if not params.wait:
        return results
    try:
        return results | work.follow(submitted, array, log, to_the_end=is_automatic)
    except UnfinishedError as e:
        raise UnfinishedError(e.run, results | e.results) from None


def _check(settings: Settings, params: models.PrepareDataset) -> _Preparation:
    """Check the options, and claim the run. Raises ParameterError."""
    workspace = settings.workspace
    checks.trusted(workspace.look())
    partitions = cluster.partitions(params.reservation)
    name = params.name or checks.label(params.source.rstrip("/"))
    if params.source != DEFAULT_DATASET:
        checks.check_inside(workspace, "source", params.source, kinds=("file", "folder"))
    if params.tokenizer.startswith("/"):
        checks.check_inside(workspace, "tokenizer", params.tokenizer, kinds=("file", "folder"))
    request = resources.preparation(params, partitions)
    submission = control.Submission(workspace, f"{PREPARATION}{name}")
    submission.claim()
    submission.refuse_if_active()

    elements = params.elements
    if elements is None:
        limit = partitions[0].limits.max_array_size
        largest = _MOST_ELEMENTS if limit is None else max(1, limit)
        elements = min(_elements(workspace, params.source), largest)
    elif elements > 1:
        resources.check_array("elements", elements, partitions)
    return _Preparation(settings, params, request, name, elements)


def ensure_default(settings: Settings, params: models.PrepareDataset, log: Log) -> None:
    """Make the default dataset; if a job or another command makes it already, wait for that."""
    workspace = settings.workspace
    run = f"{PREPARATION}{DEFAULT_DATASET}"
    if not workspace.claims.wait(run, timeout_s=_SUBMISSION_S):
        text = f"another command has been submitting {run} for {_SUBMISSION_S:g} s; try again"
        raise Problem(text)
    with jobs.asking():
        active = [job for job in jobs.jobs(user=workspace.user, name=run) if job.is_active]
    if active:
        workspace.claims.drop(run)
        log(f"job {active[0].job_id} prepares it already; waiting for that")
        submitted = control.Submitted(active[0].job_id, workspace.runs / run)
        follower = following.follower(settings, submitted, log)
        follower.follow(timeout_s=params.wait_timeout, to_the_end=True)
    elif DEFAULT_DATASET not in workspace.look().datasets:
        prepare_dataset(settings, params, log, is_automatic=True)


def _describe(workspace: Workspace, submitted: control.Submitted) -> Results:
    """Describe the dataset by the inspection of all its bytes."""
    try:
        found = workspace.read_json(f"{submitted.folder}/inspection.json")
    except folders.WorkspaceError:
        return {}
    results: Results = {}
    for name in ("tokenizer", "vocabulary", "fingerprint", "not-read", "not-learned"):
        if value := found.get(name):
            results[name] = untrusted.printable(str(value), 400)
    for split, text in untrusted.as_object(found.get("totals")).items():
        results[str(split)] = str(text)
    if shards := untrusted.as_list(found.get("shards")):
        results["shards"] = str(len(shards))
    results["verified"] = "damaged" if found.get("damage") else "every byte"
    return results


def _elements(workspace: Workspace, source: str) -> int:
    """Choose the number of elements of the array."""
    if source == DEFAULT_DATASET:
        return 1
    found = workspace.do(
        operations.measure_source, timeout_s=60, path=source, part_bytes=_PART_BYTES
    )
    return max(1, min(_MOST_ELEMENTS, found.num_parts, -(-found.num_bytes // _ELEMENT_BYTES)))

"""prepare: the job that turns text into a dataset."""

import dataclasses
import typing

from ddp.base import Log, Results, Settings, TrainerError
from ddp.environment import environments
from ddp.options import models
from ddp.run import control, folder
from ddp.slurm import jobs
from ddp.submit import checks, resources, scripts
from ddp.view import tables
from ddp.workspace import folders, operations

DEFAULT_DATASET = "python-stdlib"


_PART_BYTES, _ELEMENT_BYTES = 64 << 20, 256 << 20
_MOST_ELEMENTS = 64  # that it chooses by itself
_SUBMISSION_S = 600.0  # an environment may be made first


@dataclasses.dataclass(frozen=True)
class _Work:
    """A dataset to prepare, and the number of elements that share the work."""

    run: str
    dataset: str
    output: str
    source: str
    tokenizer: str
    elements: int
    parallel: int

    def command(self, *more: str) -> tuple[str, ...]:
        """Build the payload's command."""
        given = ("--source", self.source, "--output", self.output, "--tokenizer", self.tokenizer)
        return ("ddptrain", "prepare", *given, *more)

    def texts(
        self,
        settings: Settings,
        request: resources.Request,
        params: models.PrepareDataset,
        environment: folders.Manifest,
    ) -> dict[str, str]:
        """Render the run's files: with several elements `parts.sbatch`, an array, and `job.sbatch`, which ends it."""
        check = ("ddptrain", "inspect", "--json", self.output)
        common: dict[str, typing.Any] = {"run": self.run, "dataset": self.dataset}
        whole = self.command() if self.elements == 1 else self.command("--finalize")
        files = scripts.preparation(
            settings, request, params, environment, **common, commands=(whole, check), follows=self.elements > 1
        )
        if self.elements == 1:
            return files
        share = scripts.Array(self.elements, self.parallel)
        parts = scripts.preparation(
            settings, request, params, environment, **common, commands=(self.command(),), array=share
        )
        return parts | files | {"parts.sbatch": parts["job.sbatch"]}


def prepare_dataset(
    settings: Settings, params: models.PrepareDataset, log: Log, *, is_automatic: bool = False
) -> Results:
    """Submit one job, or an array and a job that ends it. Finished parts are kept."""
    checks.trusted(folders.look(settings))
    partitions = checks.partitions(params.reservation)
    name = params.name or checks.label(params.source.rstrip("/"))
    if params.source != DEFAULT_DATASET:
        checks.check_inside(settings, "source", params.source, kinds=("file", "folder"))
    request = resources.preparation(params, partitions)
    run = f"{control.PREPARATION}{name}"
    control.claim(settings, run)
    control.refuse_if_active(settings, run)
    elements = params.elements or _elements(settings, params.source)
    work = _Work(
        run=run,
        dataset=name,
        output=str(settings.datasets / name),
        source=params.source,
        tokenizer=params.tokenizer,
        elements=elements,
        parallel=min(params.parallel or elements, elements),
    )
    drafts = work.texts(settings, request, params, environments.NOT_INSTALLED)
    for script in ("parts.sbatch", "job.sbatch"):
        if script in drafts:
            checks.judge(drafts[script])
    environment = environments.ensure(settings, log)
    texts = work.texts(settings, request, params, environment)
    again = folders.locate(settings, str(settings.runs / run)).kind != "absent"
    facts: dict[str, object] = {
        "kind": "prepare",
        "dataset": name,
        "source": params.source,
        "elements": elements,
        "environment": environment.hash,
        "automatic": is_automatic,
    }
    path = settings.runs / run
    array, former = _submit_array(settings, run, texts, again=again) if elements > 1 else (None, None)
    try:
        submitted = control.submit(
            settings, run, texts, facts | {"array_job_id": array}, again=again or array is not None
        )
    except TrainerError:
        if array is not None:
            jobs.cancel(array)
            folders.call(settings, folder.undo, path=path, former=former)
        raise
    results = {**submitted.as_results(), "dataset": work.output}
    if array is not None:
        results |= {"array-job-id": str(array), "elements": str(elements)}
    log(f"job {submitted.job_id} prepares the dataset {name}" + (f" with {elements} elements" if array else ""))
    if not params.wait:
        return results
    return results | _follow(settings, submitted, work, array, log=log, timeout_s=params.wait_timeout)


def ensure_default(settings: Settings, params: models.PrepareDataset, log: Log) -> None:
    """Make the default dataset; if a job or another command makes it already, wait for that."""
    run = f"{control.PREPARATION}{DEFAULT_DATASET}"
    if not settings.claims.wait(run, timeout_s=_SUBMISSION_S):
        raise TrainerError(f"another command has been submitting {run} for {_SUBMISSION_S:g} s; try again")
    try:
        active = [job for job in jobs.jobs(user=settings.user, name=run) if job.is_active]
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e
    if active:
        settings.claims.drop(run)
        log(f"job {active[0].job_id} prepares it already; waiting for that")
        control.follow(
            settings, control.submitted_as(settings, run, active[0].job_id), log, timeout_s=params.wait_timeout
        )
    elif DEFAULT_DATASET not in folders.look(settings).datasets:
        prepare_dataset(settings, params, log, is_automatic=True)


def _submit_array(
    settings: Settings, run: str, texts: dict[str, str], *, again: bool
) -> tuple[int, dict[str, str | None] | None]:
    """Submit the array, before the job that waits for all jobs of this name. Raises TrainerError."""
    path = settings.runs / run
    former = folders.call(settings, folder.create, path=path, texts=texts, again=again)
    try:
        return control.send(settings, run, "parts.sbatch", texts["parts.sbatch"], control.new_mark()), former
    except jobs.UncertainError as e:
        raise TrainerError(f"{run}: {e}") from e
    except jobs.SlurmError as e:
        folders.call(settings, folder.undo, path=path, former=former)
        raise checks.refused(str(e)) from e


def _follow(
    settings: Settings, submitted: control.Submitted, work: _Work, array: int | None, *, log: Log, timeout_s: float
) -> Results:
    """Wait for the end, and describe the dataset. Raises TrainerError with the input at fault."""

    def report(text: str) -> None:
        try:
            done = folders.call(settings, operations.count_parts, timeout_s=3, output=work.output)["parts"]
        except folders.WorkspaceError:
            done = 0
        words = f"{done} parts done"
        if not done:
            log(text)
        else:
            log(text.adding(words) if isinstance(text, tables.Step) else f"{text}, {words}")

    try:
        results = control.follow(settings, submitted, report, timeout_s=timeout_s)
    except TrainerError as e:
        if array is None:
            raise
        failed = folders.call(settings, folder.find_failed_elements, path=settings.runs / work.run, array=array)
        if not failed:
            raise
        lines = [f"element {element}: {control.printable(line)}" for element, line in failed]
        e.results["failed-elements"] = "\n".join(lines)
        text = f"job {submitted.job_id}: {lines[0]}; correct the input and run the same command again"
        raise TrainerError(text, results=e.results) from e
    return results | _describe(settings, submitted)


def _describe(settings: Settings, submitted: control.Submitted) -> Results:
    """Describe the dataset by the inspection of all its bytes."""
    try:
        found = folders.call(settings, operations.read_json, path=f"{submitted.run_dir}/inspection.json")
    except folders.WorkspaceError:
        return {}
    shards = found.get("shards")
    names = {"tokenizer": "tokenizer", "vocabulary": "vocabulary", "fingerprint": "fingerprint", "begins": "begins"}
    results = {name: control.printable(str(found[key]))[:200] for name, key in names.items() if found.get(key)}
    totals = found.get("totals")
    if isinstance(totals, dict):
        results |= {str(split): str(text) for split, text in typing.cast(dict[str, object], totals).items()}
    if isinstance(shards, list):
        results["shards"] = str(len(typing.cast(list[object], shards)))
    return results | {"verified": "every byte" if not found.get("damage") else "damaged"}


def _elements(settings: Settings, source: str) -> int:
    """Choose the number of elements of the array."""
    if source == DEFAULT_DATASET:
        return 1
    found = folders.call(settings, operations.measure_source, timeout_s=60, path=source, part_bytes=_PART_BYTES)
    return max(1, min(_MOST_ELEMENTS, found["parts"], -(-found["bytes"] // _ELEMENT_BYTES)))

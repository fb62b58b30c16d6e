"""Submit, follow, explain and resume runs. Each run is a folder of the workspace."""

import collections.abc
import contextlib
import dataclasses
import datetime
import json
import re
import time
import typing

from ddp import project, remedies, tables
from ddp.base import REPORT_S, Log, ParameterError, Results, Settings, TrainerError, one_line
from ddp.options import fields
from ddp.report import facts, files
from ddp.runs import drawing, run_files, written
from ddp.slurm import jobs
from ddp.submit import checks
from ddp.workspace import folders, operations, tokens

_FAILURE_LINES = 5
_SILENCE_S = 600.0  # how long slurmctld may be unreachable while a job is followed: it may be restarted
LEAVE_S = 60.0  # how long a cancelled or requeued job may take to leave its nodes
# slurmd refuses a requeued job whose credential is not a second newer than the end of its last attempt ("already
# killed, do not launch batch job"), and the job then fails.
_APART_S = 2.0
_COMPLETED = "COMPLETED"
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_JOB_COLUMNS = ("RUN", "STATE", "NODES", "ELAPSED", "LIMIT", "SUBMITTED", "WHERE")
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
OUTCOMES = facts.STATES
Json = files.Json
PREPARATION = "prepare-"  # prefix of the runs that prepare datasets


@dataclasses.dataclass(frozen=True)
class Submitted:
    """A run that Slurm has accepted."""

    job_id: int
    run: str
    run_dir: str
    script: str
    log: str
    element: int | None = None  # of the array that prepares a dataset

    def as_results(self) -> Results:
        """Results that every submission reports."""
        return {
            "job-id": str(self.job_id),
            "run": self.run,
            "run-dir": self.run_dir,
            "log": self.log,
            "script": self.script,
        }


def list_jobs(settings: Settings, params: typing.Any, _: Log) -> Results:
    """List the jobs of the user, or with `all` of everybody, that Slurm still knows."""
    try:
        known = jobs.jobs(user=None if params.all else settings.user)
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e
    rows: list[tuple[str, ...]] = [("JOB-ID", *(("USER",) if params.all else ()), *_JOB_COLUMNS)]
    for job in known[: params.lines]:
        where = job.nodes or (f"({job.reason})" if job.is_active else "")
        owner = (job.user,) if params.all else ()
        times = (job.elapsed, job.time_limit, job.submitted)
        rows.append((str(job.job_id), *owner, job.run_name[:64], job.state, str(job.num_nodes), *times, where))
    return {"count": str(len(known)), "jobs": aligned(rows)}


def show_job(settings: Settings, params: typing.Any, _: Log) -> Results:
    """Show a job's state and progress, or how it ended."""
    submitted = find(settings, params)
    known = job_of(settings, submitted)
    if known is None or not known.is_active:
        results, trouble = _explain(settings, submitted, known)
        return results | ({"reason": trouble} if trouble else {})
    metric: Json = {}
    if known.state == "RUNNING":
        metric = files.as_object(_read(settings, submitted.run, None)["metric"])
    results = {**submitted.as_results(), "state": known.state, "elapsed": known.elapsed, "nodes": known.nodes}
    results |= {"reason": _held(settings, known) or known.reason, "requeued": str(known.restarts)}
    results |= {name: _figure(metric[name]) for name in ("step", "loss") if metric.get(name) is not None}
    return {name: value for name, value in results.items() if value not in ("", "None", "0")}


def job_log(settings: Settings, params: typing.Any, log: Log) -> Results:
    """Return the last lines of a job's log; with `follow` report new lines until the job ends or the limit passes."""
    submitted = find(settings, params)
    if params.follow:
        _follow_log(settings, submitted, params.rank, log, timeout_s=params.follow_timeout)
    results = {"job-id": str(submitted.job_id), "run": submitted.run}
    known = job_of(settings, submitted)
    if known is not None:
        results["state"] = known.state
    try:
        found = _call(
            settings, run_files.read_log,
            run=submitted.run, job_id=submitted.job_id, lines=params.lines, rank=params.rank, element=submitted.element,
        )  # fmt: skip
    except folders.MissingError as e:
        state, yet = f"job {submitted.job_id}", ""
        if known is not None:
            state += f" is {known.state}" + (f" ({known.reason})" if known.state == "PENDING" else "")
            yet = " yet" if known.is_active else ""
        of_rank = "" if params.rank is None else f" of rank {params.rank}"
        hint = settings.typed("show-job", job_id=submitted.job_id)
        if submitted.element is not None:
            hint += f" element={submitted.element}"
        raise TrainerError(f"{state}; there is no output{of_rank}{yet}; see: {hint}", results=results) from e
    text = "\n".join(map(printable, found["lines"]))
    return {**results, "log": found["path"], "lines": str(len(found["lines"])), "text": text}


def _follow_log(settings: Settings, submitted: Submitted, rank: int | None, log: Log, *, timeout_s: float) -> None:
    began = time.monotonic()
    offsets: dict[str, int] = {}
    is_pending = False
    waits = Waits(settings, log)
    while True:
        known = job_of(settings, submitted)
        has_ended = known is None or not known.is_active  # its last lines are still to be read
        if not has_ended:
            waits.note()
        found = _call(
            settings, run_files.follow_log,
            run=submitted.run, job_id=submitted.job_id, rank=rank, offsets=offsets, element=submitted.element,
        )  # fmt: skip
        for line in found["lines"]:
            log(printable(line))
        offsets = found["offsets"]
        was_pending, is_pending = is_pending, known is not None and known.state == "PENDING"
        if known is not None and is_pending and not was_pending:
            log(f"job {known.job_id} PENDING ({known.reason})")
        if has_ended or time.monotonic() - began >= timeout_s:
            return
        pause(1.0)


def new_name(settings: Settings, kind: str) -> str:
    """Name a run after its kind and the time."""
    stamp = now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 100):
        name = f"{kind}-{stamp}" if number == 1 else f"{kind}-{stamp}-{number}"
        if not settings.claims.take(name):
            continue  # another action took it in the same second
        if folders.locate(settings, str(settings.runs / name)).kind == "absent":
            return name
        settings.claims.drop(name)
    raise TrainerError(f"{settings.runs} holds 99 runs of this second; try again")


def claim(settings: Settings, run: str) -> None:
    """Keep other actions from submitting this run. Raises ParameterError if one is submitting it now."""
    if not settings.claims.take(run):
        hint = f"see: {settings.typed('list-jobs')}"
        raise ParameterError("run", f"another action is submitting {run}; {hint}")


def about(settings: Settings, run: str) -> dict[str, object]:
    """Read a run's job.json; empty if there is none."""
    return files.as_object(_read(settings, run, None)["job"])


def refuse_if_active(settings: Settings, run: str) -> None:
    """Raise ParameterError if a job of this run is pending or running."""
    names = [run]
    if sweep := about(settings, run).get("sweep"):
        names.append(str(sweep))
    for known in (job for name in names for job in jobs.jobs(user=settings.user, name=name)):
        if known.is_active:
            raise ParameterError(
                "run",
                f"{run} is active as job {known.job_id} ({known.state}); wait for its end, or: "
                + settings.typed("cancel-job", run=known.name),
            )


def submit(
    settings: Settings,
    run: str,
    texts: dict[str, str],
    facts: dict[str, object],
    *,
    again: bool,
    token: bool = False,
    kept: project.Copy | None = None,
) -> Submitted:
    """Write a run's files and submit its script; with `token`, deliver Hugging Face's. Raises TrainerError.

    The job.json of an existing run is replaced once Slurm has accepted the job, not before.
    """
    folder = settings.runs / run
    record = {"format": 1, "job_id": None, "run": run, "submitted": now().strftime("%Y-%m-%dT%H:%M:%SZ"), **facts}
    if again:  # the summary of an earlier job is not this one's
        record["summary_before"] = _read(settings, run, None)["summary_written"]
    else:
        texts = {**texts, "job.json": _dump(record)}
    placed = written.write(settings, run, texts, again=again)
    script = folder / "job.sbatch"
    if kept is not None:
        kept.place()
    try:
        if token:
            tokens.deliver(settings, run)
        job_id = jobs.submit(str(script))
    except (jobs.SlurmError, folders.WorkspaceError) as e:
        tokens.drop(settings, run)
        if kept is not None:
            kept.remove()
        placed.undo()
        if isinstance(e, folders.WorkspaceError):
            raise
        raise checks.refused(str(e)) from e
    folders.call(settings, operations.write, path=str(folder / "job.json"), text=_dump({**record, "job_id": job_id}))
    settings.claims.drop(run)
    return submitted_as(settings, run, job_id)


def follow(settings: Settings, submitted: Submitted, log: Log, *, timeout_s: float) -> Results:
    """Wait for a job, report its progress, return its results. Raises TrainerError unless it completed."""
    deadline = time.monotonic() + timeout_s
    first_asked = last_reported = 0.0
    answered = time.monotonic()
    waits = Waits(settings, log)
    reported = ""
    timeout_of_squeue_s = 5.0
    while True:
        try:
            known = jobs.job(submitted.job_id, user=settings.user, timeout_s=timeout_of_squeue_s)
            answered = time.monotonic()
            timeout_of_squeue_s = 5.0
        except jobs.SlurmError as e:
            if time.monotonic() - answered > _SILENCE_S:
                hint = settings.typed("show-job", run=submitted.run)
                text = f"job {submitted.job_id}: Slurm does not answer: {e}; the job may still run, see: {hint}"
                raise TrainerError(text, results=submitted.as_results()) from e
            known = None
            timeout_of_squeue_s = min(60.0, timeout_of_squeue_s * 2)  # a large cluster's controller is slow
            text = f"job {submitted.job_id}: {e}; asking again"
        else:
            if known is None or not known.is_active:
                return conclude(settings, submitted, known)
            text = f"job {known.job_id} {known.state}"
            if held := _held(settings, known):
                results = {**submitted.as_results(), "state": known.state, "reason": known.reason}
                raise TrainerError(held, results=results)
            if known.state == "PENDING":
                text += f" ({known.reason})" + (f", requeued {known.restarts} times" if known.restarts else "")
        waits.note()
        if text != reported or time.monotonic() - last_reported >= REPORT_S:
            reported, last_reported = text, time.monotonic()
            is_running = known is not None and known.state == "RUNNING"
            log(_progress(settings, submitted.run, text) if is_running else tables.Step(text, text))
        if time.monotonic() >= deadline:
            hint = settings.typed("job-log", job_id=submitted.job_id)
            results = {**submitted.as_results(), "state": known.state if known else "UNKNOWN"}
            raise TrainerError(f"no end after {timeout_s:g} s: {text}; the job continues, see: {hint}", results=results)
        first_asked = first_asked or time.monotonic()
        pause(1.0 if time.monotonic() - first_asked < 120 else 3.0)


class Waits:
    """A note, once per action that waits, on how to stop waiting: Juju runs a unit's tasks one at a time."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self._settings, self._log = settings, log
        self._noted = False

    def note(self) -> None:
        """Log the note before the first line of progress. Commands typed by a user end with Ctrl-C and need none."""
        if self._settings.is_action and not self._noted:
            self._noted = True
            how = "stop"
            self._log(f"{self._settings.unit} runs no other action while this one waits; {how}")


def conclude(settings: Settings, submitted: Submitted, known: jobs.Job | None) -> Results:
    """Return the results of a completed job. Raises TrainerError with the reason if another ended otherwise."""
    tokens.drop(settings, submitted.run)
    results, trouble = _explain(settings, submitted, known)
    with contextlib.suppress(folders.WorkspaceError):  # results without a curve are better than none
        found = _call(settings, run_files.read_curve, run=submitted.run)
        if curve := drawing.draw(found["steps"], found["evals"]):
            results["curve-text"] = curve
    if trouble:
        raise TrainerError(trouble, results=results)
    return results


def _explain(settings: Settings, submitted: Submitted, known: jobs.Job | None) -> tuple[Results, str]:
    """Return the results of a job that ended, and unless it completed the reason in one line.

    A job unknown to the controller and the accounting is judged by the outcome that it wrote.
    """
    found = _read(settings, submitted.run, submitted.job_id)
    outcome = files.as_object(found["outcome"])
    written = outcome.get("exit_code")
    if known is not None:
        state, exit_code = known.state, known.exit_code
        if isinstance(written, int) and written == exit_code + 128:  # sacct prints 137 as 9:0 (print.c of 24.11)
            exit_code = written
    else:
        states = {"done": _COMPLETED, "cancelled": "CANCELLED"}
        state = states.get(str(outcome.get("outcome")), "FAILED") if outcome else "UNKNOWN"
        exit_code = written if isinstance(written, int) else 0 if state == _COMPLETED else 1
    results = {**submitted.as_results(), "state": state, "exit-code": str(exit_code)}
    record = files.as_object(found["job"])
    is_latest = record.get("job_id") in (None, submitted.job_id)
    if is_latest and found["summary_written"] != record.get("summary_before", 0.0):
        results |= figures(files.as_object(found["summary"]))
    if state == _COMPLETED:
        return results, ""
    text = f"job {submitted.job_id} {state}, exit code {exit_code}"
    if outcome.get("outcome") == "preempted":
        again = f"submit-ddp run={submitted.run} with the same parameters"
        return results, f"{text}; it saved at step {outcome.get('step')}; to resume: {again}"
    if state in ("CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE"):
        return results, text
    failure, words = _failure(settings, submitted, known)
    if not record.get("container"):
        words += _remedy(settings, failure.get("failure", "").rpartition("\n")[2])
    if not record:
        words += f"; {submitted.run_dir}/job.json is missing or damaged, so other files of the run may be, too"
    return results | failure, text + words


def _failure(settings: Settings, submitted: Submitted, known: jobs.Job | None) -> tuple[Results, str]:
    """Return the first failing rank with its last lines, as results and in a few words."""
    failure = _call(
        settings, run_files.find_failure, run=submitted.run, job_id=submitted.job_id, lines=_FAILURE_LINES
    )  # fmt: skip
    results: Results = {}
    lines = [printable(line) for line in failure["lines"]]
    history = [line.split("\t") for line in failure["history"]]
    if history := [columns for columns in history if len(columns) == 5]:
        rows = (f"{at} fault={fault} node={node}: {reason}" for at, _, fault, node, reason in history)
        results["failures"] = "\n".join(map(printable, rows))
    if failure["absent_ranks"]:
        absent, words = _absent(settings, failure)
        return results | absent | {"failure": "\n".join(lines)}, words
    words = ""
    if failure["rank"] is not None:
        results["failed-rank"] = str(failure["rank"])
        host = printable(failure["host"])
        words += f"; rank {failure['rank']}" + (f" on {host}" if host else "")
    elif known is not None and known.reason not in ("None", "NonZeroExitCode", ""):
        words += f" ({known.reason})"
    if lines:
        results["failure"] = "\n".join(lines)
        words += f": {one_line(lines[-1], 300)}"
    return results, words


def _remedy(settings: Settings, line: str) -> str:
    """Tell how to install the module that a ModuleNotFoundError names; empty for other lines."""
    if not (found := _MISSING_MODULE.search(line)):
        return ""
    create = "ddp env create NAME --requirements requirements.txt"
    submit = "environment=NAME ..." if settings.is_action else "--env NAME ..."
    user = f"as {settings.user}, " if settings.is_action else ""
    name = found[1].partition(".")[0][:60]
    again = f"{settings.typed('submit-ddp')} {submit}"
    return f"; {user}with {name} in requirements.txt: {create}, then: {again}"


def _absent(settings: Settings, failure: Json) -> tuple[Results, str]:
    """Return the ranks and nodes that never joined the rendezvous, as results and in words with a command."""
    ranks: list[int] = failure["absent_ranks"]
    nodes = [printable(str(node)) for node in failure["absent_nodes"]]
    many = "s" if len(ranks) > 1 else ""
    numbers = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    where = f" on {', '.join(nodes[:8])}{', ...' if len(nodes) > 8 else ''}" if nodes else ""
    results = {"absent-ranks": ", ".join(map(str, ranks[:256]))}
    if nodes:
        results["absent-nodes"] = ", ".join(nodes[:256])
    hint = settings.typed("doctor", nodes=",".join(nodes[:8]))
    return results, f"; rank{many} {numbers}{where} never joined the rendezvous; see: {hint}"


def figures(summary: Json) -> Results:
    """Return the figures of a summary.json; those that it lacks are left out."""
    names = {
        "loss": "last_loss", "first-loss": "first_loss", "best-loss": "best_loss",
        "tokens-per-second": "tokens_per_second", "samples-per-second": "samples_per_second", "steps": "steps",
        "nodes": "nodes", "ranks": "world_size", "checkpoint": "checkpoint", "curve": "loss_png",
    }  # fmt: skip
    found = {name: _figure(summary[key]) for name, key in names.items() if summary.get(key) is not None}
    ranks = files.as_list(summary.get("ranks"))
    if devices := sorted({str(files.as_object(rank).get("device", "")) for rank in ranks} - {""}):
        found["device"] = printable(", ".join(devices))[:200]
    return found


def aligned(rows: collections.abc.Sequence[collections.abc.Sequence[str]]) -> str:
    """Make a table of rows of printable cells; the first row is its head."""
    return tables.Table([[printable(cell) for cell in row] for row in rows])


def find(settings: Settings, named: typing.Any) -> Submitted:
    """Find a run's job by job id or run, else the newest run's. Raises ParameterError if there is none."""
    job_id, run, element = getattr(named, "job_id", None), named.run, getattr(named, "element", None)
    if job_id is not None and run is not None:
        raise ParameterError("run", "give either job-id or run")
    if element is not None:
        run, is_whole = run_of_element(settings, job_id, element)
        if is_whole:
            log = str(settings.runs / run / "logs" / f"{job_id}_{element}.out")
            script = str(settings.runs / run / "parts.sbatch")
            return Submitted(job_id or 0, run, str(settings.runs / run), script, log, element)
        job_id = None  # a run of a sweep has its own
    elif job_id is not None:
        run = _call(settings, run_files.find_run, job_id=job_id)["run"]
        if run is None:
            hint = as_element(job_id, lambda array, part: _find_element(settings, array, part)["run"] is not None)
            text = f"no run in {settings.runs} has job {job_id}; see: {settings.typed('list-jobs')}"
            raise ParameterError("job-id", text + (f"; or do you mean {hint}?" if hint else ""))
    elif run is None:
        run = newest(settings)
    record = about(settings, run)
    if record.get("kind") == "sweep":
        raise ParameterError("run", f"{run} is a sweep; name one of its runs, such as {run}-0")
    number = job_id if job_id is not None else record.get("job_id")
    if not isinstance(number, int):
        hint = settings.typed("list-runs")
        raise ParameterError("run", f"{settings.runs} has no run {run} with a job; see: {hint}")
    return submitted_as(settings, run, number)


def submitted_as(settings: Settings, run: str, job_id: int) -> Submitted:
    """Describe a run submitted as this job."""
    folder = settings.runs / run
    return Submitted(job_id, run, str(folder), str(folder / "job.sbatch"), str(folder / "logs" / f"{job_id}.out"))


def newest(settings: Settings) -> str:
    """Name the run that was submitted last. Raises TrainerError if there is none."""
    runs = _call(settings, run_files.list_runs)["runs"]
    if not runs:
        raise TrainerError(f"there is no run in {settings.runs} yet; start one: {settings.typed('submit-ddp')}")
    return str(runs[0])


def run_of_element(settings: Settings, array: int | None, element: int) -> tuple[str, bool]:
    """Return the run of an array's element, and whether all elements of the array are this one run."""
    if array is None:
        raise ParameterError("element", "belongs to an array; give the array's job-id, too")
    found = _find_element(settings, array, element)
    if found["of"] is None:
        raise ParameterError("job-id", f"{array} is not an array of {settings.runs}; omit element for a single job")
    if found["run"] is None:
        hint = settings.typed("show-job", run=found["of"])
        raise ParameterError("element", f"{found['of']}, job {array}, has no element {element}; see: {hint}")
    return str(found["run"]), found["run"] == found["of"]


def _find_element(settings: Settings, array: int, element: int) -> Json:
    return _call(settings, run_files.find_element, array=array, element=element)


def as_element(number: int, exists: collections.abc.Callable[[int, int], bool]) -> str:
    """Return the array element that a number such as 403 may stand for, as parameters; empty if none exists.

    Juju parses parameters as YAML, where 40_3 is the number 403.
    """
    text = str(number)
    for at in range(1, len(text)):
        array, part = text[:at], text[at:]
        if (part == "0" or not part.startswith("0")) and exists(int(array), int(part)):
            return f"job-id={array} element={part}"
    return ""


def resume_now(settings: Settings, params: typing.Any, log: Log) -> Results:
    """Make a requeued job that is held, or waits for its begin time, eligible now."""
    submitted = find(settings, params)
    known = job_of(settings, submitted)
    began = time.monotonic()
    while known is not None and _is_leaving(known) and time.monotonic() - began < LEAVE_S:
        log(f"job {known.job_id} is leaving its nodes")
        pause(REPORT_S)
        known = job_of(settings, submitted)
    if known is None or not known.is_active:
        state = known.state if known is not None else "unknown to Slurm"
        hint = f"{settings.typed('submit-ddp', run=submitted.run)} with the same parameters"
        text = f"job {submitted.job_id} is not waiting: it is {state}; to resume from its checkpoint: {hint}"
        raise TrainerError(text)
    if known.state not in _WAITING:
        hint = settings.typed("job-log", job_id=known.job_id)
        raise TrainerError(f"job {known.job_id} is not waiting: it is {known.state}; see: {hint}")
    release = f"as an administrator: scontrol release {known.job_id}"
    if known.restarts:
        pause(_APART_S)
    try:
        if known.is_held:
            jobs.release(known.job_id)
        jobs.start_now(known.job_id)
    except jobs.SlurmError as e:
        hint = _held(settings, known) or release
        raise TrainerError(f"job {known.job_id} ({known.reason}) cannot be released: {e}; {hint}") from e
    now_known = job_of(settings, submitted) or known
    if now_known.state in _WAITING and now_known.is_held:
        raise TrainerError(f"job {known.job_id} is still held ({now_known.reason}); {release}")
    log(f"job {known.job_id} was {known.state} ({known.reason}); it starts as soon as there is room")
    return {"job-id": str(known.job_id), "run": submitted.run, "state": now_known.state, "reason": now_known.reason}


def _held(settings: Settings, known: jobs.Job) -> str:
    """Tell why a job is held so that its user cannot release it, and what to type; empty if it is not."""
    if not (known.state in _WAITING and known.is_held and known.reason.startswith(remedies.HELD)):
        return ""
    unknown, add = remedies.unknown_account(settings)
    return f"job {known.job_id} is held ({known.reason}): by an administrator, or {unknown}: {settings.render(add)}"


def _is_leaving(known: jobs.Job) -> bool:
    """Whether a requeued job is still ending on its nodes; Slurm refuses to change an EXPEDITING one."""
    return known.state == "EXPEDITING" or (known.state == "COMPLETING" and bool(known.restarts))


def printable(text: str) -> str:
    """Replace what a terminal would interpret."""
    return "".join(c if c.isprintable() or c == "\t" else "?" for c in text)[:4000]


def pause(seconds: float) -> None:
    """Sleep; tests replace it."""
    time.sleep(seconds)


def now() -> datetime.datetime:
    """The time in UTC; tests replace it."""
    return datetime.datetime.now(facts.UTC)


def job(settings: Settings, job_id: int, element: int | None = None) -> jobs.Job | None:
    """Ask Slurm for a job of the user; None if it does not know it. Raises TrainerError if it does not answer."""
    try:
        if element is not None:
            return jobs.element(job_id, element, user=settings.user)
        return jobs.job(job_id, user=settings.user)
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e


def job_of(settings: Settings, submitted: Submitted) -> jobs.Job | None:
    """Ask Slurm for a run's job; None also if a new controller, which counts anew, gave its id to another run."""
    known = job(settings, submitted.job_id, submitted.element)
    return known if known is not None and is_of(known, submitted.run) else None


def is_of(known: jobs.Job, run: str) -> bool:
    """Whether a job is this run's, by its name; the runs of a sweep share the sweep's."""
    return known.name == run or (known.array_id is not None and known.name == run.rpartition("-")[0])


def _call(
    settings: Settings, operation: collections.abc.Callable[..., Json], *, timeout_s: float = 30, **given: object
) -> Json:
    return folders.call(settings, operation, timeout_s=timeout_s, workspace=str(settings.folder), **given)


def _read(settings: Settings, run: str, job_id: int | None, *, timeout_s: float = 30) -> Json:
    return _call(settings, run_files.read_run, timeout_s=timeout_s, run=run, job_id=job_id)


def _progress(settings: Settings, run: str, text: str) -> tables.Step:
    """Describe how far a run is, from its metrics."""
    began = tables.Step(text, text)
    try:
        metric = files.as_object(_read(settings, run, None, timeout_s=3)["metric"])
        config = _call(settings, run_files.read_config, timeout_s=3, run=run)
    except folders.WorkspaceError:
        return began
    step, loss, steps = metric.get("step"), metric.get("loss"), config.get("steps")
    if not isinstance(step, int):
        return began
    words = f"step {step}" + (f", loss {loss:.4f}" if isinstance(loss, int | float) else "")
    total = steps if isinstance(steps, int) and steps > 0 else None
    return tables.Step(f"{text}, {words}", text, words, done=step, total=total)


def _figure(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else one_line(str(value), 1200)


def _dump(record: collections.abc.Mapping[str, object]) -> str:
    return json.dumps(record, indent=1, sort_keys=True) + "\n"

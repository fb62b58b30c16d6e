"""Runs and their jobs: submitted, followed, explained, cancelled. Each run is a folder of the workspace."""

import collections.abc
import dataclasses
import datetime
import json
import re
import time
import typing

from ddp import remedies
from ddp.base import REPORT_S, Log, ParameterError, Results, Settings, TrainerError, one_line
from ddp.options import fields
from ddp.runs import drawing, run_files
from ddp.submit import checks, code
from ddp.workspace import folders, operations, tokens
from slurm_ddp.slurm import jobs

FAILURE_LINES = 5
_SILENCE_S = 600.0  # how long Slurm may not answer while a job is followed: slurmctld may be restarted
_CANCEL_S = 60.0
# slurmd refuses an attempt whose credential is not a second newer than the end of the last one ("already killed, do not
# launch batch job"), and the job has failed then.
_APART_S = 2.0
_ENDED_WELL = "COMPLETED"
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
OUTCOMES = {"done": _ENDED_WELL, "preempted": "PREEMPTED", "failed": "FAILED", "cancelled": "CANCELLED"}
PREPARATION = "prepare-"  # begins the names of the runs that make datasets


@dataclasses.dataclass(frozen=True)
class Submitted:
    """A run that Slurm has taken."""

    job_id: int
    run: str
    run_dir: str
    script: str
    log: str
    element: int | None = None  # of an array that makes a dataset, where one of them is meant

    def as_results(self) -> Results:
        """Return the results that every submission gives."""
        return {
            "job-id": str(self.job_id),
            "run": self.run,
            "run-dir": self.run_dir,
            "log": self.log,
            "script": self.script,
        }


def list_jobs(settings: Settings, params: fields.ListJobs, _: Log) -> Results:
    """Return the table of jobs."""
    try:
        return table(settings, params.lines, everybody=params.all)
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e


def show_job(settings: Settings, params: fields.ShowJob, _: Log) -> Results:
    """Return what is known of a job."""
    return show(settings, find(settings, params))


def job_log(settings: Settings, params: fields.JobLog, log: Log) -> Results:
    """Return the last lines of a job's log; with `follow` report each line as it comes, until the end or the limit."""
    submitted = find(settings, params)
    if params.follow:
        _follow_log(settings, submitted, params.rank, log, timeout_s=params.follow_timeout)
    return read_log(settings, submitted, rank=params.rank, lines=params.lines)


def _follow_log(settings: Settings, submitted: Submitted, rank: int | None, log: Log, *, timeout_s: float) -> None:
    began = time.monotonic()
    offsets: dict[str, int] = {}
    waits = False
    patience = Waits(settings, log)
    while True:
        known = _known_of(settings, submitted)
        over = known is None or not known.is_active  # what it wrote last is still to be read
        if not over:
            patience.note()
        told = folders.call(
            settings,
            run_files.follow_log, workspace=str(settings.folder), run=submitted.run, job_id=submitted.job_id,
            rank=rank, offsets=offsets, element=submitted.element,
        )  # fmt: skip
        for line in told["lines"]:
            log(printable(line))
        offsets = told["offsets"]
        if known is not None and known.state == "PENDING" and not waits:
            log(f"job {known.job_id} PENDING ({known.reason})")
        waits = known is not None and known.state == "PENDING"
        if over or time.monotonic() - began >= timeout_s:
            return
        pause(1.0)


def cancel_job(settings: Settings, params: fields.CancelJob, log: Log) -> Results:
    """Cancel a job, a run, a sweep or a preparation."""
    return cancel(settings, params, log)


def new_name(settings: Settings, kind: str) -> str:
    """Return the name for a run that was given none: its kind and the time."""
    stamp = now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 100):
        name = f"{kind}-{stamp}" if number == 1 else f"{kind}-{stamp}-{number}"
        if not settings.claims.take(name):
            continue  # another action's of the same second
        if folders.locate(settings, str(settings.runs / name)).kind == "absent":
            return name
        settings.claims.drop(name)
    raise TrainerError(f"{settings.runs} holds too many runs of this second; try again")


def claim(settings: Settings, run: str) -> None:
    """Keep other actions from submitting this run until this one has. Raises ParameterError where one does now."""
    if not settings.claims.take(run):
        hint = f"see: {settings.typed('list-jobs')}"
        raise ParameterError("run", f"another action is about to submit {run}; {hint}")


def about(settings: Settings, run: str) -> dict[str, object]:
    """Return what a run's job.json says; nothing where there is none."""
    return _dict(_read(settings, run, None)["job"])


def refuse_if_active(settings: Settings, run: str) -> None:
    """Raise ParameterError when a job of this run is pending or running."""
    names = [run]
    if sweep := about(settings, run).get("sweep"):
        names.append(str(sweep))
    for known in (job for name in names for job in jobs.jobs(user=settings.user, name=name)):
        if known.is_active:
            raise ParameterError(
                "run",
                f"{run} is at work as job {known.job_id} ({known.state}); wait for its end, or: "
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
    kept: code.Kept | None = None,
) -> Submitted:
    """Write a run's files and hand its script to Slurm, both as the submit user; `token`: with that file.

    Raises TrainerError.
    """
    folder = settings.runs / run
    record = {"format": 1, "job_id": None, "run": run, "submitted": now().strftime("%Y-%m-%dT%H:%M:%SZ"), **facts}
    if again:  # so that the summary of an earlier job is not taken for this one's
        record["summary_before"] = _read(settings, run, None)["summary_written"]
    texts = {**texts, "job.json": _dump(record)}
    folders.call(settings, run_files.create_run, workspace=str(settings.folder), run=run, texts=texts, again=again)
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
        if not again:
            folders.call(settings, run_files.remove_run, workspace=str(settings.folder), run=run)
        if isinstance(e, folders.WorkspaceError):
            raise
        raise checks.refused(str(e)) from e
    folders.call(settings, operations.write, path=str(folder / "job.json"), text=_dump({**record, "job_id": job_id}))
    settings.claims.drop(run)
    return submitted_as(settings, run, job_id)


def follow(settings: Settings, submitted: Submitted, log: Log, *, timeout_s: float) -> Results:
    """Wait for a job, telling of its progress, and return its results. Raises TrainerError unless it ended well."""
    deadline = time.monotonic() + timeout_s
    asked_last = told_last = 0.0
    answered = time.monotonic()
    waits = Waits(settings, log)
    told = ""
    patience_s = 5.0
    while True:
        try:
            known = jobs.job(submitted.job_id, user=settings.user, timeout_s=patience_s)
            answered = time.monotonic()
            patience_s = 5.0
        except jobs.SlurmError as e:
            if time.monotonic() - answered > _SILENCE_S:
                hint = settings.typed("show-job", run=submitted.run)
                text = f"job {submitted.job_id}: no word from Slurm: {e}; it may go on, see: {hint}"
                raise TrainerError(text, results=submitted.as_results()) from e
            known = None
            patience_s = min(60.0, patience_s * 2)  # a large cluster's controller may take its time
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
        if text != told or time.monotonic() - told_last >= REPORT_S:
            told, told_last = text, time.monotonic()
            log(text + (_progress(settings, submitted.run) if known and known.state == "RUNNING" else ""))
        if time.monotonic() >= deadline:
            hint = settings.typed("job-log", job_id=submitted.job_id)
            results = {**submitted.as_results(), "state": known.state if known else "UNKNOWN"}
            raise TrainerError(f"no end after {timeout_s:g} s: {text}; it goes on, see: {hint}", results=results)
        asked_last = asked_last or time.monotonic()
        pause(1.0 if time.monotonic() - asked_last < 120 else 3.0)


class Waits:
    """Say once, in an action that waits, how to end the waiting: Juju runs a unit's tasks one at a time."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self._settings, self._log = settings, log
        self._noted = False

    def note(self) -> None:
        """Say it, unless that is done; before the first line of progress. A user's own command ends with Ctrl-C."""
        if self._settings.is_action and not self._noted:
            self._noted = True
            how = f"juju cancel-task {self._settings.task} ends the waiting, and the job goes on"
            self._log(f"{self._settings.unit} runs no other action while this one waits; {how}")


def conclude(settings: Settings, submitted: Submitted, known: jobs.Job | None) -> Results:
    """Return the results of a job that ended well. Raises TrainerError with the reason why another did not."""
    tokens.drop(settings, submitted.run)
    results, trouble = _explain(settings, submitted, known)
    results |= _curve(settings, submitted.run)
    if trouble:
        raise TrainerError(trouble, results=results)
    return results


def _curve(settings: Settings, run: str) -> Results:
    """Return the run's loss curve as text; nothing where it has no metrics or they cannot be read in time."""
    try:
        told = folders.call(settings, run_files.read_curve, workspace=str(settings.folder), run=run)
    except folders.WorkspaceError:
        return {}
    drawn = drawing.draw(told["steps"], told["evals"])
    return {"curve-text": drawn} if drawn else {}


def show(settings: Settings, submitted: Submitted) -> Results:
    """Return all that is known of a job. Raises TrainerError."""
    known = _known_of(settings, submitted)
    if known is None or not known.is_active:
        results, trouble = _explain(settings, submitted, known)
        return results | ({"reason": trouble} if trouble else {})
    told = _read(settings, submitted.run, None)
    metric = _dict(told["metric"]) if known.state == "RUNNING" else {}
    results = {**submitted.as_results(), "state": known.state, "elapsed": known.elapsed, "nodes": known.nodes}
    results |= {"reason": _held(settings, known) or known.reason, "requeued": str(known.restarts)}
    results |= {name: _figure(metric[name]) for name in ("step", "loss") if metric.get(name) is not None}
    return {name: value for name, value in results.items() if value not in ("", "None", "0")}


def _explain(settings: Settings, submitted: Submitted, known: jobs.Job | None) -> tuple[Results, str]:
    """Return the results of a job that ended, and in one line why unless it ended well.

    A job that neither the controller nor an accounting remembers is judged by the outcome that it wrote.
    """
    told = _read(settings, submitted.run, submitted.job_id)
    outcome = _dict(told["outcome"])
    written = outcome.get("exit_code")
    if known is not None:
        state, exit_code = known.state, known.exit_code
        if isinstance(written, int) and written == exit_code + 128:  # sacct prints 137 as 9:0 (print.c of 24.11)
            exit_code = written
    else:
        words = {"done": _ENDED_WELL, "cancelled": "CANCELLED"}
        state = words.get(str(outcome.get("outcome")), "FAILED") if outcome else "UNKNOWN"
        exit_code = written if isinstance(written, int) else 0 if state == _ENDED_WELL else 1
    results = {**submitted.as_results(), "state": state, "exit-code": str(exit_code)}
    record = _dict(told["job"])
    is_latest = record.get("job_id") in (None, submitted.job_id)
    if is_latest and told["summary_written"] != record.get("summary_before", 0.0):
        results |= figures(_dict(told["summary"]))
    if state == _ENDED_WELL:
        return results, ""
    text = f"job {submitted.job_id} {state}, exit code {exit_code}"
    if outcome.get("outcome") == "preempted":
        step = outcome.get("step")
        text += (
            f"; it saved at step {step}, and submit-ddp run={submitted.run} with the same parameters goes on from there"
        )
        return results, text
    if state in ("CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE"):
        return results, text
    found, words = _failure(settings, submitted, known)
    if not record.get("container"):
        words += _remedy(settings, found.get("failure", "").rpartition("\n")[2])
    if not record:
        words += f"; {submitted.run_dir}/job.json is gone or damaged, and what the run said may be, too"
    return results | found, text + words


def _failure(settings: Settings, submitted: Submitted, known: jobs.Job | None) -> tuple[Results, str]:
    """Return the first failing rank and its last lines, and the same in a few words."""
    results: Results = {}
    words = ""
    failure = folders.call(
        settings,
        run_files.find_failure,
        workspace=str(settings.folder),
        run=submitted.run,
        job_id=submitted.job_id,
        lines=FAILURE_LINES,
    )
    lines = [printable(line) for line in failure["lines"]]
    history = [line.split("\t") for line in failure["history"]]
    if history := [words for words in history if len(words) == 5]:
        told = (f"{at} fault={fault} node={node}: {words}" for at, _, fault, node, words in history)
        results["failures"] = "\n".join(map(printable, told))
    if failure["absent_ranks"]:
        found, said = _absent(settings, failure)
        return results | found | {"failure": "\n".join(lines)}, words + said
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
    """Return what to type where a module is missing, or nothing."""
    if not (found := _MISSING_MODULE.search(line)):
        return ""
    create = "ddp env create NAME --requirements requirements.txt"
    submit = "environment=NAME ..." if settings.is_action else "--env NAME ..."
    user = f"as {settings.user}, " if settings.is_action else ""
    name = found[1].partition(".")[0][:60]
    again = f"{settings.typed('submit-ddp')} {submit}"
    return f"; {user}with {name} in requirements.txt: {create}, then: {again}"


def _absent(settings: Settings, failure: folders.Json) -> tuple[Results, str]:
    """Return which ranks and nodes never came, and the same in words with what to look at."""
    ranks: list[int] = failure["absent_ranks"]
    nodes = [printable(str(node)) for node in failure["absent_nodes"]]
    many = "s" if len(ranks) > 1 else ""
    numbers = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    where = f" on {', '.join(nodes[:8])}{', ...' if len(nodes) > 8 else ''}" if nodes else ""
    found = {"absent-ranks": ", ".join(map(str, ranks[:256])), "absent-nodes": ", ".join(nodes[:256])}
    hint = settings.typed("doctor", nodes=",".join(nodes[:8]))
    return {
        name: text for name, text in found.items() if text
    }, f"; rank{many} {numbers}{where} did not come; see: {hint}"


def figures(summary: dict[str, object]) -> Results:
    """Return a run's figures from its summary.json; what it does not hold is left out."""
    ranks = _list(summary.get("ranks"))
    names = {
        "loss": "last_loss",
        "first-loss": "first_loss",
        "best-loss": "best_loss",
        "tokens-per-second": "tokens_per_second",
        "samples-per-second": "samples_per_second",
        "steps": "steps",
        "nodes": "nodes",
        "ranks": "world_size",
        "checkpoint": "checkpoint",
        "curve": "loss_png",
    }
    found = {name: _figure(summary[key]) for name, key in names.items() if summary.get(key) is not None}
    if devices := sorted({str(_dict(rank).get("device", "")) for rank in ranks} - {""}):
        found["device"] = printable(", ".join(devices))[:200]
    return found


def table(settings: Settings, lines: int, *, everybody: bool = False) -> Results:
    """Return the user's jobs that Slurm still knows, or everybody's."""
    known = jobs.jobs(user=None if everybody else settings.user)
    users = ("USER",) if everybody else ()
    rows = [("JOB-ID", *users, "RUN", "STATE", "NODES", "ELAPSED", "LIMIT", "SUBMITTED", "WHERE")]
    for job in known[:lines]:
        where = job.nodes or (f"({job.reason})" if job.is_active else "")
        owner = (job.user,) if everybody else ()
        times = (job.elapsed, job.time_limit, job.submitted)
        rows.append((str(job.job_id), *owner, job.run_name[:64], job.state, str(job.num_nodes), *times, where))
    return {"count": str(len(known)), "jobs": aligned(rows)}


def aligned(rows: collections.abc.Sequence[collections.abc.Sequence[str]]) -> str:
    """Return rows of printable cells as a table; the first one is its head."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def read_log(settings: Settings, submitted: Submitted, *, rank: int | None, lines: int) -> Results:
    """Return the last lines of a job's log. Raises TrainerError."""
    results = {"job-id": str(submitted.job_id), "run": submitted.run}
    known = _known_of(settings, submitted)
    if known is not None:
        results["state"] = known.state
    try:
        found = folders.call(
            settings,
            run_files.read_log,
            workspace=str(settings.folder),
            run=submitted.run,
            job_id=submitted.job_id,
            lines=lines,
            rank=rank,
            element=submitted.element,
        )
    except folders.MissingError as e:
        where = f" ({known.reason})" if known is not None and known.state == "PENDING" else ""
        state = f"job {submitted.job_id} is {known.state}{where}" if known is not None else f"job {submitted.job_id}"
        of_rank = "" if rank is None else f" of rank {rank}"
        hint = settings.typed("show-job", job_id=submitted.job_id)
        if submitted.element is not None:
            hint += f" element={submitted.element}"
        yet = " yet" if known is not None and known.is_active else ""
        raise TrainerError(f"{state}; there is no output{of_rank}{yet}; see: {hint}", results=results) from e
    return {
        **results,
        "log": found["path"],
        "lines": str(len(found["lines"])),
        "text": "\n".join(map(printable, found["lines"])),
    }


def find(settings: Settings, named: fields.OneJob) -> Submitted:
    """Return a run's job by either's name, or the newest run's. Raises ParameterError where there is none."""
    workspace = str(settings.folder)
    job_id, run, element = named.job_id, named.run, named.element
    if job_id is not None and run is not None:
        raise ParameterError("run", "give either job-id or run")
    if element is not None:
        run, is_whole = _run_of_element(settings, job_id, element)
        if is_whole:
            log = str(settings.runs / run / "logs" / f"{job_id}_{element}.out")
            script = str(settings.runs / run / "parts.sbatch")
            return Submitted(job_id or 0, run, str(settings.runs / run), script, log, element)
        job_id = None  # a sweep's run knows its own
    elif job_id is not None:
        run = folders.call(settings, run_files.find_run, workspace=workspace, job_id=job_id)["run"]
        if run is None:
            hint = _as_element(job_id, lambda array, part: _looked_up(settings, array, part)["run"] is not None)
            text = f"{job_id} is no job of a run in {settings.runs}; see: {settings.typed('list-jobs')}"
            raise ParameterError("job-id", text + (f"; or do you mean {hint}?" if hint else ""))
    elif run is None:
        run = newest(settings)
    record = _dict(_read(settings, run, None)["job"])
    if record.get("kind") == "sweep":
        raise ParameterError("run", f"{run} is a sweep; name one of its runs, such as {run}-0")
    number = job_id if job_id is not None else record.get("job_id")
    if not isinstance(number, int):
        text = f"{run} is no run with a job in {settings.runs}; see: {settings.typed('list-runs')}"
        raise ParameterError("run", text)
    return submitted_as(settings, run, number)


def submitted_as(settings: Settings, run: str, job_id: int) -> Submitted:
    """Return a run as this job."""
    folder = settings.runs / run
    return Submitted(job_id, run, str(folder), str(folder / "job.sbatch"), str(folder / "logs" / f"{job_id}.out"))


def newest(settings: Settings) -> str:
    """Return the run that was submitted last. Raises TrainerError where there is none."""
    runs = folders.call(settings, run_files.list_runs, workspace=str(settings.folder))["runs"]
    if not runs:
        raise TrainerError(f"there is no run in {settings.runs} yet; start one: {settings.typed('submit-ddp')}")
    return str(runs[0])


def _run_of_element(settings: Settings, array: int | None, element: int) -> tuple[str, bool]:
    """Return the run behind an element of an array, and whether all elements of the array are one run."""
    if array is None:
        raise ParameterError("element", "is an array's, so give the array's job-id, too")
    found = _looked_up(settings, array, element)
    if found["of"] is None:
        raise ParameterError("job-id", f"{array} is no array of {settings.runs}; leave element away for a single job")
    if found["run"] is None:
        hint = settings.typed("show-job", run=found["of"])
        raise ParameterError("element", f"{found['of']}, job {array}, has no element {element}; see: {hint}")
    return str(found["run"]), found["run"] == found["of"]


def _looked_up(settings: Settings, array: int, element: int) -> folders.Json:
    return folders.call(settings, run_files.find_element, workspace=str(settings.folder), array=array, element=element)


def _as_element(number: int, is_there: collections.abc.Callable[[int, int], bool]) -> str:
    """Return how to write the element of an array that a number such as 403 may stand for, or nothing.

    Juju reads its parameters as YAML, and YAML's 40_3 is the number 403.
    """
    text = str(number)
    for at in range(1, len(text)):
        array, part = text[:at], text[at:]
        if (part == "0" or not part.startswith("0")) and is_there(int(array), int(part)):
            return f"job-id={array} element={part}"
    return ""


def resume_now(settings: Settings, params: fields.ResumeNow, log: Log) -> Results:
    """Let a job that was queued again, and waits for a later time or is held, start as soon as there is room."""
    submitted = find(settings, params)
    known = _known_of(settings, submitted)
    began = time.monotonic()
    while known is not None and _is_leaving(known) and time.monotonic() - began < _CANCEL_S:
        log(f"job {known.job_id} is leaving its nodes")
        pause(REPORT_S)
        known = _known_of(settings, submitted)
    if known is None or not known.is_active:
        state = known.state if known is not None else "unknown to Slurm"
        hint = f"{settings.typed('submit-ddp', run=submitted.run)} with the same parameters"
        raise TrainerError(f"job {submitted.job_id} does not wait: it is {state}; to go on from its checkpoint: {hint}")
    if known.state not in _WAITING:
        hint = settings.typed("job-log", job_id=known.job_id)
        raise TrainerError(f"job {known.job_id} does not wait: it is {known.state}; what it does: {hint}")
    if known.restarts:
        pause(_APART_S)
    try:
        if known.is_held:
            jobs.release(known.job_id)
        jobs.start_now(known.job_id)
    except jobs.SlurmError as e:
        hint = _held(settings, known) or f"an administrator lets it go with: scontrol release {known.job_id}"
        raise TrainerError(f"job {known.job_id} ({known.reason}) cannot be let go: {e}; {hint}") from e
    now_known = _known_of(settings, submitted) or known
    if now_known.state in _WAITING and now_known.is_held:
        hint = f"as an administrator: scontrol release {known.job_id}"
        raise TrainerError(f"job {known.job_id} is still held ({now_known.reason}); {hint}")
    log(f"job {known.job_id} was {known.state} ({known.reason}); it starts as soon as there is room")
    return {"job-id": str(known.job_id), "run": submitted.run, "state": now_known.state, "reason": now_known.reason}


def _held(settings: Settings, known: jobs.Job) -> str:
    """Return why a job is held that its user cannot release, and what to type; nothing where it is not."""
    if not (known.state in _WAITING and known.is_held and known.reason.startswith(remedies.HELD)):
        return ""
    unknown, add = remedies.unknown_account(settings)
    release = f"juju exec --unit slurmctld/0 -- scontrol release {known.job_id}"
    return f"job {known.job_id} is held ({known.reason}): by an administrator, or {unknown}: {add}; then: {release}"


def _is_leaving(known: jobs.Job) -> bool:
    """Return whether a job that is queued again still ends on its nodes; Slurm refuses to change an EXPEDITING one."""
    return known.state == "EXPEDITING" or (known.state == "COMPLETING" and bool(known.restarts))


def cancel(settings: Settings, named: fields.OneJob, log: Log) -> Results:
    """Cancel jobs of the submit user and return their state once they have left the nodes. Raises TrainerError."""
    job_id, run = named.job_id, named.run
    if (job_id is None) == (run is None):
        raise ParameterError("job-id", "give either job-id or run")
    if named.element is not None:
        run, is_whole = _run_of_element(settings, job_id, named.element)
        if is_whole:
            how = f"a dataset's preparation is cancelled as a whole: {settings.typed('cancel-job', run=run)}"
            raise ParameterError("element", f"{job_id}_{named.element} is a part of {run}; {how}")
        doomed = _doomed_run(settings, run, name="element")
    else:
        doomed = _doomed_run(settings, run) if run is not None else _doomed_job(settings, job_id or 0)
    name, what = doomed.known[0].name, doomed.text
    try:
        jobs.cancel(*doomed.words)
    except jobs.SlurmError as e:
        hint = f"how it stands: {settings.typed('list-jobs')}"
        raise TrainerError(f"{what} could not be cancelled: {e}; {hint}") from e
    log(f"{what} was {_states(doomed.known)}; cancelling, its ranks may save first")
    began = told = time.monotonic()
    left = doomed.known
    while any(job.is_active for job in left) and time.monotonic() - began < _CANCEL_S:
        pause(0.5)
        left = [job for job in _queue(settings) if doomed.holds(job) and job.job_id not in doomed.over]
        if time.monotonic() - told >= REPORT_S:
            told = time.monotonic()
            log(f"{what} is {_states(left) or 'gone'}, {told - began:.0f} s")
    tokens.drop(settings, name)
    told_id = job_id if job_id is not None and named.element is None else doomed.known[0].job_id
    results = {"job-id": str(told_id), "state": _states(left) or "CANCELLED", "run": printable(doomed.run)}
    return results | ({"cancelled": " ".join(map(str, doomed.words))} if len(doomed.words) > 1 else {})


@dataclasses.dataclass(frozen=True)
class _Doomed:
    """What is to be cancelled."""

    words: tuple[int | str, ...]  # for scancel
    known: collections.abc.Sequence[jobs.Job]  # those of them that Slurm knows, at least one
    run: str
    text: str  # in a message
    over: frozenset[int] = frozenset()  # jobs of the same array or name that ended before

    def holds(self, job: jobs.Job) -> bool:
        """Return whether a job is one of these."""
        return f"{job.array_id}_{job.task}" in self.words or (job.array_id or job.job_id) in self.words


def _doomed_job(settings: Settings, job_id: int) -> _Doomed:
    """Return what cancelling a job by its id means. Raises ParameterError."""
    known = _known(settings, job_id)
    queue = _queue(settings)
    active = [job for job in queue if job.is_active]
    hint = _as_element(
        job_id, lambda array, part: any(job.array_id == array and jobs.holds_task(job.task, part) for job in active)
    )
    if known is None:
        text = f"{job_id} is no job of {settings.user} that Slurm knows; see: {settings.typed('list-jobs')}"
        raise ParameterError("job-id", text + (f"; or do you mean {hint}?" if hint else ""))
    if hint and known.is_active:
        meant = f"{job_id} is {known.run_name}, but also what Juju makes of an element, {hint}"
        raise ParameterError("job-id", f"{meant}; say run={known.run_name}, or {hint}")
    if known.name.startswith(PREPARATION):
        return _doomed_run(settings, known.name, name="job-id")
    array = [job for job in queue if job.array_id == known.array_id]
    mates = [job for job in array if job.is_active]
    if known.array_id == job_id and any(mate.job_id != job_id for mate in mates):  # its tasks go with it
        if known.is_active and known.task.isdecimal():
            how = f"run={known.run_name} for that run alone, run={known.name} for all"
            raise ParameterError("job-id", f"{job_id} is the sweep {known.name}, and its run {known.run_name}; {how}")
        over = frozenset(job.job_id for job in array if not job.is_active)
        return _Doomed((job_id,), mates, known.name, f"sweep {known.name}", over)
    if not known.is_active:
        raise ParameterError("job-id", f"{job_id} has ended already: {known.state}")
    word = f"{known.array_id}_{known.task}" if known.task.isdecimal() else job_id
    return _Doomed((word,), [known], known.run_name if known.task.isdecimal() else known.name, f"job {job_id}")


def _doomed_run(settings: Settings, run: str, *, name: str = "run") -> _Doomed:
    """Return what cancelling a run, a sweep or a preparation by its name means. Raises ParameterError."""
    queue = _queue(settings)
    active = [job for job in queue if job.is_active]
    over = frozenset(job.job_id for job in queue if not job.is_active)
    if named := [job for job in active if job.name == run]:  # an array and the job that waits for its end have one name
        words = tuple(dict.fromkeys(job.array_id or job.job_id for job in named))  # the last submitted first
        text = f"run {run}" if len(words) > 1 or named[0].array_id else f"job {named[0].job_id}"
        return _Doomed(words, named, run, text, over)
    sweep, _, number = run.rpartition("-")
    tasks = [job for job in active if job.array_id is not None and job.name == sweep]
    if tasks and number.isdecimal():
        for task in tasks:
            if task.task == number:
                return _Doomed((f"{task.array_id}_{number}",), [task], run, f"run {run}")
        if waiting := [task for task in tasks if not task.task.isdecimal() and jobs.holds_task(task.task, int(number))]:
            rest = dataclasses.replace(waiting[0], task=number)  # it has no record of its own as long as it waits
            return _Doomed((f"{rest.array_id}_{number}",), [rest], run, f"run {run}")
    hint = f"see: {settings.typed('list-jobs')}"
    raise ParameterError(name, f"no job of {run} is waiting or running; {hint}")


def _queue(settings: Settings) -> tuple[jobs.Job, ...]:
    try:
        return jobs.jobs(user=settings.user)
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e


def _states(known: collections.abc.Iterable[jobs.Job]) -> str:
    return ", ".join(sorted({job.state for job in known}))


def printable(text: str) -> str:
    """Return a line without what a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\t" else "?" for c in text)[:4000]


def pause(seconds: float) -> None:
    """Sleep; tests replace it."""
    time.sleep(seconds)


def now() -> datetime.datetime:
    """Return the time; tests replace it."""
    return datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017 - Python 3.10


def _known(settings: Settings, job_id: int, element: int | None = None) -> jobs.Job | None:
    try:
        if element is not None:
            return jobs.element(job_id, element, user=settings.user)
        return jobs.job(job_id, user=settings.user)
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e


def _known_of(settings: Settings, submitted: Submitted) -> jobs.Job | None:
    """Return a run's job; None also where a new controller, which counts anew, gave its number to another run's."""
    known = _known(settings, submitted.job_id, submitted.element)
    return known if known is not None and is_of(known, submitted.run) else None


def is_of(known: jobs.Job, run: str) -> bool:
    """Return whether a job is this run's, by its name; a sweep's runs share the sweep's."""
    return known.name == run or (known.array_id is not None and known.name == run.rpartition("-")[0])


def _read(settings: Settings, run: str, job_id: int | None, *, timeout_s: float = 30) -> folders.Json:
    return folders.call(
        settings, run_files.read_run, timeout_s=timeout_s, workspace=str(settings.folder), run=run, job_id=job_id
    )


def _progress(settings: Settings, run: str) -> str:
    """Return how far a run is, from its metrics."""
    try:
        told = _read(settings, run, None, timeout_s=3)
    except folders.WorkspaceError:
        return ""
    metric = _dict(told["metric"])
    step, loss = metric.get("step"), metric.get("loss")
    text = f", step {step}" if isinstance(step, int) else ""
    return text + (f", loss {loss:.4f}" if isinstance(loss, int | float) else "")


def _figure(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else one_line(str(value), 1200)


def _dump(record: collections.abc.Mapping[str, object]) -> str:
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


def _dict(value: object) -> dict[str, object]:
    return typing.cast(dict[str, object], value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return typing.cast(list[object], value) if isinstance(value, list) else []

"""The results of a run that ended, and why it failed."""

from ddp.problem import Command, Problem, Remedy, Results, one_line
from ddp.run import failure_remedies, logs
from ddp.run.model import Run, State
from ddp.run.untrusted import printable
from ddp.workspace.folders import Workspace

_LINES = 5
_MAX_NAMED_RANKS = 16
_MAX_NAMED_NODES = 8
_ASKED_TO_STOP = (State.CANCELLED, State.TIMEOUT, State.PREEMPTED, State.DEADLINE)
_FIGURES = (
    "last_loss first_loss best_loss tokens_per_second samples_per_second steps nodes world_size"
    " checkpoint loss_png"
).split()
_NAMES = {"last_loss": "loss", "world_size": "ranks", "loss_png": "curve"}


def results_of(run: Run) -> Results:
    """Return the state of a run that ended, its exit code and its known figures."""
    results = {"state": str(run.state)}
    if not run.state.is_active and run.state != State.UNKNOWN:
        results["exit-code"] = str(exit_code(run))

    known = {"last_loss": run.loss, "best_loss": run.best_loss, "steps": run.step} | run.summary
    for key in _FIGURES:
        value = known.get(key)
        if value is None:
            continue
        name = _NAMES.get(key, key.replace("_", "-"))
        is_real = isinstance(value, float)
        results[name] = f"{value:.6g}" if is_real else one_line(str(value), 1200)

    if run.devices:
        results["device"] = printable(", ".join(sorted(run.devices)), 200)
    return results


def exit_code(run: Run) -> int:
    """Return the last job's exit code. Slurm's accounting prints 137 as 9:0 (print.c of 24.11)."""
    attempt = run.last_attempt
    written = attempt.exit_code if attempt is not None else None
    if run.job is not None and written != run.job.exit_code + 128:
        return run.job.exit_code
    return written if written is not None else int(run.state != State.COMPLETED)


def explain(workspace: Workspace, run: Run, job_id: int | None) -> Problem | None:
    """Return why a run failed, with details as results; None if it completed or goes on."""
    if run.state == State.COMPLETED or run.state.is_active or job_id is None:
        return None
    ended = f"job {job_id} {run.state}, exit code {exit_code(run)}"
    attempt = run.last_attempt
    if attempt is not None and attempt.outcome == "preempted":
        ended += f"; it saved at step {attempt.step}; to resume, submit it with the same options"
        return Problem(ended, remedy=Command("submit", {"run": run.name}))
    if run.state in _ASKED_TO_STOP:
        return Problem(ended)

    failure = workspace.do(logs.find_failure, path=run.folder, job_id=job_id, lines=_LINES)
    if failure.absent_ranks:
        words, remedy = _absent(failure)
    else:
        words = _describe(run, failure)
        lines = _lines(failure)
        remedy = failure_remedies.find(workspace, run, lines) if lines else None
    if not run.record:
        words += f"; {run.folder}/job.json is missing or damaged"
        words += ", so other files of the run may be, too"
    return Problem(ended + words, remedy=remedy, results=_details(run, job_id, failure))


def _lines(failure: logs.FirstFailure) -> list[str]:
    return [printable(line) for line in failure.lines]


def _quoted(failure: logs.FirstFailure) -> str:
    """Return the line that the problem quotes, "" if it names absent ranks or knows no line."""
    if failure.absent_ranks or not failure.lines:
        return ""
    return one_line(_lines(failure)[-1], 300)


def _details(run: Run, job_id: int, failure: logs.FirstFailure) -> Results:
    """Return the details that the problem's one line leaves out."""
    results: Results = {}
    if rows := _failures(run, job_id, _quoted(failure)):
        results["failures"] = "\n".join(map(printable, rows))
    if lines := _unquoted(failure):
        results["failure"] = "\n".join(lines)
    if failure.rank is not None and not failure.absent_ranks:
        results["failed-rank"] = str(failure.rank)
    return results


def _failures(run: Run, job_id: int, quoted: str) -> list[str]:
    """List the failures of a job's attempts; none if the quoted line is the only one."""
    own = [one for one in run.failures if one.attempt.startswith(f"{job_id}.")]
    if len(own) == 1 and quoted:
        beginning = quoted.removeprefix("[FATAL] ")[:200]
        if own[0].reason.startswith(beginning):
            return []
    return [f"{one.time} fault={one.fault} node={one.node}: {one.reason}" for one in own]


def _unquoted(failure: logs.FirstFailure) -> list[str]:
    """Return the last lines without the one that is quoted whole."""
    lines = _lines(failure)
    quoted = _quoted(failure)
    is_whole = quoted and one_line(lines[-1], 4000) == quoted
    return lines[:-1] if is_whole else lines


def _describe(run: Run, failure: logs.FirstFailure) -> str:
    """Describe the rank that failed first, with its error and the place in the user's code."""
    words = ""
    if failure.rank is not None:
        words = f"; rank {failure.rank}"
        if failure.host:
            words += f" on {printable(failure.host)}"
    elif run.job is not None and run.job.reason not in ("None", "NonZeroExitCode", ""):
        words = f" ({run.job.reason})"

    if failure.lines:
        words += f": {_quoted(failure)}"
        if failure.place:
            words += f" ({printable(failure.place, 200)})"
    return words


def _absent(failure: logs.FirstFailure) -> tuple[str, Remedy]:
    """Describe the ranks that never joined the rendezvous, and their nodes."""
    nodes = [printable(str(node)) for node in failure.absent_nodes]
    plural = "s" if len(failure.absent_ranks) > 1 else ""
    words = f"; rank{plural} {_list(failure.absent_ranks, _MAX_NAMED_RANKS)}"
    if nodes:
        words += f" on {_list(nodes, _MAX_NAMED_NODES)}"
    words += " never joined the rendezvous"
    return words, Command("doctor", {"nodes": ",".join(nodes[:_MAX_NAMED_NODES])})


def _list(names: list[int] | list[str], limit: int) -> str:
    shown = ", ".join(map(str, names[:limit]))
    return f"{shown}, ..." if len(names) > limit else shown

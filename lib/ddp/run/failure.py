"""The results of a run that ended, and why it failed."""

import functools
import re

from ddp.node.diagnosis import messages
from ddp.problem import Command, Problem, Remedy, Results, Step, one_line
from ddp.project import copies
from ddp.run import folder
from ddp.run.model import Run, State
from ddp.run.reading import printable
from ddp.settings import Settings
from ddp.workspace import folders

_LINES = 5
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_MISSING_FILE = re.compile(
    r"FileNotFoundError: .*['\"]([^/'\"][^'\"]*)['\"]$"
)  # by a relative path
_TAKE_IN = "put it into the project; if git ignores it, !NAME in .ddpignore takes it in"
# Programs that a node may lack, by the exceptions of torch._inductor (also around Triton's), subprocess and GitPython
_COMPILER = (
    r"([\w.]*InductorError: )?([\w.]*InvalidCxxCompiler: |RuntimeError: Failed to find C compiler)"
)
_GIT = r"FileNotFoundError: \[Errno 2\] .*: 'git'$|([\w.]+\.)?GitCommandNotFound: |ImportError: .*Bad git executable"
_PACKAGES = {
    _COMPILER: ("g++", "torch.compile needs a C++ compiler"),
    _GIT: ("git", "the program calls git"),
}
_FIGURES = (
    "last_loss first_loss best_loss tokens_per_second samples_per_second steps nodes world_size checkpoint loss_png"
).split()
_NAMES = {"last_loss": "loss", "world_size": "ranks", "loss_png": "curve"}


def results_of(run: Run) -> Results:
    """Return the state of a run that ended, its exit code and its figures; those that it lacks are left out."""
    results = {"state": str(run.state)}
    if not run.state.is_active and run.state != State.UNKNOWN:
        results["exit-code"] = str(exit_code(run))
    known = {"last_loss": run.loss, "best_loss": run.best_loss, "steps": run.step} | run.summary
    for key in _FIGURES:
        if (value := known.get(key)) is not None:
            name = _NAMES.get(key, key.replace("_", "-"))
            results[name] = (
                f"{value:.6g}" if isinstance(value, float) else one_line(str(value), 1200)
            )
    return results | (
        {"device": printable(", ".join(sorted(run.devices)), 200)} if run.devices else {}
    )


def exit_code(run: Run) -> int:
    """Return the exit code of the last job. Slurm's accounting prints 137 as 9:0 (print.c of 24.11)."""
    attempt = run.last_attempt
    written = attempt.exit_code if attempt is not None else None
    if run.job is not None and written != run.job.exit_code + 128:
        return run.job.exit_code
    return written if written is not None else int(run.state != State.COMPLETED)


def explain(settings: Settings, run: Run, job_id: int | None) -> Problem | None:
    """Return why a run that ended did not complete, with details as results; None if it completed."""
    if run.state == State.COMPLETED or run.state.is_active or job_id is None:
        return None
    text = f"job {job_id} {run.state}, exit code {exit_code(run)}"
    attempt = run.last_attempt
    if attempt is not None and attempt.outcome == "preempted":
        text += f"; it saved at step {attempt.step}; to resume, submit it with the same options"
        return Problem(text, remedy=Command("submit", {"run": run.name}))
    if run.state in (State.CANCELLED, State.TIMEOUT, State.PREEMPTED, State.DEADLINE):
        return Problem(text)
    failure = folders.call(
        settings, folder.find_failure, path=run.folder, job_id=job_id, lines=_LINES
    )
    results: Results = {}
    own = [one for one in run.failures if one.attempt.startswith(f"{job_id}.")]
    lines = [printable(line) for line in failure.lines]
    quoted = (
        one_line(lines[-1], 300) if lines and not failure.absent_ranks else ""
    )  # in the error's own line
    if own and not (
        quoted and len(own) == 1 and own[0].reason.startswith(quoted.removeprefix("[FATAL] ")[:200])
    ):
        rows = (f"{one.time} fault={one.fault} node={one.node}: {one.reason}" for one in own)
        results["failures"] = "\n".join(map(printable, rows))
    if unquoted := lines[:-1] if quoted and one_line(lines[-1], 4000) == quoted else lines:
        results["failure"] = "\n".join(unquoted)
    words, remedy = "", None
    if failure.absent_ranks:
        words, remedy = _absent(failure)
    else:
        if failure.rank is not None:
            results["failed-rank"] = str(failure.rank)
            host = printable(failure.host)
            words = f"; rank {failure.rank}" + (f" on {host}" if host else "")
        elif run.job is not None and run.job.reason not in ("None", "NonZeroExitCode", ""):
            words = f" ({run.job.reason})"
        if lines:
            words += f": {quoted}" + (
                f" ({printable(failure.place, 200)})" if failure.place else ""
            )
            remedy = _remedy(settings, run, lines)
    if not run.record:
        words += (
            f"; {run.folder}/job.json is missing or damaged, so other files of the run may be, too"
        )
    return Problem(text + words, remedy=remedy, results=results)


def _remedy(settings: Settings, run: Run, lines: list[str]) -> Remedy | None:
    """Return the remedy for the error in a log's last lines; None if nothing is known."""
    has_own = run.record.get("container")
    found = (
        None
        if has_own
        else _missing_module(settings, run, lines[-1]) or _missing_package(lines[-1])
    )
    missing = _MISSING_FILE.search(lines[-1])
    if found is None and missing and (path := _left_out(settings, run, missing[1])):
        words = f"found at {path}, which is not in the run's copy: {_TAKE_IN}, or give its absolute path"
        return Step("copy-file", words)
    if found is None and (known := messages.known(lines)):
        return Step("known-fault", known[1])
    return found


def _left_out(settings: Settings, run: Run, *names: str) -> str:
    """Return the path of what the run's copy lacks, or ""."""
    found = folders.call(
        settings, copies.find_left_out, folder=run.folder, record=run.record, names=names
    )
    return printable(found, 300) if found else ""


def _missing_module(settings: Settings, run: Run, line: str) -> Remedy | None:
    """Return how Python finds the module that a ModuleNotFoundError names; None for other lines.

    A module of the project is never to be installed: a package index may have another one of its name.
    """
    if not (found := _MISSING_MODULE.search(line)):
        return None
    module = found[1].partition(".")[0][:60]
    find = functools.partial(copies.find_module, run.folder, run.record)
    if place := folders.call(settings, find, name=found[1]):
        path, folder_ = (printable(text, 300) for text in place)
        words = f"found at {path}, which is not on sys.path: --env PYTHONPATH={folder_}"
        return Step("module-path", words, {"path": path, "folder": folder_})
    if place := folders.call(settings, find, name=module):
        words = f"{printable(place[0], 300)} has no such module; !NAME in .ddpignore takes in what git ignores"
        return Step("copy-module", words)
    if path := _left_out(settings, run, f"{module}.py", module):
        words = f"found at {path}, which is not in the run's copy, or not on sys.path: {_TAKE_IN}"
        return Step("copy-module", words)
    create = "ddp env create NAME --requirements requirements.txt"
    words = f"with {module} in requirements.txt: {create}, then: ddp submit -e NAME ..."
    if python := run.record.get("python"):
        words = f"{printable(str(python), 300)} -m pip install {module}"
    return Step("install-module", words, {"module": module, "user": settings.user})


def _missing_package(line: str) -> Remedy | None:
    """Return how the nodes get a program, if an exception is that they lack it."""
    for pattern, (package, why) in _PACKAGES.items():
        if re.match(pattern, messages.RANK.sub("", line, count=1)):
            words = f"{why}: an administrator types on the nodes: apt-get install {package}"
            return Step("install-package", words, {"package": package, "why": why})
    return None


def _absent(failure: folder.FirstFailure) -> tuple[str, Remedy]:
    """Describe the ranks that never joined the rendezvous, with their nodes."""
    ranks, nodes = failure.absent_ranks, [printable(str(node)) for node in failure.absent_nodes]
    numbers = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    where = f" on {', '.join(nodes[:8])}{', ...' if len(nodes) > 8 else ''}" if nodes else ""
    words = f"; rank{'s' if len(ranks) > 1 else ''} {numbers}{where} never joined the rendezvous"
    return words, Command("doctor", {"nodes": ",".join(nodes[:8])})

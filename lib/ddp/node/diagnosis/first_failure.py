"""Rules that find the rank whose failure ended an attempt.

A rank that reports its own error, or that exited without one, like `sys.exit("why")`, counts more
than one that only reports a lost peer; among equals the earliest counts. If the launcher reports
that ranks exited, but not one that reported an error, these errors did not end them.
"""

import collections.abc
import dataclasses
import re
import signal

from ddp.node.diagnosis import excerpts, messages
from ddp.node.diagnosis.evidence import Evidence
from ddp.node.diagnosis.rank_errors import Failure

Rule = collections.abc.Callable[[Evidence], Failure | None]

# Lines of Slurm and of this program; 26.05 writes a time instead of slurmstepd
_OURS = re.compile(
    r"srun: |slurmstepd(-\S+)?: |\[[\dT:.-]+\] error: \*\*\* (JOB|STEP) "
    r"|\[(RESULT|ENV|PREEMPT|REQUEUE|RESTART|FAILED)\]"
)
_TASK = re.compile(r"^\d+: ")  # srun's label
_LEFT_EARLY = (
    "exited with code 0 while others went on; do all ranks get the same number of batches?"
)


def find(evidence: Evidence) -> Failure:
    """Return the rank that failed first, by the first rule that fits.

    Without a rank it is the end of the job's log.
    """
    for rule in RULES:
        failure = rule(evidence)
        if failure is not None:
            return failure
    return _end_of_log(evidence)


def _recorded(evidence: Evidence) -> Failure | None:
    """The job itself recorded a fault of the filesystem or the network."""
    if not evidence.recorded:
        return None
    return Failure(None, None, [evidence.recorded])


def _left_group(evidence: Evidence) -> Failure | None:
    """Torch aborted a rank whose program had ended without destroying its process group."""
    if evidence.is_end_explained:
        return None
    for end in evidence.signalled:
        is_aborted = end.code == -signal.SIGABRT
        if is_aborted and messages.was_group_left(evidence.outputs.get(end.rank, [])):
            return _failure(evidence, end.rank, end.node, [messages.NOT_DESTROYED])
    return None


def _killed(evidence: Evidence) -> Failure | None:
    """A rank was ended by a signal that is not its agent's.

    The agent ends the others by TERM; a rank that aborts has printed the reason before, if any.
    """
    if evidence.is_end_explained:
        return None
    consequences = {-signal.SIGTERM}
    if evidence.errors:
        consequences.add(-signal.SIGABRT)
    end = next((end for end in evidence.signalled if end.code not in consequences), None)
    if end is None:
        return None

    lines = [end.words]
    for error in evidence.errors:
        if error.rank == end.rank and error.lines[-1].startswith(excerpts.CRASH):
            lines = error.lines
            break
    return Failure(end.rank, end.node, lines, reporting=evidence.reporting)


def _exited_without_report(evidence: Evidence) -> Failure | None:
    """A rank exited by itself and reported no error; its last lines or another rank say why."""
    if evidence.is_end_explained:
        return None
    failed = {error.rank for error in evidence.errors}
    end = next((end for end in evidence.exited if end.rank not in failed), None)
    if end is None:
        return None

    printed = _lines_of_rank(evidence, end.rank)  # its own file may lack the end
    if excerpts.has_error(printed):
        lines = excerpts.last_error(printed, evidence.max_lines)
        return _failure(evidence, end.rank, end.node, lines)
    for failure in _passed_on(evidence):
        if failure.rank == end.rank:
            return failure
    output = evidence.outputs.get(end.rank, [])[-evidence.max_lines :]
    return _failure(evidence, end.rank, end.node, output or [end.words])


def _reported_by_another(evidence: Evidence) -> Failure | None:
    """Only other ranks report the error of a rank, which lost its own report with its node."""
    if evidence.own_errors:
        return None
    return min(_passed_on(evidence), key=lambda failure: failure.at, default=None)


def _left_early(evidence: Evidence) -> Failure | None:
    """All ranks of a node succeeded while others went on, which then only lost their peers."""
    if evidence.own_errors or not evidence.errors or not evidence.left_early:
        return None
    node = evidence.left_early[0]
    return _failure(evidence, node * evidence.ranks_per_node, node, [_LEFT_EARLY])


def _first_error(evidence: Evidence) -> Failure | None:
    """Return the earliest error that a rank reports, its own before a lost peer's."""
    if not evidence.errors:
        return None
    first = min(evidence.own_errors or evidence.errors, key=lambda error: error.at)
    is_peers = not evidence.own_errors
    return dataclasses.replace(first, is_peers=is_peers, reporting=evidence.reporting)


# The first that fits is taken
RULES: tuple[Rule, ...] = (
    _recorded,
    _left_group,
    _killed,
    _exited_without_report,
    _reported_by_another,
    _left_early,
    _first_error,
)


def _end_of_log(evidence: Evidence) -> Failure:
    """No rank is known: the job's log ends with the error, apart from Slurm's lines and ours."""
    text = _unlabelled(evidence.log)
    others = [line for line in text if not _OURS.match(line)]
    return Failure(None, None, excerpts.last_error(others or text, evidence.max_lines))


def _failure(evidence: Evidence, rank: int, node: int, lines: list[str]) -> Failure:
    reporting = sorted({*evidence.reporting, node})
    return Failure(rank, node, lines, reporting=tuple(reporting))


def _passed_on(evidence: Evidence) -> list[Failure]:
    """Return the failures that ranks report of others, one for each of these."""
    found: dict[int, Failure] = {}
    for error in evidence.errors:
        rank = messages.reported_rank(error.lines[-1]) if error.is_peers else None
        if rank is not None and rank not in found:
            found[rank] = dataclasses.replace(
                error,
                rank=rank,
                node=rank // evidence.ranks_per_node,
                is_peers=False,
                reporting=evidence.reporting,
            )
    return list(found.values())


def _unlabelled(log: list[str]) -> list[str]:
    return [_TASK.sub("", line) for line in log if line.strip()]


def _lines_of_rank(evidence: Evidence, rank: int) -> list[str]:
    """Return the lines that a rank printed into the job's log."""
    prefix = f"[rank{rank}]: "
    text = _unlabelled(evidence.log)
    return [line.removeprefix(prefix) for line in text if line.startswith(prefix)]

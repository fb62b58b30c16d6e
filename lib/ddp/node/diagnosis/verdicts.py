"""Rules that decide whose fault a failed attempt is: the first that fits gives the verdict.

A fault of the filesystem, a node or the network is not the program's, and the reverse: only
evidence moves the blame off the program. To add a rule, write it and add its row to `RULES`; lines
of other programs that a rule looks for are rows of messages.py.
"""

import collections.abc
import dataclasses
import os
import pathlib
import signal
import typing

from ddp.node.diagnosis import (
    absent_ranks,
    evidence,
    first_failure,
    messages,
    rank_ends,
    rank_errors,
    refusals,
)

LOST = "Slurm lost the node"
_MAX_WORDS = 200  # before a remedy


class Verdict(typing.NamedTuple):
    """Whose fault it was, the node ("-": none), and the reason.

    Kinds are program, parameters, node, filesystem, network and unknown.
    """

    kind: str
    node: str
    words: str
    comes_again: bool = False  # another attempt would fail, too


@dataclasses.dataclass(frozen=True)
class Case:
    """The evidence of an attempt, with the rank that failed first."""

    evidence: evidence.Evidence
    failure: rank_errors.Failure
    absent: absent_ranks.AbsentRanks

    @property
    def node(self) -> str:
        """Return the name of the rank's node, "-" if it is unknown."""
        return self.evidence.host(self.failure.node) or "-"

    @property
    def words(self) -> str:
        """Return the last line of the failure, "" if there is none."""
        return self.failure.lines[-1] if self.failure.lines else ""

    @property
    def has_peers(self) -> bool:
        """Return whether the attempt had several nodes, so that another one may be to blame."""
        return len(self.evidence.hosts) > 1


Rule = collections.abc.Callable[[Case], Verdict | None]


def blame(run_dir: str, job_id: str, attempt: str, hosts: list[str]) -> Verdict:
    """Classify the failure of a job's last attempt. Raises OSError."""
    folder = pathlib.Path(run_dir)
    return judge(evidence.gather(folder, int(job_id), hosts=hosts, attempt=attempt))


def judge(found: evidence.Evidence) -> Verdict:
    """Return the verdict of the first rule that fits the evidence."""
    failure = first_failure.find(found)
    case = Case(found, failure, absent_ranks.find(found, failure.lines))
    for rule in RULES:
        verdict = rule(case)
        if verdict is not None:
            return verdict
    return Verdict("program" if case.words else "unknown", case.node, case.words)


def _job_cannot_start(case: Case) -> Verdict | None:
    """Every node refused to start its ranks, so the job's options are the reason."""
    complaints = _complaints(case)
    if not case.has_peers or len(complaints) < len(case.evidence.hosts):
        return None
    return Verdict("parameters", "-", complaints[0][1], comes_again=True)


def _node_cannot_start(case: Case) -> Verdict | None:
    """A node refused to start its ranks."""
    complaints = _complaints(case)
    if not complaints:
        return None
    host, words = complaints[0]
    return Verdict("node", host, words)


def _complaints(case: Case) -> list[tuple[str, str]]:
    hosts = case.evidence.hosts
    return [(host, words) for host, words in case.evidence.complaints.items() if host in hosts]


def _node_lost(case: Case) -> Verdict | None:
    """Slurm lost a node."""
    lost = case.evidence.lost
    if not lost or lost[0] not in case.evidence.hosts:
        return None
    return Verdict("node", lost[0], LOST)


def _filesystem_refused(case: Case) -> Verdict | None:
    """A call on the shared filesystem ended with an error that a failed filesystem gives."""
    refused = _refusal(case)
    if refused is None or not refused.is_of_filesystem:
        return None
    if not _are_shared(refused.paths, case.evidence.folder):
        return None
    node = refused.node or case.node
    return _of_filesystem(case, node, case.words)


def _filesystem_away(case: Case) -> Verdict | None:
    """A node missed the shared filesystem, and the first failure may be a consequence of that.

    An error without a path, such as a socket's, or without a number counts if its own node missed
    the filesystem; the report of a lost peer counts if any node did.
    """
    away = case.evidence.away
    refused = _refusal(case)
    if refused and refused.paths and not _are_shared(refused.paths, case.evidence.folder):
        return None

    node = refused.node if refused and refused.node else case.node
    is_of_any_node = node == "-" or case.failure.is_peers
    if node not in away and is_of_any_node:
        node = next(iter(away), node)
    if node not in away:
        return None

    if case.failure.rank is None:
        return _of_filesystem(case, node, "")
    if case.failure.is_peers or _may_be_of_files(refused, case.words):
        return _of_filesystem(case, node, case.words)
    return None


def _refusal(case: Case) -> refusals.Refusal | None:
    return case.failure.refused or refusals.find(case.failure.lines)


def _may_be_of_files(refused: refusals.Refusal | None, words: str) -> bool:
    if refused is None:
        return refusals.may_be_of_files(words)
    return refused.may_be_of_files


def _of_filesystem(case: Case, node: str, words: str) -> Verdict:
    about = "the shared filesystem failed"
    if reason := case.evidence.away.get(node):
        about = f"the shared filesystem did not respond on {node} ({reason})"
    if words:
        about += f": {words}"
    return Verdict("filesystem", node if node in case.evidence.hosts else case.node, about)


def _are_shared(paths: tuple[str, ...], folder: pathlib.Path) -> bool:
    """Return whether a path is on a run's filesystem; relative ones begin in the workspace."""
    workspace = os.path.realpath(folder.parent.parent)
    top = _mount_point(workspace)
    for path in paths:
        whole = os.path.normpath(os.path.join(workspace, path))
        if any(f"{place}/".startswith(f"{top}/") for place in (whole, os.path.realpath(whole))):
            return True
    return False


def _mount_point(workspace: str) -> str:
    """Return the mount point above a workspace; itself if it is on the system's own disk."""
    top = workspace
    while not os.path.ismount(top):
        top = os.path.dirname(top)
    return workspace if top == "/" else top


def _payload_knows(case: Case) -> Verdict | None:
    """The payload wrote that another attempt would fail, too."""
    outcome = case.evidence.outcome
    if outcome.get("retry") is not False:
        return None
    return Verdict("parameters", "-", str(outcome.get("error", "")), comes_again=True)


def _node_never_joined(case: Case) -> Verdict | None:
    """The ranks of one node alone never joined the rendezvous."""
    if len(case.absent.hosts) != 1 or not case.has_peers:
        return None
    return Verdict("node", case.absent.hosts[0], str(case.absent))


def _machine_fault(case: Case) -> Verdict | None:
    """The rank's last lines prove a fault of the machine."""
    if case.node == "-" or not messages.proves_machine_fault(case.failure.lines):
        return None
    return Verdict("node", case.node, case.words)


def _node_stopped_responding(case: Case) -> Verdict | None:
    """The ranks of all nodes but one report that they lost a peer."""
    if not case.failure.is_peers or not case.has_peers:
        return None
    missing = _nodes_without_report(case)
    if len(missing) != 1:
        return None
    words = f"it stopped responding; the others report: {case.words}"
    return Verdict("node", missing[0], words)


def _network_cut(case: Case) -> Verdict | None:
    """The ranks of all nodes report lost connections, and none its own error."""
    if not case.failure.is_peers or not case.has_peers:
        return None
    if _nodes_without_report(case) or not messages.reports_cut(case.words):
        return None
    words = f"the nodes lost their connections, and no rank failed by itself: {case.words}"
    return Verdict("network", "-", words)


def _nodes_without_report(case: Case) -> list[str]:
    reporting = case.failure.reporting
    hosts = enumerate(case.evidence.hosts)
    return [host for number, host in hosts if number not in reporting]


def _known_program_fault(case: Case) -> Verdict | None:
    """The rank failed by a fault of the program with a known remedy."""
    fault = messages.find_program_fault(case.failure.lines)
    if fault is None:
        return None
    words = f"{case.words[:_MAX_WORDS]}; {fault.remedy}"
    return Verdict("program", case.node, words, fault.comes_again)


def _killed_by_unknown(case: Case) -> Verdict | None:
    """The rank was killed, and nothing shows by whom."""
    if case.words != rank_ends.describe(-signal.SIGKILL, None):
        return None
    return Verdict("unknown", case.node, case.words)


# The first that fits is taken
RULES: tuple[Rule, ...] = (
    _job_cannot_start,
    _node_cannot_start,
    _node_lost,
    _filesystem_refused,
    _filesystem_away,
    _payload_knows,
    _node_never_joined,
    _machine_fault,
    _node_stopped_responding,
    _network_cut,
    _known_program_fault,
    _killed_by_unknown,
)

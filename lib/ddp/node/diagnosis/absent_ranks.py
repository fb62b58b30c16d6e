"""The ranks that never joined the rendezvous, if that is why an attempt failed."""

import dataclasses
import re

from ddp.node.diagnosis.evidence import Evidence

_MAX_NAMED = 16
# rendezvous.py of the payload
_NEVER_JOINED = re.compile(
    r"(?:.*(?:\[FATAL\]|SharedError:|leaves:) )?"
    r"(?:\d+ of \d+ ranks never joined within \d+ s: ([\d, ]*\d)"
    r"|rank 0 published no address in )"
)
# torch's TCPStore (2.0 to 2.13), and the payload around it
_TIMED_OUT = re.compile(
    r"[Tt]imed out after .* waiting for clients|wait timeout after|DistStoreError"
    r"|the rendezvous at "
)


@dataclasses.dataclass(frozen=True)
class AbsentRanks:
    """Ranks that never joined, and their nodes; none if that is not why the attempt failed."""

    ranks: list[int]
    hosts: list[str]

    def __str__(self) -> str:
        """Return them in words, such as `ranks 2, 3 never joined the rendezvous`."""
        plural = "s" if len(self.ranks) > 1 else ""
        numbers = ", ".join(map(str, self.ranks[:_MAX_NAMED]))
        return f"rank{plural} {numbers} never joined the rendezvous"


def find(evidence: Evidence, lines: list[str]) -> AbsentRanks:
    """Return the ranks that never joined, by the last lines of the first failure.

    The payload names the ranks. torch's rendezvous only reports a timeout: then they are the ranks
    of the nodes that started none.
    """
    text = lines[-1] if lines else ""
    ranks: list[int] = []
    if found := _NEVER_JOINED.match(text):
        ranks = [int(number) for number in re.findall(r"\d+", found[1] or "0")]
    elif _TIMED_OUT.search(text):
        ranks = _ranks_not_started(evidence)

    nodes = sorted({rank // evidence.ranks_per_node for rank in ranks})
    hosts = [evidence.hosts[node] for node in nodes if node < len(evidence.hosts)]
    return AbsentRanks(ranks, hosts)


def _ranks_not_started(evidence: Evidence) -> list[int]:
    if not evidence.started:
        return []  # no node is to blame more than another one
    ranks: list[int] = []
    for node, host in enumerate(evidence.hosts):
        if host not in evidence.started:
            first = node * evidence.ranks_per_node
            ranks += range(first, first + evidence.ranks_per_node)
    return ranks

"""How a job's ranks ended, as torchrun's agents and srun report it in the job's log."""

import dataclasses
import re
import signal

NO_MEMORY = "killed: it took more memory than the job has"
SHORTAGE = ": a process was killed for memory: "  # between a node and the details of memory.py
OF_NODE = " itself ran out of memory"  # behind a node's name: no fault of the job's
_SHORT = re.compile(rf"(\d+): \[ENV\] [^\s:]+{SHORTAGE}(.*)")
_RANK = re.compile(r"(\d+): .*\bfailed \(exitcode: (-?\d+)\) local_rank: (\d+)")  # an agent's
_TASK = re.compile(
    r"srun: error: \S+: task (\d+): "
    r"(?:Exited with exit code (\d+)|(Killed|Segmentation fault|Bus error|Aborted|Out Of Memory))"
)
_SIGNALS = {
    "Killed": 9,
    "Segmentation fault": 11,
    "Bus error": 7,
    "Aborted": 6,
    "Out Of Memory": 9,
}  # strsignal(3)
_RAN_OUT = re.compile(
    r"(?:(\d+): slurmstepd\S* error: Detected \d+ oom_kill event|srun: error: \S+: task (\d+): Out Of Memory)"
)  # of a task, by its number: the node's


@dataclasses.dataclass(frozen=True)
class End:
    """How a rank ended."""

    rank: int
    node: int
    code: int  # negative: the signal's number
    words: str


def parse(log: list[str], per_node: int) -> list[End]:
    """Return how ranks ended, in order. A task of srun's is a node's agent, and stands for its first rank."""
    ran_out = shortages(log)
    ends: list[End] = []
    is_first = True
    for line in log:
        if found := _RANK.match(line):
            node, code, local = map(int, found.groups())
            ends.append(End(node * per_node + local, node, code, words(code, ran_out.get(node))))
        elif found := _TASK.match(line):
            node, code = int(found[1]), -_SIGNALS[found[3]] if found[3] else int(found[2])
            prefix, was_first = "", is_first
            if code >= 0:
                is_first = False
            if (
                code - 128 in _SIGNALS.values() and was_first
            ):  # of others, node.py or srun may have done it
                code, prefix = 128 - code, "its torchrun was "
            if code < 0:  # an agent's own code says less than its report
                ends.append(
                    End(node * per_node, node, code, prefix + words(code, ran_out.get(node)))
                )
    return ends


def shortages(log: list[str]) -> dict[int, str]:
    """Return, by the number of a node on which the kernel killed a process for memory, the known details."""
    ran_out = {int(found[1] or found[2]): "" for line in log if (found := _RAN_OUT.match(line))}
    return ran_out | {int(found[1]): found[2] for line in log if (found := _SHORT.match(line))}


def words(code: int, shortage: str | None) -> str:
    """Describe how a process ended, by its code and, if the kernel killed one for memory, what is known of that."""
    if code >= 0:
        return f"exited with code {code} and no error output"
    if shortage is not None and code == -signal.SIGKILL:
        if OF_NODE in shortage:
            return f"killed: {shortage}"
        return (
            f"{NO_MEMORY}: {shortage}"
            if shortage
            else f"{NO_MEMORY}; submit it with a larger memory"
        )
    names = {member.value: member.name for member in signal.Signals}
    return f"killed by signal {-code} ({names.get(-code, 'unknown')})"

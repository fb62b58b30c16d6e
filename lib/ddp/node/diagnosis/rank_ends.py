"""How a job's ranks ended, as torchrun's agents and srun report it in the job's log."""

import dataclasses
import re
import signal

NO_MEMORY = "killed: it took more memory than the job has"
SHORTAGE = (
    ": a process was killed for memory: "  # between a node and the details of memory_kills.py
)
OF_NODE = " itself ran out of memory"  # behind a node's name: no fault of the job's
_SHORT = re.compile(rf"(\d+): \[ENV\] [^\s:]+{SHORTAGE}(.*)")
_RANK = re.compile(r"(\d+): .*\bfailed \(exitcode: (-?\d+)\) local_rank: (\d+)")  # an agent's
_TASK = re.compile(
    r"srun: error: \S+: task (\d+): "
    r"(?:Exited with exit code (\d+)"
    r"|(Killed|Segmentation fault|Bus error|Aborted|Out Of Memory))"
)
_SIGNALS = {  # strsignal(3)
    "Killed": signal.SIGKILL,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Out Of Memory": signal.SIGKILL,
}
_RAN_OUT = re.compile(  # of a task, by its number: the node's
    r"(?:(\d+): slurmstepd\S* error: Detected \d+ oom_kill event"
    r"|srun: error: \S+: task (\d+): Out Of Memory)"
)


@dataclasses.dataclass(frozen=True)
class RankEnd:
    """How a rank ended."""

    rank: int
    node: int
    code: int  # negative: the signal's number
    words: str


def parse(log: list[str], per_node: int) -> list[RankEnd]:
    """Return how ranks ended, in order.

    A task of srun's is a node's agent, and stands for its first rank.
    """
    ran_out = shortages(log)
    ends: list[RankEnd] = []
    has_task_exited = False
    for line in log:
        if of_rank := _RANK.match(line):
            node, code, local = map(int, of_rank.groups())
            words = describe(code, ran_out.get(node))
            ends.append(RankEnd(node * per_node + local, node, code, words))

        elif of_task := _TASK.match(line):
            node = int(of_task[1])
            if of_task[3]:
                code = -_SIGNALS[of_task[3]]
                words = describe(code, ran_out.get(node))
                ends.append(RankEnd(node * per_node, node, code, words))
                continue

            code = 128 - int(of_task[2])
            # A later task may have been ended by task.py or srun, and other codes say less than
            # the agent's own report.
            if -code in _SIGNALS.values() and not has_task_exited:
                words = "its torchrun was " + describe(code, ran_out.get(node))
                ends.append(RankEnd(node * per_node, node, code, words))
            has_task_exited = True
    return ends


def shortages(log: list[str]) -> dict[int, str]:
    """Return the numbers of nodes that ran out of memory, with the kernel's details if known."""
    found: dict[int, str] = {}
    for line in log:
        if ran_out := _RAN_OUT.match(line):
            found.setdefault(int(ran_out[1] or ran_out[2]), "")
        elif short := _SHORT.match(line):
            found[int(short[1])] = short[2]
    return found


def describe(code: int, shortage: str | None) -> str:
    """Describe how a process ended; `shortage` has details of a kill for memory."""
    if code >= 0:
        return f"exited with code {code} and no error output"
    if shortage is None or code != -signal.SIGKILL:
        names = {member.value: member.name for member in signal.Signals}
        return f"killed by signal {-code} ({names.get(-code, 'unknown')})"
    if not shortage:
        return f"{NO_MEMORY}; submit it with a larger memory"
    if OF_NODE in shortage:
        return f"killed: {shortage}"
    return f"{NO_MEMORY}: {shortage}"

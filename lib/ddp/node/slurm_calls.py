"""Slurm's commands, as a job calls them; they are repeated while the controller restarts."""

import collections.abc
import contextlib
import dataclasses
import os
import re
import subprocess
import time

from ddp.node import exit_codes, spool, storage

# Of slurmd: with files from slurmctld, and with the machine's own
CONF_FOLDERS = ("/run/slurm/conf", "/etc/slurm")
ASKING_S = (1, 2, 4, 8, 15, 30, 60, 0)  # pauses while the controller restarts
REQUEUEING_S = (1, 2, 4, 8, 15, 15, 30, 30, 60)
NODE_BACK_S = 600.0
CAUSE_S = (1, 2, 4, 8, 0)  # pauses within Slurm's KillWait
# Later than the end of the last attempt, 6 s if it lost a node; otherwise cred_expire is added
# (batch_requeue_fini())
RELEASING_S = 10
# ... and later than slurmd's next look whether the job has ended, every 10 s then
# (pause_for_job_completion())
QUICK_S = 8.0
RELEASING_LATE_S = 15
_SIGNALS_CHILDREN = re.compile(
    r"^\s*SignalChildrenProcesses\s*=\s*yes", re.MULTILINE | re.IGNORECASE
)


def pause(seconds: float) -> None:
    """Sleep; tests replace it."""
    time.sleep(seconds)


def call(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command. Exit code 127 means that it is missing or timed out."""
    nothing = subprocess.DEVNULL
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, check=False, cwd="/", timeout=120, stdin=nothing
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return subprocess.CompletedProcess(argv, 127, "", f"{argv[0]}: {e}")


def lacks_fix(version: str, fixed: collections.abc.Sequence[str], since: str = "") -> bool:
    """Return whether a version of Slurm is older than a fix; False if the text is not a version.

    `fixed` holds the first fixed version of each release; if it is empty, there is nothing to fix.
    A release before all of them lacks the fix, one after them has it; a release before `since`
    never needed it.
    """
    numbers = _numbers(version)
    if not numbers or not fixed or numbers < _numbers(since):
        return False
    versions = sorted(_numbers(text) for text in fixed)
    for first in versions:
        if numbers[:2] == first[:2]:
            return numbers < first
    return numbers < versions[-1]


def _numbers(version: str) -> tuple[int, ...]:
    """Parse a version of Slurm, such as `slurm-wlm 24.11.5`."""
    found = re.search(r"\b(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        return ()
    return tuple(int(part or 0) for part in found.groups())


def hostnames(nodelist: str) -> list[str]:
    """Expand a list of nodes such as n[1-2], in its order. Raises FatalError."""
    shown = call("scontrol", "show", "hostnames", nodelist)
    names = shown.stdout.split()
    if shown.returncode or not names:
        why = shown.stderr.strip()[-300:]
        raise exit_codes.FatalError(f"scontrol show hostnames {nodelist}: {why}")
    return names


def show_nodes(nodelist: str, hosts: list[str]) -> str:
    """Return the output of `scontrol -o show node`. Raises FatalError."""
    reason = ""
    for pause_s in ASKING_S:
        shown = call("scontrol", "-o", "show", "node", nodelist)
        if shown.returncode == 0:
            return shown.stdout
        reason = (shown.stderr + shown.stdout).strip().rpartition("\n")[2]
        if pause_s:
            what = f"Slurm gave no addresses of the nodes ({reason})"
            spool.write(f"[ENV] {what}; asking again in {pause_s} s")
            pause(pause_s)
    raise exit_codes.FatalError(f"Slurm gave no addresses of {' '.join(hosts)}: {reason}")


def slurmd_port() -> int:
    """Return the port of the nodes' slurmd."""
    found = re.search(
        r"^SlurmdPort += (\d+)", call("scontrol", "show", "config").stdout, re.MULTILINE
    )
    return int(found[1]) if found else 6818


def usable_nodes(partition: str, reservation: str) -> set[str]:
    """Return the nodes for jobs of a partition, and of a reservation unless it is empty."""
    states = "idle,mixed,allocated,completing"
    if reservation:  # its nodes have other states
        states += ",reserved,maint"
    shown = call("sinfo", "-h", "-N", "-p", partition, "-t", states, "-o", "%N")
    nodes = set(shown.stdout.split())
    return nodes & _reserved_nodes(reservation) if reservation else nodes


def _reserved_nodes(reservation: str) -> set[str]:
    shown = call("scontrol", "-o", "show", "reservation", reservation)
    found = re.search(r" Nodes=([^ ]*) ", shown.stdout)
    if found is None:
        return set()
    return set(call("scontrol", "show", "hostnames", found[1]).stdout.split())


def await_node(node: str, is_stopping: storage.Claim, *, is_silent: bool) -> bool:
    """Wait until Slurm can use a node again; return whether it can.

    After a longer time Slurm requeues the job. Slurm may not know yet that a silent node is lost:
    a task must start there.
    """
    began = time.monotonic()
    reported = began - storage.REPORT_S
    while not is_stopping():
        state = _state_of(node)
        is_up = not re.search(r"down|\*|fail|not_resp|unknown", state)
        if is_up and (not is_silent or _runs_tasks(node)):
            return True
        waited = time.monotonic() - began
        if waited > NODE_BACK_S:
            return False
        if time.monotonic() - reported >= storage.REPORT_S:
            reported = time.monotonic()
            spool.write(f"[RESTART] {node} is {state}; waiting for it, {waited:.0f} s")
        pause(2.0)
    return True


def _state_of(node: str) -> str:
    """Return a node's state by sinfo's words, such as `idle`."""
    shown = call("sinfo", "-h", "-N", "-n", node, "-o", "%T").stdout.split()
    return shown[0] if shown else "unknown"


def _runs_tasks(node: str) -> bool:
    """Return whether a task of this job starts on a node."""
    options = ("--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1")
    return call("srun", *options, "/bin/true").returncode == 0


def show_job(job_id: str) -> dict[str, str]:
    """Return the fields of a job by scontrol's names, {} if Slurm does not answer."""
    shown = call("scontrol", "-o", "show", "job", job_id)
    if shown.returncode:
        return {}
    return dict(re.findall(r"(\w+)=(\S*)", shown.stdout))


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why Slurm ends a job, and whether it has queued it again by itself."""

    cause: str  # limit, preemption, requeue, failure (of a node), cancelled
    is_requeued: bool = False


def ending_of(job_id: str, restarts: int, end: float) -> Ending:
    """Return why Slurm ends a job; without an answer, by the `end` of its time limit."""
    for pause_s in CAUSE_S:
        found = show_job(job_id)
        if found:
            return Ending(_cause(job_id, found, restarts), _restarts(found) > restarts)
        pause(pause_s)
    return Ending("limit" if time.time() >= end else "cancelled")


def _cause(job_id: str, found: dict[str, str], restarts: int) -> str:
    if is_preempted(job_id):
        return "preemption"
    if found.get("Reason") == "NodeDown":
        return "failure"
    if _restarts(found) > restarts:
        return "requeue"
    if found.get("Reason") == "TimeLimit":  # JobState is COMPLETING by now
        return "limit"
    return "cancelled"


def is_preempted(job_id: str) -> bool:
    """Return whether another job takes this one's place.

    Slurm forgets it as soon as the job's last node is free.
    """
    # scontrol does not always show it
    shown = call("squeue", "-h", "-j", job_id, "-O", "PreemptTime")
    return bool(re.match(r"\d{4}-", shown.stdout))


def _restarts(found: dict[str, str]) -> int:
    return int(found.get("Restarts") or 0)


def requeue(
    job_id: str, restarts: int, is_cancelled: storage.Claim, *, is_ending: bool = False
) -> bool:
    """Requeue a job, once; return whether it is queued again.

    A job is requeued while it runs, since a cancelled one would return, too. `is_ending`: Slurm
    ends it at its time limit or for another job, and takes a requeue until its last process has
    ended.
    """
    for pause_s in REQUEUEING_S:
        if is_cancelled():
            return False
        found = show_job(job_id)
        is_over = bool(found) and found.get("JobState") != "RUNNING" and not is_ending
        # By Slurm itself, or by a request whose reply was lost
        is_queued = _restarts(found) > restarts
        if is_cancelled() or (is_over and not is_queued):
            return False
        why = "Slurm does not respond"
        if found and not is_queued:
            asked = call("scontrol", "requeue", job_id)
            is_queued = asked.returncode == 0
            if not is_queued:
                why = _reason(asked) or why
        if is_queued:
            spool.write(f"[REQUEUE] {stamp()} job {job_id} is queued again")
            return True
        spool.write(f"[REQUEUE] {why}; trying again in {pause_s} s")
        pause(pause_s)
    return False


def _reason(failed: subprocess.CompletedProcess[str]) -> str:
    """Return why scontrol failed, in its own words; "" if it gave none."""
    if failed.returncode < 0:
        return f"scontrol was ended by signal {-failed.returncode}"
    words = failed.stderr.strip()
    if not words:
        return ""
    last = words.splitlines()[-1].removeprefix("scontrol: ")
    return f"scontrol: {last[:300]}"


def signals_every_process() -> bool:
    """Return whether Slurm sends a signal to each process of a step.

    By default proctrack/cgroup spares children.
    """
    shown = call("scontrol", "show", "config").stdout
    if not re.search(r"^ProctrackType += proctrack/cgroup", shown, re.MULTILINE):
        return True
    return _SIGNALS_CHILDREN.search(_cgroup_conf()) is not None


def _cgroup_conf() -> str:
    """Return the text of slurmd's cgroup.conf, "" if there is none."""
    own = os.path.dirname(os.environ.get("SLURM_CONF", ""))
    for folder in (own, *CONF_FOLDERS):
        path = f"{folder}/cgroup.conf"
        with (
            contextlib.suppress(OSError),
            open(path, encoding="utf-8", errors="replace") as file,
        ):
            return file.read()
    return ""


def keep(job_id: str, hosts: list[str]) -> None:
    """Remove all other nodes from a running job; the node of its script must be among the hosts."""
    call("scontrol", "update", f"JobId={job_id}", f"ReqNodeList={','.join(hosts)}")


def release(job_id: str, restarts: int, *, is_ours: bool, ending_s: float = 0.0) -> None:
    """Let a requeued job start without Slurm's delay.

    One that an operator holds, or requeued, waits. So does one that Slurm requeued as it lost a
    node: for some seconds Slurm tries to end the last attempt there, and a node that is back by
    then would end the next one (deallocate_nodes()). `ending_s` has passed since Slurm's TERM.
    """
    found = show_job(job_id)
    if _restarts(found) <= restarts or found.get("Priority") == "0":
        return
    if is_ours or is_preempted(job_id):
        delay_s = RELEASING_S if ending_s < QUICK_S else RELEASING_LATE_S
        call("scontrol", "update", f"JobId={job_id}", f"StartTime=now+{delay_s}")


def exclude(job_id: str, names: str, more: list[str]) -> None:
    """Exclude nodes. Slurm allows that only while the job is pending: as soon as it is requeued."""
    update = ("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={names}", *more)
    for _ in range(10):
        if call(*update).returncode == 0:
            spool.write(f"[RESTART] without {names}")
            return
        pause(1)
    spool.write(f"[RESTART] Slurm does not leave out {names}")


def is_last_task(array: str, task: str) -> bool:
    """Return whether no other task of an array is left."""
    left = call("squeue", "-h", "-r", "-j", array, "-o", "%i")
    if left.returncode:
        return False
    return set(left.stdout.splitlines()) == {f"{array}_{task}"}


def stamp() -> str:
    """Return the time in UTC, to the millisecond."""
    now = time.time()
    second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    return f"{second}.{int(now % 1 * 1000):03d}Z"

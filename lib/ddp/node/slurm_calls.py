"""Slurm's commands, as a job calls them on its own behalf; they are repeated while the controller restarts."""

import contextlib
import dataclasses
import os
import re
import subprocess
import time

from ddp.node import exit_codes, spool, storage

CONF_FOLDERS = (
    "/run/slurm/conf",
    "/etc/slurm",
)  # of slurmd: where it gets its files from slurmctld, and where not
ASKING_S = (1, 2, 4, 8, 15, 30, 60, 0)  # pauses while the controller restarts
REQUEUEING_S = (1, 2, 4, 8, 15, 15, 30, 30, 60)
NODE_BACK_S = 600.0
CAUSE_S = (1, 2, 4, 8, 0)  # pauses within Slurm's KillWait
# Later than the end of the last attempt, 6 s if it lost a node; else cred_expire is added (batch_requeue_fini()).
RELEASING_S = 10
# ... and later than slurmd's next look whether the job has ended, every 10 s then (pause_for_job_completion()).
QUICK_S, RELEASING_LATE_S = 8.0, 15


def pause(seconds: float) -> None:
    """Sleep; tests replace it."""
    time.sleep(seconds)


def call(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command; one that is missing or hangs has failed with 127."""
    nothing = subprocess.DEVNULL
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, check=False, cwd="/", timeout=120, stdin=nothing
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return subprocess.CompletedProcess(argv, 127, "", f"{argv[0]}: {e}")


def hostnames(nodelist: str) -> list[str]:
    """Expand a list of nodes such as n[1-2], in its order. Raises FatalError."""
    shown = call("scontrol", "show", "hostnames", nodelist)
    if shown.returncode or not shown.stdout.split():
        raise exit_codes.FatalError(
            f"scontrol show hostnames {nodelist}: {shown.stderr.strip()[-300:]}"
        )
    return shown.stdout.split()


def show_nodes(nodelist: str, hosts: list[str]) -> str:
    """Return the output of `scontrol -o show node`. Raises FatalError."""
    reason = ""
    for pause_s in ASKING_S:
        shown = call("scontrol", "-o", "show", "node", nodelist)
        if shown.returncode == 0:
            return shown.stdout
        reason = (shown.stderr + shown.stdout).strip().rpartition("\n")[2]
        if pause_s:
            spool.write(
                f"[ENV] Slurm gave no addresses of the nodes ({reason}); asking again in {pause_s} s"
            )
            pause(pause_s)
    raise exit_codes.FatalError(f"Slurm gave no addresses of {' '.join(hosts)}: {reason}")


def slurmd_port() -> int:
    """Return the port of the nodes' slurmd."""
    found = re.search(
        r"^SlurmdPort += (\d+)", call("scontrol", "show", "config").stdout, re.MULTILINE
    )
    return int(found[1]) if found else 6818


def usable_nodes(partition: str, reservation: str) -> set[str]:
    """Return the nodes that jobs of a partition, and of a reservation if there is one, can run on."""
    states = "idle,mixed,allocated,completing"
    among: set[str] | None = None
    if reservation:  # the job runs on its nodes alone, whose states are others
        states += ",reserved,maint"
        found = re.search(
            r" Nodes=([^ ]*) ", call("scontrol", "-o", "show", "reservation", reservation).stdout
        )
        among = (
            set(call("scontrol", "show", "hostnames", found[1]).stdout.split()) if found else set()
        )
    nodes = set(call("sinfo", "-h", "-N", "-p", partition, "-t", states, "-o", "%N").stdout.split())
    return nodes if among is None else nodes & among


def await_node(node: str, is_stopping: storage.Claim, *, is_silent: bool) -> bool:
    """Wait until Slurm can use a node again; return whether it can. After a longer time Slurm requeues the job.

    Slurm may not know yet that a silent node is lost: a task must start there.
    """
    probe = ("srun", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "/bin/true")
    began = time.monotonic()
    reported = began - storage.REPORT_S
    while not is_stopping():
        state = call("sinfo", "-h", "-N", "-n", node, "-o", "%T").stdout.split()
        is_up = state and not re.search(r"down|\*|fail|not_resp|unknown", state[0])
        if is_up and (not is_silent or call(*probe).returncode == 0):
            return True
        waited = time.monotonic() - began
        if waited > NODE_BACK_S:
            return False
        if time.monotonic() - reported >= storage.REPORT_S:
            reported = time.monotonic()
            spool.write(
                f"[RESTART] {node} is {''.join(state[:1]) or 'unknown'}; waiting for it, {waited:.0f} s"
            )
        pause(2.0)
    return True


def show_job(job_id: str) -> dict[str, str]:
    """Ask Slurm about a job; return its fields by scontrol's names, {} where it does not answer."""
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
    """Return why Slurm ends a job. `end` of its time limit speaks where the controller is silent."""
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
    """Return whether another job takes this one's place. Slurm forgets it as soon as the job's last node is free."""
    shown = call(
        "squeue", "-h", "-j", job_id, "-O", "PreemptTime"
    )  # scontrol does not always show it
    return bool(re.match(r"\d{4}-", shown.stdout))


def _restarts(found: dict[str, str]) -> int:
    return int(found.get("Restarts") or 0)


def requeue(
    job_id: str, restarts: int, is_cancelled: storage.Claim, *, is_ending: bool = False
) -> bool:
    """Requeue a job, once; return whether it is queued again.

    While it runs, or `is_ending`: Slurm ends it at its time limit or for another job, and takes a requeue until its
    last process has ended. A cancelled job would return, too. Restarts shows that Slurm requeued it by itself, or that
    a request whose reply was lost succeeded.
    """
    for pause_s in REQUEUEING_S:
        if is_cancelled():
            return False
        found = show_job(job_id)
        if found:
            is_queued = _restarts(found) > restarts
            if not is_queued and found.get("JobState") != "RUNNING" and not is_ending:
                return False
            if is_cancelled():
                return False
            if is_queued or call("scontrol", "requeue", job_id).returncode == 0:
                spool.write(f"[REQUEUE] {stamp()} job {job_id} is queued again")
                return True
        spool.write(f"[REQUEUE] Slurm does not respond; trying again in {pause_s} s")
        pause(pause_s)
    return False


def signals_every_process() -> bool:
    """Return whether Slurm sends a signal to each process of a step; by default proctrack/cgroup spares children."""
    shown = call("scontrol", "show", "config").stdout
    if not re.search(r"^ProctrackType += proctrack/cgroup", shown, re.MULTILINE):
        return True
    for folder in (os.path.dirname(os.environ.get("SLURM_CONF", "")), *CONF_FOLDERS):
        with (
            contextlib.suppress(OSError),
            open(f"{folder}/cgroup.conf", encoding="utf-8", errors="replace") as file,
        ):
            return bool(
                re.search(
                    r"^\s*SignalChildrenProcesses\s*=\s*yes",
                    file.read(),
                    re.MULTILINE | re.IGNORECASE,
                )
            )
    return False


def keep(job_id: str, hosts: list[str]) -> None:
    """Remove all other nodes from a running job; the node of its script must be among the hosts."""
    call("scontrol", "update", f"JobId={job_id}", f"ReqNodeList={','.join(hosts)}")


def release(job_id: str, restarts: int, *, is_ours: bool, ending_s: float = 0.0) -> None:
    """Let a requeued job start without Slurm's delay. One that an operator holds, or requeued, waits.

    So does one that Slurm requeued as it lost a node: for some seconds Slurm tries to end the last attempt there, and a
    node that is back by then would end the next one (deallocate_nodes()). `ending_s` has passed since Slurm's TERM.
    """
    found = show_job(job_id)
    if _restarts(found) <= restarts or found.get("Priority") == "0":
        return
    if is_ours or is_preempted(job_id):
        delay_s = RELEASING_S if ending_s < QUICK_S else RELEASING_LATE_S
        call("scontrol", "update", f"JobId={job_id}", f"StartTime=now+{delay_s}")


def exclude(job_id: str, names: str, more: list[str]) -> None:
    """Exclude nodes. Slurm allows that only while the job is pending: as soon as it is requeued."""
    for _ in range(10):
        if (
            call("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={names}", *more).returncode
            == 0
        ):
            spool.write(f"[RESTART] without {names}")
            return
        pause(1)
    spool.write(f"[RESTART] Slurm does not leave out {names}")


def is_last_task(array: str, task: str) -> bool:
    """Return whether no other task of an array is left."""
    left = call("squeue", "-h", "-r", "-j", array, "-o", "%i")
    return left.returncode == 0 and not set(left.stdout.splitlines() or [""]) - {f"{array}_{task}"}


def stamp() -> str:
    """Return the time in UTC, to the millisecond."""
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"

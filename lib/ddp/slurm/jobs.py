"""Questions to Slurm, and its batch jobs, from text output of the same shape from 24.11 to 26.05.

No JSON: its shape changes with each release. A field that another user can write into (a job's
name) comes after all that we decide by.
"""

import collections.abc
import contextlib
import dataclasses
import os
import re
import typing

from ddp.problem import Problem
from slurm_ddp.commands import CommandError, CommandTimeout, run
from slurm_ddp.slurm import binaries, nodes, show

ACTIVE = frozenset(
    "PENDING CONFIGURING RUNNING COMPLETING SUSPENDED STOPPED REQUEUED REQUEUE_HOLD REQUEUE_FED RESIZING SIGNALING "
    "STAGE_OUT SPECIAL_EXIT RESV_DEL_HOLD EXPEDITING".split()
)
"""Job states that lead to another one (squeue(1), JOB STATE CODES; job_state_string() of 25.11)."""

_LOST = frozenset({"DEADLINE", "NODE_FAIL", "BOOT_FAIL"})  # ends that no script's exit code tells

_QUEUE_FIELDS = (
    "JobID UserName State exit_code RestartCnt NumNodes Partition TimeUsed TimeLimit SubmitTime StartTime PriorityLong "
    "Reason NodeList ArrayJobID ArrayTaskID Name".split()
)
_QUEUE_FORMAT = ",".join(f"{name}:|" for name in _QUEUE_FIELDS)
_SACCT_FIELDS = (
    "JobIDRaw,User,State,ExitCode,NNodes,Partition,Elapsed,Timelimit,Submit,NodeList,JobName"
)
# squeue's for the same
_SACCT_NAMES = "JobID UserName State exit_code NumNodes Partition TimeUsed TimeLimit SubmitTime NodeList Name".split()
_NO_DATABASE = "Problem talking to the database"  # sacct's last line if slurmdbd is silent
_ANSWER_S = 30.0  # for one job; a large cluster's controller is slow
_NOISE = re.compile(
    r"^s(?:batch|cancel|run|queue|control|acct|acctmgr|report): (?:error: |fatal: )?"
    r"|^(?:fatal|error): |^slurm_\w+ error: ?"
)
NOT_CONFIGURED = "Slurm is not configured here: no slurm.conf, no controller in DNS"

T = typing.TypeVar("T")


class SlurmError(Exception):
    """Slurm refused or did not answer; `str()` is one line with Slurm's own words."""


class NotAnsweringError(SlurmError):
    """The client is not installed, or the controller gave no answer: a later try may help."""


class UncertainError(SlurmError):
    """Slurm may have accepted the job."""


@dataclasses.dataclass(frozen=True)
class Silence:
    """Slurm did not answer: it may or may not know a job."""

    text: str  # one line: who is silent, in Slurm's own words

    def __str__(self) -> str:
        return self.text


NOT_ASKED = Silence("Slurm was not asked")


@contextlib.contextmanager
def asking() -> collections.abc.Generator[None]:
    """Raise Problem if Slurm does not answer a question of the block."""
    try:
        yield
    except SlurmError as e:
        raise Problem(str(e) if str(e).startswith("Slurm") else f"Slurm: {e}") from e


def look(question: collections.abc.Callable[[], T]) -> T | Silence:
    """Return Slurm's answer to a question, or its silence.

    The controller is pinged first: squeue would give up only after 9 to 18 s.
    """
    try:
        ping()
        return question()
    except SlurmError as e:
        return Silence(f"Slurm does not answer: {str(e).removeprefix('Slurm: ')}")


@dataclasses.dataclass(frozen=True)
class Job:
    """A batch job as the controller or the accounting knows it."""

    job_id: int
    user: str
    state: str  # PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT ...
    exit_code: int  # of the batch script; 128 + the signal that ended it
    restarts: int
    num_nodes: int
    partition: str
    elapsed: str
    time_limit: str
    submitted: str  # UTC, such as 2026-11-20T18:48:22Z; or Slurm's word for an unknown time
    reason: str
    nodes: str  # a hostlist; empty before the job starts
    name: str
    task: str = ""  # of an array: its number, or a range such as 3-7%2 for tasks that wait together
    array_id: int | None = None  # of an array; its last task has the same job_id
    is_held: bool = False  # it waits until it is released; `reason` may be any text then

    @property
    def run_name(self) -> str:
        """The job's name, with the task's number if it belongs to an array."""
        return f"{self.name}-{self.task}" if self.task else self.name

    @property
    def is_active(self) -> bool:
        """Whether this job may still change its state."""
        return self.state in ACTIVE


def is_installed() -> bool:
    """Return whether Slurm's client commands are on this host."""
    paths = map(binaries.find, ("sbatch", "squeue", "scontrol", "scancel", "srun"))
    return all(os.access(path, os.X_OK) for path in paths)


def version() -> str:
    """Return the version of Slurm's client on this host; empty if it does not say."""
    try:
        printed = run(binaries.find("scontrol"), "--version", timeout=10).stdout
    except CommandError:
        return ""
    return printed.strip().rpartition(" ")[2]


def ping() -> None:
    """Check that the controller answers. Raises NotAnsweringError."""
    try:
        answer = run(binaries.find("scontrol"), "ping", timeout=10, check=False)
    except CommandError as e:
        raise NotAnsweringError(f"Slurm: {e}") from e
    if answer.returncode != 0 or " UP" not in answer.stdout:
        why = words(answer.stderr) or words(answer.stdout)
        raise NotAnsweringError(why or "scontrol ping: no answer")


def job(job_id: int, *, user: str) -> Job | None:
    """Return this job of `user`; None if neither the controller nor the accounting knows it.

    A job that the controller does not know has ended: then silent accounting is not an error.
    Raises SlurmError.
    """
    argv = ("-h", "-a", "-t", "all", "-j", str(job_id), "-O", _QUEUE_FORMAT)
    try:
        found = _parse(ask("squeue", *argv, timeout=_ANSWER_S))
    except SlurmError as e:
        if isinstance(e, NotAnsweringError) or "Invalid job id" not in str(e):
            raise
        found = ()
    for known in found:
        if known.job_id == job_id:
            return known if known.user == user else None
    try:
        return accounted((job_id,), user=user).get(job_id)
    except NotAnsweringError:
        return None


def accounted(job_ids: collections.abc.Sequence[int], *, user: str) -> dict[int, Job]:
    """Return the jobs of `user` among these that the accounting knows, by id.

    A cluster without accounting knows none. Raises NotAnsweringError if slurmdbd is silent.
    """
    wanted = ",".join(map(str, job_ids))
    try:
        text = ask("sacct", "-X", "-n", "-P", "-j", wanted, "-o", _SACCT_FIELDS)
    except NotAnsweringError:
        raise
    except SlurmError as e:
        if _NO_DATABASE in str(e):
            raise NotAnsweringError(str(e)) from e
        return {}  # the cluster has no accounting, or it refuses
    known = [job for job in _parse(text, _SACCT_NAMES) if job.user == user]
    return {job.job_id: job for job in known if job.job_id in job_ids}


def jobs(*, user: str | None, name: str | None = None) -> tuple[Job, ...]:
    """List the jobs of `user`, or everybody's, that the controller still knows, newest first.

    Raises SlurmError.
    """
    chosen = () if name is None else ("-n", name)
    whose = () if user is None else ("-u", user)
    found = _parse(ask("squeue", "-h", "-a", "-t", "all", *whose, *chosen, "-O", _QUEUE_FORMAT))
    mine = (known for known in found if user in (None, known.user))
    return tuple(sorted(mine, key=lambda known: -known.job_id))


def positions() -> dict[int, tuple[int, int]]:
    """Return the position of each pending job in its partition's queue, and the queue's length.

    Raises SlurmError.
    """
    argv = ("-h", "-a", "-t", "PENDING", "--sort=-p,i", "-O", "JobID:|,Partition:|")
    queues: dict[str, list[int]] = {}
    for line in ask("squeue", *argv, timeout=10).splitlines():
        number, _, partition = line.rstrip("|").partition("|")
        if number.isdecimal():
            queues.setdefault(partition, []).append(int(number))

    found: dict[int, tuple[int, int]] = {}
    for queue in queues.values():
        for position, job_id in enumerate(queue, 1):
            found[job_id] = (position, len(queue))
    return found


def cancel(*jobs: int | str) -> None:
    """Cancel jobs, arrays and tasks (`40_3`), in this order. Raises SlurmError."""
    ask("scancel", *map(str, jobs))


def start_now(job_id: int) -> None:
    """Let a waiting job start before its begin time, which Slurm sets when it requeues a job.

    Raises SlurmError.
    """
    ask("scontrol", "update", f"JobId={job_id}", "StartTime=now")


def release(job_id: int) -> None:
    """Release a held job; Slurm refuses one that an administrator holds. Raises SlurmError."""
    ask("scontrol", "release", str(job_id))


def hostnames(hostlist: str) -> tuple[str, ...]:
    """Expand a hostlist like `node-[0-3]` to names, in the order of a job's node numbers.

    Raises SlurmError.
    """
    names = tuple(ask("scontrol", "show", "hostnames", hostlist).split())
    if hostlist and not names:  # its exit status is 0 all the same
        raise SlurmError(f"Invalid hostlist: {hostlist}")
    return names


def run_everywhere(
    *argv: str, options: collections.abc.Sequence[str], timeout_s: float, stdin: str | None = None
) -> tuple[str, str]:
    """Run a command through srun; return the tasks' output, and srun's complaint or "".

    Raises NotAnsweringError.
    """
    line = (binaries.find("srun"), "--quiet", *options, *argv)
    try:
        done = run(*line, stdin=stdin, timeout=timeout_s, cwd="/", check=False)
    except CommandTimeout as e:
        raise NotAnsweringError(f"Slurm: {e}") from e
    except CommandError as e:
        raise NotAnsweringError(f"Slurm's client is not installed: {e}") from e
    if done.returncode == 0:
        return done.stdout, ""
    return done.stdout, words(done.stderr) or f"srun exited {done.returncode}"


def configuration() -> dict[str, str]:
    """Return Slurm's configuration as `scontrol show config` prints it. Raises SlurmError."""
    return show.config(ask("scontrol", "show", "config"))


def ask(
    name: str, *argv: str, stdin: str | None = None, timeout: float = 60, answer: str = "stdout"
) -> str:
    """Run one of Slurm's commands, and return its output. Raises SlurmError.

    It runs in `/`, since a job must not inherit a hook's folder.
    """
    command = binaries.find(name)
    env = binaries.variables(command)
    if name in ("squeue", "sacct", "sreport"):  # sbatch and srun hand theirs on to the job
        env["TZ"] = "UTC"
    try:
        done = run(command, *argv, stdin=stdin, timeout=timeout, cwd="/", env=env or None)
    except CommandTimeout as e:
        raise NotAnsweringError(f"Slurm: {e}") from e
    except CommandError as e:
        if e.returncode is None:
            raise NotAnsweringError(f"Slurm's client is not installed: {e}") from e
        refusal = words(e.stderr) or words(e.stdout) or str(e)
        # in the whole text: 23.02 and later first tell of each try to resolve the controller's name
        if nodes.is_silence(f"{e.stderr}\n{e.stdout}"):
            raise NotAnsweringError(refusal) from e
        raise SlurmError(refusal) from e
    return done.stderr if answer == "stderr" else done.stdout


def holds_task(tasks: str, number: int) -> bool:
    """Return whether a text like `0,4-9:2,12-15%2` holds this task; True if Slurm cut it (`...`).

    SLURM_BITSTR_LEN in squeue(1): 64 characters unless it is set.
    """
    for part in tasks.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match is None:
            return "..." in tasks
        first = int(match[1])
        last = int(match[2] or match[1])
        step = int(match[3] or 1)
        if number in range(first, last + 1, step):
            return True
    return False


def words(text: str) -> str:
    """Join Slurm's message to one line, without the commands' names and without repetitions."""
    if "Could not establish a configuration source" in text:  # behind the resolver's words
        return NOT_CONFIGURED
    lines: list[str] = []
    for raw in text.splitlines():
        line = _NOISE.sub("", raw.strip()).strip()
        if line and line not in lines:
            lines.append(line)
    return "; ".join(lines)[:400]


def _parse(text: str, names: collections.abc.Sequence[str] = _QUEUE_FIELDS) -> tuple[Job, ...]:
    """Parse the jobs that squeue or sacct printed.

    A job's name may have a line break in it: its second line is not a record.
    """
    found: list[Job] = []
    for line in text.splitlines():
        row = line.split("|", len(names) - 1)
        if len(row) == len(names) and row[0].isdecimal():
            found.append(_job(dict(zip(names, row, strict=True))))
    return tuple(found)


def _job(record: dict[str, str]) -> Job:
    state = next(iter(record["State"].split()), "UNKNOWN")  # CANCELLED by 1000
    task = record.get("ArrayTaskID", "").replace("N/A", "")
    submitted = record["SubmitTime"]
    if submitted[:1].isdecimal():
        submitted += "Z"
    return Job(
        job_id=int(record["JobID"]),
        user=record["UserName"],
        state=state,
        exit_code=_exit_code(record["exit_code"], state),
        restarts=_number(record.get("RestartCnt", "")),
        num_nodes=_number(record["NumNodes"]),
        partition=record["Partition"],
        elapsed=record["TimeUsed"],
        time_limit=record["TimeLimit"],
        submitted=submitted,
        reason=record.get("Reason", ""),
        is_held=record.get("PriorityLong") == "0",
        nodes=record["NodeList"].replace("None assigned", ""),
        name=record["Name"].rstrip("|"),
        task=task,
        array_id=_number(record["ArrayJobID"]) if task else None,
    )


def _exit_code(text: str, state: str) -> int:
    """Return the exit code that a shell would, from Slurm's `code:signal`.

    If the script did not end by itself, slurmctld notes the bare status 1 or nothing: squeue prints
    0:1, sacct 1:0 (as_mysql_job.c, as_mysql_job_complete) or 0:0.
    """
    left, _, right = text.partition(":")
    code = _number(left)
    signal = _number(right)
    if signal == 1:
        return 1
    if code:
        return code
    if signal:
        return 128 + signal
    return 1 if state in _LOST else 0


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0

"""Slurm's partitions and batch jobs, through the text outputs that kept their shape from 24.11 to 26.05.

No JSON: its shape changes with each release. No field that another user can
write into (a job's name) stands before one that we decide by.
"""

import collections.abc
import contextlib
import dataclasses
import os
import re
import typing

from ddp.problem import Problem
from ddp.slurm import policy
from slurm_ddp.commands import CommandError, CommandTimeout, run
from slurm_ddp.slurm import binaries, nodes, show, times

ACTIVE = frozenset(
    "PENDING CONFIGURING RUNNING COMPLETING SUSPENDED STOPPED REQUEUED REQUEUE_HOLD REQUEUE_FED RESIZING SIGNALING "
    "STAGE_OUT SPECIAL_EXIT RESV_DEL_HOLD EXPEDITING".split()
)
"""Job states that lead to another one (squeue(1), JOB STATE CODES; EXPEDITING: job_state_string() of 25.11)."""

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
_NO_DATABASE = "Problem talking to the database"  # sacct's last line, whatever slurmdbd's host does
_ANSWER_S = 30.0  # for one job; a large cluster's controller is slow
_KEPT = "MAINTENANCE"
UNUSABLE = frozenset(
    {"DRAIN", "FAIL", _KEPT, "NOT_RESPONDING", "INVALID_REG", "INVAL", "REBOOT_ISSUED"}
)
POWER = frozenset(
    {"POWERED_DOWN", "POWERING_UP"}
)  # flags of a node whose slurmd starts when a job needs it
_USABLE = frozenset({"IDLE", "ALLOCATED", "MIXED", "COMPLETING"})
_NOISE = re.compile(
    r"^(?:sbatch|scancel|srun|squeue|scontrol|sacct): (?:error: |fatal: )?|^(?:fatal|error): |^slurm_\w+ error: ?"
)
NOT_CONFIGURED = "Slurm is not configured here: no slurm.conf, no controller in DNS"

T = typing.TypeVar("T")


class SlurmError(Exception):
    """Slurm refused or did not answer; `str()` is one line with Slurm's own words."""


class NotAnsweringError(SlurmError):
    """The client is not installed, or the controller gave no answer: trying again later may help."""


class UncertainError(SlurmError):
    """Slurm may have accepted the job."""


@dataclasses.dataclass(frozen=True)
class Silence:
    """Slurm did not answer: whether it knows a job is unknown, which is another answer than that it knows none."""

    text: str  # one line: who is silent, in Slurm's own words

    def __str__(self) -> str:
        return self.text


NOT_ASKED = Silence("Slurm was not asked")


@contextlib.contextmanager
def asking() -> collections.abc.Generator[None]:
    """Raise Problem if Slurm does not answer what the block asks."""
    try:
        yield
    except SlurmError as e:
        raise Problem(str(e) if str(e).startswith("Slurm") else f"Slurm: {e}") from e


def look(question: collections.abc.Callable[[], T]) -> T | Silence:
    """Return Slurm's answer to a question, or its silence.

    The controller is pinged first: one that is down is named at once, where squeue gives up after 9 to 18 s.
    """
    try:
        ping()
        return question()
    except SlurmError as e:
        return Silence(f"Slurm does not answer: {str(e).removeprefix('Slurm: ')}")


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What a node can give to a job."""

    name: str
    cpus: int
    memory_mb: int  # without what Slurm keeps for itself
    gpus: int
    state: str  # as scontrol prints it
    is_usable: bool  # it takes jobs, now or once the ones on it have ended
    features: frozenset[str] = frozenset()
    is_kept: bool = False  # it would take jobs, were it not for a MAINT reservation; that one's own jobs it takes
    endpoint: tuple[str, int] | None = (
        None  # of its slurmd, if that registered the node itself and has to run now
    )
    models: frozenset[str] = frozenset()  # of its GPUs, as gres.conf names them


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition with its nodes."""

    name: str
    is_default: bool
    is_up: bool
    max_time_s: int | None  # None: UNLIMITED
    default_time_s: int | None  # None: NONE, then the maximum counts
    nodes: tuple[Capacity, ...]
    preempt_mode: str = ""  # its own, or the cluster's where it has none
    limits: policy.Limits = dataclasses.field(default_factory=policy.Limits)

    @property
    def usable(self) -> tuple[Capacity, ...]:
        """Return the nodes that take jobs."""
        return tuple(node for node in self.nodes if node.is_usable)


@dataclasses.dataclass(frozen=True)
class Job:
    """A batch job as the controller, or the accounting where there is one, knows it."""

    job_id: int
    user: str
    state: str  # PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT ...
    exit_code: int  # of the batch script; 128 + the signal that ended it
    restarts: int
    num_nodes: int
    partition: str
    elapsed: str
    time_limit: str
    submitted: str  # UTC, such as 2026-11-20T18:48:22Z; or what Slurm writes where it does not know
    reason: str
    nodes: str  # a hostlist; empty before the job starts
    name: str
    task: str = (
        ""  # of an array: the task's number; of tasks that wait together: a range such as 3-7%2
    )
    array_id: int | None = None  # of an array: its id, which its last task has for its own, too
    is_held: bool = False  # it waits until it is released; `reason` may be any text then

    @property
    def run_name(self) -> str:
        """Return the job's name, with the task's number where it is one of an array."""
        return f"{self.name}-{self.task}" if self.task else self.name

    @property
    def is_active(self) -> bool:
        """Return whether this job may still change its state."""
        return self.state in ACTIVE


def is_installed() -> bool:
    """Return whether Slurm's client commands are on this host."""
    return all(
        os.access(binaries.find(name), os.X_OK)
        for name in ("sbatch", "squeue", "scontrol", "scancel", "srun")
    )


def ping() -> None:
    """Return when the controller answers. Raises NotAnsweringError."""
    try:
        answer = run(binaries.find("scontrol"), "ping", timeout=10, check=False)
    except CommandError as e:
        raise NotAnsweringError(f"Slurm: {e}") from e
    if answer.returncode != 0 or " UP" not in answer.stdout:
        raise NotAnsweringError(
            words(answer.stderr) or words(answer.stdout) or "scontrol ping: no answer"
        )


def partitions() -> tuple[Partition, ...]:
    """Return all partitions with their nodes and limits, hidden ones too, in Slurm's order. Raises SlurmError."""
    text = ask("scontrol", "-a", "show", "partition", "-o")
    found = [record for record in show.records(text) if "PartitionName" in record]
    members: dict[str, list[Capacity]] = {}
    for node in show_nodes():
        for name in node.fields.get("Partitions", "").split(","):
            members.setdefault(name, []).append(_capacity(node))
    general = configuration()
    return tuple(
        Partition(
            name=record["PartitionName"],
            is_default=record.get("Default") == "YES",
            is_up=record.get("State") == "UP",
            max_time_s=times.parse_time(record.get("MaxTime", "")),
            default_time_s=times.parse_time(record.get("DefaultTime", "")),
            nodes=tuple(members.get(record["PartitionName"], ())),
            preempt_mode=record.get("PreemptMode", ""),
            limits=policy.read(record, general),
        )
        for record in found
    )


def show_nodes() -> tuple[nodes.Node, ...]:
    """Return all nodes. Raises SlurmError."""
    try:
        return tuple(nodes.show_all())
    except nodes.NodeError as e:
        raise (NotAnsweringError if isinstance(e, nodes.ControllerSilent) else SlurmError)(
            str(e)
        ) from e


def job(job_id: int, *, user: str) -> Job | None:
    """Return this job of `user`; None where neither the controller nor the accounting knows it. Raises SlurmError.

    A job that the controller does not know has ended. Accounting that is silent then only lacks how.
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
    """Return those of these jobs of `user` that the accounting knows; on a cluster without accounting none.

    Raises NotAnsweringError if slurmdbd is silent.
    """
    try:
        text = ask(
            "sacct", "-X", "-n", "-P", "-j", ",".join(map(str, job_ids)), "-o", _SACCT_FIELDS
        )
    except NotAnsweringError:
        raise
    except SlurmError as e:
        if _NO_DATABASE in str(e):
            raise NotAnsweringError(str(e)) from e
        return {}  # the cluster has no accounting, or it refuses
    return {
        job.job_id: job
        for job in _parse(text, _SACCT_NAMES)
        if job.user == user and job.job_id in job_ids
    }


def jobs(*, user: str | None, name: str | None = None) -> tuple[Job, ...]:
    """Return the jobs of `user`, or everybody's, that the controller still knows, newest first. Raises SlurmError."""
    chosen = () if name is None else ("-n", name)
    whose = () if user is None else ("-u", user)
    found = _parse(ask("squeue", "-h", "-a", "-t", "all", *whose, *chosen, "-O", _QUEUE_FORMAT))
    mine = (known for known in found if user in (None, known.user))
    return tuple(sorted(mine, key=lambda known: -known.job_id))


def positions() -> dict[int, tuple[int, int]]:
    """Return the place of each pending job in its partition's queue, and its length. Raises SlurmError."""
    queues: dict[str, list[int]] = {}
    text = ask(
        "squeue",
        "-h",
        "-a",
        "-t",
        "PENDING",
        "--sort=-p,i",
        "-O",
        "JobID:|,Partition:|",
        timeout=10,
    )
    for line in text.splitlines():
        number, _, partition = line.rstrip("|").partition("|")
        if number.isdecimal():
            queues.setdefault(partition, []).append(int(number))
    return {
        number: (at, len(queue)) for queue in queues.values() for at, number in enumerate(queue, 1)
    }


def cancel(*jobs: int | str) -> None:
    """Cancel jobs, arrays and tasks (`40_3`), in this order; Slurm refuses other people's. Raises SlurmError."""
    ask("scancel", *map(str, jobs))


def start_now(job_id: int) -> None:
    """Let a waiting job start before its begin time, which Slurm sets when a job is queued again. Raises SlurmError."""
    ask("scontrol", "update", f"JobId={job_id}", "StartTime=now")


def release(job_id: int) -> None:
    """Release a held job; Slurm refuses one that an administrator holds. Raises SlurmError."""
    ask("scontrol", "release", str(job_id))


def hostnames(hostlist: str) -> tuple[str, ...]:
    """Return the names behind a hostlist like `node-[0-3]`, in the order of a job's node numbers. Raises SlurmError."""
    names = tuple(ask("scontrol", "show", "hostnames", hostlist).split())
    if hostlist and not names:  # its exit status is 0 all the same
        raise SlurmError(f"Invalid hostlist: {hostlist}")
    return names


def run_everywhere(
    *argv: str, options: collections.abc.Sequence[str], timeout_s: float, stdin: str | None = None
) -> tuple[str, str]:
    """Run a command through srun; return the tasks' output, and srun's complaint if any. Raises NotAnsweringError."""
    try:
        line = (binaries.find("srun"), "--quiet", *options, *argv)
        done = run(*line, stdin=stdin, timeout=timeout_s, cwd="/", check=False)
    except CommandTimeout as e:
        raise NotAnsweringError(f"Slurm: {e}") from e
    except CommandError as e:
        raise NotAnsweringError(f"Slurm's client is not installed: {e}") from e
    trouble = words(done.stderr) if done.returncode else ""
    return done.stdout, trouble or (f"srun exited {done.returncode}" if done.returncode else "")


def configuration() -> dict[str, str]:
    """Return Slurm's configuration as `scontrol show config` prints it. Raises SlurmError."""
    return show.config(ask("scontrol", "show", "config"))


def ask(
    name: str, *argv: str, stdin: str | None = None, timeout: float = 60, answer: str = "stdout"
) -> str:
    """Run one of Slurm's commands in `/`: a job must not inherit a hook's folder. Raises SlurmError."""
    command = binaries.find(name)
    try:
        env = binaries.variables(command)
        if name in ("squeue", "sacct"):  # sbatch and srun hand theirs on to the job
            env["TZ"] = "UTC"
        done = run(command, *argv, stdin=stdin, timeout=timeout, cwd="/", env=env or None)
    except CommandTimeout as e:
        raise NotAnsweringError(f"Slurm: {e}") from e
    except CommandError as e:
        if e.returncode is None:
            raise NotAnsweringError(f"Slurm's client is not installed: {e}") from e
        refusal = words(e.stderr) or words(e.stdout) or str(e)
        # in the whole text: 23.02 and later first tell of each try to resolve the controller's name
        raise (NotAnsweringError if nodes.is_silence(f"{e.stderr}\n{e.stdout}") else SlurmError)(
            refusal
        ) from e
    return done.stderr if answer == "stderr" else done.stdout


def holds_task(tasks: str, number: int) -> bool:
    """Return whether a text like `0,4-9:2,12-15%2` holds this task; of one that Slurm cut (`...`) it may.

    SLURM_BITSTR_LEN in squeue(1): 64 characters unless it is set.
    """
    for part in tasks.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match is None:
            return "..." in tasks
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if number in range(first, last + 1, step):
            return True
    return False


def words(text: str) -> str:
    """Return Slurm's message as one line, without the commands' names in front and without saying anything twice."""
    if "Could not establish a configuration source" in text:  # behind the resolver's words
        return NOT_CONFIGURED
    lines: list[str] = []
    for raw in text.splitlines():
        line = _NOISE.sub("", raw.strip()).strip()
        if line and line not in lines:
            lines.append(line)
    return "; ".join(lines)[:400]


def _capacity(node: nodes.Node) -> Capacity:
    fields = node.fields
    address, is_booting = node.address or "", bool(node.flags & POWER)
    can_ask = (
        node.is_dynamic and not is_booting and bool(re.fullmatch(r"[0-9.]+|[0-9A-Fa-f:]+", address))
    )
    ignored = {_KEPT, "NOT_RESPONDING"} if is_booting else {_KEPT}
    takes_jobs = node.state in _USABLE and not node.flags & UNUSABLE - ignored
    return Capacity(
        name=node.name,
        cpus=_number(fields.get("CPUEfctv", "0")),
        memory_mb=max(
            _number(fields.get("RealMemory", "0")) - _number(fields.get("MemSpecLimit", "0")), 0
        ),
        gpus=nodes.count_gres(node.gres, "gpu"),
        state=node.state_text,
        is_usable=takes_jobs and _KEPT not in node.flags,
        features=frozenset((show.value(fields, "AvailableFeatures") or "").split(",")) - {""},
        is_kept=takes_jobs and _KEPT in node.flags,
        endpoint=(address, _number(fields.get("Port", "6818"))) if can_ask else None,
        models=frozenset(
            kind for name, kind in nodes.gres_items(node.gres) if name == "gpu" and kind
        ),
    )


def _parse(text: str, names: collections.abc.Sequence[str] = _QUEUE_FIELDS) -> tuple[Job, ...]:
    """Parse the jobs that squeue or sacct printed; the second line of a name with a line break in it is none."""
    rows = (line.split("|", len(names) - 1) for line in text.splitlines())
    whole = (row for row in rows if len(row) == len(names) and row[0].isdecimal())
    return tuple(_job(dict(zip(names, row, strict=True))) for row in whole)


def _job(record: dict[str, str]) -> Job:
    state = next(iter(record["State"].split()), "UNKNOWN")  # CANCELLED by 1000
    task = record.get("ArrayTaskID", "").replace("N/A", "")
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
        submitted=f"{record['SubmitTime']}Z"
        if record["SubmitTime"][:1].isdecimal()
        else record["SubmitTime"],
        reason=record.get("Reason", ""),
        is_held=record.get("PriorityLong") == "0",
        nodes=record["NodeList"].replace("None assigned", ""),
        name=record["Name"].rstrip("|"),
        task=task,
        array_id=_number(record["ArrayJobID"]) if task else None,
    )


def _exit_code(text: str, state: str) -> int:
    """Return an exit code as a shell would, from Slurm's `code:signal`.

    Of a job whose script did not end by itself slurmctld notes the bare status 1 or nothing: squeue prints 0:1, sacct
    1:0 (as_mysql_job.c, as_mysql_job_complete) or 0:0.
    """
    code, signal = (_number(part) for part in text.partition(":")[::2])
    if signal == 1:
        code, signal = 1, 0
    return code or (128 + signal if signal else int(state in _LOST))


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0

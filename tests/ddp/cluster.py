"""A strict double of Slurm's command line that answers in the form of Slurm 24.11.5.

Its version has the security fixes.
"""

import collections.abc
import dataclasses
import pathlib
import re

from ddp.node import spec
from slurm_ddp.commands import CommandError, CommandTimeout, Completed

QUEUE_FORMAT = (
    "JobID:|,UserName:|,State:|,exit_code:|,RestartCnt:|,NumNodes:|,Partition:|,TimeUsed:|,TimeLimit:|,"
    "SubmitTime:|,StartTime:|,PriorityLong:|,Reason:|,NodeList:|,ArrayJobID:|,ArrayTaskID:|,Name:|"
)
EVERYONES_FORMAT = (
    "JobID:|,UserName:|,Account:|,QOS:|,State:|,PriorityLong:|,NumNodes:|,TimeUsed:|,TimeLimit:|,"
    "ArrayTaskID:|,Reason:|,NodeList:|,Name:|"
)
UNKNOWN_JOB = "slurm_load_jobs error: Invalid job id specified"


def no_pause(_: float) -> None:
    """Look at the double of Slurm again at once."""


@dataclasses.dataclass
class Machine:
    """A compute node."""

    name: str
    cpus: int = 2
    memory_mb: int = 8000
    gres: str = "(null)"
    state: str = "IDLE"
    kept_mb: int = 0
    used_cpus: int = 0

    def line(self, partition: str) -> str:
        """Return the node as `scontrol show node -o` prints it."""
        kept = f"MemSpecLimit={self.kept_mb} " if self.kept_mb else ""
        return (
            f"NodeName={self.name} Arch=x86_64 CoresPerSocket=1  CPUAlloc={self.used_cpus} CPUEfctv={self.cpus} CPUTot={self.cpus} "
            f"CPULoad=0.56 AvailableFeatures=(null) ActiveFeatures=(null) Gres={self.gres} NodeAddr=10.77.0.1{self.name[-1]} "
            f"NodeHostName=juju-2586ad-{self.name[-1]} Version=25.11.8 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  "
            f"RealMemory={self.memory_mb} AllocMem=0 FreeMem=22292 Sockets=2 Boards=1 {kept}State={self.state} "
            f"ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions={partition}  "
            f"BootTime=2026-11-20T18:25:37 CfgTRES=cpu={self.cpus},mem={self.memory_mb}M,billing=2 AllocTRES= CapWatts=n/a\n"
        )


@dataclasses.dataclass
class Job:
    """A submitted job; each look at it takes it to the next of its states."""

    job_id: int
    user: str
    name: str
    script: pathlib.Path
    text: str
    states: list[tuple[str, int]]  # state, wait status
    cancelled: bool = False
    reason: str = ""  # why it waits
    held: bool = False
    restarts: int = 0
    task: str = "N/A"
    array_id: int | None = None
    comment: str = ""

    def asked(self) -> spec.JobSpec | spec.PrepareSpec:
        """Read the job's specification from the file that its script names."""
        found = re.search(
            r"^exec /usr/bin/python3 -I -S -B \S+/program/ddp.pyz (job|prepare) (\S+)$",
            self.text,
            re.MULTILINE,
        )
        assert found is not None
        kind = spec.JobSpec if found[1] == "job" else spec.PrepareSpec
        return spec.load(kind, found[2])

    def training(self) -> spec.JobSpec:
        job = self.asked()
        assert isinstance(job, spec.JobSpec)
        return job

    def commands(self) -> list[str]:
        """List the commands of the job as a user would type them."""
        job = self.asked()
        if isinstance(job, spec.PrepareSpec):
            return [" ".join(command) for command in job.commands]
        return [
            " ".join(f"${word.text}" if word.is_variable else word.text for word in job.command)
        ]

    def line(self) -> str:
        """Return the job as `squeue -O` prints it."""
        state, status = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        reason = (
            self.reason or "Resources"
            if state == "PENDING"
            else "NonZeroExitCode"
            if state == "FAILED"
            else "None"
        )
        nodes = "" if state == "PENDING" else "slurmd-[0-1]"
        return (
            f"{self.job_id}|{self.user}|{state}|{status >> 8}:{status & 0x7F}|{self.restarts}|2|slurmd|0:07|UNLIMITED|2026-11-20T18:48:22|"
            f"2026-11-20T18:48:22|{0 if self.held else 4294901757}|{reason}|{nodes}|{self.array_id or self.job_id}|{self.task}|{self.name}|\n"
        )


def changes(call: tuple[str, ...]) -> bool:
    """Return whether a command changes something."""
    if call[0] == "scontrol":
        return not {"ping", "show", "--version"} & {*call}
    if call[0] == "sacctmgr":
        return "show" not in call
    return call[0] in ("sbatch", "scancel") and "--test-only" not in call


NOT_CONFIGURED = """\
{0}: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
{0}: error: fetch_config: DNS SRV lookup failed
{0}: error: _establish_config_source: failed to fetch config
{0}: fatal: Could not establish a configuration source
"""  # of 24.11, on a host without slurm.conf


class Cluster:
    """Answers sbatch, squeue, scontrol, scancel, srun and sacct; anything else fails the test."""

    def __init__(self, user: str) -> None:
        self.version = "25.11.8"
        self.user = user
        self.machines = [Machine("slurmd-0"), Machine("slurmd-1")]
        self.extra_partitions = ""
        self.partition_state = "UP"
        self.takes = "AllowAccounts=ALL AllowQos=ALL"
        self.default = "YES"
        self.max_time, self.default_time = "UNLIMITED", "NONE"
        self.jobs: list[Job] = []
        self.states: list[tuple[str, int]] = [("PENDING", 0), ("RUNNING", 0), ("COMPLETED", 0)]
        self.refusal = ""  # what sbatch says instead of accepting
        self.submit_refusal = ""  # the same, only when it is submitted
        self.denial = ""  # what scancel, scontrol update and release say instead of doing it
        self.silent = 0  # so many commands find no controller
        self.silence = "{0}: error: Unable to contact slurm controller (connect failure)"
        self.hung = False
        self.accounting_silence = ""  # what sacct says where slurmdbd does not answer
        self.forgets = False  # the controller knows no job any more
        self.accounting = ""  # what sacct prints
        self.allowed_qos = "low,normal\n"  # of the user's associations
        self.everyones = ""  # what squeue prints of all accounts' active jobs
        self.hides_queue = False  # squeue of all accounts gives no answer
        self.usage = ""  # what sreport prints
        self.accounts = {"chem": {user}, "physics": {user}}  # and who may use them
        self.qos = "normal"  # that everybody may ask for
        self.reservations = ""
        self.running = ""  # user and TRES of running jobs, as squeue prints them
        self.config = (
            "Configuration data as of 2026-11-20T18:48:42\nAuthInfo                = cred_expire=30\nAccountingStorageType   = accounting_storage/slurmdbd\n"
            "ClusterName             = main\nJobRequeue              = 1\nKillWait                = 30 sec\nPreemptMode             = OFF\n"
            "ProctrackType           = proctrack/linuxproc\nSLURM_VERSION           = 25.11.8\n"
            "SelectType              = select/cons_tres\n"
        )
        self.submitted: collections.abc.Callable[[Job], None] = lambda _: None
        self.answers: collections.abc.Callable[[Job], Completed] = lambda job: Completed(
            0, f"{job.job_id}\n", ""
        )
        self.calls: list[tuple[str, ...]] = []
        self.judged: list[str] = []  # what --test-only was asked about

    @property
    def changes(self) -> list[tuple[str, ...]]:
        """Return the commands that change something."""
        return [call for call in self.calls if changes(call)]

    def run(
        self,
        *argv: str,
        timeout: float,
        stdin: str | None = None,
        cwd: str | None = None,
        check: bool = True,
        env: dict[str, str] | None = None,
    ) -> Completed:
        """Stand in for slurm_ddp.commands.run."""
        assert timeout > 0
        assert argv[0].startswith("/usr/bin/")
        call = (argv[0].removeprefix("/usr/bin/"), *argv[1:])
        self.calls.append(call)
        if self.hung:
            raise CommandTimeout(f"{call[0]}: no answer within {timeout:g} s")
        if self.silent:
            self.silent -= 1
            answer = Completed(1, "", self.silence.format(call[0]))
        else:
            if call[0] in ("sbatch", "scancel", "srun") or call[:2] in (
                ("scontrol", "update"),
                ("scontrol", "release"),
            ):
                assert cwd == "/"
            is_denied = self.denial and changes(call) and call[0] != "sbatch"
            answer = (
                Completed(1, "", self.denial)
                if is_denied
                else getattr(self, f"_{call[0]}")(call[1:], stdin)
            )
        if check and answer.returncode:
            last_line = (answer.stderr or answer.stdout).splitlines()[-1]
            raise CommandError(
                f"{call[0]} exited {answer.returncode}: {last_line}",
                returncode=answer.returncode,
                stdout=answer.stdout,
                stderr=answer.stderr,
            )
        return answer

    def job(self, job_id: int) -> Job:
        """Return a submitted job."""
        return next(job for job in self.jobs if job.job_id == job_id)

    def _scontrol(self, arguments: tuple[str, ...], _: str | None) -> Completed:
        match arguments:
            case ("--version",):
                return Completed(0, f"slurm-wlm {self.version}\n", "")
            case ("ping",):
                return Completed(0, "Slurmctld(primary) at ctl is UP\n", "")
            case ("-a", "show", "partition", "-o"):
                names = ",".join(machine.name for machine in self.machines)
                return Completed(
                    0,
                    f"PartitionName=slurmd AllowGroups=ALL {self.takes} AllocNodes=ALL Default={self.default} "
                    f"QoS=N/A DefaultTime={self.default_time} DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO "
                    f"MaxNodes=UNLIMITED MaxTime={self.max_time} MinNodes=0 LLN=NO Nodes={names} RootOnly=NO ReqResv=NO "
                    f"State={self.partition_state} TotalCPUs=4 TotalNodes=2 DefMemPerNode=UNLIMITED\n{self.extra_partitions}",
                    "",
                )
            case ("-a", "show", "nodes", "-o"):
                return Completed(
                    0, "".join(machine.line("slurmd") for machine in self.machines), ""
                )
            case ("show", "config"):
                return Completed(0, self.config, "")
            case ("show", "reservations", "-o"):
                return Completed(0, self.reservations or "No reservations in the system\n", "")
            case ("show", "hostnames", names) if "," in names or "[" not in names:
                return Completed(0, names.replace(",", "\n") + "\n", "")
            case ("update", job, "StartTime=now"):
                self.job(int(job.removeprefix("JobId="))).reason = "Resources"
                return Completed(0, "", "")
            case ("release", number):
                self.job(int(number)).reason, self.job(int(number)).held = "None", False
                return Completed(0, "", "")
            case ("show", "hostnames", _):
                return Completed(0, "".join(f"{machine.name}\n" for machine in self.machines), "")
            case _:
                raise AssertionError(f"scontrol {arguments} is not known")

    def _sbatch(self, arguments: tuple[str, ...], stdin: str | None) -> Completed:
        if arguments == ("--test-only",):
            assert stdin is not None
            assert stdin.startswith("#!/bin/bash\n")
            self.judged.append(stdin)
        if self.refusal:
            return Completed(1, "", self.refusal)
        if arguments == ("--test-only",):
            return Completed(
                0,
                "",
                "sbatch: Job 3 to start at 2026-11-20T18:48:42 using 2 processors on nodes slurmd-[0-1] in partition slurmd",
            )
        option, comment, path = arguments
        assert option == "--parsable"
        if self.submit_refusal:
            return Completed(1, "", self.submit_refusal)
        script = pathlib.Path(path)
        array = re.search(r"^#SBATCH --array=0-(\d+)%\d+$", script.read_text(), re.MULTILINE)
        last = int(array[1]) if array else -1
        swept = "-%a/logs/" in script.read_text()  # each task has a separate folder
        folders = (
            [f"{script.parent}-{number}" for number in range(last + 1)]
            if swept
            else [str(script.parent)]
        )
        assert all(pathlib.Path(folder, "logs").is_dir() for folder in folders), (
            "Slurm would lose the job: its log's folder is not there"
        )
        text = script.read_text()
        name = re.search(r"^#SBATCH --job-name=(\S+)$", text, re.MULTILINE)
        assert name is not None
        job = Job(40 + len(self.jobs), self.user, name[1], script, text, list(self.states))
        job.comment = comment.removeprefix("--comment=")
        if array:
            job.task, job.array_id = f"0-{last}%2", job.job_id
        self.jobs.append(job)
        self.submitted(job)
        return self.answers(job)

    def _squeue(self, arguments: tuple[str, ...], _: str | None) -> Completed:
        match arguments:
            case ("-h", "-a", "-t", "all", "-j", number, "-O", form):
                assert form == QUEUE_FORMAT
                found = [job for job in self.jobs if job.job_id == int(number) and not self.forgets]
                return Completed(0, found[0].line(), "") if found else Completed(1, "", UNKNOWN_JOB)
            case ("-h", "-a", "-j", number, "-O", "State:|,Account:|,QOS:|,Partition:|,Reason:|"):
                job = self.job(int(number))
                return Completed(
                    0,
                    f"{job.states[0][0]}|physics|normal|slurmd|{job.reason or 'Resources'}|\n",
                    "",
                )
            case ("-h", "-a", "-t", "all", "-u", self.user, "-n", name, "-O", form) if (
                form.endswith("Comment:|")
            ):
                known = [job for job in self.jobs if job.name == name]
                lines = (
                    f"{job.job_id}|{job.array_id or job.job_id}|{job.task}|{job.states[0][0]}|{job.comment}|\n"
                    for job in known
                )
                return Completed(0, "".join(lines), "")
            case ("-h", "-a", "-t", "PENDING", "--sort=-p,i", "-O", "JobID:|,Partition:|"):
                known = [job for job in self.jobs if job.states[0][0] == "PENDING"]
                return Completed(0, "".join(f"{job.job_id}|slurmd|\n" for job in known), "")
            case ("-h", "-a", "--sort=-p,i", "-O", form):
                assert form == EVERYONES_FORMAT
                if self.hides_queue:
                    return Completed(1, "", self.silence.format("squeue"))
                return Completed(0, self.everyones, "")
            case ("-h", "-a", "-t", "all", "-O", form):  # everybody's
                assert form == QUEUE_FORMAT
                return Completed(0, "".join(job.line() for job in self.jobs), "")
            case ("--noheader", "--states=RUNNING", form):
                assert form == (
                    "--Format=UserName:|,NumNodes:|,NumTasks:|,tres-alloc:|,tres-per-job:|,tres-per-node:|,tres-per-task:|"
                )
                return Completed(0, self.running, "")
            case ("-h", "-a", "-t", "all", "-u", user, *name, "-O", form):
                assert form == QUEUE_FORMAT
                assert user == self.user
                found = [job for job in self.jobs if not name or ["-n", job.name] == name]
                return Completed(0, "".join(job.line() for job in found), "")
            case _:
                raise AssertionError(f"squeue {arguments} is not known")

    def _scancel(self, arguments: tuple[str, ...], _: str | None) -> Completed:
        for word in arguments:
            array, _, task = word.partition("_")
            for job in self.jobs:
                is_meant = (
                    (str(job.array_id), job.task) == (array, task)
                    if task
                    else self._is_of(job, array)
                )
                if is_meant and job.states[0][0] in ("PENDING", "RUNNING"):
                    job.cancelled = True
                    job.states = [("COMPLETING", 0), ("CANCELLED", 15)]
        return Completed(0, "", "")

    @staticmethod
    def _is_of(job: Job, number: str) -> bool:
        """Return whether a bare number means this job to scancel; an array's means all tasks."""
        return (
            number in (str(job.array_id), str(job.job_id))
            if job.array_id
            else number == str(job.job_id)
        )

    def examination(self, arguments: tuple[str, ...]) -> Completed:
        """Answer the doctor's step; its tests replace this."""
        assert arguments
        return Completed(
            1, "", "srun: error: Unable to allocate resources: Requested nodes are busy"
        )

    def _srun(self, arguments: tuple[str, ...], stdin: str | None) -> Completed:
        assert arguments[0] == "--quiet"
        at = arguments.index("/usr/bin/python3")  # a program of the package, sent to the node
        assert arguments[at + 1 : at + 3] == ("-I", "-")
        compile(stdin or "", "srun", "exec")
        assert stdin
        assert {"--job-name=trainer-doctor", "--job-name=node-check"} & {*arguments}
        return self.examination(arguments)

    def _sreport(self, arguments: tuple[str, ...], _: str | None) -> Completed:
        if self.accounting_silence:
            return Completed(1, "", self.accounting_silence)
        report = ("cluster", "AccountUtilizationByUser")
        assert arguments[:8] == ("-n", "-P", "-T", "ALL", "-t", "Seconds", *report)
        assert [word.partition("=")[0] for word in arguments[8:]] == ["Start", "End", "Format"]
        return Completed(0, self.usage, "")

    def _sacctmgr(self, arguments: tuple[str, ...], _: str | None) -> Completed:
        if self.accounting_silence:
            return Completed(1, "", self.accounting_silence)
        match arguments:
            case ("-n", "-P", "show", "qos", "format=Name,Preempt"):
                return Completed(0, "normal|low,scavenger\nlow|\nscavenger|\n", "")
            case ("-n", "-P", "show", "assoc", "where", who, "format=QOS"):
                assert who == f"user={self.user}"
                return Completed(0, self.allowed_qos, "")
            case ("--noheader", "--parsable2", "show", "associations", "where", *where, form):
                return Completed(0, self._associations(where, form.removeprefix("format=")), "")
            case ("--immediate", "add", "account", account, "cluster=main"):
                assert account not in self.accounts
                self.accounts[account] = set()
            case ("--immediate", "add", "user", user, "cluster=main", named):
                users = self.accounts[named.removeprefix("account=")]
                assert user not in users
                users.add(user)
            case ("--immediate", "delete", "user", "where", name, "cluster=main", named):
                self.accounts[named.removeprefix("account=")].remove(name.removeprefix("name="))
            case _:
                raise AssertionError(f"sacctmgr {arguments} is not known")
        return Completed(0, " Associations =\n", "")

    def _associations(self, where: list[str], column: str) -> str:
        """Print a column of the associations: of each account itself, and of each of its people."""
        wanted = dict(word.split("=") for word in where)
        assert wanted.pop("cluster") == "main"
        rows: list[dict[str, str]] = []
        for account, users in self.accounts.items():
            for user in ("", *sorted(users)):
                rows.append({"account": account, "user": user, "qos": self.qos})
        chosen = [row for row in rows if wanted.items() <= row.items()]
        return "".join(f"{row[column.lower()]}\n" for row in chosen)

    def _sacct(self, arguments: tuple[str, ...], _: str | None) -> Completed:
        assert arguments[:4] == ("-X", "-n", "-P", "-j")
        if self.accounting_silence:
            return Completed(1, "", self.accounting_silence)
        if not self.accounting:
            return Completed(1, "", "Slurm accounting storage is disabled")
        return Completed(0, self.accounting, "")

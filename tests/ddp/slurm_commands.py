"""A double of Slurm's commands, and the texts that they print."""

from slurm_ddp.commands import CommandError, Completed

# Captured from 24.11.5.
PARTITION = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default={default} QoS=N/A "
    "DefaultTime={usual} DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime={most} MinNodes=0 "
    "LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=slurmd-[0-1] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO "
    "OverTimeLimit=NONE PreemptMode=OFF State={state} TotalCPUs=4 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) "
    "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=4,mem=16000M,node=2,billing=4\n"
)
NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv={cpus} CPUTot=2 CPULoad=0.56 AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres={gres} NodeAddr=10.77.0.10 NodeHostName=juju-2586ad-3 Version=24.11.5 OS=Linux 6.18.44-fc-v669 #1 SMP "
    "PREEMPT_DYNAMIC @0  RealMemory=8000 AllocMem=0 FreeMem=22292 Sockets=2 Boards=1 {kept}State={state} ThreadsPerCore=1 TmpDisk=0 "
    "Weight=1 Owner=N/A MCS_label=N/A Partitions={partitions}  BootTime=2026-11-20T18:25:37 SlurmdStartTime=2026-11-20T18:48:19 "
    "LastBusyTime=2026-11-20T18:48:22 CfgTRES=cpu=2,mem=8000M,billing=2 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 "
    "ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s\n"
)
ASKED = (
    "JobID:|,UserName:|,State:|,exit_code:|,RestartCnt:|,NumNodes:|,Partition:|,TimeUsed:|,TimeLimit:|,"
    "SubmitTime:|,StartTime:|,PriorityLong:|,Reason:|,NodeList:|,ArrayJobID:|,ArrayTaskID:|,Name:|"
)


def partition(
    name: str = "slurmd",
    *,
    default: str = "YES",
    most: str = "UNLIMITED",
    usual: str = "NONE",
    state: str = "UP",
) -> str:
    return PARTITION.format(name=name, default=default, most=most, usual=usual, state=state)


def node(
    name: str = "slurmd-0",
    *,
    state: str = "IDLE",
    gres: str = "(null)",
    kept: int = 0,
    partitions: str = "slurmd",
    cpus: int = 2,
) -> str:
    text = f"CoreSpecCount=1 MemSpecLimit={kept} " if kept else ""
    return NODE.format(
        name=name, state=state, gres=gres, kept=text, partitions=partitions, cpus=cpus
    )


class Commands:
    """Answers the expected commands in their order, and fails on any other."""

    def __init__(self) -> None:
        self.expected: list[tuple[tuple[str, ...], Completed | CommandError]] = []
        self.stdin: list[str | None] = []

    def expect(self, *argv: str, stdout: str = "", stderr: str = "", returncode: int = 0) -> None:
        self.expected.append((argv, Completed(returncode, stdout, stderr)))

    def fail(self, *argv: str, error: CommandError) -> None:
        self.expected.append((argv, error))

    def __call__(
        self,
        *argv: str,
        timeout: float = 0,
        check: bool = True,
        stdin: str | None = None,
        cwd: str = "/",
        env: dict[str, str] | None = None,
    ) -> Completed:
        assert timeout > 0
        tells_times = argv[0] in ("/usr/bin/squeue", "/usr/bin/sacct")
        assert env == ({"TZ": "UTC"} if tells_times else None), "a job must not inherit it"
        assert cwd == "/", "a job must not inherit a hook's folder"
        assert self.expected, f"nobody expected {argv}"
        wanted, answer = self.expected.pop(0)
        assert argv == wanted
        self.stdin.append(stdin)
        if isinstance(answer, CommandError):
            raise answer
        if check and answer.returncode:
            message = f"{argv[0]} exited {answer.returncode}"
            raise CommandError(
                message, returncode=answer.returncode, stdout=answer.stdout, stderr=answer.stderr
            )
        return answer


SACCT_FIELDS = (
    "JobIDRaw,User,State,ExitCode,NNodes,Partition,Elapsed,Timelimit,Submit,NodeList,JobName"
)

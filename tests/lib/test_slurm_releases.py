"""The text outputs of Slurm 22.05 to 25.11 that the trainer reads, each in the shape of its release.

22.05.8 was captured from a running cluster. The others are made from it after the releases' own words: RELEASE_NOTES and
CHANGELOG, scontrol(1), squeue(1), sacct(1), and the print functions in src/api/partition_info.c and node_info.c: what a
release adds stands where it prints it, what it dropped is gone.
"""

import dataclasses

import pytest

from lib.test_jobs import ASKED, SACCT_FIELDS, Commands
from slurm_ddp.slurm import jobs, nodes

PARTITION_22_05 = (
    "PartitionName=slurmd AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE "
    "DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=0 LLN=NO "
    "MaxCPUsPerNode=UNLIMITED NodeSets=slurmd Nodes=slurmd-[0-1] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO "
    "OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=4 TotalNodes=2 SelectTypeParameters=NONE "
    "JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=4,mem=48210M,node=2,billing=4 \n"
)
NODE_22_05 = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=2  CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=11.64 AvailableFeatures=slurmd "
    "ActiveFeatures=slurmd Gres=gpu:mock_gpu:1(S:0) NodeAddr=10.77.3.11 NodeHostName={name} Version=22.05.8 "
    "OS=Linux 6.18.44-fc-v669 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=24105 AllocMem=0 FreeMem=15716 Sockets=1 Boards=1 "
    "MemSpecLimit=1024 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=slurmd  "
    "BootTime=2026-11-20T18:25:37 SlurmdStartTime=2026-11-20T22:00:28 LastBusyTime=2026-11-20T22:44:28 "
    "CfgTRES=cpu=2,mem=24105M,billing=2 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s "
    "ExtSensorsWatts=0 ExtSensorsTemp=n/s\n"
)
POWER = " CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s"


@dataclasses.dataclass(frozen=True)
class Release:
    """A release's outputs; `changes` are (output, old, new), each of which must be found."""

    version: str
    changes: tuple[tuple[str, str, str], ...] = ()

    def partition(self) -> str:
        return self._changed("partition", PARTITION_22_05)

    def node(self, name: str, state: str) -> str:
        text = self._changed("node", NODE_22_05).replace("Version=22.05.8", f"Version={self.version}")
        return text.format(name=name, state=state)

    def _changed(self, output: str, text: str) -> str:
        for where, old, new in self.changes:
            if where == output:
                assert old in text, old
                text = text.replace(old, new)
        return text


SOCKETS = ("partition", "MaxCPUsPerNode=UNLIMITED", "MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED")
RESUME = ("node", "LastBusyTime=2026-11-20T22:44:28", "LastBusyTime=2026-11-20T22:44:28 ResumeAfterTime=None")
NO_SENSORS = ("node", " ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s", "")
TOPOLOGY = ("partition", "ExclusiveUser=NO", "ExclusiveUser=NO ExclusiveTopo=NO")
NO_POWER = ("node", POWER, "")
AVERAGE = ("node", POWER, " CurrentWatts=0 AveWatts=0")
RELEASES = (
    Release("22.05.8"),
    Release("23.02.7", (SOCKETS, RESUME)),
    Release("23.11.10", (SOCKETS, RESUME, NO_SENSORS)),
    Release("24.05.8", (SOCKETS, RESUME, TOPOLOGY, AVERAGE)),
    Release("24.11.7", (SOCKETS, RESUME, TOPOLOGY, AVERAGE)),
    Release("25.05.4", (SOCKETS, RESUME, TOPOLOGY, NO_POWER, ("node", "Weight=1", "Weight=1 Topology=default:s1"))),
    Release("25.11.2", (SOCKETS, RESUME, TOPOLOGY, NO_POWER, ("node", "Boards=1", "Boards=1 ResCoresPerGPU=2"))),
)
each = pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    double = Commands()
    monkeypatch.setattr(jobs, "run", double)
    monkeypatch.setattr(nodes, "run", double)
    return double


@each
def test_partitions_and_what_their_nodes_give(commands: Commands, release: Release):
    commands.expect("/usr/bin/scontrol", "show", "partition", "-o", stdout=release.partition())
    # 24.05 and later tell of a dynamic node with the same flags, in the same order as before
    shown = release.node("slurmd-0", "IDLE+DYNAMIC_NORM") + release.node("slurmd-1", "DOWN*+DYNAMIC_NORM")
    commands.expect("/usr/bin/scontrol", "show", "nodes", "-o", stdout=shown)
    (found,) = jobs.partitions()
    assert (found.name, found.is_default, found.is_up, found.max_time_s) == ("slurmd", True, True, 2 * 86400)
    assert found.default_time_s is None
    assert [(node.name, node.cpus, node.memory_mb, node.gpus) for node in found.nodes] == [
        ("slurmd-0", 2, 23081, 1),
        ("slurmd-1", 2, 23081, 1),
    ]
    assert found.nodes[0].features == {"slurmd"}
    assert [node.name for node in found.usable] == ["slurmd-0"]


QUEUE = {  # by what the job is; -O has printed these fields alike since 20.11
    "waits for its turn again": "12|ubuntu|PENDING|0|1|1|slurmd|0:00|UNLIMITED|2026-11-20T22:18:35|2026-11-20T22:20:36|BeginTime||12|N/A|run|\n",
    "runs": "12|ubuntu|RUNNING|0|0|2|slurmd|0:01|1:00|2026-11-20T22:18:35|2026-11-20T22:18:36|None|slurmd-[0-1]|12|N/A|run|\n",
    "leaves": "12|ubuntu|COMPLETING|0|1|1|slurmd|0:00|1:00|2026-11-20T22:18:35|2026-11-20T22:18:36|None|slurmd-1|12|N/A|run|\n",
    "was killed": "12|ubuntu|FAILED|9|0|1|slurmd|0:03|1:00|2026-11-20T22:18:35|2026-11-20T22:18:36|JobLaunchFailure|slurmd-1|12|N/A|run|\n",
    "ran out": "12|ubuntu|TIMEOUT|15|0|1|slurmd|1:03|1:00|2026-11-20T22:18:35|2026-11-20T22:18:36|TimeLimit|slurmd-1|12|N/A|run|\n",
    "of an array": "12|ubuntu|RUNNING|0|0|1|slurmd|0:01|1:00|2026-11-20T22:18:35|2026-11-20T22:18:36|None|slurmd-1|12|3|run|\n",
}
WANTED = {
    "waits for its turn again": ("PENDING", True, 0, 1, "run"),
    "runs": ("RUNNING", True, 0, 0, "run"),
    "leaves": ("COMPLETING", True, 0, 1, "run"),
    "was killed": ("FAILED", False, 137, 0, "run"),
    "ran out": ("TIMEOUT", False, 143, 0, "run"),
    "of an array": ("RUNNING", True, 0, 0, "run-3"),
}


@pytest.mark.parametrize("which", list(QUEUE))
def test_a_job_in_the_queue(commands: Commands, which: str):
    commands.expect("/usr/bin/squeue", "-h", "-a", "-t", "all", "-j", "12", "-O", ASKED, stdout=QUEUE[which])
    found = jobs.job(12, user="ubuntu")
    assert found is not None
    assert (found.state, found.is_active, found.exit_code, found.restarts, found.run_name) == WANTED[which]


def forgotten(commands: Commands, **answer: object) -> jobs.Job | None:
    """Ask for a job that the controller forgot: `Invalid job id` up to 24.05, nothing at all for -t all later."""
    said = "slurm_load_jobs error: Invalid job id specified\n"
    commands.expect("/usr/bin/squeue", "-h", "-a", "-t", "all", "-j", "12", "-O", ASKED, returncode=1, stderr=said)
    argv = ("/usr/bin/sacct", "-X", "-n", "-P", "-j", "12", "-o", SACCT_FIELDS)
    commands.expect(*argv, **answer)  # type: ignore[arg-type]
    return jobs.job(12, user="ubuntu")


@pytest.mark.parametrize(
    ("state", "exit_code", "wanted"),
    [
        ("COMPLETED", "0:0", ("COMPLETED", 0)),
        ("CANCELLED by 1000", "0:15", ("CANCELLED", 143)),
        ("OUT_OF_MEMORY", "0:125", ("OUT_OF_MEMORY", 253)),
        ("NODE_FAIL", "0:0", ("NODE_FAIL", 0)),
        ("REQUEUED", "75:0", ("REQUEUED", 75)),
    ],
)
def test_with_slurmdbd_a_forgotten_job_is_found(
    commands: Commands, state: str, exit_code: str, wanted: tuple[str, int]
):
    row = f"12|ubuntu|{state}|{exit_code}|2|slurmd|00:01:00|UNLIMITED|2026-11-20T18:48:22|slurmd-[0-1]|run\n"
    found = forgotten(commands, stdout=row)
    assert found is not None
    assert (found.state, found.exit_code) == wanted


@pytest.mark.parametrize(
    "said",
    ["Slurm accounting storage is disabled\n", "sacct: error: Problem talking to the database: Connection refused\n"],
)
def test_without_slurmdbd_the_answer_is_that_nobody_knows(commands: Commands, said: str):
    assert forgotten(commands, returncode=1, stderr=said) is None

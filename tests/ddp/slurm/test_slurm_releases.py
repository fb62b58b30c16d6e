"""Text output of Slurm 24.11.5 and 26.05.5, captured from running clusters.

Accounting is from 26.05.5, whose partition and node have the sizes of 24.11.5.
"""

import pytest
from slurm_commands import ASKED, SACCT_FIELDS, Commands

from ddp.slurm import jobs, partition_list

PARTITION_24_11 = (
    "PartitionName=slurmd AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE "
    "DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=2-00:00:00 "
    "MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED NodeSets=slurmd Nodes=slurmd-[0-1] "
    "PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP "
    "TotalCPUs=4 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED "
    "TRES=cpu=4,mem=48210M,node=2,billing=4\n"
)
NODE_24_11 = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=2  CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=26.04 AvailableFeatures=slurmd "
    "ActiveFeatures=slurmd Gres=gpu:mock_gpu:1(S:0) NodeAddr=10.77.3.14 NodeHostName={name} Version=24.11.5 "
    "OS=Linux 6.18.44-fc-v595 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=24105 AllocMem=0 FreeMem=17871 Sockets=1 Boards=1 "
    "MemSpecLimit=1024 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=slurmd  "
    "BootTime=2026-11-22T15:08:46 SlurmdStartTime=2026-11-22T15:15:06 LastBusyTime=2026-11-22T15:15:07 ResumeAfterTime=None "
    "CfgTRES=cpu=2,mem=24105M,billing=2 AllocTRES= CurrentWatts=0 AveWatts=0 \n"
)
PARTITION_26_05 = (
    "PartitionName=slurmd AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE "
    "DisableRootJobs=NO Exclusive=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=0 LLN=NO "
    "MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED NodeSets=slurmd Nodes=slurmd-[0-1] PriorityJobFactor=1 PriorityTier=1 "
    "RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=4 TotalNodes=2 "
    "SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED "
    "TRES=cpu=4,mem=48210M,node=2,billing=4\n"
)
NODE_26_05 = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=8.59 AvailableFeatures=slurmd "
    "ActiveFeatures=slurmd Gres=gpu:mock_gpu:1 NodeAddr=10.77.0.2 NodeHostName=ctl Port=17001 Version=26.05.5 "
    "OS=Linux 6.18.44-fc-v595 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=24105 AllocMem=0 FreeMem=14565 Sockets=2 Boards=1 "
    "MemSpecLimit=1024 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=slurmd  "
    "BootTime=2026-11-22T14:23:40 SlurmdStartTime=2026-11-22T19:43:31 LastBusyTime=2026-11-22T19:45:00 ResumeAfterTime=None "
    "SuspendTime=INFINITE CfgTRES=cpu=2,mem=24105M,billing=2 AllocTRES= CurrentWatts=0 AveWatts=0\n"
)
CAPTURED = {
    "24.11.5": {"partition": PARTITION_24_11, "node": NODE_24_11},
    "26.05.5": {"partition": PARTITION_26_05, "node": NODE_26_05},
}


@pytest.mark.parametrize("release", CAPTURED)
def test_partitions_and_what_their_nodes_give(commands: Commands, release: str):
    partition, node = CAPTURED[release]["partition"], CAPTURED[release]["node"]
    commands.expect("/usr/bin/scontrol", "-a", "show", "partition", "-o", stdout=partition)
    shown = node.format(name="slurmd-0", state="IDLE+DYNAMIC_NORM")
    shown += node.format(name="slurmd-1", state="DOWN*+DYNAMIC_NORM")
    commands.expect("/usr/bin/scontrol", "-a", "show", "nodes", "-o", stdout=shown)
    commands.expect("/usr/bin/scontrol", "show", "config", stdout="MaxArraySize = 1001\n")
    (found,) = partition_list.partitions()
    assert (found.name, found.is_default, found.is_up, found.max_time_s) == (
        "slurmd",
        True,
        True,
        2 * 86400,
    )
    assert found.default_time_s is None
    assert [(node.name, node.cpus, node.memory_mb, node.gpus) for node in found.nodes] == [
        ("slurmd-0", 2, 23081, 1),
        ("slurmd-1", 2, 23081, 1),
    ]
    assert found.nodes[0].features == {"slurmd"}
    assert [node.name for node in found.usable] == ["slurmd-0"]


# release, state, exit code, restarts, whether it is held, the run's name; and the line of squeue.
JOBS = """\
24.11 PENDING 0 1 - run 12|ubuntu|PENDING|0:0|1|2|slurmd|0:00|5:00|2026-11-22T15:40:57|2026-11-22T15:42:58|4294901757|BeginTime||12|N/A|run|
24.11 RUNNING 0 0 - run 12|ubuntu|RUNNING|0:0|0|2|slurmd|0:01|5:00|2026-11-22T15:40:53|2026-11-22T15:40:56|4294901757|None|slurmd-[0-1]|12|N/A|run|
24.11 COMPLETING 0 0 - run-4 12|ubuntu|COMPLETING|0:0|0|1|slurmd|0:00|5:00|2026-11-22T15:41:01|2026-11-22T15:41:06|4294901757|None|slurmd-0|11|4|run|
24.11 FAILED 137 0 - run 12|ubuntu|FAILED|0:9|0|1|slurmd|0:00|2:00|2026-11-22T15:40:52|2026-11-22T15:40:53|4294901757|RaisedSignal:9(Killed)|slurmd-1|12|N/A|run|
24.11 FAILED 9 0 - run 12|ubuntu|FAILED|9:0|0|1|slurmd|0:00|2:00|2026-11-22T15:40:52|2026-11-22T15:40:53|4294901757|NonZeroExitCode|slurmd-0|12|N/A|run|
24.11 DEADLINE 1 0 - run 12|ubuntu|DEADLINE|0:1|0|1|slurmd|0:00|2:00|2026-11-22T15:40:52|2026-11-22T15:40:53|4294901756|DeadLine||12|N/A|run|
24.11 PENDING 0 1 held run 12|ubuntu|PENDING|0:0|1|2|slurmd|0:00|5:00|2026-11-22T15:40:57|N/A|0|job requeued in held state||12|N/A|run|
24.11 CANCELLED 143 0 - run-3 12|ubuntu|CANCELLED|0:15|0|1|slurmd|0:04|5:00|2026-11-22T15:41:01|2026-11-22T15:41:02|4294901757|None|slurmd-0|11|3|run|
24.11 RUNNING 0 0 - run-3 12|ubuntu|RUNNING|0:0|0|1|slurmd|0:04|5:00|2026-11-22T15:41:01|2026-11-22T15:41:02|4294901757|None|slurmd-0|11|3|run|
26.05 PENDING 0 1 - again 12|ubuntu|PENDING|0:0|1|1|all|0:00|5:00|2026-11-22T19:45:00|2026-11-22T19:47:01|4294901757|BeginTime||12|N/A|again|
26.05 RUNNING 0 0 - ranout 12|ubuntu|RUNNING|0:0|0|1|all|0:09|1:00|2026-11-22T19:44:56|2026-11-22T19:44:56|4294901757|None|n1|12|N/A|ranout|
26.05 FAILED 137 0 - killed 12|ubuntu|FAILED|0:9|0|1|all|0:00|5:00|2026-11-22T19:44:57|2026-11-22T19:45:00|4294901757|RaisedSignal:9(Killed)|n1|12|N/A|killed|
26.05 FAILED 3 0 - exit3 12|ubuntu|FAILED|3:0|0|1|all|0:01|5:00|2026-11-22T19:44:56|2026-11-22T19:44:56|4294901757|NonZeroExitCode|d2|12|N/A|exit3|
26.05 CANCELLED 0 0 held gone 12|ubuntu|CANCELLED|0:0|0|1|all|0:00|2-00:00:00|2026-11-22T19:44:58|2026-11-22T19:44:59|0|JobHeldUser||12|N/A|gone|
26.05 NODE_FAIL 1 0 - wrap 12|ubuntu|NODE_FAIL|0:1|0|1|all|0:00|5:00|2026-11-22T19:45:44|2026-11-22T19:45:44|4294901757|NodeDown||12|N/A|wrap|
26.05 PENDING 0 0 - arr-0-5%1 12|ubuntu|PENDING|0:0|0|1|all|0:00|5:00|2026-11-22T19:44:58|N/A|4294901757|Priority||12|0-5%1|arr|
26.05 PENDING 0 0 held a|b=c_State=X 12|ubuntu|PENDING|0:0|0|1|all|0:00|2-00:00:00|2026-11-22T19:44:59|N/A|0|JobHeldUser||12|N/A|a|b=c State=X|
""".splitlines()


@pytest.mark.parametrize("row", JOBS)
def test_a_job_in_the_queue(commands: Commands, row: str):
    _, state, code, restarts, held, name, line = row.split(" ", 6)
    commands.expect(
        "/usr/bin/squeue", "-h", "-a", "-t", "all", "-j", "12", "-O", ASKED, stdout=f"{line}\n"
    )
    found = jobs.job(12, user="ubuntu")
    assert found is not None
    assert (found.state, found.exit_code, found.restarts) == (state, int(code), int(restarts))
    assert (found.is_active, found.is_held) == (
        state in ("PENDING", "RUNNING", "COMPLETING"),
        held == "held",
    )
    assert found.run_name == name.replace("_", " ")


def forgotten(commands: Commands, **answer: object) -> jobs.Job | None:
    """Ask for a job that the controller forgot, in the words of 24.11."""
    message = "slurm_load_jobs error: Invalid job id specified\n"
    commands.expect(
        "/usr/bin/squeue",
        "-h",
        "-a",
        "-t",
        "all",
        "-j",
        "12",
        "-O",
        ASKED,
        returncode=1,
        stderr=message,
    )
    argv = ("/usr/bin/sacct", "-X", "-n", "-P", "-j", "12", "-o", SACCT_FIELDS)
    commands.expect(*argv, **answer)  # type: ignore[arg-type]
    return jobs.job(12, user="ubuntu")


@pytest.mark.parametrize(
    ("state", "exit_code", "wanted"),
    [
        ("COMPLETED", "0:0", ("COMPLETED", 0)),
        ("CANCELLED by 1000", "0:15", ("CANCELLED", 143)),
        ("OUT_OF_MEMORY", "0:125", ("OUT_OF_MEMORY", 253)),
        ("NODE_FAIL", "0:0", ("NODE_FAIL", 1)),
        ("NODE_FAIL", "1:0", ("NODE_FAIL", 1)),
        ("DEADLINE", "1:0", ("DEADLINE", 1)),
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


# Captured from 26.05.5 with slurmdbd.
ACCOUNTED = """\
1|ubuntu|TIMEOUT|0:0|1|all|00:01:32|00:01:00|2026-11-22T19:44:56|n1|ranout
4|ubuntu|FAILED|0:9|1|all|00:00:00|00:05:00|2026-11-22T19:44:57|n1|killed
5|ubuntu|REQUEUED|0:0|1|all|00:00:00|00:05:00|2026-11-22T19:45:00|n1|again
10|ubuntu|COMPLETED|0:0|3|all|00:00:00|00:05:00|2026-11-22T19:45:44|n[0-1],d2|big
15|ubuntu|CANCELLED by 0|0:0|1|all|00:00:00|Partition_Limit|2026-11-22T19:45:53|None assigned|gone
"""


def test_ended_jobs_are_read_from_the_accounting(commands: Commands):
    argv = ("/usr/bin/sacct", "-X", "-n", "-P", "-j", "1,4,5,10,15", "-o", SACCT_FIELDS)
    commands.expect(*argv, stdout=ACCOUNTED)
    found = jobs.accounted((1, 4, 5, 10, 15), user="ubuntu")
    assert {
        known.name: (known.state, known.is_active, known.exit_code, known.nodes)
        for known in found.values()
    } == {
        "ranout": ("TIMEOUT", False, 0, "n1"),
        "killed": ("FAILED", False, 137, "n1"),
        "again": ("REQUEUED", True, 0, "n1"),
        "big": ("COMPLETED", False, 0, "n[0-1],d2"),
        "gone": ("CANCELLED", False, 0, ""),
    }


@pytest.mark.parametrize(
    ("asked", "stderr"),
    [
        ("n[0-1", "Invalid hostlist: n[0-1\n"),
        (
            "n[5-2]",
            "scontrol: error: _parse_single_range: Invalid range: `5-2'\nInvalid hostlist: n[5-2]\n",
        ),
    ],
)  # 26.05.5
def test_a_hostlist_that_means_nothing_is_refused(commands: Commands, asked: str, stderr: str):
    commands.expect("/usr/bin/scontrol", "show", "hostnames", asked, stderr=stderr)
    with pytest.raises(jobs.SlurmError, match=r"^Invalid hostlist: n\["):
        jobs.hostnames(asked)


def test_a_controller_whose_name_is_not_resolved_may_come_back(commands: Commands):
    message = "squeue: error: _xgetaddrinfo: getaddrinfo() failed: Name or service not known: No error, attempt number {}\n"
    text = "".join(message.format(number) for number in range(-4, 6))  # 26.05.5
    text += "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    commands.expect(
        "/usr/bin/squeue",
        "-h",
        "-a",
        "-t",
        "all",
        "-j",
        "12",
        "-O",
        ASKED,
        returncode=1,
        stderr=text,
    )
    with pytest.raises(jobs.NotAnsweringError, match="Name or service not known"):
        jobs.job(12, user="ubuntu")


def test_a_refused_release_names_no_function_of_slurm(commands: Commands):
    message = "Invalid user id for job 18\nslurm_suspend error:Invalid user id\n"
    commands.expect("/usr/bin/scontrol", "release", "18", returncode=1, stderr=message)
    with pytest.raises(jobs.SlurmError, match=r"^Invalid user id for job 18; Invalid user id$"):
        jobs.release(18)


@pytest.mark.parametrize(
    "message",
    [
        "Slurm accounting storage is disabled\n",
        "sacct: error: Problem talking to the database: Connection refused\n",
    ],
)
def test_without_slurmdbd_the_answer_is_that_nobody_knows(commands: Commands, message: str):
    assert forgotten(commands, returncode=1, stderr=message) is None

"""Slurm's one-line records: what 24.11 prints, and what 25.11 adds."""

import pathlib

import pytest
import yaml

from slurm_ddp.slurm import show

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

# In the shape of 24.11.5, a dynamic node with a mock GPU; the reason was chosen to mislead.
NODE_24_11 = (
    "NodeName=slurmd-0 Arch=x86_64 CoresPerSocket=2  CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=1.50 "
    "AvailableFeatures=slurmd ActiveFeatures=slurmd Gres=gpu:mock_gpu:1 NodeAddr=10.91.0.11 NodeHostName=slurmd-0 "
    "Version=24.11.5 OS=Linux 6.18.44-fc-v669 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=4000 AllocMem=0 FreeMem=22435 "
    "Sockets=1 Boards=1 MemSpecLimit=1024 State=DOWN+DRAIN+DYNAMIC_NORM ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A "
    "MCS_label=N/A Partitions=slurmd  BootTime=2026-11-20T18:25:37 SlurmdStartTime=2026-11-20T18:51:35 "
    "LastBusyTime=2026-11-20T18:51:35 CfgTRES=cpu=2,mem=4000M,billing=2 AllocTRES= CurrentWatts=0 "
    "AveWatts=0 "
    "Reason=two State=IDLE [root@2026-11-20T18:51:55]        lines Comment=a State=x b Extra=foo"
)
# After slurm_sprint_node_table() of 25.11: specialised GPU cores, resume time, instance, reservation, no power fields.
NODE_25_11 = (
    "NodeName=gpu-7 Arch=x86_64 CoresPerSocket=56  CPUAlloc=8 CPUEfctv=224 CPUTot=224 CPULoad=3.02 "
    "AvailableFeatures=slurmd ActiveFeatures=slurmd Gres=gpu:nvidia_h200:8(S:0-1) NodeAddr=10.0.0.7 NodeHostName=gpu-7 "
    "Version=25.11.2 OS=Linux 6.8.0-88-generic #89-Ubuntu SMP PREEMPT_DYNAMIC Sat Oct 11 01:02:46 UTC 2025  "
    "RealMemory=2063937 AllocMem=0 FreeMem=N/A Sockets=2 Boards=1 MemSpecLimit=1024 RestrictedCoresPerGPU=2(0-3)  "
    "State=MIXED+DYNAMIC_NORM ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A NextState=IDLE "
    "Partitions=slurmd  BootTime=2026-01-02T03:04:05 SlurmdStartTime=2026-01-02T03:05:06 "
    "LastBusyTime=2026-01-02T03:05:07 ResumeAfterTime=None CfgTRES=cpu=224,mem=2063937M,billing=224,gres/gpu=8 "
    "AllocTRES=cpu=8,gres/gpu=1 CurrentWatts=n/a AveWatts=n/a Reason=late kernel NodeName=x [admin@2026-01-02T04:00:00] "
    "InstanceId=i-0 InstanceType=p5en.48xlarge ReservationName=maint"
)
JOB = (
    "JobId=1 JobName=lr=0.1 State=DONE UserId=ubuntu(1000) GroupId=ubuntu(1000) MCS_label=N/A Priority=4294901759 Nice=0 "
    "Account=(null) QOS=(null) JobState=PENDING Reason=ReqNodeNotAvail,_UnavailableNodes:slurmd-0 Dependency=(null) "
    "Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:00 TimeLimit=UNLIMITED TimeMin=N/A "
    "SubmitTime=2026-11-20T18:51:55 Partition=slurmd AllocNode:Sid=ctl:141 ReqNodeList=slurmd-0 ExcNodeList=(null) "
    "NodeList= NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=1,mem=2976M,node=1,billing=1 "
    "Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0 Features=(null) "
    "DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) Command=/mnt/a b/run Mode=x.sh "
    "WorkDir=/tmp Comment=c UserId=x(0) z=1  StdErr=/tmp/1.out StdIn=/dev/null StdOut=/tmp/1.out Power= "
)


def test_a_node_of_24_11():
    (node,) = show.records(NODE_24_11 + "\n")
    assert node["NodeName"] == "slurmd-0"
    assert node["OS"] == "Linux 6.18.44-fc-v669 #1 SMP PREEMPT_DYNAMIC @0"
    assert node["State"] == "DOWN+DRAIN+DYNAMIC_NORM"
    assert node["CfgTRES"] == "cpu=2,mem=4000M,billing=2"
    assert node["AllocTRES"] == ""
    assert node["Reason"] == "two State=IDLE [root@2026-11-20T18:51:55]        lines"
    assert node["Comment"] == "a State=x b"
    assert node["Extra"] == "foo"


def test_a_node_of_25_11():
    (node,) = show.records(NODE_25_11 + "\n")
    assert node["NodeName"] == "gpu-7"
    assert node["RealMemory"] == "2063937"
    assert node["RestrictedCoresPerGPU"] == "2(0-3)"
    assert node["State"] == "MIXED+DYNAMIC_NORM"
    assert node["Reason"] == "late kernel NodeName=x [admin@2026-01-02T04:00:00]"
    assert (node["InstanceId"], node["InstanceType"], node["ReservationName"]) == ("i-0", "p5en.48xlarge", "maint")


@pytest.mark.parametrize(("text", "reason", "after"), CASES["what_stands_behind_the_reason_of_a_node"])
def test_what_stands_behind_the_reason_of_a_node(text: str, reason: str, after: dict[str, str]):
    """src/api/node_info.c of 25.11 prints it there; a cluster with a topology has it on every node."""
    head = NODE_25_11.partition(" Reason=")[0]
    (node,) = show.records(f"{head} {text}\n")
    assert node["Reason"] == reason
    assert {key: node[key] for key in after} == after
    assert node["State"] == "MIXED+DYNAMIC_NORM"


def test_a_job_whose_texts_hold_spaces_and_equals_signs():
    (job,) = show.records(JOB + "\n")
    assert job["JobName"] == "lr=0.1 State=DONE"
    assert job["UserId"] == "ubuntu(1000)"
    assert job["Reason"] == "ReqNodeNotAvail,_UnavailableNodes:slurmd-0"
    assert job["ReqB:S:C:T"] == "0:0:*:*"
    assert job["CPUs/Task"] == "1"
    assert job["Command"] == "/mnt/a b/run Mode=x.sh"
    assert job["WorkDir"] == "/tmp"
    assert job["Comment"] == "c UserId=x(0) z=1"
    assert job["StdOut"] == "/tmp/1.out"
    assert job["Power"] == ""


def test_records_of_several_lines_and_of_texts_with_line_breaks():
    first, second = show.records(f"{NODE_24_11}\n{NODE_25_11.replace('late kernel', 'late' + chr(10) + 'kernel')}\n")
    assert first["NodeName"] == "slurmd-0"
    assert second["Reason"] == "late\nkernel NodeName=x [admin@2026-01-02T04:00:00]"


@pytest.mark.parametrize("text", ["", "\n", "No nodes in the system\n", "Node nope not found\n"])
def test_no_record(text: str):
    assert show.records(text) == []


@pytest.mark.parametrize("word", ["", "(null)", "N/A", "n/a", "None", "Unknown"])
def test_absent_values(word: str):
    assert show.value({"Gres": word}, "Gres") is None
    assert show.value({}, "Gres") is None


def test_a_value_is_kept_as_printed():
    assert show.value({"Gres": "gpu:h100:8(S:0-1)"}, "Gres") == "gpu:h100:8(S:0-1)"


def test_config():
    text = (
        "Configuration data as of 2026-11-20T18:54:33\nAccountingStorageHost   = localhost\n"
        "SlurmctldParameters     = enable_configless,x=y\nGresTypes               = gpu\n"
        "\nCgroup Support Configuration:\nConstrainDevices        = yes\n\nSlurmctld(primary) at ctl is UP\n"
    )
    settings = show.config(text)
    assert settings["GresTypes"] == "gpu"
    assert settings["SlurmctldParameters"] == "enable_configless,x=y"
    assert settings["ConstrainDevices"] == "yes"

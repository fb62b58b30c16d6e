"""Slurm's one-line records: what 24.11 prints, and what 25.11 adds."""

import pathlib

import pytest
import yaml

from slurm_ddp.slurm import show

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

NODE_24_11: str = CASES["printed"]["NODE_24_11"]
NODE_25_11: str = CASES["printed"]["NODE_25_11"]
JOB: str = CASES["printed"]["JOB"]


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


@pytest.mark.parametrize(
    ("text", "reason", "after"), CASES["the_reason_of_a_node_is_split_from_who_set_it_and_when"]
)
def test_the_reason_of_a_node_is_split_from_who_set_it_and_when(
    text: str, reason: str, after: dict[str, str]
):
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
    first, second = show.records(
        f"{NODE_24_11}\n{NODE_25_11.replace('late kernel', 'late' + chr(10) + 'kernel')}\n"
    )
    assert first["NodeName"] == "slurmd-0"
    assert second["Reason"] == "late\nkernel NodeName=x [admin@2026-01-02T04:00:00]"


@pytest.mark.parametrize("text", ["", "\n", "No nodes in the system\n", "Node nope not found\n"])
def test_no_record(text: str):
    assert show.records(text) == []


@pytest.mark.parametrize("word", ["", "(null)", "N/A", "n/a", "None", "Unknown"])
def test_absent_values(word: str):
    assert show.value({"Gres": word}, "Gres") is None
    assert show.value({}, "Gres") is None
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

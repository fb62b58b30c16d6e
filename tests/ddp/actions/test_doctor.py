"""doctor: the real checks of the nodes' program, the meaning of its facts, and the action."""

import copy
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import typing

import hypothesis
import pytest
import yaml
from cluster import Cluster, Job
from harness import Trainer
from hypothesis import strategies as st
from node_reports import NAMES, Json, answering, healthy
from pip_double import Pip
from script_texts import MANIFEST

from ddp.doctor import examine, findings, probe, reporting
from ddp.doctor.facts import Facts
from ddp.run import telemetry
from ddp.settings import Settings
from ddp.slurm import partition_list
from slurm_ddp.commands import Completed

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())


def change(report: Json, path: str, value: object) -> None:
    """Put a value at `a.b.c` of a report."""
    *folders, last = path.split("/")
    for folder in folders:
        report = report[folder]
    report[last] = value


def test_healthy_nodes_have_nothing_but_the_missing_environment(settings: Settings, facts: Facts):
    (finding,) = examine.judge(settings, facts)
    assert finding.level == "warning"
    assert "no environment is installed yet" in finding.text
    assert finding.remedy == "ddp env install"
    shown = reporting.report(settings, facts, [])
    assert shown["verdict"] == "a run can start"
    assert shown["nodes"].splitlines()[1].split()[:5] == [
        "slurmd-0",
        "25.11.8",
        "3.12",
        "+0ms",
        "fuse.juicefs",
    ]


def test_a_workspace_in_which_others_can_replace_folders_is_an_error(
    settings: Settings, facts: Facts
):
    message = (
        "/mnt/shared has mode 0777 without the sticky bit, so any account can replace what is in it"
    )
    found = examine.judge(
        settings, dataclasses.replace(facts, untrusted=f"{message}: chmod +t /mnt/shared")
    )
    assert found[0] == findings.Finding("error", "workspace", message, "chmod +t /mnt/shared")


@pytest.mark.parametrize("case", CASES["reports"], ids=lambda case: case[3])
def test_findings_name_their_node_and_a_remedy(
    settings: Settings, facts: Facts, case: tuple[str, str, object, str]
):
    level, path, value, words = case
    change(facts.reports["slurmd-1"], path, value)
    judged = examine.judge(settings, facts)
    (found,) = [finding for finding in judged if words in finding.text]
    assert found.level == level
    if level != "note":
        assert found.remedy
        assert (
            reporting.report(settings, facts, judged)["nodes"]
            .splitlines()[1]
            .endswith(("ok", "warning"))
        )
    assert reporting.report(settings, facts, judged)["verdict"].startswith(
        "1 finding" if level == "error" else "a run can start"
    )


@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=300
)
@hypothesis.given(
    free=st.integers(0, 1 << 42),
    is_noexec=st.booleans(),
    is_unpacked=st.booleans(),
    node=st.sampled_from(NAMES),
)
def test_a_disk_is_named_if_and_only_if_no_environment_runs_from_it(
    settings: Settings, facts: Facts, free: int, is_noexec: bool, is_unpacked: bool, node: str
):
    manifest = MANIFEST.model_copy(update={"unpacked_bytes": 3 << 30})
    facts = dataclasses.replace(facts, reports=copy.deepcopy(facts.reports), manifests=(manifest,))
    facts.reports[node] |= {"disk": {"free": free, "noexec": is_noexec}, "unpacked": is_unpacked}
    found = {
        (one.where, words)
        for one in examine.judge(settings, facts)
        for words in ("mounted noexec", "MiB free; the environment needs")
        if words in one.text and one.level == "error" and "node-cache" in one.remedy
    }
    is_small = not is_unpacked and free < (3 << 30) + (256 << 20)
    assert ((node, "mounted noexec") in found) == is_noexec
    assert ((node, "MiB free; the environment needs") in found) == is_small
    assert len(found) == is_noexec + is_small


def test_over_a_slow_link_the_kernels_settings_are_judged_with_the_line_to_type(
    settings: Settings, facts: Facts
):
    """At 40 ms, a buffer of 4 MiB, half of it data, allows 419 Mbit/s; 1 Gbit/s needs 10 MB."""
    report = facts.reports["slurmd-1"]
    report["network"]["peers"]["slurmd-0"]["trip_ms"] = 40.0
    report["tcp"] = {
        "tcp_slow_start_after_idle": 1,
        "tcp_rmem": 32 << 20,
        "tcp_wmem": 4 << 20,
    }
    found = {finding.remedy: finding.text for finding in examine.judge(settings, facts)}
    slow_start = "on slurmd-1: sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
    buffer = "on slurmd-1: sysctl -w net.ipv4.tcp_wmem='4096 131072 10000000'"
    again = ", and the same in /etc/sysctl.d"
    assert "slurmd-0 is 40 ms away" in found[slow_start + again]
    assert found[buffer + again].endswith("a connection reaches 419 Mbit/s")
    assert not [remedy for remedy in found if "tcp_rmem" in remedy]

    report["network"]["peers"]["slurmd-0"]["trip_ms"] = 0.2
    assert not [one for one in examine.judge(settings, facts) if "sysctl" in one.remedy]


STATUS = {
    "BackendState": "Running",
    "Peer": {
        "a": {
            "TailscaleIPs": ["10.0.0.0", "fd7a::1"],
            "CurAddr": "",
            "Relay": "fra",
            "Active": True,
        },
        "b": {
            "TailscaleIPs": ["10.0.0.8"],
            "CurAddr": "203.0.113.7:41641",
            "Relay": "fra",
            "Active": True,
        },
        "c": {"TailscaleIPs": ["10.0.0.9"], "CurAddr": "", "Relay": "fra", "Active": False},
    },
}


def test_a_path_by_a_relay_of_tailscale_is_reported(
    settings: Settings, facts: Facts, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """10.0.0.8 is reached directly, and nothing was sent to 10.0.0.9."""
    program = tmp_path / "tailscale"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(STATUS)}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert probe.relays() == {"10.0.0.0": "fra", "fd7a::1": "fra"}
    facts.reports["slurmd-1"]["relays"] = probe.relays()

    (found,) = [one for one in examine.judge(settings, facts) if "relay" in one.text]

    assert (found.level, found.where) == ("warning", "slurmd-1")
    assert found.text.startswith("Tailscale reaches slurmd-0 by a relay (fra)")
    program.write_text("#!/bin/sh\necho '{}'\n")
    assert probe.relays() == {}


@pytest.mark.parametrize(("offset", "level"), [(0.5, None), (5.0, "warning"), (-400.0, "error")])
def test_a_clock_that_is_off_is_reported(
    settings: Settings, facts: Facts, offset: float, level: str | None
):
    facts.reports["slurmd-0"]["network"]["peers"]["slurmd-1"]["clock_s"] = offset
    found = [finding for finding in examine.judge(settings, facts) if "clock" in finding.text]
    assert [finding.level for finding in found] == ([level] if level else [])


@pytest.mark.parametrize("case", CASES["slurm.conf"], ids=lambda case: case[0])
def test_settings_of_slurm_that_hurt_are_findings(
    settings: Settings, facts: Facts, case: tuple[str, str, str, str]
):
    name, value, level, words = case
    facts.config[name] = value
    (found,) = [finding for finding in examine.judge(settings, facts) if words in finding.text]
    assert found.level == level
    assert found.remedy


def test_a_rank_that_holds_the_others_up_is_reported(trainer: Trainer, cluster: Cluster):
    """Of a run that trains; once it has ended nothing waits any more."""
    folder = trainer.workspace / "runs" / "owt"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text('{"job_id": 40, "kind": "gpt"}')
    slowest = {"rank": 3, "host": "slurmd-1", "times": 1.83}
    (folder / "metrics.jsonl").write_text(
        json.dumps({"kind": "step", "step": 9, "time": 5000.0, "slowest": slowest})
    )
    job = Job(40, cluster.user, "owt", pathlib.Path("/s"), "", [("RUNNING", 0)])
    cluster.jobs.append(job)
    answering(cluster, *map(healthy, NAMES))
    found = (
        "WARNING slurmd-1: run owt waits for it in each step: rank 3 on slurmd-1 takes 1.83 times"
    )
    assert found in trainer.run("doctor")["findings"]
    job.states = [("COMPLETED", 0)]
    assert found not in trainer.run("doctor")["findings"]


def test_preemption_is_that_of_the_partition_where_it_has_one_of_its_own(
    settings: Settings, facts: Facts
):
    facts.config.update({"PreemptType": "preempt/partition_prio", "PreemptMode": "SUSPEND"})
    facts = dataclasses.replace(
        facts, partition=dataclasses.replace(facts.partition, preempt_mode="REQUEUE")
    )
    assert not [
        finding for finding in examine.judge(settings, facts) if "PreemptMode" in finding.text
    ]
    facts.config["PreemptType"] = "preempt/qos"
    assert [finding for finding in examine.judge(settings, facts) if "PreemptMode" in finding.text]


@pytest.mark.parametrize(
    ("uri", "server", "described", "finding"),
    [
        ("", None, "none: mlflow-tracking-uri is empty", ""),
        (
            "http://mlflow:5000/x",
            ["mlflow", 5000],
            "http://mlflow:5000/x",
            "cannot reach the MLflow",
        ),
        ("https://mlflow", ["mlflow", 443], "https://mlflow", "cannot reach the MLflow server"),
        ("http://mlflow:x", None, "http://mlflow:x", ""),
        ("{top}/mlruns/", None, "{top}/mlruns", ""),
        ("/srv/mlruns", None, "/srv/mlruns", "=/srv/mlruns is outside the workspace"),
    ],
)
def test_where_runs_are_tracked_is_reported(
    trainer: Trainer, cluster: Cluster, uri: str, server: object, described: str, finding: str
):
    trainer.config["mlflow-tracking-uri"] = uri.format(top=trainer.workspace)
    unreachable = "Connection refused" if server else ""
    asked = answering(
        cluster, {**healthy("slurmd-0"), "tracking": unreachable}, healthy("slurmd-1")
    )
    results = trainer.run("doctor")
    assert json.loads(asked[0][-1])["tracking"] == server
    assert results["tracking"].startswith(described.format(top=trainer.workspace))
    assert finding in results["findings"]
    assert results["warnings"] == ("2" if finding else "1"), "no environment is installed"
    stored = json.loads(
        (trainer.workspace / "baselines" / telemetry.DOCTOR).read_text()
    )  # for the metrics
    assert (str(stored["error"]), str(stored["warning"])) == (
        results["errors"],
        results["warnings"],
    )


def test_an_account_that_slurmctld_lacks_is_reported_once(settings: Settings, facts: Facts):
    message = "Unable to create step for job 4: Error generating job credential"  # 24.11.5
    facts = dataclasses.replace(facts, reports={}, trouble=message)
    (found,) = [finding for finding in examine.judge(settings, facts) if finding.level == "error"]
    assert str(found) == (
        f"ERROR slurmctld: slurmctld does not know the account {settings.workspace.user} (uid {settings.workspace.uid}), so none of its jobs starts"
        f"\n    -> on slurmctld's host: useradd --no-create-home --uid {settings.workspace.uid} {settings.workspace.user}"
    )


def test_memory_that_may_not_be_locked_breaks_rdma_only(settings: Settings, facts: Facts):
    change(facts.reports["slurmd-1"], "limits/memlock", 65536)
    assert len(examine.judge(settings, facts)) == 1
    port = {"device": "mlx5_0:1", "state": "ACTIVE", "kind": "InfiniBand"}
    for name in NAMES:
        change(facts.reports[name], "limits/memlock", 65536)
        change(facts.reports[name], "infiniband", [port])
    found = examine.judge(settings, facts)[0]
    assert ("64 KiB" in found.text, found.where) == (True, "slurmd-0, slurmd-1"), (
        "the same on many nodes is one finding"
    )


def with_gpus(facts: Facts, number: int = 1) -> Facts:
    """Return the facts of nodes of 8 CPUs with so many GPUs each."""
    nodes = tuple(
        partition_list.Capacity(name, 8, 16000, number, "IDLE", is_usable=True) for name in NAMES
    )
    for name in NAMES:
        facts.reports[name]["gpus"] |= {"seen": number, "wanted": number}
    return dataclasses.replace(facts, partition=dataclasses.replace(facts.partition, nodes=nodes))


def test_a_rank_without_a_gpu_of_its_own_is_reported(settings: Settings, facts: Facts):
    facts = with_gpus(facts, 2)
    change(facts.reports["slurmd-0"], "gpus/wanted", 4)
    (error,) = [str(f) for f in examine.judge(settings, facts) if f.level == "error"]
    assert error.startswith(
        "ERROR slurmd-0: Slurm gave this job 4 GPUs, and the driver shows 2: a rank would find none"
    )
    assert "MIG" in error


# -- the program on the nodes ---------------------------------------------------------------------


def run_probe(
    tmp_path: pathlib.Path, hosts: dict[str, str], started: tuple[str, ...], **more: object
) -> dict[str, Json]:
    """Run the program as if on `started` nodes of `hosts`, whose addresses are all this machine."""
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    spec = {
        "hosts": hosts,
        "workspace": str(tmp_path),
        "folder": str(folder),
        "nonce": "n0nce",
        "cache": str(tmp_path / "cache"),
        "port": 21000 + os.getpid() % 5000,
        "environment": None,
        **more,
    }
    running: list[subprocess.Popen[str]] = []
    for name in started:
        with pathlib.Path(probe.__file__).open() as program:
            argv = [sys.executable, "-W", "error", "-I", "-", json.dumps(spec)]
            env = {**os.environ, "SLURMD_NODENAME": name}
            running.append(
                subprocess.Popen(argv, env=env, stdin=program, stdout=subprocess.PIPE, text=True)
            )
    printed = "".join(process.communicate(timeout=200)[0] for process in running)
    assert all(len(line) < 1000 for line in printed.splitlines()), "srun mixes longer lines"
    return examine.read_reports(printed)


def test_the_nodes_meet_measure_and_see_each_others_files(tmp_path: pathlib.Path):
    hosts = {"slurmd-0": "127.0.0.1", "slurmd-1": "127.0.0.2"}  # the names resolve nowhere
    found = run_probe(tmp_path, hosts, tuple(hosts))
    assert set(found) == set(hosts)
    for name, about in found.items():
        peers = about["network"]["peers"]
        assert {peer: about["address"] for peer, about in peers.items()} == {
            other: address for other, address in hosts.items() if other != name
        }
        assert all(abs(peer["clock_s"]) <= peer["trip_ms"] / 2e3 + 0.01 for peer in peers.values())
        assert all(peer["seen_ms"] >= 0 for peer in peers.values()), "the next one is the only one"
        assert all(peer["iface"] == "lo" and peer["mtu"] > 1500 for peer in peers.values())
        assert about["filesystem"]["write_mb_s"] > 0
        assert about["filesystem"]["rename_ms"] > 0
        assert about["versions"]["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert len({about["network"]["port"] for about in found.values()}) == 2, (
        "a taken port is stepped over"
    )


def test_a_node_that_is_not_there_and_a_folder_that_cannot_be_written_are_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    text = pathlib.Path(probe.__file__).read_text()
    quick = tmp_path / "probe.py"
    quick.write_text(
        text.replace("MEET_S = 15.0", "MEET_S = 1.0").replace("LEAVE_S = 30.0", "LEAVE_S = 7.0")
    )
    monkeypatch.setattr(probe, "__file__", str(quick))
    hosts = {
        "slurmd-0": "127.0.0.1",
        "slurmd-1": "127.0.0.9",
        "slurmd-2": "no.such.host.invalid",
        "slurmd-3": "",
    }
    hosts |= {"slurmd-4": "fd00::7"}
    found = run_probe(tmp_path, hosts, ("slurmd-0",), folder="/nowhere/at/all")
    peers = found["slurmd-0"]["network"]["peers"]
    assert "refused" in peers["slurmd-1"]["unreachable"].lower()
    assert peers["slurmd-2"]["unresolved"]
    assert peers["slurmd-4"]["ipv6"] == "fd00::7"
    userns = pathlib.Path("/proc/sys/user/max_user_namespaces").read_text().strip()
    assert found["slurmd-0"]["limits"]["userns"]["user/max_user_namespaces"] == userns
    assert peers["slurmd-2"]["given"] == "no.such.host.invalid"
    assert peers["slurmd-3"] == {"given": "", "unresolved": peers["slurmd-3"]["unresolved"]}
    assert found["slurmd-0"]["filesystem"]["error"].startswith(
        "/nowhere/at/all/big-slurmd-0: No such file"
    )


def test_a_server_is_tried_from_the_node(tmp_path: pathlib.Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (about,) = run_probe(
            tmp_path, {"slurmd-0": "127.0.0.1"}, ("slurmd-0",), tracking=["127.0.0.1", port]
        ).values()
        assert about["tracking"] == ""
    assert "refused" in probe.reach(["127.0.0.1", port]).lower()
    assert probe.reach(["no.such.host.invalid", 80])


# -- the action -----------------------------------------------------------------------------------


def test_a_run_can_start_without_any_environment(trainer: Trainer, cluster: Cluster):
    asked = answering(cluster, *map(healthy, NAMES))
    results = trainer.run("doctor")
    assert results["verdict"] == "a run can start; 1 warning"
    assert "no environment is installed yet" in results["findings"]
    assert "--nodelist=slurmd-0,slurmd-1" in asked[0]
    assert not any(word.startswith("--gpus") for word in asked[0])
    assert not list((trainer.workspace / "runs").iterdir()), "nothing stays behind"


@pytest.mark.parametrize(
    ("cpus", "used", "requested"), [((2, 2), (0, 0), 2), ((1, 8), (0, 0), 1), ((4, 4), (3, 2), 1)]
)
def test_two_cpus_are_requested_where_every_node_has_them_free(
    trainer: Trainer, cluster: Cluster, cpus: tuple[int, ...], used: tuple[int, ...], requested: int
):
    for machine, number, taken in zip(cluster.machines, cpus, used, strict=True):
        machine.cpus, machine.used_cpus = number, taken
    asked = answering(cluster, *map(healthy, NAMES))
    trainer.run("doctor")
    assert {f"--cpus-per-task={requested}", "--cpu-bind=none"} <= set(asked[0])


def test_a_node_without_a_free_cpu_is_left_out(trainer: Trainer, cluster: Cluster):
    cluster.machines[1].used_cpus = 2
    answering(cluster, healthy("slurmd-0", ("slurmd-0",)))
    results = trainer.run("doctor")
    assert "NOTE slurmd-1: not examined: busy: jobs use all its cores" in results["findings"]
    verdict = "a run can start on the 1 nodes that were examined; 1 warning; 1 of 2 nodes were not examined"
    assert results["verdict"] == verdict
    cluster.machines[0].state = "ALLOCATED"
    assert trainer.run("doctor")["verdict"] == "no node was examined: all are busy"


def test_it_fails_with_everything_it_found(ready: Trainer, cluster: Cluster):
    broken = copy.deepcopy(healthy("slurmd-1"))
    change(broken, "filesystem/mount/mountpoint", "/")
    answering(cluster, healthy("slurmd-0"), broken)
    line = ready.fails("doctor")
    assert line.startswith(
        "1 finding would break a run; the first: slurmd-1: nothing is mounted at"
    )
    assert "ERROR slurmd-1: nothing is mounted" in ready.results["findings"]
    assert ready.results["nodes"].splitlines()[2].endswith("ERROR")


def test_busy_nodes_are_no_failure(trainer: Trainer, cluster: Cluster):
    assert "the nodes were not free in time" in trainer.run("doctor")["findings"]
    answering(cluster, healthy("slurmd-0", ("slurmd-0",)))
    cluster.machines[1].state = "IDLE+DRAIN"
    results = trainer.run("doctor")
    assert "WARNING slurmd-1: not examined: IDLE+DRAIN" in results["findings"]
    assert "scontrol update nodename=slurmd-1 state=resume" in results["findings"]
    for machine in cluster.machines:
        machine.state = "DOWN"
    assert "not examined: DOWN" in trainer.fails("doctor")


def test_nodes_that_give_no_answer_are_reported(trainer: Trainer, cluster: Cluster):
    trouble = "Task launch failed on node slurmd-1: Communication failure"
    cluster.examination = lambda arguments: Completed(1, "", f"srun: error: {trouble}")
    assert f"Slurm could not examine it: {trouble}" in trainer.fails("doctor")


def test_the_examination_stays_within_the_partitions_time(trainer: Trainer, cluster: Cluster):
    for most, asked in (("UNLIMITED", "--time=6"), ("5:00", "--time=5"), ("30", "--time=6")):
        cluster.max_time = most
        trainer.run("doctor")
        assert asked in next(call for call in reversed(cluster.calls) if call[0].endswith("srun"))


@pytest.mark.parametrize("listed", ["gpu,slurmd", "slurmd,gpu"])
@pytest.mark.parametrize("state", ["UP", "DOWN"])
def test_of_several_partitions_one_that_takes_jobs_is_examined(
    trainer: Trainer, cluster: Cluster, state: str, listed: str
):
    """A site's SBATCH_PARTITION may be such a list; here no node of gpu takes jobs."""
    cluster.extra_partitions = (
        f"PartitionName=gpu AllowGroups=ALL {cluster.takes} Default=NO DefaultTime=NONE MaxNodes=UNLIMITED "
        f"MaxTime=UNLIMITED Nodes=(null) State={state} TotalNodes=0 DefMemPerNode=UNLIMITED\n"
    )
    trainer.run("doctor", partition=listed)
    asked = next(call for call in reversed(cluster.calls) if call[0].endswith("srun"))
    assert "--partition=slurmd" in asked


def test_what_is_left_of_the_own_folders_is_shown(
    trainer: Trainer, cluster: Cluster, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    answering(cluster, *map(healthy, NAMES))
    room = trainer.run("doctor")["room"].split("; ")
    left = os.statvfs(tmp_path)
    size = left.f_bavail * left.f_frsize >> 30
    assert [line.partition(" left in ")[2] for line in room] == [
        str(trainer.workspace),
        str(tmp_path),
    ]
    assert abs(int(room[1].split()[0]) - size) <= 1


def test_a_refusal_of_slurm_blames_no_node(trainer: Trainer, cluster: Cluster):
    trouble = (
        "Unable to allocate resources: Invalid account or account/partition combination specified"
    )
    cluster.examination = lambda arguments: Completed(1, "", f"srun: error: {trouble}")
    assert f"slurm: Slurm rejects the job that would examine the nodes: {trouble}" in trainer.fails(
        "doctor"
    )
    assert "sacctmgr show assoc where user=" in trainer.results["findings"]
    assert "slurmd" not in trainer.results["findings"]


def test_gpus_are_asked_for_where_every_node_has_some(trainer: Trainer, cluster: Cluster):
    for machine in cluster.machines:
        machine.gres = "gpu:h200:8(S:0-1)"
    asked = answering(cluster, *map(healthy, NAMES))
    assert "no CUDA driver responds here" in trainer.run("doctor")["findings"]
    assert "--gpus-per-node=8" in asked[0]


@pytest.mark.parametrize(
    ("params", "line"),
    [
        (
            {"nodes": "slurmd-7"},
            "nodes: slurmd-7 is not a node of partition slurmd; there are: slurmd-0, slurmd-1",
        ),
        (
            {"nodes": "a;b"},
            "nodes: a;b is not a node of partition slurmd; there are: slurmd-0, slurmd-1",
        ),
        ({"partition": "gpu"}, "partition: no partition 'gpu'; there are: slurmd"),
        ({"wait_timeout": 0}, "wait-timeout: 0 is not allowed; a whole number from 1 to 3600"),
        ({"nodes": ",".join(f"n{i}" for i in range(65))}, "nodes: 65 named; at most 64 at once"),
    ],
)
def test_impossible_requests_are_refused(
    trainer: Trainer, cluster: Cluster, params: dict[str, typing.Any], line: str
):
    assert trainer.fails("doctor", **params) == line


def test_answers_that_are_not_ours_are_left_out(pip: Pip):
    lines = probe.lines(healthy("slurmd-0"))
    assert set(examine.read_reports("\n".join(reversed(lines)))) == {"slurmd-0"}
    assert examine.read_reports("\n".join(lines[:-1])) == {}
    assert (
        examine.read_reports("DOCTOR a 0 1 !!!\nDOCTOR b 0 1 aGVsbG8=\nDOCTOR c x 1 y\nnoise") == {}
    )

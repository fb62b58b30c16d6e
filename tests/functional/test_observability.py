"""Metrics end to end: a real Prometheus beside each charm scrapes what its charm published, and values follow the cluster."""

import collections.abc
import json
import pathlib
import re
import typing

import pytest
import yaml

from functional import storage_faults
from functional.conftest import REPOSITORY, Cluster, eventually
from functional.storage_faults import MP

OVERLAY = pathlib.Path(__file__).with_name("observability.yaml")
COLLECTORS = ("opentelemetry-collector", "opentelemetry-collector-nodes")
# The charms of ours on each host that has a collector
HOSTS = {
    "sackd/0": ("shared-filesystem-client", "ddp-trainer"),
    "slurmd/0": ("shared-filesystem-client", "slurm-gpu"),
    "slurmd/1": ("shared-filesystem-client", "slurm-gpu"),
    "slurmctld/0": ("slurm-gpu",),
    "juicefs-server-proxy/0": ("juicefs-server-proxy",),
}
API = "http://127.0.0.1:9090/api/v1"
RUN = "observed"
Series = dict[str, typing.Any]


@pytest.fixture(scope="module")
def statuses(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Every unit's status before there is a collector."""
    return shown(cluster)


@pytest.fixture(scope="module")
def observed(cluster: Cluster, statuses: dict[str, dict[str, str]]) -> collections.abc.Iterator[Cluster]:
    """The cluster with collectors, which are removed in the end."""
    cluster.ok("deploy", str(REPOSITORY / "bundle.yaml"), "--overlay", str(OVERLAY), timeout=1200)
    yield cluster
    for app in COLLECTORS:
        cluster.ctl("remove-application", "--no-prompt", app)


def shown(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Return workload status and message of our units and their principals; figures in messages change."""
    return {
        name: {
            key: re.sub(r"[0-9.]+ [GT]iB", "", str(unit["workload-status"].get(key))) for key in ("current", "message")
        }
        for name, unit in cluster.units().items()
        if not name.startswith(COLLECTORS)
    }


def ask(cluster: Cluster, host: str, path: str, *options: str) -> typing.Any:
    """Ask the Prometheus of a host."""
    answer = cluster.exec(host, "curl", "--silent", "--max-time", "10", "--get", *options, f"{API}/{path}")
    assert answer.code == 0, answer.err
    reply = json.loads(answer.out)
    assert reply["status"] == "success", reply
    return reply["data"]


def query(cluster: Cluster, host: str, expression: str) -> list[Series]:
    """Return the series of an expression now."""
    return ask(cluster, host, "query", "--data-urlencode", f"query={expression}")["result"]


def value(cluster: Cluster, host: str, expression: str) -> float:
    """Return the value of an expression that has one series."""
    found = query(cluster, host, expression)
    assert len(found) == 1, (expression, found)
    return float(found[0]["value"][1])


def metric_names(charm: str) -> set[str]:
    """Return the names of a charm's metrics that have series on any machine at all, with its sources' own."""
    return {
        "shared-filesystem-client": {"mount_up", "mount_healthy", "mount_probe_duration_seconds", "mount_size_bytes"},
        "ddp-trainer": {"workspace_up", "runs", "run_failures_total"},
        "slurm-gpu": set[str](),  # by role, see below
        "juicefs-server-proxy": {"volume_up", "volume_used_bytes", "volume_sessions", "engine_memory_bytes"},
    }[charm]


def test_each_charm_is_scraped_on_each_machine(observed: Cluster):
    units = observed.units()
    for host, charms in HOSTS.items():
        names = {name for charm in charms for name in metric_names(charm)}
        if "slurm-gpu" in charms:
            compute = {"gpus_expected", "gpus_detected", "gpu_up", "node_up", "node_held"}
            names |= compute if host.startswith("slurmd/") else {"controller_up", "controller_gres_nodes"}

        def is_scraped(host: str = host, names: set[str] = names) -> list[Series]:
            targets = ask(observed, host, "targets")["activeTargets"]
            assert [
                (one["labels"]["job"], one["health"], one["lastError"]) for one in targets if one["health"] != "up"
            ] == []
            found = query(observed, host, '{__name__=~"slurm_ddp_.+"}')
            missing = names - {one["metric"]["__name__"].removeprefix("slurm_ddp_") for one in found}
            assert not missing, (host, missing)
            return found

        for one in eventually(is_scraped):
            metric = one["metric"]
            assert metric["juju_unit"] in units
            assert metric["juju_unit"].startswith(f"{metric['juju_application']}/")
            assert metric["juju_model"] == observed.model
            assert metric["juju_model_uuid"]
            assert metric["instance"].startswith("juju-")
        eventually(lambda host=host: _all_up(observed, host))


def _all_up(cluster: Cluster, host: str) -> None:
    found = query(cluster, host, '{__name__=~"slurm_ddp_.+_up"}')
    assert found
    assert [one for one in found if one["value"][1] != "1"] == []


def test_juicefs_own_metrics_come_too(observed: Cluster):
    for host in ("sackd/0", "slurmd/0", "slurmd/1"):
        eventually(lambda host=host: query(observed, host, "juicefs_used_space{juju_unit!=''}")[0])


def test_each_alert_rule_is_loaded_and_evaluates(observed: Cluster):
    for host, charms in HOSTS.items():
        folders = [REPOSITORY / "charms" / charm / "src" / "cos" for charm in charms]
        files = [yaml.safe_load(path.read_text()) for one in folders for path in one.glob("alerts/*.yaml")]
        wanted = {rule["alert"] for file in files for group in file["groups"] for rule in group["rules"]}

        def are_loaded(host: str = host, wanted: set[str] = wanted) -> None:
            rules = [rule for group in ask(observed, host, "rules")["groups"] for rule in group["rules"]]
            assert {rule["name"] for rule in rules} == wanted
            assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []
            assert all(rule["labels"]["juju_model"] == observed.model for rule in rules)

        eventually(are_loaded)
        kept = observed.on(host, "sh", "-c", "ls /var/lib/opentelemetry-collector/dashboards 2>/dev/null | wc -l")
        assert int(kept) == sum(len([*one.glob("dashboards/*.json")]) for one in folders)


def test_the_kernel_shows_the_ports_on_the_loopback_only(observed: Cluster):
    for host in HOSTS:
        listening = observed.on(host, "sh", "-c", "ss -Hltn | awk '{print $4}' | grep -E ':97[0-9][0-9]$'").split()
        assert listening
        assert {one.rpartition(":")[0] for one in listening} == {"127.0.0.1"}


def test_no_secret_is_in_units_databags_or_pages(observed: Cluster):
    for host in HOSTS:
        pages = observed.on(
            host,
            "sh",
            "-c",
            "cat /etc/systemd/system/slurm-ddp-exporter-*; "
            "for port in $(ss -Hltn | awk '{print $4}' | grep -oE '97[0-9][0-9]$'); do curl -s http://127.0.0.1:$port/metrics; done",
        )
        assert [name for name, secret in observed.secrets().items() if secret in pages] == []
        modes = observed.on(host, "sh", "-c", "stat -c %a /var/lib/slurm-ddp-exporter/*.json").split()
        assert set(modes) == {"600"}


def test_a_mounts_daemon_that_is_killed_is_seen_as_a_heal(observed: Cluster):
    host = "slurmd/1"
    storage_faults.until_right(observed, host)
    before = value(observed, host, "slurm_ddp_mount_heals_total")
    # Stopped as well, since systemd restarts a client that was killed before anything looks: the keeper must start it
    unit = f"juicefs-{storage_faults.APP}.service"
    observed.on(host, "sh", "-c", f"systemctl kill --signal=KILL {unit}; systemctl stop {unit}")

    def is_counted() -> None:
        assert value(observed, host, "slurm_ddp_mount_heals_total") > before

    eventually(is_counted)
    storage_faults.until_right(observed, host)
    eventually(lambda: _equals(observed, host, "slurm_ddp_mount_healthy", 1))


def _equals(cluster: Cluster, host: str, expression: str, wanted: float) -> None:
    found = value(cluster, host, expression)
    assert found == wanted, (expression, found)


def test_a_volume_that_fills_is_seen(observed: Cluster):
    host, used = "juicefs-server-proxy/0", "slurm_ddp_volume_used_bytes"
    before = value(observed, host, used)
    observed.on("sackd/0", "dd", "if=/dev/urandom", f"of={MP}/filling", "bs=1M", "count=48", "status=none")
    try:

        def is_fuller() -> None:
            assert value(observed, host, used) >= before + (48 << 20)

        eventually(is_fuller)
        assert value(observed, host, "slurm_ddp_volume_capacity_bytes") > before
        # The session of a client that was killed is listed until another client removes it
        assert value(observed, host, "slurm_ddp_volume_sessions") in (3, 4)
    finally:
        observed.on("sackd/0", "rm", f"{MP}/filling")


def test_a_backup_is_seen(observed: Cluster):
    host, backup = "juicefs-server-proxy/0", "slurm_ddp_volume_backup_timestamp_seconds"
    before = value(observed, host, backup)
    observed.ok("run", host, "backup-metadata")

    def is_later() -> None:
        assert value(observed, host, backup) > before

    eventually(is_later)


def test_a_requeued_run_is_seen(observed: Cluster):
    """Slurm requeues a job of a run's name; the run's folder has what `ddp` writes when it submits."""
    folder, requeues = f"{MP}/runs/{RUN}", f'slurm_ddp_run_requeues_total{{run="{RUN}"}}'
    observed.on("sackd/0", "sudo", "-u", "ubuntu", "mkdir", "-p", f"{folder}/logs", f"{folder}/control")
    script = "#!/bin/sh\nsleep 600\n"
    submit = f"printf '{script}' | sbatch --parsable --requeue --job-name={RUN} --output=/dev/null"
    job = observed.on("sackd/0", "sudo", "-u", "ubuntu", "sh", "-c", submit)
    try:
        record = json.dumps({"job_id": int(job), "kind": "script", "run": RUN})
        observed.on("sackd/0", "sudo", "-u", "ubuntu", "sh", "-c", f"echo '{record}' > {folder}/job.json")
        eventually(lambda: _equals(observed, "sackd/0", 'slurm_ddp_runs{state="running"}', 1))
        assert value(observed, "sackd/0", requeues) == 0
        metric = json.dumps({"kind": "step", "step": 7, "loss": 2.5, "tokens_per_second": 100.0})
        observed.on("sackd/0", "sudo", "-u", "ubuntu", "sh", "-c", f"echo '{metric}' > {folder}/metrics.jsonl")
        eventually(lambda: _equals(observed, "sackd/0", f'slurm_ddp_run_step{{run="{RUN}",user="ubuntu"}}', 7))
        observed.on("slurmctld/0", "scontrol", "requeue", job)
        eventually(lambda: _equals(observed, "sackd/0", requeues, 1))
        eventually(lambda: _equals(observed, "sackd/0", 'slurm_ddp_runs{state="requeued"}', 1))
    finally:
        observed.on("slurmctld/0", "scancel", job)
        observed.on("sackd/0", "rm", "-r", folder)


def test_a_gpu_that_is_lost_is_seen(observed: Cluster):
    host, detected = "slurmd/0", "sum(slurm_ddp_gpus_detected)"
    assert value(observed, host, "sum(slurm_ddp_gpus_expected)") == value(observed, host, detected) == 1
    observed.ok("gpus", host, "0")
    try:
        eventually(lambda: _equals(observed, host, detected, 0))
        assert value(observed, host, "sum(slurm_ddp_gpus_expected)") == 1
    finally:
        observed.ok("gpus", host, "1 x Mock GPU")
    eventually(lambda: _equals(observed, host, detected, 1))


def test_a_drain_of_the_administrators_is_seen(observed: Cluster):
    held = 'slurm_ddp_node_held{reason="administrator"}'
    eventually(lambda: _equals(observed, "slurmd/1", held, 0))
    observed.on("slurmctld/0", "scontrol", "update", "nodename=slurmd-1", "state=drain", "reason=disk")
    try:
        eventually(lambda: _equals(observed, "slurmd/1", held, 1))
    finally:
        observed.on("slurmctld/0", "scontrol", "update", "nodename=slurmd-1", "state=resume")


def test_without_collectors_all_is_as_before(observed: Cluster, statuses: dict[str, dict[str, str]]):
    for app in COLLECTORS:
        observed.ok("remove-application", "--no-prompt", app)
    left = "ls -d /etc/systemd/system/slurm-ddp-exporter-* /var/lib/slurm-ddp-exporter/* 2>/dev/null; ss -Hltn | grep -E ':97[0-9][0-9]' || :"
    for host in HOSTS:
        assert observed.on(host, "sh", "-c", left) == ""

    def are_the_same() -> None:
        assert shown(observed) == statuses

    eventually(are_the_same)

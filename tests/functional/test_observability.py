"""Metrics end to end: a real Prometheus on each charm's machine scrapes its published endpoints.

Values follow the cluster.
"""

import base64
import collections.abc
import json
import pathlib
import re
import typing

import pytest
import yaml

from functional.conftest import DEPLOY, REPOSITORY, Cluster, eventually
from functional.storage_faults import MP
from scripts import dashboards

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
PROXY, CONTROLLER, LOGIN = "juicefs-server-proxy/0", "slurmctld/0", "sackd/0"
BOARDS = {board["charm"]: dashboards.of(board["charm"]) for board in dashboards.BOARDS}
Series = dict[str, typing.Any]


@pytest.fixture(scope="module")
def statuses(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Every unit's status before there is a collector."""
    return shown(cluster)


@pytest.fixture(scope="module")
def observed(
    cluster: Cluster, statuses: dict[str, dict[str, str]]
) -> collections.abc.Iterator[Cluster]:
    """The cluster with collectors, which are removed in the end."""
    cluster.ok(*DEPLOY, "--overlay", str(OVERLAY), timeout=1200)
    yield cluster
    for app in COLLECTORS:
        cluster.ctl("remove-application", "--no-prompt", app)


def shown(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Return status and message of our units and their principals; figures in messages change."""
    return {
        name: {
            key: re.sub(r"[0-9.]+ [GT]iB", "", str(unit["workload-status"].get(key)))
            for key in ("current", "message")
        }
        for name, unit in cluster.units().items()
        if not name.startswith(COLLECTORS)
    }


def ask(cluster: Cluster, host: str, path: str, *options: str) -> typing.Any:
    """Ask the Prometheus of a host."""
    answer = cluster.exec(
        host, "curl", "--silent", "--max-time", "10", "--get", *options, f"{API}/{path}"
    )
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


def put(cluster: Cluster, host: str, path: str, text: str | bytes, mode: str = "644") -> None:
    """Write a file on a host."""
    data = base64.b64encode(text.encode() if isinstance(text, str) else text).decode()
    cluster.on(
        host,
        "sh",
        "-c",
        f"echo {data} | base64 -d >{path}.new && chmod {mode} {path}.new && mv {path}.new {path}",
    )


def metric_names(charm: str) -> set[str]:
    """Return a charm's metrics that have series on any machine, with its sources' own."""
    return {
        "shared-filesystem-client": {
            "mount_up",
            "mount_healthy",
            "mount_probe_duration_seconds",
            "mount_size_bytes",
        },
        "ddp-trainer": {"workspace_up", "runs", "run_failures_total"},
        "slurm-gpu": set[str](),  # by role, see below
        "juicefs-server-proxy": {
            "volume_up",
            "volume_used_bytes",
            "volume_sessions",
            "engine_memory_bytes",
        },
    }[charm]


def test_each_charm_is_scraped_on_each_machine(observed: Cluster):
    units = observed.units()
    for host, charms in HOSTS.items():
        names = {name for charm in charms for name in metric_names(charm)}
        if "slurm-gpu" in charms:
            compute = {"gpus_expected", "gpus_detected", "gpu_up", "node_up", "node_held"}
            names |= (
                compute
                if host.startswith("slurmd/")
                else {"controller_up", "controller_gres_nodes"}
            )

        def is_scraped(host: str = host, names: set[str] = names) -> list[Series]:
            targets = ask(observed, host, "targets")["activeTargets"]
            assert [
                (one["labels"]["job"], one["health"], one["lastError"])
                for one in targets
                if one["health"] != "up"
            ] == []
            found = query(observed, host, '{__name__=~"slurm_ddp_.+"}')
            missing = names - {
                one["metric"]["__name__"].removeprefix("slurm_ddp_") for one in found
            }
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
        files = [
            yaml.safe_load(path.read_text())
            for one in folders
            for path in one.glob("alerts/*.yaml")
        ]
        wanted = {
            rule["alert"] for file in files for group in file["groups"] for rule in group["rules"]
        }

        def are_loaded(host: str = host, wanted: set[str] = wanted) -> None:
            rules = [
                rule for group in ask(observed, host, "rules")["groups"] for rule in group["rules"]
            ]
            assert {rule["name"] for rule in rules} == wanted
            assert [
                (rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"
            ] == []
            assert all(rule["labels"]["juju_model"] == observed.model for rule in rules)

        eventually(are_loaded)
        kept = observed.on(
            host, "sh", "-c", "ls /var/lib/opentelemetry-collector/dashboards 2>/dev/null | wc -l"
        )
        assert int(kept) == sum(len(BOARDS[charm]) for charm in charms)


def test_the_kernel_shows_the_ports_on_the_loopback_only(observed: Cluster):
    for host in HOSTS:
        listening = observed.on(
            host, "sh", "-c", "ss -Hltn | awk '{print $4}' | grep -E ':97[0-9][0-9]$'"
        ).split()
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
        modes = observed.on(
            host, "sh", "-c", "stat -c %a /var/lib/slurm-ddp-exporter/*.json"
        ).split()
        assert set(modes) == {"600"}


def _equals(cluster: Cluster, host: str, expression: str, wanted: float) -> None:
    found = value(cluster, host, expression)
    assert found == wanted, (expression, found)


# A job that writes a training's files to its run's folder: steps, checkpoints, a restart after a
# failure
TRAINS = f"""#!/bin/sh
cd {MP}/runs/{RUN} || exit
attempt=$SLURM_JOB_ID.r${{SLURM_RESTART_COUNT:-0}}
for step in $(seq 300); do
  echo "0: INFO:ddptrain:[TRAIN] step=$step/$((300 + step)) loss=2.$step mfu=0.$step"
  printf '{{"kind": "step", "step": %d, "loss": 2.%d, "tokens_per_second": %d, "time": %d}}\\n' \
    $step $step $((100 + step)) $(date +%s) >>metrics.jsonl
  mkdir -p epoch-$step && ln -sfn epoch-$step latest
  echo "0: INFO:ddptrain:[CKPT] saved=epoch-$step step=$step stall_s=0.$step"
  if [ $step = 4 ]; then
    printf '2026-11-20T18:48:22Z\\t%s\\tprogram\\tslurmd-0\\tboom\\n' ${{attempt}}t1 >>control/$SLURM_JOB_ID.failures
    echo "1: ERROR:ddptrain:[FATAL] boom"
  fi
  sleep 3
done
"""


@pytest.mark.long
def test_a_run_that_trains_fails_and_is_requeued_is_seen(observed: Cluster):
    """Slurm requeues a job with a run's name.

    The run's folder has `ddp`'s files of a submission.
    """
    folder, of_run = f"{MP}/runs/{RUN}", f'{{run="{RUN}",user="ubuntu"}}'
    requeues = f"slurm_ddp_run_requeues_total{of_run}"
    failures = 'slurm_ddp_run_failures_total{reason="program"}'
    failed = value(observed, LOGIN, failures)
    ubuntu = ("sudo", "-u", "ubuntu")
    observed.on(LOGIN, *ubuntu, "mkdir", "-p", f"{folder}/logs", f"{folder}/control")
    put(observed, LOGIN, f"{folder}/train.sh", TRAINS)
    options = f"--parsable --requeue --gres=gpu:1 --job-name={RUN} --output={folder}/logs/%j.out --open-mode=append"
    job = observed.on(LOGIN, *ubuntu, "sbatch", *options.split(), f"{folder}/train.sh")
    try:
        record = json.dumps({"job_id": int(job), "kind": "gpt", "run": RUN})
        observed.on(LOGIN, *ubuntu, "sh", "-c", f"echo '{record}' > {folder}/job.json")
        eventually(lambda: _equals(observed, LOGIN, 'slurm_ddp_runs{state="running"}', 1))
        _equals(observed, LOGIN, requeues, 0)
        eventually(lambda: _equals(observed, LOGIN, f"slurm_ddp_run_restarts_total{of_run}", 1))
        eventually(lambda: _equals(observed, LOGIN, failures, failed + 1))
        observed.on(CONTROLLER, "scontrol", "requeue", job)
        eventually(lambda: _equals(observed, LOGIN, requeues, 1))
        eventually(lambda: _equals(observed, LOGIN, 'slurm_ddp_runs{state="requeued"}', 1))
        eventually(lambda: _equals(observed, LOGIN, f"slurm_ddp_run_running{of_run}", 0))
    finally:
        observed.on(CONTROLLER, "scancel", job)
        observed.on(LOGIN, "rm", "-r", folder)


@pytest.mark.long
def test_without_collectors_all_is_as_before(
    observed: Cluster, statuses: dict[str, dict[str, str]]
):
    for app in COLLECTORS:
        observed.ok("remove-application", "--no-prompt", app)
    left = "ls -d /etc/systemd/system/slurm-ddp-exporter-* /var/lib/slurm-ddp-exporter/* 2>/dev/null; ss -Hltn | grep -E ':97[0-9][0-9]' || :"
    for host in HOSTS:
        assert observed.on(host, "sh", "-c", left) == ""

    def are_the_same() -> None:
        assert shown(observed) == statuses

    eventually(are_the_same)

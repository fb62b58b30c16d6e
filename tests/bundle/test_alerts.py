"""Each alert fires on samples of what it is for and not just below its threshold, by Prometheus' own promtool."""

import pathlib
import re
import shutil
import subprocess

import observability
import pytest
import rules
import yaml

RUNBOOKS = rules.ROOT / "docs" / "runbooks"
PROMTOOL = shutil.which("promtool")
DAY = 86400
_RUN = 'run="gpt",user="ada"'
_MOUNT = 'mountpoint="/mnt/shared",kind="nfs"'

# (charm, alert): the samples on which it fires, those of what is just not enough, at which minute. A series' values are
# promtool's: start+step x count, a minute apart, or ten in a test of days. Times are of an epoch that starts with the test.
Series = dict[str, str]
CASES: dict[tuple[str, str], tuple[Series, Series, int]] = {
    ("shared-filesystem-client", "SlurmDdpMountUnhealthy"): (
        {f"mount_healthy{{{_MOUNT}}}": "1x2 0x10"},
        {f"mount_healthy{{{_MOUNT}}}": "1x5 0x10"},
        9,
    ),
    ("shared-filesystem-client", "SlurmDdpVolumeNearlyFull"): (
        {f"mount_size_bytes{{{_MOUNT}}}": "100x20", f"mount_available_bytes{{{_MOUNT}}}": "9x20"},
        {f"mount_size_bytes{{{_MOUNT}}}": "100x20", f"mount_available_bytes{{{_MOUNT}}}": "10x20"},
        16,
    ),
    ("shared-filesystem-client", "SlurmDdpExporterDown"): ({"mount_up{}": "0x20"}, {"mount_up{}": "1x5 0x20"}, 11),
    ("juicefs-server-proxy", "SlurmDdpVolumeNearlyFull"): (
        {'volume_used_bytes{volume="v"}': "91x20", 'volume_capacity_bytes{volume="v"}': "100x20"},
        {'volume_used_bytes{volume="v"}': "90x20", 'volume_capacity_bytes{volume="v"}': "100x20"},
        16,
    ),
    ("juicefs-server-proxy", "SlurmDdpBackupTooOld"): (
        {'volume_backup_timestamp_seconds{volume="v"}': "1x1200"},
        {
            'volume_backup_timestamp_seconds{volume="never"}': "0x1200",
            'volume_backup_timestamp_seconds{volume="v"}': f"{2 * DAY}x1200",
        },
        11000,
    ),
    ("juicefs-server-proxy", "SlurmDdpNoBackup"): (
        {'volume_backup_timestamp_seconds{volume="v"}': "0x1200"},
        {'volume_backup_timestamp_seconds{volume="v"}': "0x1000 9x200"},
        11000,
    ),
    ("juicefs-server-proxy", "SlurmDdpExporterDown"): (
        {'volume_up{volume="v"}': "0x20"},
        {'volume_up{volume="v"}': "1x20", 'backups_up{volume="v"}': "1x20", 'engine_up{volume="v"}': "1x20"},
        11,
    ),
    ("slurm-gpu", "SlurmDdpNodeHeld"): (
        {'node_held{reason="health"}': "1x40"},
        {'node_held{reason="administrator"}': "1x40", 'node_held{reason="health"}': "0x5 1x40"},
        31,
    ),
    ("slurm-gpu", "SlurmDdpGpuLost"): (
        {'gpus_expected{type="h100"}': "8x20", 'gpus_detected{type="h100"}': "7x20"},
        {'gpus_expected{type="h100"}': "8x20", 'gpus_detected{type="h100"}': "8x20"},
        12,
    ),
    ("slurm-gpu", "SlurmDdpGpuXid"): (
        {'gpu_xid_errors_total{xid="79",level="drain"}': "1x90"},
        {'gpu_xid_errors_total{xid="31",level="none"}': "1x90"},  # a program's own mistake
        5,
    ),
    ("slurm-gpu", "SlurmDdpExporterDown"): (
        {"node_up{}": "0x20"},
        {"node_up{}": "1x20", "controller_up{}": "1x20"},
        11,
    ),
    ("ddp-trainer", "SlurmDdpRunStalled"): (
        {f"run_progress_timestamp_seconds{{{_RUN}}}": "0x90", f"run_running{{{_RUN}}}": "1x90"},
        {f"run_progress_timestamp_seconds{{{_RUN}}}": "0x90", f"run_running{{{_RUN}}}": "0x10 1x90"},  # it was queued
        37,
    ),
    ("ddp-trainer", "SlurmDdpCheckpointTooOld"): (
        {f"run_checkpoint_timestamp_seconds{{{_RUN}}}": "0x130", f"run_running{{{_RUN}}}": "1x130"},
        {f"run_checkpoint_timestamp_seconds{{{_RUN}}}": "600x130", f"run_running{{{_RUN}}}": "1x130"},
        127,
    ),
    ("ddp-trainer", "SlurmDdpRequeueLoop"): (
        {f"run_requeues_total{{{_RUN}}}": "0x300 1+1x60", f"run_restarts_total{{{_RUN}}}": "0x301 1x60"},
        {f"run_requeues_total{{{_RUN}}}": "0x300 4x60", f"run_restarts_total{{{_RUN}}}": "0x301 1x60"},
        305,
    ),
    ("ddp-trainer", "SlurmDdpExporterDown"): ({"workspace_up{}": "0x20"}, {"workspace_up{}": "1x20"}, 11),
}
RULES = {(charm, rule["alert"]): rule for charm, rule in observability.alerts()}


def rendered(charm: str, folder: pathlib.Path) -> list[str]:
    """Write a charm's rules as the collector passes them on, and return the files."""
    written: list[str] = []
    for path in observability.files(charm, "alerts"):
        (folder / path.name).write_text(path.read_text().replace(observability.PLACEHOLDER, observability.matchers()))
        written.append(path.name)
    return written


def promtool(*argv: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    if PROMTOOL is None:
        pytest.fail("no promtool here: scripts/setup.sh test", pytrace=False)
    return subprocess.run([PROMTOOL, *argv], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def series(samples: Series) -> list[dict[str, str]]:
    """Give samples the prefix and the labels that the collector adds."""
    added = ",".join(f'{name}="{value}"' for name, value in {**observability.TOPOLOGY, "instance": "node-0"}.items())
    return [
        {"series": f"slurm_ddp_{name[:-1]}{'' if name.endswith('{}') else ','}{added}}}", "values": values}
        for name, values in samples.items()
    ]


@pytest.mark.parametrize("charm", observability.CHARMS)
def test_prometheus_loads_the_rules(charm: str, tmp_path: pathlib.Path):
    done = promtool("check", "rules", *rendered(charm, tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("charm", "alert"), CASES, ids=":".join)
def test_it_fires_and_not_just_below_its_threshold(charm: str, alert: str, tmp_path: pathlib.Path):
    """A test that expects no alert passes where none fires; of the one that must fire it prints the alert, with its text."""
    fires, quiet, minute = CASES[charm, alert]
    step = "10m" if minute > 1000 else "1m"

    def test(samples: Series) -> subprocess.CompletedProcess[str]:
        wanted = {
            "rule_files": rendered(charm, tmp_path),
            "evaluation_interval": step,
            "tests": [
                {
                    "interval": step,
                    "input_series": series(samples),
                    "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []}],
                }
            ],
        }
        (tmp_path / "test.yaml").write_text(yaml.safe_dump(wanted))
        return promtool("test", "rules", "test.yaml", cwd=tmp_path)

    done = test(quiet)
    assert done.returncode == 0, done.stdout + done.stderr
    done = test(fires)
    got = (done.stdout + done.stderr).partition("got:")[2]
    assert done.returncode == 1, done.stdout
    assert f'alertname="{alert}"' in got, done.stdout + done.stderr
    assert "runbook_url=" in got
    assert "<no value>" not in got  # a label that the expression drops
    assert "error" not in got


def test_every_alert_has_a_case():
    assert set(CASES) == set(RULES)


def test_every_alert_has_a_runbook_and_every_runbook_an_alert():
    assert {path.stem for path in RUNBOOKS.glob("Slurm*.md")} == {alert for _, alert in RULES}


@pytest.mark.parametrize("key", RULES, ids=":".join)
def test_a_rule_says_how_bad_what_and_what_to_type(key: tuple[str, str]):
    charm, alert = key
    rule = RULES[key]
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"].endswith(f"/docs/runbooks/{alert}.md")
    assert "\n" not in rule["annotations"]["description"]
    metrics = re.findall(r"slurm_ddp_\w+", rule["expr"])
    assert metrics
    assert set(metrics) <= {f"slurm_ddp_{name}" for name in observability.METRICS[charm]}
    assert rule["expr"].count(observability.PLACEHOLDER) == len(metrics)  # no other application's metrics


@pytest.mark.parametrize("key", RULES, ids=":".join)
def test_what_a_description_types_exists(key: tuple[str, str]):
    charm, _ = key
    declared = yaml.safe_load((rules.ROOT / "charms" / charm / "charmcraft.yaml").read_text())
    text = RULES[key]["annotations"]["description"]
    for action in re.findall(r"juju run \{\{ \$labels\.\w+ \}\}(?:/leader)? ([\w-]+)", text):
        assert action in declared["actions"]
    for option in re.findall(r"juju config \{\{ \$labels\.\w+ \}\} ([\w-]+)=", text):
        assert option in declared["config"]["options"]


def test_every_runbook_url_has_the_same_base():
    bases = {rule["annotations"]["runbook_url"].rpartition("/docs/")[0] for rule in RULES.values()}
    assert len(bases) == 1


def test_every_metric_is_on_the_reference_page():
    page = (rules.ROOT / "docs" / "reference" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    assert {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels in rows.items()} == {
        name.removeprefix("slurm_ddp_"): labels for name, labels in observability.NAMES.items()
    }

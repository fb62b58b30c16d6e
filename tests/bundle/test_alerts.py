"""Each alert fires on samples of its fault and not just below its threshold, by promtool."""

import pathlib
import re
import shutil
import subprocess
from typing import Any

import deployments
import observability
import pytest
import yaml

RUNBOOKS = deployments.ROOT / "docs" / "runbooks"
PROMTOOL = shutil.which("promtool")
Series = dict[str, str]  # a series, and its values in promtool's form
CASES: dict[tuple[str, str], dict[str, Any]] = {
    (case["charm"], case["alert"]): case
    for case in yaml.safe_load((deployments.ROOT / "tests/bundle/alerts.yaml").read_text())
}
RULES = {(charm, rule["alert"]): rule for charm, rule in observability.alerts()}


def rendered(charm: str, folder: pathlib.Path) -> list[str]:
    """Write a charm's rules as the collector passes them on, and return the files."""
    written: list[str] = []
    for path in observability.files(charm, "alerts"):
        (folder / path.name).write_text(
            path.read_text().replace(observability.PLACEHOLDER, observability.matchers())
        )
        written.append(path.name)
    return written


def promtool(*argv: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    if PROMTOOL is None:
        pytest.fail("no promtool here: scripts/setup.sh test", pytrace=False)
    return subprocess.run(
        [PROMTOOL, *argv], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def series(samples: Series) -> list[dict[str, str]]:
    """Give samples the prefix and the labels that the collector adds."""
    added = ",".join(
        f'{name}="{value}"'
        for name, value in {**observability.TOPOLOGY, "instance": "node-0"}.items()
    )
    return [
        {
            "series": f"slurm_ddp_{name[:-1]}{'' if name.endswith('{}') else ','}{added}}}",
            "values": values,
        }
        for name, values in samples.items()
    ]


@pytest.mark.parametrize(("charm", "alert"), CASES, ids=":".join)
def test_it_fires_and_not_just_below_its_threshold(charm: str, alert: str, tmp_path: pathlib.Path):
    """A test that expects no alert passes if none fires; the other prints the alert's text."""
    fires, quiet, minute = (CASES[charm, alert][key] for key in ("fires", "quiet", "minute"))
    step = "10m" if minute > 1000 else "1m"

    def test(samples: Series) -> subprocess.CompletedProcess[str]:
        wanted = {
            "rule_files": rendered(charm, tmp_path),
            "evaluation_interval": step,
            "tests": [
                {
                    "interval": step,
                    "input_series": series(samples),
                    "alert_rule_test": [
                        {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []}
                    ],
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


def test_every_alert_has_a_case_and_a_runbook_and_no_other_has():
    assert set(CASES) == set(RULES)
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
    assert rule["expr"].count(observability.PLACEHOLDER) == len(
        metrics
    )  # no other application's metrics


@pytest.mark.parametrize("key", RULES, ids=":".join)
def test_what_a_description_types_exists(key: tuple[str, str]):
    charm, _ = key
    declared = yaml.safe_load((deployments.ROOT / "charms" / charm / "charmcraft.yaml").read_text())
    text = RULES[key]["annotations"]["description"]
    for action in re.findall(r"juju run \{\{ \$labels\.\w+ \}\}(?:/leader)? ([\w-]+)", text):
        assert action in declared["actions"]
    for option in re.findall(r"juju config \{\{ \$labels\.\w+ \}\} ([\w-]+)=", text):
        assert option in declared["config"]["options"]


def test_every_metric_is_on_the_reference_page():
    page = (deployments.ROOT / "docs" / "reference" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    assert {name: re.findall(r"`(\w+)`", labels) for name, labels in rows.items()} == {
        name.removeprefix("slurm_ddp_"): labels for name, labels in observability.NAMES.items()
    }

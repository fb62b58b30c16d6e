"""The databag of cos_agent; tests/upstream/test_cos_agent.py has the real library read it."""

import base64
import json
import lzma
import pathlib

import pytest
import yaml

from slurm_ddp.interfaces import cos_agent

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

UUID = "d28c42cc-6e8e-4f1e-8a3c-3f3b0b1f6f5e"
TOPOLOGY = cos_agent.Topology("hpc", UUID, "trainer", "ddp-trainer")
RULES: str = CASES["printed"]["RULES"]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "alerts").mkdir()
    (tmp_path / "dashboards").mkdir()
    (tmp_path / "alerts" / "runs.yaml").write_text(RULES)
    (tmp_path / "dashboards" / "runs.json").write_text(
        '{"title": "Runs", "tags": ["slurm"], "panels": []}'
    )
    return tmp_path


def dumped(folder: pathlib.Path, *jobs: cos_agent.Job) -> cos_agent.Json:
    data = cos_agent.dump(TOPOLOGY, jobs, folder)
    assert list(data) == [cos_agent.KEY]
    return json.loads(data[cos_agent.KEY])


def unpacked(dashboard: str) -> cos_agent.Json:
    return json.loads(lzma.decompress(base64.b64decode(dashboard)))


def test_each_endpoint_is_a_scrape_job_of_the_application(folder: pathlib.Path):
    jobs = [cos_agent.Job("mount", 9702, "juju-1"), cos_agent.Job("juicefs", 9567, "juju-1")]
    assert dumped(folder, *jobs)["metrics_scrape_jobs"] == [
        {
            "job_name": f"trainer_{name}",
            "metrics_path": "/metrics",
            "static_configs": [
                {"targets": [f"localhost:{port}"], "labels": {"instance": "juju-1"}}
            ],
        }
        for name, port in (("juicefs", 9567), ("mount", 9702))
    ]


def test_alerts_carry_the_applications_labels(folder: pathlib.Path):
    (group,) = dumped(folder)["metrics_alert_rules"]["groups"]
    assert group["name"] == "hpc_d28c42cc_trainer_runs"
    stalled, plain = group["rules"]
    names = {"juju_model": "hpc", "juju_model_uuid": UUID, "juju_application": "trainer"}
    labels = names | {"juju_charm": "ddp-trainer"}
    assert stalled["labels"] == labels | {"severity": "warning"}
    assert plain["labels"] == labels
    assert stalled["expr"] == (
        f'time() - slurm_ddp_x{{juju_model="hpc", juju_model_uuid="{UUID}", juju_application="trainer"}} > 60'
    )
    assert (stalled["for"], stalled["annotations"]) == ("5m", {"summary": "s"})


def test_a_dashboard_is_packed_with_the_same_uid_from_each_unit_and_application(
    folder: pathlib.Path,
):
    other = cos_agent.Topology("hpc", UUID, "another", "ddp-trainer")
    bags = [
        json.loads(cos_agent.dump(one, [], folder)["config"])["dashboards"]
        for one in (TOPOLOGY, other)
    ]
    assert bags[0] == bags[1]
    content = unpacked(bags[0][0])
    assert (content["title"], content["tags"]) == ("Runs", ["slurm", "charm: ddp-trainer"])
    assert len(content["uid"]) == 40

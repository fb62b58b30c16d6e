"""The volume's metrics: what each follows, and the relation with a collector."""

import collections.abc
import dataclasses
import json
import os
import pathlib
import typing

import pytest
from ops import testing
from rig import Rig, peers

import fake_exporter
import metrics
from fake_exporter import FakeExporter
from slurm_ddp import exporter

APP, UNIT = "juicefs-server-proxy", "juicefs-server-proxy/0"
URL = "redis://192.0.2.0:6379/1"
LABELS = {"volume": "shared"}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> FakeExporter:
    return fake_exporter.install(monkeypatch, pathlib.Path(metrics.__file__).resolve().parents[1])


def related(rig: Rig, **options: typing.Any) -> testing.State:
    return rig.state(peers(), fake_exporter.collector(), **options)


def samples(read: collections.abc.Iterable[typing.Any]) -> dict[str, float]:
    found = {sample.name: sample for metric in read for sample in metric.samples}
    assert all(sample.labels == LABELS for sample in found.values())
    return {name.removeprefix("slurm_ddp_"): sample.value for name, sample in found.items()}


def source(served: FakeExporter, name: str) -> exporter.Source:
    (found,) = (one for one in metrics.sources(served.serving[UNIT]) if one.name == name)
    assert found.labels == LABELS
    return found


def test_a_collector_gets_the_job_and_the_service_goes_with_the_relation_or_the_unit(
    rig: Rig, served: FakeExporter
):
    state = related(rig)
    on = rig.ctx.on
    for ends in ("relation_broken", "stop", "remove"):
        out = rig.ctx.run(on.config_changed(), state)
        bag = out.get_relation(900).local_unit_data["config"]
        (job,) = json.loads(bag)["metrics_scrape_jobs"]
        assert job["job_name"] == f"{APP}_volume"
        assert job["static_configs"][0]["targets"] == ["localhost:9701"]
        password = served.serving[UNIT]["environment"]["REDIS_PASSWORD"]
        assert served.serving[UNIT]["redis"] == password
        assert password not in bag + repr(rig.ctx.juju_log)
        rig.ctx.run(
            getattr(on, ends)(*([out.get_relation(900)] if ends == "relation_broken" else [])), out
        )
        assert served.serving == {}


def test_a_volume_that_is_not_known_yet_has_no_metrics(rig: Rig, served: FakeExporter):
    out = rig.ctx.run(rig.ctx.on.config_changed(), related(rig, leader=False))
    assert served.serving == {}
    assert "config" not in out.get_relation(900).local_unit_data
    assert isinstance(out.unit_status, testing.WaitingStatus)


def test_the_volume_is_asked_with_the_units_credentials(rig: Rig, served: FakeExporter):
    rig.ctx.run(rig.ctx.on.config_changed(), related(rig))
    rig.world.passwords[URL] = served.serving[UNIT]["environment"]["REDIS_PASSWORD"]
    rig.world.volumes[URL] = dataclasses.replace(
        rig.world.volumes[URL],
        used_bytes=4096,
        used_inodes=7,
        clients=("a at /m", "b at /m"),
        capacity_gib=2,
    )
    assert samples(source(served, "volume").read()) == {
        "volume_used_bytes": 4096,
        "volume_used_inodes": 7,
        "volume_sessions": 2,
        "volume_trash_days": 0,
        "volume_capacity_bytes": 2 << 30,
    }
    rig.world.volumes[URL] = dataclasses.replace(rig.world.volumes[URL], capacity_gib=0)
    assert "volume_capacity_bytes" not in samples(source(served, "volume").read())


def test_the_last_backup(tmp_path: pathlib.Path):
    assert samples(metrics.backups(tmp_path / "none", LABELS)) == {
        "volume_backup_timestamp_seconds": 0
    }
    for name, at in (("shared-1.json.gz", 1000), ("shared-2.json.gz", 2000), ("notes.txt", 9000)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, at))
    assert samples(metrics.backups(tmp_path, LABELS)) == {"volume_backup_timestamp_seconds": 2000}

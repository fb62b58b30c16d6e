"""The mount's metrics: what each follows, and the relation with a collector."""

import dataclasses
import json
import pathlib

import pytest
from fake_mounter import CHARM_ROOT, Site, offer, volume
from ops import testing

import fake_exporter
import metrics
import mount_plan
from fake_exporter import FakeExporter
from mount import states
from scripts import keeper
from slurm_ddp import records
from slurm_ddp.commands import Completed

APP, UNIT = "shared-filesystem-client", "shared-filesystem-client/0"
HEALTH = keeper.Health(
    state="right",
    since=1000.0,
    checked=2000.0,
    took=0.25,
    heals=3,
    boot="this",
    passes=7,
    wrote=1990.0,
)
LABELS = '{kind="juicefs",mountpoint="/mnt/shared"}'


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    monkeypatch.setattr(mount_plan, "STATE", tmp_path)
    monkeypatch.setattr(metrics, "run", lambda *argv, timeout: Completed(0, "1000 250 4096\n", ""))
    return tmp_path / APP


def watching(folder: pathlib.Path, health: keeper.Health, fstype: str = "fuse.juicefs") -> None:
    watch = keeper.Watch(
        APP, "/mnt/shared", "a.service", (fstype,), ("JuiceFS:shared",), (), writable=True
    )
    folder.mkdir(exist_ok=True)
    (folder / keeper.WATCH).write_text(records.text(watch))
    (folder / keeper.HEALTH).write_text(records.text(health))


def read(app: str = APP) -> dict[str, float]:
    """Read the samples as Prometheus names them."""
    found: dict[str, float] = {}
    for metric in metrics.read(app):
        for sample in metric.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_a_mount_that_works(folder: pathlib.Path):
    watching(folder, HEALTH)
    assert read() == {
        f"slurm_ddp_mount_healthy{LABELS}": 1,
        f"slurm_ddp_mount_state_timestamp_seconds{LABELS}": 1000,
        f"slurm_ddp_mount_probe_timestamp_seconds{LABELS}": 2000,
        f"slurm_ddp_mount_probe_duration_seconds{LABELS}": 0.25,
        f"slurm_ddp_mount_heals_total{LABELS}": 3,
        f"slurm_ddp_mount_size_bytes{LABELS}": 4096000,
        f"slurm_ddp_mount_available_bytes{LABELS}": 1024000,
    }


@pytest.mark.parametrize(
    ("fstype", "kind"), [("fuse.juicefs", "juicefs"), ("fuse.ceph-fuse", "cephfs"), ("lustre",) * 2]
)
def test_a_mount_that_does_not_work_is_not_measured(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, fstype: str, kind: str
):
    monkeypatch.setattr(metrics, "run", lambda *argv, timeout: pytest.fail("it would hang"))
    watching(folder, dataclasses.replace(HEALTH, state="absent", heals=4), fstype)
    found, labels = read(), LABELS.replace("juicefs", kind)
    assert found[f"slurm_ddp_mount_healthy{labels}"] == 0
    assert found[f"slurm_ddp_mount_heals_total{labels}"] == 4
    assert not [name for name in found if "_bytes" in name]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> FakeExporter:
    return fake_exporter.install(monkeypatch, CHARM_ROOT)


@pytest.fixture
def related(site: Site) -> testing.State:
    secret = testing.Secret({"meta-password": "topSecret1"})
    state = site.state(offer(volume(secret)), secrets=[secret])
    return dataclasses.replace(state, relations={*state.relations, fake_exporter.collector()})


def test_a_collector_gets_jobs_and_the_service_goes_with_the_relation_or_the_unit(
    site: Site, related: testing.State, served: FakeExporter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(states, "load", lambda app: states.State("a", "/m", "u", ("f",), port=9567))
    on = site.ctx.on
    for event in (on.relation_broken(related.get_relation(900)), on.stop(), on.remove()):
        out = site.ctx.run(on.config_changed(), related)
        assert served.serving == {UNIT: {"app": APP}}
        found = json.loads(out.get_relation(900).local_unit_data["config"])
        jobs = {
            job["job_name"]: job["static_configs"][0]["targets"]
            for job in found["metrics_scrape_jobs"]
        }
        assert jobs == {f"{APP}_mount": ["localhost:9701"], f"{APP}_juicefs": ["localhost:9567"]}
        assert "topSecret" not in repr(found)
        site.ctx.run(event, related)
        assert served.serving == {}

"""The metrics of both roles: what each follows, and the relation with a collector."""

import collections.abc
import json
import os
import pathlib
import typing

import pytest
from conftest import COMPUTE, CONTROLLER, ROOT, WITH_GPU
from ops import testing
from slurm_double import SlurmDouble

import charm
import fake_exporter
import metrics
from fake_exporter import FakeExporter
from gpu import detect as gpu_detect
from gpu import gres_conf
from gpu import xids as gpu_xids
from node import health, slurmd_options
from slurm_ddp import records, systemd
from slurm_ddp.commands import Completed
from slurm_ddp.interfaces.slurm_gres import NodeGres
from slurm_ddp.slurm import nodes

COLLECTOR = fake_exporter.collector()
REASONS = ("health", "check", "driver", "mig", "reset", "registration", "administrator")


def samples(read: collections.abc.Iterable[typing.Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in read:
        for sample in metric.samples:
            labels = ",".join(sample.labels.values())
            found[sample.name.removeprefix("slurm_ddp_") + (f"[{labels}]" if labels else "")] = (
                sample.value
            )
    return found


def test_a_node_with_its_gpu(mock_gpu: pathlib.Path):
    slurmd_options.PATH.write_text(WITH_GPU)
    assert samples(metrics.cards()) == {"gpus_expected[mock_gpu]": 1, "gpus_detected[mock_gpu]": 1}


def test_mig_instances_count_by_type(monkeypatch: pytest.MonkeyPatch):
    instances = tuple(gpu_detect.Instance(profile) for profile in ("1g.5gb", "1g.5gb", "3g.20gb"))
    card = gpu_detect.Gpu("NVIDIA A100-SXM4-40GB", "0000:01:00.0", 0, mig=True, instances=instances)
    monkeypatch.setattr(gpu_detect, "detect", lambda: gpu_detect.Detection("nvml", (card,)))
    found = samples(metrics.cards())
    assert sorted(value for name, value in found.items() if name.startswith("gpus_detected")) == [
        1,
        2,
    ]


@pytest.mark.parametrize(("reason", "ok"), [("", 1), ("gpu-health: Xid 79", 0)])
def test_the_last_health_check(reason: str, ok: int):
    health.STATE.parent.mkdir(parents=True, exist_ok=True)
    health.STATE.write_text(records.text(health.State(reason=reason)))
    os.utime(health.STATE, (1000, 1000))
    assert samples(metrics.cards()) == {
        "gpu_health_ok": ok,
        "gpu_health_check_timestamp_seconds": 1000,
    }


LINE = "NVRM: Xid (PCI:0000:01:00): {}, pid=1, name=python\n"


@pytest.mark.parametrize(
    ("option", "levels"),
    [
        ("", {"13": "none", "63": "warn", "79": "drain", "154": "none"}),
        ("+13 -79", {"13": "drain", "63": "warn", "79": "none", "154": "none"}),
        (
            "seventy-nine",
            {"13": "none", "63": "warn", "79": "drain", "154": "none"},
        ),  # the unit's status names it
    ],
)
def test_xids_count_by_number_and_what_the_check_makes_of_them(
    monkeypatch: pytest.MonkeyPatch, option: str, levels: dict[str, str]
):
    text = "".join(LINE.format(xid) for xid in (79, 13, 79, 63, 154)) + "NVRM: Xid garbled\n"
    monkeypatch.setattr(gpu_xids, "run", lambda *_, **__: Completed(0, text, ""))
    wanted = {
        f"gpu_xid_errors_total[{xid},{level}]": 2 if xid == "79" else 1
        for xid, level in levels.items()
    }
    wanted["gpu_xid_errors_total[unknown,warn]"] = 1  # a line that no pattern fits
    assert samples(metrics.xids(option)) == wanted


def held() -> set[str]:
    found = samples(metrics.holds())
    assert list(found) == [f"node_held[{reason}]" for reason in sorted(REASONS)]
    return {reason for reason in REASONS if found[f"node_held[{reason}]"] == 1}


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("gpu-health: Xid 79", {"health"}),
        ("gpu-driver: driver 580", {"driver"}),
        ("gpu-mig: new layout", {"mig"}),
        ("gpu-reset: GPU 0", {"reset"}),
        ("node-check: /dev/shm has 64 MiB", {"check"}),
        ("slurm-gpu: 1 of 2 GPUs found", {"registration"}),
        ("disk is full", {"administrator"}),
        ("mount-keeper data: hangs", set[str]()),
    ],
)
def test_a_drain_by_its_reason(registered: SlurmDouble, reason: str, why: set[str]):
    nodes.drain("slurmd-0", reason)
    assert held() == why


def test_the_nodes_in_gres_conf(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(systemd, "is_active", lambda name: name == "slurmctld.service")
    assert samples(metrics.controller_lines()) == {"controller_gres_nodes": 0}
    line = "Name=gpu Type=h100 File=/dev/nvidia0"
    published = (("0", (line,)), ("1", (line,)), ("2", ()))
    entries = {
        f"slurm-gpu/{i}": gres_conf.Entry.of(
            f"slurm-gpu/{i}", NodeGres(node=f"slurmd-{i}", lines=lines)
        )
        for i, lines in published
    }
    gres_conf.write(gres_conf.GresConf(entries=entries))
    assert samples(metrics.controller_lines()) == {"controller_gres_nodes": 2}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> FakeExporter:
    return fake_exporter.install(monkeypatch, ROOT)


@pytest.mark.parametrize(
    ("role", "names"),
    [(COMPUTE, ["gpu", "gpu_log", "node"]), (CONTROLLER, ["controller"])],
    ids=["compute", "ctl"],
)
def test_each_role_serves_its_metrics(
    ctx: testing.Context[charm.SlurmGpuCharm],
    served: FakeExporter,
    role: testing.SubordinateRelation,
    names: list[str],
):
    state = testing.State(leader=True, relations=[role, COLLECTOR])
    for happened in (
        ctx.on.update_status(),
        ctx.on.relation_joined(COLLECTOR),
        ctx.on.relation_changed(COLLECTOR),
    ):
        out = ctx.run(happened, state)
        (job,) = json.loads(out.get_relation(COLLECTOR.id).local_unit_data["config"])[
            "metrics_scrape_jobs"
        ]
        assert job["job_name"] == "slurm-gpu_gpu"
        assert job["static_configs"][0]["targets"] == ["localhost:9701"]
    assert [source.name for source in metrics.sources(served.serving["slurm-gpu/0"])] == names


def test_the_service_goes_with_the_relation_and_with_the_unit(
    ctx: testing.Context[charm.SlurmGpuCharm], served: FakeExporter
):
    state = testing.State(relations=[COMPUTE, COLLECTOR])
    ends = (
        ctx.on.relation_broken(COLLECTOR),
        ctx.on.relation_broken(COMPUTE),
        ctx.on.stop(),
        ctx.on.remove(),
    )
    for happened in ends:
        ctx.run(ctx.on.update_status(), state)
        assert served.serving
        ctx.run(happened, state)
        assert served.serving == {}

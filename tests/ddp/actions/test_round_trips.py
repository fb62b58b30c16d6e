"""Nodes with short round trips between them are a site of a training over slow links."""

import json

import pytest
from cluster import Cluster
from harness import Trainer
from node_reports import answering, healthy

from ddp.prediction import round_trips


@pytest.mark.parametrize(
    ("trips", "sites"),
    [
        ({}, []),
        ({"a": {"b": 0.2}, "b": {"a": 0.2}}, [["a", "b"]]),
        ({"a": {"b": 0.2, "c": 40.0}, "c": {"d": 0.3}}, [["a", "b"], ["c", "d"]]),
        ({"b": {"c": 0.2}, "a": {"c": 5.0}, "d": {"a": 5.1}}, [["a", "b", "c"], ["d"]]),
    ],
)
def test_near_nodes_are_one_site(trips: round_trips.Trips, sites: list[list[str]]):
    assert round_trips.sites(trips) == sites


def variables(ready: Trainer) -> dict[str, str]:
    job = json.loads(ready.run("submit-ddp", workload="gpt", dry_run=True)["job"])
    return dict(job["variables"])


@pytest.mark.parametrize(("trip_ms", "near"), [(40.0, "slurmd-0 slurmd-1"), (0.2, None)])
def test_what_doctor_measured_goes_with_a_submission(
    ready: Trainer, cluster: Cluster, trip_ms: float, near: str | None
):
    assert "NEAR_NODES" not in variables(ready)
    reports = [healthy("slurmd-0"), healthy("slurmd-1")]
    for report in reports:
        for peer in report["network"]["peers"].values():
            peer["trip_ms"] = trip_ms
    answering(cluster, *reports)

    ready.run("doctor")

    assert variables(ready).get("NEAR_NODES") == near


@pytest.mark.parametrize(
    "text", ["", "[]", '{"trips_ms": {"a b": {"c": 9.0}, "d": 1, "e": {"f": "x"}}}']
)
def test_a_damaged_file_counts_as_none(ready: Trainer, text: str):
    (ready.workspace / "baselines" / round_trips.FILE).write_text(text)
    assert "NEAR_NODES" not in variables(ready)

"""The real library of cos_agent reads what our charms publish; needs a checkout of opentelemetry-collector-operator, too.

git clone https://github.com/canonical/opentelemetry-collector-operator $SLURM_DDP_UPSTREAM/opentelemetry-collector-operator
"""

import importlib
import pathlib
import sys
from typing import Any

import checkout
import ops
import pytest
from ops import testing

from slurm_ddp.interfaces import cos_agent

RULES = "groups: [{name: runs, rules: [{alert: Stalled, expr: 'up{%%juju_topology%%} == 0'}]}]\n"
UUID = "d28c42cc-6e8e-4f1e-8a3c-3f3b0b1f6f5e"
META = {
    "name": "opentelemetry-collector",
    "subordinate": True,
    "requires": {"cos-agent": {"interface": "cos_agent", "scope": "container"}},
    "peers": {"peers": {"interface": "otelcol_replica"}},
}


@pytest.fixture(scope="module")
def library() -> Any:
    folder = checkout.folder("opentelemetry-collector-operator") / "lib"
    if not folder.is_dir():
        pytest.skip("there is no checkout of canonical/opentelemetry-collector-operator beside the others")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("charms.grafana_agent.v0.cos_agent")
    finally:
        sys.path.remove(str(folder))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pydantic, for what the library does
def test_the_collectors_library_reads_jobs_alerts_and_dashboards(library: Any, tmp_path: pathlib.Path):
    for folder in ("alerts", "dashboards"):
        (tmp_path / folder).mkdir()
    (tmp_path / "alerts" / "runs.yaml").write_text(RULES)
    (tmp_path / "dashboards" / "runs.json").write_text('{"title": "Runs", "panels": []}')
    topology = cos_agent.Topology("hpc", UUID, "trainer", "ddp-trainer")
    data = cos_agent.dump(topology, [cos_agent.Job("runs", 9701, "juju-1")], tmp_path)
    seen: dict[str, Any] = {}

    class Collector(ops.CharmBase):
        def __init__(self, framework: ops.Framework) -> None:
            super().__init__(framework)
            self._agent = library.COSAgentRequirer(self, is_tracing_ready=lambda: False)
            framework.observe(self._agent.on.data_changed, self._on_data_changed)
            framework.observe(self._agent.on.validation_error, self._on_validation_error)

        def _on_data_changed(self, _: ops.EventBase) -> None:
            seen.update(jobs=self._agent.metrics_jobs, alerts=self._agent.metrics_alerts)
            seen.update(dashboards=self._agent.dashboards)

        def _on_validation_error(self, event: Any) -> None:
            raise AssertionError(event.message)

    context = testing.Context(Collector, meta=META)
    relation = testing.SubordinateRelation("cos-agent", remote_app_name="trainer", remote_unit_data=data)
    relations = [relation, testing.PeerRelation("peers")]
    context.run(context.on.relation_changed(relation, remote_unit=0), testing.State(leader=True, relations=relations))
    (job,) = seen["jobs"]
    (target,) = job["static_configs"]
    assert (job["job_name"], target["targets"]) == ("trainer_runs", ["localhost:9701"])
    assert (target["labels"]["juju_unit"], target["labels"]["instance"]) == ("trainer/0", "juju-1")
    (rules,) = seen["alerts"].values()
    assert rules["groups"][0]["rules"][0]["labels"]["juju_application"] == "trainer"
    assert [one["title"] for one in seen["dashboards"]] == ["Runs"]
    assert seen["dashboards"][0]["content"]["tags"] == ["charm: ddp-trainer"]

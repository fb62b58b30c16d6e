"""The collector's own library reads what our charms publish over cos_agent: jobs, alerts, dashboards."""

import importlib.util
import pathlib
import types
from typing import Any

import checkout
import ops
import pytest
from ops import testing

from scripts import pack
from slurm_ddp.interfaces import cos_agent

UUID = "d28c42cc-6e8e-4f1e-8a3c-3f3b0b1f6f5e"
META = {
    "name": "collector",
    "requires": {"cos-agent": {"interface": "cos_agent", "scope": "container"}},
    "peers": {"peers": {"interface": "otelcol_replica"}},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pydantic's, about the library
@pytest.mark.parametrize(
    "charm", ["ddp-trainer", "shared-filesystem-client", "slurm-gpu", "juicefs-server-proxy"]
)
def test_the_collectors_library_reads_what_each_charm_publishes(charm: str, tmp_path: pathlib.Path):
    path = (
        checkout.folder("opentelemetry-collector-operator")
        / "lib/charms/grafana_agent/v0/cos_agent.py"
    )
    spec = importlib.util.spec_from_file_location(
        "real_cos_agent", path
    )  # the name itself is the charms' stub here
    assert spec is not None and spec.loader is not None
    library: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    pack.stage(charm, tmp_path)
    source = tmp_path / "src" / "cos"
    data = cos_agent.dump(
        cos_agent.Topology("hpc", UUID, "app", charm),
        [cos_agent.Job("runs", 9701, "juju-1")],
        source,
    )
    seen: dict[str, Any] = {}

    class Collector(ops.CharmBase):
        def __init__(self, framework: ops.Framework) -> None:
            super().__init__(framework)
            self.tracing = types.SimpleNamespace(is_ready=lambda: False)  # the library reads this
            self._agent = library.COSAgentRequirer(self)
            framework.observe(self._agent.on.data_changed, self._on_data_changed)
            framework.observe(self._agent.on.validation_error, self._on_validation_error)

        def _on_data_changed(self, _: ops.EventBase) -> None:
            agent = self._agent
            seen.update(
                jobs=agent.metrics_jobs, alerts=agent.metrics_alerts, dashboards=agent.dashboards
            )

        def _on_validation_error(self, event: Any) -> None:
            raise AssertionError(event.message)

    context = testing.Context(Collector, meta=META)
    relation = testing.SubordinateRelation(
        "cos-agent", remote_app_name="app", remote_unit_data=data
    )
    state = testing.State(leader=True, relations=[relation, testing.PeerRelation("peers")])
    context.run(context.on.relation_changed(relation, remote_unit=0), state)
    (job,) = seen["jobs"]
    (target,) = job["static_configs"]
    assert (job["job_name"], target["targets"]) == ("app_runs", ["localhost:9701"])
    assert (target["labels"]["juju_unit"], target["labels"]["instance"]) == ("app/0", "juju-1")
    rules = [
        rule
        for groups in seen["alerts"].values()
        for group in groups["groups"]
        for rule in group["rules"]
    ]
    assert rules and all(rule["labels"]["juju_application"] == "app" for rule in rules)
    assert len(seen["dashboards"]) == len(list(source.glob("dashboards/*.json"))) > 0

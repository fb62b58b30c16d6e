"""The endpoint cos-agent: metrics of the unit's roles while a collector is related."""

import ops

import metrics
from relations.gres import COMPUTE, CONTROLLER, relations
from slurm_ddp import exporter
from slurm_ddp.interfaces import cos_agent


class Collector(ops.Object):
    """Serves and publishes the unit's metrics, beside whatever else the charm does with an event."""

    def __init__(self, charm: ops.CharmBase) -> None:
        super().__init__(charm, cos_agent.ENDPOINT)
        self._charm = charm
        on = charm.on
        for event in (*exporter.events(on), on.start, on.config_changed, on.upgrade_charm, on.update_status):
            self.framework.observe(event, self._follow)
        for event in (on.stop, on.remove, on[COMPUTE].relation_broken, on[CONTROLLER].relation_broken):
            self.framework.observe(event, self._leave)

    def _follow(self, _: ops.EventBase) -> None:
        exporter.follow(self._charm, self._serve)

    def _serve(self, unit: str, topology: cos_agent.Topology) -> dict[str, str]:
        compute, controller = (bool(relations(self.model, endpoint)) for endpoint in (COMPUTE, CONTROLLER))
        xids = str(self._charm.config["health-xids"])
        return metrics.ensure(unit, topology, compute=compute, controller=controller, xids=xids)

    def _leave(self, _: ops.EventBase) -> None:
        exporter.ensure_none(self._charm.unit.name)

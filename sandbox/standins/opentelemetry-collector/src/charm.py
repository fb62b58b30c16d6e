"""Plays Canonical's opentelemetry-collector 2 with Debian's Prometheus, as far as the endpoint cos-agent goes."""

import base64
import json
import lzma
import typing

import ops
import prometheus
from common import charm

_ENDPOINT = "cos-agent"
_KEY = "config"
# The fields of upstream's CosAgentProviderUnitData, with their types; further keys are ignored
_FIELDS = {
    "metrics_alert_rules": dict,
    "log_alert_rules": dict,
    "dashboards": list,
    "metrics_scrape_jobs": list,
    "log_slots": list,
}

Json = dict[str, typing.Any]


class CollectorCharm(charm.Standin):
    """The collector."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        relation = self.on[_ENDPOINT]
        for event in (
            self.on.start,
            self.on.config_changed,
            self.on.update_status,
            self.on.upgrade_charm,
            relation.relation_joined,
            relation.relation_changed,
            relation.relation_departed,
            relation.relation_broken,
        ):
            framework.observe(event, self._reconcile)
        framework.observe(self.on.install, self._on_install)
        framework.observe(self.on.stop, self._on_end)
        framework.observe(self.on.remove, self._on_end)

    @charm.refreshes
    def _on_install(self, _: ops.InstallEvent) -> None:
        self.unit.status = ops.MaintenanceStatus("installing Prometheus")
        prometheus.install()

    @charm.refreshes
    def _reconcile(self, event: ops.EventBase) -> None:
        departing = event.departing_unit if isinstance(event, ops.RelationDepartedEvent) else None
        published: list[prometheus.Published] = []
        for relation in self.model.relations[_ENDPOINT]:
            units = [unit for unit in relation.units if unit != departing] if relation.active else []
            if len(units) > 1:
                raise ValueError(f"unexpected error: subordinate relation {relation} should have exactly one unit")
            published += [found for unit in units if (found := self._read(relation, unit)) is not None]
        try:
            prometheus.apply(sorted(published, key=lambda one: one.unit))
        except prometheus.RefusedError as e:
            raise charm.Stop(ops.BlockedStatus(str(e))) from e

    def _on_end(self, _: ops.EventBase) -> None:
        prometheus.remove()

    def check(self) -> ops.StatusBase:
        """Return the status of a collector that took what it got."""
        return ops.ActiveStatus()

    def _read(self, relation: ops.Relation, unit: ops.Unit) -> prometheus.Published | None:
        """Read what a unit published, as strictly as upstream's model. Raises Stop."""
        raw = relation.data[unit].get(_KEY)
        if not raw:
            return None
        try:
            config: Json = json.loads(raw)
            for name, kind in _FIELDS.items():
                if not isinstance(config[name], kind):
                    raise TypeError(f"{name} is no {kind.__name__}")
            dashboards = [json.loads(lzma.decompress(base64.b64decode(text))) for text in config["dashboards"]]
            for dashboard in dashboards:
                dashboard["title"]
        except (ValueError, KeyError, TypeError, lzma.LZMAError) as e:
            raise charm.Stop(ops.BlockedStatus(f"{unit.name} published an invalid config: {e!r:.200}")) from e
        labels = {
            "juju_model": self.model.name,
            "juju_model_uuid": self.model.uuid,
            "juju_application": unit.app.name,
            "juju_unit": unit.name,
        }
        for job in config["metrics_scrape_jobs"]:
            for target in job.get("static_configs", []):
                target["labels"] = target.get("labels", {}) | labels
        return prometheus.Published(
            unit.name, config["metrics_scrape_jobs"], config["metrics_alert_rules"] or {"groups": []}, dashboards
        )


if __name__ == "__main__":
    ops.main(CollectorCharm)

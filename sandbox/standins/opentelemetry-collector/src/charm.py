"""Play the endpoint cos-agent of Canonical's opentelemetry-collector 2 with Debian's Prometheus."""

import base64
import collections.abc
import dataclasses
import json
import lzma
import pathlib
import shutil
import typing

import ops
import yaml
from common import charm

from slurm_ddp import apt, files
from slurm_ddp.commands import CommandError, run

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

_SERVICE = "prometheus.service"
_PORT = 9090  # on the loopback
_ETC = pathlib.Path("/etc/prometheus")
_DEFAULTS = pathlib.Path("/etc/default/prometheus")
_DASHBOARDS = pathlib.Path("/var/lib/opentelemetry-collector/dashboards")
_RULES = _ETC / "rules"
_SYSTEMCTL, _PROMTOOL = "/usr/bin/systemctl", "/usr/bin/promtool"
_SCRAPE_S = 8  # more than the 7 s that an exporter of ours takes at most

Json = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Published:
    """What one unit published."""

    unit: str
    jobs: list[Json]
    rules: Json
    dashboards: list[Json]


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
        run(_SYSTEMCTL, "mask", _SERVICE)  # the package would start it on all addresses
        apt.ensure_packages(["prometheus"])
        run(_SYSTEMCTL, "unmask", _SERVICE)
        files.ensure_file(_DEFAULTS, f'ARGS="--web.listen-address=127.0.0.1:{_PORT}"\n')

    @charm.refreshes
    def _reconcile(self, event: ops.EventBase) -> None:
        departing = event.departing_unit if isinstance(event, ops.RelationDepartedEvent) else None
        published: list[Published] = []
        for relation in self.model.relations[_ENDPOINT]:
            units = (
                [unit for unit in relation.units if unit != departing] if relation.active else []
            )
            if len(units) > 1:
                raise ValueError(
                    f"unexpected error: subordinate relation {relation} should have exactly one unit"
                )
            published += [
                found for unit in units if (found := self._read(relation, unit)) is not None
            ]
        try:
            _apply(sorted(published, key=lambda one: one.unit))
        except CommandError as e:
            raise charm.Stop(ops.BlockedStatus(str(e))) from e

    def _on_end(self, _: ops.EventBase) -> None:
        run(_SYSTEMCTL, "disable", "--now", _SERVICE, check=False)
        for folder in (_RULES, _DASHBOARDS):
            shutil.rmtree(folder, ignore_errors=True)

    def check(self) -> ops.StatusBase:
        """Return active: the collector accepted all data."""
        return ops.ActiveStatus()

    def _read(self, relation: ops.Relation, unit: ops.Unit) -> Published | None:
        """Read a unit's published data, as strictly as upstream's model. Raises Stop."""
        raw = relation.data[unit].get(_KEY)
        if not raw:
            return None
        try:
            config: Json = json.loads(raw)
            for name, kind in _FIELDS.items():
                if not isinstance(config[name], kind):
                    raise TypeError(f"{name} is not a {kind.__name__}")
            dashboards = [
                json.loads(lzma.decompress(base64.b64decode(text))) for text in config["dashboards"]
            ]
            for dashboard in dashboards:
                dashboard["title"]
        except (ValueError, KeyError, TypeError, lzma.LZMAError) as e:
            raise charm.Stop(
                ops.BlockedStatus(f"{unit.name} published an invalid config: {e!r:.200}")
            ) from e
        labels = {
            "juju_model": self.model.name,
            "juju_model_uuid": self.model.uuid,
            "juju_application": unit.app.name,
            "juju_unit": unit.name,
        }
        for job in config["metrics_scrape_jobs"]:
            for target in job.get("static_configs", []):
                target["labels"] = target.get("labels", {}) | labels
        return Published(
            unit.name,
            config["metrics_scrape_jobs"],
            config["metrics_alert_rules"] or {"groups": []},
            dashboards,
        )


def _apply(published: collections.abc.Sequence[Published]) -> None:
    """Scrape, evaluate and keep exactly what these units published. Raises CommandError."""
    wanted = {
        _RULES / f"{_file(one.unit)}.yaml": yaml.safe_dump(one.rules)
        for one in published
        if one.rules["groups"]
    }
    shown = {
        _DASHBOARDS / f"{_file(one.unit)}-{number}.json": json.dumps(dashboard)
        for one in published
        for number, dashboard in enumerate(one.dashboards)
    }
    for folder, texts in ((_RULES, wanted), (_DASHBOARDS, shown)):
        for path in set(folder.glob("*")) - set(texts):
            path.unlink()
        for path, text in texts.items():
            files.ensure_file(path, text)
    config = {
        "global": {
            "scrape_interval": f"{_SCRAPE_S}s",
            "scrape_timeout": f"{_SCRAPE_S}s",
            "evaluation_interval": f"{_SCRAPE_S}s",
        },
        "rule_files": [f"{_RULES}/*.yaml"],
        "scrape_configs": [job for one in published for job in one.jobs],
    }
    files.ensure_file(_ETC / "prometheus.yml", yaml.safe_dump(config))
    run(_PROMTOOL, "check", "config", _ETC / "prometheus.yml")
    run(_SYSTEMCTL, "enable", _SERVICE)
    run(_SYSTEMCTL, "reload-or-restart", _SERVICE)


def _file(unit: str) -> str:
    return unit.replace("/", "-")


if __name__ == "__main__":
    ops.main(CollectorCharm)

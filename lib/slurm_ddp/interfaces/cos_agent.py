"""`cos_agent`: a charm hands its metrics, alerts and dashboards to the collector on its machine.

The wire format is that of the library cos_agent (LIBAPI 0, LIBPATCH 26) of
canonical/grafana-agent-operator, which opentelemetry-collector reads, too: the key `config` of the
provider's unit databag, one JSON object. The collector adds the labels juju_model, juju_model_uuid,
juju_application and juju_unit to each scrape job.
"""

import base64
import collections.abc
import dataclasses
import hashlib
import json
import lzma
import pathlib
import typing

import yaml

ENDPOINT = "cos-agent"
KEY = "config"
PLACEHOLDER = "%%juju_topology%%"  # in an alert's expression: label matchers for the application

Json = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Topology:
    """The source of the metrics, by Juju's names."""

    model: str
    model_uuid: str
    application: str
    charm: str

    def labels(self) -> dict[str, str]:
        """Return the labels of the application's alerts."""
        return {f"juju_{name}": value for name, value in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class Job:
    """One endpoint on this machine that is scraped."""

    name: str
    port: int
    instance: str  # the machine's name: the target, localhost, is the same on all


def dump(
    topology: Topology, jobs: collections.abc.Iterable[Job], folder: pathlib.Path
) -> dict[str, str]:
    """Return the unit databag: the jobs, the rules in `folder`/alerts, and the dashboards."""
    config: Json = {
        "metrics_alert_rules": {
            "groups": [_group(topology, group) for group in _groups(folder / "alerts")]
        },
        "log_alert_rules": {},
        "dashboards": [
            _dashboard(topology, path) for path in sorted((folder / "dashboards").glob("*.json"))
        ],
        "metrics_scrape_jobs": sorted(
            (_scrape(topology, job) for job in jobs), key=lambda job: job["job_name"]
        ),
        "log_slots": [],
    }
    return {KEY: json.dumps(config, sort_keys=True)}


def _groups(folder: pathlib.Path) -> collections.abc.Iterator[Json]:
    for path in sorted(folder.glob("*.yaml")):
        yield from yaml.safe_load(path.read_text())["groups"]


def _group(topology: Topology, group: Json) -> Json:
    """Name the group after the application, whose labels each rule gets."""
    name = "_".join((topology.model, topology.model_uuid[:8], topology.application, group["name"]))
    labels = topology.labels()
    matchers = ", ".join(
        f'{label}="{value}"' for label, value in labels.items() if label != "juju_charm"
    )
    rules = [
        rule
        | {
            "expr": rule["expr"].replace(PLACEHOLDER, matchers),
            "labels": rule.get("labels", {}) | labels,
        }
        for rule in group["rules"]
    ]
    return group | {"name": name, "rules": rules}


def _dashboard(topology: Topology, path: pathlib.Path) -> str:
    """Pack the dashboard; its uid is the same from every unit and application of the charm."""
    content: Json = json.loads(path.read_text())
    if not content.get("uid"):
        name = f"{topology.charm}/{path.name}"
        content["uid"] = hashlib.sha256(name.encode()).hexdigest()[:40]
    content["tags"] = [*content.get("tags", []), f"charm: {topology.charm}"]
    packed = lzma.compress(json.dumps(content).encode())
    return base64.b64encode(packed).decode()


def _scrape(topology: Topology, job: Job) -> Json:
    return {
        "job_name": f"{topology.application}_{job.name}",
        "metrics_path": "/metrics",
        "static_configs": [
            {"targets": [f"localhost:{job.port}"], "labels": {"instance": job.instance}}
        ],
    }

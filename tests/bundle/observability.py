"""The metrics of the charms by name and labels; tests of alerts, dashboards and pages take them from here."""

import pathlib
from typing import Any

import yaml
from deployments import ROOT

PLACEHOLDER = "%%juju_topology%%"  # the collector's side replaces it with the application's labels
TOPOLOGY = {
    "juju_model": "training",
    "juju_model_uuid": "6e9d",
    "juju_application": "app",
    "juju_unit": "app/0",
}
CHARMS = sorted(path.parent.name for path in (ROOT / "charms").glob("*/charmcraft.yaml"))

METRICS: dict[str, dict[str, list[str]]] = yaml.safe_load(
    pathlib.Path(__file__).with_name("metrics.yaml").read_text()
)
NAMES = {
    f"slurm_ddp_{name}": labels for metrics in METRICS.values() for name, labels in metrics.items()
}


def files(charm: str, kind: str) -> list[pathlib.Path]:
    """List the files of a charm of one kind, such as alerts."""
    return sorted((ROOT / "charms" / charm / "src" / "cos" / kind).glob("*.*"))


def alerts() -> list[tuple[str, dict[str, Any]]]:
    """Return (charm, rule) of every alert."""
    return [
        (charm, rule)
        for charm in CHARMS
        for path in files(charm, "alerts")
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def matchers() -> str:
    return ",".join(f'{name}="{value}"' for name, value in TOPOLOGY.items() if name != "juju_unit")

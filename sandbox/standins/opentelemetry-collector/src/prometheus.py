"""Debian's Prometheus on this machine: what it scrapes, its rules, and the dashboards kept beside them."""

import collections.abc
import dataclasses
import json
import pathlib
import shutil
import typing

import yaml

from slurm_ddp import apt, files
from slurm_ddp.run import CommandError, run

SERVICE = "prometheus.service"
PORT = 9090  # on the loopback
ETC = pathlib.Path("/etc/prometheus")
DEFAULTS = pathlib.Path("/etc/default/prometheus")
DASHBOARDS = pathlib.Path("/var/lib/opentelemetry-collector/dashboards")
_RULES = ETC / "rules"
_SYSTEMCTL, _PROMTOOL = "/usr/bin/systemctl", "/usr/bin/promtool"
_SCRAPE_S = 8  # more than the 7 s that an exporter of ours takes at most

Json = dict[str, typing.Any]


class RefusedError(Exception):
    """Prometheus does not take what a charm published. `str()` is one line."""


@dataclasses.dataclass(frozen=True)
class Published:
    """What one unit published."""

    unit: str
    jobs: list[Json]
    rules: Json
    dashboards: list[Json]


def install() -> None:
    """Install Prometheus, which listens on the loopback only."""
    run(_SYSTEMCTL, "mask", SERVICE)  # the package would start it on all addresses
    apt.ensure_packages(["prometheus"])
    run(_SYSTEMCTL, "unmask", SERVICE)
    files.ensure_file(DEFAULTS, f'ARGS="--web.listen-address=127.0.0.1:{PORT}"\n')


def apply(published: collections.abc.Sequence[Published]) -> None:
    """Scrape, evaluate and keep exactly what these units published. Raises RefusedError."""
    wanted = {_RULES / f"{_file(one.unit)}.yaml": yaml.safe_dump(one.rules) for one in published if one.rules["groups"]}
    shown = {
        DASHBOARDS / f"{_file(one.unit)}-{number}.json": json.dumps(dashboard)
        for one in published
        for number, dashboard in enumerate(one.dashboards)
    }
    for folder, texts in ((_RULES, wanted), (DASHBOARDS, shown)):
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
    files.ensure_file(ETC / "prometheus.yml", yaml.safe_dump(config))
    try:
        run(_PROMTOOL, "check", "config", ETC / "prometheus.yml")
        run(_SYSTEMCTL, "enable", SERVICE)
        run(_SYSTEMCTL, "reload-or-restart", SERVICE)
    except CommandError as e:
        raise RefusedError(str(e)) from e


def remove() -> None:
    """Stop Prometheus, and remove what was kept."""
    run(_SYSTEMCTL, "disable", "--now", SERVICE, check=False)
    for folder in (_RULES, DASHBOARDS):
        shutil.rmtree(folder, ignore_errors=True)


def _file(unit: str) -> str:
    return unit.replace("/", "-")

"""Upstream's checkouts: their places, and their charms and modules, loaded only from there.

Charmhub's parts that are packed into the charms, and modules that only Ubuntu's packages bring, are
in no checkout and in no package index. Each has a strict stub here: it takes the arguments that
upstream's charms pass, refuses others, does nothing.
"""

import collections.abc
import importlib
import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import ops
import yaml
from ops import testing

ROOT = pathlib.Path(__file__).resolve().parents[2]
FACTS: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "bundle" / "upstream.yaml").read_text())
VARIABLE = "SLURM_DDP_UPSTREAM"
SLURM = os.environ.get("SLURM_DDP_UPSTREAM_SLURM", "slurm-charms")  # which checkout is under test
IS_MAIN = SLURM == "slurm-charms-main"
CHECKOUTS = [name for name in FACTS["checkouts"] if name == SLURM or "slurm-charms" not in name]


def folder(name: str) -> pathlib.Path:
    """Return the checkout of that name in tests/bundle/upstream.yaml."""
    return pathlib.Path(os.environ[VARIABLE]).resolve() / name


def commit(name: str) -> str:
    """Return the commit that is checked out."""
    command = ["git", "-c", "safe.directory=*", "-C", str(folder(name)), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def charm_folder(name: str) -> pathlib.Path:
    """Return the folder of one of upstream's charms, in the checkout that has it."""
    found = [
        path for checkout in CHECKOUTS if (path := folder(checkout) / "charms" / name).is_dir()
    ]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def load(name: str) -> types.ModuleType:
    """Return the module `charm` of one of upstream's charms.

    All of them have modules called charm, config and state: the previous charm's are forgotten
    first. It keeps working, since it holds its imports.
    """
    source = charm_folder(name) / "src"
    for path in source.iterdir():
        for module in [module for module in sys.modules if module.partition(".")[0] == path.stem]:
            del sys.modules[module]
    sys.path.insert(0, str(source))
    try:
        return importlib.import_module("charm")
    finally:
        sys.path.remove(str(source))


def context(name: str, charm: type[Any]) -> testing.Context[Any]:
    """Return a context for one of upstream's charms, declared by its charmcraft.yaml."""
    declared = yaml.safe_load((charm_folder(name) / "charmcraft.yaml").read_text())
    config, actions = declared.pop("config", None), declared.pop("actions", None)
    return testing.Context(charm, meta=declared, config=config, actions=actions, app_name=name)


def install() -> None:
    """Make the checkouts' own packages importable, and stub the missing modules."""
    sys.path[:0] = [str(path) for path in sorted(folder(SLURM).glob("[ip][nk][tg]*/*/src"))]
    charms = types.ModuleType("charms")
    charms.__path__ = [str(charm_folder("filesystem-client") / "lib" / "charms")]
    sys.modules["charms"] = charms
    for name, members in _STUBS.items():
        *parents, _ = name.split(".")
        for count in range(1, len(parents) + 1):
            package = sys.modules.setdefault(
                ".".join(parents[:count]), types.ModuleType(".".join(parents[:count]))
            )
            package.__path__ = getattr(package, "__path__", [])
        module = types.ModuleType(name)
        vars(module).update({member.__name__: member for member in members})
        sys.modules[name] = module
        if parents:
            setattr(sys.modules[".".join(parents)], name.rpartition(".")[2], module)


class COSAgentProvider(ops.Object):
    """grafana_agent.cos_agent: what slurmctld shows to a collector."""

    def __init__(
        self,
        charm: ops.CharmBase,
        *,
        metrics_endpoints: list[dict[str, object]],
        metrics_rules_dir: str,
        dashboard_dirs: list[str],
        recurse_rules_dirs: bool,
    ) -> None:
        super().__init__(charm, "cos-agent")


class MetricsEndpointProvider(ops.Object):
    """prometheus_k8s.prometheus_scrape: what slurmd and sackd show to Prometheus."""

    def __init__(
        self,
        charm: ops.CharmBase,
        relation_name: str,
        *,
        alert_rules_path: str,
        jobs: list[dict[str, object]],
    ) -> None:
        super().__init__(charm, relation_name)


class SmtpDataAvailableEvent(ops.RelationEvent):
    """smtp_integrator.smtp: never emitted here."""


class _SmtpEvents(ops.ObjectEvents):
    smtp_data_available = ops.EventSource(SmtpDataAvailableEvent)


class SmtpRequires(ops.Object):
    """smtp_integrator.smtp: slurmctld's mail."""

    on = _SmtpEvents()  # pyright: ignore[reportAssignmentType]

    def __init__(self, charm: ops.CharmBase) -> None:
        super().__init__(charm, "smtp")


def init() -> None:
    """python-apt's apt_pkg."""


def system_gpgpu_driver_packages() -> dict[str, dict[str, object]]:
    """ubuntu-drivers-common's detect, on a machine without a known driver."""
    return {}


_Members = collections.abc.Sequence[Any]
_STUBS: dict[str, _Members] = {
    "charms.grafana_agent.v0.cos_agent": [COSAgentProvider],
    "charms.prometheus_k8s.v0.prometheus_scrape": [MetricsEndpointProvider],
    "charms.smtp_integrator.v0.smtp": [SmtpDataAvailableEvent, SmtpRequires],
    "apt_pkg": [init],
    "UbuntuDrivers.detect": [system_gpgpu_driver_packages],
}

"""The metrics of a node's GPUs and of the controller's gres.conf.

The cards' own figures are DCGM's exporter's.
"""

import collections
import collections.abc
import contextlib
import pathlib
import socket
import typing

from prometheus_client import core

from controller import gres_lines
from gpu import detect, gres, gres_conf
from gpu import xids as gpu_xids
from node import health, kept, orders, slurmd_options
from slurm_ddp import exporter, records, systemd
from slurm_ddp.commands import CommandError
from slurm_ddp.exporter import counter, gauge
from slurm_ddp.interfaces import cos_agent
from slurm_ddp.slurm import nodes

_LOG_S = 6.0
# Why a node is held, by the kind of the hold, which its reason begins with
_REASONS = {
    kept.HEALTH: "health",
    kept.CHECK: "check",
    kept.DRIVER: "driver",
    kept.MIG: "mig",
    kept.RESET: "reset",
}


def ensure(
    unit: str, topology: cos_agent.Topology, roles: dict[str, bool], xids: str
) -> dict[str, str]:
    """Serve the metrics of the unit's roles; return its databag of the relation.

    Raises CommandError.
    """
    program = pathlib.Path(__file__).resolve()
    port = exporter.ensure(unit, program, {**roles, "xids": xids})
    return cos_agent.dump(
        topology, [cos_agent.Job("gpu", port, socket.gethostname())], program.parent / "cos"
    )


def sources(settings: dict[str, typing.Any]) -> list[exporter.Source]:
    """List the sources of a scrape."""
    found = [exporter.Source("controller", controller_lines)] if settings["controller"] else []
    if settings["compute"]:
        log = exporter.Source("gpu_log", lambda: xids(settings["xids"]))
        found += [exporter.Source("gpu", cards), log, exporter.Source("node", holds)]
    return found


def cards() -> collections.abc.Iterator[core.Metric]:
    """Return how the registered GPUs compare with those here, and the last health check."""
    options = slurmd_options.read()
    items = nodes.gres_items(options.gres if options else None).items()
    expected = {kind or name: count for (name, kind), count in items if name == "gpu"}
    found = detect.detect()
    detected: collections.Counter[str] = collections.Counter()
    for gpu in found.gpus if found.is_usable else ():
        model = gpu.name or "gpu"
        types = [gres.slurm_type(f"{model}_{instance.profile}") for instance in gpu.instances]
        detected.update(types or [gres.slurm_type(model)])
    if set(expected) == {"gpu"}:  # registered without types
        detected = collections.Counter({"gpu": detected.total()})
    for kind in expected:
        detected[kind] += 0  # keep a type that has no card left
    yield gauge("gpus_expected", "GPUs that the node registers with Slurm.", _by("type", expected))
    yield gauge("gpus_detected", "GPUs that work on the machine.", _by("type", detected))
    if health.STATE.exists():
        state = records.read(health.State, health.STATE)
        yield gauge(
            "gpu_health_ok",
            "Whether the last check found the GPUs fit for jobs.",
            [({}, not state.reason)],
        )
        text = "When the GPUs were checked last."
        yield gauge(
            "gpu_health_check_timestamp_seconds", text, [({}, health.STATE.stat().st_mtime)]
        )


def xids(option: str) -> collections.abc.Iterator[core.Metric]:
    """Count the Xids of this boot by their level under the option health-xids."""
    levels: dict[int, str] = {}
    with contextlib.suppress(ValueError):  # the unit's status names an option that cannot be read
        levels = gpu_xids.parse(option)
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for line in gpu_xids.logged("cat", timeout=_LOG_S):
        match = gpu_xids.LINE.search(line)
        finding = gpu_xids.judge(line, levels)
        if match or finding:
            xid = match[2] if match else "unknown"
            found[xid, finding.level if finding else "none"] += 1
    samples = [
        ({"xid": xid, "level": level}, float(count))
        for (xid, level), count in sorted(found.items())
    ]
    yield counter("gpu_xid_errors_total", "Xid errors since the machine's boot.", samples)


def holds() -> collections.abc.Iterator[core.Metric]:
    """Report why jobs are kept from the node. Raises NodeError or OptionsError."""
    held = {_REASONS[one.kind] for one in kept.grounds() if one.kind in _REASONS}
    options = slurmd_options.read()
    node = nodes.show(options.node) if options and options.node else None
    if node is not None and node.is_drained:
        held.add(_why(node))
    values = {
        reason: float(reason in held)
        for reason in (*_REASONS.values(), "registration", "administrator")
    }
    yield gauge(
        "node_held",
        "Whether the node is kept from new jobs for this reason.",
        _by("reason", values),
    )


def controller_lines() -> collections.abc.Iterator[core.Metric]:
    """Count the nodes in gres.conf. Raises CommandError while slurmctld does not run."""
    if not systemd.is_active(gres_lines.SLURMCTLD):
        raise CommandError(f"{gres_lines.SLURMCTLD} does not run")
    num_nodes, _ = gres_lines.counts(gres_conf.read(gres_conf.PATH))
    yield gauge("controller_gres_nodes", "Nodes whose lines are in gres.conf.", [({}, num_nodes)])


def _why(node: nodes.Node) -> str:
    reason = node.reason or ""
    for kind, why in _REASONS.items():
        if reason.startswith(f"{kind}:"):
            return why
    # A drain of shared-filesystem-client's, which has its own metric
    if reason.startswith("mount-keeper "):
        return ""
    return "administrator" if orders.is_anothers(node, None) else "registration"


def _by(
    label: str, values: collections.abc.Mapping[str, float]
) -> list[tuple[dict[str, str], float]]:
    return [({label: key}, value) for key, value in sorted(values.items())]


if __name__ == "__main__":  # pragma: no cover
    exporter.serve(sources)

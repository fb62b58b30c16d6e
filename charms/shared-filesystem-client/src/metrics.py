"""The metrics of the mount: the keeper's last result, and the filesystem's usage."""

import collections.abc
import contextlib
import pathlib
import socket
import typing

from prometheus_client import core

import mount_plan
from mount import states
from scripts import keeper
from slurm_ddp import exporter, records
from slurm_ddp.commands import CommandError, run
from slurm_ddp.exporter import counter, gauge
from slurm_ddp.interfaces import cos_agent

_STAT_S = 3.0
_KINDS = {"fuse.juicefs": "juicefs", "nfs4": "nfs", "ceph": "cephfs", "fuse.ceph-fuse": "cephfs"}


def ensure(unit: str, topology: cos_agent.Topology) -> dict[str, str]:
    """Serve the unit's metrics; return its databag of the relation. Raises CommandError."""
    app, host = topology.application, socket.gethostname()
    port = exporter.ensure(unit, pathlib.Path(__file__).resolve(), {"app": app})
    jobs = [cos_agent.Job("mount", port, host)]
    state = states.load(app)
    if state is not None and state.port:
        jobs.append(cos_agent.Job("juicefs", state.port, host))  # the client's own metrics
    return cos_agent.dump(topology, jobs, pathlib.Path(__file__).resolve().parent / "cos")


def sources(settings: dict[str, typing.Any]) -> list[exporter.Source]:
    """List the sources of a scrape."""
    return [exporter.Source("mount", lambda: read(settings["app"]))]


def read(app: str) -> collections.abc.Iterator[core.Metric]:
    """Read the application's mount, if there is one. Raises OSError or ValueError."""
    folder = mount_plan.STATE / app
    if not (folder / keeper.WATCH).exists():
        return
    watch = records.read(keeper.Watch, folder / keeper.WATCH)
    health = records.load(keeper.Health(), folder / keeper.HEALTH)
    labels = {
        "mountpoint": watch.mountpoint,
        "kind": _KINDS.get(watch.fstypes[0], watch.fstypes[0]),
    }
    yield gauge("mount_healthy", "Whether the mount works.", [(labels, float(health.works))])
    for name, text, value in (
        ("mount_state_timestamp_seconds", "Since when the mount works, or does not.", health.since),
        ("mount_probe_timestamp_seconds", "When the mount was probed last.", health.checked),
        ("mount_probe_duration_seconds", "How long the last probe took.", health.took),
    ):
        yield gauge(name, text, [(labels, value)])
    yield counter("mount_heals_total", "Number of repairs of the mount.", [(labels, health.heals)])
    if health.works:  # else it is the disk under it, or hangs
        with contextlib.suppress(CommandError):
            # In a process that is left behind if it hangs
            found = run("/usr/bin/stat", "-f", "-c", "%b %a %S", watch.mountpoint, timeout=_STAT_S)
            blocks, available, block = map(int, found.stdout.split())
            yield gauge("mount_size_bytes", "Size of the filesystem.", [(labels, blocks * block)])
            yield gauge(
                "mount_available_bytes",
                "Bytes that users can still write.",
                [(labels, available * block)],
            )


if __name__ == "__main__":  # pragma: no cover
    exporter.serve(sources)

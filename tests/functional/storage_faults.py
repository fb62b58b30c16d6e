"""Helpers of storage tests and drills: find a client, query its keeper, await its results."""

import json
import time
import typing

from functional.conftest import Cluster

MP = "/mnt/shared"
APP = "shared-filesystem-client"
PROXY = "juicefs-server-proxy"
HOSTS = ("sackd/0", "slurmd/0", "slurmd/1")
STATE = f"/var/lib/slurm-ddp/{APP}"
ENGINE = f"juicefs-metadata-{PROXY}.service"
# From JuiceFS 1.2 on, the unit's own process is a supervisor, and its newest child answers the
# kernel
CLIENT = f"systemctl show -P MainPID juicefs-{APP}.service"
SERVER = "pgrep -nf '[j]uicefs --no-agent mount'"  # not the shell that asks
PATIENCE_S = 240  # the keeper needs at most half a minute on an idle machine


def client_of(cluster: Cluster, host: str) -> str:
    """Return the unit of the client on a host."""
    return cluster.beside(host, APP)


def workload_status(cluster: Cluster, unit: str) -> dict[str, str]:
    """Return a unit's workload status."""
    return cluster.units()[unit]["workload-status"]


def health(cluster: Cluster, host: str) -> dict[str, typing.Any]:
    """Return the keeper's last result on a host; wait for its first look if necessary."""
    path, end = f"{STATE}/health.json", time.monotonic() + PATIENCE_S
    while not (output := cluster.on(host, "sh", "-c", f"[ ! -e {path} ] || cat {path}")):
        assert time.monotonic() < end, f"{host}: the keeper took no look"
        time.sleep(1)
    return json.loads(output)


def until(
    cluster: Cluster, host: str, wanted: typing.Callable[[dict[str, typing.Any]], object]
) -> dict[str, typing.Any]:
    """Wait until the keeper on a host has the wanted result; return the whole result."""
    end = time.monotonic() + PATIENCE_S
    while True:
        found = health(cluster, host)
        if wanted(found):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.5)


def until_right(cluster: Cluster, *hosts: str, since: float = 0.0) -> None:
    """Wait until the hosts' mounts are right, by a keeper's look after `since`."""
    for host in hosts or HOSTS:
        until(cluster, host, lambda found: found["state"] == "right" and found["checked"] > since)


def writable_again(process: str, old: str) -> str:
    """Return a script that waits until `process` is not `old`, and its mount takes a file."""
    on_it = f"findmnt -rno FSTYPE {MP} | grep -qx fuse.juicefs"  # not the folder below, where root can write too
    found = f'new=$({process}) && [ "$new" != 0 ] && [ "$new" != {old} ]'
    return f"until {found} && {on_it} && echo x 2>/dev/null >{MP}/.after-kill; do sleep 0.1; done"


def mounted(cluster: Cluster, host: str) -> list[str]:
    """Return the type of each mount that lies at the mountpoint."""
    return cluster.on(host, "findmnt", "-rno", "FSTYPE", MP).split()

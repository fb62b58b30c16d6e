"""What the tests and drills of storage faults share: how to find a client, ask its keeper, and wait for what it finds."""

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
CLIENT = "pgrep -of 'juicefs --no-agent mount'"  # the unit's own process, from JuiceFS 1.2 on a supervisor
SERVER = "pgrep -nf '[j]uicefs --no-agent mount'"  # the one that answers the kernel, and not the shell that asks


def client_of(cluster: Cluster, host: str) -> str:
    """Return the unit of the client on a host."""
    status = json.loads(cluster.ok("status", "--format", "json"))
    units = {name: unit for app in status["applications"].values() for name, unit in app.get("units", {}).items()}
    return next(name for name in units[host]["subordinates"] if name.startswith(f"{APP}/"))


def told(cluster: Cluster, unit: str) -> dict[str, str]:
    """Return a unit's workload status."""
    return cluster.units()[unit]["workload-status"]


def health(cluster: Cluster, host: str) -> dict[str, typing.Any]:
    """Return what the keeper on a host found last."""
    return json.loads(cluster.on(host, "cat", f"{STATE}/health.json"))


def until(
    cluster: Cluster, host: str, wanted: typing.Callable[[dict[str, typing.Any]], object]
) -> dict[str, typing.Any]:
    """Wait until the keeper on a host found what is wanted; return all that it found."""
    end = time.monotonic() + 240
    while True:
        found = health(cluster, host)
        if wanted(found):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.5)


def until_right(cluster: Cluster, *hosts: str, since: float = 0.0) -> None:
    """Wait until the mounts of the hosts are right, by a look that the keepers took after `since`."""
    for host in hosts or HOSTS:
        until(cluster, host, lambda found: found["state"] == "right" and found["checked"] > since)


def mounted(cluster: Cluster, host: str) -> list[str]:
    """Return the type of each mount that lies at the mountpoint."""
    return cluster.on(host, "findmnt", "-rno", "FSTYPE", MP).split()

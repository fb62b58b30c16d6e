"""What the tests of several users share: an account on every host, and a command under it."""

import collections.abc
import contextlib

from functional.conftest import Cluster

LOGIN = "sackd/0"
HOSTS = (LOGIN, "slurmd/0", "slurmd/1", "slurmctld/0")  # where a user of the cluster has an account


@contextlib.contextmanager
def account(
    cluster: Cluster, name: str, uid: str, hosts: collections.abc.Sequence[str] = HOSTS
) -> collections.abc.Generator[None]:
    """Make an account on these hosts, and remove it with its home at the end."""
    for host in hosts:
        cluster.on(host, "useradd", "--create-home", "--uid", uid, name)
    try:
        yield
    finally:
        for host in hosts:
            cluster.exec(host, "userdel", "--force", "--remove", name)

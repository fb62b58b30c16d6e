"""A second volume on an external engine and bucket, whose password and keys change during writes.

Two hosts write. Redis and an S3 server run on this machine; the clients are JuiceFS 1.4.1. In the
lane `storage`, which has both:

    tox -e storage -- tests/functional/drill_storage_rotation.py
"""

import dataclasses
import importlib
import json
import pathlib
import time
import typing

import pytest

from functional.conftest import REPOSITORY, Cluster
from storage import servers

pytestmark = pytest.mark.timeout(1500)

MP = "/mnt/rotated"
PROXY, APP = "rotated-proxy", "rotated-client"
HOSTS = ("sackd/0", "slurmd/0")
NEW_PASSWORD = 'n3w@pass:/?#%word "y"'
OVERLAY = """
applications:
  {proxy}:
    charm: ./dist/juicefs-server-proxy.charm
    base: ubuntu@24.04
    num_units: 1
    options: {{metadata-url: "redis://{gateway}:{redis}/1", bucket: "http://{gateway}:{s3}/train", storage-type: minio}}
    resources: {{juicefs: ../build/juicefs/juicefs}}
  {app}:
    charm: ./dist/shared-filesystem-client.charm
    base: ubuntu@24.04
    options: {{mountpoint: {mp}}}
    resources: {{juicefs: ../build/juicefs/juicefs}}
relations:
  - [{app}:filesystem, {proxy}:filesystem]
  - [{app}:juju-info, sackd:juju-info]
  - [{app}:juju-info, slurmd:juju-info]
"""
# Keeps its folder open, so that the mount is always in use; reports a file once it is synced and
# renamed
WRITER = """
mkdir -p {mp}/$(hostname) && cd {mp}/$(hostname) || exit 1
i=0
while [ ! -e /tmp/enough ]; do
    i=$((i + 1))
    head -c 300000 /dev/urandom >/tmp/block
    if dd if=/tmp/block of=$i.new bs=1M conv=fsync status=none && mv $i.new $i; then
        echo "$(sha256sum </tmp/block | cut -d' ' -f1)  $(hostname)/$i" >>/tmp/written
    else
        echo $i >>/tmp/failed
    fi
done
"""


@dataclasses.dataclass(frozen=True)
class Site:
    """The cluster with the second volume, and the servers behind it."""

    cluster: Cluster
    redis: servers.Server
    bucket: servers.Bucket
    scratch: pathlib.Path

    def content(self, password: str, access_key: str, secret_key: str) -> list[str]:
        """Return a secret's content for the command line."""
        path = self.scratch / "password"
        path.write_text(password)
        return [
            f"meta-password#file={path}",
            f"access-key={access_key}",
            f"secret-key={secret_key}",
        ]

    def written(self, host: str) -> int:
        """Return how many files the writer of a host has finished."""
        return int(self.cluster.on(host, "sh", "-c", "cat /tmp/written 2>/dev/null | wc -l"))

    def writes_on(self) -> None:
        """Wait until each writer has finished ten files more."""
        for host in HOSTS:
            enough = self.written(host) + 10
            wait_for(
                lambda host=host, enough=enough: self.written(host) >= enough,
                f"{host} writes no more",
            )

    def environment(self, host: str) -> str:
        """Return the environment that a host's client runs with."""
        script = f"tr '\\0' '\\n' </proc/$(systemctl show -P MainPID juicefs-{APP}.service)/environ"
        return self.cluster.on(host, "sh", "-c", script)

    def revoke_the_first_keys(self) -> None:
        servers.redis_cli(self.redis, "acl", "setuser", "default", f"<{servers.PASSWORD}")
        access_key, secret_key = self.bucket.next_keys
        boto3: typing.Any = importlib.import_module("boto3")  # comes with moto
        iam = boto3.client(
            "iam",
            endpoint_url=f"http://127.0.0.1:{self.bucket.server.port}",
            region_name="us-east-1",
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
        )
        iam.delete_access_key(UserName=servers.USER, AccessKeyId=self.bucket.access_key)


def wait_for(what: typing.Callable[[], object], text: str) -> None:
    end = time.monotonic() + 240
    while not what():
        assert time.monotonic() < end, text
        time.sleep(0.5)


@pytest.fixture
def site(cluster: Cluster, tmp_path: pathlib.Path) -> typing.Iterator[Site]:
    network = json.loads(
        pathlib.Path(f"/var/lib/slurm-ddp/{cluster.model}/network.json").read_text()
    )
    gateway = network["cidr"].rpartition(".")[0] + ".1"
    with servers.redis(bind="0.0.0.0") as redis, servers.s3(bind="0.0.0.0") as bucket:
        found = Site(cluster, redis, bucket, tmp_path)
        overlay = (
            REPOSITORY / "overlays" / ".rotation.yaml"
        )  # with the others: its paths are relative to the folder
        overlay.write_text(
            OVERLAY.format(
                proxy=PROXY,
                app=APP,
                gateway=gateway,
                redis=redis.port,
                s3=bucket.server.port,
                mp=MP,
            )
        )
        try:
            cluster.ok(
                "deploy",
                "--once",
                str(REPOSITORY / "bundle.yaml"),
                "--overlay",
                str(overlay),
                timeout=1200,
            )
        finally:
            overlay.unlink()
        content = found.content(servers.PASSWORD, bucket.access_key, bucket.secret_key)
        secret = cluster.ok("add-secret", "rotated", *content).strip()
        cluster.ok("grant-secret", "rotated", PROXY)
        cluster.ok("config", PROXY, f"credentials={secret}")
        yield found


def test_rotation_under_load_loses_no_write_and_reaches_the_mounts(site: Site):
    cluster, (access_key, secret_key) = site.cluster, site.bucket.next_keys
    for host in HOSTS:
        assert cluster.on(host, "findmnt", "-rno", "FSTYPE", MP) == "fuse.juicefs"
        cluster.on(
            host, "systemd-run", "--quiet", "--unit=writer", "bash", "-c", WRITER.format(mp=MP)
        )
    site.writes_on()
    # Both are valid for a while, as in any rotation without downtime
    servers.redis_cli(site.redis, "acl", "setuser", "default", f">{NEW_PASSWORD}")
    begin = time.monotonic()
    cluster.ok("update-secret", "rotated", *site.content(NEW_PASSWORD, access_key, secret_key))
    print(f"update-secret settled after {time.monotonic() - begin:.1f} s")
    for host in HOSTS:
        assert access_key in cluster.on(host, "cat", f"/etc/slurm-ddp/{APP}/environment")
        assert site.bucket.access_key in site.environment(host)  # it is in use, so it runs on
    statuses = [
        unit["workload-status"]["message"]
        for name, unit in cluster.units().items()
        if name.startswith(APP)
    ]
    assert sum("restart pending" in message for message in statuses) == len(HOSTS), statuses
    site.writes_on()
    for host in HOSTS:
        cluster.on(host, "touch", "/tmp/enough")
    begin = time.monotonic()
    for host in HOSTS:
        wait_for(
            lambda host=host: access_key in site.environment(host), f"{host} keeps the old keys"
        )
    print(f"idle mounts run with the new credentials after {time.monotonic() - begin:.1f} s")
    site.revoke_the_first_keys()
    cluster.ok("update-status")
    for host, other in zip(HOSTS, reversed(HOSTS), strict=True):
        assert cluster.exec(host, "test", "-e", "/tmp/failed").code == 1, "a write failed"
        sums = cluster.on(host, "cat", "/tmp/written")
        cluster.on(
            other,
            "bash",
            "-c",
            f"cat >/tmp/sums <<<'{sums}'; cd {MP} && sha256sum -c --quiet /tmp/sums",
        )
        print(f"{host}: {len(sums.splitlines())} files written, all right as {other} reads them")
        cluster.on(
            host, "sh", "-c", f"echo again >{MP}/again-$(hostname) && sync {MP}/again-$(hostname)"
        )
    states = {name: unit["workload-status"]["current"] for name, unit in cluster.units().items()}
    assert {name for name, state in states.items() if state != "active"} == set()

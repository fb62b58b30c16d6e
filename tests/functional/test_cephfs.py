"""The bundle on an existing CephFS, as in docs/ways/lxd-cephfs.md: the stand-in `ceph` runs it.

If this machine's kernel lacks CephFS, ceph-fuse mounts it.
"""

import json
import pathlib
import re
import time
import typing

import pytest

from functional import training_jobs
from functional.conftest import MODEL, REPOSITORY, Answer, Cluster, deployed, eventually
from functional.storage_faults import APP, HOSTS, MP, health, until, until_right
from functional.test_bundle_runs import check_mounts, check_settled, check_smoke
from functional.test_drills import check_losses_are_the_same, check_run_outlives, kill
from functional.test_observability import value
from storage import leaks

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(2400),
]  # without `trains`: it has a separate deployment
CEPH, NODE = "ceph/0", "slurmd/1"
CLIENT = f"systemctl show -P MainPID cephfs-{APP}.service"
USER = "client.fs-client"


def deploy(one: Cluster, folder: pathlib.Path) -> Answer:
    """Deploy Ceph, fill in the overlay from Ceph's commands, and deploy the bundle with it."""
    (folder / "ceph.yaml").write_text("applications: {ceph: {charm: ceph, num_units: 1}}\n")
    if (answer := one.ctl("deploy", str(folder / "ceph.yaml"), timeout=1200)).code != 0:
        return answer
    monitors = " ".join(re.findall(r"v1:([0-9.:]+)/", one.on(CEPH, "ceph", "mon", "dump")))
    values = {
        "fsid": one.on(CEPH, "ceph", "fsid"),
        "monitor-hosts": monitors,
        "auth-info": f"fs-client:{key(one)}",
    }
    text = (REPOSITORY / "overlays" / "cephfs.yaml").read_text()
    for name, given in values.items():
        text = text.replace(f"{name}: *FILL-IN", f'{name}: "{given}"')
    (folder / "my-cephfs.yaml").write_text(text)
    overlay = ("--overlay", str(folder / "my-cephfs.yaml"))
    return one.ctl("deploy", str(REPOSITORY / "bundle.yaml"), *overlay, timeout=1800)


def key(one: Cluster) -> str:
    return one.on(CEPH, "ceph", "auth", "print-key", USER)


@pytest.fixture(scope="module")
def cephfs(tmp_path_factory: pytest.TempPathFactory) -> typing.Iterator[Cluster]:
    """Deploy the bundle on CephFS in parallel with the other tests' cluster."""
    folder = tmp_path_factory.mktemp("cephfs")
    with deployed(Cluster(f"{MODEL[:4]}ceph"), lambda one: deploy(one, folder)) as one:
        yield one


def test_the_bundle_settles_on_cephfs_and_trains_and_resumes_there(cephfs: Cluster):
    check_settled(cephfs, 16)
    (message,) = {
        unit["workload-status"]["message"]
        for name, unit in cephfs.units().items()
        if name.startswith(APP)
    }
    fsid = cephfs.on(CEPH, "ceph", "fsid")
    assert re.fullmatch(
        rf"fs-client@{fsid}\.cephfs=/ is mounted at {MP} by (ceph-fuse|mount\.ceph)", message
    )
    check_mounts(cephfs, "fuse.ceph-fuse" if message.endswith("ceph-fuse") else "ceph")
    check_smoke(cephfs)
    steps = ("nodes=2", "run=over-ceph", "wait=true")
    for number in (20, 30):  # the second begins at the checkpoint of the first
        result = cephfs.action("submit-ddp", *steps, f"args=--steps {number}", timeout=1200)
        assert result["state"] == "COMPLETED", result
    assert re.search(r"resumed=\S+ step=20 ", cephfs.on("sackd/0", "cat", result["log"]))
    assert len(cephfs.on(CEPH, "rados", "-p", "cephfs_data", "ls").splitlines()) > 100, (
        "its objects are in Ceph"
    )


@pytest.fixture(scope="module")
def drilled(cephfs: Cluster) -> Cluster:
    training_jobs.write_scripts(cephfs)
    return cephfs


def test_a_run_outlives_its_client_on_cephfs(drilled: Cluster):
    began = time.monotonic()
    check_run_outlives(drilled, lambda host: kill(drilled, host, CLIENT))
    print(f"client killed under a run: completed after {time.monotonic() - began:.0f} s")


def test_gpt_outlives_its_client_on_cephfs_and_computes_the_same(drilled: Cluster):
    check_losses_are_the_same(drilled, lambda host: kill(drilled, host, CLIENT), "gpt", nodes=1)


@pytest.mark.parametrize(("daemon", "seconds"), [("ceph-mon@a", 15), ("ceph-mds@a", 40)])
def test_a_run_waits_for_a_daemon_of_ceph_that_is_away(
    drilled: Cluster, daemon: str, seconds: float
):
    """The keeper kills no client for it, since that would lose the job's writes."""
    before = {host: health(drilled, host)["heals"] for host in HOSTS}

    def fault(_host: str) -> None:
        drilled.on(CEPH, "systemctl", "stop", daemon)
        time.sleep(seconds)
        drilled.on(CEPH, "systemctl", "start", daemon)

    check_run_outlives(drilled, fault)
    until_right(drilled)
    assert {host: health(drilled, host)["heals"] for host in HOSTS} == before


def test_a_client_that_ceph_cut_off_is_mounted_again(drilled: Cluster):
    until_right(drilled)
    begin, address = time.time(), drilled.on(NODE, "hostname", "-I").split()[0]
    sessions = json.loads(drilled.on(CEPH, "bash", "-c", "ceph tell mds.a client ls 2>/dev/null"))
    (session,) = [
        one["id"] for one in sessions if f" {address}:" in one["inst"] and one["state"] == "open"
    ]
    drilled.on(CEPH, "ceph", "tell", "mds.a", "client", "evict", f"id={session}")
    until(drilled, NODE, lambda found: found["state"] == "right" and found["healed_at"] > begin)
    print(f"evicted: right again after {time.time() - begin:.0f} s")
    drilled.on(NODE, "sh", "-c", f"echo x >{MP}/.after && rm {MP}/.after")


def test_its_mounts_are_measured_as_any_other(drilled: Cluster, tmp_path: pathlib.Path):
    collector = {"charm": "opentelemetry-collector", "channel": "2/stable", "base": "ubuntu@24.04"}
    (tmp_path / "collector.yaml").write_text(json.dumps({"applications": {"collector": collector}}))
    drilled.ok("deploy", str(tmp_path / "collector.yaml"))
    drilled.ok("integrate", "collector:juju-info", "slurmd:juju-info")
    drilled.ok("integrate", "collector:cos-agent", f"{APP}:cos-agent")

    def is_measured(heals: float) -> None:
        assert value(drilled, NODE, "slurm_ddp_mount_healthy") == 1
        assert value(drilled, NODE, "slurm_ddp_mount_heals_total") == heals

    try:
        until_right(drilled)
        before = health(drilled, NODE)["heals"]
        eventually(lambda: is_measured(before))
        sizes = [
            value(drilled, NODE, f"slurm_ddp_mount_{name}_bytes") for name in ("size", "available")
        ]
        assert sizes[0] >= sizes[1] > 0
        drilled.on(NODE, "mount", "--bind", MP, MP)
        eventually(lambda: is_measured(before + 1))
    finally:
        drilled.ok("remove-application", "--no-prompt", "collector")


def test_a_new_key_reaches_the_clients_and_is_shown_nowhere(cephfs: Cluster):
    until_right(cephfs)
    old, new = key(cephfs), cephfs.on(CEPH, "ceph-authtool", "--gen-print-key")
    entry = cephfs.on(CEPH, "ceph", "auth", "get", USER).replace(old, new)
    cephfs.on(
        CEPH,
        "sh",
        "-c",
        f"echo '{entry}' >/root/new && ceph auth import -i /root/new && rm /root/new",
    )
    begin = time.time()
    cephfs.ok("config", "cephfs-server-proxy", f"auth-info=fs-client:{new}")
    until_right(cephfs, since=begin)
    model = json.loads(
        (pathlib.Path("/var/lib/slurm-ddp") / cephfs.model / "model.json").read_text()
    )
    places = {
        "databags": json.dumps(
            [[one["app_data"], one["unit_data"]] for one in model["relations"].values()]
        )
    }
    places["model"] = cephfs.ok("status", "--format", "json") + cephfs.ok(
        "debug-log", "-n", "100000"
    )
    for host in HOSTS:
        until(cephfs, host, lambda found: found["settled_us"] > 0)
        cephfs.on(host, "sh", "-c", f"echo x >{MP}/.new && rm {MP}/.new")
        found = cephfs.on(
            host, "sh", "-c", f"grep -rlF {new} /etc /run /var | xargs stat -c '%a %U'"
        )
        assert set(found.splitlines()) == {"600 root"}
        seen = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; systemctl cat 'cephfs-*' 'mnt-*'; journalctl --no-pager -o cat"
        places[host] = cephfs.on(host, "bash", "-c", f"({seen}) 2>/dev/null; true")
    assert list(leaks.found_in(places, {"key": new})) == []

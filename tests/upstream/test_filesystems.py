"""filesystem_info and mount_info between upstream's charms and libraries and ours, in both directions."""

import importlib.util
from typing import Any

import checkout
import pytest
import yaml
from ops import testing

from slurm_ddp.interfaces import filesystem_info, mount_info

PEERS = testing.PeerRelation("server-peers", interface="server_peers")
FSID = "354ca7c4-f10d-11ee-93f8-1f85f87b7845"


def published(name: str, charm: str, config: dict[str, Any]) -> tuple[str, testing.State]:
    """Return the URI that one of upstream's proxies writes for a client, and its state."""
    return played(checkout.context(name, getattr(checkout.load(name), charm)), config)


def played(context: testing.Context[Any], config: dict[str, Any]) -> tuple[str, testing.State]:
    relation = testing.Relation("filesystem", interface="filesystem_info", remote_app_name="client")
    state = testing.State(leader=True, config=config, relations={PEERS, relation})
    state = context.run(context.on.config_changed(), state)
    assert state.unit_status == testing.ActiveStatus()
    state = context.run(
        context.on.relation_joined(state.get_relation(relation.id)), state
    )  # it reads its own URI there
    return state.get_relation(relation.id).local_app_data["endpoint"], state


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hostname": "nfs.lab", "path": "/srv"}, filesystem_info.Nfs("nfs.lab", "/srv")),
        (
            {"hostname": "10.0.0.4", "path": "/srv/a b", "port": 2050},
            filesystem_info.Nfs("10.0.0.4", "/srv/a b", 2050),
        ),
        ({"hostname": "fd00::4", "path": "/"}, filesystem_info.Nfs("fd00::4", "/")),
        (
            {"hostname": "fd00::4", "path": "/x", "port": 2049},
            filesystem_info.Nfs("fd00::4", "/x", 2049),
        ),
    ],
    ids=str,
)
def test_nfs_server_proxy_is_read(config: dict[str, Any], expected: filesystem_info.Nfs):
    uri, _ = published("nfs-server-proxy", "NFSServerProxyCharm", config)
    assert filesystem_info.parse(uri) == expected


@pytest.mark.parametrize(
    "monitors",
    ["10.0.0.1:6789", "10.0.0.1:6789 10.0.0.2:6789", "mon1.lab mon2.lab:3300", "[fd00::1]:6789"],
)
def test_cephfs_server_proxy_is_read(monitors: str):
    config = {
        "fsid": FSID,
        "sharepoint": "cephfs:/team/a",
        "monitor-hosts": monitors,
        "auth-info": "fs-client:AQB==",
    }
    uri, state = published("cephfs-server-proxy", "CephFSServerProxyCharm", config)
    (secret,) = state.secrets
    read = filesystem_info.parse(uri)
    assert isinstance(read, filesystem_info.Cephfs)
    assert (read.hosts, read.user, read.fsid) == (tuple(monitors.split()), "fs-client", FSID)
    assert (read.name, read.path, read.secret_id) == ("cephfs", "/team/a", secret.id)
    assert secret.latest_content == {"key": "AQB=="}
    assert "AQB" not in uri
    folder = checkout.ROOT / "sandbox" / "standins" / "cephfs-server-proxy"
    spec = importlib.util.spec_from_file_location("standin", folder / "src" / "charm.py")
    assert spec and spec.loader
    spec.loader.exec_module(standin := importlib.util.module_from_spec(spec))
    meta = yaml.safe_load((folder / "charmcraft.yaml").read_text())
    context = testing.Context(standin.CephFSServerProxyCharm, meta=meta, config=meta.pop("config"))
    ours = played(context, config)[0]
    assert ours.split("&auth=")[0] == uri.split("&auth=")[0]


@pytest.mark.parametrize("nids", ["10.0.0.2@tcp", "10.0.0.2@tcp 10.0.0.3@tcp1", "192.168.1.9@o2ib"])
def test_lustre_server_proxy_is_read(nids: str):
    uri, _ = published(
        "lustre-server-proxy", "LustreServerProxyCharm", {"mgs-nids": nids, "fs-name": "exafs"}
    )
    assert filesystem_info.parse(uri) == filesystem_info.Lustre(tuple(nids.split()), "exafs")


def test_what_upstream_asks_for_is_read():
    context = checkout.context(
        "test-mount-client", checkout.load("test-mount-client").TestMountClient
    )
    relation = testing.Relation("mount", interface="mount_info", remote_app_name="client")
    state = testing.State(leader=True, config={"mountpoint": "/srv/state"}, relations={relation})
    out = context.run(context.on.config_changed(), state)
    databag = out.get_relation(relation.id).local_app_data
    assert mount_info.load(databag) == mount_info.MountRequest(mountpoint="/srv/state")
    assert mount_info.load({}) is None

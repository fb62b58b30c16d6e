"""One Ceph cluster on one machine: a monitor, a manager, an OSD with objects in memory, and an MDS.

cephx is on. The steps follow Ceph's "Manual deployment" (doc/install/manual-deployment.rst).
"""

import pathlib
import uuid

from slurm_ddp import apt, files, systemd
from slurm_ddp.commands import CommandError, run

DAEMONS = ("ceph-mon@a", "ceph-osd@0", "ceph-mgr@a", "ceph-mds@a")
_PACKAGES = ("ceph-mon", "ceph-mgr", "ceph-osd", "ceph-mds", "ceph-common", "attr")
_ETC, _VAR = pathlib.Path("/etc/ceph"), pathlib.Path("/var/lib/ceph")
_KEYRING = _ETC / "ceph.keyring"
_CONF = """\
[global]
fsid = {fsid}
mon host = [v2:{address}:3300,v1:{address}:6789]
public addr = {address}
keyring = {keyring}
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 8589934592
mon allow pool size one = true
mon warn on pool no redundancy = false
auth allow insecure global id reclaim = false
"""
# Each daemon's capabilities: doc/rados/operations/user-management.rst
_ACCOUNTS = {
    "mon.": {"mon": "allow *"},
    "client.admin": {"mon": "allow *", "mgr": "allow *", "osd": "allow *", "mds": "allow *"},
    "mgr.a": {"mon": "allow profile mgr", "osd": "allow *", "mds": "allow *"},
    "osd.0": {"mon": "allow profile osd", "mgr": "allow profile osd", "osd": "allow *"},
    "mds.a": {
        "mon": "allow profile mds",
        "mgr": "allow profile mds",
        "osd": "allow rwx",
        "mds": "allow",
    },
}


def create(address: str) -> None:
    """Install and start the cluster on this IPv4 address, with `cephfs` and the user `fs-client`.

    The user may set quotas there. Raises `CommandError`.
    """
    apt.ensure_packages(_PACKAGES)
    if (_ETC / "ceph.conf").exists():
        return
    fsid = str(uuid.uuid4())
    osd = str(uuid.uuid4())
    monmap = str(_VAR / "tmp" / "monmap")
    accounts: list[str] = []
    for name, caps in _ACCOUNTS.items():
        key = run("/usr/bin/ceph-authtool", "--gen-print-key").stdout.strip()
        accounts.append(f"[{name}]\nkey = {key}\n")
        accounts += [f'caps {service} = "{text}"\n' for service, text in caps.items()]
    files.ensure_file(_KEYRING, "".join(accounts), mode=0o600, owner="ceph")
    files.ensure_file(
        _ETC / "ceph.conf", _CONF.format(fsid=fsid, address=address, keyring=_KEYRING)
    )
    hosts = f"[v2:{address}:3300,v1:{address}:6789]"
    run(
        "/usr/bin/monmaptool", "--create", "--clobber", "--addv", "a", hosts, "--fsid", fsid, monmap
    )
    for folder in ("mon/ceph-a", "osd/ceph-0", "mgr/ceph-a", "mds/ceph-a"):
        run("/usr/bin/install", "-d", "-o", "ceph", "-g", "ceph", _VAR / folder)
    as_ceph = ("--setuser", "ceph", "--setgroup", "ceph", "--mkfs")
    run("/usr/bin/ceph-mon", "-i", "a", "--monmap", monmap, "--keyring", _KEYRING, *as_ceph)
    systemd.enable_now(f"{DAEMONS[0]}.service")
    _ceph("osd", "new", osd, "0")
    run("/usr/bin/ceph-osd", "-i", "0", "--osd-uuid", osd, *as_ceph)
    for daemon in DAEMONS[1:]:
        systemd.enable_now(f"{daemon}.service")
    for pool in ("cephfs_metadata", "cephfs_data"):
        _ceph("osd", "pool", "create", pool, "8")
    _ceph("fs", "new", "cephfs", "cephfs_metadata", "cephfs_data")
    _ceph("fs", "authorize", "cephfs", "client.fs-client", "/", "rwp")


def problem() -> str:
    """Return why the filesystem is not up; empty when it is."""
    try:
        return "" if "=up:active" in _ceph("mds", "stat") else "waiting for the MDS"
    except CommandError as e:
        return f"waiting for Ceph: {e}"


def _ceph(*arguments: str) -> str:
    return run("/usr/bin/ceph", "--connect-timeout", "60", *arguments, timeout=90).stdout

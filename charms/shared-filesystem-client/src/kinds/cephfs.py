"""Draws up the mount of a CephFS directory: one mount unit of systemd's, and a file with the key for root alone.

mount.ceph(8) puts the key into the kernel's keyring: it is in no command line and not among the mount's options.
Helpers before Ceph 17 know the older way to name a filesystem only; the newer one checks that it is the right cluster.
"""

import re
import socket

import mount_plan
from kinds import kernel, presets
from slurm_ddp import apt
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.run import run

_PACKAGE = "ceph-common"
_NAMED_DEVICE = (17, 0)  # USER@FSID.NAME=/path, release notes of Quincy


def plan(spec: mount_plan.Spec, volume: fs.Cephfs, key: str) -> mount_plan.Plan:
    """Draw up the mount of a directory of a Ceph filesystem; the helper is installed already."""
    for what, value in {"user": volume.user, "fsid": volume.fsid, "filesystem": volume.name}.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]+", value):
            raise mount_plan.MountError(f"the Ceph {what} has other characters than letters, digits and ._- in it")
    if not re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", key):
        raise mount_plan.MountError("the Ceph key is not base64: it is what `ceph auth print-key client.USER` prints")
    kernel.check(kernel.CEPH)
    monitors, messenger = _monitors(volume)
    addresses = [fs.join_address(*one) for one in monitors]
    path = kernel.below(volume.path, spec.subdirectory)
    key_file = mount_plan.ETC / spec.app / "ceph.secret"
    options = presets.merge(presets.CEPHFS, profile=spec.profile, given=spec.mount_options, holding=spec.holding)
    if messenger == 2:
        options = {"ms_mode": "prefer-crc"} | options  # the kernel's own choice is the first protocol
    options = {"secretfile": str(key_file)} | options
    source, aliases = f"{','.join(addresses)}:{path}", ()
    if _version() >= _NAMED_DEVICE:
        source, aliases = f"{volume.user}@{volume.fsid}.{volume.name}={path}", (source,)
        options = {"mon_addr": "/".join(addresses)} | options
    else:
        options = {"name": volume.user, "mds_namespace": volume.name} | options
    return kernel.plan(
        spec,
        kind=kernel.CEPH,
        source=source,
        aliases=aliases,
        options=options,
        servers=(monitors,),
        files={key_file: f"{key}\n"},
        secrets=(key,),
    )


def ensure_helper() -> None:
    """Install mount.ceph. Raises `CommandError`."""
    apt.ensure_packages((_PACKAGE,))


def _monitors(volume: fs.Cephfs) -> tuple[mount_plan.Servers, int]:
    """Resolve the monitors of the newest protocol that any is known to speak; return them and that protocol."""
    messenger = max(monitor.messenger for monitor in volume.monitors())
    found: list[tuple[str, int]] = []
    for monitor in volume.monitors():
        if monitor.messenger != messenger:
            continue
        try:
            answers = socket.getaddrinfo(monitor.host, None, type=socket.SOCK_STREAM)
        except OSError as e:
            text = f"the Ceph monitor {monitor.host} has no address ({e.strerror or e})"
            raise mount_plan.NotYetError(text) from e
        # One of several, and always the same: another order would look like a change
        found.append((min(str(answer[4][0]) for answer in answers), monitor.port))
    return tuple(found), messenger


def _version() -> tuple[int, int]:
    shown = run("/usr/bin/dpkg-query", "-W", "-f", "${Version}", _PACKAGE, check=False).stdout
    match = re.match(r"(?:\d+:)?(\d+)\.(\d+)", shown)
    return (int(match[1]), int(match[2])) if match else (0, 0)

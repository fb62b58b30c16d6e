"""Draws up the mount of an NFS export: one mount unit of systemd's."""

import kernel_mount
import mount_tuning
import mounter
from slurm_ddp.interfaces import filesystem_info as fs

_PORT = 2049


def plan(wish: mounter.Wish, export: fs.Nfs) -> mounter.Plan:
    """Return the plan for an export.

    Raises:
        mounter.MounterError: this machine cannot mount it, or systemd cannot be told to.
    """
    kernel_mount.check(kernel_mount.NFS)
    options = mount_tuning.merge(mount_tuning.NFS, profile=wish.profile, given=wish.mount_options)
    if export.port is not None:
        options = {"port": str(export.port)} | options
    path = kernel_mount.below(export.path, wish.subdirectory)
    source = f"{fs.join_address(export.host, None)}:{path}"
    port = int(options.get("port", _PORT))
    servers = () if options["proto"].startswith("rdma") else (((export.host, port),),)
    return kernel_mount.plan(
        wish,
        kind=kernel_mount.NFS,
        source=source,
        options=options,
        servers=servers,
        remedy=f"chmod +t {path}, on {export.host}",
    )

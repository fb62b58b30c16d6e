"""Draws up the mount of an NFS export: one mount unit of systemd's."""

import mount_plan
from kinds import kernel, presets
from slurm_ddp.interfaces import filesystem_info as fs

_PORT = 2049


def plan(spec: mount_plan.Spec, export: fs.Nfs) -> mount_plan.Plan:
    """Draw up the mount of an export."""
    kernel.check(kernel.NFS)
    options = presets.merge(presets.NFS, profile=spec.profile, given=spec.mount_options)
    if export.port is not None:
        options = {"port": str(export.port)} | options
    path = kernel.below(export.path, spec.subdirectory)
    servers = () if options["proto"].startswith("rdma") else (((export.host, int(options.get("port", _PORT))),),)
    source = f"{fs.join_address(export.host, None)}:{path}"
    remedy = f"chmod +t {path}, on {export.host}"
    return kernel.plan(spec, kind=kernel.NFS, source=source, options=options, servers=servers, remedy=remedy)

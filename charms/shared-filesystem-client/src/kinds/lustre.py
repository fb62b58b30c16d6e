"""Draws up the mount of a Lustre filesystem: one mount unit of systemd's."""

import mount_plan
from kinds import kernel, lustre_client, presets
from slurm_ddp import mounts
from slurm_ddp.interfaces import filesystem_info as fs


def plan(spec: mount_plan.Spec, filesystem: fs.Lustre, settings: lustre_client.Settings) -> mount_plan.Plan:
    """Return the plan for a filesystem; the client is installed and LNet configured already.

    Raises:
        mount_plan.MountError: this machine cannot mount it.
        mount_plan.NotYetError: an archive does not answer.
        CommandError: apt failed.
    """
    identifiers = lustre_client.nids(filesystem.nids)
    path = kernel.below("/", spec.subdirectory)
    source = f"{lustre_client.servers(identifiers)}:/{filesystem.fs_name}{path if path != '/' else ''}"
    options = presets.merge(presets.LUSTRE, profile=spec.profile, given=spec.mount_options)
    host = identifiers[0].partition("@")[0]
    if not kernel.container():
        lustre_client.ensure_installed(settings, host)
        is_mounted = any(mount.fstype == kernel.LUSTRE.fstype for mount in mounts.table())
        lustre_client.ensure_networks(settings, identifiers, mounted=is_mounted)
    kernel.check(kernel.LUSTRE)
    by_tcp = tuple(
        (identifier.partition("@")[0], lustre_client.TCP_PORT)
        for identifier in identifiers
        if identifier.partition("@")[2].startswith("tcp")
    )
    # Servers on InfiniBand alone cannot be asked over TCP: whether they answer is seen when mounting
    servers = (by_tcp,) if len(by_tcp) == len(identifiers) else ()
    return kernel.plan(spec, kind=kernel.LUSTRE, source=source, options=options, servers=servers)

"""Draws up the mount of a Lustre filesystem: one mount unit of systemd's."""

import kernel_mount
import lustre_client
import mount_tuning
import mounter
from slurm_ddp import mounts
from slurm_ddp.interfaces import filesystem_info as fs


def plan(wish: mounter.Wish, filesystem: fs.Lustre, settings: lustre_client.Settings) -> mounter.Plan:
    """Return the plan for a filesystem; the client is installed and LNet configured already.

    Raises:
        mounter.MounterError: this machine cannot mount it.
        mounter.NotYetError: an archive does not answer.
        CommandError: apt failed.
    """
    identifiers = lustre_client.nids(filesystem.nids)
    path = kernel_mount.below("/", wish.subdirectory)
    source = f"{lustre_client.servers(identifiers)}:/{filesystem.fs_name}{path if path != '/' else ''}"
    options = mount_tuning.merge(mount_tuning.LUSTRE, profile=wish.profile, given=wish.mount_options)
    host = identifiers[0].partition("@")[0]
    if not kernel_mount.container():
        lustre_client.ensure_installed(settings, host)
        is_mounted = any(mount.fstype == kernel_mount.LUSTRE.fstype for mount in mounts.table())
        lustre_client.ensure_networks(settings, identifiers, mounted=is_mounted)
    kernel_mount.check(kernel_mount.LUSTRE)
    by_tcp = tuple(
        (identifier.partition("@")[0], lustre_client.TCP_PORT)
        for identifier in identifiers
        if identifier.partition("@")[2].startswith("tcp")
    )
    # Servers on InfiniBand alone cannot be asked over TCP: whether they answer is seen when mounting
    servers = (by_tcp,) if len(by_tcp) == len(identifiers) else ()
    return kernel_mount.plan(wish, kind=kernel_mount.LUSTRE, source=source, options=options, servers=servers)

"""Draws up the mount of a Lustre filesystem: one mount unit of systemd's."""

import mount_plan
from kinds import kernel, lustre_client, presets
from slurm_ddp import mounts
from slurm_ddp.interfaces import filesystem_info as fs

_PORT = 988  # where LNet listens, lnet's module parameter accept_port


def plan(spec: mount_plan.Spec, filesystem: fs.Lustre, config: mount_plan.Config) -> mount_plan.Plan:
    """Draw up the mount of a filesystem; install the client and configure LNet, except in a container.

    Raises:
        mount_plan.MountError: this machine cannot mount it.
        mount_plan.NotYetError: an archive does not answer.
        CommandError: apt failed.
    """
    identifiers = lustre_client.nids(filesystem.nids)
    path = kernel.below("/", spec.subdirectory)
    source = f"{lustre_client.servers(identifiers)}:/{filesystem.fs_name}{path if path != '/' else ''}"
    options = presets.merge(presets.LUSTRE, profile=spec.profile, given=spec.mount_options)
    pairs = [identifier.split("@") for identifier in identifiers]
    if not kernel.container():
        lustre_client.ensure_installed(config, pairs[0][0])
        is_mounted = any(mount.fstype == kernel.LUSTRE.fstype for mount in mounts.table())
        lustre_client.ensure_networks(config, identifiers, mounted=is_mounted)
    kernel.check(kernel.LUSTRE)
    # Servers on InfiniBand alone cannot be asked over TCP: whether they answer is seen when mounting
    by_tcp = all(network.startswith("tcp") for _, network in pairs)
    servers = (tuple((host, _PORT) for host, _ in pairs),) if by_tcp else ()
    return kernel.plan(spec, kind=kernel.LUSTRE, source=source, options=options, servers=servers)

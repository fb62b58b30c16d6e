"""What the filesystems that the kernel itself mounts have in common: a mount unit, and whether this machine can."""

import dataclasses
import os
import pathlib
import posixpath

import mount_plan
from kinds import presets
from slurm_ddp.run import CommandError, run

PROC = pathlib.Path("/proc")
_MODPROBE = "/usr/sbin/modprobe"
_DETECT_VIRT = "/usr/bin/systemd-detect-virt"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A filesystem of the kernel's."""

    name: str  # for people
    fstype: str
    module: str
    packages: tuple[str, ...] = ()


NFS = Kind("NFS", "nfs4", "nfsv4", ("nfs-common",))
CEPH = Kind("CephFS", "ceph", "ceph")  # its package is installed before the plan, which depends on its version
LUSTRE = Kind("Lustre", "lustre", "lustre")  # its packages fit one kernel only: see lustre_client.py


def plan(
    spec: mount_plan.Spec,
    *,
    kind: Kind,
    source: str,
    options: presets.Options,
    servers: tuple[tuple[tuple[str, int], ...], ...],
    aliases: tuple[str, ...] = (),
    files: tuple[mount_plan.File, ...] = (),
    secrets: tuple[str, ...] = (),
    remedy: str = "",
) -> mount_plan.Plan:
    """Return the plan for a mount unit.

    Raises:
        mount_plan.MountError: the source cannot be written into a unit.
    """
    if any(character.isspace() or not character.isprintable() for character in source):
        raise mount_plan.MountError(
            f"what {kind.name} should mount has a space in its name, which systemd cannot mount"
        )
    flags = {"nosuid": "", "nodev": "", **({"noexec": ""} if spec.noexec else {}), "ro" if spec.read_only else "rw": ""}
    text = mount_plan.render(
        "kernel.mount.j2",
        kind=kind.name,
        fstype=kind.fstype,
        source=source.replace("%", "%%"),
        mountpoint=spec.mountpoint,
        options=presets.text(options | flags).replace("%", "%%"),
    )
    return mount_plan.Plan(
        spec=spec,
        unit=run("/usr/bin/systemd-escape", "--path", "--suffix=mount", spec.mountpoint).stdout.strip(),
        unit_text=text,
        fstypes=(kind.fstype,),
        source=source,
        aliases=tuple(alias for alias in aliases if alias != source),
        servers=servers,
        packages=kind.packages,
        files=files,
        secrets=secrets,
        remedy=remedy or f"chmod +t {spec.mountpoint}, as root where it is neither read-only nor root squashed",
    )


def below(path: str, subdirectory: str) -> str:
    """Return the path of a directory below `path`, as the option `subdirectory` names it."""
    return posixpath.join(path, subdirectory.strip("/")) if subdirectory.strip("/") else path


def check(kind: Kind) -> None:
    """Raise `mount_plan.MountError` unless this machine's kernel lets us mount such a filesystem; load its module."""
    where = container()
    if where and not _is_root_of_the_machine():
        # Only filesystems marked FS_USERNS_MOUNT can be mounted inside a user namespace (FUSE is, these are not)
        raise mount_plan.MountError(
            f"{kind.name} cannot be mounted in an unprivileged container ({where}): deploy to a virtual machine "
            "(--constraints virt-type=virtual-machine), or set security.privileged=true on the container"
        )
    if known(kind):
        return
    if where:
        raise mount_plan.MountError(
            f"this container's machine has not loaded {kind.name}, and a container cannot: run modprobe {kind.module} "
            "on the machine below it"
        )
    try:
        run(_MODPROBE, kind.module, timeout=60)
    except CommandError as e:
        release = os.uname().release
        raise mount_plan.MountError(f"the kernel {release} has no {kind.name} (module {kind.module}): {e}") from e


def known(kind: Kind) -> bool:
    """Tell whether the running kernel has the filesystem already."""
    lines = (PROC / "filesystems").read_text().splitlines()
    return any(line.split()[-1:] == [kind.fstype] for line in lines)


def container() -> str:
    """Return what kind of container this machine is; nothing when it is none."""
    said = run(_DETECT_VIRT, "--container", check=False, timeout=10)
    return said.stdout.strip() if said.returncode == 0 else ""


def _is_root_of_the_machine() -> bool:
    """Tell whether root here is root in the machine's first user namespace (user_namespaces(7))."""
    return (PROC / "self" / "uid_map").read_text().split() == ["0", "0", "4294967295"]

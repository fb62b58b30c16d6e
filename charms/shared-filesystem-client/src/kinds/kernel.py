"""The common part of filesystems that the kernel mounts: a mount unit, and support checks."""

import dataclasses
import os
import pathlib
import posixpath
import typing

import mount_plan
from kinds import presets
from slurm_ddp.commands import CommandError, run

PROC = pathlib.Path("/proc")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A filesystem of the kernel's."""

    name: str  # in messages
    fstype: str
    module: str
    packages: tuple[str, ...] = ()


NFS = Kind("NFS", "nfs4", "nfsv4", ("nfs-common",))
NFS3 = Kind("NFS 3", "nfs", "nfsv3", ("nfs-common",))
# Its package is installed before the plan, which depends on its version
CEPH = Kind("CephFS", "ceph", "ceph")
LUSTRE = Kind("Lustre", "lustre", "lustre")  # its packages fit one kernel only: see lustre.py


def plan(
    spec: mount_plan.Spec, *, kind: Kind, source: str, options: presets.Options, **rest: typing.Any
) -> mount_plan.Plan:
    """Draw up a mount unit; `rest` are further fields of the plan."""
    if any(character.isspace() or not character.isprintable() for character in source):
        raise mount_plan.MountError(
            f"the {kind.name} source has a space in its name, which systemd cannot mount"
        )
    flags = spec.flags
    text = mount_plan.render(
        "kernel.mount.j2",
        kind=kind.name,
        fstype=kind.fstype,
        source=source.replace("%", "%%"),
        mountpoint=spec.mountpoint,
        options=presets.text(options | flags).replace("%", "%%"),
    )
    unit = run(
        "/usr/bin/systemd-escape", "--path", "--suffix=mount", spec.mountpoint
    ).stdout.strip()
    return mount_plan.Plan(
        spec, unit, text, fstypes=(kind.fstype,), source=source, packages=kind.packages, **rest
    )


def below(path: str, subdirectory: str) -> str:
    """Join a directory and the one below it that the option `subdirectory` names."""
    return posixpath.join(path, subdirectory.strip("/")) if subdirectory.strip("/") else path


def check(kind: Kind) -> None:
    """Load the filesystem's module.

    Raises `mount_plan.MountError` if this kernel cannot mount it.
    """
    where = container()
    # Only filesystems marked FS_USERNS_MOUNT can be mounted inside a user namespace (FUSE is, these
    # are not): root must be the root of the initial namespace (user_namespaces(7))
    if where and (PROC / "self" / "uid_map").read_text().split() != ["0", "0", "4294967295"]:
        remedy = "deploy with --constraints virt-type=virtual-machine, or set security.privileged=true on it"
        raise mount_plan.MountError(
            f"{kind.name} cannot be mounted in an unprivileged {where} container: {remedy}"
        )
    if known(kind):
        return
    if where:
        remedy = f"run modprobe {kind.module} on the machine below this container, which cannot"
        raise mount_plan.MountError(f"the kernel has not loaded {kind.name}: {remedy}")
    try:
        run("/usr/sbin/modprobe", kind.module, timeout=60)
    except CommandError as e:
        text = f"the kernel {os.uname().release} has no {kind.name} (module {kind.module}): {e}"
        raise mount_plan.MountError(text) from e


def known(kind: Kind) -> bool:
    """Report whether the running kernel has the filesystem already."""
    return kind.fstype in (PROC / "filesystems").read_text().split()


def container() -> str:
    """Name the kind of container that this machine is; nothing when it is none."""
    found = run("/usr/bin/systemd-detect-virt", "--container", check=False, timeout=10)
    return found.stdout.strip() if found.returncode == 0 else ""

"""The common part of filesystems that a program serves: a foreground service, and /dev/fuse."""

import os
import typing

import mount_plan
from slurm_ddp.interfaces import filesystem_info as fs


def service(
    spec: mount_plan.Spec,
    source: str,
    servers: mount_plan.Servers,
    command: list[str],
    **values: typing.Any,
) -> str:
    """Write a client's unit, which starts once a server answers; `values` fill the template."""
    quoted = mount_plan.quoted
    return mount_plan.render(
        "fuse.service.j2",
        mountpoint=quoted(spec.mountpoint),
        tmpdir=mount_plan.STATE / spec.app / "tmp",
        helper=f"/usr/bin/python3 -B {mount_plan.LIB / spec.app / 'slurm_ddp' / 'mounts.py'}",
        servers=" ".join(quoted(fs.join_address(*address)) for address in servers),
        source=quoted(source),
        command=" ".join(map(quoted, command)),
        **{"environment_file": ""} | values,
    )


def check(name: str) -> None:
    """Raise `mount_plan.MountError` unless root may mount programs' filesystems (FUSE) here."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as e:
        problem = (e.strerror or str(e)).lower()
        raise mount_plan.MountError(
            f"/dev/fuse does not open ({problem}): {name} needs access to it"
        ) from e

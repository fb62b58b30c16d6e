"""Draws up the mount of an NFS export: one mount unit of systemd's."""

import mounter
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.run import run

# nfs(5). hard: a program waits for a server that is away instead of losing what it wrote. nconnect: several TCP
# connections to one server, from Linux 5.3 on. The version is the highest that both sides speak, 4.0 at least.
_OPTIONS = ("vers=4", "hard", "proto=tcp", "nconnect=8", "timeo=600", "retrans=2", "noatime", "nosuid", "nodev")


def plan(wish: mounter.Wish, export: fs.Nfs) -> mounter.Plan:
    """Return the plan for an export."""
    source = f"{fs.join_address(export.host, None)}:{export.path}"
    if any(character.isspace() or not character.isprintable() for character in source):
        raise mounter.MounterError("the NFS export has a space in its name, which systemd cannot mount")
    options = [*_OPTIONS, *(["noexec"] if wish.noexec else []), "ro" if wish.read_only else "rw"]
    if export.port is not None:
        options.append(f"port={export.port}")
    unit = run("/usr/bin/systemd-escape", "--path", "--suffix=mount", wish.mountpoint).stdout.strip()
    text = mounter.render(
        "nfs.mount.j2",
        source=source.replace("%", "%%"),
        mountpoint=wish.mountpoint,
        options=",".join(options),
    )
    return mounter.Plan(
        wish=wish,
        unit=unit,
        unit_text=text,
        fstypes=("nfs4",),
        source=source,
        servers=(((export.host, export.port or 2049),),),
        packages=("nfs-common",),
    )

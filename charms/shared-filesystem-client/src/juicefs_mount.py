"""Draws up the mount of a JuiceFS volume: one service in the foreground, whose program is of any version."""

import dataclasses
import os
import pathlib

import mounter
from slurm_ddp import juicefs
from slurm_ddp.interfaces import filesystem_info as fs

_FSTYPE = "fuse.juicefs"
_FREE_SPACE_RATIO = "0.2"  # the cache shares the disk with the system


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What may be chosen about a client."""

    cache_mib: int
    buffer_mib: int


def program_path(app: str) -> pathlib.Path:
    """Return where an application's copy of the program lies."""
    return mounter.LIB / app / "juicefs"


def plan(
    wish: mounter.Wish, volume: fs.Juicefs, secret: fs.JuicefsSecret, tuning: Tuning, *, program_changed: bool
) -> mounter.Plan:
    """Return the plan for a volume; the program is installed already.

    Raises:
        mounter.MounterError: this machine or this program cannot mount the volume.
        juicefs.JuicefsError: the volume's metadata engine is not supported.
        CommandError: the program does not run.
    """
    check_fuse()
    version = juicefs.version(program_path(wish.app))
    maker = juicefs.parse_version(volume.version)
    if maker is not None and not juicefs.same_series(version, maker):
        mine = ".".join(map(str, version))
        raise mounter.MounterError(
            f"juicefs {mine} cannot mount what {volume.version} made: attach the same program to both applications"
        )
    if volume.subdir != "/" and not juicefs.knows(version, "subdir"):
        raise mounter.MounterError("this juicefs mounts whole volumes only: attach a newer one for a subdirectory")
    url = juicefs.Engine.of(volume).url(secret.meta_user)
    source, unit = f"JuiceFS:{volume.name}", f"juicefs-{wish.app}.service"
    text = mounter.render(
        "juicefs.service.j2",
        name=volume.name,
        mountpoint=mounter.quoted(wish.mountpoint),
        environment_file=mounter.ETC / wish.app / "environment",
        tmpdir=mounter.STATE / wish.app / "tmp",
        helper=mounter.helper(wish.app),
        engine=" ".join(mounter.quoted(fs.join_address(*address)) for address in volume.addresses()),
        fstype=_FSTYPE,
        source=mounter.quoted(source),
        command=" ".join(map(mounter.quoted, _command(wish, volume, tuning, version, url))),
    )
    variables = juicefs.environment(secret, store=volume.storage, keyless=volume.keyless)
    return mounter.Plan(
        wish=wish,
        unit=unit,
        unit_text=text,
        fstypes=(_FSTYPE,),
        source=source,
        servers=tuple(group for group in (volume.addresses(), _store_addresses(volume)) if group),
        packages=("fuse3",),
        environment=mounter.environment_file(variables),
        secrets=secret.values(),
        program_changed=program_changed,
    )


def _command(wish: mounter.Wish, volume: fs.Juicefs, tuning: Tuning, version: juicefs.Version, url: str) -> list[str]:
    # JuiceFS honours device files and setuid programs on a mount by root, unless it is told not to
    options = ["nosuid", "nodev", *(["noexec"] if wish.noexec else []), *(["ro"] if wish.read_only else [])]
    flags = juicefs.flags(
        version,
        {
            "no-usage-report": True,
            "no-syslog": True,
            "cache-dir": str(mounter.CACHE / wish.app),
            "cache-size": str(tuning.cache_mib),
            "buffer-size": str(tuning.buffer_mib),
            "free-space-ratio": _FREE_SPACE_RATIO,
            "backup-meta": "0",  # a dump of all names by every client: it has exhausted their memory (CSI driver #1648)
            "read-only": wish.read_only,
            "subdir": volume.subdir if volume.subdir != "/" else False,
        },
    )
    program = str(program_path(wish.app))
    return [program, "--no-agent", "mount", *flags, "-o", ",".join(options), url, wish.mountpoint]


def _store_addresses(volume: fs.Juicefs) -> tuple[tuple[str, int], ...]:
    """Return where an SFTP store listens. Others may be behind a proxy that this machine alone knows."""
    if volume.storage != "sftp":
        return ()
    host, port = fs.split_address(volume.bucket.rpartition(":")[0])
    return ((host, port or 22),)


def check_fuse() -> None:
    """Raise `mounter.MounterError` unless this machine lets root mount what a program serves."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as e:
        raise mounter.MounterError(
            f"/dev/fuse does not open ({(e.strerror or str(e)).lower()}): JuiceFS needs it; let this machine have it"
        ) from e

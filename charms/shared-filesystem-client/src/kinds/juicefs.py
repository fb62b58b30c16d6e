"""Draws up the mount of a JuiceFS volume: one service in the foreground, whose program is of any version."""

import dataclasses
import logging
import os
import pathlib

import mount_plan
from kinds import presets
from scripts import keeper
from slurm_ddp import files, juicefs, juicefs_access, mounts
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.run import CommandError

_log = logging.getLogger(__name__)

_FSTYPE = "fuse.juicefs"
_SMOOTH = (1, 2, 0)  # from here on a supervisor holds the mount while the program behind it is exchanged
_DEFAULT_BUFFER_MIB = 300
_AUTO = "auto"
# What of a disk the cache may fill, and what it always leaves free (JuiceFS counts blocks and inodes): the first where
# the system lies on the same disk, the second where it does not
_SHARE = (0.15, 0.75)
_FREE = ("0.2", "0.1")
_NO_CACHE_ON = ("nfs", "nfs4", "lustre", "ceph", "cifs", "fuse.juicefs", "tmpfs", "ramfs")
_UPLOAD_S = 600


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What may be chosen about a client."""

    cache: str = _AUTO  # MiB, a number with G or T behind it, or auto
    directories: tuple[str, ...] = ()
    buffer_mib: int = 0  # 0: the profile's
    metrics_port: int = 0  # 0: none
    writeback: bool = False


def program_path(app: str) -> pathlib.Path:
    """Return where an application's copy of the program lies."""
    return mount_plan.LIB / app / "juicefs"


def plan(
    spec: mount_plan.Spec, volume: fs.Juicefs, secret: fs.JuicefsSecret, tuning: Tuning, *, program_changed: bool
) -> mount_plan.Plan:
    """Return the plan for a volume; the program is installed already.

    Raises:
        mount_plan.MountError: this machine or this program cannot mount the volume.
        juicefs.JuicefsError: the volume's metadata engine is not supported.
        presets.OptionError: an option is not possible.
        CommandError: the program does not run.
    """
    check_fuse()
    version = juicefs.version(program_path(spec.app))
    maker = juicefs.parse_version(volume.version)
    mine = ".".join(map(str, version))
    if maker is not None and not juicefs.same_series(version, maker):
        raise mount_plan.MountError(
            f"juicefs {mine} cannot mount what {volume.version} made: attach the same program to both applications"
        )
    subdir = _subdir(spec, volume)
    if subdir != "/" and not juicefs.knows(version, "subdir"):
        raise mount_plan.MountError("this juicefs mounts whole volumes only: attach a newer one for a subdirectory")
    access = juicefs_access.of(volume, secret, version, directory=mount_plan.ETC / spec.app)
    source, unit = f"JuiceFS:{volume.name}", f"juicefs-{spec.app}.service"
    caches = _caches(spec.app, tuning)
    text = mount_plan.render(
        "juicefs.service.j2",
        name=volume.name,
        mountpoint=mount_plan.quoted(spec.mountpoint),
        environment_file=mount_plan.ETC / spec.app / "environment",
        tmpdir=mount_plan.STATE / spec.app / "tmp",
        helper=mount_plan.helper(spec.app),
        engine=" ".join(mount_plan.quoted(fs.join_address(*address)) for address in volume.addresses()),
        fstype=_FSTYPE,
        source=mount_plan.quoted(source),
        command=" ".join(
            map(mount_plan.quoted, [*_command(spec, subdir, tuning, version), access.url, spec.mountpoint])
        ),
        staging=[mount_plan.quoted(str(cache / volume.uuid / "rawstaging")) for cache in caches]
        if tuning.writeback
        else [],
        upload_s=_UPLOAD_S,
        reloads=version >= _SMOOTH,
    )
    return mount_plan.Plan(
        spec=spec,
        unit=unit,
        unit_text=text,
        fstypes=(_FSTYPE,),
        source=source,
        servers=tuple(group for group in (volume.addresses(), _store_addresses(volume)) if group),
        speaks=keeper.TLS if access.engine.tls else access.engine.kind,
        packages=("fuse3",),
        environment=mount_plan.environment_file(access.environment),
        secrets=secret.values(),
        program_changed=access.ensure_files() or program_changed,
        caches=caches,
        version=mine,
        reloads=version >= _SMOOTH,
        port=tuning.metrics_port,
        sticky=True,
        remedy=f"chmod +t {spec.mountpoint}, as root where it is neither read-only nor root squashed",
    )


def ensure_sticky_folders(spec: mount_plan.Spec, volume: fs.Juicefs, secret: fs.JuicefsSecret) -> None:
    """Keep accounts from replacing the folder that is mounted, or one above it; what is done is logged.

    The mount shows no folder above its own, and juicefs makes those that are absent with mode 0777. It is done once for
    each folder, before it is first mounted. Where it fails the mount is made nevertheless, and it is tried again.
    """
    subdir, note = _subdir(spec, volume), mount_plan.STATE / spec.app / "sticky"
    done = f"{volume.uuid} {subdir}\n"
    if subdir == "/" or spec.read_only or (note.is_file() and note.read_text() == done):
        return
    program = program_path(spec.app)
    try:
        access = juicefs_access.of(volume, secret, juicefs.version(program), directory=mount_plan.ETC / spec.app)
        access.ensure_files()
        juicefs.check_reachable(volume.addresses())
        for folder in (subdir, *map(str, pathlib.PurePosixPath(subdir).parents)):  # those above are made 0755 with it
            if said := juicefs.ensure_sticky(program, access, folder):
                _log.warning("volume %s: %s", volume.name, said)
        files.ensure_file(note, done)
    except (juicefs.JuicefsError, CommandError) as e:
        _log.info("volume %s: the modes of the folders on the way to %s are not known: %s", volume.name, subdir, e)


def check(tuning: Tuning) -> None:
    """Raise `ValueError`, which names the option, unless the choices make sense."""
    if tuning.cache != _AUTO:
        _mib(tuning.cache)
    if tuning.buffer_mib and tuning.buffer_mib < 32:
        raise ValueError("buffer-size: 32 MiB at least, or 0 for the profile's")
    for directory in tuning.directories:
        try:
            mount_plan.check_mountpoint(directory)
        except ValueError as e:
            raise ValueError(f"cache-directories: {e}") from e
    if len(set(tuning.directories)) != len(tuning.directories):
        raise ValueError("cache-directories: a folder is named twice")
    if tuning.metrics_port and not 1024 <= tuning.metrics_port < 65536:
        raise ValueError("metrics-port: a port from 1024 to 65535, or 0 for the first free one from 9567 on")


def _subdir(spec: mount_plan.Spec, volume: fs.Juicefs) -> str:
    """Return the folder of the volume that is mounted."""
    return f"/{volume.subdir.strip('/')}/{spec.subdirectory.strip('/')}".replace("//", "/").rstrip("/") or "/"


def _command(
    spec: mount_plan.Spec,
    subdir: str,
    tuning: Tuning,
    version: juicefs.Version,
) -> list[str]:
    """Return the command up to its options; the engine's URL and the mountpoint follow."""
    caches = _caches(spec.app, tuning)
    # JuiceFS honours device files and setuid programs on a mount by root, unless it is told not to
    options = ["nosuid", "nodev", *(["noexec"] if spec.noexec else []), *(["ro"] if spec.read_only else [])]
    chosen = presets.merge(presets.JUICEFS, profile=spec.profile, given=spec.mount_options)
    given = presets.merge(dataclasses.replace(presets.JUICEFS, profiles={}), profile="none", given=spec.mount_options)
    for flag in given:
        if not juicefs.knows(version, flag):
            mine = ".".join(map(str, version))
            raise presets.OptionError(
                f"mount-options: {flag} needs juicefs {juicefs.since(flag)} or newer, and this is {mine}"
            )
    buffer_mib = str(tuning.buffer_mib or chosen.pop("buffer-size", _DEFAULT_BUFFER_MIB))
    chosen.pop("buffer-size", None)
    shared = any(_shares_the_systems_disk(cache) for cache in caches)
    flags = juicefs.flags(
        version,
        {
            "no-usage-report": True,
            "no-syslog": True,
            "cache-dir": ":".join(map(str, caches)),
            "cache-size": str(_cache_mib(tuning, caches)),
            "buffer-size": buffer_mib,
            "free-space-ratio": chosen.pop("free-space-ratio", _FREE[0] if shared else _FREE[1]),
            "backup-meta": "0",  # a dump of all names by every client: it has exhausted their memory (CSI driver #1648)
            "metrics": f"127.0.0.1:{tuning.metrics_port}" if tuning.metrics_port else False,
            "writeback": tuning.writeback,
            "read-only": spec.read_only,
            "subdir": subdir if subdir != "/" else False,
            **{name: value or True for name, value in chosen.items()},
        },
    )
    program = str(program_path(spec.app))
    return [program, "--no-agent", "mount", *flags, "-o", ",".join(options)]


def _caches(app: str, tuning: Tuning) -> tuple[pathlib.Path, ...]:
    """Return the folders for copies, which are this application's alone."""
    if not tuning.directories:
        return (mount_plan.CACHE / app,)
    for directory in tuning.directories:
        mount = mounts.find(directory)
        if mount is not None and mount.fstype in _NO_CACHE_ON:
            raise mount_plan.MountError(
                f"cache-directories: {directory} lies on {mount.fstype}: name folders of a local disk"
            )
    return tuple(pathlib.Path(directory) / f"slurm-ddp-{app}" for directory in tuning.directories)


def _cache_mib(tuning: Tuning, caches: tuple[pathlib.Path, ...]) -> int:
    """Return how much all folders together may hold, in MiB. JuiceFS gives each folder the same part of it."""
    if tuning.cache != _AUTO:
        return _mib(tuning.cache)
    shares: list[float] = []
    for cache in caches:
        place = _existing(cache)
        stat = os.statvfs(place)
        shares.append(stat.f_blocks * stat.f_frsize / (1 << 20) * _SHARE[0 if _shares_the_systems_disk(cache) else 1])
    sharing: dict[int, int] = {}
    for cache in caches:
        device = _existing(cache).stat().st_dev
        sharing[device] = sharing.get(device, 0) + 1
    total = min(share / sharing[_existing(cache).stat().st_dev] for share, cache in zip(shares, caches, strict=True))
    # In whole GiB: a size that moved with every block of the disk would look like a change of options
    return max(256, int(total) // 1024 * 1024) * len(caches)


def _shares_the_systems_disk(path: pathlib.Path) -> bool:
    return _existing(path).stat().st_dev == pathlib.Path("/").stat().st_dev


def _existing(path: pathlib.Path) -> pathlib.Path:
    return next(place for place in (path, *path.parents) if place.exists())


def _mib(text: str) -> int:
    number, unit = text.rstrip("MGTi"), text.lstrip("0123456789").removesuffix("i")
    if not number.isdecimal() or unit not in ("", "M", "G", "T"):
        raise ValueError(
            "cache-size: auto, or a number of MiB, or one with G or T behind it, like 200G; 0 keeps no copies"
        )
    return int(number) * {"": 1, "M": 1, "G": 1024, "T": 1024**2}[unit]


def _store_addresses(volume: fs.Juicefs) -> tuple[tuple[str, int], ...]:
    """Return where an SFTP store listens. Others may be behind a proxy that this machine alone knows."""
    if volume.storage != "sftp":
        return ()
    host, port = fs.split_address(volume.bucket.rpartition(":")[0])
    return ((host, port or 22),)


def check_fuse() -> None:
    """Raise `mount_plan.MountError` unless this machine lets root mount what a program serves."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as e:
        raise mount_plan.MountError(
            f"/dev/fuse does not open ({(e.strerror or str(e)).lower()}): JuiceFS needs it; let this machine have it"
        ) from e

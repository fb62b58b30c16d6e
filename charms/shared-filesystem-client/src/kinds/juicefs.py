"""Draws up the mount of a JuiceFS volume: one service in the foreground."""

import collections
import logging
import os
import pathlib
import re

import mount_plan
from kinds import fuse, presets
from scripts import keeper
from slurm_ddp import files, juicefs, juicefs_access, mounts
from slurm_ddp.charm import naming
from slurm_ddp.interfaces import filesystem_info as fs

logger = logging.getLogger(__name__)

_FSTYPE = "fuse.juicefs"
_DEFAULT_BUFFER_MIB = "300"
_AUTO = "auto"
# The share of a disk that the cache may fill, and the share that it always leaves free (JuiceFS
# counts blocks and inodes): the first if the system is on the same disk, the second if not
_SHARE = (0.15, 0.75)
_FREE = ("0.2", "0.1")
_NO_CACHE_ON = (
    "nfs",
    "nfs4",
    "lustre",
    "ceph",
    "fuse.ceph-fuse",
    "cifs",
    "fuse.juicefs",
    "tmpfs",
    "ramfs",
)


def program_path(app: str) -> pathlib.Path:
    """Return the path of an application's copy of the program."""
    return mount_plan.LIB / app / "juicefs"


def plan(
    spec: mount_plan.Spec, volume: fs.Juicefs, secret: fs.JuicefsSecret, *, program_changed: bool
) -> mount_plan.Plan:
    """Draw up the mount of a volume; the program is installed already."""
    fuse.check("JuiceFS")
    version = juicefs.version(program_path(spec.app))
    etc = mount_plan.ETC / spec.app
    access, environment_file = juicefs_access.of(volume, secret, directory=etc), etc / "environment"
    source, caches = f"JuiceFS:{volume.name}", _caches(spec)
    command = [*_command(spec, _subdir(spec, volume), caches, version), access.url, spec.mountpoint]
    about = {
        "what": f"JuiceFS volume {volume.name}",
        "fstype": _FSTYPE,
        "environment_file": environment_file,
    }
    text = fuse.service(spec, source, volume.addresses(), command, **about)
    return mount_plan.Plan(
        spec=spec,
        unit=f"juicefs-{spec.app}.service",
        unit_text=text,
        fstypes=(_FSTYPE,),
        source=source,
        servers=(volume.addresses(), *_store_addresses(volume)),
        speaks=keeper.TLS if access.engine.tls else access.engine.kind,
        packages=("fuse3",),
        files={environment_file: mount_plan.environment_file(access.environment)},
        secrets=secret.values(),
        program_changed=access.ensure_files() or program_changed,
        caches=caches,
        version=juicefs.text(version),
        port=spec.metrics_port,
        sticky=True,
    )


def ensure_sticky_folders(
    spec: mount_plan.Spec, volume: fs.Juicefs, secret: fs.JuicefsSecret
) -> None:
    """Keep accounts from replacing the mounted folder or one above it; log the changes.

    The mount shows no folder above its own, and juicefs creates missing ones with mode 0777. Each
    folder is handled once, before its first mount. Raises `juicefs.JuicefsError` and
    `CommandError`.
    """
    subdir, note = _subdir(spec, volume), mount_plan.STATE / spec.app / "sticky"
    done = f"{volume.uuid} {subdir}\n"
    if subdir == "/" or spec.read_only or (note.is_file() and note.read_text() == done):
        return
    program = program_path(spec.app)
    access = juicefs_access.of(volume, secret, directory=mount_plan.ETC / spec.app)
    access.ensure_files()
    juicefs.check_reachable(volume.addresses())
    # Those above are made 0755 with it
    for folder in (subdir, *map(str, pathlib.PurePosixPath(subdir).parents)):
        if report := juicefs.ensure_sticky(program, access, folder):
            logger.warning("volume %s: %s", volume.name, report)
    files.ensure_file(note, done)


def check(config: mount_plan.Config) -> None:
    """Raise `ValueError`, which names the option, unless the choices make sense."""
    if config.cache_size != _AUTO:
        _mib(config.cache_size)
    if config.buffer_size and config.buffer_size < 32:
        raise ValueError("buffer-size: 32 MiB at least, or 0 for the profile's")
    directories = _directories(config)
    with naming("cache-directories"):
        for directory in directories:
            mount_plan.check_mountpoint(directory)
    if len(set(directories)) != len(directories):
        raise ValueError("cache-directories: a folder is named twice")
    if config.metrics_port and not 1024 <= config.metrics_port < 65536:
        raise ValueError(
            "metrics-port: a port from 1024 to 65535, or 0 for the first free one from 9567 on"
        )


def _subdir(spec: mount_plan.Spec, volume: fs.Juicefs) -> str:
    """Return the folder of the volume that is mounted."""
    return (
        f"/{volume.subdir.strip('/')}/{spec.subdirectory.strip('/')}".replace("//", "/").rstrip("/")
        or "/"
    )


def _command(
    spec: mount_plan.Spec, subdir: str, caches: tuple[pathlib.Path, ...], version: juicefs.Version
) -> list[str]:
    """Build the command up to its options; the engine's URL and the mountpoint follow."""
    for flag in presets.parse(presets.JUICEFS, spec.mount_options):
        if version < (needed := juicefs.SINCE.get(flag, juicefs.OLDEST)):
            since, mine = map(juicefs.text, (needed, version))
            raise presets.OptionError(
                f"mount-options: {flag} needs juicefs {since} or newer, and this is {mine}"
            )
    chosen = presets.merge(presets.JUICEFS, profile=spec.profile, given=spec.mount_options)
    buffer_mib = chosen.pop("buffer-size", _DEFAULT_BUFFER_MIB)
    shared = any(map(_shares_the_systems_disk, caches))
    flags = juicefs.flags(
        {
            "no-usage-report": True,
            "no-syslog": True,
            "cache-dir": ":".join(map(str, caches)),
            "cache-size": str(_cache_mib(spec, caches)),
            "buffer-size": str(spec.buffer_size or buffer_mib),
            "free-space-ratio": chosen.pop("free-space-ratio", _FREE[0] if shared else _FREE[1]),
            "backup-meta": "0",  # a dump of all names by every client: it has exhausted their memory (CSI driver #1648)
            "metrics": f"127.0.0.1:{spec.metrics_port}" if spec.metrics_port else False,
            "read-only": spec.read_only,
            "subdir": subdir,  # also /: without it, every account reads deleted files of others
            **{name: value or True for name, value in chosen.items()},
        }
    )
    # JuiceFS honours device files and setuid programs on a mount by root, unless it is passed these
    options = [name for name in spec.flags if name != "rw"]
    return [str(program_path(spec.app)), "--no-agent", "mount", *flags, "-o", ",".join(options)]


def _directories(config: mount_plan.Config) -> list[str]:
    return [directory.rstrip("/") for directory in config.cache_directories.split()]


def _caches(spec: mount_plan.Spec) -> tuple[pathlib.Path, ...]:
    """List the folders for copies, which are this application's alone."""
    directories = _directories(spec)
    for directory in directories:
        mount = mounts.find(directory)
        if mount is not None and mount.fstype in _NO_CACHE_ON:
            text = f"cache-directories: {directory} lies on {mount.fstype}: name folders of a local disk"
            raise mount_plan.MountError(text)
    named = tuple(pathlib.Path(directory) / f"slurm-ddp-{spec.app}" for directory in directories)
    return named or (mount_plan.CACHE / spec.app,)


def _cache_mib(config: mount_plan.Config, caches: tuple[pathlib.Path, ...]) -> int:
    """Compute the capacity of all folders together, in MiB. JuiceFS gives each an equal part."""
    if config.cache_size != _AUTO:
        return _mib(config.cache_size)
    # Folders on each disk
    sharing = collections.Counter(_existing(cache).stat().st_dev for cache in caches)
    shares: list[float] = []
    for cache in caches:
        place = _existing(cache)
        stat, share = os.statvfs(place), _SHARE[0 if _shares_the_systems_disk(cache) else 1]
        shares.append(
            stat.f_blocks * stat.f_frsize / (1 << 20) * share / sharing[place.stat().st_dev]
        )
    # In whole GiB: a size that moved with every block of the disk would look like a change of
    # options
    return max(256, int(min(shares)) // 1024 * 1024) * len(caches)


def _shares_the_systems_disk(path: pathlib.Path) -> bool:
    return _existing(path).stat().st_dev == pathlib.Path("/").stat().st_dev


def _existing(path: pathlib.Path) -> pathlib.Path:
    return next(place for place in (path, *path.parents) if place.exists())


def _mib(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)([MGT]?)i?", text)
    if found is None:
        raise ValueError(
            "cache-size: auto, a number of MiB, or one with G or T, like 200G; 0 keeps no copies"
        )
    return int(found[1]) * {"": 1, "M": 1, "G": 1024, "T": 1024**2}[found[2]]


def _store_addresses(volume: fs.Juicefs) -> tuple[mount_plan.Servers, ...]:
    """Return the address of an SFTP store; others may be behind this machine's own proxy."""
    if volume.storage != "sftp":
        return ()
    host, port = fs.split_address(volume.bucket.rpartition(":")[0])
    return (((host, port or 22),),)

"""Serve the volume from this machine: Redis holds the metadata, an SFTP server the data.

For trials and small teams. Both run as separate instances of the distribution's packages, next to
any that the machine already has. An acknowledged write is on the disk: Redis syncs its log before
each answer, and the data directory makes writes synchronous (an attribute of ext4 and XFS that
files inherit), since JuiceFS does not ask an SFTP server to sync.
"""

import collections.abc
import contextlib
import dataclasses
import errno
import functools
import hashlib
import os
import pathlib
import pwd
import re
import secrets
import socket
import tempfile

from slurm_ddp import apt, files, juicefs_access, systemd
from slurm_ddp.commands import CommandError, last_line, run
from slurm_ddp.interfaces import filesystem_info as fs
from volume import format_journal, spec, target

METADATA_PORT = 6379
OBJECTS_PORT = 2022
ACCOUNT = "juicefs-objects"  # may log in to our SFTP server and to nothing else
DATABASE = "1"  # of Redis
_RESERVE_BYTES = 10 << 30  # of a disk, or a twentieth of it if that is less
_CHOWN_S = 3600.0
_START_S = 660.0  # Redis reads its whole log before it reports that it is ready

_SSHD_DROPINS = pathlib.Path("/etc/ssh/sshd_config.d")
_SHADOW = pathlib.Path("/etc/shadow")
# The packages' own instances, which this charm does not use: stopped if it installs the package
_PACKAGES = {
    "redis-server": ("redis-server.service",),
    "openssh-server": ("ssh.service", "ssh.socket"),
}
# How systemd's own lines in a unit's journal begin
_SYSTEMD_LINES = ("Started ", "Starting ", "Stopped ", "Stopping ", "Failed to ", "juicefs-")
MARKER = "juicefs-server-proxy"  # a file in the storage: it is there, and whose the volume in it is (takeover.py)


class StoreError(Exception):
    """The store cannot run as it should. `str()` is one line that states what to do."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the servers on this unit."""

    app: str
    address: str  # of this unit, for clients; the servers also listen on the loopback
    directory: pathlib.Path  # the unit's storage
    credentials: fs.JuicefsSecret
    synchronous: bool = True  # a write reaches the disk before it is acknowledged


@dataclasses.dataclass(frozen=True)
class Usage:
    """How full the unit's storage is, in bytes."""

    used: int
    free: int

    def summary(self) -> str:
        """Write both as text."""
        return f"{_size(self.used)} of its disk used, {_size(self.free)} free"

    def room_gib(self, volume_bytes: int) -> int:
        """Return the total capacity in GiB for a volume that now has this size.

        Excludes the disk's reserve: at the end of the volume writers get ENOSPC, but servers break
        if their disk is full.
        """
        reserve = min(_RESERVE_BYTES, (self.used + self.free) // 20)
        return max(1, (volume_bytes + self.free - reserve) >> 30)


def usage(directory: pathlib.Path) -> Usage:
    """Measure how full the storage is."""
    found = os.statvfs(directory)
    return Usage((found.f_blocks - found.f_bfree) * found.f_frsize, found.f_bavail * found.f_frsize)


def describe(directory: pathlib.Path) -> dict[str, str]:
    """Describe the storage: its usage, and whether acknowledged writes survive a power loss."""
    found = usage(directory)
    return {
        "storage-used-gib": f"{found.used / 2**30:.2f}",
        "storage-free-gib": f"{found.free / 2**30:.2f}",
        "survives-power-loss": "yes" if is_durable(directory) else "no",
    }


def volume(name: str, address: str, made: spec.Format) -> spec.Volume:
    """Describe the volume that a unit with this address serves."""
    bucket = f"{fs.join_address(address, OBJECTS_PORT)}:/data/"
    engine = juicefs_access.Engine("redis", (fs.join_address(address, METADATA_PORT),), DATABASE)
    return spec.Volume(name, engine, "sftp", bucket, keyless=False, format=made)


def passwords(app: str, content: fs.JuicefsSecret | None) -> fs.JuicefsSecret:
    """Complete an embedded volume's credentials; new ones are kept here."""
    # Letters, digits, - and _: newer JuiceFS takes percent signs and plus signs in an SFTP password
    # for an encoding
    fresh = {name: secrets.token_urlsafe(32) for name in ("meta-password", "secret-key")} | {
        "access-key": ACCOUNT
    }
    found = content or format_journal.credentials(app)  # the latter of a hook that did not end
    made = fs.JuicefsSecret.from_content(fresh | (found.content() if found is not None else {}))
    if content is None:
        format_journal.keep_credentials(app, made)
    return made


def unit_names(app: str) -> tuple[str, str]:
    """Name an application's systemd units, the metadata's first."""
    return f"juicefs-metadata-{app}.service", f"juicefs-objects-{app}.service"


def ensure(settings: Settings) -> bool:
    """Serve as `settings` state, now and after a reboot; return whether anything changed.

    Raises `StoreError` if the operator must remove something, and `CommandError`.
    """
    app, storage, credentials = settings.app, settings.directory, settings.credentials
    changed = _ensure_packages()
    changed |= _ensure_account(fs.reveal(credentials.secret_key))
    changed |= _ensure_directories(storage, synchronous=settings.synchronous)
    metadata, objects = unit_names(app)
    config, binds = target.CONFIG_DIR / app, list(dict.fromkeys((settings.address, "127.0.0.1")))
    render = functools.partial(
        target.render,
        pathlib.Path(__file__).with_name("templates"),
        app=app,
        config=config,
        storage=storage,
        marker=storage / MARKER,
        binds=binds,
        metadata_port=METADATA_PORT,
        appendfsync="always" if settings.synchronous else "everysec",
        password_sha256=hashlib.sha256(fs.reveal(credentials.meta_password).encode()).hexdigest(),
        objects_addresses=[fs.join_address(address, OBJECTS_PORT) for address in binds],
        host_key=_ensure_host_key(config),
        account=ACCOUNT,
    )
    new_redis = files.ensure_file(
        config / "redis.conf", render("redis.conf.j2"), mode=0o600, owner="redis"
    )
    new_sshd = files.ensure_file(config / "sshd_config", render("sshd_config.j2"))
    units = {metadata: render("metadata.service.j2"), objects: render("objects.service.j2")}
    changed_units = systemd.ensure_units(units)
    new_redis, new_sshd = (
        new_redis or metadata in changed_units,
        new_sshd or objects in changed_units,
    )
    if files.ensure_file(_SSHD_DROPINS / f"50-{app}.conf", render("sshd_dropin.conf.j2")):
        changed = True
        run("/usr/bin/systemctl", "try-reload-or-restart", "ssh.service", check=False)
    _ensure_running(metadata, METADATA_PORT, restart=new_redis)
    _ensure_running(objects, OBJECTS_PORT, restart=new_sshd)
    return changed or new_redis or new_sshd


def is_running(settings: Settings) -> bool:
    """Report whether both servers run and listen at the unit's address."""
    listen = (_is_taken(settings.address, port) for port in (METADATA_PORT, OBJECTS_PORT))
    return all(map(systemd.is_active, unit_names(settings.app))) and all(listen)


def is_enabled(app: str) -> bool:
    """Report whether this machine serves the volume, even if its servers are down at the moment."""
    return systemd.is_enabled(unit_names(app)[0])


def start_metadata(app: str) -> float:
    """Start the metadata server if it is down; return its uptime in seconds.

    Raises `StoreError`.
    """
    metadata, _ = unit_names(app)
    if not systemd.is_active(metadata):
        _start(metadata, systemd.enable_now)
    return systemd.active_for(metadata) or 0.0


def connected() -> tuple[str, ...]:
    """List the addresses connected to the metadata server, with read-only clients (no session)."""
    lines = run(
        "/usr/bin/ss", "-Htn", "state", "established", "sport", "=", f":{METADATA_PORT}"
    ).stdout.splitlines()
    return tuple(sorted({line.split()[-1].rpartition(":")[0].strip("[]") for line in lines}))


def is_durable(directory: pathlib.Path) -> bool:
    """Report whether acknowledged writes survive a power loss; some filesystems cannot do that."""
    data = directory / "objects" / "data"
    if not _is_synchronous(data):
        return False
    with tempfile.TemporaryDirectory(prefix=".durable-", dir=data) as made:
        return _is_synchronous(pathlib.Path(made))  # a new directory inherits the attribute


def check_parents(storage: pathlib.Path) -> None:
    """Raise `StoreError` unless only root can write to storage and parents, as sshd requires."""
    for directory in (storage, *storage.parents):
        stat = directory.stat()
        if stat.st_uid != 0 or stat.st_mode & 0o022:
            raise StoreError(f"chown root {directory}, chmod go-w it: others can write it")


def stop(app: str) -> None:
    """Stop both servers until `ensure`, so that the storage can be detached, perhaps for good."""
    for unit in unit_names(app):
        run("/usr/bin/systemctl", "disable", "--now", unit, timeout=120, check=False)


def ensure_none(app: str) -> None:
    """Remove the servers of an application whose volume became external."""
    if any((systemd.UNIT_DIR / unit).exists() for unit in unit_names(app)):
        remove(app)


def remove(app: str) -> None:
    """Remove the servers, their configuration and the account. The data stays."""
    for unit in unit_names(app):
        systemd.ensure_no_unit(unit)
    config = target.CONFIG_DIR / app
    for name in ("redis.conf", "sshd_config", "ssh_host_ed25519_key", "ssh_host_ed25519_key.pub"):
        files.ensure_absent(config / name)
    if config.is_dir() and not any(config.iterdir()):
        config.rmdir()
    if files.ensure_absent(_SSHD_DROPINS / f"50-{app}.conf"):
        run("/usr/bin/systemctl", "try-reload-or-restart", "ssh.service", check=False)
    if _has_account():
        run("/usr/sbin/userdel", ACCOUNT, check=False)


def _ensure_packages() -> bool:
    missing = [name for name in _PACKAGES if not apt.is_installed(name)]
    apt.ensure_packages([*_PACKAGES, "openssl", "e2fsprogs", "iproute2"])
    for name in missing:
        run("/usr/bin/systemctl", "disable", "--now", *_PACKAGES[name], check=False)
    return bool(missing)


def _ensure_account(password: str) -> bool:
    is_new = not _has_account()
    if is_new:
        options = (
            "--system",
            "--no-create-home",
            "--home-dir",
            "/",
            "--shell",
            "/usr/sbin/nologin",
        )
        run("/usr/sbin/useradd", *options, ACCOUNT)
    accounts = dict(line.split(":")[:2] for line in _SHADOW.read_text().splitlines() if ":" in line)
    found = re.fullmatch(r"\$6\$([^$]+)\$[^$]+", accounts.get(ACCOUNT, ""))  # what openssl makes
    if found and _hashed(password, "-salt", found[1]) == found[0]:
        return is_new
    run("/usr/sbin/chpasswd", "-e", stdin=f"{ACCOUNT}:{_hashed(password)}\n")
    return True


def _hashed(password: str, *salt: str) -> str:
    return run("/usr/bin/openssl", "passwd", "-6", *salt, "-stdin", stdin=password).stdout.strip()


def _has_account() -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(ACCOUNT))
    return False


def _ensure_directories(storage: pathlib.Path, *, synchronous: bool) -> bool:
    check_parents(storage)
    redis, account = pwd.getpwnam("redis"), pwd.getpwnam(ACCOUNT)
    data = storage / "objects" / "data"
    changed = False
    for path, uid, gid, mode in (
        (storage / "metadata", redis.pw_uid, redis.pw_gid, 0o700),
        (storage / "objects", 0, 0, 0o755),
        (data, account.pw_uid, account.pw_gid, 0o700),
    ):
        if not path.is_dir():
            path.mkdir()
            changed = True
        stat = path.stat()
        if (stat.st_uid, stat.st_gid) != (uid, gid):
            _give_contents(path, uid, gid)
        if (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777) != (uid, gid, mode):
            os.chown(path, uid, gid)
            path.chmod(mode)
            changed = True
    # The data's folder comes last, so that a break in between is made good
    if _is_synchronous(data) != synchronous:
        attribute = "+S" if synchronous else "-S"
        folders = ("-mindepth", "1", "-type", "d", "-exec", "/usr/bin/chattr", attribute, "{}", "+")
        run("/usr/bin/find", data, *folders, timeout=600, check=False)
        # Not every filesystem can: see is_durable()
        run("/usr/bin/chattr", attribute, data, check=False)
    marker = storage / MARKER
    if not marker.exists():
        marker.touch(mode=0o600)
        changed = True
    return changed


def _give_contents(path: pathlib.Path, uid: int, gid: int) -> None:
    """Give a folder's content to an account, which had another number on the storage's old machine.

    The folder itself comes last, so that an interruption is repaired.
    """
    owner = f"{uid}:{gid}"
    run(
        "/usr/bin/find",
        path,
        "-mindepth",
        "1",
        "-exec",
        "/usr/bin/chown",
        "-h",
        owner,
        "{}",
        "+",
        timeout=_CHOWN_S,
    )


def _ensure_host_key(config: pathlib.Path) -> pathlib.Path:
    key = config / "ssh_host_ed25519_key"
    if not key.exists():
        config.mkdir(parents=True, exist_ok=True)
        run("/usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key)
    return key


def _ensure_running(unit: str, port: int, *, restart: bool) -> None:
    is_active = systemd.is_active(unit)
    if not is_active and _is_taken("127.0.0.1", port):
        raise StoreError(f"stop what listens on port {port}: the volume's servers need it")
    if restart or not is_active:
        _start(unit, systemd.restart if is_active else systemd.enable_now)


def _start(unit: str, start: collections.abc.Callable[..., None]) -> None:
    try:
        start(unit, timeout=_START_S)
    except CommandError as e:
        ours = [
            line
            for line in systemd.journal(unit).splitlines()
            if not line.startswith(_SYSTEMD_LINES)
        ]
        reason = last_line("\n".join(ours)) or e
        raise StoreError(f"{unit} does not start: {reason}") from e


def _is_synchronous(directory: pathlib.Path) -> bool:
    attributes = run("/usr/bin/lsattr", "-d", directory, check=False).stdout
    return "S" in attributes.partition(" ")[0]


def _is_taken(address: str, port: int) -> bool:
    """Report whether a program listens there, without connecting: sshd counts connections."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
        except OSError as e:
            return e.errno == errno.EADDRINUSE
    return False


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count < 2**40 else f"{count / 2**40:.1f} TiB"

"""Format the volume once, and check that the engine still holds that volume."""

import collections.abc
import contextlib
import dataclasses
import logging
import pathlib
import shutil
import tempfile

from slurm_ddp import juicefs, juicefs_access
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.run import CommandError
from volume import format_journal
from volume.spec import Format, Volume

_log = logging.getLogger(__name__)

PROGRAM_DIR = pathlib.Path("/usr/local/lib/slurm-ddp")
CONFIG_DIR = pathlib.Path("/etc/slurm-ddp")
_FORMAT_S = 120.0
_CONFIG_S = 120.0


class VolumeError(Exception):
    """The volume is not what it should be, and the operator must act. `str()` is one line that states how."""


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of the volume before a look at the engine."""

    uuid: str | None  # of the volume that was there before; such a volume is never formatted again
    ours: bool = False  # formatting began here: what is there without a known UUID is ours
    adopt: str = ""  # the UUID of a volume made elsewhere, which may be taken over
    announce: collections.abc.Callable[[], object] = lambda: None  # called before formatting begins


def program_path(app: str) -> pathlib.Path:
    """Return where an application's copy of the program lies."""
    return PROGRAM_DIR / app / "juicefs"


def remove_program(app: str) -> None:
    """Remove an application's copy of the program, the files with its certificates, and what was noted here."""
    format_journal.forget(app)
    for folder in (PROGRAM_DIR, CONFIG_DIR):
        shutil.rmtree(folder / app, ignore_errors=True)
        with contextlib.suppress(OSError):  # another application's is there too
            folder.rmdir()


def open_access(program: pathlib.Path, app: str, volume: Volume, secret: fs.JuicefsSecret) -> juicefs_access.Access:
    """Return how to get at the volume; the files that it takes are written.

    Raises:
        juicefs.JuicefsError: this program cannot use such an engine.
    """
    access = juicefs_access.access(
        volume.engine,
        secret,
        juicefs.version(program),
        directory=CONFIG_DIR / app,
        store=volume.storage,
        keyless=volume.keyless,
        region=volume.region,
    )
    access.ensure_files()
    return access


def ensure_formatted(
    program: pathlib.Path,
    volume: Volume,
    secret: fs.JuicefsSecret,
    access: juicefs_access.Access,
    *,
    known: Known,
) -> juicefs.Setting:
    """Return the volume's setting; if none is known, format it first when the engine says that it holds none.

    Args:
        program: juicefs.
        volume: what should be there.
        secret: the credentials of engine and object store.
        access: how to get at them.
        known: what is known of it.

    Raises:
        juicefs.UnreachableError: the engine does not answer.
        juicefs.JuicefsError: juicefs failed.
        VolumeError: another volume is there, or none.
    """
    setting, uuid = juicefs.inspect(program, access), known.uuid
    if setting is None and uuid is None:
        known.announce()
        _format(program, volume, secret, access)
        setting = juicefs.inspect(program, access)
        if setting is None:
            raise juicefs.JuicefsError("the volume is not there after juicefs format")
    elif setting is None:
        raise VolumeError(
            f"the metadata engine lost volume {volume.name} ({uuid}): restore its backup with the action "
            "restore-metadata; it is not formatted again"
        )
    elif uuid is None and not known.ours and known.adopt != setting.uuid:
        _check_same(volume, setting, None)
        raise VolumeError(
            f"the metadata engine holds a volume {setting.name} ({setting.uuid}) that was not made here: if no other "
            f"application offers it, take it over with adopt={setting.uuid}; else name another database"
        )
    if not volume.keyless and setting.uuid == uuid and setting.bucket.rstrip("/") != volume.bucket.rstrip("/"):
        setting = _move(program, volume, access, setting)
    _check_same(volume, setting, uuid)
    return setting


def _move(
    program: pathlib.Path, volume: Volume, access: juicefs_access.Access, setting: juicefs.Setting
) -> juicefs.Setting:
    """Move an embedded volume to its server's new address; return the new setting."""
    _config(program, access, {"bucket": volume.bucket})
    return dataclasses.replace(setting, bucket=volume.bucket)


def _config(program: pathlib.Path, access: juicefs_access.Access, changes: dict[str, str]) -> None:
    flags = [f"--{flag}={value}" for flag, value in changes.items()]
    try:
        juicefs.invoke(program, access, "config", *flags, "--yes", access.url, timeout=_CONFIG_S)
    except CommandError as e:
        raise juicefs.JuicefsError(f"juicefs config: {juicefs.explain(e)}") from e


def _check_same(volume: Volume, setting: juicefs.Setting, uuid: str | None) -> None:
    """Raise `VolumeError` unless what the engine holds is the volume that should be there."""
    if setting.name != volume.name:
        raise VolumeError(
            f"the metadata engine holds volume {setting.name}, not {volume.name}: "
            f"set volume-name={setting.name}, or name another database"
        )
    if uuid is not None and setting.uuid != uuid:
        raise VolumeError(
            f"the metadata engine holds another volume {volume.name} ({setting.uuid}) than the one published ({uuid}): "
            "it was formatted again, or metadata-url changed: set the old metadata-url, or deploy another application"
        )
    if setting.storage and setting.storage != volume.storage:
        raise VolumeError(
            f"storage-type: volume {volume.name} lies in {setting.storage}, not {volume.storage}: "
            f"set storage-type={setting.storage}"
        )
    if setting.bucket.rstrip("/") != volume.bucket.rstrip("/"):
        raise VolumeError(
            f"volume {volume.name} keeps its data at {setting.bucket}, not at {volume.bucket}: bring that address back"
        )
    for option, found, wanted in (
        ("block-size", f"{setting.block_kib}K", f"{volume.format.block_kib}K"),
        ("compression", setting.compression, volume.format.compression),
    ):
        if found != wanted:
            raise VolumeError(
                f"{option}: volume {volume.name} was made with {found}, which cannot change: set {option}={found}"
            )
    if volume.encrypt_key and not setting.encrypted:
        raise VolumeError(
            f"credentials: encrypt-key: volume {volume.name} was made without, which cannot change: remove it "
            "from the secret"
        )


def pending_changes(volume: Volume, setting: juicefs.Setting) -> dict[str, str]:
    """Return the flags of `juicefs config` for what the options ask for and the volume has not."""
    differences = {
        "capacity": (volume.format.capacity_gib, setting.capacity_gib),
        "inodes": (volume.format.inodes, setting.inodes),
        "trash-days": (volume.format.trash_days, setting.trash_days),
    }
    return {flag: str(wanted) for flag, (wanted, found) in differences.items() if wanted != found}


def ensure_options(
    program: pathlib.Path, volume: Volume, access: juicefs_access.Access, setting: juicefs.Setting
) -> bool:
    """Make the volume have the options that can change; return whether one had to be changed.

    Raises:
        juicefs.JuicefsError: it failed.
    """
    changes = pending_changes(volume, setting)
    if changes:
        _config(program, access, changes)
    return bool(changes)


def ensure_sticky_root(program: pathlib.Path, volume: Volume, access: juicefs_access.Access) -> None:
    """Keep accounts from replacing what others have in the volume's root, where any can; what is done is logged.

    Where it fails the volume is offered nevertheless: clients set the sticky bit too, on what they mount.
    """
    try:
        if done := juicefs.ensure_sticky(program, access):
            _log.warning("volume %s: %s", volume.name, done)
    except juicefs.JuicefsError as e:
        _log.info("volume %s: the mode of its root was not looked at, clients do when they mount: %s", volume.name, e)


def published(
    volume: Volume, setting: juicefs.Setting, program: pathlib.Path, secret: tuple[str, int] | None
) -> fs.Juicefs:
    """Return the volume as it is offered to those who mount it; `secret` is the id and revision of the credentials."""
    return fs.Juicefs(
        name=volume.name,
        hosts=volume.engine.hosts,
        engine=volume.engine.kind,
        db=volume.engine.db,
        uuid=setting.uuid,
        secret_id=secret[0] if secret is not None else None,
        auth_rev=secret[1] if secret is not None else None,
        tls=volume.engine.tls,
        params=volume.engine.params,
        storage=volume.storage,
        bucket=volume.bucket,
        version=juicefs.text(juicefs.version(program)),
        keyless=volume.keyless,
        master=volume.engine.master,
        region=volume.region,
    )


def describe(volume: Volume, setting: juicefs.Setting, program: pathlib.Path) -> dict[str, str]:
    """Return what may be shown of a volume, by name."""
    return {
        "volume": volume.name,
        "uuid": setting.uuid,
        "metadata-url": volume.engine.url(),
        "storage-type": setting.storage,
        "bucket": setting.bucket,
        "clients": str(len(setting.clients)),
        "juicefs-version": juicefs.text(juicefs.version(program)),
        "block-size": f"{setting.block_kib}K",
        "compression": setting.compression,
        "encrypted": "yes" if setting.encrypted else "no",
        "capacity-gib": str(setting.capacity_gib or "unlimited"),
        "inodes": str(setting.inodes or "unlimited"),
        "used-bytes": str(setting.used_bytes),
        "used-inodes": str(setting.used_inodes),
    }


def _format(program: pathlib.Path, volume: Volume, secret: fs.JuicefsSecret, access: juicefs_access.Access) -> None:
    version, wanted = juicefs.version(program), volume.format
    keys: dict[str, str] = {}
    if not volume.keyless:
        content = secret.content()
        names = {"access-key": "ACCESS_KEY", "secret-key": "SECRET_KEY", "session-token": "SESSION_TOKEN"}
        keys = {variable: content[key] for key, variable in names.items() if key in content}
    with tempfile.TemporaryDirectory(prefix="juicefs-format-") as scratch:  # 0700
        options: dict[str, str | bool] = {
            "no-update": True,
            "storage": volume.storage,
            "bucket": volume.bucket,
            "block-size": str(wanted.block_kib) if wanted.block_kib != Format().block_kib else False,
            "compress": wanted.compression if wanted.compression != "none" else False,
            "capacity": str(wanted.capacity_gib) if wanted.capacity_gib else False,
            "inodes": str(wanted.inodes) if wanted.inodes else False,
            "trash-days": str(wanted.trash_days),
        }
        if volume.encrypt_key:
            path = pathlib.Path(scratch) / "key.pem"
            path.touch(mode=0o600)
            path.write_text(volume.encrypt_key)
            options["encrypt-rsa-key"] = str(path)
        flags = juicefs.flags(version, options)
        try:
            juicefs.invoke(program, access, "format", *flags, access.url, volume.name, env=keys, timeout=_FORMAT_S)
        except CommandError as e:
            raise juicefs.JuicefsError(f"juicefs format: {_format_reason(juicefs.explain(e))}") from e


def _format_reason(reason: str) -> str:
    if "is not empty" in reason:
        return f"{reason}: it may be another application's volume; choose another volume-name, bucket or prefix"
    return reason

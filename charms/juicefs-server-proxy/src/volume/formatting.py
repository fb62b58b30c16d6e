"""Format the volume once, and check that the engine still holds that volume."""

import collections.abc
import contextlib
import dataclasses
import logging
import pathlib
import shutil
import tempfile

from slurm_ddp import juicefs
from slurm_ddp.interfaces import filesystem_info as fs
from volume import format_journal, target
from volume.spec import Format, Volume
from volume.target import Target

logger = logging.getLogger(__name__)

# That an embedded volume's engine holds
_KEYS = {"access-key": "ACCESS_KEY", "secret-key": "SECRET_KEY"}


class VolumeError(Exception):
    """The volume is wrong, and the operator must act. `str()` is one line that says how."""


@dataclasses.dataclass(frozen=True)
class Known:
    """The known facts of the volume before a look at the engine."""

    uuid: str | None  # of the volume that was there before; such a volume is never formatted again
    ours: bool = False  # formatting began here: a volume without a known UUID is ours
    adopt: str = ""  # the UUID of a volume made elsewhere, which may be taken over
    announce: collections.abc.Callable[[], object] = lambda: None  # called before formatting begins


def ensure_formatted(volume: Target, known: Known) -> juicefs.Setting:
    """Return the volume's setting; first format a volume if none is known and the engine is empty.

    Raises `VolumeError` if another volume or none is there, and `juicefs.JuicefsError`.
    """
    wanted, setting, uuid = volume.volume, volume.inspect(), known.uuid
    if setting is None and uuid is not None:
        remedy = (
            "run restore-metadata with a backup"
            if wanted.keyless
            else "restore a copy of the storage"
        )
        raise VolumeError(f"{remedy}: the metadata engine lost volume {wanted.name} ({uuid})")
    if setting is None:
        known.announce()
        _format(volume)
        setting = volume.inspect()
        if setting is None:
            raise juicefs.JuicefsError(
                "juicefs format reported success and the engine holds no volume"
            )
    elif uuid is None and not known.ours and known.adopt != setting.uuid:
        _check_same(wanted, setting, None)
        remedy = f"set adopt={setting.uuid} to take over volume {setting.name}"
        raise VolumeError(f"{remedy} (not made here), or use another database")
    _check_same(wanted, setting, uuid)
    return setting


def ensure_bucket(volume: Target, setting: juicefs.Setting) -> None:
    """Have an embedded volume follow its server to a new address. Raises `juicefs.JuicefsError`."""
    if not _same_bucket(volume.volume, setting):
        _config(volume, {"bucket": volume.volume.bucket})


def _format(volume: Target) -> None:
    wanted = volume.volume
    content = volume.credentials.content()
    keys: dict[str, str] = {}
    if not wanted.keyless:
        keys = {name: content[key] for key, name in _KEYS.items() if key in content}
    made = wanted.format
    default = Format()
    options: dict[str, str | bool] = {
        "no-update": True,
        "storage": wanted.storage,
        "bucket": wanted.bucket,
        "block-size": made.block_kib != default.block_kib and str(made.block_kib),
        "compress": made.compression != default.compression and made.compression,
        "capacity": made.capacity_gib > 0 and str(made.capacity_gib),
        "inodes": made.inodes > 0 and str(made.inodes),
        "trash-days": str(made.trash_days),
    }
    with tempfile.TemporaryDirectory(prefix="juicefs-format-") as scratch:  # 0700
        if wanted.encrypt_key:
            path = pathlib.Path(scratch) / "key.pem"
            path.touch(mode=0o600)
            path.write_text(wanted.encrypt_key)
            options["encrypt-rsa-key"] = str(path)
        flags = juicefs.flags(options)
        try:
            volume.change("format", *flags, volume.access.url, wanted.name, env=keys)
        except juicefs.JuicefsError as e:
            if "is not empty" in str(e):
                text = f"choose another volume-name, bucket or prefix, or empty this one: {e}"
                raise juicefs.JuicefsError(text) from e
            raise


def _config(volume: Target, changes: dict[str, str]) -> None:
    volume.change(
        "config",
        *(f"--{flag}={value}" for flag, value in changes.items()),
        "--yes",
        volume.access.url,
    )


def _same_bucket(volume: Volume, setting: juicefs.Setting) -> bool:
    return setting.bucket.rstrip("/") == volume.bucket.rstrip("/")


def _check_same(volume: Volume, setting: juicefs.Setting, uuid: str | None) -> None:
    """Raise `VolumeError` unless the engine holds the expected volume."""
    name, found = volume.name, setting.name
    if found != name:
        raise VolumeError(
            f"set volume-name={found}, or use a new database: that volume is in the metadata engine"
        )
    if uuid not in (None, setting.uuid):
        remedy = "set the old metadata-url, or deploy another application"
        raise VolumeError(f"{remedy}: the engine holds volume {setting.uuid}")
    # An embedded one follows its server: `ensure_bucket`
    if volume.keyless and not _same_bucket(volume, setting):
        raise VolumeError(f"set bucket={setting.bucket} again: volume {name} keeps its data there")
    for option, found, wanted in (
        ("storage-type", setting.storage or volume.storage, volume.storage),
        ("block-size", f"{setting.block_kib}K", f"{volume.format.block_kib}K"),
        ("compression", setting.compression, volume.format.compression),
    ):
        if found != wanted:
            raise VolumeError(f"set {option}={found}: volume {name} was made with it, for good")
    if volume.encrypt_key and not setting.encrypted:
        raise VolumeError(
            f"remove encrypt-key from the secret: volume {name} was made without encryption"
        )


def ensure_options(volume: Target, setting: juicefs.Setting) -> None:
    """Make the volume have the options that can change. Raises `juicefs.JuicefsError`."""
    wanted = volume.volume.format
    differences = {
        "capacity": (wanted.capacity_gib, setting.capacity_gib),
        "inodes": (wanted.inodes, setting.inodes),
        "trash-days": (wanted.trash_days, setting.trash_days),
    }
    if changes := {
        flag: str(value) for flag, (value, found) in differences.items() if value != found
    }:
        _config(volume, changes)


def ensure_sticky_root(volume: Target) -> None:
    """Keep accounts from replacing others' folders in the root; proves that the data is there, too.

    Raises `juicefs.JuicefsError`.
    """
    if done := juicefs.ensure_sticky(volume.program, volume.access):
        logger.warning("volume %s: %s", volume.volume.name, done)


def opens(volume: Target) -> bool:
    """Report whether juicefs opens the volume with its data. Raises `juicefs.UnreachableError`."""
    try:
        ensure_sticky_root(volume)
    except juicefs.UnreachableError:
        raise
    except juicefs.JuicefsError:
        return False
    return True


def ensure_private_trash(volume: Target) -> None:
    """Keep accounts from reading others' deleted files; log it. The next hook retries a failure."""
    name = volume.volume.name
    try:
        if juicefs.ensure_private_trash(volume.program, volume.access):
            logger.info(
                "volume %s: its trash is closed to accounts now, on each client once it mounts again",
                name,
            )
    except juicefs.JuicefsError as e:
        logger.warning("volume %s: other accounts may read what was deleted: %s", name, e)


def published(
    volume: Target, setting: juicefs.Setting, secret: tuple[str | None, int | None]
) -> fs.Juicefs:
    """Describe the volume for its clients; `secret` is the id and revision of the credentials."""
    wanted, (secret_id, auth_rev) = volume.volume, secret
    address = dataclasses.asdict(wanted.engine)
    return fs.Juicefs(
        name=wanted.name,
        engine=address.pop("kind"),
        uuid=setting.uuid,
        secret_id=secret_id,
        auth_rev=auth_rev,
        storage=wanted.storage,
        bucket=wanted.bucket,
        version=juicefs.text(juicefs.version(volume.program)),
        keyless=wanted.keyless,
        region=wanted.region,
        **address,
    )


def remove(app: str) -> None:
    """Remove an application's files here, except backups, which may be the only ones."""
    format_journal.forget(app)
    state = format_journal.STATE_DIR
    ours = (
        target.PROGRAM_DIR / app,
        target.CONFIG_DIR / app,
        state / app / "reports",
        state / app / "kubernetes",
    )
    for folder in ours:
        shutil.rmtree(folder, ignore_errors=True)
    for folder in (target.PROGRAM_DIR, target.CONFIG_DIR, state / app, state):
        with contextlib.suppress(OSError):  # a backup, or another application's
            folder.rmdir()

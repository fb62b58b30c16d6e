"""Make the volume in the unit's storage this application's, even if another deployment left it.

Juju keeps the storage of a removed application, and gives it to another one with
`--attach-storage`. The volume's settings, in Redis, then hold the key of the former application's
SFTP server, which is lost.

Each step may be repeated: a hook that is killed in between starts again from the first.
"""

import collections.abc
import dataclasses
import hashlib
import json
import pathlib
import typing

import embedded.store
from slurm_ddp import files, juicefs
from slurm_ddp.charm import ActionError
from slurm_ddp.commands import run
from slurm_ddp.interfaces import filesystem_info as fs
from volume import formatting, maintenance, trial
from volume.target import Target

_BACKUP_S = 3600.0
_REDIS_S = 60.0
_SETTING = "setting"  # the key of the volume's settings in Redis (JuiceFS 1.3, pkg/meta/redis.go)


@dataclasses.dataclass(frozen=True)
class Owner:
    """Whose the volume in a storage is."""

    application: str
    uuid: str
    key: str  # the SHA-256 of the key of the SFTP server that the volume's settings hold


def owner(storage: pathlib.Path) -> Owner | None:
    """Read the owner of the volume in the storage; None without a volume or a noted owner."""
    try:
        content: dict[str, str] = json.loads((storage / embedded.store.MARKER).read_text())
        return Owner(content["application"], content["uuid"], content["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def ensure(
    volume: Target,
    setting: juicefs.Setting,
    storage: pathlib.Path,
    show: collections.abc.Callable[[str], object],
) -> None:
    """Make the volume's settings hold this application's key and address.

    If they do not, renews them and mounts the volume for a trial. `setting` belongs to a volume
    that may be taken. `show` gets each step. Raises `StoreError`, `JuicefsError`, and
    `CommandError`.
    """
    name, before = volume.volume.name, owner(storage)
    key = fs.reveal(volume.credentials.secret_key)
    now = Owner(volume.app, setting.uuid, hashlib.sha256(key.encode()).hexdigest())
    if before == now:
        formatting.ensure_bucket(volume, setting)  # the unit's address may be another one
        return
    is_made_here = before is None and formatting.opens(volume)
    if not is_made_here:
        _check_data(storage, setting)
        show(f"taking over volume {name}: backing up its metadata")
        _back_up(volume, setting)
        show(f"taking over volume {name}: renewing its keys")
        _renew(volume, key)
        show(f"taking over volume {name}: mounting it for a trial")
        trial.check(volume)
    files.ensure_file(
        storage / embedded.store.MARKER, json.dumps(dataclasses.asdict(now)), mode=0o600
    )


def _check_data(storage: pathlib.Path, setting: juicefs.Setting) -> None:
    """Raise `StoreError` unless data and metadata have the same UUID, kept by JuiceFS in both."""
    found = files.read(storage / "objects" / "data" / setting.name / "juicefs_uuid")
    if found != setting.uuid:
        raise embedded.store.StoreError(
            f"attach all of the storage: volume {setting.uuid} lacks its data there"
        )


def _back_up(volume: Target, setting: juicefs.Setting) -> None:
    try:
        maintenance.back_up(volume, setting, timeout_s=_BACKUP_S, log=lambda _: None)
    except ActionError as e:
        raise embedded.store.StoreError(str(e)) from e


def _renew(volume: Target, key: str) -> None:
    """Write the key and the address into the volume's settings.

    `juicefs config` takes a key on its command line alone, where every account can read it. So the
    key is written as JuiceFS before 1.0 kept it, in plain, and juicefs encrypts it at once; it
    first stores and reads an object with it.
    """
    setting = typing.cast("dict[str, typing.Any]", json.loads(_redis(volume, "GET", _SETTING)))
    if setting.get("EncryptKey"):
        raise embedded.store.StoreError(
            f"volume {volume.volume.name} is encrypted, which an embedded one never is"
        )
    setting |= {
        "AccessKey": embedded.store.ACCOUNT,
        "SecretKey": key,
        "Bucket": volume.volume.bucket,
    }
    for former in ("KeyEncrypted", "SessionToken"):
        setting.pop(former, None)
    _redis(volume, "-x", "SET", _SETTING, stdin=json.dumps(setting))
    # An empty token is a change, without which juicefs config does nothing
    volume.change("config", "--session-token=", "--encrypt-secret", "--yes", volume.access.url)


def _redis(volume: Target, *arguments: str, stdin: str | None = None) -> str:
    """Ask the unit's own Redis, at the loopback."""
    return run(
        "/usr/bin/redis-cli",
        *(
            "-h",
            "127.0.0.1",
            "-p",
            str(embedded.store.METADATA_PORT),
            "-n",
            embedded.store.DATABASE,
            "-e",
        ),
        *arguments,
        stdin=stdin,
        env={"REDISCLI_AUTH": fs.reveal(volume.credentials.meta_password)},
        secrets=volume.access.secrets,
        timeout=_REDIS_S,
    ).stdout

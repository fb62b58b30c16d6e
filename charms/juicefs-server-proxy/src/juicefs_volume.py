"""The volume: where it lies, that it is formatted once and by nobody else, and that it is still the one it was."""

import collections.abc
import contextlib
import dataclasses
import pathlib
import re
import shutil
import urllib.parse

from slurm_ddp import juicefs
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.run import CommandError

PROGRAM_DIR = pathlib.Path("/usr/local/lib/slurm-ddp")
# Parameters of a Redis URL that JuiceFS 1.3 knows (pkg/meta/redis.go); another one might be a password
_REDIS_PARAMS = {
    "insecure-skip-verify",
    "max-retry-backoff",
    "min-retry-backoff",
    "read-timeout",
    "route-read",
    "tls-ca-cert-file",
    "tls-cert-file",
    "tls-key-file",
    "tls-server-name",
    "write-timeout",
}
_FORMAT_S = 120.0


class VolumeError(Exception):
    """The volume is not what it should be, and a person must act. `str()` is one line that says how."""


@dataclasses.dataclass(frozen=True)
class Volume:
    """A volume as it should be."""

    name: str
    engine: juicefs.Engine
    storage: str  # the kind of object store
    bucket: str
    keyless: bool  # the object store's keys stay out of the metadata engine


def program_path(app: str) -> pathlib.Path:
    """Return where an application's copy of the program lies."""
    return PROGRAM_DIR / app / "juicefs"


def remove_program(app: str) -> None:
    """Remove an application's copy of the program."""
    shutil.rmtree(program_path(app).parent, ignore_errors=True)
    with contextlib.suppress(OSError):  # another application's is there too
        PROGRAM_DIR.rmdir()


def read_options(
    name: str, metadata_url: str, storage: str, bucket: str, credentials: dict[str, str] | None
) -> tuple[Volume, fs.JuicefsSecret] | None:
    """Return the volume and the credentials that the options name; None when they ask for an embedded volume.

    Raises:
        ValueError: an option is wrong; the message names it and never holds a password.
    """
    with _naming("volume-name"):
        fs.check_volume_name(name)
    if not metadata_url and not bucket:
        if credentials is not None:
            raise ValueError("credentials: they are of use with metadata-url and bucket only: set those, or reset this")
        return None
    for option, value, other in (("metadata-url", metadata_url, "bucket"), ("bucket", bucket, "metadata-url")):
        if not value:
            raise ValueError(f"{option}: set it too, or reset {other} for an embedded volume")
    with _naming("metadata-url"):
        engine, user = parse_metadata_url(metadata_url)
    if storage not in juicefs.KEYLESS_STORES:
        raise ValueError(f"storage-type: one of {', '.join(juicefs.KEYLESS_STORES)}")
    with _naming("bucket"):
        check_bucket(bucket)
    with _naming("credentials"):
        credentials = credentials or {}
        unknown = sorted(set(credentials) - set(fs.JuicefsSecret.names()))
        if unknown:
            raise ValueError(f"unknown key {unknown[0]}; possible: {', '.join(fs.JuicefsSecret.names())}")
        if user is not None and "meta-user" in credentials:
            raise ValueError("meta-user: the user stands in metadata-url already: leave one of them out")
        content = fs.JuicefsSecret.from_content(credentials | ({"meta-user": user} if user else {}))
    return Volume(name=name, engine=engine, storage=storage, bucket=bucket, keyless=True), content


def parse_metadata_url(url: str) -> tuple[juicefs.Engine, str | None]:
    """Return the engine that a URL without password names, and the user in it.

    Raises:
        ValueError: the URL cannot be used; the message says why and never quotes it.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as e:
        raise ValueError(_EXAMPLE) from e
    login, _, place = parts.netloc.rpartition("@")
    if ":" in login:
        raise ValueError("leave the password out of it: it belongs into a secret, named by the option credentials")
    kind = {"redis": "redis", "rediss": "redis"}.get(parts.scheme)
    if kind is None:
        known = re.fullmatch(r"[a-z][a-z0-9+.-]*", parts.scheme)
        problem = f"metadata engine {parts.scheme} is not supported; " if known else ""
        raise ValueError(f"{problem}{_EXAMPLE}")
    if "," in place:
        raise ValueError("one server is supported; Sentinel and Cluster are not")
    if not host or parts.fragment or not re.fullmatch(r"/[0-9]{1,3}", parts.path):
        raise ValueError(_EXAMPLE)
    for name, _ in urllib.parse.parse_qsl(parts.query, keep_blank_values=True):
        if name not in _REDIS_PARAMS:
            raise ValueError(
                "unknown parameter behind the question mark; possible: " + ", ".join(sorted(_REDIS_PARAMS))
            )
    engine = juicefs.Engine(
        kind, (fs.join_address(host, port or 6379),), parts.path[1:], tls=parts.scheme == "rediss", params=parts.query
    )
    return engine, urllib.parse.unquote(login) or None


_EXAMPLE = "write it as redis://HOST:6379/1 or rediss://HOST:6379/1"


def check_bucket(bucket: str) -> None:
    """Raise `ValueError` unless `bucket` is the address of one, with its scheme, and without keys."""
    parts = urllib.parse.urlsplit(bucket)
    if "@" in parts.netloc:
        raise ValueError("leave the keys out of it: they belong into a secret, named by the option credentials")
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise ValueError("write it as https://BUCKET.HOST or https://HOST/BUCKET")


def ensure_formatted(
    program: pathlib.Path, volume: Volume, secret: fs.JuicefsSecret, *, uuid: str | None
) -> juicefs.Setting:
    """Return the volume's setting; if `uuid` is None, format it first when the engine says that it holds none.

    Args:
        program: juicefs.
        volume: what should be there.
        secret: the credentials of engine and object store.
        uuid: of the volume that was there before; such a volume is never formatted again.

    Raises:
        juicefs.UnreachableError: the engine does not answer.
        juicefs.JuicefsError: juicefs failed.
        VolumeError: something else is there, or the volume is gone.
    """
    setting = juicefs.inspect(program, volume.engine, secret)
    if setting is None and uuid is None:
        _format(program, volume, secret)
        setting = juicefs.inspect(program, volume.engine, secret)
    if setting is None:
        if uuid is None:
            raise juicefs.JuicefsError("the volume is not there after juicefs format")
        raise VolumeError(
            f"the metadata engine lost volume {volume.name} ({uuid}): restore its backup; it is not formatted again"
        )
    if setting.name != volume.name:
        raise VolumeError(
            f"the metadata engine holds volume {setting.name}, not {volume.name}: "
            f"set volume-name={setting.name}, or name another database"
        )
    if uuid is not None and setting.uuid != uuid:
        raise VolumeError(
            f"the metadata engine holds another volume {volume.name} ({setting.uuid}) than the one published ({uuid}): "
            "somebody formatted it anew, or metadata-url changed; name the old one, or deploy another application"
        )
    if setting.bucket.rstrip("/") != volume.bucket.rstrip("/"):
        raise VolumeError(
            f"volume {volume.name} keeps its data at {setting.bucket}, not at {volume.bucket}: bring that address back"
        )
    return setting


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
        version=".".join(map(str, juicefs.version(program))),
        keyless=volume.keyless,
    )


def describe(volume: Volume, setting: juicefs.Setting, program: pathlib.Path) -> dict[str, str]:
    """Return what may be shown of a volume, by name."""
    return {
        "volume": volume.name,
        "uuid": setting.uuid,
        "metadata-url": volume.engine.url(),
        "storage-type": setting.storage,
        "bucket": setting.bucket,
        "clients": str(setting.sessions),
        "juicefs-version": ".".join(map(str, juicefs.version(program))),
    }


@contextlib.contextmanager
def _naming(option: str) -> collections.abc.Generator[None]:
    try:
        yield
    except ValueError as e:
        raise ValueError(f"{option}: {e}") from e


def _format(program: pathlib.Path, volume: Volume, secret: fs.JuicefsSecret) -> None:
    version = juicefs.version(program)
    flags = juicefs.flags(version, {"no-update": True, "storage": volume.storage, "bucket": volume.bucket})
    if volume.keyless:
        keys = juicefs.environment(secret, store=volume.storage, keyless=True)
    else:
        content = secret.content()
        names = {"access-key": "ACCESS_KEY", "secret-key": "SECRET_KEY", "session-token": "SESSION_TOKEN"}
        keys = {variable: content[key] for key, variable in names.items() if key in content}
    url = volume.engine.url(secret.meta_user)
    try:
        juicefs.invoke(program, "format", *flags, url, volume.name, secret=secret, env=keys, timeout=_FORMAT_S)
    except CommandError as e:
        raise juicefs.JuicefsError(f"juicefs format: {juicefs.explain(e)}") from e

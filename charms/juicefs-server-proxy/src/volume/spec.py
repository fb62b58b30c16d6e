"""The volume that options and secrets ask for, checked."""

import collections.abc
import dataclasses
import re
import urllib.parse

from slurm_ddp import juicefs_access
from slurm_ddp.charm import naming
from slurm_ddp.interfaces import filesystem_info as fs

_KEYS_HINT = "remove the keys from it: they go into a secret, named by the option credentials"
_BUCKETS = {
    "s3": "https://BUCKET.HOST or https://HOST/BUCKET",
    "minio": "https://HOST/BUCKET",
    "gs": "gs://BUCKET",
    "file": "file:///FOLDER",
}
_COMPRESSIONS = ("none", "lz4", "zstd")
_KIB = {"": 1, "K": 1, "M": 1024}


@dataclasses.dataclass(frozen=True)
class Format:
    """How the volume is made. The first two are for good, the others can change."""

    block_kib: int = 4096
    compression: str = "none"
    capacity_gib: int = 0  # 0: no limit
    inodes: int = 0  # 0: no limit
    trash_days: int = 1


@dataclasses.dataclass(frozen=True)
class Volume:
    """A volume as it should be."""

    name: str
    engine: juicefs_access.Engine
    storage: str  # the kind of object store
    bucket: str
    keyless: bool  # the object store's keys stay out of the metadata engine
    region: str = ""
    format: Format = Format()
    # An RSA key in PEM, which formatting alone needs; with it, blocks are encrypted
    encrypt_key: str = dataclasses.field(default="", repr=False)


def read_format(block_size: str, compression: str, capacity: int, inodes: int, trash_days: int) -> Format:
    """Return how the volume is made. Raises `ValueError`, which names the option."""
    with naming("block-size"):
        found = re.fullmatch(r"([0-9]{1,6})([KM]?)", block_size)
        kib = int(found[1]) * _KIB[found[2]] if found else 0
        if not 64 <= kib <= 16384 or kib & (kib - 1):
            raise ValueError("a power of two between 64K and 16M, like 4M")
    with naming("compression"):
        if compression not in _COMPRESSIONS:
            raise ValueError(f"one of {', '.join(_COMPRESSIONS)}")
    for option, value in (("capacity", capacity), ("inodes", inodes), ("trash-days", trash_days)):
        if value < 0:
            raise ValueError(f"{option}: 0 or more")
    return Format(kib, compression, capacity, inodes, trash_days)


def read_credentials(
    content: collections.abc.Mapping[str, str], user: str | None = None
) -> tuple[fs.JuicefsSecret, str]:
    """Return the credentials of engine and store, and the key for encryption, from the user's secret.

    Args:
        content: of the secret.
        user: of the metadata engine, if its URL names one.

    Raises:
        ValueError: the content is not possible; the message names the key and never quotes a value.
    """
    possible = (*fs.JuicefsSecret.names(), "encrypt-key")
    unknown = sorted(set(content) - set(possible))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]}; possible: {', '.join(possible)}")
    if user is not None and "meta-user" in content:
        raise ValueError("meta-user: metadata-url already names the user: remove one of the two")
    key = content.get("encrypt-key", "")
    if key and ("-----BEGIN RSA PRIVATE KEY-----" not in key or "ENCRYPTED" not in key):
        hint = "openssl genrsa -traditional -aes256 -out key.pem 2048"  # the form that every version of juicefs reads
        raise ValueError(f"encrypt-key: not an RSA key in PEM with a passphrase: make one with {hint}")
    if key and not content.get("encrypt-passphrase"):
        raise ValueError("encrypt-passphrase: required by encrypt-key")
    return fs.JuicefsSecret.from_content(dict(content) | ({"meta-user": user} if user else {})), key


def read_bucket(storage: str, bucket: str) -> str:
    """Return the bucket as juicefs takes it. Raises `ValueError` unless it has its scheme, and no keys in it."""
    parts = urllib.parse.urlsplit(bucket)
    hint = f"write it as {_BUCKETS[storage]}"
    if "@" in parts.netloc:
        raise ValueError(_KEYS_HINT)
    if parts.query or parts.fragment or any(c.isspace() for c in bucket):
        raise ValueError(hint)
    if storage == "file":
        if parts.scheme != "file" or parts.netloc or not re.fullmatch(r"(/[A-Za-z0-9._+-]+)+/?", parts.path):
            raise ValueError(hint)
        return parts.path.rstrip("/") + "/"
    if storage == "gs":
        if parts.scheme != "gs" or not parts.netloc or parts.path.strip("/"):
            raise ValueError(hint)
        return f"gs://{parts.netloc}"
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(hint)
    if storage == "minio" and not parts.path.strip("/"):
        raise ValueError(hint)
    return bucket


def check_storage(storage: str) -> None:
    """Raise `ValueError` unless this charm can offer a volume on such a store."""
    if storage not in juicefs_access.KEYLESS_STORES:
        raise ValueError(f"one of {', '.join(juicefs_access.KEYLESS_STORES)}")

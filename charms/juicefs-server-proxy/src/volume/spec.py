"""The volume that options and secrets ask for, checked."""

import collections.abc
import dataclasses
import difflib
import pathlib
import re
import urllib.parse

from slurm_ddp import juicefs_access
from slurm_ddp.charm import naming
from slurm_ddp.interfaces import filesystem_info as fs

# Kinds of object stores: how a bucket is written, for the user and as a pattern
_BUCKETS = {
    "s3": ("https://BUCKET.HOST or https://HOST/BUCKET", r"(?i:https?)://[^/?#\s]+(/[^?#\s]*)?"),
    "minio": ("https://HOST/BUCKET", r"(?i:https?)://[^/?#\s]+/+[^/?#\s][^?#\s]*"),
    "gs": ("gs://BUCKET", r"(?i:gs)://[^/?#\s]+/*"),
    "file": ("file:///FOLDER", r"(?i:file):(//)?(/[A-Za-z0-9._+-]+)+/?"),
}
# Hosts that begin with the bucket's name, by the stores' own documentation; others of S3 may be of
# either style
_HOST_STYLE = re.compile(
    r"(?!s3[.-]|vpce-)[^/]+\.s3[.-][^/]*\.?"
    r"(amazonaws\.com(\.cn)?|wasabisys\.com|backblazeb2\.com|scw\.cloud|cloud\.ovh\.(net|us)|ionoscloud\.com"
    r"|cloud-object-storage\.appdomain\.cloud|qiniucs\.com)"
    r"|[^/]+\.[^.]+\.(aliyuncs|digitaloceanspaces|linodeobjects|vultrobjects|your-objectstorage|volces|ksyuncs)\.com"
    r"|[^/]+\.(storage\.googleapis|(cos\.[^.]+\.myqcloud|obs\.[^.]+\.myhuaweicloud))\.com"
    r"|[^/]+\.([^.]+\.exo\.io|gateway\.storjshare\.io|fly\.storage\.tigris\.dev)"
    r"|[^/]+\.(?!eu\.|fedramp\.)[^.]+(\.eu|\.fedramp)?\.r2\.cloudflarestorage\.com",  # account, jurisdiction
    re.IGNORECASE,
)
_COMPRESSIONS = ("none", "lz4", "zstd")
_KIB = {"": 1, "K": 1, "M": 1024}


@dataclasses.dataclass(frozen=True)
class Format:
    """How the volume is made. The first two are for good, the others can change."""

    block_kib: int = 4096
    compression: str = "none"
    capacity_gib: int = 0  # 0: no limit
    inodes: int = 0  # 0: no limit
    trash_days: int = 0


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

    def access(
        self, credentials: fs.JuicefsSecret, *, directory: pathlib.Path
    ) -> juicefs_access.Access:
        """Build what juicefs needs for the volume, with its files in `directory`."""
        place = {"store": self.storage, "region": self.region}
        return juicefs_access.access(
            self.engine, credentials, directory=directory, keyless=self.keyless, **place
        )


def read_format(
    block_size: str, compression: str, capacity: int, inodes: int, trash_days: int
) -> Format:
    """Check the options of the format. Raises `ValueError`, which names the option."""
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
    """Read the credentials of engine and store, and the encryption key, from the user's secret.

    Raises `ValueError` if the content is invalid; the message names the key and never quotes a
    value.
    """
    possible = (*fs.JuicefsSecret.names(), "encrypt-key")
    if unknown := sorted(set(content) - set(possible)):
        close = difflib.get_close_matches(unknown[0], possible, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"unknown key {unknown[0]}: {hint}all keys: docs/howto/storage.md")
    if user is not None and "meta-user" in content:
        raise ValueError("meta-user: metadata-url already names the user: remove one of the two")
    key = content.get("encrypt-key", "")
    if key and ("-----BEGIN RSA PRIVATE KEY-----" not in key or "ENCRYPTED" not in key):
        make = "openssl genrsa -traditional -aes256 -out key.pem 2048"
        raise ValueError(
            f"encrypt-key: not an RSA key in PEM with a passphrase: make one with {make}"
        )
    if key and not content.get("encrypt-passphrase"):
        raise ValueError("encrypt-passphrase: required by encrypt-key")
    return fs.JuicefsSecret.from_content(dict(content) | ({"meta-user": user} if user else {})), key


def read_bucket(storage: str, bucket: str) -> str:
    """Return the bucket in juicefs' form.

    Raises `ValueError` without its scheme, or with keys in it.
    """
    example, pattern = _BUCKETS[storage]
    parts = urllib.parse.urlsplit(bucket)
    if "@" in parts.netloc:
        raise ValueError(
            "remove the keys from it: they go into a secret, named by the option credentials"
        )
    if not re.fullmatch(pattern, bucket):
        raise ValueError(f"write it as {example}")
    # JuiceFS takes the first name of a path for the bucket, for any host, and drops the rest;
    # MinIO's may be below /minio (pkg/object/s3.go and minio.go, 1.3)
    path = re.sub("^/minio(?=/[^/])", "", parts.path) if storage == "minio" else parts.path
    in_host = storage == "s3" and _HOST_STYLE.fullmatch(parts.hostname or "") is not None
    if storage in ("s3", "minio") and not re.fullmatch("/*" if in_host else "(/[^/%]+)?/*", path):
        where = (
            "this host begins with the bucket's name, and JuiceFS would take another"
            if in_host
            else "it is dropped"
        )
        raise ValueError(f"write it as {example}, without a path behind the bucket: {where}")
    if storage == "file":
        return parts.path.rstrip("/") + "/"
    return f"gs://{parts.netloc}" if storage == "gs" else bucket

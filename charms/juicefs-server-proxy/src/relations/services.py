"""The databags of charmed databases and object stores: postgresql_client, mysql_client and s3.

Both forms are read: credentials in Juju secrets, and, from older providers, in the databag itself.
The formats are from charm-relation-interfaces: postgresql_client v0, mysql_client v0, s3 v0 and v1.
"""

import base64
import binascii
import collections.abc
import dataclasses
import json
import re
import ssl
import typing

from slurm_ddp import juicefs_access
from slurm_ddp.interfaces import filesystem_info as fs

Databag = collections.abc.Mapping[str, str]
# The content of a secret, by its id
Reveal = collections.abc.Callable[[str], collections.abc.Mapping[str, str]]

# Parameters of the engine's URL by the database's TLS setting, if it publishes no authority
_TLS = {
    ("postgres", "true"): "sslmode=require",
    ("postgres", "false"): "sslmode=disable",
    ("mysql", "true"): "tls=skip-verify",
}
ENGINE_SECRETS = ("username", "password", "tls", "tls-ca", "uris")  # that a database is asked for
STORE_SECRETS = ("access-key", "secret-key")


@dataclasses.dataclass(frozen=True)
class Offer:
    """What one relation adds to a volume."""

    credentials: dict[str, str] = dataclasses.field(repr=False)  # by the names of fs.JuicefsSecret
    engine: juicefs_access.Engine | None = None
    bucket: str = ""
    region: str = ""


def read_engine(kind: str, data: Databag, reveal: Reveal) -> Offer | None:
    """Read a database's offer, if there is one.

    Raises `ValueError` if unusable, without credentials.
    """
    content = _content(data, ("secret-user", "secret-tls"), reveal)
    endpoint, database = data.get("endpoints", "").split(",")[0].strip(), data.get("database", "")
    if not endpoint or not content.get("username") or not content.get("password") or not database:
        return None
    if "/" in endpoint:
        raise ValueError("it offers a socket, which clients on other machines cannot reach")
    try:
        host, port = fs.split_address(endpoint)
    except fs.UriError as e:
        raise ValueError(f"its endpoints: {e}") from e
    hosts = (fs.join_address(host, port or fs.ENGINE_PORTS[kind]),)
    credentials = {"meta-user": content["username"], "meta-password": content["password"]}
    tls, params = content.get("tls", "").lower(), ""
    if tls == "true" and content.get("tls-ca"):
        credentials["tls-ca"] = content["tls-ca"]
    else:
        params = _TLS.get((kind, tls), "")
    return Offer(credentials, engine=juicefs_access.Engine(kind, hosts, database, params=params))


def read_store(data: Databag, reveal: Reveal) -> Offer | None:
    """Read an object store's offer, if any.

    Raises `ValueError` if unusable, without credentials.
    """
    content = _content(data, ("secret-extra",), reveal)
    bucket, region = data.get("bucket", ""), data.get("region", "")
    if not bucket or not content.get("access-key") or not content.get("secret-key"):
        return None
    if data.get("path", "").strip("/"):
        raise ValueError("it names a path: JuiceFS takes a bucket as a whole; reset the path there")
    endpoint = data.get("endpoint", "").rstrip("/")
    if not endpoint and not region:
        raise ValueError("it names neither an endpoint nor a region: set one of them there")
    found = re.fullmatch(
        r"(?i)(https?)://([^/?#@\s]+)", endpoint or f"https://s3.{region}.amazonaws.com"
    )
    if not found:
        raise ValueError("its endpoint is not https://HOST")
    scheme, host = found[1].lower(), found[2]
    in_host = data.get("s3-uri-style") == "host"
    credentials = {key: content[key] for key in STORE_SECRETS}
    if chain := data.get("tls-ca-chain"):
        credentials["tls-ca"] = _chain(chain)
    address = f"{scheme}://{bucket}.{host}" if in_host else f"{scheme}://{host}/{bucket}"
    return Offer(credentials, bucket=address, region=region)


def _content(data: Databag, pointers: tuple[str, ...], reveal: Reveal) -> dict[str, str]:
    """Merge the databag with the content of the secrets that it points to."""
    found = dict(data)
    for pointer in pointers:
        if data.get(pointer):
            found |= reveal(data[pointer])
    return found


def _chain(text: str) -> str:
    """Join PEM certificates: a JSON list or plain text, each in PEM or in base64 of PEM or DER."""
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = text
    items = typing.cast("list[object]", parsed if isinstance(parsed, list) else [parsed])
    return "\n".join(_pem(str(item)).strip() for item in items) + "\n"


def _pem(text: str) -> str:
    if "-----BEGIN" in text:
        return text
    try:
        decoded = base64.b64decode(text, validate=True)
    except binascii.Error as e:
        raise ValueError("its tls-ca-chain holds something other than a certificate") from e
    return (
        decoded.decode("ascii", "replace")
        if b"-----BEGIN" in decoded
        else ssl.DER_cert_to_PEM_cert(decoded)
    )

"""What charmed databases and object stores publish in their databags: postgresql_client, mysql_client and s3.

Both forms are read: credentials in Juju secrets, and, from older providers, in the databag itself. The formats are
those of charm-relation-interfaces: postgresql_client v0, mysql_client v0, s3 v0 and v1.
"""

import base64
import binascii
import collections.abc
import dataclasses
import json
import ssl
import typing
import urllib.parse

from slurm_ddp import juicefs_access
from slurm_ddp.interfaces import filesystem_info as fs

Databag = collections.abc.Mapping[str, str]
Reveal = collections.abc.Callable[[str], collections.abc.Mapping[str, str]]  # the content of a secret, by its id

_PORTS = {"postgres": 5432, "mysql": 3306}
_ENGINE_SECRETS = ("username", "password", "tls", "tls-ca", "uris")
_STORE_SECRETS = ("access-key", "secret-key")


@dataclasses.dataclass(frozen=True)
class Offer:
    """What one relation adds to a volume."""

    credentials: dict[str, str] = dataclasses.field(repr=False)  # by the names of fs.JuicefsSecret
    engine: juicefs_access.Engine | None = None
    bucket: str = ""
    region: str = ""


def engine_request(volume: str) -> dict[str, str]:
    """Return what to ask a database for: a database of the volume's own, for clients on other machines."""
    return {
        "database": volume.replace("-", "_"),
        "requested-secrets": json.dumps(_ENGINE_SECRETS),
        "external-node-connectivity": "true",
    }


def store_request(volume: str) -> dict[str, str]:
    """Return what to ask an object store for."""
    return {"bucket": volume, "requested-secrets": json.dumps(_STORE_SECRETS), "lib-version": "1.0"}


def read_engine(kind: str, data: Databag, reveal: Reveal) -> Offer | None:
    """Return what a database offers; None when it does not yet.

    Raises:
        ValueError: it cannot be used; the message holds no credentials.
    """
    content = _content(data, ("secret-user", "secret-tls"), reveal)
    endpoint = data.get("endpoints", "").split(",")[0].strip()
    if not endpoint or not content.get("username") or not content.get("password") or not data.get("database"):
        return None
    if "/" in endpoint:
        raise ValueError("it offers a socket, which clients on other machines cannot reach")
    try:
        host, port = fs.split_address(endpoint)
    except fs.UriError as e:
        raise ValueError(f"its endpoints: {e}") from e
    has_tls, authority = content.get("tls", "").lower(), content.get("tls-ca", "")
    credentials = {"meta-user": content["username"], "meta-password": content["password"]}
    params = {}
    if has_tls == "true" and authority:
        credentials["tls-ca"] = authority
    elif has_tls == "true":
        params = {"postgres": {"sslmode": "require"}, "mysql": {"tls": "skip-verify"}}[kind]
    elif has_tls == "false" and kind == "postgres":
        params = {"sslmode": "disable"}
    hosts = (fs.join_address(host, port or _PORTS[kind]),)
    return Offer(
        credentials, engine=juicefs_access.Engine(kind, hosts, data["database"], params=urllib.parse.urlencode(params))
    )


def read_store(data: Databag, reveal: Reveal) -> Offer | None:
    """Return what an object store offers; None when it does not yet.

    Raises:
        ValueError: it cannot be used; the message holds no credentials.
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
    parts = urllib.parse.urlsplit(endpoint or f"https://s3.{region}.amazonaws.com")
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query or "@" in parts.netloc:
        raise ValueError("its endpoint is not https://HOST")
    in_host = data.get("s3-uri-style") == "host"
    address = f"{parts.scheme}://{bucket}.{parts.netloc}" if in_host else f"{parts.scheme}://{parts.netloc}/{bucket}"
    credentials = {key: content[key] for key in _STORE_SECRETS}
    if chain := data.get("tls-ca-chain"):
        credentials["tls-ca"] = _chain(chain)
    return Offer(credentials, bucket=address, region=region)


def _content(data: Databag, pointers: tuple[str, ...], reveal: Reveal) -> dict[str, str]:
    """Return what the databag holds, with the content of the secrets that it points to."""
    found = dict(data)
    for pointer in pointers:
        if data.get(pointer):
            found |= reveal(data[pointer])
    return found


def _chain(text: str) -> str:
    """Return certificates in PEM: of a JSON list, or by themselves; each in PEM or base64."""
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = [text]
    items = typing.cast("list[object]", parsed) if isinstance(parsed, list) else [parsed]
    found: list[str] = []
    for item in map(str, items):
        if "-----BEGIN" in item:
            found.append(item.strip())
            continue
        try:
            decoded = base64.b64decode(item, validate=True)
        except binascii.Error as e:
            raise ValueError("its tls-ca-chain holds something that is no certificate") from e
        in_pem = decoded.startswith(b"-----BEGIN")
        found.append((decoded.decode("ascii", "replace") if in_pem else ssl.DER_cert_to_PEM_cert(decoded)).strip())
    return "\n".join(found) + "\n"

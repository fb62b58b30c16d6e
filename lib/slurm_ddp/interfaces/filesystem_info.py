"""`filesystem_info`: a provider says how to reach a filesystem, in one URI.

The provider's application databag has one key, `endpoint`:

    SCHEME://[USER@](HOST[,HOST...])/PATH[?OPTION=VALUE[&...]]

with everything between the punctuation percent-encoded, but for slashes, which upstream's library leaves as they are in
users and hosts too (and then cannot read back). `nfs`, `cephfs` and `lustre` are on the wire exactly as the
filesystem-charms of charmed-hpc write and read them (library filesystem_info, LIBAPI 0, LIBPATCH 3); `juicefs` is ours.
Readers of that library lower-case the hosts, so nothing that needs its case may be a host. Credentials travel in a Juju
secret whose id the option `auth` holds, and `auth-rev` changes with the secret's revision so that readers are woken.

A requirer of ours says in its unit databag, under `schemes`, what it can mount. Upstream's writes nothing there.

A URI may hold a key (`auth=plain:...`, sent by charms that cannot make secrets): nothing here logs one or quotes one
in an error, and no `repr` shows it.
"""

import collections.abc
import dataclasses
import ipaddress
import re
import urllib.parse

import pydantic

KEY = "endpoint"  # the key in the provider's application databag
SCHEMES_KEY = "schemes"  # the key in a requirer's unit databag
SCHEMES = "cephfs,juicefs,lustre,nfs"  # what `parse` reads

_DB_PORTS = {"redis": 6379, "mysql": 3306, "postgres": 5432, "tikv": 2379, "etcd": 2379}
ENGINES = tuple(_DB_PORTS)  # metadata engines of JuiceFS that several hosts can share

_MONITOR_PORTS = {1: 6789, 2: 3300}  # of Ceph's monitors, by the messenger's version: IANA's

_IN_FILES = ("tls-ca", "tls-cert", "tls-key", "google-credentials")  # keys of a secret that clients keep in files

# JuiceFS 0.14 to 1.4: letters, digits and hyphens, 3 to 63 of them, no hyphen at either end
_VOLUME_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


class UriError(ValueError):
    """The text is no URI of this interface. `str()` is one line that never quotes the URI."""


class UnknownSchemeError(UriError):
    """The URI is of a filesystem that nobody here knows; `scheme` names it."""

    def __init__(self, scheme: str) -> None:
        super().__init__(f"unknown filesystem {_short(scheme)}")
        self.scheme = scheme


class UnknownOptionError(UriError):
    """The URI has an option that nobody here knows; `option` names it."""

    def __init__(self, scheme: str, option: str) -> None:
        super().__init__(f"unknown option {_short(option)} for {scheme}")
        self.scheme = scheme
        self.option = option


@dataclasses.dataclass(frozen=True)
class Nfs:
    """An NFS export."""

    host: str
    path: str
    port: int | None = None

    def __post_init__(self) -> None:
        _check_path(self.path)
        _check_host(self.host)
        _check_port(self.port)

    def uri(self) -> str:
        """Return the URI that `parse` turns back into this."""
        return _join(_Parts("nfs", (join_address(self.host, self.port),), path=self.path))


@dataclasses.dataclass(frozen=True)
class Monitor:
    """Where a Ceph monitor listens."""

    host: str
    port: int
    messenger: int  # 1 or 2: the version of Ceph's protocol that is spoken there


@dataclasses.dataclass(frozen=True)
class Cephfs:
    """A directory of a Ceph filesystem. One of `secret_id` and `key` is set; a secret's content is `{"key": ...}`."""

    hosts: tuple[str, ...]  # monitors, as the provider writes them: see `monitors`
    user: str
    fsid: str
    name: str
    path: str = "/"
    secret_id: str | None = None
    auth_rev: int | None = None
    key: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_path(self.path)
        _check_filled(user=self.user, fsid=self.fsid, name=self.name)
        if bool(self.secret_id) == bool(self.key):
            raise UriError("cephfs needs a secret or a key, and not both")
        self.monitors()

    def monitors(self) -> tuple[Monitor, ...]:
        """Return the monitors, in every form in which Ceph and mount.ceph(8) print or take them.

        HOST, HOST:PORT, [IPV6]:PORT, an IPv6 address alone, v2:HOST:PORT, each also with /NONCE behind it; vectors
        `[v2:HOST:PORT/NONCE,v1:HOST:PORT/NONCE]`; and lists with slashes in between, HOST:PORT/HOST:PORT.
        """
        without_nonces = (re.sub(r"/[0-9]+(?=[/\]]|$)", "", host) for host in self.hosts)
        texts = (text for host in without_nonces for text in host.split("/"))
        found = tuple(dict.fromkeys(_monitor(text) for text in texts if text))
        if not found:
            raise UriError("cephfs: no monitor among the hosts")
        return found

    def uri(self) -> str:
        """Return the URI that `parse` turns back into this."""
        options = {"fsid": self.fsid, "name": self.name, "auth": self.secret_id or f"plain:{self.key}"}
        if self.auth_rev is not None:
            options["auth-rev"] = str(self.auth_rev)
        return _join(_Parts("cephfs", self.hosts, user=self.user, path=self.path, options=options))


@dataclasses.dataclass(frozen=True)
class Lustre:
    """A Lustre filesystem: the network identifiers of its management server, `ADDRESS@NETWORK`, and its name."""

    nids: tuple[str, ...]
    fs_name: str

    def __post_init__(self) -> None:
        _check_filled(fs_name=self.fs_name)

    def uri(self) -> str:
        """Return the URI that `parse` turns back into this."""
        return _join(_Parts("lustre", self.nids, options={"fs-name": self.fs_name}))


@dataclasses.dataclass(frozen=True)
class Juicefs:
    """A JuiceFS volume; what a reader needs besides the content of its secret (`JuicefsSecret`)."""

    name: str
    hosts: tuple[str, ...]  # of the metadata engine, each HOST:PORT
    engine: str  # one of ENGINES
    db: str  # what stands behind the host in the engine's URL: a Redis number, a database, a prefix
    uuid: str
    secret_id: str | None = None  # of the content; without one the engine asks for no password
    auth_rev: int | None = None
    subdir: str = "/"  # the directory of the volume to mount
    tls: bool = False
    params: str = ""  # the query of the metadata engine's URL, as JuiceFS reads it
    storage: str = ""  # the kind of object store, as `juicefs format --storage` names it
    bucket: str = ""  # its address
    version: str = ""  # of the juicefs program that made the volume
    keyless: bool = False  # the engine does not hold the object store's keys: each client brings those of the secret
    master: str = ""  # the name by which Redis Sentinels know the engine; `hosts` are the Sentinels then
    region: str = ""  # of the object store

    def __post_init__(self) -> None:
        check_volume_name(self.name)
        _check_path(self.subdir)
        _check_filled(uuid=self.uuid)
        if self.engine not in ENGINES:
            raise UriError(f"unknown metadata engine {_short(self.engine)}")
        self.addresses()

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Return host and port of each server of the metadata engine."""
        pairs = (split_address(host) for host in self.hosts)
        return tuple((host, port or _DB_PORTS[self.engine]) for host, port in pairs)

    def uri(self) -> str:
        """Return the URI that `parse` turns back into this."""
        options = {
            "engine": self.engine,
            "db": self.db,
            "tls": "true" if self.tls else "",
            "params": self.params,
            "uuid": self.uuid,
            "storage": self.storage,
            "bucket": self.bucket,
            "version": self.version,
            "keyless": "true" if self.keyless else "",
            "master": self.master,
            "region": self.region,
            "auth": self.secret_id or "",
            "auth-rev": "" if self.auth_rev is None else str(self.auth_rev),
        }
        options = {key: value for key, value in options.items() if value}  # readers drop or refuse empty values
        return _join(_Parts("juicefs", self.hosts, user=self.name, path=self.subdir, options=options))


Filesystem = Nfs | Cephfs | Lustre | Juicefs


class JuicefsSecret(pydantic.BaseModel, frozen=True, extra="ignore"):
    """The content of the secret behind a `juicefs` URI. Any key may be absent: the engine or store then asks for none.

    The same keys, all by the user's hand, are those of juicefs-server-proxy's option `credentials`.
    """

    meta_user: str | None = pydantic.Field(default=None, alias="meta-user")
    meta_password: pydantic.SecretStr | None = pydantic.Field(default=None, alias="meta-password")
    access_key: pydantic.SecretStr | None = pydantic.Field(default=None, alias="access-key")
    secret_key: pydantic.SecretStr | None = pydantic.Field(default=None, alias="secret-key")
    session_token: pydantic.SecretStr | None = pydantic.Field(default=None, alias="session-token")
    sentinel_password: pydantic.SecretStr | None = pydantic.Field(default=None, alias="sentinel-password")
    tls_ca: pydantic.SecretStr | None = pydantic.Field(default=None, alias="tls-ca")
    tls_cert: pydantic.SecretStr | None = pydantic.Field(default=None, alias="tls-cert")
    tls_key: pydantic.SecretStr | None = pydantic.Field(default=None, alias="tls-key")
    google_credentials: pydantic.SecretStr | None = pydantic.Field(default=None, alias="google-credentials")
    encrypt_passphrase: pydantic.SecretStr | None = pydantic.Field(default=None, alias="encrypt-passphrase")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the keys that the content may have."""
        return tuple(str(field.alias) for field in cls.model_fields.values())

    @classmethod
    def from_content(cls, content: collections.abc.Mapping[str, str]) -> "JuicefsSecret":
        """Return the typed content.

        Raises:
            ValueError: a value cannot be put into a service's environment; the message names its key only.
        """
        for key in cls.names():
            text = content.get(key, "")
            if "\0" in text or (key not in _IN_FILES and ("\r" in text or "\n" in text)):
                raise ValueError(f"{key}: line breaks and NUL are not possible here")
            if key.startswith("tls-") and text and "-----BEGIN " not in text:
                raise ValueError(f"{key}: a certificate or key in PEM is needed, -----BEGIN ...")
        return cls.model_validate({key: content[key] for key in cls.names() if content.get(key)})

    def content(self) -> dict[str, str]:
        """Return the content as a Juju secret takes it."""
        fields = {str(field.alias): getattr(self, name) for name, field in type(self).model_fields.items()}
        return {key: reveal(value) for key, value in fields.items() if value is not None}

    def values(self) -> tuple[str, ...]:
        """Return what must not be shown: every value except the user's name and certificates."""
        content = {
            key: value for key, value in self.content().items() if key not in ("meta-user", "tls-ca", "tls-cert")
        }
        return tuple(content.values())


def reveal(value: pydantic.SecretStr | str | None) -> str:
    """Return the text behind a value that hides it; nothing for None."""
    return value.get_secret_value() if isinstance(value, pydantic.SecretStr) else value or ""


def parse(uri: str) -> Filesystem:
    """Return the filesystem that a provider offers.

    Raises:
        UnknownSchemeError: a filesystem that this code does not know.
        UnknownOptionError: an option that this code does not know, hence cannot honour.
        UriError: anything else that is wrong.
    """
    parts = _split(uri)
    readers = {"nfs": _nfs, "cephfs": _cephfs, "lustre": _lustre, "juicefs": _juicefs}
    if parts.scheme not in readers:
        raise UnknownSchemeError(parts.scheme)
    return readers[parts.scheme](parts)


def mounts_juicefs(databag: collections.abc.Mapping[str, str]) -> bool:
    """Tell whether a requirer says in its unit databag that it can mount JuiceFS."""
    return "juicefs" in databag.get(SCHEMES_KEY, "").split(",")


def check_volume_name(name: str) -> None:
    """Raise `UriError` unless JuiceFS takes `name` for a volume's name."""
    if not _VOLUME_NAME.fullmatch(name):
        raise UriError("a volume's name has 3 to 63 letters a-z, digits and hyphens, with no hyphen at either end")


def split_address(text: str) -> tuple[str, int | None]:
    """Return host and port of HOST, HOST:PORT, [ADDRESS] or [ADDRESS]:PORT. Raises `UriError` for anything else."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise UriError("a host has an open bracket, or something else than a port behind it")
    else:
        host, colon, rest = text.partition(":")
        rest = colon + rest
    _check_host(host)
    if not rest:
        return host, None
    if not re.fullmatch(r":[0-9]{1,5}", rest):
        raise UriError("a port is a number")
    port = int(rest[1:])
    _check_port(port)
    return host, port


def _monitor(text: str) -> Monitor:
    found = re.fullmatch(r"\[?(v[12]|any):(.+)", text)
    kind, address = (found[1], found[2]) if found else ("", text)
    if address.count("]") > address.count("["):
        address = address.removesuffix("]")  # of a vector's end
    try:
        host, port = str(ipaddress.IPv6Address(address)), None
    except ValueError:
        host, port = split_address(address)
    messenger = {"v1": 1, "v2": 2}.get(kind) or (2 if port == _MONITOR_PORTS[2] else 1)
    return Monitor(host, port or _MONITOR_PORTS[messenger], messenger)


def join_address(host: str, port: int | None) -> str:
    """Return what `split_address` takes apart."""
    bracketed = f"[{host}]" if ":" in host else host
    return bracketed if port is None else f"{bracketed}:{port}"


def _nfs(parts: "_Parts") -> Nfs:
    _take(parts)
    host, port = split_address(parts.hosts[0])  # of several hosts the first counts, as upstream has it
    return Nfs(host=host, port=port, path=parts.path)


def _cephfs(parts: "_Parts") -> Cephfs:
    options = _take(parts, "fsid", "name", "auth", optional=("auth-rev",))
    kind, _, rest = options["auth"].partition(":")
    if kind not in ("secret", "plain") or not rest:
        raise UriError("cephfs: auth is neither a secret nor a plain key")
    return Cephfs(
        hosts=parts.hosts,
        user=parts.user,
        fsid=options["fsid"],
        name=options["name"],
        path=parts.path,
        secret_id=options["auth"] if kind == "secret" else None,
        key=rest if kind == "plain" else None,
        auth_rev=_number(options, "auth-rev"),
    )


def _lustre(parts: "_Parts") -> Lustre:
    options = _take(parts, "fs-name")
    return Lustre(nids=parts.hosts, fs_name=options["fs-name"])


def _juicefs(parts: "_Parts") -> Juicefs:
    optional = (
        "db",
        "tls",
        "params",
        "storage",
        "bucket",
        "version",
        "keyless",
        "master",
        "region",
        "auth",
        "auth-rev",
    )
    options = _take(parts, "engine", "uuid", optional=optional)
    secret_id = options.get("auth")
    if secret_id is not None and not re.fullmatch(r"secret:.+", secret_id):
        raise UriError("juicefs: auth is not a secret")
    return Juicefs(
        name=parts.user,
        hosts=parts.hosts,
        engine=options["engine"],
        db=options.get("db", ""),
        uuid=options["uuid"],
        secret_id=secret_id,
        auth_rev=_number(options, "auth-rev"),
        subdir=parts.path,
        tls=_flag(options, "tls"),
        params=options.get("params", ""),
        storage=options.get("storage", ""),
        bucket=options.get("bucket", ""),
        version=options.get("version", ""),
        keyless=_flag(options, "keyless"),
        master=options.get("master", ""),
        region=options.get("region", ""),
    )


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What every URI of the interface consists of, decoded."""

    scheme: str
    hosts: tuple[str, ...]
    user: str = ""
    path: str = "/"
    options: dict[str, str] = dataclasses.field(default_factory=dict[str, str], repr=False)


def _split(uri: str) -> _Parts:
    scheme, separator, rest = uri.partition("://")
    if not separator or not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*", scheme):
        raise UriError("not a URI")
    before, _, query = rest.partition("?")
    if not re.fullmatch(r"[!-~]+", uri) or "#" in uri or set(":[]") & set(before.partition(")")[0]):
        raise UriError("not a URI of this interface: something is not percent-encoded")
    # The only parentheses that are not encoded are those around the hosts
    found = re.fullmatch(r"(?:([^@()]*)@)?\(([^@()]+)\)(/[^()]*)?", before)
    if not found:
        raise UriError("the list of hosts is missing")
    # Upstream's reader lower-cases the hosts up to the first encoded character, since its URL parser takes that for an
    # IPv6 zone. A host's case means nothing, so all of it is lowered here.
    hosts = re.sub(r"%..|[^%]+", lambda match: match[0] if match[0][0] == "%" else match[0].lower(), found[2])
    user, path = _unquote(found[1] or ""), _unquote(found[3] or "/")
    options: dict[str, str] = {}
    try:
        pairs = urllib.parse.parse_qsl(
            query, keep_blank_values=True, strict_parsing=bool(query), errors="surrogateescape"
        )
    except ValueError as e:
        raise UriError("the options are malformed") from e
    for key, value in pairs:
        if not value:
            raise UriError(f"option {_short(key)} is empty")
        if key in options:
            raise UriError(f"option {_short(key)} is given twice")
        options[key] = value
    return _Parts(scheme.lower(), tuple(_unquote(hosts).split(",")), user, path, options)


def _join(parts: _Parts) -> str:
    for host in parts.hosts:
        if not host or "," in host:
            raise UriError("a host is empty or has a comma in it")
    if not parts.hosts:
        raise UriError("no host")
    user = f"{_quote(parts.user)}@" if parts.user else ""
    query = urllib.parse.urlencode(parts.options, errors="surrogateescape")
    uri = f"{parts.scheme}://{user}({_quote(','.join(parts.hosts))}){_quote(parts.path, safe='/')}"
    return f"{uri}?{query}" if query else uri


def _quote(text: str, *, safe: str = "") -> str:
    return urllib.parse.quote(text, safe=safe, errors="surrogateescape")


def _unquote(text: str) -> str:
    return urllib.parse.unquote(text, errors="surrogateescape")


def _take(parts: _Parts, *required: str, optional: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the options after a look that those needed are there and no others."""
    for option in parts.options:
        if option not in required and option not in optional:
            raise UnknownOptionError(parts.scheme, option)
    for option in required:
        if option not in parts.options:
            raise UriError(f"{parts.scheme}: option {option} is missing")
    return parts.options


def _number(options: dict[str, str], option: str) -> int | None:
    if option not in options:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", options[option]):
        raise UriError(f"option {option} is not a number")
    return int(options[option])


def _flag(options: dict[str, str], option: str) -> bool:
    if options.get(option, "true") != "true":
        raise UriError(f"option {option} is something else than true")
    return option in options


def _check_host(host: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        if not host or re.search(r"[\[\],:/]", host):
            raise UriError("a host is empty, or neither a name nor an address") from None


def _check_port(port: int | None) -> None:
    if port is not None and not 0 < port < 65536:
        raise UriError("a port is between 1 and 65535")


def _check_path(path: str) -> None:
    if not path.startswith("/"):
        raise UriError("a path is not absolute")


def _check_filled(**fields: str) -> None:
    for name, value in fields.items():
        if not value:
            raise UriError(f"{name.replace('_', '-')} is empty")


def _short(text: str) -> str:
    """Return a name that somebody else chose, harmless in a status line."""
    return repr(text if len(text) <= 40 else text[:40] + "...")

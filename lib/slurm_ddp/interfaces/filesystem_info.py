"""`filesystem_info`: a provider publishes how to reach a filesystem, as one URI.

The provider's application databag has one key, `endpoint`:

    SCHEME://[USER@](HOST[,HOST...])/PATH[?OPTION=VALUE[&...]]

with all between the punctuation percent-encoded, but for slashes, which upstream's library keeps in
users and hosts too (and then cannot read back). `nfs`, `cephfs` and `lustre` are on the wire
exactly as charmed-hpc's filesystem-charms write and read them (library filesystem_info, LIBAPI 0,
LIBPATCH 3); `juicefs` is ours. That library's readers lower-case the hosts. Credentials travel in a
Juju secret, whose id the option `auth` holds; `auth-rev` changes with the secret's revision, to
wake readers.

A requirer of ours publishes the schemes that it can mount in its unit databag, under `schemes`.
Upstream's writes nothing there.

A URI may hold a key (`auth=plain:...`, from charms that cannot make secrets): no log, error or
`repr` shows one.
"""

import collections.abc
import dataclasses
import functools
import ipaddress
import re
import typing
import urllib.parse

import pydantic

KEY = "endpoint"  # the key in the provider's application databag
SCHEMES_KEY = "schemes"  # the key in a requirer's unit databag
SCHEMES = "cephfs,juicefs,lustre,nfs"  # what `parse` reads

ENGINE_PORTS = {"redis": 6379, "mysql": 3306, "postgres": 5432, "tikv": 2379, "etcd": 2379}
ENGINES = tuple(ENGINE_PORTS)  # metadata engines of JuiceFS that several hosts can share

_MONITOR_PORTS = {1: 6789, 2: 3300}  # of Ceph's monitors, by the messenger's version: IANA's

# A volume's options, in the order on the wire. Each is the field of that name, `auth` is
# `secret_id`
_JUICEFS_OPTIONS = tuple(
    "engine db tls params uuid storage bucket version keyless master region auth auth-rev".split()
)
# Keys of a secret that clients keep in files
_IN_FILES = ("tls-ca", "tls-cert", "tls-key", "google-credentials")
_PUBLIC = ("meta-user", "tls-ca", "tls-cert")  # keys whose values may be shown

# JuiceFS 0.14 to 1.4: letters, digits and hyphens, 3 to 63 of them, no hyphen at either end
_VOLUME_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


def _hyphens(name: str) -> str:
    return name.replace("_", "-")


class UriError(ValueError):
    """The text is not a URI of this interface. `str()` is one line that never quotes the URI."""


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The decoded components of a URI."""

    scheme: str
    hosts: tuple[str, ...]
    user: str = ""
    path: str = "/"
    options: dict[str, str] = dataclasses.field(default_factory=dict[str, str], repr=False)

    def take(self, *required: str, optional: tuple[str, ...] = ()) -> dict[str, str]:
        """Return the options. Raises `UriError` for a missing or an unknown one."""
        for option in self.options:
            if option not in (*required, *optional):
                raise UriError(f"unknown option {_short(option)} for {self.scheme}")
        for option in required:
            if option not in self.options:
                raise UriError(f"{self.scheme}: option {option} is missing")
        return self.options


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


@dataclasses.dataclass(frozen=True)
class Monitor:
    """The address of a Ceph monitor."""

    host: str
    port: int
    messenger: int  # 1 or 2: the version of Ceph's protocol that is spoken there


@dataclasses.dataclass(frozen=True)
class Cephfs:
    """A directory of a Ceph filesystem.

    One of `secret_id` and `key` is set; a secret's content is `{"key": ...}`.
    """

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
        """Parse the hosts, in every form of monitors that Ceph and mount.ceph(8) print or take.

        HOST, HOST:PORT, [IPV6]:PORT, an IPv6 address alone, v2:HOST:PORT, each also with /NONCE
        behind it; vectors `[v2:HOST:PORT/NONCE,v1:HOST:PORT/NONCE]`; and lists with slashes in
        between, HOST:PORT/HOST:PORT.
        """
        without_nonces = (re.sub(r"/[0-9]+(?=[/\]]|$)", "", host) for host in self.hosts)
        texts = (text for host in without_nonces for text in host.split("/"))
        found = tuple(dict.fromkeys(_monitor(text) for text in texts if text))
        if not found:
            raise UriError("cephfs: no monitor among the hosts")
        return found


@dataclasses.dataclass(frozen=True)
class Lustre:
    """A Lustre filesystem: its name, and its management server's identifiers ADDRESS@NETWORK."""

    nids: tuple[str, ...]
    fs_name: str

    def __post_init__(self) -> None:
        _check_filled(fs_name=self.fs_name)


@dataclasses.dataclass(frozen=True)
class Juicefs:
    """A JuiceFS volume, without the content of its secret (`JuicefsSecret`)."""

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
    # The engine does not hold the object store's keys: each client brings the secret's
    keyless: bool = False
    master: str = ""  # the engine's name among Redis Sentinels; `hosts` are the Sentinels then
    region: str = ""  # of the object store

    def __post_init__(self) -> None:
        check_volume_name(self.name)
        _check_path(self.subdir)
        _check_filled(uuid=self.uuid)
        if self.engine not in ENGINES:
            raise UriError(f"unknown metadata engine {_short(self.engine)}")
        self.addresses()

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """List host and port of each server of the metadata engine."""
        pairs = (split_address(host) for host in self.hosts)
        return tuple((host, port or ENGINE_PORTS[self.engine]) for host, port in pairs)

    def uri(self) -> str:
        """Return the URI that `parse` reads.

        Options of an empty value are left out: readers drop or refuse them.
        """
        if not self.hosts or any(not host or "," in host for host in self.hosts):
            raise UriError("a host is missing, empty or has a comma in it")
        options: dict[str, object] = {}
        for option in _JUICEFS_OPTIONS:
            value = getattr(self, _juicefs_field(option))
            if value is True:
                options[option] = "true"
            elif value is not False and value not in (None, ""):
                options[option] = value
        place = f"{self.name}@({_quote(','.join(self.hosts))}){_quote(self.subdir, safe='/')}"
        return f"juicefs://{place}?{urllib.parse.urlencode(options, errors='surrogateescape')}"


Filesystem = Nfs | Cephfs | Lustre | Juicefs


class JuicefsSecret(pydantic.BaseModel, frozen=True, extra="ignore", alias_generator=_hyphens):
    """The content of the secret behind a `juicefs` URI.

    The option `credentials` of juicefs-server-proxy names the same.

    A key is absent if the engine or store needs none.
    """

    meta_user: str | None = None
    meta_password: pydantic.SecretStr | None = None
    access_key: pydantic.SecretStr | None = None
    secret_key: pydantic.SecretStr | None = None
    session_token: pydantic.SecretStr | None = None
    sentinel_password: pydantic.SecretStr | None = None
    tls_ca: pydantic.SecretStr | None = None
    tls_cert: pydantic.SecretStr | None = None
    tls_key: pydantic.SecretStr | None = None
    google_credentials: pydantic.SecretStr | None = None
    encrypt_passphrase: pydantic.SecretStr | None = None

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """List the keys that the content may have."""
        return tuple(str(field.alias) for field in cls.model_fields.values())

    @classmethod
    def from_content(cls, content: collections.abc.Mapping[str, str]) -> "JuicefsSecret":
        """Parse the content; unknown keys are ignored.

        Raises:
            ValueError: a value cannot be put into a service's environment; the message names its
                key only.
        """
        known = {key: content[key] for key in cls.names() if content.get(key)}
        for key, text in known.items():
            if "\0" in text or (key not in _IN_FILES and ("\r" in text or "\n" in text)):
                raise ValueError(f"{key}: line breaks and NUL are not possible here")
            if key.startswith("tls-") and "-----BEGIN " not in text:
                raise ValueError(f"{key}: a certificate or key in PEM is needed, -----BEGIN ...")
        return cls.model_validate(known)

    def content(self) -> dict[str, str]:
        """Write the content of a Juju secret."""
        return {
            key: reveal(value)
            for key, value in self.model_dump(by_alias=True, exclude_none=True).items()
        }

    def values(self) -> tuple[str, ...]:
        """List the values that must not be shown: all but the user's name and certificates."""
        return tuple(value for key, value in self.content().items() if key not in _PUBLIC)


def reveal(value: pydantic.SecretStr | str | None) -> str:
    """Read a secret value, "" for None."""
    return value.get_secret_value() if isinstance(value, pydantic.SecretStr) else value or ""


def parse(uri: str) -> Filesystem:
    """Read the filesystem that a provider offers.

    Raises `UriError`, also for an option that is unknown here.
    """
    parts = _split(uri)
    readers = {"nfs": _nfs, "cephfs": _cephfs, "lustre": _lustre, "juicefs": _juicefs}
    if parts.scheme not in readers:
        raise UriError(f"unknown filesystem {_short(parts.scheme)}")
    return readers[parts.scheme](parts)


def mounts_juicefs(databag: collections.abc.Mapping[str, str]) -> bool:
    """Report whether a requirer's unit databag lists JuiceFS."""
    return "juicefs" in databag.get(SCHEMES_KEY, "").split(",")


def check_volume_name(name: str) -> None:
    """Raise `UriError` unless JuiceFS takes `name` for a volume's name."""
    if not _VOLUME_NAME.fullmatch(name):
        raise UriError(
            "a volume's name has 3 to 63 letters a-z, digits and hyphens, with no hyphen at either end"
        )


def split_address(text: str) -> tuple[str, int | None]:
    """Split HOST, HOST:PORT, [ADDRESS] or [ADDRESS]:PORT. Raises `UriError` for anything else."""
    found = re.fullmatch(r"(?:\[([^\]]*)\]|([^\[:]*))(?::(.*))?", text)
    if found is None:
        raise UriError("a host has an open bracket, or something else than a port behind it")
    host, port = found[1] or found[2] or "", found[3]
    _check_host(host)
    if port is None:
        return host, None
    if not re.fullmatch(r"[0-9]{1,5}", port):
        raise UriError("a port is a number")
    _check_port(int(port))
    return host, int(port)


def join_address(host: str, port: int | None) -> str:
    """Join what `split_address` splits."""
    bracketed = f"[{host}]" if ":" in host else host
    return bracketed if port is None else f"{bracketed}:{port}"


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


def _nfs(parts: _Parts) -> Nfs:
    parts.take()
    # Of several hosts the first counts, as upstream has it
    host, port = split_address(parts.hosts[0])
    return Nfs(host, parts.path, port)


def _cephfs(parts: _Parts) -> Cephfs:
    options = parts.take("fsid", "name", "auth", optional=("auth-rev",))
    kind, _, rest = options["auth"].partition(":")
    if kind not in ("secret", "plain") or not rest:
        raise UriError("cephfs: auth is neither a secret nor a plain key")
    auth = {"secret_id": options["auth"]} if kind == "secret" else {"key": rest}
    revision = _number("auth-rev", options["auth-rev"]) if "auth-rev" in options else None
    return Cephfs(
        parts.hosts,
        parts.user,
        options["fsid"],
        options["name"],
        parts.path,
        auth_rev=revision,
        **auth,
    )


def _lustre(parts: _Parts) -> Lustre:
    return Lustre(parts.hosts, parts.take("fs-name")["fs-name"])


def _juicefs(parts: _Parts) -> Juicefs:
    options = parts.take("engine", "uuid", optional=_JUICEFS_OPTIONS)
    auth = options.get("auth")
    if auth is not None and not re.match(r"secret:.", auth, re.DOTALL):
        raise UriError("juicefs: auth is not a secret")
    readers = {"tls": _flag, "keyless": _flag, "auth-rev": _number}
    fields: dict[str, typing.Any] = {"db": ""}
    for option, text in options.items():
        read = readers.get(option)
        fields[_juicefs_field(option)] = read(option, text) if read else text
    return Juicefs(name=parts.user, hosts=parts.hosts, subdir=parts.path, **fields)


def _juicefs_field(option: str) -> str:
    return "secret_id" if option == "auth" else option.replace("-", "_")


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
    # Upstream's reader lower-cases the hosts up to the first encoded character, since its URL
    # parser takes that for an IPv6 zone. A host's case means nothing, so all of it is lowered here.
    hosts = re.sub(
        r"%..|[^%]+", lambda match: match[0] if match[0][0] == "%" else match[0].lower(), found[2]
    )
    strict = bool(query)
    try:
        pairs = urllib.parse.parse_qsl(
            query, keep_blank_values=True, strict_parsing=strict, errors="surrogateescape"
        )
    except ValueError as e:
        raise UriError("the options are malformed") from e
    options: dict[str, str] = {}
    for key, value in pairs:
        if not value:
            raise UriError(f"option {_short(key)} is empty")
        if key in options:
            raise UriError(f"option {_short(key)} is given twice")
        options[key] = value
    return _Parts(
        scheme.lower(),
        tuple(_unquote(hosts).split(",")),
        _unquote(found[1] or ""),
        _unquote(found[3] or "/"),
        options,
    )


_quote = functools.partial(urllib.parse.quote, safe="", errors="surrogateescape")
_unquote = functools.partial(urllib.parse.unquote, errors="surrogateescape")


def _number(option: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UriError(f"option {option} is not a number")
    return int(text)


def _flag(option: str, text: str) -> bool:
    if text != "true":
        raise UriError(f"option {option} is something else than true")
    return True


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
            raise UriError(f"{_hyphens(name)} is empty")


def _short(text: str) -> str:
    """Quote at most 40 characters of a text from outside, for a status."""
    return repr(text if len(text) <= 40 else text[:40] + "...")

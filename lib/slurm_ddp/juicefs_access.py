"""How the program `juicefs` reaches a volume: the engine's URL, its environment, its files.

What differs between engines and stores is in juicefs.yaml.
"""

import collections.abc
import dataclasses
import pathlib
import re
import typing
import urllib.parse

import yaml

from slurm_ddp import files
from slurm_ddp.interfaces import filesystem_info as fs


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The particulars of a kind of engine."""

    example: str
    db: str  # a pattern
    # That may stand behind the question mark; another one might be a password
    params: collections.abc.Sequence[str]
    user: str = r"[^\0-\x20]+"  # a pattern; a kind that has none takes no user in its URL
    variable: str = ""  # that juicefs reads the password from
    many: bool = False  # several hosts are one engine
    # Parameters that name files: the authority's certificate ("": SSL_CERT_FILE names it), the
    # client's, and its key
    file_params: collections.abc.Sequence[str] = ("", "", "")
    # Parameters set together with an authority's certificate
    with_authority: collections.abc.Mapping[str, str] = dataclasses.field(
        default_factory=dict[str, str]
    )


FACTS: dict[str, typing.Any] = yaml.safe_load(
    pathlib.Path(__file__).with_name("juicefs.yaml").read_text()
)
_RULES = {kind: _Rule(**table) for kind, table in FACTS["engines"].items()}
_FILE_PARAMS = ("tls-ca-cert-file", "sslrootcert")  # that SSL_CERT_FILE stands for
_SCHEMES = {kind: kind for kind in _RULES} | {"rediss": "redis", "postgresql": "postgres"}
_ONE_HOST = {"sqlite3", "badger", "unix", "memkv"}  # engines that one machine alone can reach
_SENTINEL_PORT = 26379

_PLAIN_VARIABLES = {
    "sentinel-password": "SENTINEL_PASSWORD",
    "encrypt-passphrase": "JFS_RSA_PASSPHRASE",
}
KEYLESS_STORES: tuple[str, ...] = tuple(FACTS["keys"])

PASSWORD_HINT = (
    "leave the password out of it: it belongs into a secret, named by the option credentials"  # noqa: S105
)


@dataclasses.dataclass(frozen=True)
class Engine:
    """A metadata engine's address."""

    kind: str  # one of fs.ENGINES
    hosts: tuple[str, ...]  # each HOST:PORT; with `master`, the Sentinels
    db: str
    tls: bool = False
    params: str = ""
    master: str = ""  # the server's name among Redis Sentinels

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each server."""
        port = _SENTINEL_PORT if self.master else fs.ENGINE_PORTS[self.kind]
        return tuple((host, found or port) for host, found in map(fs.split_address, self.hosts))

    @property
    def query(self) -> dict[str, str]:
        """The parameters behind the question mark."""
        return dict(urllib.parse.parse_qsl(self.params, keep_blank_values=True))

    def url(
        self,
        user: str | None = None,
        *,
        login: str = "",
        params: collections.abc.Mapping[str, str] | None = None,
    ) -> str:
        """Return the engine's URL without a password; `login` follows the user.

        The engine's parameters win.
        """
        before = ""
        if user:
            before = f"{urllib.parse.quote(user, safe='')}{login}@"
        scheme = "rediss" if self.kind == "redis" and self.tls else self.kind
        url = f"{scheme}://{before}{self._place()}/{self.db}"

        query = urllib.parse.urlencode(dict(params or {}) | self.query, safe="/:,")
        return f"{url}?{query}" if query else url

    def _place(self) -> str:
        hosts = [fs.join_address(*pair) for pair in self.addresses]
        if self.kind == "mysql":
            return f"({hosts[0]})"
        if self.master and len({port for _, port in self.addresses}) == 1:
            # A port that all Sentinels share may stand once, and URL parsers mind several colons
            hosts[:-1] = [fs.join_address(host, None) for host, _ in self.addresses[:-1]]
        if self.master:
            hosts.insert(0, self.master)
        return ",".join(hosts)


_CERTIFICATES = ("tls-ca", "tls-cert", "tls-key")


@dataclasses.dataclass(frozen=True)
class Access:
    """Settings that let a command of juicefs reach a volume. Only `url` may be shown."""

    engine: Engine
    url: str
    environment: dict[str, str] = dataclasses.field(default_factory=dict[str, str], repr=False)
    files: dict[pathlib.Path, str] = dataclasses.field(
        default_factory=dict[pathlib.Path, str], repr=False
    )
    # Values that must never be shown
    secrets: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    def ensure_files(self) -> bool:
        """Write the files, readable by root only; return whether any changed."""
        changed = [files.ensure_file(path, text, mode=0o600) for path, text in self.files.items()]
        return any(changed)


def parse(url: str) -> tuple[Engine, str | None]:
    """Read the engine and the user from a URL without a password.

    Raises `ValueError`, which never quotes the URL.
    """
    scheme, rest = _split_scheme(url)
    kind = _SCHEMES[scheme]
    rule = _RULES[kind]
    hint = f"write it as {rule.example}"

    before, _, query = rest.partition("?")
    login, at, place = before.rpartition("@")
    user = _read_user(kind, login) if at else None
    place, _, db = place.partition("/")
    if not re.fullmatch(rule.db, db) or "#" in url:
        raise ValueError(hint)
    engine = Engine(kind, (), db, tls=scheme == "rediss", params=query)
    _check_params(rule, engine)

    master, hosts = _read_hosts(kind, place)
    if len(hosts) > 1 and not rule.many:
        raise ValueError(f"one server, not several; {hint}")
    try:
        addresses = _addresses(hosts, None if master else fs.ENGINE_PORTS[kind])
    except fs.UriError:
        raise ValueError(hint) from None
    return dataclasses.replace(engine, hosts=addresses, master=master), user


def _split_scheme(url: str) -> tuple[str, str]:
    """Return a supported scheme and what follows it. Raises `ValueError`."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ValueError(_no_scheme(""))
    if scheme not in _SCHEMES:
        raise ValueError(_no_scheme(scheme))
    return scheme, rest


def _addresses(hosts: list[str], port: int | None) -> tuple[str, ...]:
    """Return each server as HOST:PORT; Sentinels (`port` None) share the last one's port.

    Raises `fs.UriError`.
    """
    pairs = [fs.split_address(host) for host in hosts]
    default = port or pairs[-1][1] or _SENTINEL_PORT
    return tuple(fs.join_address(host.lower(), found or default) for host, found in pairs)


def _no_scheme(scheme: str) -> str:
    """Say how a URL begins and why this scheme is wrong.

    Text that does not look like a scheme is not quoted.
    """
    schemes = ", ".join(f"{name}://" for name in _RULES)
    hint = f"begin with {schemes} (docs/howto/storage.md)"
    if not re.fullmatch(r"[a-z][a-z0-9+.-]{0,20}", scheme):
        return hint
    why = "serves one machine only" if scheme in _ONE_HOST else "is not supported"
    return f"{hint}: {scheme} {why}"


def _read_hosts(kind: str, place: str) -> tuple[str, list[str]]:
    """Split off the master's name in front of Sentinels; "" without one."""
    if kind == "mysql" and place.startswith("(") and place.endswith(")"):
        place = place[1:-1]
    hosts = place.split(",")
    has_sentinels = kind == "redis" and len(hosts) > 1 and ":" not in hosts[0]
    if not has_sentinels:  # as JuiceFS distinguishes them from a cluster
        return "", hosts
    master, *sentinels = hosts
    if not re.fullmatch(r"[A-Za-z0-9._-]+", master):
        raise ValueError("write Sentinels as redis://MASTER,HOST,HOST:26379/1")
    return master, sentinels


def _read_user(kind: str, login: str) -> str:
    rule = _RULES[kind]
    user = urllib.parse.unquote(login)
    hint = f"write it as {rule.example}"
    if ":" in login:
        raise ValueError(PASSWORD_HINT)
    if not rule.user:
        raise ValueError(f"{kind} takes no user here; {hint}")
    if not re.fullmatch(rule.user, user):
        raise ValueError(
            f"the user in front of the @ is empty or has a character that {kind} does not take; {hint}"
        )
    return user


def _check_params(rule: _Rule, engine: Engine) -> None:
    for name in engine.query:
        if name and name in (*_FILE_PARAMS, *rule.file_params):
            raise ValueError("certificates belong into the secret, as tls-ca, tls-cert and tls-key")
        if name not in rule.params:
            raise ValueError(
                f"unknown parameter behind the question mark; possible: {', '.join(rule.params)}"
            )


def check_secret(engine: Engine, secret: fs.JuicefsSecret) -> None:
    """Raise `ValueError` for credentials that this engine cannot take from a safe place."""
    rule = _RULES[engine.kind]
    content = secret.content()
    _check_login(engine.kind, rule, content)
    if "sentinel-password" in content and not engine.master:
        raise ValueError("sentinel-password: metadata-url names no Sentinels")
    if ("tls-cert" in content) != ("tls-key" in content):
        raise ValueError("tls-cert, tls-key: one is of no use without the other")
    if "tls-cert" in content and not rule.file_params[1]:
        raise ValueError(f"tls-cert: juicefs shows no certificate to {engine.kind}")


def _check_login(kind: str, rule: _Rule, content: dict[str, str]) -> None:
    for key in ("meta-user", "meta-password"):
        if key in content and not rule.user:
            problem = (
                f"{key}: {kind} takes it on the command line only, where everybody can read it"
            )
            raise ValueError(
                f"{problem}: let it ask for a client's certificate, tls-cert and tls-key"
            )
    user = content.get("meta-user")
    if user is not None and not re.fullmatch(rule.user, user):
        raise ValueError(f"meta-user: {kind} does not take a name with such a character")
    if user is None and "meta-password" in content and rule.variable == "META_PASSWORD":
        raise ValueError(f"meta-user: {kind} needs it beside meta-password")


def access(
    engine: Engine,
    secret: fs.JuicefsSecret,
    *,
    directory: pathlib.Path,
    store: str = "",
    keyless: bool = False,
    region: str = "",
) -> Access:
    """Build the settings for an engine, and for the object store of a keyless volume.

    Certificates and keys go to files in `directory`.
    """
    rule = _RULES[engine.kind]
    content = secret.content()
    environment = _environment(rule, content, store, keyless=keyless)
    if region and store in FACTS["regions"]:
        environment[FACTS["regions"][store]] = region

    paths: dict[str, pathlib.Path] = {}
    params: dict[str, str] = {}
    for key, param in zip(_CERTIFICATES, rule.file_params, strict=True):
        if key not in content:
            continue
        paths[key] = directory / f"{key}.pem"
        if param:
            params[param] = str(paths[key])
    if "tls-ca" in paths:  # Go looks at this file, and still at the system's folder of certificates
        environment["SSL_CERT_FILE"] = str(paths["tls-ca"])
        params |= dict(rule.with_authority)
    if store == "gs" and "google-credentials" in content:
        paths["google-credentials"] = directory / "google-credentials.json"
        environment["GOOGLE_APPLICATION_CREDENTIALS"] = str(paths["google-credentials"])

    # With META_PASSWORD juicefs asks for an @; the colon of the password that is missing does no
    # harm
    login = ":" if environment.get("META_PASSWORD") else ""
    return Access(
        engine=engine,
        url=engine.url(secret.meta_user, login=login, params=params),
        environment=environment,
        files={path: content[key] for key, path in paths.items()},
        secrets=secret.values(),
    )


def _environment(
    rule: _Rule, content: dict[str, str], store: str, *, keyless: bool
) -> dict[str, str]:
    """Put the secret's values into the variables that juicefs and its stores read."""
    variables = dict(_PLAIN_VARIABLES)
    if rule.variable:
        variables["meta-password"] = rule.variable
    if keyless:
        variables |= FACTS["keys"].get(store, {})
    return {variable: content[key] for key, variable in variables.items() if key in content}


def of(volume: fs.Juicefs, secret: fs.JuicefsSecret, *, directory: pathlib.Path) -> Access:
    """Build the settings for a published volume; see `access`."""
    engine = Engine(
        volume.engine, volume.hosts, volume.db, volume.tls, volume.params, volume.master
    )
    place = {"store": volume.storage, "region": volume.region}
    return access(engine, secret, directory=directory, keyless=volume.keyless, **place)

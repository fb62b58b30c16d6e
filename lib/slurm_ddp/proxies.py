"""The proxy that a download takes: the Juju model's, or the environment's.

Juju hands `juju-http-proxy`, `juju-https-proxy` and `juju-no-proxy` of a model to hooks as
JUJU_CHARM_*, which urllib does not know, and urllib knows no networks. The entries of
`juju-no-proxy` have the same meaning as in Juju itself, whose library is Go's
golang.org/x/net/http/httpproxy:

- `host.example.com` is this name and all names below it, `.example.com` and `*.example.com` only
  those below;
- `10.0.0.2` is an address, `10.0.0.0/8` a network; `fd00::/8` and `[fd00::1]` likewise;
- each but a network may have a port, `host:8080`, and counts for that port only;
- `*` is every host. `localhost` and addresses of the loopback need no entry.

A name is not resolved to see whether a network has its address.
"""

import collections.abc
import ipaddress
import os
import re
import urllib.parse
import urllib.request

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_PORTS = {"http": 80, "https": 443}


class ModelProxies(urllib.request.ProxyHandler):
    """Sends urllib's requests, redirected ones too, through the model's proxies.

    Hosts that the model excludes are reached directly.
    """

    def __init__(self, environment: collections.abc.Mapping[str, str] | None = None) -> None:
        found = os.environ if environment is None else environment
        self._avoided = avoided(found)
        super().__init__(configured(found))

    def proxy_open(self, req: urllib.request.Request, proxy: str, type: str) -> object:  # noqa: A002 - as the base has it
        """Hand the request to the proxy, or return None for a direct connection."""
        if is_direct(req.full_url, self._avoided):
            return None
        return super().proxy_open(req, proxy, type)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType] - typeshed lacks it


def configured(environment: collections.abc.Mapping[str, str]) -> dict[str, str]:
    """Return the proxies by scheme: the model's, or else those that every program reads."""
    found: dict[str, str] = {}
    for scheme in _PORTS:
        if proxy := environment.get(f"JUJU_CHARM_{scheme.upper()}_PROXY"):
            found[scheme] = proxy
    if found:
        return found
    for scheme in _PORTS:
        # As urllib and curl do; HTTP_PROXY may come from a request's header
        name = f"{scheme}_proxy"
        if proxy := environment.get(name) or environment.get(name.upper()):
            found[scheme] = proxy
    return found


def avoided(environment: collections.abc.Mapping[str, str]) -> str:
    """Return the list of hosts that need no proxy, in the form of `juju-no-proxy`."""
    for name in ("JUJU_CHARM_NO_PROXY", "no_proxy", "NO_PROXY"):
        if listed := environment.get(name):
            return listed
    return ""


def is_direct(url: str, listed: str) -> bool:
    """Report whether the URL's host needs no proxy, by a list in the form of `juju-no-proxy`."""
    parts = urllib.parse.urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    try:
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # not a port; the connection will fail
        port = None
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    entries = re.split(r"[,\s]+", listed.strip().lower())
    return any(_matches(entry, host, address, port) for entry in entries if entry)


def _matches(entry: str, host: str, address: Address | None, port: int | None) -> bool:
    if entry == "*":
        return True
    network = _network(entry)
    if network is not None:
        return address is not None and address in network

    name, wanted_port = _split_port(entry)
    if wanted_port is not None and wanted_port != port:
        return False
    wanted = _address(name)
    if wanted is not None:
        return address == wanted
    if name.startswith("*."):
        name = name[1:]
    if name.startswith("."):
        return host.endswith(name)
    return host == name or host.endswith(f".{name}")


def _split_port(entry: str) -> tuple[str, int | None]:
    """Split HOST:PORT and [ADDRESS]:PORT; the port is None for an IPv6 address without brackets."""
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::([0-9]{1,5}))?", entry)
    if found is None:
        return entry, None
    port = int(found[2]) if found[2] else None
    return found[1].strip("[]"), port


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    if "/" not in entry:
        return None
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


def _address(text: str) -> Address | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found

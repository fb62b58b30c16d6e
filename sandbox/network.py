"""The network of a model's hosts: one bridge with a free /24, behind NAT.

Everything is found again by the bridge's name, so nothing but the name and the subnet needs to be
remembered.
"""

import collections.abc
import ipaddress
import json
import pathlib
import re

import pydantic

from sandbox.store import SandboxError
from slurm_ddp import files
from slurm_ddp.commands import CommandError, run

RUN = pathlib.Path("/run/slurm-ddp")  # what all models on this machine share, until it restarts

_LEAST = {  # of the kernel's settings: it allows 128 instances, inotify(7), and a host takes about seven
    pathlib.Path("/proc/sys/net/ipv4/ip_forward"): 1,
    pathlib.Path("/proc/sys/fs/inotify/max_user_instances"): 1024,
}
_INTERFACES = pathlib.Path("/sys/class/net")
_RESOLV_CONFS = (  # the second is behind systemd-resolved's stub
    pathlib.Path("/etc/resolv.conf"),
    pathlib.Path("/run/systemd/resolve/resolv.conf"),
)


class Network(pydantic.BaseModel, frozen=True):
    """A model's bridge (15 characters at most, the kernel's limit) and subnet (`10.77.3.0/24`)."""

    bridge: str
    cidr: str

    @property
    def subnet(self) -> ipaddress.IPv4Network:
        """The subnet; its first address is this machine's on the bridge."""
        return ipaddress.IPv4Network(self.cidr)

    def ensure(self) -> None:
        """Ensure the bridge, the kernel's settings and the firewall. Raises `SandboxError`."""
        address = f"{self.subnet[1]}/{self.subnet.prefixlen}"
        try:
            if not (_INTERFACES / self.bridge).exists():
                run("/usr/sbin/ip", "link", "add", self.bridge, "type", "bridge")
            run("/usr/sbin/ip", "address", "replace", address, "dev", self.bridge)
            run("/usr/sbin/ip", "link", "set", self.bridge, "mtu", str(mtu()), "up")
        except CommandError as e:
            raise SandboxError(f"bridge {self.bridge}: {e}") from e
        for setting, least in _LEAST.items():
            if int(setting.read_text()) < least:
                setting.write_text(f"{least}\n")
        for table, chain, rule in _rules(self):
            if not _iptables(table, "-C", chain, rule, check=False):
                _iptables(table, "-I", chain, rule)

    def remove(self) -> None:
        """Remove the bridge and the rules. The kernel's settings stay until a restart."""
        for table, chain, rule in _rules(self):
            while _iptables(table, "-D", chain, rule, check=False):
                pass
        for path in _INTERFACES.glob(f"vb-{self.bridge[:8]}*"):  # as systemd-nspawn cuts long names
            run("/usr/sbin/ip", "link", "delete", path.name, check=False)
        if (_INTERFACES / self.bridge).exists():
            run("/usr/sbin/ip", "link", "delete", self.bridge)


def remove_link(machine: str) -> None:
    """Remove the machine's link to its bridge.

    It would go by itself with the machine's network namespace; but connections that were open when
    the machine ended keep that alive until the kernel gives up telling their other ends, which
    takes minutes.
    """
    run(
        "/usr/sbin/ip", "link", "delete", f"vb-{machine}", check=False
    )  # the name, or the other name of a long one


def free_subnet(taken: collections.abc.Collection[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """Find a free private /24, outside `taken` and the routes. Raises `SandboxError`."""
    routes = json.loads(run("/usr/sbin/ip", "-json", "-4", "route", "show", "table", "all").stdout)
    used = [
        ipaddress.IPv4Network(route["dst"], strict=False)
        for route in routes
        if route["dst"][0].isdigit()
    ]
    for second in range(77, 256):
        for third in range(256):
            candidate = ipaddress.IPv4Network(f"10.{second}.{third}.0/24")
            if not any(candidate.overlaps(other) for other in (*used, *taken)):
                return candidate
    raise SandboxError("no free /24 from 10.77.0.0 to 10.255.255.0 for the hosts")


def mtu() -> int:
    """Return the MTU of this machine's default route, at most Ethernet's 1500."""
    routes = json.loads(run("/usr/sbin/ip", "-json", "-4", "route", "show", "default").stdout)
    sizes = [
        int((_INTERFACES / route["dev"] / "mtu").read_text()) for route in routes if "dev" in route
    ]
    return min([1500, *sizes])


def resolv_conf() -> str:
    """Return the resolv.conf(5) of guests, which looks up no names without a dot."""
    servers: list[str] = []
    for path in _RESOLV_CONFS:
        found = re.findall(r"(?m)^\s*nameserver\s+(\S+)", files.read(path))
        servers = servers or [server for server in found if not server.startswith(("127.", "::1"))]
    return (
        "".join(f"nameserver {server}\n" for server in servers)
        + "options timeout:1 attempts:2 no-tld-query\n"
    )


def _rules(network: Network) -> list[tuple[str, str, list[str]]]:
    """Return the rules (table, chain, rule) that let the hosts reach the outside."""
    comment = ["-m", "comment", "--comment", f"slurm-ddp {network.bridge}"]
    nat = ["-s", network.cidr, "!", "-d", network.cidr, *comment, "-j", "MASQUERADE"]
    return [
        ("nat", "POSTROUTING", nat),
        ("filter", "FORWARD", ["-i", network.bridge, *comment, "-j", "ACCEPT"]),
        ("filter", "FORWARD", ["-o", network.bridge, *comment, "-j", "ACCEPT"]),
    ]


def _iptables(table: str, action: str, chain: str, rule: list[str], *, check: bool = True) -> bool:
    try:
        return (
            run(
                "/usr/sbin/iptables", "-w", "30", "-t", table, action, chain, *rule, check=check
            ).returncode
            == 0
        )
    except CommandError as e:
        raise SandboxError(f"iptables: {e}") from e

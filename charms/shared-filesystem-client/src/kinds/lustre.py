"""Plan the mount of a Lustre filesystem, one mount unit of systemd's, and configure LNet for it."""

import collections.abc
import contextlib
import json
import pathlib
import re

import mount_plan
from kinds import kernel, lustre_client, presets
from slurm_ddp import files, mounts
from slurm_ddp.commands import CommandError, run
from slurm_ddp.interfaces import filesystem_info as fs

MODPROBE = pathlib.Path("/etc/modprobe.d/slurm-ddp-lnet.conf")
LNET = pathlib.Path("/sys/module/lnet/parameters/networks")
_PORT = 988  # where LNet listens, lnet's module parameter accept_port
_WRITTEN = "# Written by the charm shared-filesystem-client; changes here are lost.\n"
_NETWORK = r"(tcp|o2ib|kfi|gni)\d{0,5}(\([A-Za-z0-9_.:,-]+\))?"
_NID = re.compile(r"(?P<host>[^@\s:]+)@(?P<kind>tcp|o2ib|kfi|gni)(?P<number>\d{0,5})")


def plan(spec: mount_plan.Spec, filesystem: fs.Lustre) -> mount_plan.Plan:
    """Plan a mount; install the client and configure LNet, except in a container."""
    nodes = servers(filesystem.nids)
    identifiers = tuple(identifier for node in nodes for identifier in node)
    path = kernel.below("/", spec.subdirectory)
    source = f"{_joined(nodes)}:/{filesystem.fs_name}{path if path != '/' else ''}"
    options = presets.merge(
        presets.LUSTRE, profile=spec.profile, given=spec.mount_options, holding=spec.holding
    )
    pairs = [identifier.split("@") for identifier in identifiers]
    if not kernel.container():
        lustre_client.ensure(spec.lustre_repository)
        is_mounted = any(mount.fstype == kernel.LUSTRE.fstype for mount in mounts.table())
        ensure_networks(spec, identifiers, mounted=is_mounted)
    kernel.check(kernel.LUSTRE)
    # Servers on InfiniBand alone cannot be asked over TCP: whether they answer is seen when
    # mounting
    by_tcp = all(network.startswith("tcp") for _, network in pairs)
    groups: tuple[mount_plan.Servers, ...] = ()
    if by_tcp:
        groups = (tuple((host, _PORT) for host, _ in pairs),)
    return kernel.plan(spec, kind=kernel.LUSTRE, source=source, options=options, servers=groups)


def nids(texts: collections.abc.Sequence[str]) -> tuple[str, ...]:
    """Normalise identifiers to the kernel's form: `tcp0` is `tcp`, and so is a missing network."""
    found: list[str] = []
    for text in texts:
        match = _NID.fullmatch(text if "@" in text else f"{text}@tcp")
        # "2001" is part of an IPv6 address, which mount.lustre(8) does not mention
        if match is None or match["host"].isdigit():
            raise mount_plan.MountError(
                "a Lustre server's identifier is ADDRESS@NETWORK, like 10.0.0.2@tcp1 or @o2ib"
            )
        found.append(f"{match['host']}@{match['kind']}{match['number'].lstrip('0')}")
    return tuple(found)


def servers(texts: collections.abc.Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Group a filesystem's identifiers by server; the later ones take over when the first fails.

    If they contain `:`, they are in the form of mount.lustre(8): `:` between servers, `,` between
    one server's identifiers, several of which may be rails on the same network. Otherwise the list
    does not mark the servers. A server then usually has one identifier per network, so a network
    that repeats starts the next server.
    """
    written = ",".join(texts)
    if ":" in written:
        parts = [part.split(",") for part in written.split(":")]
        return tuple(nids(part) for part in parts)
    nodes: list[dict[str, str]] = []  # identifiers by network
    for identifier in nids(written.split(",")):
        network = identifier.partition("@")[2]
        if not nodes or network in nodes[-1]:
            nodes.append({})
        nodes[-1][network] = identifier
    return tuple(tuple(node.values()) for node in nodes)


def _joined(nodes: collections.abc.Sequence[collections.abc.Sequence[str]]) -> str:
    """Write the first part of a mount's source."""
    return ":".join(",".join(node) for node in nodes)


def check(config: mount_plan.Config) -> None:
    """Raise `ValueError`, which names the option, unless the options make sense."""
    lustre_client.check(config.lustre_repository)
    if config.lnet_networks and not re.fullmatch(f"{_NETWORK}(,{_NETWORK})*", config.lnet_networks):
        raise ValueError(
            "lnet-networks: networks with their interfaces, like tcp1(eth0) or o2ib(ib0),tcp(eth0)"
        )


def ensure_networks(
    config: mount_plan.Config, identifiers: collections.abc.Sequence[str], *, mounted: bool
) -> None:
    """Configure LNet for the option's or the servers' networks, each on the right interface."""
    wanted = config.lnet_networks or derive_networks(identifiers)
    if not wanted:
        return
    changed = files.ensure_file(MODPROBE, f'{_WRITTEN}options lnet networks="{wanted}"\n')
    if not LNET.exists():
        return
    running = LNET.read_text().strip()
    if running == wanted or (running in ("", "(null)") and not changed):
        return
    if mounted:
        now = running or "its own choice"
        raise mount_plan.MountError(
            f"LNet runs on {now}, not on {wanted}: unmount all Lustre here, or reboot"
        )
    try:
        run("/usr/sbin/lustre_rmmod", timeout=90)
    except CommandError as e:
        raise mount_plan.MountError(
            f"LNet cannot change to {wanted} while it is in use: reboot ({e})"
        ) from e


def derive_networks(identifiers: collections.abc.Sequence[str]) -> str:
    """Return LNet's networks with interfaces to the servers; "" if its default tcp is right."""
    found: dict[str, str] = {}
    for identifier in identifiers:
        address, _, network = identifier.partition("@")
        if network not in found and (interface := _interface_to(address)):
            found[network] = f"{network}({interface})"
    return "" if set(found) <= {"tcp"} else ",".join(found.values())


def remove() -> None:
    """Remove the client's archive and LNet's networks. Packages stay: other mounts may use them."""
    lustre_client.remove()
    files.ensure_absent(MODPROBE)


def _interface_to(address: str) -> str:
    if not re.fullmatch(r"[0-9.]+", address):
        return ""
    with contextlib.suppress(CommandError, ValueError, KeyError, IndexError, TypeError):
        routes = json.loads(run("/usr/sbin/ip", "-j", "route", "get", address, timeout=10).stdout)
        return str(routes[0]["dev"])
    return ""

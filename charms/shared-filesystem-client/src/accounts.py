"""Keep accounts from each other's TCP ports with nftables rules on the machines where they work.

templates/accounts.nft.j2 has the details. The rules protect only between machines that all have
them.
"""

import ipaddress
import pathlib

import mount_plan
from slurm_ddp import apt, files, systemd
from slurm_ddp.charm import naming
from slurm_ddp.commands import run

OPTION = "separate-accounts"
_NFT = pathlib.Path("/usr/sbin/nft")
_KINDS = {4: ("ip", "ipv4_addr"), 6: ("ip6", "ipv6_addr")}
_BITS = tuple(f"{1 << number:#x}" for number in range(32))
# No uids: the second is -1, and no account is given the first
_NOBODY, _REFUSED = "0xfffffffe", "0xffffffff"


def check(text: str) -> None:
    """Raise `ValueError`, which names the option, unless it lists networks."""
    with naming(OPTION):
        _networks(text)


def ensure(app: str, text: str) -> None:
    """Separate accounts in these networks, now and from each boot, or nowhere.

    Raises `CommandError`.
    """
    if not text:
        remove(app)
        return
    apt.ensure_packages(("nftables",))
    path = _path(app)
    table = _table(app)
    networks = _networks(text)
    rules = mount_plan.render(
        "accounts.nft.j2",
        table=table,
        families=[(*names, networks[version]) for version, names in _KINDS.items()],
        bits=_BITS,
        nobody=_NOBODY,
        refused=_REFUSED,
    )
    changed = files.ensure_file(path, rules)
    unit = _unit(app)
    if systemd.ensure_unit(unit, mount_plan.render("accounts.service.j2", nft=_NFT, path=path)):
        systemd.enable(unit)
    if changed or not _holds(table):
        run(_NFT, "-f", path)  # all at once: no connection passes between the old rules and the new


def remove(app: str) -> None:
    """Remove an application's rules, and what brings them back."""
    if not files.ensure_absent(_path(app)):
        return
    systemd.ensure_no_unit(_unit(app))
    run(_NFT, "delete", "table", "inet", _table(app), check=False)


def _networks(text: str) -> dict[int, list[str]]:
    """List the networks of each version of IP, without those inside others. Raises ValueError."""
    four: list[ipaddress.IPv4Network] = []
    six: list[ipaddress.IPv6Network] = []
    for word in text.split():
        network = ipaddress.ip_network(word)
        if isinstance(network, ipaddress.IPv4Network):
            four.append(network)
        else:
            six.append(network)
    return {
        4: list(map(str, ipaddress.collapse_addresses(four))),
        6: list(map(str, ipaddress.collapse_addresses(six))),
    }


def _holds(table: str) -> bool:
    return run(_NFT, "list", "table", "inet", table, check=False).returncode == 0


def _table(app: str) -> str:
    return f"slurm_ddp_{app.replace('-', '_')}"


def _unit(app: str) -> str:
    return f"separate-accounts-{app}.service"


def _path(app: str) -> pathlib.Path:
    return mount_plan.ETC / app / "accounts.nft"

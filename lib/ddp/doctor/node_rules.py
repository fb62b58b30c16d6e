"""Rules that find a node's faults, and differences between nodes."""

import statistics

from ddp.doctor.facts import Facts, Json, capacity, clock_offsets, mib, release
from ddp.doctor.findings import Findings
from ddp.prediction import round_trips
from ddp.run.untrusted import as_object, printable
from ddp.settings import Settings
from ddp.slurm import advisories
from ddp.workspace.folders import Workspace

_CLOCK_S = 1.0
_CLOCK_BREAKS_S = 50.0  # auth/slurm: a credential is good for 60 s (slurm.conf(5), AuthInfo ttl)
_SLOW_WRITE_MB_S = 20.0
_LEAST_FREE = 2 << 30
_SPARE = 256 << 20
_LEAST_SHM = 64 << 20
_LEAST_FILES = 1024
_LEAST_LOCKED = 64 << 20
# What forbids user namespaces, and allows them: Ubuntu since 24.04, Debian, user_namespaces(7)
_USERNS = {
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "user/max_user_namespaces": ("0", "65536"),
}
_LINK_BYTES_S = 125e6  # a link of 1 Gbit/s, which one connection should fill
_ETHERNET_MTU = 1500
_LAST_PORT = 29999  # of the rendezvous, see ddp.node.supervisor
_OLDEST_SLURM = (24, 11)


def judge(settings: Settings, facts: Facts, findings: Findings) -> None:
    """Judge the nodes that returned a report."""
    for name, about in sorted(facts.reports.items()):
        _versions(name, about, facts, findings)
        _filesystem(name, about["filesystem"], findings)
        _account(settings.workspace, name, about, findings)
        _limits(name, about, findings)
        _containers(name, as_object(about["limits"]), findings)
        _disk(name, about, facts, findings)
        _network(name, about, findings)
        _slow_link(name, about, findings)
        for host, peer in sorted(about["network"]["peers"].items()):
            _peer(name, host, peer, facts, findings)
        _gpus(settings, name, about["gpus"], facts, findings)
    _differences(facts, findings)
    _clocks(facts, findings)


def _versions(name: str, about: Json, facts: Facts, findings: Findings) -> None:
    slurm = str(about["versions"].get("slurm", ""))
    if release(slurm) and release(slurm) < _OLDEST_SLURM:
        findings.add("slurm-old", name, slurm=slurm)
    unfixed(slurm, name, findings)
    python = str(about["versions"]["python"])
    wanted = facts.manifests[0].python if facts.manifests else None
    if wanted not in (None, python):
        findings.add("wrong-python", name, python=python, wanted=wanted)


def unfixed(slurm: str, where: str, findings: Findings) -> None:
    """Judge a version of Slurm by its security releases."""
    missing = advisories.missing(slurm)
    if not missing:
        return
    findings.add(
        "slurm-unfixed",
        where,
        slurm=slurm,
        advisories=" and ".join(map(str, missing)),
        means="; ".join(one.means for one in missing),
        upgrade=advisories.upgrade(slurm),
    )


def _filesystem(name: str, about: Json, findings: Findings) -> None:
    mount = as_object(about.get("mount"))
    if mount.get("mountpoint") == "/":
        findings.add("not-mounted", name)
        return
    if "hung" in about:
        findings.add("mount-hangs", name, kind=mount.get("type") or "asking for its mount")
        return
    if "error" in about:
        findings.add("workspace-fails", name, error=about["error"])
        return

    if about.get("read_only"):
        findings.add("read-only", name)
    free = about.get("free")
    if free is not None and free < _LEAST_FREE:
        findings.add("space", name, "error" if free < _SPARE else None, free=mib(free))
    speed = about.get("write_mb_s")
    if speed is not None and speed < _SLOW_WRITE_MB_S:
        findings.add("slow-write", name, mb_s=speed)
    if "writeback" in str(mount.get("options", "")):
        findings.add("writeback", name)


def _account(workspace: Workspace, name: str, about: Json, findings: Findings) -> None:
    if about["uid"] != workspace.uid:
        findings.add("uid", name, uid=about["uid"])
    if about.get("tracking"):
        findings.add("tracking", name, error=about["tracking"])


def _limits(name: str, about: Json, findings: Findings) -> None:
    limits = as_object(about["limits"])
    files = limits.get("nofile")
    if files is not None and files < _LEAST_FILES:
        findings.add("nofile", name, nofile=files)
    locked = limits.get("memlock")
    if about["infiniband"] and locked is not None and locked < _LEAST_LOCKED:
        findings.add("memlock", name, memlock=locked >> 10)
    shm = limits.get("shm") or 0
    if shm < _LEAST_SHM:
        findings.add("shm", name, "error" if about["gpus"]["seen"] else None, shm=mib(shm))


def _containers(name: str, limits: Json, findings: Findings) -> None:
    tools = ", ".join(limits.get("containers") or [])
    if not tools:
        return
    for setting, (bad, good) in _USERNS.items():
        if limits["userns"].get(setting) == bad:
            word = setting.replace("/", ".")
            findings.add("user-namespaces", name, tools=tools, setting=word, bad=bad, good=good)


def _disk(name: str, about: Json, facts: Facts, findings: Findings) -> None:
    disk = about["disk"]
    if "error" in disk:
        findings.add("disk-fails", name, error=disk["error"])
        return
    if disk.get("noexec"):
        findings.add("disk-noexec", name)
    needed = facts.manifests[0].unpacked_bytes if facts.manifests else 0
    if needed and not about["unpacked"] and disk["free"] < needed + _SPARE:
        findings.add("disk-full", name, free=mib(disk["free"]), needed=mib(needed + _SPARE))


def _network(name: str, about: Json, findings: Findings) -> None:
    network = about["network"]
    if network["port"] is None:
        ports = ", ".join(str(port) for port, _ in network["taken"])
        findings.add("no-port", name, ports=ports, error=network["taken"][0][1])
    for peer in network["peers"].values():
        if peer.get("on_lo") and peer["iface"] != "lo":
            findings.add("address-on-lo", name, address=peer["on_lo"], iface=peer["iface"])
            break
    down: list[str] = []
    for port in about["infiniband"]:
        if port["state"] != "ACTIVE":
            down.append(f"{port['device']} ({port['kind']}) is {port['state']}")
    if down:
        findings.add("port-down", name, ports=", ".join(down[:8]))


def _slow_link(name: str, about: Json, findings: Findings) -> None:
    """Judge the way to the farthest node if a slow link lies on it."""
    peers = as_object(about["network"]["peers"])
    trips_ms = {host: peer.get("trip_ms") or 0.0 for host, peer in sorted(peers.items())}
    host = max(trips_ms, key=lambda one: trips_ms[one], default="")
    trip_ms = trips_ms.get(host, 0.0)
    if trip_ms <= round_trips.SLOW_MS:
        return

    tcp = as_object(about.get("tcp"))
    if tcp.get("tcp_slow_start_after_idle") == 1:
        findings.add("slow-start", name, peer=host, trip_ms=trip_ms)
    needed = 2 * round(_LINK_BYTES_S * trip_ms / 1e3)  # half of a buffer is the kernel's own
    for setting in ("tcp_rmem", "tcp_wmem"):
        size = tcp.get(setting)
        if size is None or size >= needed:
            continue
        mbit_s = size / 2 / (trip_ms / 1e3) * 8 / 1e6
        reached = {"setting": setting, "size": size, "needed": needed, "mbit_s": mbit_s}
        findings.add("socket-buffer", name, None, peer=host, trip_ms=trip_ms, **reached)
    mtu = peers[host].get("mtu")
    if mtu and mtu < _ETHERNET_MTU:
        findings.add("small-mtu", name, mtu=mtu, peer=host, trip_ms=trip_ms)


def _peer(name: str, host: str, peer: Json, facts: Facts, findings: Findings) -> None:
    """Judge the way from a node to another one."""
    address = str(peer.get("address", host))
    if "ipv6" in peer:
        findings.add("ipv6-only", name, peer=host, address=peer["ipv6"])
    elif "unresolved" in peer:
        given = peer.get("given") or "none"
        findings.add("unresolved", name, peer=host, given=given, error=peer["unresolved"])
    elif address.startswith("127."):
        findings.add("loopback", name, peer=host, address=address)
    elif "unreachable" in peer and host in facts.reports:
        error = peer["unreachable"]
        findings.add("unreachable", name, peer=host, address=address, last=_LAST_PORT, error=error)
    relay = as_object(facts.reports[name].get("relays")).get(address)
    if relay:
        findings.add("relayed", name, peer=host, relay=printable(str(relay), 64))
    if "seen_ms" in peer and peer["seen_ms"] is None:
        findings.add("unseen", name, peer=host)


def _gpus(settings: Settings, name: str, gpus: Json, facts: Facts, findings: Findings) -> None:
    promised = capacity(facts, name).gpus
    wanted = gpus["wanted"] or 0
    if promised and not gpus["seen"]:
        level = "error" if settings.torch_build == "cuda" else None
        findings.add("gpus-silent", name, level, promised=promised, devices=gpus["devices"] or "no")
    elif 0 < gpus["seen"] < wanted:
        findings.add("gpus-fewer", name, wanted=wanted, seen=gpus["seen"])


def _differences(facts: Facts, findings: Findings) -> None:
    reports = facts.reports
    for key in ("python", "machine"):
        versions = {name: about["versions"].get(key) for name, about in reports.items()}
        findings.compare(f"{key}-differs", versions)
    findings.compare("mtu-differs", {name: _mtu(about) for name, about in reports.items()})


def _mtu(about: Json) -> int | None:
    for peer in reversed(about["network"]["peers"].values()):
        if peer.get("mtu") and peer["iface"] != "lo":
            return peer["mtu"]
    return None


def _clocks(facts: Facts, findings: Findings) -> None:
    """Name the node whose clock is farthest from the others'."""
    offsets = clock_offsets(facts)
    if not offsets:
        return
    spread = max(offsets.values()) - min(offsets.values())
    if spread <= _CLOCK_S:
        return
    middle = statistics.median(offsets.values())
    worst = max(offsets, key=lambda name: abs(offsets[name] - middle))
    off = offsets[worst] - middle
    level = "error" if spread > _CLOCK_BREAKS_S else None
    findings.add("clock", worst, level, off=abs(off), way="ahead of" if off > 0 else "behind")

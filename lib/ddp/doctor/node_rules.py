"""What is wrong with a node, and where nodes differ."""

import collections
import statistics

from ddp.doctor.facts import Facts, Json, capacity, clock_offsets, mib, release
from ddp.doctor.findings import Findings, grouped, spelled
from ddp.run.reading import as_object
from ddp.settings import Settings
from ddp.workspace.folders import Workspace

_CLOCK_S, _CLOCK_BREAKS_S = (
    1.0,
    50.0,
)  # auth/slurm: a credential is good for 60 s (slurm.conf(5), AuthInfo ttl)
_SLOW_WRITE_MB_S, _SLOW_RENAME_MS, _SLOW_SEEN_MS = 20.0, 500.0, 3000.0
_LEAST_FREE, _SPARE, _LEAST_SHM = 2 << 30, 256 << 20, 64 << 20
_LEAST_FILES, _LEAST_LOCKED = 1024, 64 << 20
# What forbids user namespaces, and allows them: Ubuntu since 24.04, Debian, user_namespaces(7)
_USERNS = {
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "user/max_user_namespaces": ("0", "65536"),
}
_LAST_PORT = 29999  # of the rendezvous, see ddp.node.supervisor
_OLDEST_SLURM = (24, 11)
_VERSIONS = ("python", "machine", "libc", "slurm")


def judge(settings: Settings, facts: Facts, findings: Findings) -> None:
    """Judge the nodes that returned a report."""
    for name, about in sorted(facts.reports.items()):
        _release(name, about, facts, findings)
        _filesystem(name, about["filesystem"], facts, findings)
        _host(settings.workspace, name, about, facts, findings)
        _disk(name, about, facts, findings)
        _network(name, about["network"], facts, findings)
        _processors(name, about["processors"], facts, findings)
        _gpus(settings, name, about, facts, findings)
    _differences(facts, findings)
    _clocks(facts, findings)


def _release(name: str, about: Json, facts: Facts, findings: Findings) -> None:
    slurm, controller = (
        str(about["versions"].get("slurm", "")),
        facts.config.get("SLURM_VERSION", ""),
    )
    if release(slurm) and release(slurm) < _OLDEST_SLURM:
        findings.add("slurm-old", name, slurm=slurm)
    elif release(slurm) and release(controller) and release(slurm) > release(controller):
        findings.add("slurm-newer", name, slurm=slurm, controller=controller)


def _filesystem(name: str, about: Json, facts: Facts, findings: Findings) -> None:
    mount = as_object(about.get("mount"))
    if mount.get("mountpoint") == "/":
        return findings.add("not-mounted", name)
    if "hung" in about:
        return findings.add("mount-hangs", name, kind=mount.get("type") or "asking for its mount")
    if "error" in about:
        return findings.add("workspace-fails", name, error=about["error"])
    here = (mount.get("type"), mount.get("source"))
    if here != facts.login:
        findings.add(
            "mount-differs", name, mounted=f"{here[0]} {here[1]}", login=" ".join(facts.login)
        )
    if about.get("read_only"):
        findings.add("read-only", name)
    free = about.get("free")
    if free is not None and free < _LEAST_FREE:
        findings.add("space", name, "error" if free < _SPARE else None, free=mib(free))
    if about.get("inodes") == 0:
        findings.add("inodes", name)
    if (speed := about.get("write_mb_s")) is not None and speed < _SLOW_WRITE_MB_S:
        findings.add("slow-write", name, mb_s=speed)
    if (took := about.get("rename_ms")) is not None and took > _SLOW_RENAME_MS:
        findings.add("slow-rename", name, ms=took)
    if "writeback" in str(mount.get("options", "")):
        findings.add("writeback", name)
    return None


def _host(workspace: Workspace, name: str, about: Json, facts: Facts, findings: Findings) -> None:
    limits, seen = as_object(about["limits"]), about["gpus"]["seen"]
    if about["uid"] != workspace.uid:
        findings.add("uid", name, uid=about["uid"])
    if (files := limits.get("nofile")) is not None and files < _LEAST_FILES:
        findings.add("nofile", name, nofile=files)
    if (
        about["infiniband"]
        and (locked := limits.get("memlock")) is not None
        and locked < _LEAST_LOCKED
    ):
        findings.add("memlock", name, memlock=locked >> 10)
    if (limits.get("shm") or 0) < _LEAST_SHM:
        findings.add("shm", name, "error" if seen else None, shm=mib(limits.get("shm")))
    if (ports := limits.get("ports")) and ports[0] <= _LAST_PORT:
        findings.add("port-range", name, first=ports[0], last=_LAST_PORT)
    for setting, (bad, good) in _USERNS.items():
        if limits.get("containers") and limits["userns"].get(setting) == bad:
            tools = ", ".join(limits["containers"])
            findings.add(
                "user-namespaces",
                name,
                tools=tools,
                setting=setting.replace("/", "."),
                bad=bad,
                good=good,
            )
    if about.get("tracking"):
        findings.add("tracking", name, error=about["tracking"])
    python, wanted = (
        str(about["versions"]["python"]),
        facts.manifests[0].python if facts.manifests else None,
    )
    if wanted not in (None, python):
        findings.add("wrong-python", name, python=python, wanted=wanted)
    if down := [port for port in about["infiniband"] if port["state"] != "ACTIVE"]:
        text = ", ".join(
            f"{port['device']} ({port['kind']}) is {port['state']}" for port in down[:8]
        )
        findings.add("port-down", name, ports=text)


def _disk(name: str, about: Json, facts: Facts, findings: Findings) -> None:
    needed = facts.manifests[0].unpacked_bytes if facts.manifests else 0
    if "error" in about["disk"]:
        findings.add("disk-fails", name, error=about["disk"]["error"])
    elif needed and not about["unpacked"] and about["disk"]["free"] < needed + _SPARE:
        findings.add(
            "disk-full", name, free=mib(about["disk"]["free"]), needed=mib(needed + _SPARE)
        )


def _network(name: str, about: Json, facts: Facts, findings: Findings) -> None:
    if about["port"] is None:
        ports = ", ".join(str(port) for port, _ in about["taken"])
        findings.add("no-port", name, ports=ports, error=about["taken"][0][1])
    for peer in [
        peer for peer in about["peers"].values() if peer.get("on_lo") and peer["iface"] != "lo"
    ][:1]:
        findings.add("address-on-lo", name, address=peer["on_lo"], iface=peer["iface"])
    for host, peer in sorted(about["peers"].items()):
        address = str(peer.get("address", host))
        if "ipv6" in peer:
            findings.add("ipv6-only", name, peer=host, address=peer["ipv6"])
        elif "unresolved" in peer:
            findings.add(
                "unresolved",
                name,
                peer=host,
                given=peer.get("given") or "none",
                error=peer["unresolved"],
            )
        elif address.startswith("127."):
            findings.add("loopback", name, peer=host, address=address)
        elif "unreachable" in peer and host in facts.reports:
            error = peer["unreachable"]
            findings.add(
                "unreachable", name, peer=host, address=address, last=_LAST_PORT, error=error
            )
        elif "route" in peer:
            findings.add("no-route", name, peer=host, address=address, error=peer["route"])
        if peer.get("seen_ms", 0) is None:
            findings.add("unseen", name, peer=host)
        elif peer.get("seen_ms", 0) > _SLOW_SEEN_MS:
            findings.add("seen-late", name, seconds=peer["seen_ms"] / 1e3)


def _processors(name: str, about: Json, facts: Facts, findings: Findings) -> None:
    cpus, promised = about["cpus"] or 0, capacity(facts, name).cpus
    if 0 < cpus < promised:
        findings.add("cpus-missing", name, promised=promised, cpus=cpus)
    elif cpus > 2 * promised > 0:
        findings.add("cpus-idle", name, promised=promised, cpus=cpus)
    if about["wanted"] is not None and about["affinity"] < about["wanted"]:
        findings.add("affinity", name, wanted=about["wanted"], affinity=about["affinity"])


def _gpus(settings: Settings, name: str, about: Json, facts: Facts, findings: Findings) -> None:
    gpus = about["gpus"]
    promised, seen, wanted = capacity(facts, name).gpus, gpus["seen"], gpus["wanted"] or 0
    if promised and not seen:
        level = "error" if settings.torch_build == "cuda" else None
        findings.add("gpus-silent", name, level, promised=promised, devices=gpus["devices"] or "no")
    elif 0 < seen < wanted:
        findings.add("gpus-fewer", name, wanted=wanted, seen=seen)
    elif 0 < seen < promised:
        findings.add("gpus-hidden", name, promised=promised, seen=seen)


def _differences(facts: Facts, findings: Findings) -> None:
    reports = facts.reports
    for key in _VERSIONS:
        findings.compare(
            f"{key}-differs", {name: about["versions"].get(key) for name, about in reports.items()}
        )
    on_gpus = {name: about["gpus"] for name, about in reports.items() if about["gpus"]["seen"]}
    findings.compare("driver-differs", {name: gpus["cuda"] for name, gpus in on_gpus.items()})
    findings.compare("gpus-differ", {name: gpus["seen"] for name, gpus in on_gpus.items()})
    findings.compare("mtu-differs", {name: _mtu(about) for name, about in reports.items()})
    nodes = {name: capacity(facts, name) for name in reports}
    findings.compare("cpus-differ", {name: node.cpus for name, node in nodes.items()})
    bf16 = {
        name: "+".join(about["processors"]["bf16"]) or "none" for name, about in reports.items()
    }
    findings.compare(
        "bf16-differs", {name: kind for name, kind in bf16.items() if not nodes[name].gpus}
    )
    addresses: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for name, about in reports.items():
        for host, peer in about["network"]["peers"].items():
            if peer.get("address"):
                addresses[host][name] = peer["address"]
    for host, meanings in sorted(addresses.items()):
        if len(groups := grouped(meanings)) > 1:
            findings.add("address-differs", host, groups=spelled(groups))


def _mtu(about: Json) -> int | None:
    peers = list(about["network"]["peers"].values())
    return next(
        (peer["mtu"] for peer in reversed(peers) if peer.get("mtu") and peer["iface"] != "lo"), None
    )


def _clocks(facts: Facts, findings: Findings) -> None:
    """Compare the clocks, measured between nodes by request and reply, half the round trip subtracted."""
    offsets = clock_offsets(facts)
    if not offsets or (spread := max(offsets.values()) - min(offsets.values())) <= _CLOCK_S:
        return
    middle = statistics.median(offsets.values())
    worst = max(offsets, key=lambda name: abs(offsets[name] - middle))
    off, way = abs(offsets[worst] - middle), "ahead of" if offsets[worst] > middle else "behind"
    findings.add("clock", worst, "error" if spread > _CLOCK_BREAKS_S else None, off=off, way=way)

"""The rules for each node: its releases, filesystem, limits, network, environments and clock."""

import statistics

from ddp.base import Settings
from ddp.doctor.node_facts import Facts, Finding, Json, Level, as_dict, clock_offsets, grouped, release, spelled
from ddp.doctor.rules import Alike, Rule, Table, Values, compare, evaluate, mib

_CLOCK_S, _CLOCK_BREAKS_S = 1.0, 50.0  # auth/slurm: a credential is good for 60 s (slurm.conf(5), AuthInfo ttl)
_SLOW_WRITE_MB_S, _SLOW_RENAME_MS, _SLOW_SEEN_MS = 20.0, 500.0, 3000.0
_SLOW_IMPORT_S, _SLOW_COLD_IMPORT_S, _SLOW_UNPACK_S = 20.0, 60.0, 300
_LEAST_FREE, _LEAST_SHM = 2 << 30, 64 << 20
_LEAST_FILES, _LEAST_LOCKED = 1024, 64 << 20
_LAST_PORT = 29999  # of the rendezvous, see ddp.node.supervisor
_OLDEST_SLURM = (24, 11)
_RESTART = "in slurmd's unit, then: systemctl restart slurmd"

VERSIONS: dict[str, Level] = {
    "python": "error", "machine": "error", "libc": "warning", "system": "warning", "slurm": "warning", "kernel": "note",
}  # fmt: skip
ENVIRONMENT_VERSIONS: dict[str, Level] = {"torch": "error", "nccl": "error", "numpy": "warning", "python": "note"}
ALIKE = (
    *(Alike(level, lambda _, __, about, key=key: about["versions"].get(key, ""), f"{key} differs: {{groups}}")
      for key, level in VERSIONS.items()),
    Alike("warning", lambda _, __, about: _of_gpus(about, "driver"), "the GPUs' driver differs: {groups}"),
    Alike("warning", lambda _, __, about: _of_gpus(about, "cuda"), "the driver's CUDA differs: {groups}"),
    Alike("note", lambda _, __, about: _of_gpus(about, "seen"), "the number of GPUs differs: {groups}"),
    Alike("warning", lambda _, __, about: _mtu(about),
          "the largest packet (MTU) differs: {groups}: big transfers may hang while small ones pass",
          "ip link set dev IFACE mtu N, the same on all nodes"),
)  # fmt: skip
RELEASE: Table = (
    (
        Rule("error", lambda n: n.release and n.release < _OLDEST_SLURM,
             "Slurm {slurm} is older than 24.11, the oldest that the jobs are written for",
             "on {where}: apt-get install slurmd, from a release that has it"),
        Rule("error", lambda n: n.release and n.controller and n.release > n.controller,
             "its Slurm {slurm} is newer than the controller's {controller_slurm}",
             "upgrade slurmctld first (Slurm's upgrade guide)"),
    ),
)  # fmt: skip
UNUSABLE: Table = (
    (
        Rule("error", lambda n: n.mount.get("mountpoint") == "/",
             "nothing is mounted at {workspace}: it lies on the node's own disk", "{join}"),
        Rule("error", lambda n: n.is_hung, "{workspace} gave no answer within 25 s ({kind})",
             "is the filesystem's server up? juju status; then reboot the node or remount"),
        Rule("error", lambda n: n.error is not None, "the workspace cannot be used: {error}", "{join}"),
    ),
)  # fmt: skip
FILESYSTEM: Table = (
    Rule("note", lambda n: n.mounted != n.login,
         "{workspace} is {mounted[0]} {mounted[1]} here and {login[0]} {login[1]} on {unit}",
         "findmnt {workspace} on both; if they are not the same filesystem: {join}"),
    Rule("error", lambda n: n.read_only, "{workspace} is mounted read-only", "{join}"),
    Rule(lambda n: "error" if n.free < 256 << 20 else "warning", lambda n: n.free is not None and n.free < _LEAST_FREE,
         "{workspace} has {free_mib} MiB free", "remove old runs, or grow it", where="workspace"),
    Rule("error", lambda n: n.inodes == 0, "{workspace} has no inode left", "remove files, or grow it",
         where="workspace"),
    Rule("warning", lambda n: n.write_mb_s is not None and n.write_mb_s < _SLOW_WRITE_MB_S,
         "writes {write_mb_s:.1f} MB/s to {workspace} (8 MiB with fsync): checkpoints will take long",
         "on {where}: findmnt {workspace}; is the server that it names near, and idle?"),
    Rule("warning", lambda n: n.rename_ms is not None and n.rename_ms > _SLOW_RENAME_MS,
         "making and renaming a file in {workspace} takes {rename_ms:.0f} ms",
         "on {where}: findmnt {workspace}; is the filesystem's metadata server busy or far away?"),
    Rule("note", lambda n: n.locks is False, "{workspace} has no flock; nothing of the trainer's needs it there", ""),
    Rule("warning", lambda n: "writeback" in str(n.mount.get("options", "")),
         "JuiceFS writes back: other nodes see files late, and a node that dies loses what it has not uploaded",
         "juju config shared-filesystem-client (mount options without writeback)"),
)  # fmt: skip
HOST: Table = (
    Rule("error", lambda n: n.uid != n.own_uid, "{user} is uid {uid} here and {own_uid} on {unit}",
         "give the account the same uid everywhere"),
    Rule("warning", lambda n: n.nofile is not None and n.nofile < _LEAST_FILES, "a job may open {nofile} files only",
         f"LimitNOFILE=1048576 {_RESTART}"),
    Rule("error", lambda n: n.has_rdma and n.memlock is not None and n.memlock < _LEAST_LOCKED,
         "a job may lock {memlock_kib} KiB of memory: RDMA registers more than that, and NCCL fails",
         f"LimitMEMLOCK=infinity {_RESTART}"),
    Rule(lambda n: "error" if n.has_gpus else "warning", lambda n: n.shm is None or n.shm < _LEAST_SHM,
         "{shared_memory}: ranks of one node talk through it", "mount -o remount,size=50% /dev/shm"),
    Rule("warning", lambda n: n.first_port is not None and n.first_port <= _LAST_PORT,
         f"outgoing connections take ports from {{first_port}} on, which the rendezvous uses up to {_LAST_PORT}",
         "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"),
    (
        Rule("error", lambda n: n.disk_error is not None, "the environment cannot be unpacked: {disk_error}",
             "on {where}: df {disk}; ls -ld {disk}; all must be able to write there"),
        Rule("error", lambda n: n.needed and not n.is_unpacked and n.disk_free < n.needed + (256 << 20),
             "{disk} has {disk_free_mib} MiB free; the environment needs {needed_mib}", "make room in {disk}"),
    ),
    Rule("warning", lambda n: n.tracking,
         "cannot reach the MLflow server {mlflow} ({tracking}): runs train on, untracked",
         "on {where}: curl -I {mlflow}; or: juju config {app} mlflow-tracking-uri=..."),
    Rule("error", lambda n: n.wanted_python not in (None, n.python),
         "has Python {python}, the environment was made for {wanted_python}",
         "the same release on all hosts; then: {install}"),
    Rule("error", lambda n: n.port is None, "none of the ports {ports} could be taken: {port_error}",
         "ss -ltnp, and stop what listens there"),
    (
        Rule("error", lambda n: n.is_seeing and n.seen_ms is None,
             "does not see within 10 s what {before} wrote: other filesystems at the same path, or too long a cache",
             "findmnt on both nodes; the same source must be mounted"),
        Rule("warning", lambda n: n.is_seeing and n.seen_ms > _SLOW_SEEN_MS,
             "sees another node's new file only after {seen_s:.1f} s",
             "NFS: mount with lookupcache=positive or a smaller acdirmax"),
    ),
)  # fmt: skip
PEER: Table = (
    (
        Rule("error", lambda p: p.unresolved is not None,
             "the address of {host} in Slurm (NodeAddr) is no IPv4 address and does not resolve here: "
             "{given} ({unresolved})", "{change}"),
        Rule("error", lambda p: p.address.startswith("127."),
             "the address of {host} in Slurm (NodeAddr) is {address}, a loopback address: "
             "ranks could not reach each other", "{change}"),
        Rule("error", lambda p: p.unreachable is not None and p.has_reported,
             f"cannot reach {{host}} ({{address}}) on the rendezvous ports 20000-{_LAST_PORT}: {{unreachable}}",
             "let all TCP ports through between the nodes: the firewall of {host}, or the cloud's security group"),
        Rule("error", lambda p: p.route is not None, "has no route to {host}: {route}",
             "on {where}: ip route get {address}"),
        Rule("warning", lambda p: p.is_met and not p.iface,
             "has no interface with the address {mine} that leads to {host}",
             "gloo needs GLOO_SOCKET_IFNAME then: submit-ddp env=..."),
    ),
)  # fmt: skip
ENVIRONMENT: Table = (
    Rule("error", lambda e: e.error is not None, "import torch fails in the environment {hash}: {error}",
         "on {where}: rm -r {cache}/{hash} {cache}/{hash}.complete; the next job unpacks it anew"),
    Rule("error", lambda e: e.cuda and e.devices is not None and e.devices < e.seen,
         "torch for CUDA {cuda} finds {devices} of the {seen} GPUs that the driver shows",
         "on {where}: nvidia-smi; the driver is for CUDA {driver_cuda}: too old for torch's?"),
    (
        Rule("warning", lambda e: e.endless_s is not None,
             "import torch from {cache} had not ended after {endless_s:.0f} s", "{own_disk}"),
        Rule("warning", lambda e: e.cold_s > _SLOW_COLD_IMPORT_S,
             "import torch takes {cold_s:.0f} s from {cache} as long as none of it is in memory, as after a boot",
             "{own_disk}"),
    ),
    Rule("warning", lambda e: e.seconds > _SLOW_IMPORT_S,
         "import torch takes {seconds:.0f} s from {cache}, a second time as well",
         "the node's own disk is slow, or its memory full"),
    Rule("warning", lambda e: e.unpack_s > _SLOW_UNPACK_S,
         "the first job took {unpack_s} s to unpack the environment {hash}",
         "is {workspace} slow to read, or {disk} slow to write? See benchmark of shared-filesystem-client"),
)  # fmt: skip
ADDRESSES: Table = (
    Rule("warning", lambda a: len(a.addresses) > 1,
         "its address in Slurm (NodeAddr) is a name that means different addresses: {groups}",
         "scontrol update nodename={where} nodeaddr=ADDRESS"),
)  # fmt: skip
CLOCKS: Table = (
    Rule(lambda c: "error" if c.spread > _CLOCK_BREAKS_S else "warning", lambda c: c.spread > _CLOCK_S,
         "its clock is {off:.1f} s {way} the others'",
         "on {where}: timedatectl; systemctl restart systemd-timesyncd (or chrony)"),
)  # fmt: skip


def judge(settings: Settings, facts: Facts) -> list[Finding]:
    """Return the findings about the nodes that returned a report."""
    found = compare(ALIKE, facts)
    for name, about in sorted(facts.reports.items()):
        node = _node(settings, facts, name, about)
        found += evaluate(RELEASE, node)
        found += evaluate(UNUSABLE, node) or evaluate(FILESYSTEM, node)
        found += evaluate(HOST, node)
        for host, peer in sorted(about["network"]["peers"].items()):
            found += evaluate(PEER, _peer(facts, name, host, peer))
        for environment in about["environments"]:
            found += evaluate(ENVIRONMENT, _environment(settings, name, about, environment))
    found += _compare_environments(settings, facts)
    for host, addresses in sorted(_addresses(facts).items()):
        found += evaluate(ADDRESSES, Values(where=host, addresses=addresses, groups=spelled(addresses)))
    if offsets := clock_offsets(facts):
        found += evaluate(CLOCKS, _clocks(offsets))
    return found


def _node(settings: Settings, facts: Facts, name: str, about: Json) -> Values:
    filesystem, network = about["filesystem"], about["network"]
    limits, disk, mount = as_dict(about["limits"]), as_dict(about["disk"]), as_dict(filesystem.get("mount"))
    needed = max((manifest.unpacked_bytes for manifest in facts.manifests[:1]), default=0)
    shm = limits.get("shm")
    seen = next(((host, peer["seen_ms"]) for host, peer in network["peers"].items() if "seen_ms" in peer), None)
    return Values(
        where=name, workspace=settings.workspace, unit=settings.unit, app=settings.unit.partition("/")[0],
        user=settings.user, own_uid=settings.uid, uid=about["uid"], install=settings.typed("install-environment"),
        join=f"juju status shared-filesystem-client; integrate it with the application of {name} (juju-info)",
        slurm=about["versions"].get("slurm", ""), release=release(str(about["versions"].get("slurm", ""))),
        controller_slurm=facts.config.get("SLURM_VERSION", ""),
        controller=release(facts.config.get("SLURM_VERSION", "")),
        mount=mount, kind=mount.get("type") or "asking for its mount", is_hung="hung" in filesystem,
        error=filesystem.get("error"), mounted=(mount.get("type"), mount.get("source")), login=facts.login,
        read_only=filesystem.get("read_only"), free=filesystem.get("free"), free_mib=mib(filesystem.get("free")),
        inodes=filesystem.get("inodes"), write_mb_s=filesystem.get("write_mb_s"),
        rename_ms=filesystem.get("rename_ms"), locks=filesystem.get("locks"),
        nofile=limits.get("nofile"), has_rdma=bool(about["infiniband"]), memlock=limits.get("memlock"),
        memlock_kib=(limits.get("memlock") or 0) >> 10, shm=shm, has_gpus=bool(as_dict(about["gpus"]).get("seen")),
        shared_memory="there is no /dev/shm" if shm is None else f"/dev/shm has {mib(shm)} MiB",  # noqa: S108
        first_port=(limits.get("ports") or [None])[0],
        disk=settings.node_cache.parent, disk_error=disk.get("error"), disk_free=disk.get("free", 0),
        disk_free_mib=mib(disk.get("free")), needed=needed, needed_mib=mib(needed) + 256,
        is_unpacked=any(environment.get("unpacked") for environment in about["environments"]),
        mlflow=settings.mlflow_uri, tracking=about.get("tracking"), python=str(about["versions"]["python"]),
        wanted_python=facts.manifests[0].python if facts.manifests else None,
        port=network["port"], ports=", ".join(str(port) for port, _ in network["taken"]),
        port_error=network["taken"][0][1] if network["taken"] else "",
        is_seeing=seen is not None, before=seen and seen[0], seen_ms=seen and seen[1],
        seen_s=(seen[1] or 0) / 1e3 if seen else 0,
    )  # fmt: skip


def _peer(facts: Facts, name: str, host: str, peer: Json) -> Values:
    return Values(
        where=name, host=host, given=peer.get("given") or "none", unresolved=peer.get("unresolved"),
        address=str(peer.get("address", host)), unreachable=peer.get("unreachable"), has_reported=host in facts.reports,
        route=peer.get("route"), is_met="port" in peer, iface=peer.get("iface"), mine=peer.get("mine"),
        change=f"scontrol update nodename={host} nodeaddr=ADDRESS; see: scontrol show node {host}",
    )  # fmt: skip


def _environment(settings: Settings, name: str, about: Json, environment: Json) -> Values:
    cache = settings.node_cache
    disk = f"on {name}: findmnt -T {cache}; {cache.parent} must be a disk of the node's own, better an SSD"
    names = ("hash", "error", "cuda", "devices", "endless_s")
    return Values(
        where=name, workspace=settings.workspace, cache=cache, disk=cache.parent, own_disk=disk,
        seen=about["gpus"]["seen"], driver_cuda=about["gpus"]["cuda"],
        **{key: environment.get(key) for key in names},
        **{key: environment.get(key, 0) for key in ("cold_s", "seconds", "unpack_s")},
    )  # fmt: skip


def _clocks(offsets: dict[str, float]) -> Values:
    """Compare the clocks, measured between nodes by request and reply, half the round trip subtracted."""
    middle = statistics.median(offsets.values())
    worst = max(offsets, key=lambda name: abs(offsets[name] - middle))
    return Values(
        where=worst,
        spread=max(offsets.values()) - min(offsets.values()),
        off=abs(offsets[worst] - middle),
        way="ahead of" if offsets[worst] > middle else "behind",
    )


def _of_gpus(about: Json, key: str) -> str | None:
    return str(about["gpus"].get(key)) if about["gpus"]["seen"] else None


def _mtu(about: Json) -> int | None:
    peers = list(about["network"]["peers"].values())
    return next((peer["mtu"] for peer in reversed(peers) if peer.get("mtu") and peer["iface"] != "lo"), None)


def _addresses(facts: Facts) -> dict[str, dict[str, list[str]]]:
    """Return for each node the addresses that its name means, and on which nodes it does."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, about in facts.reports.items():
        for host, peer in about["network"]["peers"].items():
            if peer.get("address"):
                found.setdefault(host, {}).setdefault(peer["address"], []).append(name)
    return found


def _compare_environments(settings: Settings, facts: Facts) -> list[Finding]:
    """Compare what an environment of one hash holds; which of several a node has unpacked does not matter."""
    versions: dict[tuple[str, str], dict[str, str]] = {}
    for name, about in facts.reports.items():
        for environment in about["environments"]:
            for key in ENVIRONMENT_VERSIONS:
                if environment.get(key):
                    versions.setdefault((environment["hash"], key), {})[name] = str(environment[key])
    again = settings.typed("install-environment", force="true")
    return [
        Finding(
            ENVIRONMENT_VERSIONS[key],
            "nodes",
            f"the environment's {key} differs: {spelled(groups)}",
            "bring the nodes to the same release" if key == "python" else again,
        )
        for (_, key), found in versions.items()
        if len(groups := grouped(found)) > 1
    ]

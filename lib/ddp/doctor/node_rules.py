"""What doctor makes of each node's report, and of what differs between them."""

import statistics

from ddp.base import Settings
from ddp.doctor.node_facts import Facts, Finding, Json, Level, as_dict, clock_offsets, grouped, release, spelled

_CLOCK_S, _CLOCK_BREAKS_S = 1.0, 50.0  # auth/slurm: a credential is good for 60 s (slurm.conf(5), AuthInfo ttl)
_SLOW_WRITE_MB_S, _SLOW_RENAME_MS, _SLOW_SEEN_MS = 20.0, 500.0, 3000.0
_SLOW_IMPORT_S, _SLOW_COLD_IMPORT_S, _SLOW_UNPACK_S = 20.0, 60.0, 300
_LEAST_FREE, _LEAST_SHM = 2 << 30, 64 << 20
_LEAST_FILES, _LEAST_LOCKED = 1024, 64 << 20
_PORTS = (20000, 29999)  # of the rendezvous, see job.sbatch
_OLDEST_SLURM = (24, 11)


def judge(settings: Settings, facts: Facts) -> list[Finding]:
    """Return the findings about the nodes that answered."""
    found = _about_versions(facts)
    for name, about in sorted(facts.reports.items()):
        found += _about_filesystem(settings, facts, name, about)
        found += _about_host(settings, facts, name, about)
        found += _about_network(facts, name, about)
        found += _about_environment(settings, facts, name, about)
        found += _about_tracking(settings, name, about)
    return [*found, *_about_sharing(facts), *_about_unlike_environments(settings, facts), *_about_clocks(facts)]


def _about_versions(facts: Facts) -> list[Finding]:
    found: list[Finding] = []
    levels: dict[str, Level] = {
        "python": "error", "machine": "error", "libc": "warning", "system": "warning", "slurm": "warning",
        "kernel": "note",
    }  # fmt: skip
    for key, level in levels.items():
        groups = grouped({name: str(about["versions"].get(key, "")) for name, about in facts.reports.items()})
        if len(groups) > 1:
            found.append(
                Finding(level, "nodes", f"{key} differs: {spelled(groups)}", "bring the nodes to the same release")
            )
    controller = release(facts.config.get("SLURM_VERSION", ""))
    for name, about in sorted(facts.reports.items()):
        theirs = release(str(about["versions"].get("slurm", "")))
        if theirs and theirs < _OLDEST_SLURM:
            text = f"Slurm {about['versions']['slurm']} is older than 24.11, the oldest that the jobs are written for"
            found.append(Finding("error", name, text, f"on {name}: apt-get install slurmd, from a release that has it"))
        elif theirs and controller and theirs > controller:
            text = (
                f"its Slurm {about['versions']['slurm']} is newer than the controller's {facts.config['SLURM_VERSION']}"
            )
            found.append(Finding("error", name, text, "upgrade slurmctld first (Slurm's upgrade guide)"))
    return found


def _about_filesystem(settings: Settings, facts: Facts, name: str, about: Json) -> list[Finding]:
    filesystem: Json = about["filesystem"]
    join = f"juju status shared-filesystem-client; integrate it with the application of {name} (juju-info)"
    mount = as_dict(filesystem.get("mount"))
    if mount and mount.get("mountpoint") == "/":
        return [
            Finding("error", name, f"nothing is mounted at {settings.workspace}: it lies on the node's own disk", join)
        ]
    if "hung" in filesystem:
        text = f"{settings.workspace} gave no answer within 25 s ({mount.get('type') or 'asking for its mount'})"
        return [
            Finding("error", name, text, "is the filesystem's server up? juju status; then reboot the node or remount")
        ]
    if "error" in filesystem:
        return [Finding("error", name, f"the workspace cannot be used: {filesystem['error']}", join)]
    found: list[Finding] = []
    theirs, ours = (mount.get("type"), mount.get("source")), facts.login
    if theirs != ours:
        text = f"{settings.workspace} is {theirs[0]} {theirs[1]} here and {ours[0]} {ours[1]} on {settings.unit}"
        remedy = f"findmnt {settings.workspace} on both; if they are not the same filesystem: {join}"
        found.append(Finding("note", name, text, remedy))
    if filesystem.get("read_only"):
        found.append(Finding("error", name, f"{settings.workspace} is mounted read-only", join))
    if (free := filesystem.get("free")) is not None and free < _LEAST_FREE:
        text = f"{settings.workspace} has {free >> 20} MiB free"
        found.append(
            Finding("error" if free < 256 << 20 else "warning", "workspace", text, "remove old runs, or grow it")
        )
    if filesystem.get("inodes") == 0:
        found.append(
            Finding("error", "workspace", f"{settings.workspace} has no inode left", "remove files, or grow it")
        )
    speed = filesystem.get("write_mb_s")
    if speed is not None and speed < _SLOW_WRITE_MB_S:
        text = f"writes {speed:.1f} MB/s to {settings.workspace} (8 MiB with fsync): checkpoints will take long"
        remedy = f"on {name}: findmnt {settings.workspace}; is the server that it names near, and idle?"
        found.append(Finding("warning", name, text, remedy))
    rename = filesystem.get("rename_ms")
    if rename is not None and rename > _SLOW_RENAME_MS:
        text = f"making and renaming a file in {settings.workspace} takes {rename:.0f} ms"
        remedy = f"on {name}: findmnt {settings.workspace}; is the filesystem's metadata server busy or far away?"
        found.append(Finding("warning", name, text, remedy))
    if filesystem.get("locks") is False:
        found.append(
            Finding("note", name, f"{settings.workspace} has no flock; nothing of the trainer's needs it there", "")
        )
    if "writeback" in str(mount.get("options", "")):
        text = "JuiceFS writes back: other nodes see files late, and a node that dies loses what it has not uploaded"
        found.append(
            Finding("warning", name, text, "juju config shared-filesystem-client (mount options without writeback)")
        )
    return found


def _about_host(settings: Settings, facts: Facts, name: str, about: Json) -> list[Finding]:
    found: list[Finding] = []
    limits, disk = as_dict(about["limits"]), as_dict(about["disk"])
    if about["uid"] != settings.uid:
        text = f"{settings.user} is uid {about['uid']} here and {settings.uid} on {settings.unit}"
        found.append(Finding("error", name, text, "give the account the same uid everywhere"))
    if (files := limits.get("nofile")) is not None and files < _LEAST_FILES:
        text = f"a job may open {files} files only"
        found.append(
            Finding("warning", name, text, "LimitNOFILE=1048576 in slurmd's unit, then: systemctl restart slurmd")
        )
    locked = limits.get("memlock")
    if about["infiniband"] and locked is not None and locked < _LEAST_LOCKED:
        text = f"a job may lock {locked >> 10} KiB of memory: RDMA registers more than that, and NCCL fails"
        found.append(
            Finding("error", name, text, "LimitMEMLOCK=infinity in slurmd's unit, then: systemctl restart slurmd")
        )
    shm = limits.get("shm")
    if shm is None or shm < _LEAST_SHM:
        text = "there is no /dev/shm" if shm is None else f"/dev/shm has {shm >> 20} MiB"  # noqa: S108
        level: Level = "error" if as_dict(about["gpus"]).get("seen") else "warning"
        found.append(
            Finding(level, name, f"{text}: ranks of one node talk through it", "mount -o remount,size=50% /dev/shm")
        )
    if (ports := limits.get("ports")) and ports[0] <= _PORTS[1]:
        text = f"outgoing connections take ports from {ports[0]} on, which the rendezvous uses up to {_PORTS[1]}"
        found.append(Finding("warning", name, text, "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"))
    needed = max((m.unpacked_bytes for m in facts.manifests[:1]), default=0)
    unpacked = any(e.get("unpacked") for e in about["environments"])
    if "error" in disk:
        place = settings.node_cache.parent
        remedy = f"on {name}: df {place}; ls -ld {place}; all must be able to write there"
        found.append(Finding("error", name, f"the environment cannot be unpacked: {disk['error']}", remedy))
    elif needed and not unpacked and disk["free"] < needed + (256 << 20):
        free_mb, needed_mb = disk["free"] >> 20, (needed >> 20) + 256
        text = f"{settings.node_cache.parent} has {free_mb} MiB free; the environment needs {needed_mb}"
        found.append(Finding("error", name, text, f"make room in {settings.node_cache.parent}"))
    return found


def _about_network(facts: Facts, name: str, about: Json) -> list[Finding]:
    network: Json = about["network"]
    found: list[Finding] = []
    if network["port"] is None:
        ports = ", ".join(str(port) for port, _ in network["taken"])
        text = f"none of the ports {ports} could be taken: {network['taken'][0][1]}"
        found.append(Finding("error", name, text, "ss -ltnp, and stop what listens there"))
    for host, peer in sorted(network["peers"].items()):
        change = f"scontrol update nodename={host} nodeaddr=ADDRESS; see: scontrol show node {host}"
        if "unresolved" in peer:
            text = f"the address of {host} in Slurm (NodeAddr) is no IPv4 address and does not resolve here"
            found.append(Finding("error", name, f"{text}: {peer['given'] or 'none'} ({peer['unresolved']})", change))
            continue
        if str(peer.get("address", "")).startswith("127."):
            text = f"the address of {host} in Slurm (NodeAddr) is {peer['address']}, a loopback address"
            found.append(Finding("error", name, f"{text}: ranks could not reach each other", change))
            continue
        if "unreachable" in peer and host in facts.reports:
            ports = f"{_PORTS[0]}-{_PORTS[1]}"
            where = f"{host} ({peer.get('address', '?')})"
            text = f"cannot reach {where} on the rendezvous ports {ports}: {peer['unreachable']}"
            remedy = (
                f"let all TCP ports through between the nodes: the firewall of {host}, or the cloud's security group"
            )
            found.append(Finding("error", name, text, remedy))
        elif "route" in peer:
            found.append(
                Finding(
                    "error",
                    name,
                    f"has no route to {host}: {peer['route']}",
                    f"on {name}: ip route get {peer.get('address', host)}",
                )
            )
        elif "port" in peer and not peer.get("iface"):
            text = f"has no interface with the address {peer.get('mine')} that leads to {host}"
            found.append(Finding("warning", name, text, "gloo needs GLOO_SOCKET_IFNAME then: submit-ddp env=..."))
    seen = next((peer for peer in network["peers"].values() if "seen_ms" in peer), None)
    if seen and seen["seen_ms"] is None:
        before = next(host for host, peer in network["peers"].items() if "seen_ms" in peer)
        text = f"does not see within 10 s what {before} wrote: other filesystems at the same path, or too long a cache"
        found.append(Finding("error", name, text, "findmnt on both nodes; the same source must be mounted"))
    elif seen and seen["seen_ms"] > _SLOW_SEEN_MS:
        text = f"sees another node's new file only after {seen['seen_ms'] / 1e3:.1f} s"
        found.append(Finding("warning", name, text, "NFS: mount with lookupcache=positive or a smaller acdirmax"))
    return found


def _about_environment(settings: Settings, facts: Facts, name: str, about: Json) -> list[Finding]:
    found: list[Finding] = []
    theirs = str(about["versions"]["python"])
    if facts.manifests and theirs != facts.manifests[0].python:
        text = f"has Python {theirs}, the environment was made for {facts.manifests[0].python}"
        found.append(
            Finding(
                "error",
                name,
                text,
                f"the same release on all hosts; then: {settings.typed('install-environment')}",
            )
        )
    for environment in about["environments"]:
        if "error" in environment:
            text = f"import torch fails in the environment {environment['hash']}: {environment['error']}"
            home = settings.node_cache / environment["hash"]
            found.append(
                Finding("error", name, text, f"on {name}: rm -r {home} {home}.complete; the next job unpacks it anew")
            )
        devices, seen = environment.get("devices"), about["gpus"]["seen"]
        if environment.get("cuda") and devices is not None and devices < seen:
            text = f"torch for CUDA {environment['cuda']} finds {devices} of the {seen} GPUs that the driver shows"
            remedy = f"on {name}: nvidia-smi; the driver is for CUDA {about['gpus']['cuda']}: too old for torch's?"
            found.append(Finding("error", name, text, remedy))
        place = settings.node_cache
        disk = f"on {name}: findmnt -T {place}; {place.parent} must be a disk of the node's own, better an SSD"
        if "endless_s" in environment:
            text = f"import torch from {place} had not ended after {environment['endless_s']:.0f} s"
            found.append(Finding("warning", name, text, disk))
        elif environment.get("cold_s", 0.0) > _SLOW_COLD_IMPORT_S:
            text = f"import torch takes {environment['cold_s']:.0f} s from {place} as long as none of it is in memory"
            found.append(Finding("warning", name, f"{text}, as after a boot", disk))
        if environment.get("seconds", 0.0) > _SLOW_IMPORT_S:
            text = f"import torch takes {environment['seconds']:.0f} s from {place}, a second time as well"
            found.append(Finding("warning", name, text, "the node's own disk is slow, or its memory full"))
        if environment.get("unpack_s", 0) > _SLOW_UNPACK_S:
            text = f"the first job took {environment['unpack_s']} s to unpack the environment {environment['hash']}"
            reads = f"is {settings.workspace} slow to read, or {place.parent} slow to write?"
            found.append(Finding("warning", name, text, f"{reads} See benchmark of shared-filesystem-client"))
    return found


def _about_tracking(settings: Settings, name: str, about: Json) -> list[Finding]:
    """Return whether runs on this node would be tracked; a server that is away stops none."""
    if not about.get("tracking"):
        return []
    text = f"cannot reach the MLflow server {settings.mlflow_uri} ({about['tracking']}): runs train on, untracked"
    app = settings.unit.partition("/")[0]
    remedy = f"on {name}: curl -I {settings.mlflow_uri}; or: juju config {app} mlflow-tracking-uri=..."
    return [Finding("warning", name, text, remedy)]


def _about_unlike_environments(settings: Settings, facts: Facts) -> list[Finding]:
    """Return where the same environment is not the same; which of several a node has unpacked does not matter."""
    levels: dict[str, Level] = {"torch": "error", "nccl": "error", "numpy": "warning", "python": "note"}
    told: dict[tuple[str, str], dict[str, str]] = {}
    for name, about in facts.reports.items():
        for environment in about["environments"]:
            for key in levels:
                if environment.get(key):
                    told.setdefault((environment["hash"], key), {})[name] = str(environment[key])
    found: list[Finding] = []
    for (_, key), versions in told.items():
        if len(groups := grouped(versions)) > 1:
            remedy = settings.typed("install-environment", force="true")
            remedy = "bring the nodes to the same release" if key == "python" else remedy
            found.append(Finding(levels[key], "nodes", f"the environment's {key} differs: {spelled(groups)}", remedy))
    return found


def _about_sharing(facts: Facts) -> list[Finding]:
    """Return where nodes differ in what must be alike: drivers, interfaces, addresses."""
    found: list[Finding] = []
    with_gpus = {name: about for name, about in facts.reports.items() if about["gpus"]["seen"]}
    levels: dict[str, Level] = {"driver": "warning", "cuda": "warning", "seen": "note"}
    for key, level in levels.items():
        groups = grouped({name: str(about["gpus"].get(key)) for name, about in with_gpus.items()})
        if len(groups) > 1:
            what = {"driver": "the GPUs' driver", "cuda": "the driver's CUDA", "seen": "the number of GPUs"}[key]
            found.append(
                Finding(level, "nodes", f"{what} differs: {spelled(groups)}", "bring the nodes to the same release")
            )
    addresses: dict[str, dict[str, list[str]]] = {}
    mtus: dict[str, str] = {}
    for name, about in facts.reports.items():
        for host, peer in about["network"]["peers"].items():
            if peer.get("address"):
                addresses.setdefault(host, {}).setdefault(peer["address"], []).append(name)
            if peer.get("mtu") and peer["iface"] != "lo":
                mtus[name] = f"{peer['mtu']} on {peer['iface']}"
    for host, groups in sorted(addresses.items()):
        if len(groups) > 1:
            found.append(
                Finding(
                    "warning",
                    host,
                    f"its address in Slurm (NodeAddr) is a name that means different addresses: {spelled(groups)}",
                    f"scontrol update nodename={host} nodeaddr=ADDRESS",
                )
            )
    sizes = grouped({name: text.split()[0] for name, text in mtus.items()})
    if len(sizes) > 1:
        text = f"the largest packet (MTU) differs: {spelled(sizes)}: big transfers may hang while small ones pass"
        found.append(Finding("warning", "nodes", text, "ip link set dev IFACE mtu N, the same on all nodes"))
    return found


def _about_clocks(facts: Facts) -> list[Finding]:
    """Return whose clock is off, measured between nodes by question and answer, half the trip taken off."""
    offsets = clock_offsets(facts)
    if not offsets:
        return []
    spread = max(offsets.values()) - min(offsets.values())
    if spread <= _CLOCK_S:
        return []
    middle = statistics.median(offsets.values())
    worst = max(offsets, key=lambda name: abs(offsets[name] - middle))
    level: Level = "error" if spread > _CLOCK_BREAKS_S else "warning"
    way = "ahead of" if offsets[worst] > middle else "behind"
    text = f"its clock is {abs(offsets[worst] - middle):.1f} s {way} the others'"
    return [Finding(level, worst, text, f"on {worst}: timedatectl; systemctl restart systemd-timesyncd (or chrony)")]

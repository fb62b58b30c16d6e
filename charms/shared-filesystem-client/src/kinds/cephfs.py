"""Draws up the mount of a CephFS directory: by the kernel, or by ceph-fuse if the kernel cannot.

The key lies in a file for root alone. ceph-fuse reads it there; mount.ceph(8) puts it into the
kernel's keyring: it is in no command line and not among the mount's options. Helpers before Ceph 17
know the older way to name a filesystem only; the newer one checks that it is the right cluster.
"""

import re
import socket
import typing

import mount_plan
from kinds import fuse, kernel, presets
from slurm_ddp import apt, mounts
from slurm_ddp.commands import run
from slurm_ddp.interfaces import filesystem_info as fs

KERNEL, FUSE = "mount.ceph", "ceph-fuse"
_CHOICES = {"auto": (KERNEL, FUSE), "kernel": (KERNEL,), "fuse": (FUSE,)}
_PACKAGES = {KERNEL: "ceph-common", FUSE: "ceph-fuse"}
_FUSE_TYPE = "fuse.ceph-fuse"
_NAMED_DEVICE = (17, 0)  # USER@FSID.NAME=/path, release notes of Quincy


def ensure_client(spec: mount_plan.Spec) -> str:
    """Choose and install the client, the kernel's if it can; a running one stays if both may.

    Raises `mount_plan.MountError` if this machine can use none, and `CommandError`.
    """
    is_fuse = any(mount.fstype == _FUSE_TYPE for mount in mounts.at(spec.mountpoint))
    problems: list[str] = []
    for client in sorted(_CHOICES[spec.cephfs_client], key=lambda one: (one == FUSE) != is_fuse):
        try:
            kernel.check(kernel.CEPH) if client == KERNEL else fuse.check(FUSE)
            apt.ensure_packages((_PACKAGES[client],))
            return client
        except mount_plan.MountError as e:
            problems.append(str(e))
    raise mount_plan.MountError("; ".join(problems))


def plan(
    spec: mount_plan.Spec, volume: fs.Cephfs, key: str, client: str = KERNEL
) -> mount_plan.Plan:
    """Plan the mount of a Ceph filesystem's directory by `client`, which is installed."""
    for what, value in {
        "user": volume.user,
        "fsid": volume.fsid,
        "filesystem": volume.name,
    }.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]+", value):
            raise mount_plan.MountError(
                f"the Ceph {what} has other characters than letters, digits and ._- in it"
            )
    if not re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", key):
        raise mount_plan.MountError(
            "the Ceph key is not base64: it is what `ceph auth print-key client.USER` prints"
        )
    monitors, messenger = _monitors(volume)
    addresses = [fs.join_address(*one) for one in monitors]
    path = kernel.below(volume.path, spec.subdirectory)
    if client == FUSE:
        return _fuse(spec, volume, key, monitors, messenger)
    key_file = mount_plan.ETC / spec.app / "ceph.secret"
    options = presets.merge(
        presets.CEPHFS, profile=spec.profile, given=spec.mount_options, holding=spec.holding
    )
    if messenger == 2:
        # The kernel's own choice is the first protocol
        options = {"ms_mode": "prefer-crc"} | options
    options = {"secretfile": str(key_file)} | options
    source, aliases = f"{','.join(addresses)}:{path}", ()
    if _version() >= _NAMED_DEVICE:
        source, aliases = f"{volume.user}@{volume.fsid}.{volume.name}={path}", (source,)
        options = {"mon_addr": "/".join(addresses)} | options
    else:
        options = {"name": volume.user, "mds_namespace": volume.name} | options
    return kernel.plan(
        spec,
        kind=kernel.CEPH,
        source=source,
        aliases=aliases,
        options=options,
        servers=(monitors,),
        files={key_file: f"{key}\n"},
        secrets=(key,),
        client=KERNEL,
    )


def _fuse(
    spec: mount_plan.Spec, volume: fs.Cephfs, key: str, servers: mount_plan.Servers, messenger: int
) -> mount_plan.Plan:
    """Plan the service of ceph-fuse, with a configuration that no other Ceph program here reads."""
    path = kernel.below(volume.path, spec.subdirectory)
    if re.search(r"[\s,\\]", path) or not path.isprintable():
        raise mount_plan.MountError(
            "the folder has a space, comma or backslash in its name: ceph-fuse cannot mount it"
        )
    conf, keyring = (mount_plan.ETC / spec.app / f"ceph.{name}" for name in ("conf", "keyring"))
    # It logs to the journal; the filesystem is client_mds_namespace before Ceph 17
    monitors = ",".join(f"v{messenger}:{fs.join_address(*one)}" for one in servers)
    settings = {"fsid": volume.fsid, "mon_host": monitors, "keyring": str(keyring), "log_file": ""}
    settings |= {"admin_socket": "", "client_mds_namespace": volume.name, "client_fs": volume.name}
    settings |= presets.merge(presets.CEPH_FUSE, profile=spec.profile, given=spec.mount_options)
    source = f"{volume.user}@{volume.fsid}.{volume.name}={path}"
    flags = spec.flags
    options = presets.text(flags | {"subtype": FUSE, "fsname": source})
    command = f"/usr/bin/ceph-fuse -f --conf={conf} --id={volume.user} -r {path} {spec.mountpoint} -o {options}".split()
    text = fuse.service(
        spec, source, servers, command, what=f"CephFS {volume.name}", fstype=_FUSE_TYPE
    )
    lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
    texts = {conf: f"[global]\n{lines}", keyring: f"[client.{volume.user}]\nkey = {key}\n"}
    rest: dict[str, typing.Any] = {
        "servers": (servers,),
        "files": texts,
        "secrets": (key,),
        "client": FUSE,
    }
    return mount_plan.Plan(spec, f"cephfs-{spec.app}.service", text, (_FUSE_TYPE,), source, **rest)


def _monitors(volume: fs.Cephfs) -> tuple[mount_plan.Servers, int]:
    """Resolve the monitors of the newest protocol that any speaks; return both."""
    messenger = max(monitor.messenger for monitor in volume.monitors())
    found: list[tuple[str, int]] = []
    for monitor in volume.monitors():
        if monitor.messenger != messenger:
            continue
        try:
            answers = socket.getaddrinfo(monitor.host, None, type=socket.SOCK_STREAM)
        except OSError as e:
            text = f"the Ceph monitor {monitor.host} has no address ({e.strerror or e})"
            raise mount_plan.NotYetError(text) from e
        # One of several, and always the same: another order would look like a change
        found.append((min(str(answer[4][0]) for answer in answers), monitor.port))
    return tuple(found), messenger


def _version() -> tuple[int, int]:
    shown = run(
        "/usr/bin/dpkg-query", "-W", "-f", "${Version}", _PACKAGES[KERNEL], check=False
    ).stdout
    match = re.match(r"(?:\d+:)?(\d+)\.(\d+)", shown)
    return (int(match[1]), int(match[2])) if match else (0, 0)

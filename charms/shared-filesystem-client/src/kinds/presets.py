"""How each kind of filesystem is mounted: the defaults, the profiles, and which options a person may give. All data.

Sources: nfs(5); mount.ceph(8) and the kernel's Documentation/filesystems/ceph.rst; mount.lustre(8); JuiceFS's command
reference, 1.3, and its page on caching. The numbers of the profiles are ours, reasoned from those pages.
"""

import dataclasses
import re

Options = dict[str, str]  # an option without a value has the empty one

_NUMBER = r"\d{1,9}"
_SECONDS = r"\d{1,6}(\.\d{1,3})?"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One option of a profile."""

    name: str
    value: str
    why: str


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is known of one kind of filesystem's options."""

    defaults: tuple[Setting, ...]
    allowed: dict[str, str]  # name -> what the value must match; empty: the option takes none
    profiles: dict[str, tuple[Setting, ...]]


class OptionError(ValueError):
    """An option of the user's is not possible. `str()` is one line that names it and says what is."""


# What is refused whatever the filesystem is, and why
REFUSED = {
    "soft": "a request that the server does not answer in time would fail, and take data with it: mounts are hard",
    "softerr": "a request that the server does not answer in time would fail, and take data with it: mounts are hard",
    "intr": "Linux has ignored it since 2.6.25",
    "nointr": "Linux has ignored it since 2.6.25",
    "suid": "setuid programs are never honoured on a shared filesystem",
    "dev": "device files are never honoured on a shared filesystem",
    "nosuid": "it always holds",
    "nodev": "it always holds",
    "noexec": "it is an option of the charm: noexec=true",
    "exec": "it is an option of the charm: noexec=false",
    "ro": "it is an option of the charm: read-only=true",
    "rw": "it is an option of the charm: read-only=false",
    "bg": "systemd and a timer retry, and say so",
    "fg": "systemd and a timer retry, and say so",
    "auto": "systemd mounts it at boot",
    "noauto": "systemd mounts it at boot",
    "nofail": "the machine boots without it anyway",
    "_netdev": "systemd knows that it needs the network",
    "remount": "change an option, and the mount follows",
    "bind": "one application is one mount of one filesystem",
    "secret": "the key lies in a file that root alone reads",
    "secretfile": "the key lies in a file that root alone reads",
    "name": "the provider says which user",
    "mon_addr": "the provider says which monitors",
    "fs": "the provider says which filesystem",
    "mds_namespace": "the provider says which filesystem",
    "localflock": "locks would hold on one machine only",
    "noflock": "training frameworks lock files",
    "nolock": "training frameworks lock files",
    "writeback": "it is an option of the charm, with its risk: juicefs-writeback=true",
    "cache-dir": "it is an option of the charm: cache-directories",
    "cache-size": "it is an option of the charm: cache-size",
    "buffer-size": "it is an option of the charm: buffer-size",
    "metrics": "it is an option of the charm: metrics-port",
    "subdir": "it is an option of the charm: subdirectory",
    "read-only": "it is an option of the charm: read-only=true",
    "allow_other": "it always holds",
    "background": "systemd runs the client",
    "update-fstab": "it would write the engine's address into a file that everybody reads",
}

PROFILES = ("none", "dataset", "checkpoint", "tokens")

_KEPT_NAMES = "names and attributes of data that does not change during a job need not be asked for again"

NFS = Kind(
    defaults=(
        Setting("vers", "4", "the highest 4.x that both sides speak"),
        Setting("hard", "", "a program waits for a server that is away instead of losing what it wrote"),
        Setting("proto", "tcp", "as all of version 4"),
        Setting("nconnect", "8", "several connections to one server; one does not fill a fast network"),
        Setting("rsize", "1048576", "the largest; the server may lower it"),
        Setting("wsize", "1048576", "the largest; the server may lower it"),
        Setting("timeo", "600", "tenths of a second until a request is sent again"),
        Setting("retrans", "2", "until the kernel says that the server does not respond"),
        Setting("noatime", "", "nobody reads the times of access"),
    ),
    allowed={
        "vers": r"4(\.[012])?",
        "nfsvers": r"4(\.[012])?",
        "minorversion": r"[012]",
        "nconnect": r"[1-9]|1[0-6]",
        "max_connect": r"[1-9]|1[0-6]",
        "rsize": _NUMBER,
        "wsize": _NUMBER,
        "timeo": _NUMBER,
        "retrans": _NUMBER,
        "actimeo": _NUMBER,
        "acregmin": _NUMBER,
        "acregmax": _NUMBER,
        "acdirmin": _NUMBER,
        "acdirmax": _NUMBER,
        "noac": "",
        "nocto": "",
        "cto": "",
        "lookupcache": r"all|none|pos|positive",
        "sharecache": "",
        "nosharecache": "",
        "resvport": "",
        "noresvport": "",
        "softreval": "",
        "nosoftreval": "",
        "trunkdiscovery": "",
        "notrunkdiscovery": "",
        "sec": r"sys|krb5|krb5i|krb5p",
        "xprtsec": r"none|tls|mtls",
        "proto": r"tcp6?|rdma6?",
        "port": r"[1-9]\d{0,4}",
        "clientaddr": r"[0-9a-fA-F.:]+",
        "fsc": "",
        "noatime": "",
        "relatime": "",
        "nodiratime": "",
    },
    profiles={
        "dataset": (Setting("actimeo", "600", _KEPT_NAMES), Setting("nocto", "", "no look at the server at each open")),
        "checkpoint": (),  # close-to-open, which the defaults give, is what readers on other nodes need
        "tokens": (Setting("actimeo", "600", _KEPT_NAMES),),
    },
)

CEPHFS = Kind(
    defaults=(
        Setting("recover_session", "clean", "a client that the cluster cut off comes back instead of failing for good"),
        Setting("noatime", "", "nobody reads the times of access"),
    ),
    allowed={
        "recover_session": r"no|clean",
        "ms_mode": r"legacy|crc|secure|prefer-crc|prefer-secure",
        "rsize": _NUMBER,
        "wsize": _NUMBER,
        "rasize": _NUMBER,
        "caps_max": _NUMBER,
        "caps_wanted_delay_min": _NUMBER,
        "caps_wanted_delay_max": _NUMBER,
        "mount_timeout": _NUMBER,
        "readdir_max_bytes": _NUMBER,
        "readdir_max_entries": _NUMBER,
        "dcache": "",
        "nodcache": "",
        "dirstat": "",
        "nodirstat": "",
        "rbytes": "",
        "norbytes": "",
        "copyfrom": "",
        "nocopyfrom": "",
        "wsync": "",
        "nowsync": "",
        "noquotadf": "",
        "quotadf": "",
        "poolperm": "",
        "nopoolperm": "",
        "require_active_mds": "",
        "norequire_active_mds": "",
        "acl": "",
        "noacl": "",
        "read_from_replica": r"no|balance|localize",
        "crush_location": r"[A-Za-z0-9_.:|-]+",
        "fsc": "",
        "noatime": "",
        "relatime": "",
        "nodiratime": "",
    },
    profiles={
        "dataset": (Setting("rasize", "33554432", "bytes read ahead, for files read from end to end"),),
        "checkpoint": (Setting("nodirstat", "", "no recursive statistics to be kept up at each write"),),
        "tokens": (Setting("rasize", "1048576", "random reads in huge files waste what is read ahead"),),
    },
)

LUSTRE = Kind(
    defaults=(
        Setting("flock", "", "locks hold on all nodes; the default since 2.12.3 only"),
        Setting("lazystatfs", "", "df answers although a server is away"),
        Setting("user_xattr", "", "as other filesystems"),
        Setting("noatime", "", "nobody reads the times of access"),
    ),
    allowed={
        "flock": "",
        "lazystatfs": "",
        "nolazystatfs": "",
        "user_xattr": "",
        "nouser_xattr": "",
        "always_ping": "",
        "checksum": "",
        "nochecksum": "",
        "encrypt": "",
        "network": r"(tcp|o2ib|kfi|gni)\d{0,5}",
        "skpath": r"/[A-Za-z0-9._/-]+",
        "retry": _NUMBER,
        "statfs_project": "",
        "nostatfs_project": "",
        "user_fid2path": "",
        "noatime": "",
        "relatime": "",
        "nodiratime": "",
    },
    # What tunes Lustre for a workload is the layout of the files (lfs setstripe), not the mount
    profiles={"dataset": (), "checkpoint": (), "tokens": ()},
)


def _known_for(seconds: str, why: str) -> tuple[Setting, ...]:
    """Return for how long the kernel need not ask JuiceFS again for attributes and names."""
    return tuple(Setting(name, seconds, why) for name in ("attr-cache", "entry-cache", "dir-entry-cache"))


# Flags of `juicefs mount`; slurm_ddp.juicefs knows which version has which
JUICEFS = Kind(
    defaults=(),
    allowed={
        "attr-cache": _SECONDS,
        "entry-cache": _SECONDS,
        "dir-entry-cache": _SECONDS,
        "negative-entry-cache": _SECONDS,
        "open-cache": _SECONDS,
        "open-cache-limit": _NUMBER,
        "readdir-cache": "",
        "prefetch": r"\d{1,2}",
        "max-readahead": r"\d{1,6}",
        "max-uploads": r"\d{1,3}",
        "max-downloads": r"\d{1,3}",
        "max-deletes": r"\d{1,3}",
        "max-fuse-io": r"\d{1,4}K",
        "io-retries": r"\d{1,3}",
        "get-timeout": r"\d{1,4}",
        "put-timeout": r"\d{1,4}",
        "upload-limit": _NUMBER,
        "download-limit": _NUMBER,
        "cache-partial-only": "",
        "cache-large-write": "",
        "cache-eviction": r"none|2-random|lru",
        "cache-expire": r"\d{1,6}[smhd]?",
        "verify-cache-checksum": r"none|full|shrink|extend",
        "free-space-ratio": r"0\.\d{1,3}",
        "enable-xattr": "",
        "no-bgjob": "",
        "prefix-internal": "",
        "hide-internal": "",
        "root-squash": r"\d{1,10}(:\d{1,10})?",
        "all-squash": r"\d{1,10}(:\d{1,10})?",
        "atime-mode": r"noatime|relatime|strictatime",
        "skip-dir-nlink": _NUMBER,
        "disable-transparent-hugepage": "",
        "heartbeat": r"\d{1,3}",
    },
    profiles={
        "dataset": (
            *_known_for("60", _KEPT_NAMES),
            Setting("open-cache", "60", "opening a sample again asks no engine; stale only if data changes"),
            Setting("readdir-cache", "", "listing a folder of samples again asks no engine"),
            Setting("prefetch", "1", "the block of a small sample holds its neighbours"),
            Setting("buffer-size", "1024", "reading ahead takes a quarter to a half of it"),
        ),
        "checkpoint": (
            *_known_for("1", "a new checkpoint is seen on other nodes within a second"),
            Setting("open-cache", "0", "it would serve an old checkpoint to another node"),
            Setting("max-uploads", "50", "large files are written one after the other: bound by uploads at a time"),
            Setting("buffer-size", "1024", "holds the blocks that are on their way"),
            Setting("cache-partial-only", "", "whole blocks of a checkpoint would push the datasets out of the cache"),
        ),
        "tokens": (
            *_known_for("60", _KEPT_NAMES),
            Setting("open-cache", "60", "a shard is opened by each worker, and never changes"),
            Setting("prefetch", "0", "random reads use a small part of each block: the rest need not be fetched"),
            Setting("max-readahead", "0", "what follows a random read is not read next"),
            Setting("cache-partial-only", "", "keeps the parts that are read, not whole blocks"),
        ),
    },
)


def merge(kind: Kind, *, profile: str, given: str) -> Options:
    """Return the options: the defaults, over them the profile's, over them those that the user gave.

    Raises:
        OptionError: the text of the user's options has one that is unknown, refused, or of a wrong value.
    """
    if profile not in PROFILES:
        raise OptionError(f"profile: {profile!r} is none of {', '.join(PROFILES)}")
    options = {one.name: one.value for one in (*kind.defaults, *kind.profiles.get(profile, ()))}
    for name, value in _given(kind, given).items():
        for old in _RIVALS.get(name, ()):
            options.pop(old, None)
        options[name] = value
    return options


def text(options: Options) -> str:
    """Return the options as mount(8) takes them after -o."""
    return ",".join(f"{name}={value}" if value else name for name, value in options.items())


# Options of which the one given last counts
_RIVALS = {
    "nfsvers": ("vers",),
    "minorversion": ("vers",),
    "relatime": ("noatime",),
    "nolazystatfs": ("lazystatfs",),
    "nouser_xattr": ("user_xattr",),
    "cto": ("nocto",),
    "dirstat": ("nodirstat",),
    "noac": ("actimeo",),
    "acregmin": ("actimeo",),
    "acregmax": ("actimeo",),
    "acdirmin": ("actimeo",),
    "acdirmax": ("actimeo",),
}


def _given(kind: Kind, given: str) -> Options:
    options: Options = {}
    for item in filter(None, (part.strip() for part in given.split(","))):
        name, equals, value = item.partition("=")
        name = name.removeprefix("--")
        if name in REFUSED and name not in kind.allowed:
            raise OptionError(f"mount-options: {name[:40]} is refused: {REFUSED[name]}")
        if name.startswith("x-"):
            raise OptionError(f"mount-options: {name[:40]!r} is refused: the unit is the charm's")
        if name not in kind.allowed:
            raise OptionError(f"mount-options: {name[:40]!r} is not one that this filesystem takes")
        pattern = kind.allowed[name]
        if not pattern and equals:
            raise OptionError(f"mount-options: {name} takes no value")
        if pattern and not re.fullmatch(pattern, value):
            raise OptionError(f"mount-options: {name}={value[:40]!r} is not possible; it must match {pattern}")
        options[name] = value
    return options

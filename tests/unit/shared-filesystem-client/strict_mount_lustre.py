"""What mount.lustre(8) takes and says, as far as a mount unit of ours can meet it: a stand-in that is strict.

Called as mount(8) calls a helper: SOURCE FOLDER [-sfnv] [-o OPTIONS]. The words are those of lustre/utils/mount_lustre.c.
"""

import dataclasses
import re

_NID = r"[A-Za-z0-9.-]+@(tcp|o2ib|kfi|gni)\d*"
_NODE = rf"{_NID}(,{_NID})*"
_SOURCE = re.compile(rf"(?P<nodes>{_NODE}(:{_NODE})*):/(?P<fs>[A-Za-z0-9_-]{{1,8}})(?P<sub>(/[^/\s]+)*)")
# mount.lustre(8), and what libmount passes on
_OPTIONS = re.compile(
    r"flock|localflock|noflock|lazystatfs|nolazystatfs|user_xattr|nouser_xattr|always_ping|checksum|nochecksum|encrypt|"
    r"network=\w+|skpath=\S+|retry=\d+|noatime|relatime|nodiratime|nosuid|nodev|noexec|ro|rw|_netdev"
)


@dataclasses.dataclass
class Site:
    """What there is to mount."""

    filesystems: frozenset[str] = frozenset({"exafs"})
    nodes_up: frozenset[str] = frozenset({"10.0.0.1", "10.0.0.2"})
    modules: bool = True
    mounted: tuple[str, ...] = ()


def run(argv: list[str], site: Site) -> tuple[int, str]:
    """Return the exit status and what the program says."""
    source, target = argv[0], argv[1]
    options = argv[argv.index("-o") + 1].split(",") if "-o" in argv else []
    head = f"mount.lustre: mount {source} at {target} failed: "
    found = _SOURCE.fullmatch(source)
    if found is None:
        return 22, f"{head}Invalid argument\nThis may have multiple causes.\nAre the mount options correct?\n"
    wrong = [option for option in options if not _OPTIONS.fullmatch(option)]
    if wrong:
        return 22, (
            f"{head}Invalid argument\nThis may have multiple causes.\nIs '{found['fs']}' the correct filesystem name?\n"
            "Are the mount options correct?\nCheck the syslog for more info.\n"
        )
    if target in site.mounted:
        return 17, f"mount.lustre: according to /etc/mtab {source} is already mounted on {target}\n"
    if not site.modules:
        return (
            19,
            f"{head}No such device\nAre the lustre modules loaded?\nCheck /etc/modprobe.conf and /proc/filesystems\n",
        )
    addresses = {nid.partition("@")[0] for node in found["nodes"].split(":") for nid in node.split(",")}
    if not addresses & site.nodes_up:
        return 5, f"{head}Input/output error\nIs the MGS running?\n"
    if found["fs"] not in site.filesystems:
        return (
            2,
            f"{head}No such file or directory\nIs the MGS specification correct?\nIs the filesystem name correct?\n",
        )
    return 0, ""

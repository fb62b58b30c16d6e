"""The caches of Triton, torch's inductor, matplotlib, Hugging Face and others.

They default to the home folder. If that is missing on a node, or shared, they are on the node's own
disk: hundreds of ranks would compile into one folder.
"""

import contextlib
import os
import re

from ddp.node import spool, storage

_PLACES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "MPLCONFIGDIR": "matplotlib",
    "XDG_CACHE_HOME": "xdg",  # Hugging Face's HF_HOME is below it unless it is set
}
_NETWORK = re.compile(
    r"nfs4?|cifs|smb3|lustre|beegfs\w*|gpfs|ceph|afs|9p|glusterfs|fuse\.(?!fuse-overlayfs).*"
)
_MOUNTS = "/proc/self/mountinfo"
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes blanks


def keep_local(env: dict[str, str], cache: str) -> None:
    """Set the unset variables of the caches if the home folder is missing or on a network."""
    if is_local(env.get("HOME", "")):
        return
    with contextlib.suppress(OSError):
        cache = spool.own_cache(cache)
        if os.statvfs(cache).f_flag & os.ST_NOEXEC:  # what Triton and inductor compile is loaded
            return
        for name, place in _PLACES.items():
            if name not in env:
                os.makedirs(f"{cache}/caches/{place}", 0o700, exist_ok=True)
                env[name] = f"{cache}/caches/{place}"


def is_local(home: str) -> bool:
    """Return whether a folder exists on this node's own disk."""
    try:
        real = storage.within(lambda: _real_folder(home), storage.CALL_S)
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            mounts = file.read()
    except OSError:  # a server that does not respond
        return False
    return bool(real) and not _NETWORK.fullmatch(filesystem(real, mounts))


def _real_folder(path: str) -> str:
    return os.path.realpath(path) if path and os.path.isdir(path) else ""


def filesystem(path: str, mounts: str) -> str:
    """Return the type of a path's filesystem by the lines of mountinfo (proc(5)), "" if unknown."""
    kind = ""
    length = 0
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        place = _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
        is_inside = path == place or path.startswith(f"{place.rstrip('/')}/")
        if is_inside and len(place) >= length:  # of equals the last one counts
            kind = after.split(" ")[0]
            length = len(place)
    return kind

"""The caches of Triton, torch's inductor, matplotlib, Hugging Face and others, which default to the home folder.

They are on the node's own disk if the home is missing there or shared: hundreds of ranks would compile into one folder.
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


def keep_local(env: dict[str, str], cache: str) -> None:
    """Set the caches' variables that are unset, if the home folder is missing or on a network filesystem."""
    if is_local(env.get("HOME", "")):
        return
    with contextlib.suppress(OSError):
        cache = spool.own_cache(cache)
        for name, place in _PLACES.items():
            if name not in env:
                os.makedirs(f"{cache}/caches/{place}", 0o700, exist_ok=True)
                env[name] = f"{cache}/caches/{place}"


def is_local(home: str) -> bool:
    """Return whether a folder exists on this node's own disk."""
    try:
        real = storage.within(
            lambda: os.path.realpath(home) if home and os.path.isdir(home) else "", storage.CALL_S
        )
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            return bool(real) and not _NETWORK.fullmatch(filesystem(real, file.read()))
    except OSError:  # a server that does not respond
        return False


def filesystem(path: str, mounts: str) -> str:
    """Return the type of the filesystem that a path lies on, by the lines of mountinfo (proc(5)); empty if unknown."""
    found, length = "", 0
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        if not separator or before.count(" ") < 4:
            continue
        place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4])
        if (path == place or path.startswith(f"{place.rstrip('/')}/")) and len(
            place
        ) >= length:  # the last one counts
            found, length = after.split(" ")[0], len(place)
    return found

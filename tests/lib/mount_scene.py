"""Scenes for test_mounts.py, each in new namespaces: python mount_scene.py SCENE DIRECTORY.

The FUSE scenes speak the kernel's protocol themselves (linux/fuse.h), so that a daemon can die or
stop responding on purpose.
"""

import ctypes
import errno
import json
import os
import pathlib
import struct
import sys
import threading
import typing
import unittest.mock

from slurm_ddp import mounts

_FUSE_LOOKUP, _FUSE_FORGET, _FUSE_GETATTR, _FUSE_MKDIR, _FUSE_WRITE, _FUSE_FSYNC = (
    1,
    2,
    3,
    9,
    16,
    20,
)
_FUSE_INIT, _FUSE_OPENDIR, _FUSE_CREATE = 26, 27, 35
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: pathlib.Path, fstype: str, flags: int = 0, data: str = "") -> None:
    if _libc.mount(source.encode(), bytes(target), fstype.encode(), flags, data.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount_fuse(target: pathlib.Path) -> int:
    """Mount a FUSE filesystem without a server yet; return the daemon's end."""
    device = os.open("/dev/fuse", os.O_RDWR)
    mount("silent", target, "fuse", data=f"fd={device},rootmode=40000,user_id=0,group_id=0")
    return device


def serve(device: int, until: int, reached: threading.Event, *, then: bool = False) -> None:
    """Answer the requests to look at the root and to write a file, but none of the kind `until`.

    Later requests get an answer only with `then`. No signal ends a process that waits for the
    answer to a request that was taken.
    """
    folder, file = (
        struct.pack("<6Q10I", inode, 0, 0, 0, 0, 0, 0, 0, 0, mode, 2, 0, 0, 0, 4096, 0)
        for inode, mode in ((1, 0o40755), (3, 0o100644))
    )
    bodies = {
        _FUSE_INIT: struct.pack("<IIIIHHII", 7, 31, 0, 0, 12, 9, 4096, 1) + bytes(36),
        _FUSE_OPENDIR: bytes(16),
        _FUSE_GETATTR: struct.pack("<QII", 3600, 0, 0) + folder,
        _FUSE_MKDIR: struct.pack("<4QII", 2, 0, 3600, 3600, 0, 0) + folder,
        _FUSE_CREATE: struct.pack("<4QII", 3, 0, 3600, 3600, 0, 0) + file + bytes(16),
        _FUSE_WRITE: struct.pack("<II", 32, 0),
    }
    while True:
        request = os.read(device, 1 << 20)
        _, opcode, unique = struct.unpack_from("<IIQ", request)
        if opcode == until:
            reached.set()
        if opcode in {until, _FUSE_FORGET} or (reached.is_set() and not then):
            continue
        body = bodies.get(opcode, b"")
        problem = 0 if body else -(errno.ENOENT if opcode == _FUSE_LOOKUP else errno.ENOSYS)
        os.write(device, struct.pack("<IiQ", 16 + len(body), problem, unique) + body)


def shown(result: mounts.Result) -> list[str]:
    return [result.state.value, result.detail]


def right(at: pathlib.Path) -> typing.Any:
    mount("shared data", at, "tmpfs")
    found = [
        shown(mounts.probe(at, fstype="tmpfs", source="shared data", writable=True))
        for _ in range(2)
    ]
    return found, sorted(str(path.relative_to(at)) for path in at.rglob("*"))


def stacked(at: pathlib.Path) -> typing.Any:
    mount("x", at, "tmpfs")
    mount("x", at, "tmpfs")
    found = [shown(mounts.probe(at))]
    return [*found, mounts.clear(at, fstype="tmpfs", source="x"), shown(mounts.probe(at))]


def stale(at: pathlib.Path) -> typing.Any:
    os.close(mount_fuse(at))
    found = [shown(mounts.probe(at, fstype="fuse", source="silent"))]
    return [*found, mounts.clear(at, fstype="fuse", source="silent"), shown(mounts.probe(at))]


def hung(at: pathlib.Path) -> typing.Any:
    """The daemon takes the request: the child cannot be killed, is left behind, and no second one is started."""
    mount("x", pathlib.Path("/run"), "tmpfs")  # records a child that was left behind
    device = mount_fuse(at)
    opened = threading.Event()
    threading.Thread(target=serve, args=(device, _FUSE_OPENDIR, opened), daemon=True).start()
    first = mounts.probe(at, deadline=3)
    with unittest.mock.patch.object(
        mounts, "ask_child", side_effect=AssertionError("a second child")
    ):
        second = mounts.probe(at, deadline=60)
    mounts.clear(at, fstype="fuse", source="silent")
    return [opened.is_set(), shown(first), shown(second), shown(mounts.probe(at))]


def forgetful(at: pathlib.Path) -> typing.Any:
    """The root opens out of the client's memory; the engine behind it is dead."""
    mount("x", pathlib.Path("/run"), "tmpfs")
    device = mount_fuse(at)
    asked = threading.Event()
    threading.Thread(target=serve, args=(device, _FUSE_LOOKUP, asked), daemon=True).start()
    found = shown(mounts.probe(at, deadline=3))
    mounts.clear(at, fstype="fuse", source="silent")
    return [asked.is_set(), found]


def unwritten(at: pathlib.Path) -> typing.Any:
    """The write is never confirmed, and everything else is answered."""
    mount("x", pathlib.Path("/run"), "tmpfs")
    device = mount_fuse(at)
    asked = threading.Event()
    threading.Thread(
        target=serve, args=(device, _FUSE_FSYNC, asked), kwargs={"then": True}, daemon=True
    ).start()
    mounts._ANSWERS_S = 60.0  # a busy machine may take long to start a child
    found = [
        shown(mounts.probe(at, writable=True, deadline=3)),
        shown(mounts.probe(at, writable=True, deadline=60)),
    ]
    found.append(shown(mounts.probe(at, deadline=60)))
    mounts.clear(at, fstype="fuse", source="silent")
    return [asked.is_set(), *found]


if __name__ == "__main__":
    answer = globals()[sys.argv[1]](pathlib.Path(sys.argv[2]))
    print("ANSWER " + json.dumps(answer), flush=True)
    os._exit(0)  # not waiting for a child that hangs

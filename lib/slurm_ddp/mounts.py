"""This machine's mounts, and whether they work. Nothing here waits for a hung filesystem.

`probe` touches a mount in a child process with a deadline. A child that hangs in the kernel cannot
be killed, so it is left behind; while one is left behind for a mountpoint, no further child is
started for it.

Standard library only: a copy of this file, next to mount_child.py, serves systemd units as their
helper,

    python3 mounts.py reach HOST:PORT... --timeout SECONDS
    python3 mounts.py wait MOUNTPOINT --fstype T --source S --timeout SECONDS [--pid PID]
    python3 mounts.py clear MOUNTPOINT --fstype T --source S
    python3 mounts.py unmount MOUNTPOINT --fstype T --source S --patience SECONDS
"""

import argparse
import collections.abc
import contextlib
import ctypes
import dataclasses
import enum
import errno
import json
import os
import pathlib
import re
import select
import socket
import subprocess
import sys
import time
import typing
import zlib

MOUNTINFO = pathlib.Path("/proc/self/mountinfo")
CHILD = pathlib.Path(__file__).resolve().with_name("mount_child.py")
# One file for each mountpoint with a child that was left behind
_ABANDONED = pathlib.Path("/run/slurm-ddp")
_ANSWERS_S = 2.0  # for a filesystem that has used up its deadline with a write
_START_S = 30.0  # for a child to start, on a machine however busy
_REAP_S = 0.5  # how long a killed child may take to die before it is left behind
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8  # linux/fs.h
# Errors of a root whose server or daemon was lost; the list is the CSI driver's for a corrupted
# mount
_STALE = {errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.EHOSTDOWN, errno.ENODEV, errno.ENXIO}
# Of anything in it: the client ended, is just ending (fuse_abort_conn), or stays cut off by Ceph
# (ceph-fuse)
_LOST = {errno.ENOTCONN, errno.ESTALE, errno.ECONNABORTED, errno.ESHUTDOWN}

PathLike = str | os.PathLike[str]
# One name, or several that are equally right; an empty tuple for any name at all
Names = str | tuple[str, ...]


class State(enum.Enum):
    """The state of a mountpoint."""

    RIGHT = "right"  # the expected filesystem, once, and it works
    ABSENT = "absent"
    WRONG = "wrong"  # something else is mounted there, or with other options
    STACKED = "stacked"  # more than one mount lies there
    STALE = "stale"  # the mount is a leftover: its daemon or server has forgotten it
    SLOW = "slow"  # it answers, but a small write missed the deadline: the storage is slow or busy
    HUNG = "hung"  # no answer within the deadline
    FAILED = "failed"  # it answers, but reading or writing fails


@dataclasses.dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo (proc(5))."""

    id: int
    device: str  # MAJOR:MINOR
    mountpoint: str
    fstype: str
    source: str
    options: tuple[str, ...]  # of this mount and of the filesystem

    @property
    def read_only(self) -> bool:
        """Report whether nothing can be written there."""
        return "ro" in self.options

    def __str__(self) -> str:
        return f"{self.mountpoint} holds {self.source} ({self.fstype})"


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of `probe`; `detail` is one line, empty when all is right."""

    state: State
    detail: str = ""
    open_mode: int | None = (
        None  # the root's, where others can write it without the sticky bit: see `probe`
    )
    was_open: int | None = None  # the root's mode before `probe` set the sticky bit

    def __bool__(self) -> bool:
        return self.state is State.RIGHT


class MountError(Exception):
    """A mountpoint could not be cleared or unmounted. `str()` is one line."""


def table(text: str | None = None) -> list[Mount]:
    """Return the mounts in mount order, without autofs.

    `text` is in the format of mountinfo; the default is this process's own.
    """
    if text is None:
        text = MOUNTINFO.read_bytes().decode("utf-8", "surrogateescape")
    mounts: list[Mount] = []
    # Not splitlines(): a name may hold characters that it takes for the end of a line
    for line in text.split("\n"):
        before, _, after = line.partition(" - ")
        left = before.split(" ")
        right = after.split(" ")
        if len(left) < 6 or len(right) < 3 or right[0] == "autofs":
            continue
        options = dict.fromkeys([*left[5].split(","), *right[2].split(",")])
        mounts.append(
            Mount(
                int(left[0]),
                left[2],
                _unescape(left[4]),
                right[0],
                _unescape(right[1]),
                tuple(options),
            )
        )
    return mounts


def at(mountpoint: PathLike, mounts: collections.abc.Iterable[Mount] | None = None) -> list[Mount]:
    """List the mounts exactly at `mountpoint`, the topmost last."""
    wanted = os.path.normpath(mountpoint)
    if mounts is None:
        mounts = table()
    return [mount for mount in mounts if mount.mountpoint == wanted]


def find(path: PathLike, mounts: collections.abc.Iterable[Mount] | None = None) -> Mount | None:
    """Find the mount that an absolute path without symbolic links lies on."""
    wanted = pathlib.PurePath(os.path.normpath(path))
    if mounts is None:
        mounts = table()
    above = [mount for mount in mounts if wanted.is_relative_to(mount.mountpoint)]
    above.reverse()  # of equals the topmost
    return max(above, key=lambda mount: len(mount.mountpoint), default=None)


def probe(
    mountpoint: PathLike,
    *,
    fstype: Names = (),
    source: Names = (),
    writable: bool = False,
    sticky: bool = False,
    deadline: float = 5.0,
) -> Result:
    """Check whether the expected filesystem is mounted at an absolute path, once, and works.

    Args:
        mountpoint: an absolute path.
        fstype: the expected type.
        source: the expected source, as mountinfo shows it.
        writable: also write, sync, rename, read back and remove a small file.
        sticky: with `writable`, set the sticky bit on a root that others can write, if that is
            allowed: without it they can rename other accounts' files there (rename(2)).
        deadline: seconds until a mount that does not answer is HUNG, or SLOW if only a write does
            not end.
    """
    mountpoint = os.path.normpath(mountpoint)
    here = at(mountpoint)
    problem = _unexpected(mountpoint, here, fstype=fstype, source=source, writable=writable)
    if problem is not None:
        return problem
    mount = here[-1]
    unwritten = ""
    if writable:
        begin = time.monotonic()
        answer, unwritten = ask(mount, "write", deadline, sticky=sticky)
        if answer is not None:
            return judge(mountpoint, answer)
        if time.monotonic() - begin >= deadline:
            deadline = min(deadline, _ANSWERS_S)

    answer, silent = ask(mount, "read", deadline)
    if answer is None:
        return Result(State.HUNG, f"{mountpoint} {silent}")
    found = judge(mountpoint, answer)
    if found and unwritten:
        return Result(State.SLOW, f"{mountpoint} answers, but a small write {unwritten}")
    return found


def _unexpected(
    mountpoint: str, here: list[Mount], *, fstype: Names, source: Names, writable: bool
) -> Result | None:
    """Compare mountinfo with the expected mount; return None if it is there, once."""
    if not here:
        return Result(State.ABSENT, f"nothing is mounted at {mountpoint}")
    mount = here[-1]
    if not _matches(mount.fstype, fstype) or not _matches(mount.source, source):
        return Result(State.WRONG, str(mount))
    if len(here) > 1:
        return Result(State.STACKED, f"{len(here)} mounts lie at {mountpoint}")
    if writable and mount.read_only:
        return Result(State.WRONG, f"{mountpoint} is mounted read-only")
    return None


def wait(
    mountpoint: PathLike, *, fstype: Names, source: Names, timeout: float, pid: int | None = None
) -> Result:
    """Return the last probe of `mountpoint` after waiting until it is right.

    The wait ends after `timeout` seconds, or when process `pid` ends.
    """
    end = time.monotonic() + timeout
    while True:
        left = max(0.5, min(5.0, end - time.monotonic()))
        result = probe(mountpoint, fstype=fstype, source=source, deadline=left)
        if result or time.monotonic() + 0.2 >= end:
            return result
        if pid is not None and start_time(pid) is None:
            return Result(
                result.state, f"process {pid}, which should mount it, ended; {result.detail}"
            )
        time.sleep(0.2)


def unreachable(
    addresses: collections.abc.Iterable[tuple[str, int]],
    *,
    timeout: float = 2,
    replies: collections.abc.Callable[[socket.socket], bool] = lambda _: True,
) -> str:
    """Return "" if an address takes a TCP connection that `replies` accepts, or the last problem.

    Each address gets `timeout` seconds.
    """
    problem = "no address"
    for host, port in addresses:
        shown = f"{f'[{host}]' if ':' in host else host}:{port}"
        try:
            with socket.create_connection((host, port), timeout=timeout) as connection:
                if replies(connection):
                    return ""
            problem = f"{shown} takes connections and is silent"
        except OSError as e:
            problem = f"{shown} does not answer ({str(e.strerror or e).lower()})"
    return problem


def reach(addresses: collections.abc.Sequence[tuple[str, int]], *, timeout: float) -> None:
    """Wait until an address takes a TCP connection.

    Raises `MountError` if none did within `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while problem := unreachable(addresses):
        if time.monotonic() + 0.5 >= end:
            raise MountError(problem)
        time.sleep(0.5)


def clear(mountpoint: PathLike, *, fstype: str, source: str) -> int:
    """Detach the mounts of `source` at `mountpoint` in any condition; count them.

    Raises:
        MountError: something else is mounted there, which is kept; or the kernel refuses.
    """
    count = 0
    while here := at(mountpoint):
        _check_ours(here[-1], fstype, source)
        detach(mountpoint)
        count += 1
    return count


def detach(mountpoint: PathLike) -> None:
    """Detach the topmost mount at `mountpoint`, even one in use.

    Raises `MountError` if the kernel refuses.
    """
    try:
        _umount(mountpoint, _MNT_DETACH)
    except OSError as e:
        raise MountError(f"cannot detach {mountpoint}: {e.strerror}") from e


def unmount(mountpoint: PathLike, *, fstype: str, source: str, patience: float) -> None:
    """Unmount `source` from `mountpoint`.

    A mount that is stale, or still in use after `patience` seconds, is detached.

    Raises:
        MountError: something else is mounted there, which is kept; or the kernel refuses.
    """
    if probe(mountpoint, deadline=2).state is State.STALE:
        patience = 0
    end = time.monotonic() + patience
    while here := at(mountpoint):
        _check_ours(here[-1], fstype, source)
        late = time.monotonic() >= end
        try:
            _umount(mountpoint, _MNT_DETACH if late else 0)
        except OSError as e:
            if e.errno == errno.EINVAL:
                return  # another process was faster
            if e.errno != errno.EBUSY or late:
                raise MountError(f"cannot unmount {mountpoint}: {e.strerror}") from e
            time.sleep(0.5)


def _matches(found: str, wanted: Names) -> bool:
    return not wanted or found in ((wanted,) if isinstance(wanted, str) else wanted)


def _check_ours(mount: Mount, fstype: str, source: str) -> None:
    if (mount.fstype, mount.source) != (fstype, source):
        raise MountError(f"{mount}, which is not ours: unmount it")


def _unescape(text: str) -> str:
    """Decode mountinfo's octal escapes, each of a byte."""
    raw = text.encode("utf-8", "surrogateescape")
    decoded = re.sub(rb"\\([0-3][0-7]{2})", lambda match: bytes([int(match[1], 8)]), raw)
    return decoded.decode("utf-8", "surrogateescape")


def judge(mountpoint: str, answer: dict[str, typing.Any]) -> Result:
    """Judge a mount by a child's answer."""
    step, number = answer.get("step"), answer.get("errno")
    if step == "hidden":
        return Result(State.WRONG, f"{mountpoint} is hidden beneath another mount")
    if step == "read back":
        return Result(State.FAILED, f"{mountpoint} returned other bytes than were written")
    if step == "start":
        return Result(State.FAILED, f"the probe of {mountpoint} exited with no answer")
    if number is None:
        return Result(State.RIGHT, open_mode=answer.get("open"), was_open=answer.get("was"))
    is_stale = number in (_STALE | _LOST if step == "open" else _LOST)
    what = f"{mountpoint} does not open" if step == "open" else f"{mountpoint}: {step}"
    return Result(
        State.STALE if is_stale else State.FAILED, f"{what}: {os.strerror(number).lower()}"
    )


def ask(
    mount: Mount, kind: str, deadline: float, *, sticky: bool = False
) -> tuple[dict[str, typing.Any] | None, str]:
    """Return the answer of a child that reads or writes, or None and why there is none.

    No child starts while an earlier one still hangs.
    """
    verb = "answer" if kind == "read" else "end"
    since = hangs_since(mount.mountpoint, kind)
    if since is not None:
        return None, f"has not {verb}ed since {time.strftime('%H:%M:%S', time.gmtime(since))} UTC"
    answer = ask_child(mount, kind, deadline, sticky=sticky)
    return answer, f"did not {verb} within {deadline:g} s" if answer is None else ""


def ask_child(
    mount: Mount, kind: str, deadline: float, *, sticky: bool
) -> dict[str, typing.Any] | None:
    """Run a child; return its answer, None when it has none in time."""
    asked = [mount.mountpoint, str(mount.id), kind, *(["sticky"] if sticky else [])]
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", CHILD, *asked],
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"},
        start_new_session=True,
    )
    output, end = b"", time.monotonic() + _START_S
    with typing.cast("typing.IO[bytes]", child.stdout) as pipe:
        poll = select.poll()
        poll.register(pipe, select.POLLIN | select.POLLHUP)
        while (left := end - time.monotonic()) > 0 and poll.poll(left * 1000):
            block = pipe.read(65536)
            if not block:
                child.wait()  # the pipe is closed, so the child is past the filesystem
                return json.loads(output) if output.strip() else {"step": "start"}
            # Only now does it ask the filesystem: a busy machine takes its time to start a program
            if not output:
                end = time.monotonic() + deadline
            output += block
    leave_behind(child, mount.mountpoint, kind)
    return None


def leave_behind(child: "subprocess.Popen[bytes]", mountpoint: str, kind: str) -> None:
    """Kill the child; if it hangs in the kernel, leave it behind with a note."""
    child.kill()
    try:
        child.wait(_REAP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):  # not root: the next probe starts another child
            _ABANDONED.mkdir(mode=0o755, exist_ok=True)
            note_of(mountpoint, kind).write_text(f"{child.pid} {start_time(child.pid)}")


def hangs_since(mountpoint: str, kind: str) -> float | None:
    """Return when a child of this kind was left behind that still hangs there."""
    note = note_of(mountpoint, kind)
    try:
        pid, started = note.read_text().split()
        since = note.stat().st_mtime
    except (OSError, ValueError):
        return None
    if started != "None" and start_time(int(pid)) == int(started):
        return since
    note.unlink(missing_ok=True)
    return None


def note_of(mountpoint: str, kind: str) -> pathlib.Path:
    """Return the file that names a child left behind."""
    return _ABANDONED / f"{kind}-{zlib.crc32(os.fsencode(mountpoint)):08x}"


def start_time(pid: int) -> int | None:
    """Return when a live process started, in clock ticks since boot.

    With its id that is unique (proc(5)).
    """
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _umount(mountpoint: PathLike, flags: int) -> None:
    # umount(8) first looks at the mountpoint, which hangs when the server is dead; the system call
    # does not
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(os.path.normpath(mountpoint)), flags | _UMOUNT_NOFOLLOW) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def main(argv: list[str]) -> int:
    """Serve a systemd unit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function in (reach, wait, clear, unmount):  # an option is a parameter of the function
        command = commands.add_parser(function.__name__)
        command.set_defaults(run=function)
        if function is reach:
            command.add_argument("addresses", nargs="+", type=_address)
        else:
            command.add_argument("mountpoint")
            command.add_argument("--fstype", required=True)
            command.add_argument("--source", required=True)
        if function is not clear:
            command.add_argument(
                "--patience" if function is unmount else "--timeout", type=float, required=True
            )
        if function is wait:
            command.add_argument("--pid", type=int)
    options = vars(parser.parse_args(argv))
    try:
        result = options.pop("run")(**options)
        if isinstance(result, Result) and not result:
            raise MountError(result.detail)
    except (MountError, OSError) as e:
        print(e, file=sys.stderr)
        return 1
    if isinstance(result, int):
        print(
            f"cleared {result} leftover mounts of {options['mountpoint']}"
            if result
            else "nothing to clear"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

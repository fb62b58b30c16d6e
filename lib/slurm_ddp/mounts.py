"""What is mounted where, and whether it works. Nothing here waits for a filesystem that does not answer.

A look at a mount (`probe`) happens in a child process with a deadline. A child that hangs in the kernel cannot be
killed, so it is left behind; while one is left behind for a mountpoint, no further child is started for it.

The module needs the standard library only: a copy of this file serves systemd units as their helper,

    python3 mounts.py reach HOST:PORT... [--timeout SECONDS]
    python3 mounts.py wait MOUNTPOINT [--fstype T] [--source S] [--timeout SECONDS] [--pid PID]
    python3 mounts.py clear MOUNTPOINT --fstype T --source S
    python3 mounts.py unmount MOUNTPOINT --fstype T --source S [--patience SECONDS]
    python3 mounts.py drain FOLDER... [--timeout SECONDS]
"""

import argparse
import collections.abc
import contextlib
import ctypes
import dataclasses
import enum
import errno
import hashlib
import json
import os
import pathlib
import re
import secrets
import select
import signal
import socket
import stat
import sys
import time
import typing

MOUNTINFO = pathlib.Path("/proc/self/mountinfo")
PROBE_DIR = ".mount-probe"  # what a probe writes lies here, at the top of the mounted filesystem
_ABANDONED = pathlib.Path("/run/slurm-ddp")  # one file for each mountpoint with a child that was left behind
_ANSWERS_S = 2.0  # for a filesystem that has let a write wait
_START_S = 30.0  # for a child to start, on a machine however busy
_REAP_S = 0.5  # how long a killed child may take to die before it is left behind
_LEFTOVER_S = 3600.0  # a probe's file older than this was left by a probe that was killed
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8  # linux/fs.h
# A mount whose server or daemon is gone answers with one of these; the list is the CSI driver's for a corrupted mount
_STALE = {errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.EHOSTDOWN, errno.ENODEV, errno.ENXIO}


class State(enum.Enum):
    """What a look at a mountpoint found."""

    RIGHT = "right"  # the expected filesystem, once, and it works
    ABSENT = "absent"  # nothing is mounted there
    WRONG = "wrong"  # something else is mounted there, or with other options
    STACKED = "stacked"  # more than one mount lies there
    STALE = "stale"  # the mount is a leftover: its daemon or server has forgotten it
    SLOW = "slow"  # it answers, but a small write did not end within the deadline: what stores the data is slow or busy
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
        """Tell whether nothing can be written there."""
        return "ro" in self.options


@dataclasses.dataclass(frozen=True)
class Result:
    """What `probe` found; `detail` is one line for a person, empty when all is right."""

    state: State
    detail: str = ""
    open_mode: int | None = None  # the root's, where others can write it without the sticky bit: see `probe`
    was_open: int | None = None  # the root's mode before `probe` set the sticky bit

    def __bool__(self) -> bool:
        return self.state is State.RIGHT


class MountError(Exception):
    """A mountpoint could not be cleared or unmounted. `str()` is one line."""


def table(text: str | None = None) -> list[Mount]:
    """Return all mounts, in mount order; of `text` (in mountinfo's format) instead of this process's when given.

    Mounts by autofs are left out: they stand for a mount that is made at the first access.
    """
    if text is None:
        text = MOUNTINFO.read_bytes().decode("utf-8", "surrogateescape")
    mounts: list[Mount] = []
    for line in text.split("\n"):  # not splitlines(): a name may hold what that takes for the end of a line
        before, separator, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if not separator or len(left) < 6 or len(right) < 3:
            continue
        options = dict.fromkeys([*left[5].split(","), *right[2].split(",")])
        mount = Mount(int(left[0]), left[2], _unescape(left[4]), right[0], _unescape(right[1]), tuple(options))
        if mount.fstype != "autofs":
            mounts.append(mount)
    return mounts


def at(mountpoint: str | os.PathLike[str], mounts: collections.abc.Iterable[Mount] | None = None) -> list[Mount]:
    """Return what is mounted exactly at `mountpoint`, the topmost last."""
    wanted = os.path.normpath(mountpoint)
    return [mount for mount in (table() if mounts is None else mounts) if mount.mountpoint == wanted]


def find(path: str | os.PathLike[str], mounts: collections.abc.Iterable[Mount] | None = None) -> Mount | None:
    """Return the mount that an absolute path without symbolic links lies on."""
    wanted = pathlib.PurePath(os.path.normpath(path))
    found: Mount | None = None
    for mount in table() if mounts is None else mounts:
        if wanted.is_relative_to(mount.mountpoint) and (
            found is None or len(mount.mountpoint) >= len(found.mountpoint)
        ):
            found = mount
    return found


def probe(
    mountpoint: str | os.PathLike[str],
    *,
    fstype: str | tuple[str, ...] = (),
    source: str | tuple[str, ...] | None = None,
    writable: bool = False,
    sticky: bool = False,
    deadline: float = 5.0,
) -> Result:
    """Look whether the right filesystem is mounted at `mountpoint`, once, and works.

    Args:
        mountpoint: an absolute path.
        fstype: the type that is expected, or several; any type when empty.
        source: the source that is expected, as mountinfo shows it, or several; any source when None.
        writable: also write, sync, rename, read back and remove a small file.
        sticky: where it is written, and others can write the filesystem's root without the sticky bit, so that they
            can rename what is another's there (rename(2)), set that bit; where that is refused, leave it.
        deadline: in seconds from the question on; without an answer until then the state is HUNG, or SLOW where the
            mount answers and only a write does not end. Where the write has used up the deadline the answer has 2 s.
    """
    mountpoint = os.path.normpath(mountpoint)
    here = at(mountpoint)
    fstypes = (fstype,) if isinstance(fstype, str) else fstype
    if not here:
        return Result(State.ABSENT, f"nothing is mounted at {mountpoint}")
    mount = here[-1]
    sources = (source,) if isinstance(source, str) else source
    if (fstypes and mount.fstype not in fstypes) or (sources is not None and mount.source not in sources):
        return Result(State.WRONG, f"{mountpoint} holds {mount.source} ({mount.fstype})")
    if len(here) > 1:
        return Result(State.STACKED, f"{len(here)} mounts lie at {mountpoint}")
    if writable and mount.read_only:
        return Result(State.WRONG, f"{mountpoint} is mounted read-only")
    unwritten = ""
    if writable:
        begin = time.monotonic()
        answer, unwritten = _ask(mountpoint, mount, "write", deadline, sticky=sticky)
        if answer is not None:
            return _judge(mountpoint, answer)
        if time.monotonic() - begin >= deadline:
            deadline = min(deadline, _ANSWERS_S)
    answer, silent = _ask(mountpoint, mount, "read", deadline)
    if answer is None:
        return Result(State.HUNG, f"{mountpoint} {silent}")
    found = _judge(mountpoint, answer)
    return Result(State.SLOW, f"{mountpoint} answers, but a small write {unwritten}") if unwritten and found else found


def users(mountpoint: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """Return id and name of each process that has something open on the mount; needs root to see everybody's.

    Reads only /proc, which knows paths without asking the filesystem.
    """
    prefix = os.path.normpath(mountpoint)
    found: list[tuple[int, str]] = []
    for process in pathlib.Path("/proc").iterdir():
        if process.name.isdecimal() and any(_below(target, prefix) for target in _open_paths(process)):
            try:
                found.append((int(process.name), (process / "comm").read_text().strip()))
            except OSError:
                continue  # it ended
    return sorted(found)


def wait(
    mountpoint: str | os.PathLike[str],
    *,
    fstype: str | tuple[str, ...] = (),
    source: str | tuple[str, ...] | None = None,
    timeout: float = 60.0,
    pid: int | None = None,
) -> Result:
    """Wait until `mountpoint` is right; return the last look at it, `timeout` seconds later at most.

    With `pid`, the process that should mount it, waiting ends when that process ends.
    """
    end = time.monotonic() + timeout
    while True:
        left = max(0.5, min(5.0, end - time.monotonic()))
        result = probe(mountpoint, fstype=fstype, source=source, deadline=left)
        if result or time.monotonic() + 0.2 >= end:
            return result
        if pid is not None and _start_time(pid) is None:
            return Result(result.state, f"process {pid}, which should mount it, ended; {result.detail}")
        time.sleep(0.2)


def reach(addresses: collections.abc.Sequence[tuple[str, int]], *, timeout: float = 60.0) -> None:
    """Wait until one of the addresses takes a TCP connection.

    Raises:
        MountError: none did within `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while True:
        problem = "no address"
        for host, port in addresses:
            try:
                socket.create_connection((host, port), timeout=2).close()
                return
            except OSError as e:
                problem = f"{host} port {port} does not answer: {e.strerror or e}"
        if time.monotonic() + 0.5 >= end:
            raise MountError(problem)
        time.sleep(0.5)


def clear(mountpoint: str | os.PathLike[str], *, fstype: str, source: str) -> int:
    """Detach the mounts of `source` that lie at `mountpoint`, whatever their condition; return how many there were.

    Raises:
        MountError: something else is mounted there, which is left as it is.
    """
    count = 0
    while here := at(mountpoint):
        _umount(_ours(here[-1], fstype, source).mountpoint, _MNT_DETACH)
        count += 1
    return count


def detach(mountpoint: str | os.PathLike[str]) -> None:
    """Take the topmost mount at `mountpoint` out of the tree, whatever its condition and whoever uses it.

    Raises:
        MountError: the kernel refuses.
    """
    try:
        _umount(os.path.normpath(mountpoint), _MNT_DETACH)
    except OSError as e:
        raise MountError(f"cannot detach {mountpoint}: {e.strerror}") from e


def unmount(mountpoint: str | os.PathLike[str], *, fstype: str, source: str, patience: float = 20.0) -> None:
    """Unmount `source` from `mountpoint`: wait `patience` seconds for its users to leave, then detach it under them.

    Nobody is waited for when the mount is stale, and of use to nobody.

    Raises:
        MountError: something else is mounted there, which is left as it is; or the kernel refuses.
    """
    if probe(mountpoint, deadline=2).state is State.STALE:
        patience = 0
    end = time.monotonic() + patience
    while here := at(mountpoint):
        top, late = _ours(here[-1], fstype, source), time.monotonic() >= end
        try:
            _umount(top.mountpoint, _MNT_DETACH if late else 0)
        except OSError as e:
            if e.errno == errno.EINVAL:
                return  # somebody else was faster
            if e.errno != errno.EBUSY or late:
                raise MountError(f"cannot unmount {top.mountpoint}: {e.strerror}") from e
            time.sleep(0.5)


def drain(folders: collections.abc.Sequence[str | os.PathLike[str]], *, timeout: float = 600.0) -> None:
    """Wait until the folders, in which a JuiceFS client stages what it has yet to upload, hold no file.

    JuiceFS itself looks into one folder only, and waits for nothing when there are several (cmd/umount.go, 1.3.1).

    Raises:
        MountError: some are left after `timeout` seconds.
    """
    end, told = time.monotonic() + timeout, 0.0
    while left := sum(len(names) for folder in folders for _, _, names in os.walk(folder)):
        now = time.monotonic()
        if now >= end:
            raise MountError(f"{left} blocks are not uploaded yet: they lie in {' '.join(map(str, folders))}")
        if now - told > 10:
            print(f"waiting for {left} blocks to be uploaded", flush=True)
            told = now
        time.sleep(0.5)


def _ours(mount: Mount, fstype: str, source: str) -> Mount:
    if (mount.fstype, mount.source) != (fstype, source):
        raise MountError(f"{mount.mountpoint} holds {mount.source} ({mount.fstype}), which is not ours: unmount it")
    return mount


def _unescape(text: str) -> str:
    """Undo mountinfo's octal escapes, which stand for bytes."""
    raw = text.encode("utf-8", "surrogateescape")
    decoded = re.sub(rb"\\([0-3][0-7]{2})", lambda match: bytes([int(match[1], 8)]), raw)
    return decoded.decode("utf-8", "surrogateescape")


def _judge(mountpoint: str, answer: dict[str, typing.Any]) -> Result:
    step, number = str(answer.get("step", "")), answer.get("errno")
    if step == "hidden":
        return Result(State.WRONG, f"{mountpoint} is hidden beneath another mount")
    if step == "read back":
        return Result(State.FAILED, f"{mountpoint} returned other bytes than were written")
    if step == "start":
        return Result(State.FAILED, f"the look at {mountpoint} ended without an answer")
    if number is None:
        return Result(State.RIGHT, open_mode=answer.get("open"), was_open=answer.get("was"))
    reason = os.strerror(number).lower()
    if step == "open":
        state = State.STALE if number in _STALE else State.FAILED
        return Result(state, f"{mountpoint} does not open: {reason}")
    if number in (errno.ENOTCONN, errno.ESTALE):
        return Result(State.STALE, f"{mountpoint}: {step}: {reason}")
    return Result(State.FAILED, f"{mountpoint}: {step}: {reason}")


def _ask(
    mountpoint: str, mount: Mount, kind: str, deadline: float, *, sticky: bool = False
) -> tuple[dict[str, typing.Any] | None, str]:
    """Return what a child that reads or writes found; None and why when it does not end in time.

    While an earlier child of the kind still hangs there, none is started.
    """
    since = _abandoned_since(mountpoint, kind)
    if since is not None:
        verb = "answered" if kind == "read" else "ended"
        return None, f"has not {verb} since {time.strftime('%H:%M:%S', time.gmtime(since))} UTC"
    answer = _ask_child(mountpoint, [str(mount.id), *(["sticky"] if sticky else []), kind], deadline)
    return (
        answer,
        "" if answer is not None else f"did not {'answer' if kind == 'read' else 'end'} within {deadline:g} s",
    )


def _ask_child(mountpoint: str, arguments: list[str], deadline: float) -> dict[str, typing.Any] | None:
    """Run the child's part of a probe; None when it does not answer in time."""
    reader, writer = os.pipe()
    argv = [sys.executable, "-I", "-S", "-B", str(pathlib.Path(__file__).resolve()), "_child", mountpoint, *arguments]
    null = os.open(os.devnull, os.O_RDWR)
    try:
        pid = os.posix_spawn(
            sys.executable,
            argv,
            {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null, 0),
                (os.POSIX_SPAWN_DUP2, writer, 1),
                (os.POSIX_SPAWN_DUP2, null, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(writer)
        os.close(null)
    said, end = b"", time.monotonic() + _START_S
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        poll = select.poll()
        poll.register(pipe, select.POLLIN | select.POLLHUP)
        while (left := end - time.monotonic()) > 0 and poll.poll(left * 1000):
            block = pipe.read(65536)
            if not block:
                os.waitpid(pid, 0)  # the pipe is closed, so the child is past the filesystem
                return json.loads(said) if said.strip() else {"step": "start"}
            if not said:  # only now does it ask the filesystem: a busy machine takes its time to start a program
                end = time.monotonic() + deadline
            said += block
    _abandon(pid, mountpoint, arguments[-1])
    return None


def _abandon(pid: int, mountpoint: str, kind: str) -> None:
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + _REAP_S
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return
        time.sleep(0.02)
    try:
        _ABANDONED.mkdir(mode=0o755, exist_ok=True)
        _note(mountpoint, kind).write_text(f"{pid} {_start_time(pid)}")
    except OSError:
        pass  # not root: the next probe starts a child of its own


def _abandoned_since(mountpoint: str, kind: str) -> float | None:
    """Return when a child of the kind was left behind that still hangs in this mountpoint."""
    note = _note(mountpoint, kind)
    try:
        pid, started = note.read_text().split()
        since = note.stat().st_mtime
    except (OSError, ValueError):
        return None
    if started != "None" and _start_time(int(pid)) == int(started):
        return since
    note.unlink(missing_ok=True)
    return None


def _note(mountpoint: str, kind: str) -> pathlib.Path:
    return _ABANDONED / f"{kind}-{hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]}"


def _start_time(pid: int) -> int | None:
    """Return when a live process started, in clock ticks since boot: with its id that is unique (proc(5))."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _open_paths(process: pathlib.Path) -> collections.abc.Iterator[str]:
    # Not `maps`: reading it waits for a process that hangs in a page fault
    links = [process / "cwd", process / "root", process / "exe"]
    with contextlib.suppress(OSError):  # it ended, or belongs to somebody else
        links += list((process / "fd").iterdir())
    for link in links:
        with contextlib.suppress(OSError):
            yield str(link.readlink())


def _below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def _umount(mountpoint: str, flags: int) -> None:
    # umount(8) first looks at the mountpoint, which hangs when the server is dead; the system call does not
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(mountpoint), flags | _UMOUNT_NOFOLLOW) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), mountpoint)


def _child(mountpoint: str, mount_id: int, *, write: bool, sticky: bool) -> dict[str, typing.Any]:
    """The part of a probe that touches the filesystem, and may hang."""
    print(flush=True)  # it begins now
    step, found = "open", dict[str, typing.Any]()
    try:
        directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
        if f"mnt_id:\t{mount_id}\n" not in pathlib.Path(f"/proc/self/fdinfo/{directory}").read_text():
            return {"step": "hidden"}
        mode = stat.S_IMODE(os.fstat(directory).st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            found = {"open": mode}
            if sticky:
                with contextlib.suppress(OSError):  # of a filesystem that fails, the next step tells
                    os.fchmod(directory, mode | stat.S_ISVTX)
                    found = {"was": mode}
        step = "look up a name"
        # One that nobody asked for before: no cache knows it, so the server, or JuiceFS's engine, must answer
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.stat(f"{PROBE_DIR}-{secrets.token_hex(8)}", dir_fd=directory)
        if write:
            step = "make a directory"
            folder = pathlib.Path(mountpoint, PROBE_DIR)
            folder.mkdir(mode=0o700, exist_ok=True)
            old = folder / f"{socket.gethostname()}.{os.getpid()}"
            new = folder / f"{old.name}.new"
            token = secrets.token_bytes(32)
            step = "write"
            with new.open("wb", buffering=0) as file:
                file.write(token)
                step = "sync"
                os.fsync(file.fileno())
            step = "rename"
            new.replace(old)
            step = "read"
            same = old.read_bytes() == token
            step = "remove"
            _remove(old)
            _remove_leftovers(folder)
            if not same:
                return {"step": "read back"}
    except OSError as e:
        return {"step": step, "errno": e.errno}
    return found


def _remove_leftovers(folder: pathlib.Path) -> None:
    for path in folder.glob(f"{socket.gethostname()}.*"):
        if path.stat().st_mtime < time.time() - _LEFTOVER_S:
            _remove(path)


def _remove(path: pathlib.Path) -> None:
    """Remove a probe's file for good: JuiceFS, from 1.0 on, would keep it for days, and a file a minute of every node.

    What it keeps lies at .trash/HOUR/PARENT-INODE-NAME (pkg/meta/base.go, 1.3.1); other filesystems have no such file.
    """
    kept = f"{path.parent.stat().st_ino}-{path.stat().st_ino}-{path.name}"
    began = time.time()
    path.unlink()
    for moment in (began, time.time()):  # the hour may have ended meanwhile
        hour = time.strftime("%Y-%m-%d-%H", time.gmtime(moment))
        with contextlib.suppress(OSError):
            (path.parent.parent / ".trash" / hour / kept).unlink()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def main(argv: list[str]) -> int:
    """Serve a systemd unit, or be the child of a probe."""
    if argv[:1] == ["_child"]:
        print(json.dumps(_child(argv[1], int(argv[2]), write=argv[-1] == "write", sticky="sticky" in argv[3:])))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("reach")
    command.add_argument("address", nargs="+", type=_address)
    command.add_argument("--timeout", type=float, default=60.0)
    command = commands.add_parser("drain")
    command.add_argument("folder", nargs="+")
    command.add_argument("--timeout", type=float, default=600.0)
    for name in ("wait", "clear", "unmount"):
        command = commands.add_parser(name)
        command.add_argument("mountpoint")
        command.add_argument("--fstype", required=name != "wait", default="")
        command.add_argument("--source", required=name != "wait")
    commands.choices["wait"].add_argument("--timeout", type=float, default=60.0)
    commands.choices["wait"].add_argument("--pid", type=int)
    commands.choices["unmount"].add_argument("--patience", type=float, default=20.0)
    chosen = parser.parse_args(argv)
    try:
        if chosen.command == "reach":
            reach(chosen.address, timeout=chosen.timeout)
        elif chosen.command == "drain":
            drain(chosen.folder, timeout=chosen.timeout)
        elif chosen.command == "wait":
            fstype: tuple[str, ...] = (chosen.fstype,) if chosen.fstype else ()
            result = wait(
                chosen.mountpoint, fstype=fstype, source=chosen.source, timeout=chosen.timeout, pid=chosen.pid
            )
            if not result:
                raise MountError(result.detail)
        elif chosen.command == "clear":
            count = clear(chosen.mountpoint, fstype=chosen.fstype, source=chosen.source)
            print(f"cleared {count} leftover mounts of {chosen.mountpoint}" if count else "nothing to clear")
        else:
            unmount(chosen.mountpoint, fstype=chosen.fstype, source=chosen.source, patience=chosen.patience)
    except (MountError, OSError) as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

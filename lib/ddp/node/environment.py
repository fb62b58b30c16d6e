"""The Python environment, unpacked once on each node's own disk from an archive on the shared filesystem.

A job holds a shared lock on its environment for as long as it runs; unpacking and removal take it exclusively.
"""

import collections.abc
import contextlib
import fcntl
import os
import subprocess
import time

from ddp.node import ownership, spec, spool

LOCK_S = 1800.0
OLD_S = 14 * 86400.0  # an environment unused for this long is removed
ROOM_BYTES = 256 << 20  # what must stay free beside it
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class UnusableError(Exception):
    """The environment cannot be used on this node; `str()` is one line with what to do."""


def use(wanted: spec.Environment, host: str) -> tuple[str, int]:
    """Return the environment's interpreter, and the open lock that prevents its removal. Raises UnusableError."""
    name = os.path.basename(wanted.archive).removesuffix(".tar.zst")
    home = f"{wanted.cache}/{name}"
    try:
        spool.ensure_private(wanted.cache)
    except PermissionError:
        account = _account()
        raise UnusableError(f"{wanted.cache} is not a folder of {account}; remove it") from None
    except OSError as e:
        raise UnusableError(f"{wanted.cache} cannot be made: {e.strerror}") from e
    lock = os.open(f"{home}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.set_inheritable(lock, True)  # by the ranks, too
    _acquire(lock, fcntl.LOCK_SH, f"another job has been unpacking {name} for 30 minutes")
    marker = _marker(wanted)
    while not _is_complete(home, marker):
        reason = f"another job has been unpacking {name} for 30 minutes"
        # Who loses the race to unpack must not wait for the winner, which shares the lock for as long as it runs
        _acquire(lock, fcntl.LOCK_EX, reason, or_once=lambda: _is_complete(home, marker))
        if not _is_complete(home, marker):
            _unpack(wanted, name, home, marker, host)
        _acquire(lock, fcntl.LOCK_SH, f"another job holds {name}")
    os.utime(f"{home}.complete")
    python = f"{home}/bin/python"
    version = _version(python)
    if version != wanted.python:
        raise UnusableError(f"this node has Python {version}, the environment was made for {wanted.python}")
    return python, lock


def _account() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"


def _version(python: str) -> str:
    """Return the version of the interpreter that the environment links to, from its name where that holds it."""
    found = os.path.basename(os.path.realpath(python)).removeprefix("python")
    if found.startswith("3.") and found[2:].isdecimal() and os.access(python, os.X_OK):
        return found
    try:
        done = subprocess.run([python, "-V"], capture_output=True, text=True, check=True)  # Python 3.12.3
    except (OSError, subprocess.CalledProcessError) as e:
        raise UnusableError("the environment needs /usr/bin/python3 on this node") from e
    return ".".join(done.stdout.split()[-1].split(".")[:2])


def _marker(wanted: spec.Environment) -> str:
    """Return the mark of a complete environment. It holds the boot: files unpacked before a crash may be lost."""
    boot = ""
    with contextlib.suppress(OSError), open(_BOOT_ID, encoding="ascii") as file:
        boot = file.read().strip()
    return f"{wanted.sha256} {boot}"


def _is_complete(home: str, marker: str) -> bool:
    with contextlib.suppress(OSError), open(f"{home}.complete", encoding="ascii") as file:
        return file.read().strip() == marker and os.access(f"{home}/bin/python", os.X_OK)
    return False


def _acquire(lock: int, kind: int, reason: str, *, or_once: collections.abc.Callable[[], bool] = lambda: False) -> None:
    """Take the lock, or return without it once that is not needed. Raises UnusableError after LOCK_S."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if or_once():
                return
            if time.monotonic() > deadline:
                raise UnusableError(reason) from None
            time.sleep(0.1)
        else:
            return


def _unpack(wanted: spec.Environment, name: str, home: str, marker: str, host: str) -> None:
    import shutil
    import tempfile

    began = time.monotonic()
    cache = wanted.cache
    try:
        archive = _open(wanted)
    except ownership.UntrustedError as e:
        raise UnusableError(f"the environment is not used: {e}") from e
    except OSError as e:
        why = f"({e.strerror}); is the shared filesystem mounted here?"
        raise UnusableError(f"{wanted.archive} cannot be read {why}") from e
    try:
        _remove_old(cache, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{home}.complete")
        shutil.rmtree(home, ignore_errors=True)
        for entry in os.listdir(cache):
            if entry.startswith(f".{name}."):
                shutil.rmtree(f"{cache}/{entry}", ignore_errors=True)
        about = os.statvfs(cache)
        free = about.f_bavail * about.f_frsize
        if free <= wanted.unpacked_bytes + ROOM_BYTES:
            raise UnusableError(f"{cache} has {free} bytes free; the environment needs {wanted.unpacked_bytes}")
        if _digest(archive, wanted.archive) != wanted.sha256:
            raise UnusableError(f"{wanted.archive} is damaged; remove it, then: {wanted.remedy}")
        fresh = tempfile.mkdtemp(prefix=f".{name}.", dir=cache)
        if not _extract(archive, fresh):
            shutil.rmtree(fresh, ignore_errors=True)
            raise UnusableError(f"{wanted.archive} could not be unpacked to {fresh}")
    finally:
        os.close(archive)
    os.rename(fresh, home)
    took_s = int(time.monotonic() - began)
    with open(f"{home}/unpacked-in-s", "w", encoding="ascii") as file:  # doctor reports it
        file.write(f"{took_s}\n")
    with open(f"{home}.complete", "w", encoding="ascii") as file:
        file.write(f"{marker}\n")
    spool.write(f"[ENV] {host} unpacked the environment {name} in {took_s} s")


def _open(wanted: spec.Environment) -> int:
    """Open the archive; only trusted accounts may own it."""
    trusted = frozenset({0, os.geteuid(), *wanted.trusted_uids})
    return ownership.open_trusted(os.path.realpath(wanted.archive), trusted)


def _digest(archive: int, path: str) -> str:
    import hashlib

    digest = hashlib.sha256()
    os.lseek(archive, 0, os.SEEK_SET)
    try:
        while block := os.read(archive, 1 << 20):
            digest.update(block)
    except OSError as e:
        raise UnusableError(f"{path} cannot be read ({e.strerror}); is the shared filesystem mounted here?") from e
    return digest.hexdigest()


def _extract(archive: int, folder: str) -> bool:
    """Unpack the open archive into a folder; return whether that succeeded."""
    import shutil

    os.lseek(archive, 0, os.SEEK_SET)
    tar = ["tar", "-x", "-C", folder]
    with subprocess.Popen(tar, stdin=subprocess.PIPE) as unpacker:
        assert unpacker.stdin is not None
        try:
            if shutil.which("zstd"):
                done = subprocess.run(["zstd", "-q", "-d", "-c"], stdin=archive, stdout=unpacker.stdin, check=False)
                succeeded = done.returncode == 0
            else:
                succeeded = True
                for block in _decompressed(archive):
                    unpacker.stdin.write(block)
            unpacker.stdin.close()
        except (OSError, ValueError) as e:
            spool.write(f"[ENV] unpacking: {e}")
            with contextlib.suppress(OSError):
                unpacker.stdin.close()
            succeeded = False
    return unpacker.returncode == 0 and succeeded


def _remove_old(cache: str, but: str) -> None:
    """Remove environments that no job has used for OLD_S and none uses now."""
    import shutil

    for entry in os.listdir(cache):
        name = entry.removesuffix(".complete")
        if name in (entry, but):
            continue
        with contextlib.suppress(OSError):
            if time.time() - os.stat(f"{cache}/{entry}").st_mtime < OLD_S:
                continue
            lock = os.open(f"{cache}/{name}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(f"{cache}/{entry}")
                shutil.rmtree(f"{cache}/{name}", ignore_errors=True)
            finally:
                os.close(lock)


def _decompressed(archive: int) -> collections.abc.Iterator[bytes]:
    """Decompress a zstd archive with libzstd, for nodes without the program; dpkg and systemd depend on the library.

    Raises ValueError for another format, or a truncated archive. The calls are those of zstd.h, "Streaming
    decompression".
    """
    import ctypes

    class Buffer(ctypes.Structure):
        _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("position", ctypes.c_size_t))

    lib = ctypes.CDLL("libzstd.so.1")
    lib.ZSTD_createDStream.restype = ctypes.c_void_p
    pointer = ctypes.POINTER(Buffer)
    lib.ZSTD_decompressStream.argtypes = [ctypes.c_void_p, pointer, pointer]
    lib.ZSTD_decompressStream.restype = ctypes.c_size_t
    stream, room = lib.ZSTD_createDStream(), ctypes.create_string_buffer(1 << 20)
    left = 0
    while block := os.read(archive, 1 << 20):
        held = ctypes.create_string_buffer(block, len(block))
        given = Buffer(ctypes.addressof(held), len(block), 0)
        while True:
            taken = Buffer(ctypes.addressof(room), len(room), 0)
            left = int(lib.ZSTD_decompressStream(stream, ctypes.byref(taken), ctypes.byref(given)))
            if lib.ZSTD_isError(ctypes.c_size_t(left)):
                raise ValueError("not a zstd archive")
            yield bytes(memoryview(room)[: taken.position])
            if given.position == given.size and taken.position < len(room):
                break
    if left:
        raise ValueError("the archive is truncated")

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
ROOM_BYTES = 256 << 20  # left free beside it
_BLOCK = 1 << 20
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class UnusableError(Exception):
    """The environment cannot be used on this node; `str()` is one line with the remedy."""


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
        # The winner of a race shares the lock while it runs, so the loser must not wait for it
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
    """Return the version of the interpreter that the environment links to, from its name if that has it."""
    found = os.path.basename(os.path.realpath(python)).removeprefix("python")
    if found.startswith("3.") and found[2:].isdecimal() and os.access(python, os.X_OK):
        return found
    try:
        done = subprocess.run([python, "-V"], capture_output=True, text=True, check=True)  # Python 3.12.3
    except (OSError, subprocess.CalledProcessError) as e:
        raise UnusableError("the environment needs /usr/bin/python3 on this node") from e
    return ".".join(done.stdout.split()[-1].split(".")[:2])


def _marker(wanted: spec.Environment) -> str:
    """Return the mark of a complete environment, with the boot: files unpacked before a crash may be lost."""
    boot = ""
    with contextlib.suppress(OSError), open(_BOOT_ID, encoding="ascii") as file:
        boot = file.read().strip()
    return f"{wanted.sha256} {boot}"


def _is_complete(home: str, marker: str) -> bool:
    with contextlib.suppress(OSError), open(f"{home}.complete", encoding="ascii") as file:
        return file.read().strip() == marker and os.access(f"{home}/bin/python", os.X_OK)
    return False


def _acquire(lock: int, kind: int, reason: str, *, or_once: collections.abc.Callable[[], bool] = lambda: False) -> None:
    """Acquire the lock, or return without it once `or_once()` is true. Raises UnusableError after LOCK_S."""
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
        fresh = tempfile.mkdtemp(prefix=f".{name}.", dir=cache)
        try:
            _extract(archive, wanted, fresh)
        except UnusableError:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
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


def _extract(archive: int, wanted: spec.Environment, folder: str) -> None:
    """Unpack the open archive, computing digests meanwhile: the first part, then the others side by side.

    Raises UnusableError.
    """
    import concurrent.futures
    import functools
    import itertools

    held = os.fstat(archive).st_size
    parts = wanted.parts or ((held, wanted.sha256),)
    ends = itertools.accumulate(size for size, _ in parts)
    contents = [_Blocks(archive, wanted.archive, end - size, end) for end, (size, _) in zip(ends, parts, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), len(parts))) as pool:
        failures = [_extract_part(folder, contents[0])]
        failures += pool.map(functools.partial(_extract_part, folder), contents[1:])
    digests = [content.digest.hexdigest() for content in contents]
    if digests != [sha256 for _, sha256 in parts] or held != sum(size for size, _ in parts):
        raise UnusableError(f"{wanted.archive} is damaged; remove it, then: {wanted.remedy}")
    if why := next(filter(None, failures), ""):
        raise UnusableError(f"{wanted.archive} could not be unpacked to {folder}: {why}")


class _Blocks:
    """A part of the archive, block by block; `digest` is of the blocks that were read."""

    def __init__(self, archive: int, path: str, begin: int, end: int) -> None:
        import hashlib

        self._archive, self._path, self._at, self._end = archive, path, begin, end
        self.digest = hashlib.sha256()

    def __iter__(self) -> "_Blocks":
        return self

    def __next__(self) -> bytes:
        try:
            block = os.pread(self._archive, min(_BLOCK, self._end - self._at), self._at)
        except OSError as e:
            why = f"({e.strerror}); is the shared filesystem mounted here?"
            raise UnusableError(f"{self._path} cannot be read {why}") from e
        if not block:
            raise StopIteration
        self._at += len(block)
        self.digest.update(block)
        return block


def _extract_part(folder: str, content: _Blocks) -> str:
    """Unpack a part into a folder, and read it to its end; return what failed, or an empty string."""
    import shutil
    import tempfile

    has_zstd = shutil.which("zstd") is not None
    argv = ["tar", "-x", "-f", "-", "-C", folder, *(["-I", "zstd -q"] if has_zstd else [])]
    failure = ""
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=errors) as tar:
            assert tar.stdin is not None
            try:
                tar.stdin.writelines(content if has_zstd else _decompressed(content))
                tar.stdin.close()
            except (OSError, ValueError) as e:
                failure = str(e)
                with contextlib.suppress(OSError):
                    tar.stdin.close()
            for _ in content:  # for its digest, which tells a damaged archive from a full disk
                pass
        if tar.returncode:
            failure = f"tar exited {tar.returncode}"
        errors.seek(0)
        lines = errors.read(4096).decode(errors="replace").splitlines()
    return lines[0] if failure and lines else failure


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


def _decompressed(blocks: collections.abc.Iterable[bytes]) -> collections.abc.Iterator[bytes]:
    """Decompress zstd frames with libzstd, for nodes without the program; dpkg and systemd depend on the library.

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
    stream, room = lib.ZSTD_createDStream(), ctypes.create_string_buffer(_BLOCK)
    left = 0
    for block in blocks:
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

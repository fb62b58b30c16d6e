"""Unpack the Python environment once on each node's own disk.

A job holds a shared lock on its environment for as long as it runs, which prevents the removal; a
second lock lets one job at a time unpack it.
"""

import collections.abc
import contextlib
import dataclasses
import fcntl
import os
import re
import subprocess
import sys
import time

from ddp.node import exit_codes, ownership, spec, spool

LOCK_S = 1800.0
OLD_S = 14 * 86400.0  # an environment unused for this long is removed
ROOM_BYTES = 256 << 20  # that stay free
UNPACKING = ".unpacking"  # the suffix of the file with the percentage; its name is the node's
REPORT_S = 1.0
_BLOCK = 1 << 20
LOOK_S = 30.0  # for an interpreter to find torch
Log = collections.abc.Callable[[str], None]
# In torch/version.py (2.6 to 2.13): what torch is built for
_BUILD = re.compile(r"^(cuda|hip|xpu)\b[^=]*= *(.+?) *$", re.MULTILINE)
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_FIND_TORCH = (
    "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
)


def use(
    wanted: spec.Environment, host: str, control: str = "", log: Log = spool.write
) -> tuple[str, tuple[int, ...]]:
    """Return the environment's interpreter, and the open locks that prevent its removal.

    Raises FatalError. While it unpacks, a file in the folder `control` of the run has the
    percentage.
    """
    # Of the node's python3, which runs this and which the environment links to
    version = f"3.{sys.version_info[1]}"
    if wanted.python not in ("", version):
        made_for = f"the environment was made for {wanted.python}"
        raise exit_codes.FatalError(f"this node has Python {version}, {made_for}")
    wanted = dataclasses.replace(wanted, cache=_open_cache(wanted))
    report = f"{control}/{host}{UNPACKING}" if control else ""
    locks = tuple(_use(wanted, layer, host, report, log) for layer in wanted.layers)
    return f"{place(wanted, wanted.layers[-1])}/bin/python", locks


def main(spec_path: str) -> int:
    """Unpack a training's environment on a spare node; return the exit code."""
    wanted = spec.load(spec.JobSpec, spec_path).environment
    host = os.environ["SLURMD_NODENAME"]
    try:
        if wanted is not None:
            use(wanted, host)
    except exit_codes.FatalError as e:
        spool.write(f"[ENV] {host} is not a spare node: {e}")
    return 0


def is_for_cpus(python: str, env: dict[str, str]) -> bool:
    """Return whether an interpreter's torch is built for CPUs, without its import."""
    argv = [python, "-c", _FIND_TORCH]
    try:
        found = subprocess.run(
            argv, env=env, cwd="/", capture_output=True, text=True, timeout=LOOK_S, check=True
        )
        version = f"{found.stdout.strip()}/version.py"
        with open(version, encoding="utf-8", errors="replace") as file:
            kinds = dict(_BUILD.findall(file.read()))
    except (OSError, subprocess.SubprocessError):
        return False
    return kinds.get("cuda") == "None" and all(value == "None" for value in kinds.values())


def _open_cache(wanted: spec.Environment) -> str:
    """Return this account's folder for environments. Raises FatalError if none can run from it."""
    try:
        cache = spool.own_cache(wanted.cache)
        about = os.statvfs(cache)
    except OSError as e:
        why = f"{wanted.cache} cannot be made ({e.strerror or e})"
        raise exit_codes.FatalError(_with_remedy(why, wanted)) from e
    if is_noexec(about):
        why = f"{cache} is on a disk that is mounted noexec, from which no library loads"
        remount = f"as root: mount -o remount,exec {_mount_point(cache)}"
        raise exit_codes.FatalError(_with_remedy(f"{why}; {remount}", wanted))
    return cache


def is_noexec(about: os.statvfs_result) -> bool:
    """Return whether no program and no library runs from a filesystem, by statvfs(3)."""
    return bool(about.f_flag & os.ST_NOEXEC)


def _mount_point(path: str) -> str:
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _with_remedy(why: str, wanted: spec.Environment) -> str:
    return f"{why}; or {wanted.cache_remedy}" if wanted.cache_remedy else why


def place(wanted: spec.Environment, layer: spec.Archive) -> str:
    """Return the folder that a layer is unpacked to."""
    name = os.path.basename(layer.path).removesuffix(".tar.zst")
    return f"{wanted.cache}/{name}"


def _use(wanted: spec.Environment, layer: spec.Archive, host: str, report: str, log: Log) -> int:
    """Unpack a layer unless it is unpacked, and return its lock. Raises FatalError."""
    home = place(wanted, layer)
    name = os.path.basename(home)
    lock = _open_lock(f"{home}.lock")
    os.set_inheritable(lock, True)  # by the ranks, too
    _acquire(lock, fcntl.LOCK_SH, f"another job has been removing {name}")

    marker = _marker(layer)
    if not _is_complete(home, marker):
        turn = _open_lock(f"{home}.unpacking.lock")
        try:
            _acquire(turn, fcntl.LOCK_EX, f"another job has been unpacking {name}")
            if not _is_complete(home, marker):
                began = time.monotonic()
                _unpack(wanted, layer, home, report)
                took_s = int(time.monotonic() - began)
                _complete(home, marker, took_s)
                log(f"[ENV] {host} unpacked the environment {name} in {took_s} s")
        finally:
            os.close(turn)
    os.utime(f"{home}.complete")
    return lock


def _open_lock(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _acquire(lock: int, kind: int, reason: str) -> None:
    """Acquire the lock. Raises FatalError after LOCK_S."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise exit_codes.FatalError(f"{reason} for {LOCK_S / 60:.0f} minutes") from None
            time.sleep(0.1)


def _marker(layer: spec.Archive) -> str:
    """Return the mark of a complete environment.

    It has the boot: files unpacked before a crash may be lost.
    """
    boot = ""
    with contextlib.suppress(OSError), open(_BOOT_ID, encoding="ascii") as file:
        boot = file.read().strip()
    return f"{layer.sha256} {boot}"


def _is_complete(home: str, marker: str) -> bool:
    with contextlib.suppress(OSError), open(f"{home}.complete", encoding="ascii") as file:
        found = file.read().strip()
        is_environment = os.path.exists(f"{home}/bin/python")
        is_image = os.path.exists(f"{home}/config.json")
        return found == marker and (is_environment or is_image)
    return False


def _unpack(wanted: spec.Environment, layer: spec.Archive, home: str, report: str) -> None:
    """Unpack a layer next to its folder, then rename it. Raises FatalError."""
    import shutil

    archive = _open_archive(wanted, layer)
    partial = f"{home}.partial"
    try:
        _remove_old(wanted.cache, os.path.basename(home))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{home}.complete")
        for folder in (home, partial):
            shutil.rmtree(folder, ignore_errors=True)
        _check_room(wanted, layer)

        os.mkdir(partial, 0o700)
        try:
            unpack_archive(archive, layer, partial, report)
        except exit_codes.FatalError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(archive)
    os.rename(partial, home)


def _open_archive(wanted: spec.Environment, layer: spec.Archive) -> int:
    """Open an archive that only trusted accounts can replace. Raises FatalError."""
    trusted = frozenset({0, os.geteuid(), *wanted.trusted_uids})
    try:
        return ownership.open_trusted(os.path.realpath(layer.path), trusted)
    except ownership.UntrustedError as e:
        raise exit_codes.FatalError(f"the environment is not used: {e}") from e
    except OSError as e:
        raise _unreadable(layer.path, e) from e


def _check_room(wanted: spec.Environment, layer: spec.Archive) -> None:
    """Check that a layer fits on this node's disk. Raises FatalError."""
    about = os.statvfs(wanted.cache)
    free = about.f_bavail * about.f_frsize
    needed = layer.unpacked_bytes + ROOM_BYTES
    if free <= needed:
        needs = f"the environment needs {needed >> 20} MiB"
        why = f"{wanted.cache} has {free >> 20} MiB free, {needs}; free space there"
        raise exit_codes.FatalError(_with_remedy(why, wanted))


def _complete(home: str, marker: str, took_s: int) -> None:
    _write_line(f"{home}/unpacked-in-s", str(took_s))  # doctor reports it
    _write_line(f"{home}.complete", marker)


def _write_line(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(f"{text}\n")


def _unreadable(path: str, error: OSError) -> exit_codes.FatalError:
    hint = "is the shared filesystem mounted here?"
    return exit_codes.FatalError(f"{path} cannot be read ({error.strerror}); {hint}")


class _Part:
    """A part of an open archive, with the digest of the bytes read so far."""

    def __init__(self, archive: int, path: str, begin: int, size: int, sha256: str) -> None:
        import hashlib

        self._archive = archive
        self._path = path
        self._at = begin
        self._end = begin + size
        self._wanted = sha256
        self._digest = hashlib.sha256()
        self.done = 0

    def blocks(self) -> collections.abc.Iterator[bytes]:
        """Read the part. Raises FatalError."""
        try:
            while block := os.pread(self._archive, min(_BLOCK, self._end - self._at), self._at):
                self._at += len(block)
                self.done += len(block)
                self._digest.update(block)
                yield block
        except OSError as e:
            raise _unreadable(self._path, e) from e

    def is_damaged(self) -> bool:
        """Return whether the bytes differ from the packed ones."""
        return self._digest.hexdigest() != self._wanted


def unpack_archive(archive: int, layer: spec.Archive, folder: str, report: str) -> None:
    """Unpack the first part of an archive, then the others side by side. Raises FatalError."""
    import concurrent.futures

    held = os.fstat(archive).st_size
    parts: list[_Part] = []
    begin = 0
    for size, sha256 in layer.parts or ((held, layer.sha256),):
        parts.append(_Part(archive, layer.path, begin, size, sha256))
        begin += size

    def extract(part: _Part) -> str:
        return extract_part(folder, part.blocks())

    def percent() -> int:
        return 100 * sum(part.done for part in parts) // max(1, held)

    workers = min(len(os.sched_getaffinity(0)), len(parts))
    with _reporting(report, percent), concurrent.futures.ThreadPoolExecutor(workers) as pool:
        failures = [extract(parts[0]), *pool.map(extract, parts[1:])]
    if held != begin or any(part.is_damaged() for part in parts):
        raise exit_codes.FatalError(f"{layer.path} is damaged; remove it, then: {layer.remedy}")
    for why in failures:
        if why:
            raise exit_codes.FatalError(f"{layer.path} could not be unpacked to {folder}: {why}")


@contextlib.contextmanager
def _reporting(
    path: str, percent: collections.abc.Callable[[], int]
) -> collections.abc.Generator[None]:
    """Write the percentage to a file every second, unless `path` is ""."""
    import threading

    over = threading.Event()

    def write() -> None:
        while not over.wait(REPORT_S):
            with contextlib.suppress(OSError):
                _write_line(path, str(percent()))
        with contextlib.suppress(OSError):
            os.unlink(path)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(REPORT_S)


def extract_part(folder: str, content: collections.abc.Iterator[bytes]) -> str:
    """Unpack a part into a folder, and read it to its end; return why it failed, or ""."""
    import shutil
    import tempfile

    has_zstd = shutil.which("zstd") is not None
    argv = ["tar", "-x", "-f", "-", "-C", folder]
    if has_zstd:
        argv += ["-I", "zstd -q"]
    with tempfile.TemporaryFile() as errors:
        failure = _pipe(argv, content if has_zstd else _decompressed(content), errors.fileno())
        for _ in content:  # for its digest, which tells a damaged archive from a full disk
            pass
        errors.seek(0)
        lines = errors.read(4096).decode(errors="replace").splitlines()
    return lines[0] if failure and lines else failure


def _pipe(argv: list[str], content: collections.abc.Iterator[bytes], errors: int) -> str:
    """Run tar on a content; return why it failed, or ""."""
    failure = ""
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=errors) as tar:
        assert tar.stdin is not None
        try:
            tar.stdin.writelines(content)
            tar.stdin.close()
        except (OSError, ValueError) as e:
            failure = str(e)
            with contextlib.suppress(OSError):
                tar.stdin.close()
    return f"tar exited {tar.returncode}" if tar.returncode else failure


def _decompressed(blocks: collections.abc.Iterable[bytes]) -> collections.abc.Iterator[bytes]:
    """Decompress zstd frames with libzstd, for nodes without the program.

    dpkg and systemd depend on the library. Raises ValueError for another format, or a truncated
    archive. The calls are from zstd.h, "Streaming decompression".
    """
    import ctypes

    class Buffer(ctypes.Structure):
        _fields_ = (
            ("data", ctypes.c_void_p),
            ("size", ctypes.c_size_t),
            ("position", ctypes.c_size_t),
        )

    lib = ctypes.CDLL("libzstd.so.1")
    lib.ZSTD_createDStream.restype = ctypes.c_void_p
    pointer = ctypes.POINTER(Buffer)
    lib.ZSTD_decompressStream.argtypes = [ctypes.c_void_p, pointer, pointer]
    lib.ZSTD_decompressStream.restype = ctypes.c_size_t
    stream = lib.ZSTD_createDStream()
    room = ctypes.create_string_buffer(_BLOCK)
    left = 0
    for block in blocks:
        held = ctypes.create_string_buffer(block, len(block))
        given = Buffer(ctypes.addressof(held), len(block), 0)
        is_full = True
        while given.position < given.size or is_full:
            taken = Buffer(ctypes.addressof(room), len(room), 0)
            left = int(lib.ZSTD_decompressStream(stream, ctypes.byref(taken), ctypes.byref(given)))
            if lib.ZSTD_isError(ctypes.c_size_t(left)):
                raise ValueError("not a zstd archive")
            yield bytes(memoryview(room)[: taken.position])
            is_full = taken.position == len(room)
    if left:
        raise ValueError("the archive is truncated")


def _remove_old(cache: str, but: str) -> None:
    """Remove environments that no job has used for OLD_S and none uses now."""
    for entry in os.listdir(cache):
        name = entry.removesuffix(".complete")
        if name in (entry, but):
            continue
        with contextlib.suppress(OSError):
            age_s = time.time() - os.stat(f"{cache}/{entry}").st_mtime
            if age_s >= OLD_S:
                _remove(cache, name)


def _remove(cache: str, name: str) -> None:
    """Remove an environment. Raises OSError if a job uses it."""
    import shutil

    lock = _open_lock(f"{cache}/{name}.lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(f"{cache}/{name}.complete")
        shutil.rmtree(f"{cache}/{name}", ignore_errors=True)
    finally:
        os.close(lock)

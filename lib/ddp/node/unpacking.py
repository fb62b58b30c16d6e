"""The Python environment, unpacked once on each node's own disk from archives on the shared filesystem.

A job holds a shared lock on its environment for as long as it runs, which prevents the removal; a second lock lets one
job at a time unpack it.
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
ROOM_BYTES = 256 << 20  # left free beside it
UNPACKING = ".unpacking"  # the suffix of the file with the percentage; its name is the node's
REPORT_S = 1.0
_BLOCK = 1 << 20
LOOK_S = 30.0  # for an interpreter to find torch
# Of torch/version.py (2.6 to 2.13): what torch is built for
_BUILD = re.compile(r"^(cuda|hip|xpu)\b[^=]*= *(.+?) *$", re.MULTILINE)
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def use(wanted: spec.Environment, host: str, control: str = "") -> tuple[str, tuple[int, ...]]:
    """Return the environment's interpreter, and the open locks that prevent its removal. Raises FatalError.

    While it unpacks, a file in the folder `control` of the run has the percentage.
    """
    version = f"3.{sys.version_info[1]}"  # of the node's python3, which runs this and which the environment links to
    if wanted.python not in ("", version):
        raise exit_codes.FatalError(
            f"this node has Python {version}, the environment was made for {wanted.python}"
        )
    try:
        wanted = dataclasses.replace(wanted, cache=spool.own_cache(wanted.cache))
    except OSError as e:
        raise exit_codes.FatalError(str(e)) from e
    locks = tuple(_use(wanted, layer, host, control) for layer in wanted.layers)
    return f"{place(wanted, wanted.layers[-1])}/bin/python", locks


def main(spec_path: str) -> int:
    """Unpack a training's environment on a spare node; return the exit code."""
    wanted = spec.load(spec.JobSpec, spec_path).environment
    try:
        if wanted is not None:
            use(wanted, os.environ["SLURMD_NODENAME"])
    except exit_codes.FatalError as e:
        spool.write(f"[ENV] {os.environ['SLURMD_NODENAME']} is no spare node: {e}")
    return 0


def is_for_cpus(python: str, env: dict[str, str]) -> bool:
    """Return whether an interpreter's torch is built for CPUs. Does not import torch, which takes seconds."""
    find = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    try:
        argv = [python, "-c", find]
        found = subprocess.run(
            argv, env=env, cwd="/", capture_output=True, text=True, timeout=LOOK_S, check=True
        )
        with open(f"{found.stdout.strip()}/version.py", encoding="utf-8", errors="replace") as file:
            kinds = dict(_BUILD.findall(file.read()))
    except (OSError, subprocess.SubprocessError):
        return False
    return kinds.get("cuda") == "None" and all(value == "None" for value in kinds.values())


def place(wanted: spec.Environment, layer: spec.Archive) -> str:
    """Return the folder that a layer is unpacked to."""
    return f"{wanted.cache}/{os.path.basename(layer.path).removesuffix('.tar.zst')}"


def _use(wanted: spec.Environment, layer: spec.Archive, host: str, control: str) -> int:
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
                _unpack(wanted, layer, home, f"{control}/{host}{UNPACKING}" if control else "")
                _complete(home, marker, int(time.monotonic() - began), host)
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
    """Return the mark of a complete environment, with the boot: files unpacked before a crash may be lost."""
    boot = ""
    with contextlib.suppress(OSError), open(_BOOT_ID, encoding="ascii") as file:
        boot = file.read().strip()
    return f"{layer.sha256} {boot}"


def _is_complete(home: str, marker: str) -> bool:
    with contextlib.suppress(OSError), open(f"{home}.complete", encoding="ascii") as file:
        is_there = os.path.exists(f"{home}/bin/python") or os.path.exists(
            f"{home}/config.json"
        )  # an image's
        return file.read().strip() == marker and is_there
    return False


def _unpack(wanted: spec.Environment, layer: spec.Archive, home: str, report: str) -> None:
    import shutil

    name, partial = os.path.basename(home), f"{home}.partial"
    trusted = frozenset({0, os.geteuid(), *wanted.trusted_uids})
    try:
        archive = ownership.open_trusted(os.path.realpath(layer.path), trusted)
    except ownership.UntrustedError as e:
        raise exit_codes.FatalError(f"the environment is not used: {e}") from e
    except OSError as e:
        raise _unreadable(layer.path, e) from e
    try:
        _remove_old(wanted.cache, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{home}.complete")
        for folder in (home, partial):
            shutil.rmtree(folder, ignore_errors=True)
        about = os.statvfs(wanted.cache)
        free = about.f_bavail * about.f_frsize
        if free <= layer.unpacked_bytes + ROOM_BYTES:
            needs = f"the environment needs {layer.unpacked_bytes}"
            raise exit_codes.FatalError(f"{wanted.cache} has {free} bytes free; {needs}")
        os.mkdir(partial, 0o700)
        try:
            _extract(archive, layer, partial, report)
        except exit_codes.FatalError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(archive)
    os.rename(partial, home)


def _complete(home: str, marker: str, took_s: int, host: str) -> None:
    for suffix, text in (
        ("/unpacked-in-s", str(took_s)),
        (".complete", marker),
    ):  # doctor reports the first
        with open(home + suffix, "w", encoding="ascii") as file:
            file.write(f"{text}\n")
    spool.write(f"[ENV] {host} unpacked the environment {os.path.basename(home)} in {took_s} s")


def _unreadable(path: str, error: OSError) -> exit_codes.FatalError:
    return exit_codes.FatalError(
        f"{path} cannot be read ({error.strerror}); is the shared filesystem mounted here?"
    )


def _extract(archive: int, layer: spec.Archive, folder: str, report: str) -> None:
    """Unpack the open archive, the first part, then the others side by side, with digests. Raises FatalError."""
    import concurrent.futures
    import functools
    import hashlib
    import itertools

    held = os.fstat(archive).st_size
    parts = layer.parts or ((held, layer.sha256),)
    ends = list(itertools.accumulate(size for size, _ in parts))
    digests, done = [hashlib.sha256() for _ in parts], [0] * len(parts)

    def blocks(number: int) -> collections.abc.Iterator[bytes]:
        at = ends[number] - parts[number][0]
        try:
            while block := os.pread(archive, min(_BLOCK, ends[number] - at), at):
                at += len(block)
                done[number] += len(block)
                digests[number].update(block)
                yield block
        except OSError as e:
            raise _unreadable(layer.path, e) from e

    contents = [blocks(number) for number in range(len(parts))]
    pools = concurrent.futures.ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), len(parts)))
    with _reporting(report, lambda: 100 * sum(done) // max(1, held)), pools as pool:
        failures = [_extract_part(folder, contents[0])]
        failures += pool.map(functools.partial(_extract_part, folder), contents[1:])
    if [digest.hexdigest() for digest in digests] != [
        sha256 for _, sha256 in parts
    ] or held != ends[-1]:
        raise exit_codes.FatalError(f"{layer.path} is damaged; remove it, then: {layer.remedy}")
    if why := next(filter(None, failures), ""):
        raise exit_codes.FatalError(f"{layer.path} could not be unpacked to {folder}: {why}")


@contextlib.contextmanager
def _reporting(
    path: str, percent: collections.abc.Callable[[], int]
) -> collections.abc.Generator[None]:
    """Write the percentage to a file every second, and remove it at the end, unless its name is empty."""
    import threading

    over = threading.Event()

    def write() -> None:
        while not over.wait(REPORT_S):
            with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
                file.write(f"{percent()}\n")
        with contextlib.suppress(OSError):
            os.unlink(path)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(REPORT_S)


def _extract_part(folder: str, content: collections.abc.Iterator[bytes]) -> str:
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


def _decompressed(blocks: collections.abc.Iterable[bytes]) -> collections.abc.Iterator[bytes]:
    """Decompress zstd frames with libzstd, for nodes without the program; dpkg and systemd depend on the library.

    Raises ValueError for another format, or a truncated archive. The calls are those of zstd.h, "Streaming
    decompression".
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
            lock = _open_lock(f"{cache}/{name}.lock")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(f"{cache}/{entry}")
                shutil.rmtree(f"{cache}/{name}", ignore_errors=True)
            finally:
                os.close(lock)

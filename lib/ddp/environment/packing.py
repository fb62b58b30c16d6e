"""An environment as one archive: a tar, compressed in parts that are packed and unpacked side by side.

Each part is a zstd frame; the first holds the folders, for each of the others needs them: two tars that both make one
fail (GNU tar 1.34). The frames one after the other are one tar, so that `zstd -dc FILE | tar -x` reads it, too.
"""

import concurrent.futures
import functools
import hashlib
import os
import pathlib
import stat
import subprocess
import tarfile
import tempfile
import typing

from ddp.workspace.files import RefusedError

PARTS = 16  # beside the folders; more would not help, for the greatest file, a library of CUDA, is in one
_BLOCK = 1 << 20

Part = tuple[int, str]  # bytes and SHA-256


def pack(folder: pathlib.Path, target: typing.IO[bytes], scratch: pathlib.Path) -> tuple[str, list[Part]]:
    """Write the files below `folder` to `target`; return the SHA-256 of all, and the parts. Raises RefusedError.

    What is compressed waits in `scratch` until `target`, which is on a shared filesystem, has taken it.
    """
    shares = _shares(folder)
    whole, parts = hashlib.sha256(), list[Part]()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compress = functools.partial(_compress, folder, scratch, last=len(shares) - 1)
        for packed in pool.map(compress, range(len(shares)), shares):
            digest = hashlib.sha256()
            with packed.open("rb") as source:
                while block := source.read(_BLOCK):
                    target.write(block)
                    whole.update(block)
                    digest.update(block)
            parts.append((packed.stat().st_size, digest.hexdigest()))
            packed.unlink()
    return whole.hexdigest(), parts


def _shares(folder: pathlib.Path) -> list[list[pathlib.Path]]:
    """Return the folders below a folder, and all else there in at most PARTS shares of about equal size."""
    found = sorted(folder.rglob("*"))
    folders = [path for path in found if path.is_dir() and not path.is_symlink()]
    sized = [(path.lstat().st_size, path) for path in sorted({*found} - {*folders})]
    shares: list[list[pathlib.Path]] = [[] for _ in range(PARTS)]
    bytes_of = [0] * PARTS
    for size, path in sorted(sized, reverse=True):
        least = bytes_of.index(min(bytes_of))
        shares[least].append(path)
        bytes_of[least] += size + tarfile.BLOCKSIZE
    return [folders, *(sorted(share) for share in shares if share)]


def _compress(
    folder: pathlib.Path, scratch: pathlib.Path, number: int, share: list[pathlib.Path], last: int
) -> pathlib.Path:
    """Write one share to a file in `scratch`, compressed; the last one with the end of the tar."""
    descriptor, name = tempfile.mkstemp(prefix=f"part-{number}-", dir=scratch)
    with (
        os.fdopen(descriptor, "wb") as file,
        tempfile.TemporaryFile(dir=scratch) as errors,
        subprocess.Popen(["zstd", "-q", "-c", "-3"], stdin=subprocess.PIPE, stdout=file, stderr=errors) as process,
    ):
        assert process.stdin is not None
        try:
            pipe = typing.cast("typing.IO[bytes]", _Pipe(process.stdin))
            archive = tarfile.TarFile(fileobj=pipe, mode="w", copybufsize=_BLOCK)
            for path in share:
                archive.add(path, f"./{path.relative_to(folder)}", recursive=False, filter=_anybodys)
            if number == last:
                archive.close()
            process.stdin.close()
        except BrokenPipeError:
            pass  # zstd has ended, and says why
        if process.wait():
            errors.seek(0)
            why = " ".join(errors.read().decode(errors="replace").split())[-300:]
            raise RefusedError(f"archiving the environment failed: {why or f'zstd exited {process.returncode}'}")
    return pathlib.Path(name)


class _Pipe:
    """A pipe, with the position that tarfile asks for."""

    def __init__(self, pipe: typing.IO[bytes]) -> None:
        self._pipe, self._position = pipe, 0

    def write(self, data: bytes) -> int:
        self._position += len(data)
        return self._pipe.write(data)

    def tell(self) -> int:
        return self._position


def _anybodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out the owner, another account on each host; let whoever unpacks a folder write into it."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if member.isdir():
        member.mode |= stat.S_IRWXU
    return member

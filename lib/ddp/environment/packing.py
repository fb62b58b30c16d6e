"""An environment as one archive: parts that are packed and unpacked side by side.

Each part is a zstd frame that holds a tar; the first has the folders, for each of the others needs them: two tars that
both make one fail (GNU tar 1.34). `zstd -dc FILE | tar -xi` reads all of them one after the other.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import os
import pathlib
import subprocess
import tempfile
import typing

from ddp.workspace.files import RefusedError

PARTS = 16  # beside the folders; more would not help, for the greatest file, a library of CUDA, is in one
_BLOCK = 1 << 20
_HEADER = 512  # of a member of a tar
_FOLDERS = 0  # the part that holds them

Part = tuple[int, str]  # bytes and SHA-256


def pack(folder: pathlib.Path, target: typing.IO[bytes], scratch: pathlib.Path) -> tuple[str, list[Part]]:
    """Write the files below `folder` to `target`; return the SHA-256 of all, and the parts. Raises RefusedError.

    What is compressed waits in `scratch` until `target`, which is on a shared filesystem, has taken it.
    """
    shares = _shares(folder)
    whole, parts = hashlib.sha256(), list[Part]()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compress = functools.partial(_compress, folder, scratch)
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


def _shares(folder: pathlib.Path) -> list[list[str]]:
    """Return the names of the folders below a folder, then of the files in at most PARTS shares of about equal size."""
    folders, sized = list[str](), list[tuple[int, str]]()
    _list(str(folder), "", folders, sized)
    shares: list[list[str]] = [[] for _ in range(PARTS)]
    bytes_of = [0] * PARTS
    for size, name in sorted(sized, reverse=True):
        least = bytes_of.index(min(bytes_of))
        shares[least].append(name)
        bytes_of[least] += size + _HEADER
    return [sorted(folders), *(sorted(share) for share in shares if share)]


def _list(path: str, below: str, folders: list[str], sized: list[tuple[int, str]]) -> None:
    """Add all that lies in a folder, each name after `below`. Paths of pathlib take five times as long."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(below + entry.name)
                _list(entry.path, f"{below}{entry.name}/", folders, sized)
            else:
                sized.append((entry.stat(follow_symlinks=False).st_size, below + entry.name))


def _compress(folder: pathlib.Path, scratch: pathlib.Path, number: int, share: list[str]) -> pathlib.Path:
    """Write one share to a file in `scratch`, compressed."""
    descriptor, name = tempfile.mkstemp(prefix=f"part-{number}-", dir=scratch)
    tar = ["tar", "--create", f"--directory={folder}", "--no-recursion", "--null", "--verbatim-files-from"]
    tar += ["--files-from=-", "--owner=0", "--group=0", "--numeric-owner"]  # it is another account on each host
    if number == _FOLDERS:
        tar += ["--mode=u+rwx"]  # whoever unpacks them writes into them
    with (
        os.fdopen(descriptor, "wb") as file,
        tempfile.TemporaryFile(dir=scratch) as errors,
        subprocess.Popen(tar, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as packer,
        subprocess.Popen(["zstd", "-q", "-c", "-3"], stdin=packer.stdout, stdout=file, stderr=errors) as compressor,
    ):
        assert packer.stdin is not None
        assert packer.stdout is not None
        packer.stdout.close()  # zstd's alone: where that ends early, tar does too
        with contextlib.suppress(BrokenPipeError):  # tar has ended, and says why
            packer.stdin.writelines(os.fsencode(f"./{name}\0") for name in share)
            packer.stdin.close()
        codes = (packer.wait(), compressor.wait())
        if any(codes):
            errors.seek(0)
            why = " ".join(errors.read().decode(errors="replace").split())[-300:]
            raise RefusedError(f"archiving the environment failed: {why or f'tar exited {codes[0]}, zstd {codes[1]}'}")
    return pathlib.Path(name)

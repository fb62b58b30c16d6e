"""An environment as one archive: parts that nodes unpack side by side.

Each part is a zstd frame with a tar; the first has the folders, which each of the others needs: two
tars that both make one fail (GNU tar 1.34). The second has the scripts and the packages' metadata,
which a layer is resolved from. `zstd -dc FILE | tar -xi` reads all of them one after the other.
"""

import hashlib
import os
import pathlib
import subprocess
import tempfile
import typing

from ddp.host.files import RefusedError

PARTS = (
    16  # of the other files; more would not help: the largest file, a library of CUDA, is in one
)
PART_BYTES = 32 << 20  # a small environment has fewer parts: each costs two processes

Part = tuple[int, str]  # bytes and SHA-256


def pack(folder: pathlib.Path, target: typing.IO[bytes]) -> tuple[str, list[Part]]:
    """Write the files below `folder` to `target`; return the SHA-256 of all, and the parts.

    Raises RefusedError.
    """
    names = sorted(folder.rglob("*"), key=lambda path: (path.lstat().st_size, path), reverse=True)
    folders = sorted(path for path in names if path.is_dir() and not path.is_symlink())
    files = [path for path in names if path.is_symlink() or not path.is_dir()]
    about = [path for path in files if _is_metadata(path, folder)]
    files = [path for path in files if not _is_metadata(path, folder)]
    num_parts = min(PARTS, 1 + sum(path.lstat().st_size for path in files) // PART_BYTES)
    whole, parts = hashlib.sha256(), list[Part]()
    for share in [folders, about, *(files[number::num_parts] for number in range(num_parts))]:
        digest, size = hashlib.sha256(), 0
        modes = (
            ["--mode=u+rwx"] if share is folders else []
        )  # the account that unpacks the folders writes to them
        for block in _packed(folder, share, modes):
            target.write(block)
            whole.update(block)
            digest.update(block)
            size += len(block)
        parts.append((size, digest.hexdigest()))
    return whole.hexdigest(), parts


def _is_metadata(path: pathlib.Path, folder: pathlib.Path) -> bool:
    if path.parent == folder / "bin":
        return not path.is_symlink() and path.lstat().st_size < 1 << 16  # a script
    return any(
        name.endswith(".dist-info") for name in path.relative_to(folder).parts[:4]
    )  # not vendored ones


def _packed(
    folder: pathlib.Path, share: list[pathlib.Path], modes: list[str]
) -> typing.Iterator[bytes]:
    """Yield a part in blocks. Raises RefusedError."""
    argv = [
        "tar",
        "-c",
        "-I",
        "zstd -q -3 -T0",
        f"--directory={folder}",
        "--no-recursion",
        "--null",
        *modes,
    ]
    argv += ["--verbatim-files-from", "--files-from=-", "--owner=0", "--group=0", "--numeric-owner"]
    with tempfile.TemporaryFile() as names, tempfile.TemporaryFile() as errors:
        names.write(
            b"".join(b"./" + os.fsencode(path.relative_to(folder)) + b"\0" for path in share)
        )
        names.seek(0)
        with subprocess.Popen(argv, stdin=names, stdout=subprocess.PIPE, stderr=errors) as tar:
            assert tar.stdout is not None
            while block := tar.stdout.read(1 << 20):
                yield block
        if tar.returncode:
            errors.seek(0)
            why = " ".join(errors.read().decode(errors="replace").split())[-300:]
            raise RefusedError(
                f"archiving the environment failed: {why or f'tar exited {tar.returncode}'}"
            )

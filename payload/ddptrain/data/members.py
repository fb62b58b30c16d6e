"""Files as bytes: decompressed if necessary, and the members of tar and zip archives.

All are read to the end, so that checksums are compared and trailing data does not go unseen.
"""

import collections.abc
import contextlib
import dataclasses
import gzip
import io
import pathlib
import re
import struct
import tarfile
import typing
import zipfile
import zlib

from ddptrain.data import encodings, names
from ddptrain.ground import errors

_CHUNK_BYTES = 64 << 10
_HEAD_BYTES = 512  # a tar's first header
_TAR_MAGIC = slice(257, 262)  # of that header: POSIX's ustar
# How compressed files begin: RFC 1952, bzip2's manual, RFC 8878 (a frame, or one to be skipped).
_BEGINNINGS = {
    ".gz": re.compile(rb"\x1f\x8b"),
    ".bz2": re.compile(rb"BZh"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
_PYARROW_CODECS = {".bz2": "bz2", ".zst": "zstd"}
# libzstd's words for a frame of `zstd --long=31`: its default limit is a window of 128 MiB.
_LARGE_WINDOW = "requires too much memory"

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"

# Raised by the readers for damaged files; RuntimeError also for encryption and endless nesting.
DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    RuntimeError,
    struct.error,
    zlib.error,
    tarfile.TarError,
    zipfile.BadZipFile,
)

_HeaderError = tarfile.HeaderError  # where `tarfile` is an argument


@dataclasses.dataclass(frozen=True)
class Member:
    """A file of an archive, whose content can be read until the next one is asked for."""

    path: pathlib.PurePath
    size_bytes: int
    content: typing.IO[bytes] | None  # a link has none


Members = collections.abc.Iterator[Member]
Lines = collections.abc.Iterator[tuple[int, bytes]]  # a line's offset, and its bytes


def remedy(damage: BaseException) -> str:
    """Return the remedy for a file whose reading raised one of DAMAGE."""
    if _LARGE_WINDOW in str(damage):
        return "its window is larger than 128 MiB: decompress it first with zstd -d --long=31"
    return "repair or remove the file"


@contextlib.contextmanager
def opened(path: pathlib.Path) -> collections.abc.Generator[typing.IO[bytes]]:
    """Open a file for reading in order, decompressed. Reading raises one of DAMAGE.

    Raises UserError if it stands for a file that Git LFS has not fetched.
    """
    with path.open("rb") as file:
        if file.peek(len(_LFS_POINTER)).startswith(_LFS_POINTER):
            what = f"{path} is a Git LFS pointer, not the file"
            raise errors.UserError(f"{what}: fetch it with git lfs pull, or remove it")
        yield decompressed(file, names.parse(path.name).compression, path)


def decompressed(file: typing.IO[bytes], compression: str, where: object) -> typing.IO[bytes]:
    """Return the content of a file whose name ends in `compression`, or in nothing of the kind.

    A browser may have decompressed it already: then it is read as it is. Raises one of DAMAGE.
    """
    if not compression:
        return file

    head = file.read(_HEAD_BYTES)
    file.seek(0)
    if len(head) < 4:
        raise EOFError("it ends too early")
    if not _BEGINNINGS[compression].match(head):
        if head[_TAR_MAGIC] == b"ustar" or encodings.is_text(head):
            return file
        raise ValueError(f"it is neither {compression} nor text")

    if compression == ".gz":
        return typing.cast(typing.IO[bytes], gzip.GzipFile(fileobj=file))
    pyarrow = errors.need("pyarrow", where)
    stream = pyarrow.CompressedInputStream(file, _PYARROW_CODECS[compression])
    return io.BufferedReader(stream, _CHUNK_BYTES)


def lines(file: typing.IO[bytes], begin: int, end: int | None) -> Lines:
    """Yield the offset and the bytes of each line that starts inside a range."""
    offset = begin
    if begin:
        file.seek(begin - 1)
        offset = begin - 1 + len(file.readline())  # a line that began before is of the range before
    for line in file:
        if end is not None and offset >= end:
            return
        yield offset, line
        offset += len(line)


class _Header(tarfile.TarInfo):
    """A member's header. tarfile would take a damaged one for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> typing.Self:
        try:
            return super().fromtarfile(tarfile)
        except _HeaderError as e:
            if "EOF" in type(e).__name__:
                raise
            what = f"no member and no end of the archive at byte {tarfile.offset}"
            raise EOFError(f"{what}: {e}") from e


def of_tar(file: typing.IO[bytes]) -> Members:
    """Yield the files and links of a tar archive in order. Raises one of DAMAGE."""
    with tarfile.open(fileobj=file, mode="r|", tarinfo=_Header, errors="replace") as archive:
        for info in archive:
            if info.isdir():
                continue
            content = archive.extractfile(info) if info.isfile() else None
            yield Member(pathlib.PurePath(info.name), info.size, content)

        rest: typing.Any = archive.fileobj
        while block := rest.read(_CHUNK_BYTES):
            if block.strip(b"\0"):
                raise tarfile.ReadError("more data follows the end of the archive")


def of_zip(file: typing.IO[bytes]) -> Members:
    """Yield the files of a ZIP archive in order. Raises one of DAMAGE."""
    with zipfile.ZipFile(file) as archive:
        _check_directory(file, archive)
        for info in archive.infolist():
            # Also of a folder: opening it compares the two names that the archive has.
            with archive.open(info) as content:
                if not info.is_dir() or info.file_size:
                    yield Member(pathlib.PurePath(info.filename), info.file_size, content)


def _check_directory(file: typing.IO[bytes], archive: zipfile.ZipFile) -> None:
    """Raise BadZipFile unless the directory is as long as the last record says: APPNOTE, 4.3.16."""
    file.seek(-12 - len(archive.comment), io.SEEK_END)
    count = int.from_bytes(file.read(2), "little")
    if count not in (len(archive.infolist()), 0xFFFF):
        raise zipfile.BadZipFile("its directory has another length than it records")

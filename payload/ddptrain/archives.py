"""Compressed files and archives, read to their end: a checksum that nobody compares finds no damage.

Contents of all members of a compressed file follow each other; zeros behind a member are padding, anything else there
must be another member.
"""

import bz2
import collections.abc
import importlib
import io
import lzma
import pathlib
import struct
import tarfile
import typing
import zipfile
import zlib

from ddptrain import errors, markers

_CHUNK_BYTES = 64 << 10
_ALIASES = {".tgz": ".gz", ".txz": ".xz", ".tbz2": ".bz2", ".tbz": ".bz2", ".tzst": ".zst"}  # of .tar.gz ...
_ZSTD_CHECKSUM = 4  # this bit of a frame's fifth byte: RFC 8878, section 3.1.1.1.1
# What the readers raise for damaged files; RuntimeError and NotImplementedError for encryption or a compression that
# zipfile does not know. UserError is none of these.
DAMAGE = (OSError, EOFError, ValueError, OverflowError, RuntimeError, struct.error, zlib.error, lzma.LZMAError)
DAMAGE += (tarfile.TarError, zipfile.BadZipFile)

Member = tuple[str, int, typing.IO[bytes] | None]  # name, size in bytes, contents, which a link has not


class _Decompressor(typing.Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


_DECOMPRESSORS: dict[str, collections.abc.Callable[[], _Decompressor]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".bz2": bz2.BZ2Decompressor,
}
PACKED = frozenset({*_DECOMPRESSORS, ".zst"})


def split_name(name: str) -> tuple[str, str]:
    """Return a file's name without its compression, and that: `a.tgz` gives `a.tar` and `.gz`."""
    path = pathlib.PurePath(name)
    suffix = path.suffix.lower()
    if suffix in _ALIASES:
        return f"{path.stem}.tar", _ALIASES[suffix]
    return (path.stem, suffix) if suffix in PACKED else (path.name, "")


def need_pyarrow(where: object) -> typing.Any:
    """Return the module pyarrow. Raises UserError naming the file that needs it."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError as e:
        text = f"{where} needs the package pyarrow, which is not installed: pip install pyarrow"
        raise errors.UserError(text) from e


def opened(path: pathlib.Path) -> io.BufferedReader:
    """Open a file for reading, decompressed as its name says."""
    file = path.open("rb")
    packing = split_name(path.name)[1]
    return unpacked(file, packing, str(path)) if packing else file


def unpacked(file: typing.BinaryIO, packing: str, where: str) -> io.BufferedReader:
    """Return the contents of a compressed file, to be read in order. Reading raises one of DAMAGE."""
    chunks = _zstd(file, where) if packing == ".zst" else _members(file, _DECOMPRESSORS[packing])
    return io.BufferedReader(_Stream(file, chunks), _CHUNK_BYTES)


class _Stream(io.RawIOBase):
    """Chunks of bytes as a file that can only be read forwards."""

    def __init__(self, file: typing.BinaryIO, chunks: collections.abc.Iterator[bytes]) -> None:
        self._file, self._chunks, self._held, self._at = file, chunks, memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence != io.SEEK_SET or offset < self._at:
            raise io.UnsupportedOperation("only forwards")
        while self._at < offset and self.read(min(offset - self._at, _CHUNK_BYTES)):
            pass
        return self._at

    def readinto(self, buffer: typing.Any, /) -> int:
        while not self._held and (chunk := next(self._chunks, None)) is not None:
            self._held = memoryview(chunk)
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _members(
    file: typing.BinaryIO, make: collections.abc.Callable[[], _Decompressor]
) -> collections.abc.Iterator[bytes]:
    data, member = b"", None
    while data or member is None:
        member = make()
        while not member.eof:
            data = data or file.read(_CHUNK_BYTES)
            if not data:
                raise EOFError("it ends too early")
            yield member.decompress(data)
            data = member.unused_data
        while not (data := data.lstrip(b"\0")) and (data := file.read(_CHUNK_BYTES)):
            pass


def _zstd(file: typing.BinaryIO, where: str) -> collections.abc.Iterator[bytes]:
    head = file.read(5)
    if len(head) == 5 and not head[4] & _ZSTD_CHECKSUM:
        markers.warn("DATA", f"{where} has no checksum (zstd --check adds one): damage in it may not be found")
    file.seek(0)
    if not head:
        raise EOFError("it is empty")
    stream = need_pyarrow(where).CompressedInputStream(file, "zstd")
    while chunk := stream.read(_CHUNK_BYTES):
        yield chunk


class _Header(tarfile.TarInfo):
    """A member's header. Where one is damaged or missing, tarfile would take the archive to end there."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> typing.Self:
        try:
            return super().fromtarfile(tarfile)
        except _NO_HEADER as e:
            raise EOFError(f"no member and no end of the archive at byte {tarfile.offset}: {e}") from e


_NO_HEADER = (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError, tarfile.InvalidHeaderError)


def tar_members(file: typing.BinaryIO) -> collections.abc.Iterator[Member]:
    """Yield the files and links of a tar archive in order. Raises one of DAMAGE."""
    with tarfile.open(fileobj=file, mode="r:", tarinfo=_Header, errors="replace") as archive:
        for member in archive:
            if not member.isdir():
                yield member.name, member.size, archive.extractfile(member) if member.isfile() else None
        while block := file.read(_CHUNK_BYTES):
            if block.strip(b"\0"):
                raise tarfile.ReadError("more data follows the end of the archive")


def zip_members(file: typing.BinaryIO) -> collections.abc.Iterator[Member]:
    """Yield the files of a ZIP archive in order. Raises one of DAMAGE."""
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            with archive.open(member) as contents:  # of each: it compares the two names that the archive has
                if not member.is_dir() or member.file_size:
                    yield member.filename, member.file_size, contents

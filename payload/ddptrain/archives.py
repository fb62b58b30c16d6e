"""Files as bytes and as text: archives and compressed files read to their end, encodings by their mark.

A checksum that nobody compares finds no damage. Behind a member of a compressed file only zeros or another may follow.
"""

import bz2
import collections.abc
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
_DECOMPRESSORS: dict[str, collections.abc.Callable[[], typing.Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".bz2": bz2.BZ2Decompressor,
}
PACKED = frozenset({*_DECOMPRESSORS, ".zst"})
_ZSTD_CHECKSUM = 4  # this bit of a frame's fifth byte: RFC 8878, section 3.1.1.1.1
_MARKS = {  # the longest first
    **{b"\xff\xfe\0\0": "utf-32-le", b"\0\0\xfe\xff": "utf-32-be", b"\xef\xbb\xbf": "utf-8"},
    **{b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"},
}
_NO_TEXT = {  # ASCII in a file that is named as text, and none of it is the text
    b"version https://git-lfs.github.com/spec/": "a Git LFS pointer (git lfs pull fetches the file)",
    b"{\\rtf": "RTF",
    b"%PDF-": "a PDF",
}
# What the readers raise for damaged files; RuntimeError also for encryption, and for nesting without end
DAMAGE = (
    *(OSError, EOFError, ValueError, OverflowError, RuntimeError, struct.error, zlib.error, lzma.LZMAError),
    *(tarfile.TarError, zipfile.BadZipFile),
)

_HeaderError = tarfile.HeaderError  # where `tarfile` is an argument
Member = tuple[str, int, typing.IO[bytes] | None]  # name, size in bytes, contents, which a link has not


def split_name(name: str) -> tuple[str, str, str]:
    """Return a file's bare name, its suffix and that of its compression: `a.tgz` gives `a`, `.tar` and `.gz`."""
    path = pathlib.PurePath(name)
    packing = path.suffix.lower()
    if packing in _ALIASES:
        return path.stem, ".tar", _ALIASES[packing]
    inner = pathlib.PurePath(path.stem) if packing in PACKED else path
    return inner.stem, inner.suffix.lower(), packing if packing in PACKED else ""


def opened(path: pathlib.Path) -> io.BufferedReader:
    """Open a file for reading, decompressed as its name says."""
    file, packing = path.open("rb"), split_name(path.name)[2]
    return unpacked(file, packing, path) if packing else file


def unpacked(file: typing.IO[bytes], packing: str, where: object) -> io.BufferedReader:
    """Return the contents of a compressed file, to be read in order. Reading raises one of DAMAGE."""
    chunks = _zstd(file, where) if packing == ".zst" else _members(file, _DECOMPRESSORS[packing])
    return io.BufferedReader(_Stream(file, chunks), _CHUNK_BYTES)


class _Stream(io.RawIOBase):
    def __init__(self, file: typing.IO[bytes], chunks: collections.abc.Iterator[bytes]) -> None:
        self._file, self._chunks, self._held = file, chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: typing.Any, /) -> int:
        while not self._held and (chunk := next(self._chunks, None)) is not None:
            self._held = memoryview(chunk)
        count = min(len(buffer), len(self._held))
        buffer[:count], self._held = self._held[:count], self._held[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _members(file: typing.IO[bytes], make: collections.abc.Callable[[], typing.Any]) -> collections.abc.Iterator[bytes]:
    data, member = b"", None
    while data or member is None:
        member = make()
        while not member.eof:
            if not (data := data or file.read(_CHUNK_BYTES)):
                raise EOFError("it ends too early")
            yield member.decompress(data)
            data = member.unused_data
        while not (data := data.lstrip(b"\0")) and (data := file.read(_CHUNK_BYTES)):
            pass


def _zstd(file: typing.Any, where: object) -> collections.abc.Iterator[bytes]:
    if len(head := file.peek(5)) < 5:
        raise EOFError("it ends too early")
    if not head[4] & _ZSTD_CHECKSUM:
        markers.warn("DATA", f"{where} has no checksum, which zstd adds by default: damage may not show")
    stream = errors.need("pyarrow", where).CompressedInputStream(file, "zstd")
    while chunk := stream.read(_CHUNK_BYTES):
        yield chunk


class _Header(tarfile.TarInfo):
    """A member's header. Where one is damaged or missing, tarfile would take the archive to end there."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> typing.Self:
        try:
            return super().fromtarfile(tarfile)
        except _HeaderError as e:
            if "EOF" in type(e).__name__:
                raise
            raise EOFError(f"no member and no end of the archive at byte {tarfile.offset}: {e}") from e


def tar_members(file: typing.IO[bytes]) -> collections.abc.Iterator[Member]:
    """Yield the files and links of a tar archive in order. Raises one of DAMAGE."""
    with tarfile.open(fileobj=file, mode="r|", tarinfo=_Header, errors="replace") as archive:
        for member in archive:
            if not member.isdir():
                yield member.name, member.size, archive.extractfile(member) if member.isfile() else None
        rest: typing.Any = archive.fileobj
        while block := rest.read(_CHUNK_BYTES):
            if block.strip(b"\0"):
                raise tarfile.ReadError("more data follows the end of the archive")


def zip_members(file: typing.IO[bytes]) -> collections.abc.Iterator[Member]:
    """Yield the files of a ZIP archive in order. Raises one of DAMAGE."""
    with zipfile.ZipFile(file) as archive:
        file.seek(-12 - len(archive.comment), io.SEEK_END)  # in the record that ends the file: APPNOTE.TXT, 4.3.16
        if int.from_bytes(file.read(2), "little") not in (len(archive.infolist()), 0xFFFF):
            raise zipfile.BadZipFile("its directory has another length than it records")
        for member in archive.infolist():
            with archive.open(member) as contents:  # of each: it compares the two names that the archive has
                if not member.is_dir() or member.file_size:
                    yield member.filename, member.file_size, contents


def encoding_of(data: bytes) -> tuple[str, bytes]:
    """Return the encoding of text that begins so, and its byte order mark."""
    return next(((encoding, mark) for mark, encoding in _MARKS.items() if data.startswith(mark)), ("utf-8", b""))


def decoded(data: bytes, where: object, how: str, offset: int = 0) -> str:
    """Return the text in a file's bytes from an offset. Raises UserError naming the offset of what is no text."""
    encoding, mark = ("utf-8", b"") if offset else encoding_of(data)
    if not offset and (form := next((form for start, form in _NO_TEXT.items() if data.startswith(start)), "")):
        raise errors.UserError(f"{where} is {form}, not plain text; convert it, or remove it")
    try:
        text = data[len(mark) :].decode(encoding, how)
        if how != "strict" or (zero := text.find("\0")) < 0:
            return text
        at = len(text[:zero].encode(encoding))
    except UnicodeDecodeError as e:
        at = e.start
    what = f"{where} is no text in {encoding} at byte {offset + len(mark) + at}"
    raise errors.UserError(f"{what}; convert it to UTF-8, remove it, or use --errors replace")

"""Parquet and Arrow files: the columns that `records` knows, row by row."""

import collections.abc
import importlib
import io
import pathlib
import typing

from ddptrain import archives, errors, records

_BATCH_ROWS = 1024
# An Arrow stream ends with these, a file of the same batches with its magic: Arrow's columnar format, "IPC".
_ARROW_MAGIC, _ARROW_ENDS = b"ARROW1", (b"\xff\xff\xff\xff\0\0\0\0", b"ARROW1")

Share = collections.abc.Callable[[int], tuple[int, int]]  # (first, last) of the so many that a file has


def parquet(path: pathlib.Path, share: Share) -> collections.abc.Iterator[records.Document]:
    """Yield the documents of a share of the row groups. Raises UserError, or one of archives.DAMAGE."""
    pyarrow = archives.need_pyarrow(path)
    try:
        reader: typing.Any = importlib.import_module("pyarrow.parquet")
        with reader.ParquetFile(path, page_checksum_verification=True) as file:
            columns = _columns(path, file.schema_arrow.names)
            first, last = share(file.num_row_groups)
            row = sum(file.metadata.row_group(group).num_rows for group in range(first))
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=range(first, last), columns=columns):
                yield from _rows(batch, row, path)
                row += batch.num_rows
    except pyarrow.ArrowException as e:
        raise ValueError(str(e)) from e


def arrow(path: pathlib.Path, begin: int, end: int) -> collections.abc.Iterator[records.Document]:
    """Yield the documents of the batches that begin in a range of bytes. Raises as `parquet` does."""
    pyarrow = archives.need_pyarrow(path)
    try:
        with pyarrow.memory_map(str(path)) as file:
            file.seek(-min(file.size(), 8), io.SEEK_END)
            if not file.read().endswith(_ARROW_ENDS):
                raise EOFError("it ends too early")
            file.seek(0)
            file.seek(8 if file.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC else 0)
            stream, row, at = pyarrow.ipc.open_stream(file), 0, file.tell()
            columns = _columns(path, stream.schema.names)
            for batch in stream:
                if begin <= at < end:
                    batch.validate(full=True)
                    yield from _rows(batch.select(columns), row, path)
                row, at = row + batch.num_rows, file.tell()
    except pyarrow.ArrowException as e:
        raise ValueError(str(e)) from e


def _columns(path: pathlib.Path, names: list[str]) -> list[str]:
    found = [name for name in names if name in records.COLUMNS]
    if not found:
        text = f"{path} has the columns {', '.join(names) or 'none'}"
        raise errors.UserError(f"{text}; it needs {records.SHAPES}: rename or write them")
    return found


def _rows(batch: typing.Any, first: int, path: pathlib.Path) -> collections.abc.Iterator[records.Document]:
    for number, row in enumerate(batch.to_pylist(), start=first):
        held = {name: value for name, value in row.items() if value is not None}
        yield records.from_object(held, f"{path} row {number}")

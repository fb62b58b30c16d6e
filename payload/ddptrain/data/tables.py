"""Rows of Parquet and Arrow files."""

import collections.abc
import pathlib
import typing

from ddptrain.data import texts, unread
from ddptrain.ground import errors

_BATCH_ROWS = 1024
# An Arrow stream ends with these, a file with its magic: Arrow's columnar format, "IPC".
_ARROW_MAGIC = b"ARROW1"
_ARROW_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", _ARROW_MAGIC)

Share = collections.abc.Callable[[int], tuple[int, int]]  # of n: the first and the last, excluded
Rows = collections.abc.Iterator[tuple[str, object]]  # a row's place, for messages, and its columns
Batches = collections.abc.Iterator[tuple[int, typing.Any]]  # the first row's number, and a batch


def rows(path: pathlib.Path, kind: str, share: Share, how: str, left_out: unread.Unread) -> Rows:
    """Yield the place of each row and its columns with text, of a share of a table.

    Counts the values of the other columns, whose size is not known.

    Raises UserError, ValueError or OSError.
    """
    pyarrow = errors.need("pyarrow", path)
    open_table = _parquet if kind == "parquet" else _arrow
    batches = open_table(path, share, left_out)
    try:
        for first, batch in batches:
            for number, row in enumerate(batch.to_pylist(), start=first):
                where = f"{path} row {number}"
                yield where, _decoded(row, where, how)
    except pyarrow.ArrowException as e:
        raise ValueError(str(e)) from e


def has_texts(path: pathlib.Path) -> bool:
    """Return whether a Parquet file has a column that is read. Raises ValueError or OSError."""
    if path.suffix != ".parquet":
        return True
    pyarrow = errors.need("pyarrow.parquet", path)
    try:
        schema = pyarrow.read_schema(path)
    except errors.need("pyarrow", path).ArrowException as e:
        raise ValueError(str(e)) from e
    return any(name in texts.COLUMNS for name in schema.names)


def _parquet(path: pathlib.Path, share: Share, left_out: unread.Unread) -> Batches:
    parquet = errors.need("pyarrow.parquet", path)
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        columns = _columns(path, file.schema_arrow)
        begin, end = share(file.num_row_groups)
        row = sum(file.metadata.row_group(group).num_rows for group in range(begin))

        groups = range(begin, end)
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns):
            yield row, _with_bytes(batch)
            row += batch.num_rows
            _count_others(file.schema_arrow, batch.num_rows, left_out)


def _arrow(path: pathlib.Path, share: Share, left_out: unread.Unread) -> Batches:
    pyarrow = errors.need("pyarrow", path)
    with pyarrow.memory_map(str(path)) as file:
        file.seek(max(0, file.size() - 8))
        if not file.read().endswith(_ARROW_ENDS):
            raise EOFError("it ends too early")

        file.seek(0)
        is_file = file.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC  # then a stream follows at byte 8
        file.seek(8 if is_file else 0)
        stream = pyarrow.ipc.open_stream(file)
        columns = _columns(path, stream.schema)

        begin, end = share(file.size())
        row = 0
        at = file.tell()
        for batch in stream:
            if begin <= at < end:
                chosen = _with_bytes(batch.select(columns))
                chosen.validate(full=True)
                yield row, chosen
                _count_others(stream.schema, batch.num_rows, left_out)
            row += batch.num_rows
            at = file.tell()


def _columns(path: pathlib.Path, schema: typing.Any) -> list[str]:
    """Return the names of the columns that are read. Raises UserError."""
    found = [name for name in schema.names if name in texts.COLUMNS]
    if not found:
        what = f"{path} has the columns {', '.join(schema.names) or 'none'}"
        raise errors.UserError(f"{what}; it needs {texts.SHAPES}: rename them")

    for name in found:
        kind = schema.field(name).type
        if name in texts.CHATS and not _may_hold_messages(kind):
            what = f'{path}: the column "{name}" has the type {kind}'
            remedy = "it needs a list of messages (role, content), or that as JSON text"
            raise errors.UserError(f"{what}; {remedy}")
    return found


def _may_hold_messages(kind: typing.Any) -> bool:
    """Return whether a column is a list of structs, a struct of lists, JSON text, or all null."""
    types = errors.need("pyarrow", "a table").types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if _is_list(types, kind) or types.is_fixed_size_list(kind):
        return types.is_struct(kind.value_type) or types.is_null(kind.value_type)
    if types.is_struct(kind):
        return all(_is_list(types, field.type) for field in kind)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return is_text or types.is_null(kind)


def _is_list(types: typing.Any, kind: typing.Any) -> bool:
    return types.is_list(kind) or types.is_large_list(kind)


def _count_others(schema: typing.Any, num_rows: int, left_out: unread.Unread) -> None:
    for name in schema.names:
        if name not in texts.COLUMNS:
            left_out.add(f"column {name}", 0, num_rows)


def _with_bytes(batch: typing.Any) -> typing.Any:
    """Return a batch with bytes in place of texts: invalid UTF-8 would make it unreadable."""
    pyarrow = errors.need("pyarrow", "a table")
    fields = [field.with_type(_as_bytes(pyarrow, field.type)) for field in batch.schema]
    return batch.cast(pyarrow.schema(fields))


def _as_bytes(pyarrow: typing.Any, kind: typing.Any) -> typing.Any:
    """Return a column's type with bytes in place of texts."""
    types = pyarrow.types
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_as_bytes(pyarrow, field.type)) for field in kind])
    if _is_list(types, kind):
        return pyarrow.large_list(_as_bytes(pyarrow, kind.value_type))
    if types.is_string(kind) or types.is_large_string(kind):
        return pyarrow.large_binary()
    return kind


def _decoded(value: object, where: str, how: str) -> object:
    """Return a value with texts for bytes. Raises UserError."""
    if isinstance(value, list):
        return [_decoded(one, where, how) for one in typing.cast(list[object], value)]
    if isinstance(value, dict):
        entries = typing.cast(texts.Record, value)
        return {name: _decoded(one, where, how) for name, one in entries.items()}
    if not isinstance(value, bytes):
        return value

    try:
        return value.decode("utf-8", how)
    except UnicodeDecodeError as e:
        what = f"{where} is not text in utf-8 at byte {e.start}"
        raise errors.UserError(f"{what}; convert it to UTF-8, or use --errors replace") from e

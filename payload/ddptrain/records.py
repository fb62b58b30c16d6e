"""Records and rows of tables to documents: their text, and which of it a model learns."""

import collections.abc
import dataclasses
import json
import pathlib
import re
import typing

from ddptrain import errors

COLUMNS = ("messages", "conversations", "system", "prompt", "completion", "instruction", "input", "output", "text")
SHAPES = '"text", "prompt" and "completion", "messages", "conversations", or "instruction" and "output"'
ASSISTANT = "assistant"
_ROLES = {"human": "user", "gpt": ASSISTANT}  # ShareGPT's names
_SURROGATE = re.compile("[\ud800-\udfff]")
# An Arrow stream ends with these, a file of the same batches with its magic: Arrow's columnar format, "IPC".
_ARROW_MAGIC, _ARROW_ENDS = b"ARROW1", (b"\xff\xff\xff\xff\0\0\0\0", b"ARROW1")

Record = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Text of a document, without surrogates; `learned` is false for what a model reads but need not produce."""

    text: str
    learned: bool = True
    role: str = ""  # of the message whose content this is

    def __post_init__(self) -> None:
        if not self.text.isascii():
            object.__setattr__(self, "text", _SURROGATE.sub("\ufffd", self.text))


Document = tuple[Segment, ...]


def parse(data: bytes, where: str, how: str = "strict") -> object:
    """Return the value of JSON text in UTF-8. Raises UserError with `where`."""
    try:
        return json.loads(data.decode("utf-8-sig", how))
    except (ValueError, RecursionError) as e:
        hint = "; use --errors replace" if isinstance(e, UnicodeDecodeError) else ""
        raise errors.UserError(f"{where} is not JSON: {e}{hint}") from e


def from_object(value: object, where: str) -> Document:
    """Return the document in a JSON object or row of any shape, empty if all is null. Raises UserError with `where`."""
    record = typing.cast(Record, value) if isinstance(value, dict) else {}
    if {type(record[name]) for name in COLUMNS if name in record} == {type(None)}:
        return ()
    for messages in (record.get("messages"), record.get("conversations")):
        if isinstance(messages, list):
            return _chat(record, typing.cast(list[object], messages), where)
    match record:
        case {"prompt": str(prompt), "completion": str(completion)}:
            return (Segment(prompt, learned=False), Segment(completion))
        case {"prompt": [*turns], "completion": [*answer]}:  # TRL's: of the turns before nothing is learned
            asked = _chat(record, turns, where)
            return (*(dataclasses.replace(part, learned=False) for part in asked), *_chat({}, answer, where))
        case {"instruction": str(instruction), "output": str(output)}:  # Alpaca's; its "text" repeats them
            more: object = record.get("input")
            asked = f"{instruction}\n{more}" if isinstance(more, str) and more else instruction
            return _chat(record, [{"from": "human", "value": asked}, {"from": "gpt", "value": output}], where)
        case {"text": str(text)}:
            return (Segment(text),)
        case _:
            raise errors.UserError(f"{where}: expected an object with {SHAPES}")


def _chat(record: Record, messages: list[object], where: str) -> Document:
    if isinstance(system := record.get("system"), str) and system:
        messages = [{"role": "system", "content": system}, *messages]
    return tuple(segment for message in messages for segment in _message(message, where))


def _message(message: object, where: str) -> tuple[Segment, Segment]:
    match message:
        case {"role": str(role), "content": object() as content} | {"from": str(role), "value": object() as content}:
            role, given = _ROLES.get(role, role), typing.cast(Record, message)
        case _:
            raise errors.UserError(f'{where}: each message needs "role" and "content", or "from" and "value"')
    weight, train = given.get("weight"), given.get("train")
    if weight not in (None, 0, 1) or not isinstance(train, bool | None) or given.get("train_detail"):
        rule = '"weight" is 0 or 1, and "train" is true or false'
        raise errors.UserError(f'{where}: of a message {rule}, not {weight!r}, {train!r}; "train_detail" is not read')
    learned = weight != 0 and (role == ASSISTANT if train is None else train)
    text = "".join(_parts(content, where)) + "\n"
    learned = learned and not text.isspace()  # an empty answer teaches nothing
    return Segment(f"<{role}>\n", learned=False), Segment(text, learned, role)


def _parts(content: object, where: str) -> collections.abc.Iterator[str]:
    """Yield the texts of a message's content: a text, or a list of parts that are text. Raises UserError."""
    for part in typing.cast(list[object], content) if isinstance(content, list) else [content]:
        match part:
            case str(text) | {"type": "text", "text": str(text)}:
                yield text
            case _:
                kind = typing.cast(Record, part).get("type") if isinstance(part, dict) else part
                what = f"{where}: a message's content is {kind!r:.60}"
                raise errors.UserError(f"{what}; only text is read: remove the record")


def from_table(
    path: pathlib.Path, kind: str, share: collections.abc.Callable[[int], tuple[int, int]], how: str
) -> collections.abc.Iterator[Document]:
    """Yield the documents of a share of a Parquet or Arrow file. Raises UserError, ValueError or OSError."""
    pyarrow = errors.need("pyarrow", path)
    try:
        for row, batch in (_parquet if kind == "parquet" else _arrow)(path, share):
            for number, values in enumerate(batch.to_pylist(), start=row):
                where = f"{path} row {number}"
                held = {name: _text(value, where, how) for name, value in values.items() if value is not None}
                yield from_object(held or values, where)
    except pyarrow.ArrowException as e:
        raise ValueError(str(e)) from e


def _parquet(path: pathlib.Path, share: typing.Any) -> collections.abc.Iterator[tuple[int, typing.Any]]:
    parquet = errors.need("pyarrow.parquet", path)
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        columns = _columns(path, file.schema_arrow.names)
        first, last = share(file.num_row_groups)
        row = sum(file.metadata.row_group(group).num_rows for group in range(first))
        for batch in file.iter_batches(1024, row_groups=range(first, last), columns=columns):
            yield row, _as_bytes(batch)
            row += batch.num_rows


def _arrow(path: pathlib.Path, share: typing.Any) -> collections.abc.Iterator[tuple[int, typing.Any]]:
    pyarrow = errors.need("pyarrow", path)
    with pyarrow.memory_map(str(path)) as file:
        file.seek(max(0, file.size() - 8))
        if not file.read().endswith(_ARROW_ENDS):
            raise EOFError("it ends too early")
        file.seek(0)
        file.seek(8 if file.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC else 0)
        stream, row, at = pyarrow.ipc.open_stream(file), 0, file.tell()
        columns, (begin, end) = _columns(path, stream.schema.names), share(file.size())
        for batch in stream:
            if begin <= at < end:
                chosen = _as_bytes(batch.select(columns))
                chosen.validate(full=True)
                yield row, chosen
            row, at = row + batch.num_rows, file.tell()


def _as_bytes(batch: typing.Any) -> typing.Any:
    """Return a batch with bytes for texts, since one that is not in UTF-8 makes the whole batch unreadable."""
    pyarrow = errors.need("pyarrow", "a table")

    def of(kind: typing.Any) -> typing.Any:
        if pyarrow.types.is_struct(kind):
            return pyarrow.struct([field.with_type(of(field.type)) for field in kind])
        if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
            return pyarrow.large_list(of(kind.value_type))
        is_text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
        return pyarrow.large_binary() if is_text else kind

    return batch.cast(pyarrow.schema([field.with_type(of(field.type)) for field in batch.schema]))


def _text(value: object, where: str, how: str) -> object:
    """Return a value with texts for bytes. Raises UserError."""
    if isinstance(value, list):
        return [_text(one, where, how) for one in typing.cast(list[object], value)]
    if isinstance(value, dict):
        return {name: _text(one, where, how) for name, one in typing.cast(Record, value).items()}
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8", how)
    except UnicodeDecodeError as e:
        what = f"{where} is no text in utf-8 at byte {e.start}"
        raise errors.UserError(f"{what}; convert it to UTF-8, or use --errors replace") from e


def _columns(path: pathlib.Path, names: list[str]) -> list[str]:
    if found := [name for name in names if name in COLUMNS]:
        return found
    raise errors.UserError(f"{path} has the columns {', '.join(names) or 'none'}; it needs {SHAPES}: rename them")

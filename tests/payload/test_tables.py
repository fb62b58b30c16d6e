"""Parquet, Arrow and big files of records: whole, in parts, damaged, of any bytes."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib
import sys
import tempfile
import typing

import hypothesis
import hypothesis.strategies as st
import pytest
from builders import decoded, read, run
from builders import records as written

from ddptrain.ground import errors

pyarrow = pytest.importorskip(
    "pyarrow", reason="pyarrow of payload/requirements.txt is not installed here"
)
parquet = pytest.importorskip(
    "pyarrow.parquet", reason="pyarrow of payload/requirements.txt is not installed here"
)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow", ".feather"])
def test_a_big_table_is_cut_and_nothing_is_lost_or_doubled(suffix: str, tmp_path: pathlib.Path):
    texts = [f"text {n} {'x' * (n % 200)}" for n in range(3000)]
    path = written(
        tmp_path / f"train-00000-of-00001{suffix}", [{"text": text, "id": "0"} for text in texts]
    )
    dataset = run(path, output=tmp_path / "d", part_mib=0.02, val_share=0.0)
    assert (len(dataset.splits["train"]) > 2) == (suffix != ".json")
    assert [one.decode() for one in decoded(dataset)] == texts


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_without_text_or_damaged_is_one_line(suffix: str, tmp_path: pathlib.Path):
    path = written(tmp_path / f"x{suffix}", [{"label": "a", "sentence": "b"}])
    with pytest.raises(
        errors.UserError, match=f'{path} has the columns label, sentence; it needs "text"'
    ):
        read(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(errors.UserError, match=f"{path} cannot be read"):
        read(path)


TEXT_TYPES = [
    (pyarrow.binary(), pyarrow.string()),
    (pyarrow.large_binary(), pyarrow.large_string()),
]
TEXT_TYPES += [(pyarrow.binary(), pyarrow.binary())]


def is_utf_8(data: bytes) -> bool:
    return data.decode(errors="replace") == data.decode(errors="ignore")


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5),
    st.sampled_from(TEXT_TYPES),
    st.sampled_from([".parquet", ".arrow"]),
    st.booleans(),
)
def test_any_bytes_of_a_table_are_the_right_text_or_refused_with_their_row(
    rows: list[bytes], kind: tuple[typing.Any, typing.Any], suffix: str, in_messages: bool
):
    column = pyarrow.array(rows, kind[0]).view(kind[1])
    name = "text"
    if in_messages:
        roles = pyarrow.array(["assistant"] * len(rows))
        turns = pyarrow.StructArray.from_arrays([roles, column], ["role", "content"])
        name, column = "messages", pyarrow.ListArray.from_arrays(list(range(len(rows) + 1)), turns)
    table = pyarrow.table({name: column})
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, f"x{suffix}")
        if suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)
        bad = [number for number, data in enumerate(rows) if not is_utf_8(data)]
        if bad:
            with pytest.raises(
                errors.UserError,
                match=rf"{path} row {bad[0]} is not text in utf-8 .* --errors replace",
            ):
                read(path)
        end, begin = ("\n", "<assistant>\n") if in_messages else ("", "")
        assert read(path, "replace") == [
            f"{begin}{data.decode(errors='replace')}{end}" for data in rows
        ]


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl.zst"])
def test_a_package_that_is_missing_is_one_line(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / name).write_bytes(b"PAR1" if name == "x.parquet" else b"\x28\xb5\x2f\xfd")
    with pytest.raises(
        errors.UserError, match=rf"{name} needs the package pyarrow.*pip install pyarrow"
    ):
        read(tmp_path / name)


def test_a_parquet_file_that_was_cut_short_is_named():
    path = pathlib.Path(__file__).parent / "cases" / "train-00000-of-00001.parquet"
    with pytest.raises(
        errors.UserError,
        match=f"{path} cannot be read: Parquet file size is 10248 bytes, smaller than",
    ):
        read(path)

"""Splits and descriptions of datasets, known by the names of their files."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import pytest
from builders import decoded, run

from ddptrain.data import names

SPLIT_WORDS = [
    ("test", "test"),
    ("holdout", "test"),
    ("validation", "val"),
    ("dev", "val"),
    ("train", "train"),
]
SPLIT_WORDS += [("testset", "test"), ("devset", "val"), ("TEST", "test"), ("", "")]


@hypothesis.settings(max_examples=500)
@hypothesis.given(
    st.sampled_from(SPLIT_WORDS),
    st.lists(
        st.sampled_from(["wikitext", "raw", "en", "00000", "of", "v2", "partial", "clean"]),
        max_size=3,
    ),
    st.lists(st.sampled_from(["data", "00001", "de"]), max_size=2),
    st.sampled_from("-_. ="),
    st.sampled_from(
        [".txt", ".parquet", ".jsonl.gz", ".tar.gz", "/0.jsonl", "/a/part-0.md", ".py"]
    ),
)
def test_a_file_named_for_a_split_is_of_it(
    word: tuple[str, str], before: list[str], after: list[str], separator: str, end: str
):
    hypothesis.assume(word[0] or before or after)
    path = pathlib.PurePath(separator.join([*before, word[0], *after]) + end)
    is_code = end == ".py" and {"data", "de"} & {
        *after
    }  # as of a module `test_sources.py`: code like any other
    assert names.split_of(path) == ("" if is_code else word[1])


@pytest.mark.parametrize(
    ("name", "split"),
    [("train-eval", "val"), ("eval_train", "train"), ("attest", ""), ("en.dev", "val")],
)
def test_the_last_word_for_a_split_counts(name: str, split: str):
    assert names.split_of(pathlib.PurePath(f"{name}.jsonl")) == split


@pytest.mark.parametrize("has_records", [True, False])
def test_files_about_records_are_not_trained_on(tmp_path: pathlib.Path, has_records: bool):
    names = ["README_zh.md", "LICENSE", "LICENSE.txt", "README.rst", "wikitext.py"]
    for name in [*names, *(["data/train-0.jsonl"] if has_records else [])]:
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_text('{"text": "rows"}' if "data" in name else name)
    dataset = run(tmp_path / "set", output=tmp_path / "d", val_share=0.0)
    expected = {b"rows"} if has_records else {name.encode() for name in names if "." in name}
    assert set(decoded(dataset)) == expected
    not_read = json.loads((tmp_path / "d" / "dataset.json").read_text())["not_read"]
    assert not_read["dataset card"][0] == (
        len(names) if has_records else 1
    )  # by its name, LICENSE is not text

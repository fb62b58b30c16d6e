"""Folders and archives: the files that are read, and the numbered list of the rest."""

# pyright: basic, reportPrivateImportUsage=false
import gzip
import json
import pathlib
import tarfile
import tempfile
import typing

import hypothesis
import hypothesis.strategies as st
import pytest
from builders import add, decoded, folder, not_read, read, records, run, tar, zipped, zstd

from ddptrain.ground import errors

CASES = pathlib.Path(__file__).parent / "cases"


def line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("alpaca.json", ["<user>\nAdd 1 and 1.\n<assistant>\n2\n"] * 50),
        ("c4-train.00000-of-01024.json.gz", [f"page {n} says hello" for n in range(50)]),
        ("chat.jsonl", ["cut emoji \ufffd"] * 20),
    ],
)
def test_json_in_files_of_any_suffix_is_read(name: str, right: list[str]):
    assert read(CASES / name) == right


def test_an_archive_whose_checksum_is_wrong_is_named():
    with pytest.raises(
        errors.UserError, match=f"{CASES}/x.tar.gz cannot be read: CRC check failed"
    ):
        read(CASES / "x.tar.gz")


# What files hold, by suffix: they are read in a folder as in an archive, or listed.
TEXTS = {"txt": b"words", "md": b"# words", "txt.gz": gzip.compress(b"words")}
RECORDS = {"jsonl": line("words"), "json": line("words"), "jsonl.gz": gzip.compress(line("words"))}
OTHERS = {
    "json": json.dumps({"caption": "c" * 300, "url": "u"}).encode(),
    "json.gz": gzip.compress(b'{"prompt": "without its completion"}'),
    "jpg": b"\xff\xd8" * 400,
    "xz": b"\xfd7zXZ\0",
    "pdf": b"%PDF-1.4",
}


class File(typing.NamedTuple):
    key: str
    suffix: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.key}.{self.suffix}"

    @property
    def data(self) -> bytes:
        return {"text": TEXTS, "records": RECORDS, "other": OTHERS}[self.kind][self.suffix]


KINDS = [(suffix, "text") for suffix in TEXTS] + [(suffix, "records") for suffix in RECORDS]
KINDS += [(suffix, "other") for suffix in OTHERS]
FILES = st.lists(
    st.builds(
        lambda key, kind: File(key, *kind),
        st.sampled_from(["0001", "0002", "sub/0001", "sub/a.b"]),
        st.sampled_from(KINDS),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda file: file.name,
)


def packed(files: list[File], form: str, root: pathlib.Path) -> pathlib.Path:
    """Write files as a folder or as an archive."""
    contents = {file.name: file.data for file in files}
    if form == "folder":
        return folder(root / "x", contents)
    path = root / f"x.{form}"
    path.write_bytes({"tar": tar, "zip": zipped}[form](contents))
    return path


def num_bytes(files: list[File]) -> int:
    return sum(len(file.data) for file in files)


@hypothesis.settings(max_examples=150)
@hypothesis.given(FILES, st.sampled_from(["folder", "tar", "zip"]))
def test_folders_and_archives_read_the_same_files_and_list_all_others(files: list[File], form: str):
    read_files = [file for file in files if file.kind != "other"]
    others = [file for file in files if file.kind == "other"]
    keys = {file.key for file in files if file.kind == "text"}
    missed = [file for file in others if file.key not in keys]

    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        path = packed(files, form, root)
        if num_bytes(missed) > num_bytes(read_files):
            with pytest.raises(
                errors.UserError, match=f"{path}: (most of it is not read|no text found)"
            ):
                run(path, output=root / "d", val_share=0.0)
            return
        dataset = run(path, output=root / "d", val_share=0.0)
        left = not_read(dataset)
        assert len(decoded(dataset)) == len(read_files)
        assert sum(count for count, _ in left.values()) == len(others)
        assert sum(size for _, size in left.values()) == num_bytes(others)


@pytest.mark.parametrize("form", ["tar", "folder"])
def test_captions_of_a_webdataset_are_read_and_its_metadata_listed(
    form: str, tmp_path: pathlib.Path
):
    path = CASES / "00000.tar"
    if form == "folder":
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path / "set")
        path = tmp_path / "set"
    dataset = run(path, output=tmp_path / "d", val_share=0.0)
    assert len(decoded(dataset)) == 40
    assert all(b"caption" not in text for text in decoded(dataset))
    assert not_read(dataset) == {".json beside texts": [40, 4420]}


@pytest.mark.parametrize("form", ["tar", "folder"])
@pytest.mark.parametrize(
    "name", ["metadata.json", "00000_stats.json", "dataset_info.json", "metadata.jsonl"]
)
def test_one_description_larger_than_all_texts_is_listed(
    name: str, form: str, tmp_path: pathlib.Path
):
    files = {"a.txt": b"text", name: json.dumps({"count": 1, "urls": ["u"] * 99}).encode()}
    path = folder(tmp_path / "x", files)
    if form == "tar":
        path = tmp_path / "x.tar"
        path.write_bytes(tar(files))
    dataset = run(path, output=tmp_path / "d", val_share=0.0)
    assert decoded(dataset) == [b"text"]
    assert not_read(dataset) == {"dataset card": [1, len(files[name])]}


def test_a_table_that_describes_an_archive_is_listed(tmp_path: pathlib.Path):
    """As img2dataset leaves it: KEY.parquet and KEY_stats.json next to KEY.tar."""
    source = folder(
        tmp_path / "x", {"00000.tar": tar({"1.txt": b"text"}), "00000_stats.json": b"{}"}
    )
    records(source / "00000.parquet", [{"url": "u" * 99, "key": "1"}] * 9)
    dataset = run(source, output=tmp_path / "d", val_share=0.0)
    assert decoded(dataset) == [b"text"]
    size_bytes = (source / "00000.parquet").stat().st_size
    assert not_read(dataset) == {"dataset card": [2, size_bytes + 2]}


def test_a_table_without_text_by_itself_is_refused_with_its_columns(tmp_path: pathlib.Path):
    (tmp_path / "x").mkdir()
    records(tmp_path / "x" / "train.parquet", [{"url": "u"}])
    with pytest.raises(errors.UserError, match=r"train\.parquet has the columns url; it needs"):
        run(tmp_path / "x", output=tmp_path / "d")


def test_the_images_of_a_webdataset_are_listed_too(tmp_path: pathlib.Path):
    for number in range(2):
        with tarfile.open(tmp_path / f"set-{number:06d}.tar", "w") as archive:
            for sample in range(3):
                add(archive, f"{number}{sample}.jpg", b"\xff\xd8" * 500)
                add(archive, f"{number}{sample}.txt", f"text {number}{sample}".encode())
                add(archive, f"{number}{sample}.json", line(f"json {number}{sample}"))
    dataset = run(tmp_path, output=tmp_path / "d", val_share=0.0)
    assert len(dataset.splits["train"]) == 2  # an archive is a part
    samples = [f"{n}{s}" for n in range(2) for s in range(3)]
    assert decoded(dataset) == [
        f"{kind} {one}".encode() for one in samples for kind in ("text", "json")
    ]
    assert not_read(dataset) == {".jpg beside texts": [6, 6000]}


def test_archives_in_archives_are_refused_with_what_to_do(tmp_path: pathlib.Path):
    """As OpenWebText has them."""
    (tmp_path / "x.tar").write_bytes(
        tar({f"{n}.tar.gz": gzip.compress(tar({"a.txt": b"page"})) for n in range(2)})
    )
    words = r"x\.tar: no text found: \.tar\.gz 2 \(\d+ bytes\); extract it, and give the files or folders"
    with pytest.raises(errors.UserError, match=words):
        run(tmp_path / "x.tar", output=tmp_path / "d")


SAVED = {  # as Hugging Face's save_to_disk, a dataset repository and a Mac leave them
    "train/data-00000-of-00001.arrow": "train",
    "validation/data-00000-of-00001.arrow": "held out",
    "test/data-00000-of-00001.arrow": "never",
    "more-dev.jsonl": "held out, too",
    "more_test.jsonl": "never",
    "train/dataset_info.json": None,
    "README.md": "x" * 9000,
    ".DS_Store": "y" * 9000,
    ".git/packed": "z" * 9000,
}


def saved(root: pathlib.Path, files: typing.Mapping[str, str | None]) -> pathlib.Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".arrow", ".jsonl"):
            records(path, [{"text": text}])
        else:
            path.write_text(json.dumps({"features": []}) if text is None else text)
    return root


def test_splits_are_kept_apart_and_what_is_not_read_is_counted(tmp_path: pathlib.Path):
    root = saved(
        tmp_path / "set", SAVED | {"notes.csv": "1,2\n", "noted": "?", ".cache/a.txt": "h"}
    )
    saved(tmp_path / "linked", {"b.txt": "l" * 10})
    (root / "link").symlink_to(tmp_path / "linked")
    (root / "loop").symlink_to(root)
    dataset = run(root, output=root / "d")
    assert (decoded(dataset), decoded(dataset, "val")) == (
        [b"train"],
        [b"held out, too", b"held out"],
    )
    counted = {what: count for what, (count, _) in not_read(dataset).items()}
    kinds = ".csv,.git,hidden file,hidden folder,linked folder,no suffix".split(",")
    assert counted == {"dataset card": 2, "other split": 2, **dict.fromkeys(kinds, 1)}
    assert not_read(dataset)["linked folder"] == [1, 10]
    assert decoded(run(root / "more_test.jsonl", output=tmp_path / "asked", val_share=0.0)) == [
        b"never"
    ]


def test_links_of_the_hubs_cache_are_read_and_counted_once(tmp_path: pathlib.Path):
    folder(tmp_path / "blobs", {"1a": line("rows"), "2b": b"1,2\n"})
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "rows.jsonl").symlink_to("../blobs/1a")
    (tmp_path / "snapshots" / "more.csv").symlink_to("../blobs/2b")
    dataset = run(tmp_path, output=tmp_path / "d", val_share=0.0)
    assert decoded(dataset) == [b"rows"]
    assert not_read(dataset) == {".csv": [1, 4]}


@pytest.mark.parametrize(
    ("files", "named", "words"),
    [
        (
            {"a.txt": "a", "b.csv": "bb"},
            "",
            r"most of it is not read: \.csv 1 \(2 bytes\); give the files",
        ),
        ({"b.csv.gz": "b"}, "", r"no text found: \.csv\.gz 1 \(1 bytes\)"),
        ({"b.csv": "b"}, "b.csv", r"b\.csv: \.csv is not read; convert it, or name it \.txt"),
        ({"b.safetensors": "b"}, "b.safetensors", r"\.safetensors is not read"),
        ({"b.jsonl.xz": "b"}, "b.jsonl.xz", r"\.xz is not read"),
        ({"test.jsonl": "x"}, "", r"no text found; not read: other split 1"),
        ({"dev.jsonl": "x"}, "", "no training text"),
        ({"config.json": None}, "", r"no text found: \.json 1"),
        ({"README.md": "read me", "squad.json": None}, "", r"most of it is not read: \.json 1"),
        ({"a.txt": "a\0"}, "", r"a\.txt is not text in utf-8 at byte 1"),
    ],
)
def test_files_without_text_are_refused(
    files: dict[str, str | None], named: str, words: str, tmp_path: pathlib.Path
):
    with pytest.raises(errors.UserError, match=words):
        run(saved(tmp_path / "set", files) / named, output=tmp_path / "d")


@pytest.mark.parametrize("make", [tar, zipped])
def test_members_that_are_no_text_are_counted_or_refused(
    make: typing.Callable[..., bytes], tmp_path: pathlib.Path
):
    path = tmp_path / f"x.{'tar' if make is tar else 'zip'}"
    others = {"._a.txt": b"\0\5\x16\7" * 99, "set/test/c.txt": b"never", "p.jpg": b"\xff\xd8"}
    path.write_bytes(make({"a.txt": b"text", "l.jsonl.zst": zstd(b'{"text": "packed"}'), **others}))
    dataset = run(path, output=tmp_path / "d", val_share=0.0)
    assert decoded(dataset) == [b"text", b"packed"]
    assert not_read(dataset) == {"hidden file": [1, 396], "other split": [1, 5], ".jpg": [1, 2]}
    path.write_bytes(make({"a.txt": b"text", "p.jpg": b"\xff\xd8\xff\xd8\xff"}))
    with pytest.raises(
        errors.UserError, match=rf"{path}: most of it is not read: \.jpg 1 \(5 bytes\)"
    ):
        run(path, output=tmp_path / "d")


def test_a_tars_links_are_counted_and_a_name_above_hides_nothing(tmp_path: pathlib.Path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        add(archive, "../up/a.txt", b"text")
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo("l.txt")
            link.type, link.linkname = kind, "../up/a.txt"
            archive.addfile(link)
    dataset = run(tmp_path / "x.tar", output=tmp_path / "d", val_share=0.0)
    assert decoded(dataset) == [b"text"]
    assert not_read(dataset) == {"link": [2, 0]}

"""Data is what it seems, or it is refused: formats, damage, encodings, what is left out, what is learned."""

# pyright: basic, reportPrivateImportUsage=false
import bz2
import gzip
import io
import json
import lzma
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import typing
import zipfile

import hypothesis
import hypothesis.strategies as st
import pytest
from builders import add, decoded, run

from ddptrain import errors, reading, shards, sources

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow of payload/requirements.txt is not installed here")
parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow of payload/requirements.txt is not installed here")

TEXTS = ["one\n" * 20, "two, naïve\n", "three", "four"]
MEMBERS = {
    "a.txt": TEXTS[0].encode(),
    "b.jsonl": "".join(json.dumps({"text": t}) + "\n" for t in TEXTS[1:3]).encode(),
    "sub/d.md": TEXTS[3].encode(),
}


def tar(members: dict[str, bytes] = MEMBERS) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, data in members.items():
            add(archive, name, data)
    return made.getvalue()


def zipped(members: dict[str, bytes] = MEMBERS) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return made.getvalue()


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-cq"], input=data, stdout=subprocess.PIPE, check=True).stdout


LINES = "".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode()
ARCHIVES = {
    "x.tar": tar({"a.txt": b"one\n" * 30, "sub/b.txt": b"two"}),
    "x.tar.gz": gzip.compress(tar(), mtime=0),
    "x.tgz": gzip.compress(tar(), mtime=0),
    "x.tar.xz": lzma.compress(tar()),
    "x.tar.bz2": bz2.compress(tar()),
    "x.tar.zst": zstd(tar()),
    "x.zip": zipped(),
    "x.jsonl.gz": gzip.compress(LINES[:50]) + gzip.compress(LINES[50:]),
    "x.jsonl.xz": lzma.compress(LINES[:50]) + lzma.compress(LINES[50:]),
    "x.jsonl.bz2": bz2.compress(LINES[:50]) + bz2.compress(LINES[50:]),
    "x.json.zst": zstd(LINES[:50]) + zstd(LINES[50:]),
    "x.txt.gz": gzip.compress(TEXTS[0].encode()),
}


def read(path: pathlib.Path, how: str = "strict") -> list[str]:
    """Return the texts of the documents of one file."""
    items, _ = sources.find([str(path)], 1 << 40, how, path.parent / "out")
    return ["".join(s.text for s in d) for item in items for d in reading.documents(item, sources.Unread())]


@hypothesis.settings(max_examples=1500)
@hypothesis.given(st.sampled_from(sorted(ARCHIVES)), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_flipped_bit_of_an_archive_gives_the_right_text_or_one_line_that_names_it(name: str, at: float, bit: int):
    with tempfile.TemporaryDirectory() as folder:
        path, data = pathlib.Path(folder, name), bytearray(ARCHIVES[name])
        path.write_bytes(data)
        right = read(path)
        data[int(at * len(data))] ^= 1 << bit
        path.write_bytes(data)
        try:
            found = read(path)
        except errors.UserError as e:
            assert str(path) in str(e)
            assert "\n" not in str(e)
        else:
            if name == "x.tar":  # its contents have no checksum: they arrive as they are
                found, right = [[len(t.encode()) for t in texts] for texts in (found, right)]
            assert found == right


@pytest.mark.parametrize("name", sorted(ARCHIVES))
def test_archives_are_read_to_their_end_and_no_further(name: str, tmp_path: pathlib.Path):
    path = tmp_path / name
    path.write_bytes(ARCHIVES[name])
    assert read(path) in (TEXTS, TEXTS[:1], ["one\n" * 30, "two"])
    for damaged in (ARCHIVES[name] + b"garbage", ARCHIVES[name][:-9], ARCHIVES[name][:700], b""):
        if damaged != ARCHIVES[name] and not (name == "x.tar" and damaged == ARCHIVES[name][:-9]):
            path.write_bytes(damaged)
            with pytest.raises(errors.UserError, match=f"{path} cannot be read"):
                read(path)


def oracle(data: bytes) -> str | None:
    """Return the text in bytes, or nothing if they are no text."""
    marks = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
    for mark, name in {**marks, b"": "utf-8-sig"}.items():
        if data.startswith(mark):
            try:
                text = data.decode(name)
            except UnicodeDecodeError:
                return None
            return None if "\0" in text else text
    return None


ENCODED = st.builds(lambda t, e: t.encode(e), st.text(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
BYTES = st.one_of(
    st.binary(), ENCODED, st.builds(lambda m, b: m + b, st.sampled_from([b"\xff\xfe", b"\xef\xbb\xbf"]), st.binary())
)


@hypothesis.settings(max_examples=800)
@hypothesis.given(BYTES, st.sampled_from(["t.txt", "noted", "t.md.gz", "t.tar"]))
def test_any_bytes_are_the_right_text_or_refused_with_file_and_offset(data: bytes, name: str):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, name)
        packed = {".gz": gzip.compress, ".tar": lambda d: tar({"in.txt": d})}.get(path.suffix, bytes)(data)
        path.write_bytes(packed)
        right = oracle(data)
        if data.startswith((b"version https://git-lfs.github.com/spec/", b"{\\rtf", b"%PDF-")):
            with pytest.raises(
                errors.UserError, match=rf"{path}.* is (a Git LFS pointer|RTF|a PDF)\b.*, not plain text"
            ):
                read(path, "replace")
            return
        if right is None:
            with pytest.raises(
                errors.UserError, match=rf"{path}.* is no text in utf-\S+ at byte \d+; .* --errors replace"
            ):
                read(path)
        else:
            assert read(path) == [right] * bool(right.strip())
        assert all("\n" not in t or t for t in read(path, "replace"))


WORDS = st.text(st.characters(codec="utf-8"), max_size=8)
ROLES = {"user": False, "human": False, "system": False, "assistant": True, "gpt": True}
MARKS = [{}, {"weight": 0}, {"weight": 1}, {"train": False}, {"train": True}, {"weight": 0, "train": True}]
TURNS = st.lists(st.tuples(st.sampled_from(sorted(ROLES)), WORDS, st.sampled_from(MARKS)), max_size=4)


def chat(key: str, turns: list[tuple[str, str, dict[str, typing.Any]]]) -> tuple[dict[str, typing.Any], int]:
    """Return a conversation and the number of the bytes that are learned of it."""
    role, content = ("role", "content") if key == "messages" else ("from", "value")
    learned = [f"{c}\n" * mark.get("train", ROLES[r]) for r, c, mark in turns if c.strip() and mark.get("weight") != 0]
    return {key: [{role: r, content: c} | mark for r, c, mark in turns]}, len("".join(learned).encode())


RECORDS = st.one_of(
    st.builds(chat, st.sampled_from(["messages", "conversations"]), TURNS),
    st.builds(lambda p, c: ({"prompt": p, "completion": c}, len(c.encode())), WORDS, WORDS.filter(bool)),
    st.builds(
        lambda i, m, o: (
            {"instruction": i, "input": m, "output": o, "text": "all"},
            len(f"{o}\n".encode()) * bool(o.strip()),
        ),
        WORDS,
        WORDS,
        WORDS,
    ),
    st.builds(lambda t: ({"text": t}, len(t.encode())), WORDS.filter(str.strip)),
    st.just(({"text": None}, 0)),
)


def as_parts(one: dict[str, typing.Any], count: int) -> tuple[dict[str, typing.Any], int]:
    """Return a record with the contents of its messages as parts, and prompt and completion as TRL's messages."""
    if "completion" in one:
        roles = {"prompt": "user", "completion": "assistant"}
        count = (count + 1) * bool(one["completion"].strip())
        one = {key: [{"role": roles[key], "content": text}] for key, text in one.items()}
    parts = {
        key: [m | {k: [{"type": "text", "text": m[k]}] for k in ("content", "value") if k in m} for m in value]
        for key, value in one.items()
        if isinstance(value, list)
    }
    return one | parts, count


def written(path: pathlib.Path, made: list[dict[str, typing.Any]]) -> pathlib.Path:
    """Write records as the suffix says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(one)}\n" for one in made))
    elif path.suffix == ".json":
        path.write_text(json.dumps(made, indent=2))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(made), path, row_group_size=100)
    else:
        table, new = (
            pyarrow.Table.from_pylist(made),
            pyarrow.ipc.new_stream if path.suffix == ".arrow" else pyarrow.ipc.new_file,
        )
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    return path


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    st.lists(RECORDS, min_size=1, max_size=6), st.sampled_from([".jsonl", ".json", ".parquet", ".arrow"]), st.booleans()
)
def test_learned_tokens_are_those_of_the_assistants_turns(
    made: list[tuple[dict[str, typing.Any], int]], suffix: str, in_parts: bool
):
    made = [as_parts(*one) for one in made] if in_parts else made
    keys = sorted({key for one, _ in made for key in one})
    if suffix in (".parquet", ".arrow"):
        made = [({key: one.get(key) for key in keys}, count) for one, count in made]
    chats = [
        {ROLES[m.get("role") or m["from"]] for m in one.get("messages") or one["conversations"]}
        for one, _ in made
        if one.get("messages") or one.get("conversations")
    ]
    unanswered = sum(True not in chat for chat in chats)
    with tempfile.TemporaryDirectory() as folder:
        path, expected = written(pathlib.Path(folder, f"x{suffix}"), [one for one, _ in made]), sum(n for _, n in made)
        alpaca = sum(one.get("instruction") is not None or isinstance(one.get("prompt"), list) for one, _ in made)
        if 2 * unanswered > len(chats) + alpaca or not expected:
            with pytest.raises(
                errors.UserError,
                match=r"no message of the role assistant.*roles found|no token would be|no training text",
            ):
                run(path, output=pathlib.Path(folder, "d"), val_share=0.0, mask_prompts=True)
            return
        dataset = run(path, output=pathlib.Path(folder, "d"), val_share=0.0, mask_prompts=True)
        assert sum(shards.num_learned(s, 256, masked=True) for s in dataset.splits["train"]) == expected
        empty = sum(not any(one.values()) for one, _ in made)
        not_read = json.loads(pathlib.Path(folder, "d", "dataset.json").read_text())["not_read"]
        assert not_read == ({"record without text": [empty, 0]} if empty else {})


@pytest.mark.parametrize("content", [None, [{"type": "image_url", "text": None}], 1])
def test_a_message_that_is_no_text_is_refused_with_its_line(content: object, tmp_path: pathlib.Path):
    turns = [{"role": "user", "content": "4?"}, {"role": "assistant", "content": content}]
    for one in ({"messages": turns}, {"prompt": turns[:1], "completion": turns[1:]}):
        with pytest.raises(
            errors.UserError, match=r"x\.jsonl line 1: a message's content is (None|'image_url'|1); only"
        ):
            read(written(tmp_path / "x.jsonl", [one]))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow", ".feather"])
def test_a_big_table_is_cut_and_nothing_is_lost_or_doubled(suffix: str, tmp_path: pathlib.Path):
    texts = [f"text {n} {'x' * (n % 200)}" for n in range(3000)]
    path = written(tmp_path / f"train-00000-of-00001{suffix}", [{"text": text, "id": "0"} for text in texts])
    dataset = run(path, output=tmp_path / "d", part_mib=0.02, val_share=0.0)
    assert (len(dataset.splits["train"]) > 2) == (suffix != ".json")
    assert [one.decode() for one in decoded(dataset)] == texts


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_without_text_or_damaged_is_one_line(suffix: str, tmp_path: pathlib.Path):
    path = written(tmp_path / f"x{suffix}", [{"label": "a", "sentence": "b"}])
    with pytest.raises(errors.UserError, match=f'{path} has the columns label, sentence; it needs "text"'):
        read(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(errors.UserError, match=f"{path} cannot be read"):
        read(path)


TEXT_TYPES = [(pyarrow.binary(), pyarrow.string()), (pyarrow.large_binary(), pyarrow.large_string())]
TEXT_TYPES += [(pyarrow.binary(), pyarrow.binary())]


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
        bad = [n for n, data in enumerate(rows) if oracle(data.replace(b"\0", b"z").replace(b"\xff", b"\x80")) is None]
        if bad:
            with pytest.raises(errors.UserError, match=rf"{path} row {bad[0]} is no text in utf-8 .* --errors replace"):
                read(path)
        end, begin = ("\n", "<assistant>\n") if in_messages else ("", "")
        assert read(path, "replace") == [f"{begin}{data.decode(errors='replace')}{end}" for data in rows]


def test_surrogates_are_cleaned_for_every_tokenizer(tmp_path: pathlib.Path):
    (tmp_path / "chat.jsonl").write_text('{"text": "cut emoji \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n')
    for kind in ("byte", "gpt2"):
        run(tmp_path / "chat.jsonl", output=tmp_path / kind, tokenizer=kind, val_share=0.0)
    found = [one.decode() for one in decoded(shards.open_dataset(tmp_path / "byte"))]
    assert found == ["cut emoji \ufffd", "whole \U0001f600"]


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


def folder(root: pathlib.Path, files: dict[str, str | None]) -> pathlib.Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".arrow", ".jsonl"):
            written(path, [{"text": text}])
        else:
            path.write_text(json.dumps({"features": []}) if text is None else text)
    return root


def test_splits_are_kept_apart_and_what_is_not_read_is_counted(tmp_path: pathlib.Path):
    root = folder(tmp_path / "set", SAVED | {"notes.csv": "1,2\n", "noted": "?", ".cache/a.txt": "h"})
    folder(tmp_path / "linked", {"b.txt": "l" * 10})
    (root / "link").symlink_to(tmp_path / "linked")
    (root / "loop").symlink_to(root)
    dataset = run(root, output=root / "d")
    assert (decoded(dataset), decoded(dataset, "val")) == ([b"train"], [b"held out, too", b"held out"])
    manifest = json.loads((root / "d" / "dataset.json").read_text())
    counted = {what: count for what, (count, _) in manifest["not_read"].items()}
    kinds = ".csv,.git,hidden file,hidden folder,linked folder,no suffix".split(",")
    assert counted == {"dataset card": 2, "other split": 2, **dict.fromkeys(kinds, 1)}
    assert manifest["not_read"]["linked folder"] == [1, 10]
    assert decoded(run(root / "more_test.jsonl", output=tmp_path / "asked", val_share=0.0)) == [b"never"]


@pytest.mark.parametrize(
    ("files", "named", "words"),
    [
        ({"a.txt": "a", "b.csv": "bb"}, "", r"most of it is not read: \.csv 1 \(2 bytes\); give the files"),
        ({"b.csv.gz": "b"}, "", r"no text found: \.csv\.gz 1 \(1 bytes\)"),
        ({"b.csv": "b"}, "b.csv", r"b\.csv: \.csv is not read; convert it, or name it \.txt"),
        ({"b.safetensors": "b"}, "b.safetensors", r"\.safetensors is not read"),
        ({"test.jsonl": "x"}, "", r"no text found; not read: other split 1"),
        ({"dev.jsonl": "x"}, "", "no training text"),
        ({"config.json": None}, "", r"no text found: \.json 1"),
        ({"a.txt": "a\0"}, "", r"a\.txt is no text in utf-8 at byte 1"),
    ],
)
def test_what_is_not_text_is_refused(files: dict[str, str | None], named: str, words: str, tmp_path: pathlib.Path):
    with pytest.raises(errors.UserError, match=words):
        run(folder(tmp_path / "set", files) / named, output=tmp_path / "d")


@pytest.mark.parametrize("make", [tar, zipped])
def test_members_that_are_no_text_are_counted_or_refused(make: typing.Callable[..., bytes], tmp_path: pathlib.Path):
    path = tmp_path / f"x.{'tar' if make is tar else 'zip'}"
    others = {"._a.txt": b"\0\5\x16\7" * 99, "set/test/c.txt": b"never", "p.jpg": b"\xff\xd8"}
    path.write_bytes(make({"a.txt": b"text", "l.jsonl.zst": zstd(b'{"text": "packed"}'), **others}))
    dataset = run(path, output=tmp_path / "d", val_share=0.0)
    assert decoded(dataset) == [b"text", b"packed"]
    not_read = json.loads((tmp_path / "d" / "dataset.json").read_text())["not_read"]
    assert not_read == {"hidden file": [1, 396], "other split": [1, 5], ".jpg": [1, 2]}
    path.write_bytes(make({"a.txt": b"text", "p.jpg": b"\xff\xd8\xff\xd8\xff"}))
    with pytest.raises(errors.UserError, match=rf"{path}: most of it is not read: \.jpg 1 \(5 bytes\)"):
        run(path, output=tmp_path / "d")


def test_a_package_that_is_missing_is_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(errors.UserError, match=r"x\.parquet needs the package pyarrow.*pip install pyarrow"):
        read(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("x.tar.gz", "cannot be read: .*incorrect data check"),
        ("train-00000-of-00001.parquet", "cannot be read: Parquet file size is 10248 bytes, smaller than"),
        ("alpaca.json", ["<user>\nAdd 1 and 1.\n<assistant>\n2\n"] * 50),
        ("c4-train.00000-of-01024.json.gz", [f"page {n} says hello" for n in range(50)]),
        ("chat.jsonl", ["cut emoji \ufffd"] * 20),
        ("notes.txt", ["Hello from PowerShell\r\n" + "more lines\r\n" * 100]),
    ],
)
def test_cases_that_people_reported(name: str, right: str | list[str]):
    path = pathlib.Path(__file__).parent / "cases" / name
    if isinstance(right, list):
        assert read(path) == right
    else:
        with pytest.raises(errors.UserError, match=f"{name} {right}"):
            read(path)


def test_a_tars_links_are_counted_and_a_name_above_hides_nothing(tmp_path: pathlib.Path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        add(archive, "../up/a.txt", b"text")
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo("l.txt")
            link.type, link.linkname = kind, "../up/a.txt"
            archive.addfile(link)
    dataset = run(tmp_path / "x.tar", output=tmp_path / "d", val_share=0.0)
    assert decoded(dataset) == [b"text"]
    assert json.loads((tmp_path / "d" / "dataset.json").read_text())["not_read"] == {"link": [2, 0]}


def test_a_first_line_that_is_no_text_is_one_record_with_replace(tmp_path: pathlib.Path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "b"}\n')
    assert read(tmp_path / "x.jsonl", "replace") == ["caf\ufffd", "b"]

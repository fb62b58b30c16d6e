"""Compressed files and archives: read exactly to their end; whole ones are never refused."""

# pyright: basic, reportPrivateImportUsage=false
import bz2
import gzip
import json
import pathlib
import struct
import subprocess
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest
from builders import read, tar, zipped, zstd

from ddptrain.ground import errors

TEXTS = ["one\n" * 20, "two, naïve\n", "three", "four"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
MEMBERS = {
    "a.txt": TEXTS[0].encode(),
    "b.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:3]).encode(),
    "sub/d.md": TEXTS[3].encode(),
}
ARCHIVES = {
    "x.tar": tar({"a.txt": b"one\n" * 30, "sub/b.txt": b"two"}),
    "x.tar.gz": gzip.compress(tar(MEMBERS), mtime=0),
    "x.tgz": gzip.compress(tar(MEMBERS), mtime=0),
    "x.tar.bz2": bz2.compress(tar(MEMBERS)),
    "x.tar.zst": zstd(tar(MEMBERS)),
    "x.zip": zipped(MEMBERS),
    "x.jsonl.gz": gzip.compress(LINES[:50]) + gzip.compress(LINES[50:]),
    "x.jsonl.bz2": bz2.compress(LINES[:50]) + bz2.compress(LINES[50:]),
    "x.json.zst": zstd(LINES[:50]) + zstd(LINES[50:]),
    "x.txt.gz": gzip.compress(TEXTS[0].encode()),
}


def flip(data: bytes, at: float, bit: int) -> bytes:
    """Return the data with one bit flipped."""
    damaged = bytearray(data)
    damaged[int(at * len(data))] ^= 1 << bit
    return bytes(damaged)


DAMAGES = st.one_of(
    st.builds(
        lambda at, bit: lambda data: flip(data, at, bit),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 7),
    ),
    st.builds(
        lambda at: lambda data: data[: int(at * len(data))], st.floats(0, 1, exclude_max=True)
    ),
)


@hypothesis.settings(max_examples=1000)
@hypothesis.given(
    st.sampled_from(sorted(ARCHIVES)), DAMAGES, st.sampled_from(["strict", "replace"])
)
def test_a_flipped_bit_or_a_cut_gives_the_right_text_or_one_line_that_names_the_file(
    name: str, damage, how: str
):
    with tempfile.TemporaryDirectory() as root:
        path = pathlib.Path(root, name)
        path.write_bytes(ARCHIVES[name])
        right = read(path)
        path.write_bytes(damage(ARCHIVES[name]))
        try:
            found = read(path, how)
        except errors.UserError as e:
            assert str(path) in str(e)
            assert "\n" not in str(e)
            return
        if name == "x.tar":  # without checksums, its contents pass as they are
            assert len(found) == len(right)
        else:
            assert found == right


@pytest.mark.parametrize("name", sorted(ARCHIVES))
def test_bytes_behind_the_end_are_refused(name: str, tmp_path: pathlib.Path):
    path = tmp_path / name
    path.write_bytes(ARCHIVES[name])
    assert read(path) in (TEXTS, TEXTS[:1], ["one\n" * 30, "two"])
    path.write_bytes(ARCHIVES[name] + b"garbage")
    with pytest.raises(errors.UserError, match=f"{path} cannot be read: .*; repair or remove"):
        read(path)


SKIPPED = st.builds(
    lambda number, data: struct.pack("<II", 0x184D2A50 + number, len(data)) + data,
    st.integers(0, 15),
    st.binary(max_size=40),
)
FRAMES = {
    data: [zstd(data, *flags) for flags in ((), ("--no-check",), ("--long=27",))]
    for data in (b"ab\n", LINES)
}
FRAME = st.builds(
    lambda data, form: (data, FRAMES[data][form]),
    st.sampled_from([b"ab\n", LINES]),
    st.integers(0, 2),
)


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    st.lists(st.one_of(FRAME, SKIPPED.map(lambda frame: (b"", frame))), min_size=1, max_size=6)
)
def test_every_frame_of_zstandard_is_read_and_those_to_be_skipped_are_skipped(
    frames: list[tuple[bytes, bytes]],
):
    """As pzstd and seekable formats write them, without a checksum, too."""
    text = b"".join(data for data, _ in frames).decode()
    with tempfile.TemporaryDirectory() as root:
        path = pathlib.Path(root, "x.txt.zst")
        path.write_bytes(b"".join(frame for _, frame in frames))
        assert read(path) == ([text] if text else [])


def test_a_gz_may_be_padded_with_zeros(tmp_path: pathlib.Path):
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(b"text") + bytes(700))
    assert read(tmp_path / "x.txt.gz") == ["text"]


@pytest.mark.parametrize("inside", ["", "in a tar"])
def test_a_large_window_is_named_with_what_to_type(inside: str, tmp_path: pathlib.Path):
    path = (
        pathlib.Path(__file__).parent / "cases" / "forum.jsonl.zst"
    )  # zstd -t --long=31 calls it whole
    if inside:
        data = path.read_bytes()
        path = tmp_path / "x.tar"
        path.write_bytes(tar({"forum.jsonl.zst": data}))
    with pytest.raises(errors.UserError, match="window") as e:
        read(path)
    assert str(path) in str(e.value)
    assert "zstd -d --long=31" in str(e.value)
    assert "repair" not in str(e.value)


def test_the_remedy_for_a_large_window_makes_a_readable_file(tmp_path: pathlib.Path):
    path = pathlib.Path(__file__).parent / "cases" / "forum.jsonl.zst"
    made = tmp_path / "forum.jsonl"
    subprocess.run(["zstd", "-dq", "--long=31", path, "-o", made], check=True)
    assert len(read(made)) > 1


PLAIN = {".txt": b"text", ".jsonl": LINES, ".tar": ARCHIVES["x.tar"]}


@hypothesis.given(
    st.sampled_from(sorted(PLAIN)),
    st.sampled_from([".gz", ".bz2", ".zst"]),
    st.sampled_from(["file", "member"]),
)
def test_files_that_a_browser_decompressed_are_read(suffix: str, compression: str, where: str):
    hypothesis.assume(where == "file" or suffix != ".tar")
    with tempfile.TemporaryDirectory() as root:
        plain = pathlib.Path(root, f"x{suffix}")
        plain.write_bytes(PLAIN[suffix])
        path = pathlib.Path(root, f"x{suffix}{compression}")
        path.write_bytes(PLAIN[suffix])
        if where == "member":
            path = pathlib.Path(root, "y.tar")
            path.write_bytes(tar({f"x{suffix}{compression}": PLAIN[suffix]}))
        assert read(path) == read(plain)


@hypothesis.given(
    st.binary(min_size=1, max_size=40), st.sampled_from([".gz", ".bz2", ".zst"]), st.booleans()
)
def test_binary_files_are_refused_with_any_errors_option(
    data: bytes, compression: str, is_short: bool
):
    """Else the garbage of a damaged file would be U+FFFD in the dataset."""
    head = b"\x80\0" if is_short else b"\x80\0\0\0"
    with tempfile.TemporaryDirectory() as root:
        path = pathlib.Path(root, f"x.txt{compression}")
        path.write_bytes(head + data)
        with pytest.raises(errors.UserError, match=f"{path} cannot be read"):
            read(path, "replace")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".parquet", ".tar", ".txt.gz", ""])
def test_a_pointer_of_git_lfs_is_named(suffix: str, tmp_path: pathlib.Path):
    path = tmp_path / f"x{suffix}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(errors.UserError, match=f"{path} is a Git LFS pointer.*git lfs pull"):
        read(path, "replace")

"""Bytes become the text that they are, or are refused with their offset."""

# pyright: basic, reportPrivateImportUsage=false
import gzip
import pathlib
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest
from builders import read, tar

from ddptrain.ground import errors


def text_in(data: bytes) -> str | None:
    """Return the text in bytes, or None if they are not text."""
    marks = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"": "utf-8-sig"}
    for mark, name in marks.items():
        if data.startswith(mark):
            try:
                text = data.decode(name)
            except UnicodeDecodeError:
                return None
            return None if "\0" in text else text
    return None


ENCODED = st.builds(
    lambda t, e: t.encode(e), st.text(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"])
)
BYTES = st.one_of(
    st.binary(),
    ENCODED,
    st.builds(lambda m, b: m + b, st.sampled_from([b"\xff\xfe", b"\xef\xbb\xbf"]), st.binary()),
)


@hypothesis.settings(max_examples=800)
@hypothesis.given(BYTES, st.sampled_from(["t.txt", "noted", "t.md.gz", "t.tar"]))
def test_any_bytes_are_the_right_text_or_refused_with_file_and_offset(data: bytes, name: str):
    hypothesis.assume(b"git-lfs" not in data)  # it tries the texts that it finds in our code
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, name)
        packed = {".gz": gzip.compress, ".tar": lambda d: tar({"in.txt": d})}.get(
            path.suffix, bytes
        )(data)
        path.write_bytes(packed)
        right = text_in(data)
        if right is None:
            with pytest.raises(
                errors.UserError,
                match=rf"{path}.* is not text in utf-\S+ at byte \d+; .* --errors replace",
            ):
                read(path)
        else:
            assert read(path) == [right] * bool(right.strip())
        assert "\0" not in "".join(read(path, "replace"))


def test_utf_16_of_a_windows_shell_is_read(tmp_path: pathlib.Path):
    text = "Hello from PowerShell\r\n" + "more lines\r\n" * 100
    assert read(pathlib.Path(__file__).parent / "cases" / "notes.txt") == [text]
    (tmp_path / "x.jsonl").write_bytes('{"text": "a"}\r\n{"text": "b"}\r\n'.encode("utf-16"))
    assert read(tmp_path / "x.jsonl") == ["a", "b"]


def test_utf_32_is_refused_and_never_text_with_zeros(tmp_path: pathlib.Path):
    (tmp_path / "x.txt").write_bytes("text".encode("utf-32"))
    with pytest.raises(
        errors.UserError, match=r"x\.txt is not text in utf-16-le at byte 2; convert it to UTF-8"
    ):
        read(tmp_path / "x.txt")


def test_a_first_line_that_is_no_text_is_one_record_with_replace(tmp_path: pathlib.Path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "b"}\n')
    assert read(tmp_path / "x.jsonl", "replace") == ["caf\ufffd", "b"]

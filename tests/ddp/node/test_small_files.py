"""Small files are read to a limit, never through links or pipes."""

import pathlib

from ddp.node import small_files


def test_of_a_line_without_end_its_last_part_is_read(tmp_path: pathlib.Path):
    path = tmp_path / "log"
    path.write_text(f"begin\n{'x' * 2 * small_files.MAX_JSON_BYTES}")
    (line,) = small_files.tail(path, 1000)
    assert len(line) == small_files.MAX_JSON_BYTES

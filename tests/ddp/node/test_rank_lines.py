"""The copy of a rank's lines in the job's log: each line whole, and the last one, too."""

import io
import pathlib
import tempfile
import typing

import hypothesis
import hypothesis.strategies as st

from ddp.node import node


class Writes:
    """Plays the agent's event: each wait lets the rank write a piece, and the last one ends it."""

    def __init__(self, path: pathlib.Path, pieces: list[str]) -> None:
        self._path, self._pieces = path, pieces

    def wait(self, _: float) -> bool:
        if self._pieces:
            with self._path.open("a") as file:
                file.write(self._pieces.pop(0))
        return not self._pieces


@hypothesis.given(st.lists(st.text(st.sampled_from("ab \n"), max_size=9), max_size=6))
def test_however_a_rank_writes_its_lines_are_whole(pieces: list[str]):
    made: dict[str, typing.Any] = {}
    exec(node.TAIL, made)
    copied, text = io.StringIO(), "".join(pieces)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "stdout.log")
        made["tail_logfile"]("[rank1]: ", str(path), copied, Writes(path, pieces), 0.1, log_line_filter=None)
    assert copied.getvalue() == "".join(f"[rank1]: {line}\n" for line in text.split("\n")[:-1]) + (
        f"[rank1]: {text.rsplit(chr(10), 1)[-1]}\n" if text and not text.endswith("\n") else ""
    )

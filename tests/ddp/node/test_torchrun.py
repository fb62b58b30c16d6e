"""The copy of a rank's lines in the job's log: each line whole, and the last one, too."""

import io
import pathlib
import tempfile
import types
import typing

import hypothesis
import hypothesis.strategies as st

from ddp.node import torchrun


@hypothesis.given(st.lists(st.text(st.sampled_from("ab \n"), max_size=9), max_size=6))
def test_however_a_rank_writes_its_lines_are_whole(pieces: list[str]):
    made: dict[str, typing.Any] = {}
    exec(torchrun.TAIL, made)
    copied, text = io.StringIO(), "".join(pieces)
    with (
        tempfile.TemporaryDirectory() as folder,
        pathlib.Path(folder, "stdout.log").open("a", buffering=1) as log,
    ):

        def wait(_: float) -> bool:  # in each wait the rank writes a piece; the last one ends it
            log.write(pieces.pop(0) if pieces else "")
            log.flush()
            return not pieces

        made["tail_logfile"](
            "[rank1]: ",
            log.name,
            copied,
            types.SimpleNamespace(wait=wait),
            0.1,
            log_line_filter=None,
        )
    lines = text.removesuffix("\n").split("\n") if text else []
    assert copied.getvalue() == "".join(f"[rank1]: {line}\n" for line in lines)

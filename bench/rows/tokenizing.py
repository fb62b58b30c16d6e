"""Megabytes of text per second into GPT-2 tokens.

The text is real and no file comes twice, so that every turn is new to both sides.
"""

# pyright: basic, reportPrivateImportUsage=false
import json
import os
import pathlib
import shutil
import subprocess
import sys

import tokenizers as hf  # pyright: ignore[reportMissingImports] - the peer; make bench installs it

from bench import data, row
from ddptrain.data import tokenizers

# Words met before are remembered, here as there: a turn is long enough, and one goes before, to be
# like the many that follow when gigabytes are tokenised.
TURN_BYTES, TURNS = 8_000_000, 5
SCALING_BYTES, PARTS = 160_000_000, 40


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure one core against HF tokenizers, and the whole command with two tasks against one."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    documents = data.corpus(max(SCALING_BYTES, TURN_BYTES * (TURNS + 1)))
    return [_one_core(documents), _two_tasks(documents, scratch)]


def _one_core(documents: list[str]) -> row.Row:
    mine, theirs = tokenizers.Gpt2Tokenizer(), _their_tokenizer()
    if any(len(mine.encode(text)) != len(theirs.encode(text).ids) for text in documents[:10]):
        raise RuntimeError("the two tokenizers count differently")
    turns: list[list[str]] = [[]]
    for document in documents:
        if sum(map(len, turns[-1])) >= TURN_BYTES:
            turns.append([])
        turns[-1].append(document)
    sizes = [sum(len(d.encode()) for d in turn) for turn in turns[1 : TURNS + 1]]
    orders = [iter(turns[: TURNS + 1]) for _ in range(2)]
    taken = row.alternate(
        [
            lambda: [mine.encode(d) for d in next(orders[0])],
            lambda: [theirs.encode(d).ids for d in next(orders[1])],
        ],
        TURNS,
    )
    rates: list[float] = []  # MB/s, ours and the peer's
    for laps in taken:
        turns_of = zip(sizes, laps.wall_s, strict=False)
        rates.append(row.median([size / wall for size, wall in turns_of]) / 1e6)
    ours, peer = rates
    note = f"{taken[0].beside(taken[1])} of {TURN_BYTES // 10**6} MB, all of it new"
    return row.Row(
        "tokenising, one core",
        ours,
        peer,
        "MB/s",
        "HF tokenizers, same vocabulary",
        goal=6.0,
        note=note,
    )


def _their_tokenizer() -> hf.Tokenizer:
    merges = [
        tuple(line.split()) for line in tokenizers.gpt2_merges().splitlines()[1:] if line.strip()
    ]
    vocabulary = {c: n for n, c in enumerate(sorted(hf.pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = hf.Tokenizer(hf.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def _two_tasks(documents: list[str], scratch: pathlib.Path) -> row.Row:
    text = scratch / "text"
    text.mkdir()
    size = sum(len(document.encode()) for document in documents)
    for number in range(PARTS):
        share = documents[number * len(documents) // PARTS : (number + 1) * len(documents) // PARTS]
        (text / f"{number:02d}.jsonl").write_text(
            "".join(f"{json.dumps({'text': one})}\n" for one in share)
        )
    places = ["--source", str(text), "--output", str(scratch / "out")]
    base = [sys.executable, "-m", "ddptrain", "prepare", *places]

    def prepare(workers: int) -> None:
        shutil.rmtree(scratch / "out", ignore_errors=True)
        flags = ["--tokenizer", "gpt2", "--part-mib", "4", "--workers", str(workers)]
        subprocess.run([*base, *flags], check=True, capture_output=True)

    two, one = row.alternate([lambda: prepare(2), lambda: prepare(1)], TURNS)
    ours, peer = (size / row.median(laps.wall_s) / 1e6 for laps in (two, one))
    note = (
        f"{two.beside(one)}; the whole command on {size // 10**6} MB in {len(documents)} documents"
    )
    return row.Row("prepare, two tasks", ours, peer, "MB/s", "one task", goal=1.9, note=note)

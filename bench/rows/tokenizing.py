"""Megabytes of text per second into GPT-2 tokens."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib
import time

import tokenizers as hf  # pyright: ignore[reportMissingImports] - the peer; make bench installs it

from bench import data, row
from ddptrain import prepare, tokenizers

SIZE_BYTES, TURNS = 2_000_000, 5  # of text in a turn, never the same twice
SCALING_BYTES, PARTS = 96_000_000, 12


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure one core against HF tokenizers, and two tasks against one."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    whole = data.text(SIZE_BYTES * (TURNS + 1))
    documents = [whole[at : at + 20_000] for at in range(0, len(whole), 20_000)]
    mine = tokenizers.Gpt2Tokenizer()
    merges = [tuple(line.split()) for line in tokenizers._gpt2_merges(None).splitlines()[1:] if line.strip()]
    printable = hf.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {c: n for n, c in enumerate(sorted(printable))}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    theirs = hf.Tokenizer(hf.models.BPE(vocab=vocabulary, merges=merges))
    theirs.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)

    sample = documents[:10]
    assert [len(mine.encode(d)) for d in sample] == [len(theirs.encode(d).ids) for d in sample]
    per_turn = SIZE_BYTES // 20_000
    turns = [iter([documents[n * per_turn : (n + 1) * per_turn] for n in range(TURNS + 1)]) for _ in range(2)]
    taken = row.alternate(
        [lambda: [mine.encode(d) for d in next(turns[0])], lambda: [theirs.encode(d).ids for d in next(turns[1])]],
        TURNS,
    )
    rates = [SIZE_BYTES / row.median(laps.wall_s) / 1e6 for laps in taken]
    found = [
        row.Row(
            "tokenising, one core",
            rates[0],
            rates[1],
            "MB/s",
            "HF tokenizers, same vocabulary and counts",
            goal=6.0,
            note=f"{taken[0].cpu_ratio(taken[1])}; new text in each turn",
        )
    ]

    text = data.text(SCALING_BYTES)
    (scratch / "text").mkdir()
    for number in range(PARTS):
        part = text[number * SCALING_BYTES // PARTS : (number + 1) * SCALING_BYTES // PARTS]
        (scratch / "text" / f"{number:02d}.txt").write_text(part)
    plan_s: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(2):
        for workers in (1, 2):
            output = scratch / f"out-{workers}-{turn}"
            options = prepare.Options((str(scratch / "text"),), output, tokenizer="gpt2", workers=workers, part_mib=4.0)
            began = time.perf_counter()
            prepare.run(options)
            plan_s[workers].append(time.perf_counter() - began)
    one, two = (SCALING_BYTES / min(plan_s[n]) / 1e6 for n in (1, 2))
    note = f"{SCALING_BYTES // 10**6} MB, whole command: reading, tokenising, writing, fsync; process start-up included"
    found.append(row.Row("prepare, two tasks", two, one, "MB/s", "one task", goal=1.9, note=note))
    return found

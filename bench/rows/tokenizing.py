"""Megabytes of text per second into GPT-2 tokens: real text, no file twice, so that every turn is new to both sides."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib
import subprocess
import sys

import tokenizers as hf  # pyright: ignore[reportMissingImports] - the peer; make bench installs it

from bench import data, row
from ddptrain import tokenizers

# Words met before are remembered, here as there: a turn is long enough, and one goes before, to be like the many that
# follow when gigabytes are tokenised.
TURN_BYTES, TURNS = 8_000_000, 5
SCALING_BYTES, PARTS, SCALING_TURNS = 160_000_000, 40, 3


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure one core against HF tokenizers, two tasks against one, and against nanoGPT's two processes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    documents = data.corpus(max(SCALING_BYTES, TURN_BYTES * (TURNS + 1)))
    return [_one_core(documents), *_tasks(documents, scratch)]


def _one_core(documents: list[str]) -> row.Row:
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

    turns: list[list[str]] = [[]]
    for document in documents:
        if sum(map(len, turns[-1])) >= TURN_BYTES:
            turns.append([])
        turns[-1].append(document)
    sizes = [sum(len(d.encode()) for d in turn) for turn in turns[1 : TURNS + 1]]
    orders = [iter(turns[: TURNS + 1]) for _ in range(2)]
    taken = row.alternate(
        [lambda: [mine.encode(d) for d in next(orders[0])], lambda: [theirs.encode(d).ids for d in next(orders[1])]],
        TURNS,
    )
    rates = [row.median([size / wall for size, wall in zip(sizes, laps.wall_s, strict=False)]) / 1e6 for laps in taken]
    return row.Row(
        "tokenising, one core", rates[0], rates[1], "MB/s", "HF tokenizers, same vocabulary and counts", goal=6.0,
        note=f"{taken[0].cpu_ratio(taken[1])}; {len(taken[0].wall_s)} turns of {TURN_BYTES // 10**6} MB, all of it new",
    )  # fmt: skip


def _tasks(documents: list[str], scratch: pathlib.Path) -> list[row.Row]:
    """Run the whole command with one and with two tasks, and nanoGPT's with two, in turns."""
    (scratch / "text").mkdir()
    size = 0
    for number in range(PARTS):
        share = documents[number * len(documents) // PARTS : (number + 1) * len(documents) // PARTS]
        size += (scratch / "text" / f"{number:02d}.txt").write_bytes("".join(share).encode())
    taken: dict[tuple[str, int], list[float]] = {("ours", 1): [], ("ours", 2): [], ("peer", 2): []}
    for turn in range(SCALING_TURNS):
        for (who, tasks), laps in taken.items():
            laps.append(_seconds(who, scratch / "text", scratch / f"{who}-{tasks}-{turn}", tasks))
    one, two, theirs = (size / row.median(laps) / 1e6 for laps in taken.values())
    note = f"{size // 10**6} MB: vocabulary, reading, tokenising, writing, fsync; the workers' start included"
    return [
        row.Row("prepare, two tasks", two, one, "MB/s", "one task", goal=1.9, note=note),
        row.Row(
            "prepare, two tasks", two, theirs, "MB/s", "nanoGPT's map(num_proc=2)",
            note="the same tiktoken; it neither checks nor syncs what it writes",
        ),
    ]  # fmt: skip


def _seconds(who: str, text: pathlib.Path, output: pathlib.Path, tasks: int) -> float:
    """Run bench/tasks.py, and return the seconds that it tells."""
    argv = [sys.executable, "-m", "bench.tasks", who, str(text), str(output), str(tasks)]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.rpartition("seconds ")[2])

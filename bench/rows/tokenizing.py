"""Megabytes of text per second into GPT-2 tokens: real text, no file twice, so that every turn is new to both sides."""

# pyright: basic, reportPrivateImportUsage=false
import json
import os
import pathlib
import shutil
import subprocess
import sys

import tokenizers as hf  # pyright: ignore[reportMissingImports] - the peer; make bench installs it

from bench import data, row
from bench.peers import checkouts
from ddptrain import tokenizers

# Words met before are remembered, here as there: a turn is long enough, and one goes before, to be like the many that
# follow when gigabytes are tokenised.
TURN_BYTES, TURNS = 8_000_000, 5
SCALING_BYTES, PARTS, SCALING_TURNS = 160_000_000, 40, 5


def run(scratch: pathlib.Path) -> list[row.Row | row.NotHere]:
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
        note=f"{taken[0].beside(taken[1])} of {TURN_BYTES // 10**6} MB, all of it new",
    )  # fmt: skip


def _tasks(documents: list[str], scratch: pathlib.Path) -> list[row.Row | row.NotHere]:
    """Run the whole command with one and with two tasks, and nanoGPT's prepare.py with two, in turns."""
    text = scratch / "text"
    text.mkdir()
    size = sum(len(document.encode()) for document in documents)
    for number in range(PARTS):
        share = documents[number * len(documents) // PARTS : (number + 1) * len(documents) // PARTS]
        (text / f"{number:02d}.jsonl").write_text("".join(f"{json.dumps({'text': one})}\n" for one in share))
    taken = {("ours", 1): row.Laps(), ("ours", 2): row.Laps()}
    checkout = checkouts.look("nanoGPT")
    if isinstance(checkout, pathlib.Path):
        taken[str(checkout), 2] = row.Laps()
    tokens: set[int] = set()
    for _ in range(SCALING_TURNS):
        for (who, tasks), laps in taken.items():
            tokens.add(_prepared(who, text, scratch / "out", tasks, laps))
    if len(tokens) != 1:
        raise RuntimeError(f"the same documents became {tokens} tokens")
    one, two, *peers = taken.values()

    def rate(laps: row.Laps) -> float:
        return size / row.median(laps.wall_s) / 1e6

    what = f"{size // 10**6} MB in {len(documents)} documents, {tokens.pop()} tokens"
    note = f"{two.beside(one)}; {what}: vocabulary, reading, tokenising, writing, fsync, the workers' start"
    found: list[row.Row | row.NotHere] = [
        row.Row("prepare, two tasks", rate(two), rate(one), "MB/s", "one task", goal=1.9, note=note)
    ]
    for laps in peers:
        note = f"{two.beside(laps)}; the same tokens; it has read the texts before, and neither checks nor syncs"
        found.append(
            row.Row("prepare, two tasks", rate(two), rate(laps), "MB/s", "nanoGPT's prepare.py, num_proc=2", note=note)
        )
    return [*found, checkout] if isinstance(checkout, row.NotHere) else found


def _prepared(who: str, text: pathlib.Path, output: pathlib.Path, tasks: int, laps: row.Laps) -> int:
    """Run bench/tasks.py, add the times that it tells and return the number of tokens."""
    argv = [sys.executable, "-m", "bench.tasks", who, str(text), str(output), str(tasks)]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(output)
    printed = json.loads(done.stdout.splitlines()[-1])
    laps.wall_s.append(printed["wall_s"])
    laps.cpu_s.append(printed["cpu_s"])
    return printed["tokens"]

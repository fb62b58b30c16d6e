"""Tokens per second out of a 200 MB shard, cold and warm, batches of 12 x 1024."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import os
import pathlib

import numpy as np
import torch

from bench import data, row
from bench.peers import checkouts, nanogpt
from ddptrain import reader, sampler

TOKENS, BATCH, SEQ_LEN = 100_000_000, 12, 1024
BATCHES = 6000
TURNS = 5


def run(scratch: pathlib.Path) -> list[row.Row | row.NotHere]:
    """Measure each loader from a cold and from a warm page cache, in turns."""
    dataset = data.dataset(scratch / "data", TOKENS, 50257)
    shard = dataset.splits["train"][0].path
    npy = scratch / "shard.npy"
    np.save(npy, np.fromfile(shard, dtype=np.uint16, offset=1024))
    plan = sampler.make_plan(1, SEQ_LEN, BATCH, dataset.tokens("train"))
    read = [shard, npy]

    def ours() -> None:
        with reader.Reader(dataset, plan, rank=0, size=1, start=0, stop=10**6, device=torch.device("cpu")) as batches:
            _take(batches.next, BATCHES)

    loaders = {"ours": (ours, BATCHES), "np.load of whole shards": (lambda: _whole_shard(npy, BATCHES), BATCHES)}
    checkout = checkouts.look("nanoGPT")
    if isinstance(checkout, pathlib.Path):
        nanogpt.lay_out(scratch / "theirs", checkout, dataset)
        read.append(scratch / "theirs" / "data" / nanogpt.DATASET / "train.bin")
        program = nanogpt.Program(
            checkout, scratch / "theirs", block_size=SEQ_LEN, batch_size=BATCH, n_layer=1, n_head=1, n_embd=8
        )
        loaders["nanoGPT's get_batch"] = (lambda: _take(program.get_batch, BATCHES // 24), BATCHES // 24)

    found: list[row.Row | row.NotHere] = []
    for state in ("cold", "warm"):
        taken = {name: row.Laps() for name in loaders}
        for _ in range(TURNS):
            for name, (action, _) in loaders.items():
                for path in read:
                    _cache(path, keep=state == "warm")
                taken[name].measure(action)
        rates = {
            name: count * BATCH * SEQ_LEN / 1e6 / row.median(taken[name].wall_s) for name, (_, count) in loaders.items()
        }
        for name in reversed([*loaders][1:]):
            goal = 9.0 if name.startswith("nanoGPT") else None
            note = _beside(taken["ours"], taken[name], BATCHES / loaders[name][1])
            found.append(row.Row(f"loader, {state}", rates["ours"], rates[name], "Mtok/s", name, goal=goal, note=note))
    found.append(_npz(scratch, rates["ours"]))
    if isinstance(checkout, row.NotHere):
        found.append(checkout)
    return found


def _beside(ours: row.Laps, peer: row.Laps, share: float) -> str:
    """Return the note of a peer that took a share of the batches that ours took."""
    whole = row.Laps([share * one for one in peer.wall_s], [share * one for one in peer.cpu_s])
    return f"{ours.beside(whole)} for {BATCHES} batches"


def _npz(scratch: pathlib.Path, ours: float) -> row.Row:
    """Return the row of a dataset class that opens its padded shard anew in `__getitem__`."""
    rows = np.random.default_rng(1).integers(0, 50257, (20_000, 512)).astype(np.int32)
    path = scratch / "padded.npz"
    np.savez(path, input_ids=rows, attention_mask=np.ones_like(rows))

    def sample(index: int) -> None:
        with np.load(path) as shard:
            shard["input_ids"][index].astype(np.int64)

    laps = row.Laps()
    for turn in range(TURNS):
        laps.measure(lambda turn=turn: [sample(index) for index in range(20 * turn, 20 * turn + 20)])
    rate = 20 * 512 / 1e6 / row.median(laps.wall_s)
    return row.Row(
        "loader, warm", ours, rate, "Mtok/s", "np.load of a 40 MB .npz for each sample", goal=100.0,
        note=f"peer {laps.spread} for 20 samples",
    )  # fmt: skip


def _take(batch: collections.abc.Callable[[], object], count: int) -> None:
    for _ in range(count):
        batch()


def _whole_shard(path: pathlib.Path, count: int) -> None:
    """Take batches out of a shard that np.load reads whole, in order; at its end it is loaded again."""
    tokens, at, size = torch.empty(0, dtype=torch.long), 0, BATCH * SEQ_LEN
    for _ in range(count):
        if at + size + 1 > len(tokens):
            tokens, at = torch.tensor(np.load(path).astype(np.int32), dtype=torch.long), 0
        piece = tokens[at : at + size + 1]
        _ = piece[:-1].view(BATCH, SEQ_LEN), piece[1:].view(BATCH, SEQ_LEN)
        at += size


def _cache(path: pathlib.Path, *, keep: bool) -> None:
    """Bring a file into the page cache, or put it out."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if keep:
            while os.read(fd, 8 << 20):
                pass
        else:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)

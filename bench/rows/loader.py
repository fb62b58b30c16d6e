"""Tokens per second out of a 200 MB shard, cold and warm, batches of 12 x 1024."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import os
import pathlib

import numpy as np
import torch

from bench import data, peers, row
from ddptrain.data import batches, sampler

TOKENS = 100_000_000
BATCH, SEQ_LEN = 12, 1024
BATCHES = 6000  # of ours and of whole shards
FEWER = 250  # of get_batch
TURNS = 5


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure each loader from a cold and from a warm page cache, in turns."""
    dataset = data.dataset(scratch / "data", TOKENS, 50257)
    shard = dataset.splits["train"][0].path
    npy = scratch / "shard.npy"
    np.save(npy, np.fromfile(shard, dtype=np.uint16, offset=1024))
    plan = sampler.make_plan(1, SEQ_LEN, BATCH, dataset.tokens("train"))
    checkout = peers.nanogpt()
    peers.lay_out(scratch / "theirs", checkout, dataset)
    read = [shard, npy, scratch / "theirs" / "data" / peers.DATASET / "train.bin"]
    get_batch = peers.get_batch(checkout, scratch / "theirs", seq_len=SEQ_LEN, batch=BATCH)

    def ours() -> None:
        with batches.Reader(
            dataset, plan, rank=0, size=1, start=0, stop=10**6, device=torch.device("cpu")
        ) as own:
            _take(own.next, BATCHES)

    loaders: dict[str, tuple[collections.abc.Callable[[], None], int]] = {
        "ours": (ours, BATCHES),
        "np.load of whole shards": (lambda: _whole_shard(npy), BATCHES),
        "nanoGPT's get_batch": (lambda: _take(get_batch, FEWER), FEWER),
    }
    found: list[row.Row] = []
    for state in ("cold", "warm"):
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(TURNS):
            for name, (action, count) in loaders.items():
                for path in read:
                    _cache(path, keep=state == "warm")
                laps = row.Laps()
                laps.measure(action)
                rates[name].append(count * BATCH * SEQ_LEN / 1e6 / laps.wall_s[0])
        for name, goal in (("nanoGPT's get_batch", 9.0), ("np.load of whole shards", None)):
            note = (
                f"{row.spread(rates['ours'], 'Mtok/s')}, peer {row.spread(rates[name], 'Mtok/s')}"
            )
            medians = (row.median(rates["ours"]), row.median(rates[name]))
            found.append(
                row.Row(f"loader, {state}", *medians, "Mtok/s", name, goal=goal, note=note)
            )
    return found


def _take(batch: collections.abc.Callable[[], object], count: int) -> None:
    for _ in range(count):
        batch()


def _whole_shard(path: pathlib.Path) -> None:
    """Take batches in order out of a shard that np.load reads whole, and again at its end."""
    size = BATCH * SEQ_LEN
    tokens = torch.empty(0, dtype=torch.long)
    at = 0
    for _ in range(BATCHES):
        if at + size + 1 > len(tokens):
            shard = np.load(path).astype(np.int32)
            tokens = torch.tensor(shard, dtype=torch.long)
            at = 0
        piece = tokens[at : at + size + 1]
        _ = piece[:-1].view(BATCH, SEQ_LEN), piece[1:].view(BATCH, SEQ_LEN)
        at += size


def _cache(path: pathlib.Path, *, keep: bool) -> None:
    """Drop a file from the page cache, and read it in again with `keep`."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while keep and file.read(8 << 20):
            pass

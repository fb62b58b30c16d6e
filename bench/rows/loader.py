"""Tokens per second out of a 200 MB shard, cold and warm, batches of 12 x 1024."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import os
import pathlib
import time

import numpy as np
import torch

from bench import data, row
from bench.peers import loaders, nanogpt
from ddptrain import reader, sampler

TOKENS, BATCH, SEQ_LEN = 100_000_000, 12, 1024
BATCHES = 6000
TURNS = 3


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure each loader from a cold and from a warm page cache, in turns."""
    dataset = data.dataset(scratch / "data", TOKENS, 50257)
    shard = dataset.splits["train"][0].path
    npy = scratch / "shard.npy"
    np.save(npy, np.fromfile(shard, dtype=np.uint16, offset=1024))
    plan = sampler.make_plan(1, SEQ_LEN, BATCH, dataset.tokens("train"))

    def ours() -> float:
        with reader.Reader(dataset, plan, rank=0, size=1, start=0, stop=10**6, device=torch.device("cpu")) as batches:
            return _rate(batches.next, BATCHES)

    def whole() -> float:
        return _rate(loaders.WholeShard(npy, BATCH, SEQ_LEN).next, BATCHES)

    def memmap() -> float:
        return _rate(lambda: nanogpt.get_batch(shard, BATCH, SEQ_LEN), BATCHES // 24)

    found: list[row.Row] = []
    for state in ("cold", "warm"):
        rates: dict[str, list[float]] = {"ours": [], "memmap": [], "whole": []}
        for _ in range(TURNS):
            for name, action in (("ours", ours), ("memmap", memmap), ("whole", whole)):
                for path in (shard, npy):
                    _cache(path, keep=state == "warm")
                rates[name].append(action())
        best = {name: row.median(values) / 1e6 for name, values in rates.items()}
        found.append(
            row.Row(f"loader, {state}", best["ours"], best["memmap"], "Mtok/s", "nanoGPT's get_batch", goal=9.0)
        )
        found.append(row.Row(f"loader, {state}", best["ours"], best["whole"], "Mtok/s", "np.load of whole shards"))
    rows = np.random.default_rng(1).integers(0, 50257, (20_000, 512)).astype(np.int32)
    npz = scratch / "padded.npz"
    np.savez(npz, input_ids=rows, attention_mask=np.ones_like(rows))
    began = time.perf_counter()
    for index in range(20):
        loaders.sample_from_npz(npz, index)
    rate = 20 * 512 / (time.perf_counter() - began) / 1e6
    found.append(
        row.Row("loader, warm", best["ours"], rate, "Mtok/s", "a 40 MB .npz opened for each sample", goal=100.0)
    )
    return found


def _rate(take: collections.abc.Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        take()
    return count * BATCH * SEQ_LEN / (time.perf_counter() - began)


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

"""Batches from shards: one thread reads whole windows ahead of the training loop.

No worker processes: nothing is forked, nothing receives signals, nothing has a state that a checkpoint must hold.
"""

# pyright: basic
import collections.abc
import os
import queue
import threading

import numpy as np
import torch
from torch import Tensor

from ddptrain import errors, sampler, shards

IGNORED = -100  # the target that cross_entropy skips
_AHEAD = 3  # batches that are ready before they are asked for


class Windows:
    """Windows of a split, read on first use and forgotten when a step no longer touches them."""

    def __init__(self, split: tuple[shards.Shard, ...], index: sampler.Sampler) -> None:
        self._split, self._index = split, index
        self._held: dict[int, np.ndarray] = {}
        self._fds: dict[int, int] = {}

    def rows(self, pieces: list[sampler.Piece]) -> np.ndarray:
        """Return the rows of the pieces, each with the token after its end, shape (B, T + 1), in the shards' dtype."""
        needed = {piece.window for piece in pieces}
        self._held = {window: tokens for window, tokens in self._held.items() if window in needed}
        seq_len = self._index.plan.seq_len
        out = np.empty((sum(len(p.rows) for p in pieces), seq_len + 1), dtype=self._split[0].dtype)
        at = 0
        for piece in pieces:
            if piece.window not in self._held:
                self._held[piece.window] = self._read(piece.window)
            tokens = self._held[piece.window]
            step = tokens.itemsize
            view = np.lib.stride_tricks.as_strided(
                tokens, (tokens.size // seq_len, seq_len + 1), (seq_len * step, step), writeable=False
            )
            np.take(view, piece.rows, axis=0, out=out[at : at + len(piece.rows)], mode="clip")
            at += len(piece.rows)
        return out

    def close(self) -> None:
        """Close the shards."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _read(self, window: int) -> np.ndarray:
        number = int(self._index.window_shard[window])
        shard = self._split[number]
        if number not in self._fds:
            self._fds[number] = os.open(shard.path, os.O_RDONLY)
        seq_len = self._index.plan.seq_len
        tokens = np.empty(int(self._index.window_rows[window]) * seq_len + 1, dtype=shard.dtype)
        view = memoryview(tokens).cast("B")
        offset = shards.HEADER_BYTES + int(self._index.window_first_row[window]) * seq_len * tokens.itemsize
        done = 0
        while done < view.nbytes:
            count = os.preadv(self._fds[number], [view[done:]], offset + done)
            if count <= 0:
                raise errors.UserError(
                    f"shard {shard.path} ends too early; verify it with `python -m ddptrain inspect`"
                )
            done += count
        return tokens


def to_batch(rows: np.ndarray, *, masked: bool) -> tuple[Tensor, Tensor]:
    """Return (tokens_BT, targets_BT), int64, of rows of shape (B, T + 1); masked targets become -100."""
    if not masked:
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1], both[:, 1:]
    bits = rows.itemsize * 8 - 1
    ids = (rows & ((1 << bits) - 1)).astype(np.int64)
    targets = np.where(rows[:, 1:] >> bits, IGNORED, ids[:, 1:])
    return torch.from_numpy(ids[:, :-1]), torch.from_numpy(targets)


class Reader:
    """Yields this rank's samples of each step, in order, from `start` on; use it as a context manager."""

    def __init__(
        self,
        dataset: shards.Dataset,
        plan: sampler.Plan,
        *,
        rank: int,
        size: int,
        start: int,
        stop: int,
        device: torch.device,
    ) -> None:
        self._index = sampler.Sampler(plan, dataset.splits["train"])
        self._windows = Windows(dataset.splits["train"], self._index)
        share = plan.global_batch // size
        self._first, self._last = rank * share, (rank + 1) * share
        self._masked, self._device = dataset.masked, device
        self._queue: queue.Queue[tuple[Tensor, Tensor] | BaseException] = queue.Queue(_AHEAD)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(start, stop), name="reader", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=10)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return (tokens_BT, targets_BT) of the next step; B is this rank's share of the global batch."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def _fill(self, start: int, stop: int) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # pinning in a new thread would otherwise wake GPU 0
            for step in range(start, stop):
                rows = self._windows.rows(self._index.pieces(step, self._first, self._last))
                batch = to_batch(rows, masked=self._masked)
                if self._device.type == "cuda":
                    batch = (batch[0].contiguous().pin_memory(), batch[1].contiguous().pin_memory())
                if not self._offer(batch):
                    return
        except BaseException as e:
            self._offer(e)
        finally:
            self._windows.close()

    def _offer(self, item: tuple[Tensor, Tensor] | BaseException) -> bool:
        while not self._over.is_set():
            try:
                self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False


def fixed_rows(
    dataset: shards.Dataset, split: str, seq_len: int, limit: int
) -> collections.abc.Callable[[int, int], np.ndarray]:
    """Return a function of (first, last) giving rows [first, last) of an evenly spread, fixed set of at most `limit`.

    The function's attribute `count` is the size of the set: it depends on the data and `limit` only.
    """
    plan = sampler.Plan(0, seq_len, 1, 1, max(1, sampler.MAX_WINDOW_TOKENS // seq_len))
    parts = dataset.splits[split]
    counts = [max(0, shard.tokens - 1) // seq_len for shard in parts]
    total = sum(counts)
    chosen = np.linspace(0, total - 1, num=min(limit, total), dtype=np.int64) if total else np.empty(0, dtype=np.int64)
    ends = np.cumsum(counts)

    def take(first: int, last: int) -> np.ndarray:
        out = np.empty((last - first, seq_len + 1), dtype=dataset.dtype)
        for at, row in enumerate(chosen[first:last]):
            number = int(np.searchsorted(ends, row, side="right"))
            inside = int(row) - (int(ends[number - 1]) if number else 0)
            offset = shards.HEADER_BYTES + inside * plan.seq_len * out.itemsize
            out[at] = np.fromfile(parts[number].path, dtype=dataset.dtype, count=seq_len + 1, offset=offset)
        return out

    take.count = len(chosen)  # type: ignore[attr-defined]
    return take

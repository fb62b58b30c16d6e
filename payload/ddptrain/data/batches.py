"""Batches from shards: one thread reads whole windows ahead of the training loop.

No worker processes: nothing is forked, nothing receives signals, nothing has a state that a
checkpoint must hold.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import os
import queue
import threading

import numpy as np
import torch
from torch import Tensor

from ddptrain.data import sampler, shards
from ddptrain.ground import errors

IGNORED = -100  # a target that counts for nothing
# Gathered at once: the cost of a step by itself is then small.
_BLOCK_STEPS = 32
_BLOCK_BYTES = 8 << 20
_BLOCKS_AHEAD = 2


class Windows:
    """Windows of a split, read on first use and forgotten when a block no longer touches them."""

    def __init__(self, split: tuple[shards.Shard, ...], index: sampler.Sampler) -> None:
        self._split = split
        self._index = index
        self._held: dict[int, np.ndarray] = {}
        self._fds: dict[int, int] = {}

    def gather(self, strips: list[sampler.Strip], count: int) -> np.ndarray:
        """Return the rows of `count` steps with the next token, shape (count, B, T + 1), int64."""
        T = self._index.plan.seq_len
        width = sum(strip.width for strip in strips)
        out = np.empty((count, width, T + 1), dtype=np.int64)
        needed = {piece.window for strip in strips for piece in strip.pieces}
        self._held = {window: held for window, held in self._held.items() if window in needed}
        for strip in strips:
            rows, after = self._taken(strip, T)
            columns = slice(strip.column, strip.column + strip.width)
            out[:, columns, :T] = rows.reshape(count, strip.width, T)
            out[:, columns, T] = after.reshape(count, strip.width)
        return out

    def _taken(self, strip: sampler.Strip, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a strip, and the token after each."""
        taken = [self._take(piece, seq_len) for piece in strip.pieces]
        if len(taken) == 1:
            return taken[0]
        rows = np.concatenate([rows for rows, _ in taken])
        after = np.concatenate([after for _, after in taken])
        return rows, after

    def _take(self, piece: sampler.Piece, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        if piece.window not in self._held:
            self._held[piece.window] = self._read(piece.window)
        tokens = self._held[piece.window]
        rows = tokens[:-1].reshape(-1, seq_len).take(piece.rows, axis=0)
        after = tokens[(piece.rows + 1) * seq_len]
        return rows, after

    def close(self) -> None:
        """Close the shards."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _read(self, window: int) -> np.ndarray:
        shard, fd = self._shard_of(window)
        seq_len = self._index.plan.seq_len
        num_rows = int(self._index.window_rows[window])
        first_row = int(self._index.window_first_row[window])
        tokens = np.empty(num_rows * seq_len + 1, dtype=shard.dtype)
        offset = shards.HEADER_BYTES + first_row * seq_len * tokens.itemsize

        view = tokens.view(np.uint8).data
        done = 0
        while done < view.nbytes:
            count = os.preadv(fd, [view[done:]], offset + done)
            if count <= 0:
                remedy = "verify it with `python -m ddptrain inspect`"
                raise errors.UserError(f"shard {shard.path} ends too early; {remedy}")
            done += count
        return tokens

    def _shard_of(self, window: int) -> tuple[shards.Shard, int]:
        """Return the shard of a window and its descriptor."""
        number = int(self._index.window_shard[window])
        shard = self._split[number]
        if number not in self._fds:
            self._fds[number] = os.open(shard.path, os.O_RDONLY)
        return shard, self._fds[number]


def split_batch(rows_BT1: Tensor, mask_bit: int | None) -> tuple[Tensor, Tensor]:
    """Return (tokens_BT, targets_BT) of rows of T + 1 ids; masked targets become -100."""
    if mask_bit is None:
        return rows_BT1[:, :-1], rows_BT1[:, 1:]
    ids = rows_BT1 & ((1 << mask_bit) - 1)
    is_masked = rows_BT1[:, 1:] >> mask_bit == 1
    return ids[:, :-1], ids[:, 1:].masked_fill(is_masked, IGNORED)


def num_learned(rows_BT1: Tensor, mask_bit: int) -> Tensor:
    """Return of each row how many of its targets count, shape (B,)."""
    return (rows_BT1[:, 1:] >> mask_bit == 0).sum(dim=1)


def mask_bit(dataset: shards.Dataset) -> int | None:
    """Return the bit that says "read, not learned", or None in a dataset without."""
    return np.dtype(dataset.dtype).itemsize * 8 - 1 if dataset.masked else None


class Reader(contextlib.AbstractContextManager["Reader"]):
    """Yields this rank's samples of each step from `start` on, in order; a context manager."""

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
        self._first = rank * share
        self._last = self._first + share
        self._device = device
        step_bytes = 8 * share * plan.seq_len
        self._steps = max(1, min(_BLOCK_STEPS, _BLOCK_BYTES // step_bytes))
        self._block: collections.abc.Iterator[Tensor] = iter(())
        self._queue: queue.Queue[Tensor | BaseException] = queue.Queue(_BLOCKS_AHEAD)
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(start, stop), name="reader", daemon=True
        )
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=10)

    def next(self) -> Tensor:
        """Return rows_BT1 of the next step, int64.

        B is this rank's share, and T + 1 includes the target of the last token.
        """
        rows = next(self._block, None)
        if rows is None:
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            self._block = iter(item)
            rows = next(self._block)
        return rows

    def _fill(self, start: int, stop: int) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(
                    self._device
                )  # pinning in a new thread would otherwise wake GPU 0
            step = start
            while step < stop:
                count = self._next_count(step, start, stop)
                if not self._offer(self._gathered(step, count)):
                    return
                step += count
        except BaseException as e:  # handed to the training loop, which raises it
            self._offer(e)
        finally:
            self._windows.close()

    def _next_count(self, step: int, start: int, stop: int) -> int:
        """Return how many steps to gather next, all in one pass.

        The first comes alone, because the loop waits for it.
        """
        if step == start:
            return 1
        left_of_pass = self._index.steps_per_pass - step % self._index.steps_per_pass
        return min(self._steps, stop - step, left_of_pass)

    def _gathered(self, step: int, count: int) -> Tensor:
        strips = self._index.block(step, count, self._first, self._last)
        block = torch.from_numpy(self._windows.gather(strips, count))
        return block.pin_memory() if self._device.type == "cuda" else block

    def _offer(self, item: Tensor | BaseException) -> bool:
        while not self._over.is_set():
            try:
                self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False


class FixedRows:
    """An evenly spread, fixed set of a split's rows: it depends on the data and its size only."""

    def __init__(
        self, split: tuple[shards.Shard, ...], dtype: str, seq_len: int, limit: int
    ) -> None:
        self._split = split
        self._dtype = dtype
        self._seq_len = seq_len
        counts = [max(0, shard.tokens - 1) // seq_len for shard in split]
        self._ends = np.cumsum(counts)
        total = sum(counts)
        self.count = min(limit, total)
        self._chosen = np.linspace(0, max(0, total - 1), num=self.count, dtype=np.int64)

    def __call__(self, first: int, last: int) -> np.ndarray:
        """Return rows [first, last) of the set, each with the token after its end."""
        out = np.empty((last - first, self._seq_len + 1), dtype=self._dtype)
        for at, row in enumerate(self._chosen[first:last]):
            out[at] = self._row(int(row))
        return out

    def _row(self, row: int) -> np.ndarray:
        number = int(np.searchsorted(self._ends, row, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        itemsize = np.dtype(self._dtype).itemsize
        offset = shards.HEADER_BYTES + (row - before) * self._seq_len * itemsize
        path = self._split[number].path
        return np.fromfile(path, dtype=self._dtype, count=self._seq_len + 1, offset=offset)


def fixed_rows(dataset: shards.Dataset, split: str, seq_len: int, limit: int) -> FixedRows:
    """Return a set of at most `limit` rows of a split."""
    return FixedRows(dataset.splits[split], dataset.dtype, seq_len, limit)

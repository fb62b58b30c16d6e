"""Batches from shards: one thread reads whole windows ahead of the training loop.

No worker processes: nothing is forked, nothing receives signals, nothing has a state that a checkpoint must hold.
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

from ddptrain import errors, model, sampler, shards

_BLOCK_STEPS, _BLOCK_BYTES = 32, 8 << 20  # gathered at once: the cost of a step by itself is then small
_BLOCKS_AHEAD = 2


class Windows:
    """Windows of a split, read on first use and forgotten when a block no longer touches them."""

    def __init__(self, split: tuple[shards.Shard, ...], index: sampler.Sampler) -> None:
        self._split, self._index = split, index
        self._held: dict[int, np.ndarray] = {}
        self._fds: dict[int, int] = {}

    def gather(self, strips: list[sampler.Strip], count: int) -> np.ndarray:
        """Return the rows of `count` steps, each with the token after its end, shape (count, B, T + 1), int64."""
        T = self._index.plan.seq_len
        out = np.empty((count, sum(strip.width for strip in strips), T + 1), dtype=np.int64)
        needed = {piece.window for strip in strips for piece in strip.pieces}
        self._held = {window: tokens for window, tokens in self._held.items() if window in needed}
        for strip in strips:
            taken = [self._take(piece, T) for piece in strip.pieces]
            rows, after = taken[0] if len(taken) == 1 else [np.concatenate(parts) for parts in zip(*taken, strict=True)]
            columns = slice(strip.column, strip.column + strip.width)
            out[:, columns, :T] = rows.reshape(count, strip.width, T)
            out[:, columns, T] = after.reshape(count, strip.width)
        return out

    def _take(self, piece: sampler.Piece, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        if piece.window not in self._held:
            self._held[piece.window] = self._read(piece.window)
        tokens = self._held[piece.window]
        return tokens[:-1].reshape(-1, seq_len).take(piece.rows, axis=0), tokens[(piece.rows + 1) * seq_len]

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
        view = tokens.view(np.uint8).data
        offset = shards.HEADER_BYTES + int(self._index.window_first_row[window]) * seq_len * tokens.itemsize
        done = 0
        while done < view.nbytes:
            count = os.preadv(self._fds[number], [view[done:]], offset + done)
            if count <= 0:
                text = f"shard {shard.path} ends too early; verify it with `python -m ddptrain inspect`"
                raise errors.UserError(text)
            done += count
        return tokens


def split_batch(rows_BT1: Tensor, mask_bit: int | None) -> tuple[Tensor, Tensor]:
    """Return (tokens_BT, targets_BT) of rows of T + 1 ids; where the mask bit is set, the target is -100."""
    if mask_bit is None:
        return rows_BT1[:, :-1], rows_BT1[:, 1:]
    ids = rows_BT1 & ((1 << mask_bit) - 1)
    return ids[:, :-1], ids[:, 1:].masked_fill(rows_BT1[:, 1:] >> mask_bit == 1, model.IGNORED)


def num_learned(rows_BT1: Tensor, mask_bit: int) -> Tensor:
    """Return of each row how many of its targets count, shape (B,)."""
    return (rows_BT1[:, 1:] >> mask_bit == 0).sum(dim=1)


def mask_bit(dataset: shards.Dataset) -> int | None:
    """Return the bit that says "read, not learned", or None in a dataset without."""
    return np.dtype(dataset.dtype).itemsize * 8 - 1 if dataset.masked else None


class Reader(contextlib.AbstractContextManager["Reader"]):
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
        self._device = device
        self._steps = max(1, min(_BLOCK_STEPS, _BLOCK_BYTES // (8 * share * plan.seq_len)))
        self._block: collections.abc.Iterator[Tensor] = iter(())
        self._queue: queue.Queue[Tensor | BaseException] = queue.Queue(_BLOCKS_AHEAD)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(start, stop), name="reader", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=10)

    def next(self) -> Tensor:
        """Return rows_BT1 of the next step, int64: B is this rank's share, T + 1 because a target follows."""
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
                torch.cuda.set_device(self._device)  # pinning in a new thread would otherwise wake GPU 0
            step, per_pass = start, self._index.steps_per_pass
            while step < stop:
                count = min(self._steps if step > start else 1, stop - step, per_pass - step % per_pass)
                rows = self._windows.gather(self._index.block(step, count, self._first, self._last), count)
                block = torch.from_numpy(rows)
                if not self._offer(block.pin_memory() if self._device.type == "cuda" else block):
                    return
                step += count
        except BaseException as e:  # handed to the training loop, which raises it
            self._offer(e)
        finally:
            self._windows.close()

    def _offer(self, item: Tensor | BaseException) -> bool:
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
            offset = shards.HEADER_BYTES + inside * seq_len * out.itemsize
            out[at] = np.fromfile(parts[number].path, dtype=dataset.dtype, count=seq_len + 1, offset=offset)
        return out

    take.count = len(chosen)  # type: ignore[attr-defined]
    return take

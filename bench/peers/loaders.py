"""Two more usual loaders: whole .npy shards, and a padded .npz that is loaded anew for each sample."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class WholeShard:
    """As build-nanogpt reads: np.load of a shard, all of it to int64, then slices in order."""

    def __init__(self, path: pathlib.Path, batch: int, seq_len: int) -> None:
        self.path, self.size = path, batch * seq_len
        self.batch, self.seq_len = batch, seq_len
        self.tokens: Tensor | None = None
        self.at = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the next batch; at the end of the shard it is loaded again."""
        if self.tokens is None or self.at + self.size + 1 > len(self.tokens):
            self.tokens = torch.tensor(np.load(self.path).astype(np.int32), dtype=torch.long)
            self.at = 0
        piece = self.tokens[self.at : self.at + self.size + 1]
        self.at += self.size
        return piece[:-1].view(self.batch, self.seq_len), piece[1:].view(self.batch, self.seq_len)


def sample_from_npz(path: pathlib.Path, index: int) -> npt.NDArray[np.int64]:
    """Return one padded row, as a dataset class does that opens its shard in `__getitem__`."""
    with np.load(path) as shard:
        return shard["input_ids"][index].astype(np.int64)

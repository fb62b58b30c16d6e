"""nanoGPT's `prepare.py`, reimplemented from its README; without torch, which it does not import either."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import multiprocessing
import pathlib

import numpy as np


class Preparation:
    """`datasets.map` with `num_proc` processes, tiktoken on each document, then one memory map.

    What `datasets` would write to its cache and read again are here one .npy file per process: less work than Arrow's.
    """

    def __init__(self, documents: list[str], encode: collections.abc.Callable[[str], list[int]], end: int) -> None:
        self.documents, self.encode, self.end = documents, encode, end

    def run(self, folder: pathlib.Path, num_proc: int) -> int:
        """Write train.bin into the folder and return its number of tokens."""
        folder.mkdir()
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=self._share, args=(folder, n, num_proc)) for n in range(num_proc)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        parts = [np.load(folder / f"{n}.npy", mmap_mode="r") for n in range(num_proc)]
        count = sum(len(part) for part in parts)
        out = np.memmap(folder / "train.bin", dtype=np.uint16, mode="w+", shape=(count,))
        at = 0
        for part in parts:
            out[at : at + len(part)] = part
            at += len(part)
        out.flush()
        return count

    def _share(self, folder: pathlib.Path, number: int, num_proc: int) -> None:
        size = len(self.documents)
        ids: list[int] = []
        for document in self.documents[number * size // num_proc : (number + 1) * size // num_proc]:
            ids += self.encode(document)
            ids.append(self.end)
        np.save(folder / f"{number}.npy", np.array(ids, dtype=np.uint16))

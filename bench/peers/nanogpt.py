"""nanoGPT's own train.py out of a checkout: as a whole program, or held at its loop to take its steps in turns."""

# pyright: basic, reportPrivateImportUsage=false
import ast
import collections.abc
import contextlib
import io
import os
import pathlib
import pickle
import sys
import typing

import numpy as np

from ddptrain import shapes, shards

DATASET = "bench"


def lay_out(folder: pathlib.Path, checkout: pathlib.Path, dataset: shards.Dataset, *, has_vocab: bool = True) -> None:
    """Write a dataset's tokens as train.py reads them: bare 16-bit numbers, and the size of the vocabulary.

    Without the size train.py takes GPT-2's, 50304.
    """
    target = folder / "data" / DATASET
    target.mkdir(parents=True)
    (folder / "configurator.py").symlink_to(checkout / "configurator.py")  # read from the working directory
    for split, parts in dataset.splits.items():
        with (target / f"{split}.bin").open("wb") as file:
            for shard in parts:
                np.fromfile(shard.path, dtype="<u2", offset=shards.HEADER_BYTES).tofile(file)
    if has_vocab:
        (target / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": shapes.padded(dataset.vocab)}))


def command(checkout: pathlib.Path, **settings: object) -> list[str]:
    """Return the command of the whole program; its working directory is the folder that was laid out."""
    return [sys.executable, *_words(checkout, settings)]


def _words(checkout: pathlib.Path, settings: dict[str, typing.Any]) -> list[str]:
    given = {"device": "cpu", "dtype": "float32", "compile": False, "dataset": DATASET, **settings}
    return [str(checkout / "train.py"), *(f"--{key}={value}" for key, value in given.items())]


class Program:
    """train.py in this process, run up to its loop, whose condition becomes ours: it goes on while it is asked to.

    What it sets up (model, optimiser, get_batch) is in `names`.
    """

    def __init__(self, checkout: pathlib.Path, folder: pathlib.Path, **settings: object) -> None:
        body = ast.parse((checkout / "train.py").read_text(encoding="utf-8")).body
        (at,) = (number for number, node in enumerate(body) if isinstance(node, ast.While))
        loop = typing.cast(ast.While, body[at])
        loop.test = ast.Call(ast.Name("_goes_on", ast.Load()), [], [])
        self.names: dict[str, typing.Any] = {"__name__": "__main__", "_goes_on": self._goes_on}
        self._loop = _compiled([loop])
        self._left = 0
        argv = _words(checkout, {"out_dir": folder / "out", **settings})
        with _working(folder, checkout, argv):
            exec(_compiled(body[:at]), self.names)
        self.names["data_dir"] = str(folder / "data" / DATASET)  # from any working directory

    def run(self, steps: int) -> None:
        """Take so many turns of the loop."""
        self._left = steps
        with contextlib.redirect_stdout(io.StringIO()):
            exec(self._loop, self.names)

    def get_batch(self) -> object:
        """Return a batch of the training split."""
        return self.names["get_batch"]("train")

    def _goes_on(self) -> bool:
        self._left -= 1
        return self._left >= 0


def _compiled(nodes: list[ast.stmt]) -> typing.Any:
    return compile(ast.fix_missing_locations(ast.Module(nodes, [])), "train.py", "exec")


@contextlib.contextmanager
def _working(
    folder: pathlib.Path, checkout: pathlib.Path, argv: list[str]
) -> collections.abc.Generator[None, None, None]:
    """Be a program that was started in a folder, with its output thrown away."""
    before, home = sys.argv, pathlib.Path.cwd()
    sys.argv = argv
    sys.path.insert(0, str(checkout))
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.chdir(home)
        sys.path.remove(str(checkout))
        sys.argv = before

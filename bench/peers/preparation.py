"""nanoGPT's own data/openwebtext/prepare.py, on a dataset that lies here, with as many processes as are asked for.

Two of its constants are replaced, the processes and the batches in which it writes (it wants 1024 documents in its
validation split), `datasets.load_dataset` returns our documents in place of OpenWebText's, and tiktoken has its "gpt2"
already, with the same merges: nothing is downloaded. torch is not imported, as it is not there.
"""

# pyright: basic, reportPrivateImportUsage=false
import ast
import os
import pathlib

import numpy as np

from ddptrain import tokenizers


class Preparation:
    """prepare.py before it begins, with all that it imports."""

    def __init__(self, checkout: pathlib.Path, documents: list[str], folder: pathlib.Path, num_proc: int) -> None:
        os.environ.update(HF_HOME=str(folder / "hf"), HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
        import datasets  # pyright: ignore[reportMissingImports] - the peer; make bench installs it
        import tiktoken.registry

        tiktoken.registry.ENCODINGS["gpt2"] = tokenizers.Gpt2Tokenizer()._core
        # As load_dataset leaves them: in an Arrow file, of which each process maps its part
        datasets.Dataset.from_dict({"text": documents}).save_to_disk(str(folder / "documents"))
        held = datasets.DatasetDict({"train": datasets.load_from_disk(str(folder / "documents"))})
        datasets.load_dataset = lambda *_, **__: held
        tree = ast.parse((checkout / "data" / "openwebtext" / "prepare.py").read_text(encoding="utf-8"))
        _replace(tree, num_proc=num_proc, total_batches=max(1, len(documents) // 2000))  # one for each of 0.05 %
        self._program = compile(ast.fix_missing_locations(tree), "prepare.py", "exec")
        self._names = {"__name__": "__main__", "__file__": str(folder / "prepare.py")}

    def run(self) -> None:
        """Write train.bin and val.bin into the folder."""
        exec(self._program, self._names)


def count(folder: pathlib.Path) -> int:
    """Return the number of tokens that were written."""
    return sum((folder / f"{split}.bin").stat().st_size for split in ("train", "val")) // np.dtype(np.uint16).itemsize


def _replace(tree: ast.Module, **constants: int) -> None:
    """Give other values to names that are assigned a number. Raises ValueError when one is not."""
    left = dict(constants)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            (target,) = node.targets
            if isinstance(target, ast.Name) and target.id in left:
                node.value = ast.Constant(left.pop(target.id))
    if left:
        raise ValueError(f"prepare.py assigns no number to {', '.join(left)}")

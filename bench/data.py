"""Text and datasets for the measures, made on the spot."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib
import sysconfig
import zlib

import numpy as np

from bench import row
from ddptrain.data import shards, tokenizers
from ddptrain.ground import files


def corpus(limit_bytes: int) -> list[str]:
    """Return documents of real text: the Python sources of the interpreter and its packages.

    No file comes twice, the order mixes the packages, and long files are cut into documents of
    20 000 characters. Raises NotHere if the machine has less.
    """
    paths = sysconfig.get_paths()
    found = {
        path for name in ("stdlib", "purelib") for path in pathlib.Path(paths[name]).rglob("*.py")
    }
    documents: list[str] = []
    size = 0
    for path in sorted(found, key=lambda path: (zlib.crc32(str(path).encode()), path)):
        whole = path.read_text(encoding="utf-8", errors="replace")
        documents += [whole[at : at + 20_000] for at in range(0, len(whole), 20_000)]
        size += len(whole)
        if size >= limit_bytes:
            return documents
    wanted = f"{limit_bytes >> 20} MiB of text wanted"
    raise row.NotHere(f"{wanted}, Python and its packages have {size >> 20} MiB here")


def dataset(root: pathlib.Path, tokens: int, vocab: int, *, num_shards: int = 1) -> shards.Dataset:
    """Return a dataset of pseudo-random tokens with a pattern that can be learned."""
    rng = np.random.default_rng(7)
    entries: dict[str, list[dict[str, object]]] = {"train": [], "val": []}
    for split, count in (("train", tokens), ("val", max(20_000, tokens // 100))):
        for number in range(num_shards if split == "train" else 1):
            body = (rng.integers(0, vocab, count // num_shards) // 2 * 2 % vocab).astype(np.uint16)
            name = f"{split}/shard-{number:05d}.bin"
            entries[split].append(
                {
                    "split": split,
                    "file": name,
                    "docs": 1,
                    **shards.write(root / name, [body], "<u2"),
                }
            )
    identity = tokenizers.Identity("bench", vocab, 0, "0")
    manifest = {
        "format": 1,
        "name": "bench",
        "tokenizer": identity.as_record(),
        "dtype": "<u2",
        "masked": False,
        "splits": entries,
    }
    files.write_json(root / "dataset.json", manifest)
    return shards.open_dataset(root)

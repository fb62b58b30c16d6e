"""Text and datasets for the measures, made on the spot."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib
import sysconfig

import numpy as np

from ddptrain import files, shards, tokenizers


def text(limit_bytes: int) -> str:
    """Return real English and code: Python's own sources, cut or repeated to a size."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    parts: list[str] = []
    size = 0
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts and size < limit_bytes:
            parts.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(parts[-1])
    whole = "".join(parts)
    return (whole * (1 + limit_bytes // max(1, len(whole))))[:limit_bytes]


def dataset(root: pathlib.Path, tokens: int, vocab: int, *, num_shards: int = 1) -> shards.Dataset:
    """Return a dataset of pseudo-random tokens with a pattern that can be learned."""
    rng = np.random.default_rng(7)
    entries: dict[str, list[dict[str, object]]] = {"train": [], "val": []}
    for split, count in (("train", tokens), ("val", max(20_000, tokens // 100))):
        for number in range(num_shards if split == "train" else 1):
            body = (rng.integers(0, vocab, count // num_shards) // 2 * 2 % vocab).astype(np.uint16)
            name = f"{split}/shard-{number:05d}.bin"
            entries[split].append({"split": split, "file": name, "docs": 1, **shards.write(root / name, [body], "<u2")})
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

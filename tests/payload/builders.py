"""Datasets and archives made by tests."""

# pyright: basic, reportPrivateImportUsage=false
import io
import pathlib
import tarfile

import numpy as np

from ddptrain import prepare, shards


def run(*source: object, output: pathlib.Path, **more: object) -> shards.Dataset:
    """Prepare in this process, with one worker."""
    options = prepare.Options(tuple(str(s) for s in source), output, **{"tokenizer": "byte", "workers": 1, **more})  # type: ignore[arg-type]
    prepare.run(options)
    return shards.open_dataset(output)


def decoded(dataset: shards.Dataset, split: str = "train") -> list[bytes]:
    """Return a byte-level dataset's documents."""
    tokens = np.concatenate(
        [np.fromfile(s.path, dtype=s.dtype, offset=1024) for s in dataset.splits[split]] or [np.empty(0, int)]
    )
    if dataset.masked:
        tokens &= (1 << 15) - 1
    cuts = np.flatnonzero(tokens == 256)
    return [bytes(part[1:].astype(np.uint8)) for part in np.split(tokens, cuts)[1:]]


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))

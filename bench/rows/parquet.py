"""Megabytes of text per second out of a Parquet file, against pyarrow alone."""

# pyright: basic, reportPrivateImportUsage=false, reportMissingImports=false
import pathlib

import pyarrow
import pyarrow.parquet

from bench import data, row
from ddptrain.data import documents, lessons, sources


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure reading all documents, in turns."""
    texts = data.corpus(80_000_000)
    path = scratch / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    (item,), _ = sources.find([str(path)], "strict", scratch)
    read = [
        lambda: list(documents.documents(item, lessons.Lessons())),
        lambda: pyarrow.parquet.read_table(path).to_pylist(),
    ]
    taken = row.alternate(read, 5)
    size = sum(map(len, texts))
    ours, peer = (size / row.median(laps.wall_s) / 1e6 for laps in taken)
    note = taken[0].beside(taken[1])
    return [
        row.Row("reading Parquet", ours, peer, "MB/s", "pyarrow: read_table, to_pylist", note=note)
    ]

"""Sources, archives and datasets made by tests."""

# pyright: basic, reportPrivateImportUsage=false
import io
import json
import pathlib
import subprocess
import tarfile
import typing
import zipfile

import numpy as np

from ddptrain.data import documents, lessons, prepare, shards, sources


def run(*source: object, output: pathlib.Path, **more: object) -> shards.Dataset:
    """Prepare in this process, with one worker."""
    settings = {"tokenizer": "byte", "workers": 1, **more}
    options = prepare.Options(tuple(str(one) for one in source), output, **settings)  # type: ignore[arg-type]
    prepare.run(options)
    return shards.open_dataset(output)


def save_tokenizer(folder: pathlib.Path, text: str, num_ids: int, template: str = "") -> int:
    """Train a byte-level tokenizer on a text, save it as transformers does, and return its size."""
    import tokenizers  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=num_ids,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([text], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return len(fast)


def decoded(dataset: shards.Dataset, split: str = "train") -> list[bytes]:
    """Return a byte-level dataset's documents."""
    read = [np.fromfile(s.path, dtype=s.dtype, offset=1024) for s in dataset.splits[split]]
    tokens = np.concatenate(read or [np.empty(0, int)])
    if dataset.masked:
        tokens &= (1 << 15) - 1
    cuts = np.flatnonzero(tokens == 256)
    return [bytes(part[1:].astype(np.uint8)) for part in np.split(tokens, cuts)[1:]]


def learned(dataset: shards.Dataset) -> int:
    """Return how many tokens of a byte-level dataset are learned."""
    split = dataset.splits["train"]
    return sum(shards.num_learned(one, 256, masked=dataset.masked) for one in split)


def manifest(dataset: shards.Dataset) -> dict[str, typing.Any]:
    """Return a dataset's manifest."""
    return json.loads((dataset.root / "dataset.json").read_text())


def not_read(dataset: shards.Dataset) -> dict[str, list[int]]:
    """Return the members that a dataset's manifest lists as not read."""
    return manifest(dataset)["not_read"]


def read(path: pathlib.Path, how: str = "strict") -> list[str]:
    """Return the texts of the documents of one file."""
    (item,), _ = sources.find([str(path)], how, path.parent / "out")
    found = documents.documents(item, lessons.Lessons())
    return ["".join(segment.text for segment in document) for document in found]


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file to a tar."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def tar(files: dict[str, bytes]) -> bytes:
    """Return a tar of files."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, data in files.items():
            add(archive, name, data)
    return made.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    """Return a ZIP archive of files."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return made.getvalue()


def folder(root: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    """Write files below a folder, and return it."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def zstd(data: bytes, *flags: str) -> bytes:
    """Return a Zstandard frame."""
    command = ["zstd", "-cq", *flags]
    return subprocess.run(command, input=data, stdout=subprocess.PIPE, check=True).stdout


def records(path: pathlib.Path, made: list[dict[str, typing.Any]]) -> pathlib.Path:
    """Write records as the suffix says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(one)}\n" for one in made))
        return path
    if path.suffix == ".json":
        path.write_text(json.dumps(made, indent=2))
        return path

    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(made)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=100)
        return path
    new = pyarrow.ipc.new_stream if path.suffix == ".arrow" else pyarrow.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return path

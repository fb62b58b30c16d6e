"""Shards, the order of samples, and the reader."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib
import re
import zlib

import numpy as np
import pytest
import torch

from ddptrain.data import batches, sampler, shards, tokenizers
from ddptrain.ground import errors, files


def make_dataset(
    root: pathlib.Path, counts: list[int], *, vocab: int = 60000, masked: bool = False
) -> shards.Dataset:
    """Write a dataset whose tokens count up, so that each row shows its origin."""
    dtype = shards.dtype_for(vocab, masked=masked)
    entries, start = [], 0
    for number, count in enumerate(counts):
        tokens = (np.arange(start, start + count) % vocab).astype(dtype)
        facts = shards.write(
            root / f"train/shard-{number:05d}.bin",
            [tokens[: count // 3], tokens[count // 3 :]],
            dtype,
        )
        entries.append(
            {"split": "train", "file": f"train/shard-{number:05d}.bin", "docs": 1, **facts}
        )
        start += count
    facts = shards.write(root / "val/shard-00000.bin", [np.arange(500).astype(dtype)], dtype)
    val = [{"split": "val", "file": "val/shard-00000.bin", "docs": 1, **facts}]
    identity = tokenizers.Identity("test", vocab, 0, "0")
    manifest = {
        "format": 1,
        "name": "test",
        "tokenizer": identity.as_record(),
        "dtype": dtype,
        "masked": masked,
        "splits": {"train": entries, "val": val},
    }
    files.write_json(root / "dataset.json", manifest)
    return shards.open_dataset(root)


def read_all(
    dataset: shards.Dataset, plan: sampler.Plan, size: int, start: int, stop: int
) -> list[list[list[int]]]:
    """Return each step's rows, of all ranks in rank order, as first token of the row."""
    readers = [
        batches.Reader(
            dataset, plan, rank=rank, size=size, start=start, stop=stop, device=torch.device("cpu")
        )
        for rank in range(size)
    ]
    steps = []
    for _ in range(start, stop):
        found = torch.cat([one.next() for one in readers])
        assert torch.equal(found[:, :1] + torch.arange(found.shape[1]), found), (
            "with the token that follows each row"
        )
        steps.append(found[:, :-1].tolist())
    for one in readers:
        one.__exit__()
    return steps


def test_a_shard_is_llm_cs(tmp_path: pathlib.Path):
    path = tmp_path / "s.bin"
    tokens = np.array([5, 50256, 7], dtype="<u2")
    assert shards.write(path, [tokens[:1], tokens[1:]], "<u2")["tokens"] == 3
    data = path.read_bytes()
    assert len(data) == 1024 + 6
    assert np.frombuffer(data[:12], dtype="<i4").tolist() == [20240520, 1, 3]
    assert not any(data[12:1024])
    assert np.frombuffer(data[1024:], dtype="<u2").tolist() == [5, 50256, 7]
    assert shards.read_header(path).tokens == 3
    shards.write(path, [np.array([70000], dtype="<u4")], "<u4")
    assert np.frombuffer(path.read_bytes()[:12], dtype="<i4").tolist() == [20240801, 7, 1]


def test_a_dataset_is_known_by_what_its_manifest_says(tmp_path: pathlib.Path):
    """The trainer computes it from dataset.json (ddp/submit/manifests.py), without shards."""
    dataset = make_dataset(tmp_path, [3000, 2000])
    first, second, val = (shard.crc32 for split in shards.SPLITS for shard in dataset.splits[split])
    assert (
        dataset.fingerprint
        == f"{zlib.crc32(f'0 train {first} train {second} val {val}'.encode()):08x}"
    )


@pytest.mark.parametrize("damage", ["cut", "grow", "magic", "version", "empty"])
def test_a_shard_that_is_none_is_named(tmp_path: pathlib.Path, damage: str):
    dataset = make_dataset(tmp_path, [3000])
    path = dataset.splits["train"][0].path
    data = path.read_bytes()
    version = data[:4] + b"\2" + data[5:]
    damaged = {
        "cut": data[:-2],
        "grow": data + b"xx",
        "magic": b"\0" * 4 + data[4:],
        "version": version,
        "empty": b"",
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(shards.ShardError, match=f"{path}.*prepare"):
        shards.open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"format": 1', '"format": 9', "format 9"),
        ('"splits"', '"parts"', "is damaged"),
        ("{", "", "is not JSON"),
        (
            '"tokens": 3000',
            '"tokens": 2999',
            "holds 3000 tokens (<u2), dataset.json records 2999 tokens (<u2)",
        ),
        ('"<u2"', '"<u4"', "holds 3000 tokens (<u2), dataset.json records 3000 tokens (<u4)"),
        ("train/shard-00000.bin", "/etc/passwd", "outside"),
        ("train/shard-00000.bin", "../other/shard.bin", "outside"),
    ],
)
def test_a_manifest_that_is_wrong_is_named(tmp_path: pathlib.Path, old: str, new: str, words: str):
    make_dataset(tmp_path, [3000])
    manifest = (tmp_path / "dataset.json").read_text()
    assert old in manifest
    (tmp_path / "dataset.json").write_text(manifest.replace(old, new, 1))
    with pytest.raises(shards.ShardError, match=re.escape(words)):
        shards.open_dataset(tmp_path)


@pytest.fixture
def dataset(tmp_path: pathlib.Path) -> shards.Dataset:
    return make_dataset(tmp_path, [5003, 4001, 7999, 10, 6000])


def small_plan(global_batch: int = 12, lanes: int = 4) -> sampler.Plan:
    return sampler.Plan(seed=3, seq_len=16, global_batch=global_batch, lanes=lanes, window_rows=40)


def test_a_pass_takes_each_row_at_most_once_and_nearly_all(dataset: shards.Dataset):
    plan = small_plan()
    index = sampler.Sampler(plan, dataset.splits["train"])
    steps = read_all(dataset, plan, 1, 0, index.steps_per_pass)
    rows = [tuple(row) for step in steps for row in step]
    assert len(set(rows)) == len(rows) == index.steps_per_pass * 12
    assert index.rows == sum((n - 1) // 16 for n in (5003, 4001, 7999, 10, 6000))
    assert index.rows - len(rows) < 12 + 4  # less than a batch and a row per lane is left out
    assert all(row[-1] - row[0] == 15 for row in rows)  # a row is consecutive text of one shard


def test_a_step_takes_the_next_rows_of_each_lane_from_the_first_on(dataset: shards.Dataset):
    """The order in the sampler's docstring, written out: other versions' checkpoints need it."""
    plan = small_plan()
    index = sampler.Sampler(plan, dataset.splits["train"])
    starts = np.cumsum([0, *(shard.tokens for shard in dataset.splits["train"])])
    lane, share, expected = index.rows // 4, 12 // 4, []
    for number in range(2):
        stream: list[int] = []
        for window in np.random.default_rng([plan.seed, number]).permutation(
            len(index.window_rows)
        ):
            inside = np.random.default_rng([plan.seed, number, window]).permutation(
                int(index.window_rows[window])
            )
            rows = inside + index.window_first_row[window]
            stream += (starts[index.window_shard[window]] + 16 * rows).tolist()
        expected += [
            [
                place
                for n in range(4)
                for place in stream[n * lane + step * share : n * lane + (step + 1) * share]
            ]
            for step in range(index.steps_per_pass)
        ]
    steps = read_all(dataset, plan, 1, 0, 2 * index.steps_per_pass)
    assert [[row[0] for row in step] for step in steps] == expected


@pytest.mark.parametrize(
    ("size", "start"), [(1, 29), (2, 0), (2, 1), (3, 117), (4, 0), (6, 250), (12, 0)]
)
def test_any_number_of_ranks_sees_the_same_samples_wherever_it_starts(
    dataset: shards.Dataset, size: int, start: int
):
    plan = small_plan()
    assert (
        read_all(dataset, plan, size, start, start + 30)
        == read_all(dataset, plan, 1, 0, start + 30)[start:]
    )


@pytest.mark.parametrize(
    ("seq_len", "batch", "tokens", "lanes", "window_rows"),
    [
        (
            1024,
            480,
            9 << 30,
            60,
            2048,
        ),  # the largest divisor up to 64; 4 MiB of 16-bit tokens are read in one go
        (1024, 48, 9 << 30, 48, 2048),
        (1024, 8000, 9 << 40, 500, 2048),  # ranks share few lanes, whose windows each of them reads
        (1024, 128_000, 9 << 40, 8000, 2048),
        (1024, 67, 9 << 30, 1, 2048),  # a prime above 64
        (1024, 1, 9 << 30, 1, 2048),
        (128, 32, 1 << 20, 32, 64),  # little text: not below 64 rows,
        (128, 32, 1 << 22, 32, 256),  # else four windows a lane
        (4 << 20, 2, 9 << 30, 2, 1),  # a row longer than any window
    ],
)
def test_the_plan_fits_the_data(
    seq_len: int, batch: int, tokens: int, lanes: int, window_rows: int
):
    assert sampler.make_plan(3, seq_len, batch, tokens) == sampler.Plan(
        3, seq_len, batch, lanes, window_rows
    )


def test_masked_tokens_are_read_but_not_learned(tmp_path: pathlib.Path):
    for dtype in ("<u2", "<u4"):
        top = 1 << (np.dtype(dtype).itemsize * 8 - 1)
        rows = np.array([[1, 2 | top, 3 | top, 4, 5]], dtype=dtype)
        bit = np.dtype(dtype).itemsize * 8 - 1
        tokens, targets = batches.split_batch(torch.from_numpy(rows.astype(np.int64)), bit)
        assert tokens.tolist() == [[1, 2, 3, 4]]
        assert targets.tolist() == [[-100, -100, 4, 5]]
    assert shards.dtype_for(50257) == "<u2"
    assert shards.dtype_for(50257, masked=True) == "<u4"
    assert shards.dtype_for(70000) == "<u4"


def test_the_reader_passes_on_what_it_meets(dataset: shards.Dataset):
    path = dataset.splits["train"][2].path
    with batches.Reader(
        dataset, small_plan(), rank=0, size=1, start=0, stop=10**6, device=torch.device("cpu")
    ) as one:
        one.next()
        os.truncate(path, 1100)
        with pytest.raises(errors.UserError, match=str(path)):
            for _ in range(1000):
                one.next()


def test_the_validation_set_is_fixed_and_within_its_limit(dataset: shards.Dataset):
    take = batches.fixed_rows(dataset, "val", 16, 10)
    assert take.count == 10
    whole = take(0, 10)
    assert np.array_equal(np.concatenate([take(0, 3), take(3, 10)]), whole)
    assert len({tuple(row) for row in whole.tolist()}) == 10
    assert batches.fixed_rows(dataset, "val", 16, 10_000).count == 499 // 16


def test_the_fixed_rows_go_through_all_shards(tmp_path: pathlib.Path):
    """The rows include one shard's end and the next one's start; tokens count across shards."""
    dataset = make_dataset(tmp_path, [33, 65, 33])
    take = batches.fixed_rows(dataset, "train", 16, 100)
    assert take(0, take.count)[:, 0].tolist() == [0, 16, 33, 49, 65, 81, 98, 114]
    assert all(np.array_equal(np.diff(row), np.ones(16)) for row in take(0, 8).astype(int))

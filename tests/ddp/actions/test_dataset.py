"""Datasets that go with neither the model nor the checkpoint that they are given to: refused before a job waits for it."""

import json
import pathlib
import typing

import pytest
from cluster import Cluster
from harness import Trainer, add_dataset

BYTE = {"kind": "byte", "vocab": 257, "eot_id": 256, "sha256": "aa", "eot": "prefix"}
GPT2 = {"kind": "gpt2", "vocab": 50257, "eot_id": 50256, "sha256": "bb", "eot": "prefix"}


def manifest(tokenizer: object, crc32: int = 7) -> dict[str, typing.Any]:
    """Make the payload's manifest of a dataset, as far as it matters here."""
    return {"tokenizer": tokenizer, "splits": {"train": [{"crc32": crc32}], "val": [{"crc32": 8}, {"crc32": 9}]}}


def put(trainer: Trainer, name: str, tokenizer: object, crc32: int = 7) -> str:
    folder = add_dataset(trainer, name)
    (folder / "dataset.json").write_text(json.dumps(manifest(tokenizer, crc32)))
    return str(folder)


@pytest.fixture
def night(ready: Trainer, cluster: Cluster) -> pathlib.Path:
    """A run that has learned the bytes of the dataset `books`, and ended."""
    put(ready, "books", BYTE)
    ready.run("submit-ddp", run="night", dataset="books")
    cluster.jobs[0].states = [("COMPLETED", 0)]
    folder = cluster.jobs[0].script.parent
    (folder / "epoch-0001").mkdir()
    (folder / "latest").symlink_to("epoch-0001")
    # zlib.crc32(b"aa train 7 val 8 val 9")
    meta = {"data": {"name": "books", "tokenizer": BYTE, "fingerprint": "df5994ae"}}
    (folder / "latest" / "manifest.json").write_text(json.dumps({"format": 1, "meta": meta, "crc32": 0}))
    return folder


def test_a_dataset_that_is_no_longer_whole_is_refused(ready: Trainer, cluster: Cluster):
    folder = pathlib.Path(put(ready, "books", BYTE))
    shards = [{"file": f"train/{number}.bin", "bytes": 9, "crc32": 7} for number in range(2)]
    (folder / "dataset.json").write_text(json.dumps({"tokenizer": BYTE, "splits": {"train": shards, "val": []}}))
    (folder / "train").mkdir()
    for number in range(2):
        (folder / "train" / f"{number}.bin").write_text("123456789")
    assert f"dataset: {folder} is there" in ready.run("submit-ddp", dataset="books", dry_run=True)["checks"]
    how = "juju run trainer/0 prepare-dataset name=books source=... makes again what is missing"
    (folder / "train" / "1.bin").write_text("1234")
    assert ready.fails("submit-ddp", dataset="books") == (
        f"dataset: {folder}/train/1.bin has 4 bytes instead of 9; {how}"
    )
    (folder / "train" / "0.bin").unlink()
    assert ready.fails("submit-sweep", grid="lr=1", dataset=str(folder)) == (
        f"dataset: {folder}/train/0.bin is not there; {how}"
    )
    (folder / "dataset.json").write_text("[")
    assert ready.fails("submit-ddp", dataset="books").startswith(
        f"dataset: {folder}/dataset.json is not a JSON object: "
    )
    assert not cluster.changes


GONE_ON = [({"run": "night"}, "another name for run"), ({"run": "new", "resume": "night"}, "omit resume")]


@pytest.mark.parametrize(("given", "anew"), GONE_ON)
def test_other_tokens_than_the_checkpoint_learned_are_refused(
    ready: Trainer, cluster: Cluster, night: pathlib.Path, given: dict[str, str], anew: str
):
    path = put(ready, "owt", GPT2)
    line = (
        f"dataset: {path} was tokenised with gpt2 (50257 ids), and night has learned byte (257); "
        f"give dataset=books, or {anew}"
    )
    for dataset in ("owt", path):
        assert ready.fails("submit-ddp", dataset=dataset, **given) == line
    assert [call[0] for call in cluster.changes] == ["sbatch"], "the first one's"


@pytest.mark.parametrize(("given", "anew"), GONE_ON)
def test_other_contents_than_the_checkpoint_learned_are_refused(
    ready: Trainer, night: pathlib.Path, given: dict[str, str], anew: str
):
    path = put(ready, "poems", BYTE, crc32=6)
    line = f"dataset: night has learned from 'books', and {path} holds something else; give dataset=books, or {anew}"
    assert ready.fails("submit-ddp", dataset="poems", **given) == line
    (night / "job.json").write_text('{"kind": "gpt"}')
    assert ready.fails("submit-ddp", dataset="poems", **given).endswith(f"; to begin anew {anew}")


def test_the_same_dataset_and_the_same_elsewhere_go_on(ready: Trainer, cluster: Cluster, night: pathlib.Path):
    for name in ("books", put(ready, "copy", BYTE)):
        assert "dataset: " in ready.run("submit-ddp", run="night", dataset=name, dry_run=True)["checks"]
    put(ready, "owt", GPT2)
    ready.run("submit-ddp", run="night", dataset="owt", args="--resume never", dry_run=True)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"meta": 1}', '{"meta": {"data": {"tokenizer": {"vocab": "x"}}}}']
)
def test_what_cannot_be_read_is_left_to_the_payload(ready: Trainer, night: pathlib.Path, text: str):
    put(ready, "owt", GPT2)
    (night / "latest" / "manifest.json").write_text(text)
    ready.run("submit-ddp", run="night", dataset="owt", dry_run=True)


@pytest.mark.parametrize(
    ("tokenizer", "config"),
    [
        (BYTE, {"vocab_size": 50257}),
        (GPT2, {"vocab_size": 32000}),
        (GPT2, {"vocab_size": 151936}),
        (GPT2, {"text_config": {"vocab_size": 262208}}),
    ],
)
def test_a_dataset_by_name_of_other_tokens_than_the_models_is_refused(
    trainer: Trainer, cluster: Cluster, model: pathlib.Path, tokenizer: dict[str, object], config: dict[str, typing.Any]
):
    path = put(trainer, "books", tokenizer)
    (model / "config.json").write_text(json.dumps(config))
    knows = config.get("vocab_size") or config["text_config"]["vocab_size"]
    line = (
        f"dataset: {path} was tokenised with {tokenizer['kind']} ({tokenizer['vocab']} ids), and the model in {model} "
        f"knows {knows}; give the text itself, a file or folder of JSON lines: dataset={trainer.workspace}/chat.jsonl"
    )
    for action, more in (
        ("submit-ddp", {"args": f"--model-local-dir {model}"}),
        ("submit-sweep", {"grid": f"model-local-dir={model}"}),
    ):
        for dataset in ("books", path):
            assert trainer.fails(action, dataset=dataset, **more) == line
    assert cluster.changes == []


@pytest.mark.parametrize("config", [{"vocab_size": 50257}, {"vocab_size": 50304}, {}, {"vocab_size": "many"}])
def test_a_dataset_that_may_be_the_models_is_taken(trainer: Trainer, model: pathlib.Path, config: dict[str, object]):
    put(trainer, "books", GPT2)
    (model / "config.json").write_text(json.dumps(config))
    given = {"args": f"--model-local-dir {model}", "dataset": "books"}
    assert f"model: {model} can be read by" in trainer.run("submit-ddp", dry_run=True, **given)["checks"]

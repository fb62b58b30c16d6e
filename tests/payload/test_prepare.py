"""From text to a dataset: the same bytes each way, and only missing parts are redone."""

# pyright: basic, reportPrivateImportUsage=false
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import typing

import conftest
import hypothesis
import hypothesis.strategies
import pytest
import ranks
from builders import decoded, run

from ddptrain.data import parts, prepare, shards, tokenizers
from ddptrain.ground import errors

GPT2 = tokenizers.Gpt2Tokenizer()


def contents(root: pathlib.Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*.bin"))}


def test_every_document_arrives_whole(tmp_path: pathlib.Path, text_dir: pathlib.Path):
    dataset = run(text_dir, output=tmp_path / "d", val_share=0.5)
    texts = [p.read_bytes() for p in sorted(text_dir.iterdir())]
    assert decoded(dataset) == texts[:-1]
    assert (
        decoded(dataset, "val") == texts[-1:]
    )  # val.txt is the validation set, and nothing else is held out
    assert not shards.damaged(dataset)


def test_workers_array_elements_and_one_process_give_the_same_bytes(
    tmp_path: pathlib.Path, text_dir: pathlib.Path
):
    small = ("prepare", "--source", text_dir, "--tokenizer", "byte", "--part-mib", "0.03")
    ranks.succeed(1, *small, "--output", tmp_path / "one", "--workers 1")
    ranks.succeed(1, *small, "--output", tmp_path / "two", "--workers 2")
    for element in (2, 0, 1):
        array = {
            "SLURM_ARRAY_TASK_ID": str(element + 5),
            "SLURM_ARRAY_TASK_MIN": "5",
            "SLURM_ARRAY_TASK_COUNT": "3",
        }
        ranks.succeed(
            1, *small, "--output", tmp_path / "array", "--workers 1 --task slurm", **array
        )
        assert not (tmp_path / "array" / "dataset.json").exists()
    ranks.succeed(1, *small, "--output", tmp_path / "array", "--finalize")
    assert len(contents(tmp_path / "one")) > 3
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "array")


def test_an_array_with_an_element_missing_names_the_parts(
    tmp_path: pathlib.Path, text_dir: pathlib.Path
):
    small = {"output": tmp_path / "d", "part_mib": 0.03}
    prepare.run(prepare.Options((str(text_dir),), tokenizer="byte", workers=1, task="0/2", **small))  # type: ignore[arg-type]
    with pytest.raises(
        errors.UserError,
        match=r"2 of \d+ parts are not done: 1 \(.*\), 3 \(.*\); run prepare again",
    ):
        prepare.run(prepare.Options((str(text_dir),), tokenizer="byte", finalize=True, **small))  # type: ignore[arg-type]
    run(text_dir, **small)


def test_only_what_is_missing_or_stale_is_done_again(
    tmp_path: pathlib.Path, text_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    source = tmp_path / "text"
    shutil.copytree(text_dir, source)
    done: list[int] = []
    real = parts.tokenize
    monkeypatch.setattr(
        parts, "tokenize", lambda o, p, part, t: done.append(part.number) or real(o, p, part, t)
    )
    small = {"output": tmp_path / "d", "part_mib": 0.03}
    run(source, **small)
    whole, first = contents(tmp_path / "d"), list(done)

    done.clear()
    run(source, **small)
    assert done == []
    (tmp_path / "d" / "train" / "shard-00001.bin").unlink()
    (tmp_path / "d" / "parts" / "part-00002.json").write_text("{")
    run(source, **small)
    assert done == [1, 2]
    assert contents(tmp_path / "d") == whole
    done.clear()
    (source / "00.txt").write_text("another text\n" * 500)
    run(source, **small)
    assert done == [0]
    done.clear()
    (source / "01.txt").write_bytes(
        (source / "01.txt").read_bytes()[::-1]
    )  # as long as before, but later
    os.utime(source / "01.txt", (1, 1))
    run(source, **small)
    assert done == [0]
    done.clear()
    run(source, **{**small, "tokenizer": "gpt2"})
    assert done == first


def test_killed_at_many_moments_and_resumed_it_gives_the_bytes_of_an_undisturbed_run(
    tmp_path: pathlib.Path,
):
    """SIGKILL to the command alone: its workers end, and no half-written file counts as whole."""
    (tmp_path / "text").mkdir()
    for number in range(60):
        (tmp_path / "text" / f"{number:02d}.txt").write_text(conftest.prose(300, seed=number + 1))
    small = (
        "prepare",
        "--source",
        tmp_path / "text",
        "--tokenizer",
        "gpt2",
        "--part-mib",
        "0.05",
        "--workers",
        "2",
    )
    ranks.succeed(1, *small, "--output", tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    parts = len(list((tmp_path / "whole" / "parts").iterdir()))
    output, amid = tmp_path / "killed", []
    for kept in range(0, parts - 5, parts // 6):
        argv = [sys.executable, "-m", "ddptrain", *(str(a) for a in small), "--output", str(output)]
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            until(
                lambda kept=kept, process=process: (
                    process.poll() is not None or notes(output) > kept
                )
            )
            process.kill()
            assert process.stdout is not None
            process.stdout.read()  # to the end: the workers hold the other end, so they have ended, too
        amid.append(notes(output))
        if amid[-1] < parts:
            with pytest.raises(shards.ShardError):
                shards.open_dataset(output)
    assert any(0 < count < parts for count in amid), f"no kill came in the middle: {amid}"
    ranks.succeed(1, *small, "--output", output)
    assert contents(output) == expected
    manifests = [
        json.loads((root / "dataset.json").read_text()) for root in (tmp_path / "whole", output)
    ]
    assert manifests[0]["splits"] == manifests[1]["splits"]
    assert not shards.damaged(shards.open_dataset(output))


def notes(output: pathlib.Path) -> int:
    return len(list((output / "parts").glob("part-*.json")))


def until(happened: typing.Callable[[], bool], patience_s: float = 60) -> None:
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_while_parts_are_redone_the_folder_is_no_dataset(
    tmp_path: pathlib.Path, text_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    run(text_dir, output=tmp_path / "d", part_mib=0.03)
    (tmp_path / "d" / "train" / "shard-00001.bin").unlink()

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parts, "tokenize", crash)
    with pytest.raises(KeyboardInterrupt):
        run(text_dir, output=tmp_path / "d", part_mib=0.03)
    with pytest.raises(shards.ShardError, match="has not finished"):
        shards.open_dataset(tmp_path / "d")


@pytest.mark.parametrize(("tokenizer", "share"), [("byte", 2.1), ("gpt2", 1.5)])
def test_want_of_room_is_reported_before_anything_is_touched(
    tokenizer: str,
    share: float,
    tmp_path: pathlib.Path,
    text_dir: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    run(text_dir, output=tmp_path / "d", val_share=0.5)
    before = contents(tmp_path / "d")
    need = int(share * sum(path.stat().st_size for path in text_dir.iterdir()))
    monkeypatch.setattr(prepare.files, "free_bytes", lambda _: need - 1)
    with pytest.raises(
        errors.UserError, match=rf"--output {tmp_path}/d: {need >> 20} MiB needed, .* make room"
    ):
        run(text_dir, output=tmp_path / "d", tokenizer=tokenizer, mask_prompts=True)
    assert shards.open_dataset(tmp_path / "d").tokenizer["kind"] == "byte"
    assert contents(tmp_path / "d") == before
    monkeypatch.setattr(prepare.files, "free_bytes", lambda _: need)
    assert run(text_dir, output=tmp_path / "d", tokenizer=tokenizer, mask_prompts=True).masked


def test_fewer_sources_leave_no_stray_shards(tmp_path: pathlib.Path, text_dir: pathlib.Path):
    run(text_dir, output=tmp_path / "d", part_mib=0.03)
    (tmp_path / "d" / "train" / "notes.txt").write_text("another program's")
    dataset = run(text_dir / "00.txt", output=tmp_path / "d", part_mib=0.03, val_share=0.0)
    assert set(contents(tmp_path / "d")) == {"train/shard-00000.bin"}
    assert (tmp_path / "d" / "train" / "notes.txt").exists()
    assert len(list((tmp_path / "d" / "parts").iterdir())) == 1
    assert dataset.tokens("val") == 0


def test_a_big_file_is_cut_at_line_ends_and_nothing_is_lost_or_doubled(tmp_path: pathlib.Path):
    text = "".join(f"line {n}\n" for n in range(40000))
    (tmp_path / "book.txt").write_text(text)
    dataset = run(tmp_path / "book.txt", output=tmp_path / "d", part_mib=0.05, val_share=0.0)
    assert len(dataset.splits["train"]) > 5
    assert b"".join(decoded(dataset)) == text.encode()


def test_a_share_is_held_out_by_the_text_alone(tmp_path: pathlib.Path):
    texts = [f"document {n} " + conftest.prose(1, seed=n) for n in range(2000)]
    for name, chosen in (("all", texts), ("half", texts[1000:])):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": t}) + "\n" for t in chosen)
        )
    everything = run(tmp_path / "all.jsonl", output=tmp_path / "d", val_share=0.05)
    half = run(tmp_path / "half.jsonl", output=tmp_path / "e", val_share=0.05)
    held = set(decoded(everything, "val"))
    assert 60 <= len(held) <= 140
    assert not held & set(decoded(everything))
    assert set(decoded(half, "val")) == held & {
        t.encode() for t in texts[1000:]
    }  # adding sources moves nothing


def test_a_long_text_is_not_wholly_training_or_validation(tmp_path: pathlib.Path):
    (tmp_path / "book.txt").write_text(conftest.prose(20000))
    dataset = run(tmp_path / "book.txt", output=tmp_path / "d", val_share=0.1)
    assert 0.02 < dataset.tokens("val") / dataset.tokens("train") < 0.4
    assert [len(decoded(dataset, split)) for split in shards.SPLITS] == [1, 1], (
        "it is one document of each still"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "expected an object"),
        ('{"prompt": "x"}', "expected an object"),
        ('{"text": 3}', "expected an object"),
        ('{"messages": ["x"]}', '"role" and "content"'),
        (
            '{"messages": [{"role": "user", "content": "x", "train_detail": [{}]}]}',
            '"train_detail" is not read',
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: pathlib.Path, line: str, words: str):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(errors.UserError, match=f"{path} line 2.*{words}"):
        run(path, output=tmp_path / "d")


def test_gpt2_tokens_are_the_published_ones():
    """Ids from the GPT-2 paper's released vocabulary, as in countless examples."""
    gpt2 = tokenizers.make("gpt2")
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("Hello, I'm a language model,").tolist() == [
        15496,
        11,
        314,
        1101,
        257,
        3303,
        2746,
        11,
    ]
    assert (
        50256 not in gpt2.encode("<|endoftext|>").tolist()
    )  # a text that talks about the marker is still text
    assert gpt2.identity.vocab == 50257
    text = "naïve  café\n\n\t日本語 \U0001f600 don't  \x00"
    assert gpt2._core.decode(gpt2.encode(text).tolist()) == text  # type: ignore[attr-defined]


def test_auto_is_bytes_for_little_text_and_gpt2_for_much():
    assert tokenizers.make("auto", text_bytes=1 << 20).identity.kind == "byte"
    assert tokenizers.make("auto", text_bytes=1 << 30).identity.kind == "gpt2"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--source", "/nonexistent"], "no such file or folder"),
        (["--task", "5/3"], "element 5 of 3 does not exist"),
        (["--task", "x"], "give K/N"),
        (["--task", "slurm"], "give K/N"),
        (["--val-share", "1"], "must be below 1"),
        (["--part-mib", "nan"], "must be a finite number"),
        (["--workers", "-1"], "must be at least 0"),
        (["--tokenizer", "bpe"], "invalid choice"),
    ],
)
def test_impossible_preparations_are_one_line(
    tmp_path: pathlib.Path, text_dir: pathlib.Path, flags: list[str], words: str
):
    base = ["--source", str(text_dir)] if "--source" not in flags else []
    result = ranks.run(1, "prepare", *base, "--output", tmp_path / "d", *flags)
    assert result.codes == [2]
    (line,) = result.fatal()
    assert words in line
    assert not (tmp_path / "d" / "dataset.json").exists()


def test_a_folder_with_other_things_is_not_touched(tmp_path: pathlib.Path, text_dir: pathlib.Path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(errors.UserError, match="holds other files"):
        run(text_dir, output=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_inspect_finds_a_corrupted_shard_and_names_it(
    tmp_path: pathlib.Path, text_dir: pathlib.Path
):
    dataset = run(text_dir, output=tmp_path / "d", part_mib=0.03)
    assert "whole" in ranks.succeed(1, "inspect", tmp_path / "d").output
    path = dataset.splits["train"][1].path
    data = bytearray(path.read_bytes())
    data[1500] ^= 8
    path.write_bytes(data)
    result = ranks.run(1, "inspect", tmp_path / "d")
    assert result.codes == [1]
    assert str(path) in result.fatal()[0]


AWKWARD = hypothesis.strategies.text(
    hypothesis.strategies.sampled_from(
        "ab Z'st09.,-_<|\t\n\r\x0b\x0c\x1c\x1f\x00\x7f\x85\xa0\u2009\u2028\u3000é日ß²Ⅷ٣\u2019\u0301\U0001f600"
    ),
    max_size=60,
)


@hypothesis.settings(max_examples=400)
@hypothesis.given(hypothesis.strategies.one_of(AWKWARD, hypothesis.strategies.text(max_size=60)))
def test_remembered_words_give_the_tokens_that_merging_all_gives(text: str):
    assert GPT2.encode(text).tolist() == GPT2._core.encode_ordinary(text)


@pytest.mark.parametrize("glue", [" ", "\n\n  ", "é ", "\xa0"])
def test_long_texts_are_cut_where_it_does_not_show(glue: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizers, "_STRETCH", 50)
    text = glue.join(f"it's number {n},   isn't it?!" for n in range(200))
    assert GPT2.encode(text).tolist() == GPT2._core.encode_ordinary(text)


def test_the_memory_of_seen_documents_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizers, "_MOST_KNOWN", 10)
    gpt2 = tokenizers.Gpt2Tokenizer()
    text = " ".join(conftest.WORDS) + " " + "x" * 100
    assert gpt2.encode(text).tolist() == gpt2._core.encode_ordinary(text)
    assert len(gpt2._known) == 10

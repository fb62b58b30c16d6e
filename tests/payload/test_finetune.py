"""Fine-tuning a model that lies in a folder.

The model is made here: tiny, random, in the format of transformers.
"""

# pyright: basic, reportPrivateImportUsage=false
import dataclasses
import json
import pathlib

import builders
import conftest
import pytest
import ranks
import torch

from ddptrain import finetune
from ddptrain.checkpoint import tensors
from ddptrain.data import prepare
from ddptrain.data import tokenizers as payload_tokenizers
from ddptrain.ground import errors
from ddptrain.options import config

tokenizers = pytest.importorskip(
    "tokenizers", reason="the optional extra transformers is not installed"
)
transformers = pytest.importorskip(
    "transformers", reason="the optional extra transformers is not installed"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    num_ids = builders.save_tokenizer(folder, conftest.prose(50), 400)
    torch.manual_seed(3)
    described = transformers.GPT2Config(
        vocab_size=num_ids,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(described).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("chat")
    for name, count in (("train.jsonl", 300), ("val.jsonl", 40)):
        records = []
        for n in range(count):
            word = conftest.WORDS[n % len(conftest.WORDS)]
            asked, answer = f"repeat {word}: ", f"{word} {word}"
            spoken = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            records.append(
                [
                    {"text": asked + answer},
                    {"prompt": asked, "completion": answer},
                    {"messages": spoken},
                ][n % 3]
            )
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


FLAGS = "--seq-len 32 --batch 4 --epoch-steps 10 --lr 0.003 --precision fp32 --eval-rows 32 --local-files-only".split()


@pytest.fixture(scope="module")
def tuned(
    model_dir: pathlib.Path, conversations: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, ranks.Result]:
    run_dir = tmp_path_factory.mktemp("tuned") / "run"
    result = ranks.trained(
        2, conversations, run_dir, "--model-local-dir", model_dir, *FLAGS, "--steps 30"
    )
    return run_dir, result


def test_it_learns_from_json_lines_in_three_shapes(tuned: tuple[pathlib.Path, ranks.Result]):
    summary = json.loads((tuned[0] / "summary.json").read_text())
    assert (summary["workload"], summary["world_size"], summary["state"]) == ("finetune", 2, "done")
    assert summary["first_loss"] > 5.5
    assert summary["best_loss"] < 0.8 * summary["first_loss"]
    manifest = json.loads((tuned[0] / "tokens" / "dataset.json").read_text())
    assert manifest["masked"] is True
    assert manifest["totals"]["val"]["docs"] == 40
    assert manifest["totals"]["train"]["docs"] == 300


def test_the_tuned_model_loads_in_transformers_and_is_the_last_checkpoint(
    tuned: tuple[pathlib.Path, ranks.Result], model_dir: pathlib.Path
):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tuned[0] / "model", local_files_only=True
    )
    before = transformers.AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
    name = "transformer.h.0.attn.c_attn.weight"
    saved = torch.empty_like(loaded.state_dict()[name])
    tensors.read_into(tuned[0] / "latest", {"model": {f"core.{name}": saved}})
    assert torch.equal(loaded.state_dict()[name], saved)
    assert not torch.equal(loaded.state_dict()[name], before.state_dict()[name])
    assert transformers.AutoTokenizer.from_pretrained(tuned[0] / "model", local_files_only=True)(
        "again"
    ).input_ids


def test_it_resumes(
    tuned: tuple[pathlib.Path, ranks.Result],
    model_dir: pathlib.Path,
    conversations: pathlib.Path,
    tmp_path: pathlib.Path,
):
    run_dir = tmp_path / "run"
    arguments = (2, conversations, run_dir, "--model-local-dir", model_dir, *FLAGS, "--steps 30")
    ranks.train(*arguments, accident="accident_step DO=kill AT=13")
    ranks.trained(*arguments)
    assert conftest.losses(run_dir) == conftest.losses(tuned[0])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seq-len", "128"], "--seq-len 128: the model in"),
        (
            ["--tokenizer-local-dir", "/nonexistent"],
            "--tokenizer-local-dir /nonexistent: no such folder",
        ),
        (["--no-local-files-only"], "models come from --model-local-dir only"),
    ],
)
def test_impossible_options_are_one_line(
    model_dir: pathlib.Path,
    conversations: pathlib.Path,
    tmp_path: pathlib.Path,
    flags: list[str],
    words: str,
):
    more = ("--model-local-dir", model_dir, *FLAGS, "--steps 3", *flags)
    result = ranks.train(2, conversations, tmp_path / "run", *more)
    assert result.codes == [2, 2], result.output
    (line,) = result.fatal()
    assert words in line


@pytest.mark.parametrize(("kind", "ids"), [("gpt2", 50257), ("byte", 257)])
def test_a_dataset_of_another_tokenizer_is_refused(
    model_dir: pathlib.Path, text_dir: pathlib.Path, tmp_path: pathlib.Path, kind: str, ids: int
):
    ranks.succeed(
        1,
        "prepare --source",
        text_dir,
        "--output",
        tmp_path / "d",
        "--tokenizer",
        kind,
        "--workers 1",
    )
    result = ranks.train(
        1, tmp_path / "d", tmp_path / "run", "--model-local-dir", model_dir, *FLAGS
    )
    (line,) = result.fatal()
    assert f"was tokenised with {kind} ({ids} ids)" in line
    assert f"--tokenizer-local-dir {model_dir}" in line


def test_a_dataset_of_the_models_own_tokenizer_is_taken_as_it_is(
    model_dir: pathlib.Path, text_dir: pathlib.Path, tmp_path: pathlib.Path
):
    prepare.run(
        prepare.Options((str(text_dir),), tmp_path / "d", tokenizer_local_dir=model_dir, workers=1)
    )
    asked = config.Config(data=tmp_path / "d", run_dir=tmp_path / "run", model_local_dir=model_dir)
    assert finetune.prepare_data(asked) == tmp_path / "d"


def test_gpt2_tokens_go_to_a_model_with_gpt2s_own_vocabulary(
    model_dir: pathlib.Path, text_dir: pathlib.Path, tmp_path: pathlib.Path
):
    merges = [
        tuple(line.split()) for line in payload_tokenizers.gpt2_merges().splitlines()[1:] if line
    ]
    alphabet = sorted(
        tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )  # printable bytes first, as GPT-2 counts
    vocabulary = {
        token: n for n, token in enumerate([*alphabet, *(left + right for left, right in merges)])
    }
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")
    fast.save_pretrained(tmp_path / "gpt2")
    prepare.run(prepare.Options((str(text_dir),), tmp_path / "d", tokenizer="gpt2", workers=1))
    asked = config.Config(
        data=tmp_path / "d",
        run_dir=tmp_path / "run",
        model_local_dir=model_dir,
        tokenizer_local_dir=tmp_path / "gpt2",
    )
    assert finetune.prepare_data(asked) == tmp_path / "d"


@pytest.mark.parametrize("end", ["<|endoftext|>", "<odd>"])
def test_a_model_with_only_tokenizer_json_is_read(
    end: str, text_dir: pathlib.Path, tmp_path: pathlib.Path
):
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"the": 0, "?": 1, end: 5}, unk_token="?")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.enable_truncation(1)
    core.enable_padding(length=4)
    core.save(str(tmp_path / "tokenizer.json"))
    for saved in (tmp_path, tmp_path / "tokenizer.json"):
        mine = payload_tokenizers.HfTokenizer(saved)
        assert mine.encode("the cat").tolist() == [0, 1]
        assert (mine.identity.eot_id, mine.identity.vocab) == (
            (5, 6) if end == "<|endoftext|>" else (6, 7)
        )
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(errors.UserError, match="holds no tokenizer"):
        payload_tokenizers.HfTokenizer(tmp_path)


def test_bytes_that_are_no_text_are_refused_or_replaced(
    model_dir: pathlib.Path, tmp_path: pathlib.Path
):
    (tmp_path / "chat.jsonl").write_bytes(b'{"text": "caf\xe9 au lait"}\n' * 20)
    asked = config.Config(
        errors="strict",
        data=tmp_path / "chat.jsonl",
        run_dir=tmp_path / "run",
        model_local_dir=model_dir,
    )
    with pytest.raises(errors.UserError, match=rf"^{asked.data} line 1 is not JSON: .*byte 0xe9"):
        finetune.prepare_data(asked)
    assert (
        finetune.prepare_data(dataclasses.replace(asked, errors="replace"))
        == tmp_path / "run" / "tokens"
    )

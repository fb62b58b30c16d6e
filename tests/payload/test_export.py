"""export: a checkpoint as a model for transformers, bit for bit, with its settings and licenses."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib

import pytest
import ranks
import torch
from test_finetune import conversations, model_dir, tuned

from ddptrain import cli, export, model, shapes
from ddptrain.checkpoint import draft, stored, tensors
from ddptrain.data import tokenizers as payload_tokenizers

__all__ = ["conversations", "model_dir", "tuned"]  # fixtures
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
TOKENS = torch.tensor([[0, 5, 250, 17, 3, 99, 200, 1]])


def exported(checkpoint: pathlib.Path, output: pathlib.Path) -> dict[str, object]:
    assert cli.main(["export", str(checkpoint), "--output", str(output), "--json"]) == 0
    return json.loads((output / export.SETTINGS).read_text())


def logits(core: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found = core.eval()(TOKENS)
    return getattr(found, "logits", found)


@pytest.fixture
def gpt(tmp_path: pathlib.Path) -> tuple[pathlib.Path, model.GPT]:
    """A checkpoint of a small GPT on GPT-2's tokens, and the model."""
    torch.manual_seed(1)
    shape = shapes.Shape(layers=2, heads=2, width=32, seq_len=16, vocab=50304)
    core = model.GPT(shape)
    identity = {"kind": "gpt", "layers": 2, "heads": 2, "width": 32, "seq_len": 16, "vocab": 50304}
    meta = {
        "format": tensors.DCP,
        "step": 30,
        "progress": {"val_loss": 2.5},
        "model": identity,
        "data": {
            "name": "text",
            "tokenizer": payload_tokenizers.Gpt2Tokenizer.identity.as_record(),
        },
        "config": {"lr": 0.002},
        "torch": torch.__version__,
    }
    run_dir = tmp_path / "night"
    run_dir.mkdir()
    with draft.Draft(run_dir, "epoch-0001", "test") as made:
        made.add_dcp({"model": tensors.weights_of(core)})
        path = made.commit(meta)
    return path, core


def test_a_gpt_is_a_gpt2_of_transformers(
    gpt: tuple[pathlib.Path, model.GPT], tmp_path: pathlib.Path
):
    path, core = gpt
    settings = exported(path, tmp_path / "model")
    assert settings["config"] == {"lr": 0.002}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(logits(loaded), logits(core), atol=1e-5)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "# night\n\nTrained by slurm-ddp, 30 steps (checkpoint epoch-0001)." in card

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "Hello world, it's 3 naïve\n\n  cafés"
    ours = payload_tokenizers.Gpt2Tokenizer().encode(text).tolist()
    assert tokenizer.encode(text) == ours
    assert tokenizer.decode(ours) == text


def test_the_weights_of_a_gpt_come_back_bit_for_bit(
    gpt: tuple[pathlib.Path, model.GPT], tmp_path: pathlib.Path
):
    path, core = gpt
    exported(path, tmp_path / "model")
    held = safetensors.load_file(tmp_path / "model" / "model.safetensors")
    again = model.GPT(core.shape)
    with torch.no_grad():
        own = again.state_dict()
        own["token.weight"].copy_(held["transformer.wte.weight"])
        own["position.weight"].copy_(held["transformer.wpe.weight"])
        own["norm.weight"].copy_(held["transformer.ln_f.weight"])
        for number in range(core.shape.layers):
            for ours, theirs in export.BLOCK.items():
                weight = held[f"transformer.h.{number}.{theirs}.weight"]
                target = own[f"blocks.{number}.{ours}.weight"]
                target.copy_(weight.t() if weight.dim() == 2 else weight)
    assert torch.equal(logits(again), logits(core))


def test_a_tuned_model_has_the_same_logits_after_from_pretrained(
    tuned: tuple[pathlib.Path, ranks.Result],
    model_dir: pathlib.Path,
    tmp_path: pathlib.Path,
):
    (model_dir / "LICENSE").write_text("Apache License\n")
    (model_dir / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# tiny\n")
    exported(tuned[0] / "latest", tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trained = transformers.AutoModelForCausalLM.from_pretrained(tuned[0] / "model")
    assert torch.equal(logits(loaded), logits(trained))
    assert (tmp_path / "model" / "LICENSE").read_text() == "Apache License\n"
    assert "license: apache-2.0" in (tmp_path / "model" / "README.md").read_text()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "<end>"


def test_a_folder_that_exists_stays_and_a_damaged_checkpoint_is_refused(
    gpt: tuple[pathlib.Path, model.GPT],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "there").mkdir()
    assert cli.main(["export", str(gpt[0]), "--output", str(tmp_path / "there")]) == 2
    assert "exists already; give another folder" in capsys.readouterr().out
    (gpt[0] / stored.MANIFEST).write_text("{}")
    assert cli.main(["export", str(gpt[0]), "--output", str(tmp_path / "model")]) == 2
    assert not list(tmp_path.glob("*model*"))

"""`export`: a checkpoint as a model that transformers loads, with its settings and licenses.

A GPT of ours is a GPT-2 whose biases are 0 and whose GELU is exact, so it is written as one. A
tuned model is written as transformers itself does.
"""

# pyright: basic, reportPrivateImportUsage=false
import argparse
import json
import os
import pathlib
import re
import shutil
import typing

import torch
from torch import Tensor

from ddptrain import finetune, model, shapes
from ddptrain.checkpoint import stored, tensors
from ddptrain.data import tokenizers
from ddptrain.ground import errors, files

SETTINGS = "training.json"
# Files of a model's folder that must be passed on with the model
_TERMS = re.compile(r"(licen[cs]e|copying|notice|use_policy|terms)\b.*", re.IGNORECASE)
_CARD = "README.md"
_LICENSE_LINE = re.compile(r"^license(?:_name|_link)?: *\S.*$", re.MULTILINE)
Json = dict[str, typing.Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("checkpoint", type=pathlib.Path, help="folder of a checkpoint")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder to make")
    parser.add_argument("--json", action="store_true", help="print nothing but one JSON object")


def check(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options. Raises UserError for a folder that exists."""
    if os.path.lexists(args.output):
        raise errors.UserError(f"--output {args.output} exists already; give another folder")
    return args


def run(args: argparse.Namespace) -> int:
    """Write the model, whole or not at all, and print the facts about it."""
    found = stored.verify(args.checkpoint.resolve())
    draft = args.output.with_name(f".{args.output.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    write = _write_tuned if found.meta["model"]["kind"] == "finetune" else _write_gpt
    facts = {"checkpoint": found.path.name, "step": found.step, **write(found, draft)}
    settings = {name: found.meta[name] for name in ("step", "progress", "data", "config", "torch")}
    files.write_json(draft / SETTINGS, settings)
    (draft / _CARD).write_text(_card(found, facts))
    draft.rename(args.output)
    files.sync_directory(args.output.parent)
    print(json.dumps(facts))
    return 0


# -- our own model ---------------------------------------------------------------------------------


def _write_gpt(found: stored.Checkpoint, folder: pathlib.Path) -> Json:
    """Write a GPT as the GPT-2 that it is; return the facts about it."""
    safetensors = errors.need("safetensors.torch", "export")
    identity = found.meta["model"]
    names = ("layers", "heads", "width", "seq_len", "vocab")
    shape = shapes.Shape(**{name: identity[name] for name in names})
    core = model.GPT(shape)
    tensors.restore_weights(found, core)

    path = folder / "model.safetensors"
    safetensors.save_file(gpt2_weights(core), path, metadata={"format": "pt"})
    tokenizer = found.meta["data"]["tokenizer"]
    files.write_json(folder / "config.json", _gpt2_config(shape, tokenizer["eot_id"]))
    if tokenizer["kind"] == "gpt2":
        tokenizers.save_gpt2(folder, shape.seq_len)
    return {"model": "gpt2", "tokenizer": tokenizer["kind"], "terms": [], "license": ""}


def gpt2_weights(core: model.GPT) -> dict[str, Tensor]:
    """Return the weights of a GPT under GPT-2's names, and zeros for the biases.

    GPT-2 keeps the matrices of its blocks transposed (transformers, Conv1D of pytorch_utils.py).
    """
    width = core.shape.width
    own = core.state_dict()
    found: dict[str, Tensor] = {
        "wte.weight": own["token.weight"],
        "wpe.weight": own["position.weight"],
        "ln_f.weight": own["norm.weight"],
        "ln_f.bias": torch.zeros(width),
    }
    for number in range(core.shape.layers):
        for ours, theirs in BLOCK.items():
            weight = own[f"blocks.{number}.{ours}.weight"]
            name = f"h.{number}.{theirs}"
            is_matrix = weight.dim() == 2
            found[f"{name}.weight"] = weight.t().contiguous() if is_matrix else weight
            found[f"{name}.bias"] = torch.zeros(weight.shape[0])
    return {f"transformer.{name}": weight for name, weight in found.items()}


BLOCK = {
    "norm_1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "norm_2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


def _gpt2_config(shape: shapes.Shape, end: int) -> Json:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab,
        "n_positions": shape.seq_len,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": "float32",
    }


# -- a tuned model ---------------------------------------------------------------------------------


def _write_tuned(found: stored.Checkpoint, folder: pathlib.Path) -> Json:
    """Write a tuned model as transformers does, with the terms of the one that it began from."""
    settings = found.meta["config"]
    base = pathlib.Path(settings["model_local_dir"])
    tokenizer_dir = pathlib.Path(settings.get("tokenizer_local_dir") or base)
    finetune.save(finetune.restored(found), tokenizer_dir, folder)
    terms = sorted(path.name for path in base.iterdir() if _TERMS.fullmatch(path.name))
    for name in terms:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    facts: Json = {"model": found.meta["model"]["type"], "tokenizer": "hf", "terms": terms}
    facts["base"] = str(base)
    facts["license"] = "\n".join(_license_lines(base))
    return facts


def _license_lines(folder: pathlib.Path) -> list[str]:
    """Return the lines on the license in the front matter of a model's card."""
    try:
        text = (folder / _CARD).read_text(errors="replace")
    except OSError:
        return []
    head = text.split("\n---", 1)[0] if text.startswith("---") else ""
    return _LICENSE_LINE.findall(head)


def _card(found: stored.Checkpoint, facts: Json) -> str:
    """Return the model's card, with front matter as the Hugging Face hub reads it."""
    progress = found.meta["progress"]
    lines = ["---", "library_name: transformers"]
    if facts["license"]:
        lines.append(facts["license"])
    lines += ["---", "", f"# {found.path.parent.name}", ""]
    what = "Trained" if "base" not in facts else f"Tuned from {pathlib.Path(facts['base']).name}"
    lines.append(f"{what} by slurm-ddp, {found.step} steps (checkpoint {found.path.name}).")
    if progress.get("val_loss") is not None:
        lines.append(f"Validation loss: {progress['val_loss']:.6g}.")
    lines.append(f"Data: {found.meta['data']['name']}. All settings: {SETTINGS}.")
    if facts["tokenizer"] == "byte":
        lines.append("Token ids are the bytes of the text in UTF-8; 256 stands before each text.")
    return "\n".join([*lines, ""])

"""Fine-tuning a causal language model that transformers saved in a local folder. Never looks at the network."""

# pyright: basic, reportPrivateImportUsage=false
import hashlib
import pathlib
import shutil
import typing

import torch
from torch import Tensor, nn

from ddptrain import model
from ddptrain.data import prepare, shards, tokenizers
from ddptrain.ground import errors, files, log
from ddptrain.options import config

_PROBE = "Hello world"
_PROBE_IDS = {
    "byte": list(_PROBE.encode()),
    "gpt2": [15496, 995],
}  # as tokenizers.py's two give them


class Wrapped(nn.Module):
    """A transformers model with this package's calling convention."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy in nats, shape (), or without targets the logits, shape (B, T, V)."""
        logits_BTV = self.core(input_ids=tokens_BT, use_cache=False).logits
        return logits_BTV if targets_BT is None else model.token_loss(logits_BTV, targets_BT)


def prepare_data(settings: config.Config) -> pathlib.Path:
    """Return the folder of the token dataset: `--data` itself, or what its JSON lines become, kept beside the run.

    A folder counts as JSON lines when it has no dataset.json; `val.jsonl` in it is the validation set.
    """
    assert settings.model_local_dir is not None
    if not (settings.model_local_dir / "config.json").is_file():
        what = f"--model-local-dir {settings.model_local_dir} holds no model"
        raise errors.UserError(f"{what}: it has no config.json")
    tokenizer_dir = settings.tokenizer_local_dir or settings.model_local_dir
    if (settings.data / shards.MANIFEST).exists():
        _check_tokenizer(shards.open_dataset(settings.data), tokenizer_dir)
        return _with_learned_tokens(settings.data)
    if not settings.data.exists():
        raise errors.UserError(f"--data {settings.data}: no such file or folder")
    output = settings.run_dir / "tokens"
    source, how = (
        (str(settings.data),),
        {"mask_prompts": True, "workers": 1, "errors": settings.errors},
    )
    prepare.run(prepare.Options(source, output, tokenizer_local_dir=tokenizer_dir, **how))
    return _with_learned_tokens(output)


def _with_learned_tokens(root: pathlib.Path) -> pathlib.Path:
    """Report how many tokens of a dataset are learned, and return its folder."""
    dataset = shards.open_dataset(root)
    end = dataset.tokenizer["eot_id"]
    masked = dataset.masked
    learned = sum(
        shards.num_learned(shard, end, masked=masked) for shard in dataset.splits["train"]
    )
    log.emit("DATA", learned_tokens=learned, train_tokens=dataset.tokens("train"), dataset=root)
    return root


def _check_tokenizer(dataset: shards.Dataset, folder: pathlib.Path) -> None:
    """Refuse tokens that stand for other text in the model's tokenizer. Raises UserError."""
    own = tokenizers.HfTokenizer(folder)
    theirs = dataset.tokenizer
    expected = _PROBE_IDS.get(theirs["kind"])
    same = theirs["eot_id"] == own.identity.eot_id
    same &= (
        theirs["vocab"] == own.identity.vocab
        if expected is None
        else own.encode(_PROBE).tolist() == expected
    )
    if not same:
        what = f"--data {dataset.root} was tokenised with {theirs['kind']} ({theirs['vocab']} ids)"
        remedy = f"give its text, or prepare it with --tokenizer-local-dir {folder}"
        raise errors.UserError(f"{what}, not as the model in {folder} was; {remedy}")
    if expected is None and theirs["sha256"] != own.identity.sha256:
        log.warn(
            "DATA",
            f"the tokenizer in {folder} has other files than the one that made {dataset.root}",
        )


def model_kind(
    folder: pathlib.Path, dataset: shards.Dataset, settings: config.Config
) -> model.Kind:
    """Return the model in a folder, to be loaded later. Raises UserError when folder and data do not fit."""
    transformers = tokenizers.need_transformers("--model-local-dir")
    try:
        described = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as e:
        raise errors.UserError(
            f"--model-local-dir {folder} holds no model: {str(e).splitlines()[0]}"
        ) from e
    if dataset.vocab > described.vocab_size:
        text = f"the dataset's tokenizer has {dataset.vocab} ids, the model in {folder} knows {described.vocab_size}"
        raise errors.UserError(f"{text}; give its own --tokenizer-local-dir")
    longest = getattr(described, "max_position_embeddings", None)
    if longest is not None and settings.seq_len is not None and settings.seq_len > longest:
        raise errors.UserError(
            f"--seq-len {settings.seq_len}: the model in {folder} reads at most {longest} tokens"
        )

    def build() -> nn.Module:
        try:
            load = transformers.AutoModelForCausalLM.from_pretrained
            core = load(str(folder), local_files_only=True, dtype=torch.float32)
        except (OSError, ValueError, RuntimeError) as e:
            raise errors.UserError(
                f"--model-local-dir {folder} cannot be loaded: {str(e).splitlines()[0]}"
            ) from e
        return Wrapped(core)

    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
    log.emit("MODEL", f"fine-tuning {described.model_type}", folder=folder)
    identity = {
        "kind": "finetune",
        "type": described.model_type,
        "config_sha256": digest,
        "seq_len": settings.seq_len,
    }
    with torch.device("meta"):
        parameters = model.num_parameters(transformers.AutoModelForCausalLM.from_config(described))
    return model.Kind(identity, parameters, build)


def export(wrapped: Wrapped, settings: config.Config, output: pathlib.Path) -> None:
    """Save the tuned model and its tokenizer as transformers does, whole or not at all."""
    assert settings.model_local_dir is not None
    draft = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    core: typing.Any = wrapped.core
    core.save_pretrained(str(draft))
    tokenizers.HfTokenizer(settings.tokenizer_local_dir or settings.model_local_dir).save(draft)
    if output.exists():
        output.rename(draft / "replaced")
        shutil.rmtree(draft / "replaced")
    draft.rename(output)
    files.sync_directory(output.parent)
    log.emit("MODEL", "the tuned model, for transformers", folder=output)

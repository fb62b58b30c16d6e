"""Fine-tuning a causal language model that transformers saved in a local folder, offline."""

# pyright: basic, reportPrivateImportUsage=false
import hashlib
import pathlib
import shutil
import typing

from torch import Tensor, nn

from ddptrain import causal_model, model
from ddptrain.checkpoint import stored, tensors
from ddptrain.data import prepare, shards, tokenizers
from ddptrain.ground import errors, files, log
from ddptrain.model_folder import judge
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
        """Return the mean cross-entropy in nats, shape (), or without targets logits, (B, T, V)."""
        logits_BTV = self.core(input_ids=tokens_BT, use_cache=False).logits
        return logits_BTV if targets_BT is None else model.token_loss(logits_BTV, targets_BT)


def prepare_data(settings: config.Config) -> pathlib.Path:
    """Return the folder of the token dataset: `--data`, or the run's `tokens`, made of JSON lines.

    A folder without dataset.json counts as JSON lines; `val.jsonl` in it is the validation set.
    """
    assert settings.model_local_dir is not None
    tokenizer_dir = settings.tokenizer_local_dir or settings.model_local_dir
    judge.check(settings.model_local_dir, settings.tokenizer_local_dir)
    causal_model.Described(settings.model_local_dir)
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
    """Return the model in a folder, to be loaded later.

    Raises UserError when folder and data do not fit.
    """
    described = causal_model.Described(folder)
    longest = described.longest
    if longest is not None and settings.seq_len is not None and settings.seq_len > longest:
        text = f"--seq-len {settings.seq_len}: the model in {folder} reads at most {longest} tokens"
        raise errors.UserError(text)

    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
    log.emit("MODEL", f"fine-tuning {described.kind}", folder=folder)
    identity = {
        "kind": "finetune",
        "type": described.kind,
        "config_sha256": digest,
        "seq_len": settings.seq_len,
    }
    num_ids = _needed_ids(described, dataset)
    if num_ids is not None:
        identity["vocab"] = num_ids

    def build() -> nn.Module:
        return Wrapped(described.load(num_ids))

    return model.Kind(identity, described.num_parameters, build)


def _needed_ids(described: causal_model.Described, dataset: shards.Dataset) -> int | None:
    """Return how many rows of embeddings the texts need, if that is more than the model has.

    An id that no text uses needs none: models are often smaller than their tokenizer.
    """
    known = described.num_ids
    if dataset.vocab <= known:
        return None
    every = (shard for split in shards.SPLITS for shard in dataset.splits[split])
    highest = max(shards.highest_id(shard, masked=dataset.masked) for shard in every)
    what = f"the tokenizer has {dataset.vocab} ids, the model {known}"
    if highest < known:
        log.emit("MODEL", f"{what}; no text uses the others")
        return None
    log.warn("MODEL", f"{what}, and the texts use the others: its embeddings grow")
    return dataset.vocab


def export(wrapped: Wrapped, settings: config.Config, output: pathlib.Path) -> None:
    """Save the tuned model and its tokenizer as transformers does, whole or not at all."""
    assert settings.model_local_dir is not None
    draft = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    save(wrapped, settings.tokenizer_local_dir or settings.model_local_dir, draft)
    if output.exists():
        output.rename(draft / "replaced")
        shutil.rmtree(draft / "replaced")
    draft.rename(output)
    files.sync_directory(output.parent)
    log.emit("MODEL", "the tuned model, for transformers", folder=output)


def save(wrapped: Wrapped, tokenizer_dir: pathlib.Path, folder: pathlib.Path) -> None:
    """Save a model and a tokenizer in a folder, as transformers does."""
    core: typing.Any = wrapped.core
    core.save_pretrained(str(folder))
    tokenizers.HfTokenizer(tokenizer_dir).save(folder)


def restored(found: stored.Checkpoint) -> Wrapped:
    """Return the tuned model of a checkpoint; the folder that it began from must be there.

    Raises UserError.
    """
    described = causal_model.Described(pathlib.Path(found.meta["config"]["model_local_dir"]))
    wrapped = Wrapped(described.load(found.meta["model"].get("vocab")))
    tensors.restore_weights(found, wrapped)
    return wrapped

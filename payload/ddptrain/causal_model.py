"""A causal language model loaded by transformers from a folder. Never looks at the network."""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import pathlib
import typing

import torch
from torch import nn

from ddptrain import model
from ddptrain.data import tokenizers
from ddptrain.ground import errors, log

_FLAG = "--model-local-dir"
_PROBE_LENGTH = 8


class Described:
    """A model by its configuration, its weights not read yet."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Read the configuration.

        Raises UserError if transformers knows no causal language model of this kind.
        """
        self.folder = folder
        self._library = tokenizers.need_transformers(_FLAG)
        with _refusals(folder, "holds no causal language model"):
            load = self._library.AutoConfig.from_pretrained
            self._config = load(str(folder), local_files_only=True)
            with torch.device("meta"):
                core = self._library.AutoModelForCausalLM.from_config(self._config)
        if self._config.is_encoder_decoder:
            what = f"{_FLAG} {folder} holds {self.kind}, an encoder with a decoder"
            raise errors.UserError(f"{what}; give a model that predicts the next token")
        self.num_parameters = model.num_parameters(core)
        text = self._config.get_text_config()
        self.num_ids: int = text.vocab_size
        self.longest: int | None = getattr(text, "max_position_embeddings", None)

    @property
    def kind(self) -> str:
        """The name of its architecture, such as llama."""
        return self._config.model_type

    def load(self, num_ids: int | None = None) -> nn.Module:
        """Load the weights in fp32, with `num_ids` rows of embeddings if it is given.

        Raises UserError if they belong to another model, or the model looks ahead.
        """
        with _refusals(self.folder, "cannot be loaded"):
            core, found = self._library.AutoModelForCausalLM.from_pretrained(
                str(self.folder),
                local_files_only=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
        missing = sorted(found["missing_keys"])
        if missing:
            what = f"{_FLAG} {self.folder}: the weights lack {len(missing)} tensors of"
            what += f" config.json, such as {missing[0]}"
            raise errors.UserError(f"{what}; download the model again")
        if num_ids is not None:
            _resize(core, num_ids)
        _freeze_all_but_text(core)
        self._need_causal(core)
        return core

    @torch.no_grad()
    def _need_causal(self, core: typing.Any) -> None:
        """Refuse a model whose output at a position depends on later tokens. Raises UserError."""
        was_training = core.training
        core.eval()
        length = min(_PROBE_LENGTH, self.longest or _PROBE_LENGTH)
        tokens_BT = torch.arange(length)[None] % self.num_ids
        before_BTV = core(input_ids=tokens_BT, use_cache=False).logits
        tokens_BT[0, -1] = self.num_ids - 1
        after_BTV = core(input_ids=tokens_BT, use_cache=False).logits
        core.train(was_training)

        change = (before_BTV - after_BTV)[:, :-1].abs().max()
        if change > 1e-4 * before_BTV.abs().max():
            what = f"{_FLAG} {self.folder} holds {self.kind}, which reads text in both directions"
            raise errors.UserError(f"{what}; give a model that predicts the next token")


@contextlib.contextmanager
def _refusals(folder: pathlib.Path, what: str) -> typing.Iterator[None]:
    """Turn errors of transformers into UserError with their first line."""
    try:
        yield
    except errors.UserError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        ImportError,
        AttributeError,
        TypeError,
    ) as e:
        first = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise errors.UserError(f"{_FLAG} {folder} {what}: {first}") from e


def _resize(core: typing.Any, num_ids: int) -> None:
    """Give a model rows of embeddings for more ids; each new one is the mean of the others.

    So the first losses stay low, and all ranks agree (Hewitt 2021, "Initializing new word
    embeddings").
    """
    before = core.get_input_embeddings().weight.shape[0]
    core.resize_token_embeddings(num_ids, mean_resizing=False)
    parts = [core.get_input_embeddings(), core.get_output_embeddings()]
    with torch.no_grad():
        for part in parts:
            if part is not None:
                part.weight[before:] = part.weight[:before].mean(dim=0)


def _freeze_all_but_text(core: typing.Any) -> None:
    """Freeze the vision and audio parts of a multimodal model: text gives them no gradient."""
    if core.config.get_text_config() is core.config:
        return
    used = {id(p) for p in core.get_decoder().parameters()}
    for part in (core.get_input_embeddings(), core.get_output_embeddings()):
        if part is not None:
            used |= {id(p) for p in part.parameters()}
    kept = 0
    for p in core.parameters():
        if id(p) not in used:
            p.requires_grad_(False)
            kept += p.numel()
    log.emit("MODEL", "the parts that are not for text stay as they are", parameters=kept)

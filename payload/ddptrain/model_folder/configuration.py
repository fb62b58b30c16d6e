"""A model's config.json: the kinds of models that cannot be tuned here. Standard library only."""

import collections.abc
import pathlib
import typing

from ddptrain.model_folder import saved_files, weights

Values = collections.abc.Mapping[str, typing.Any]

_OTHER_MODEL = "give a model that predicts the next token, such as Llama, Qwen, Gemma or GPT-2"
# Types of transformers 5.23 with a class for masked words (MODEL_FOR_MASKED_LM_MAPPING_NAMES,
# modeling_auto.py), and XLNet: they look at both sides of a word unless is_decoder is set.
_BIDIRECTIONAL = frozenset(
    "albert bert bert-generation big_bird camembert convbert data2vec-text deberta deberta-v2 "
    "distilbert electra ernie esm eurobert flaubert fnet funnel gte ibert layoutlm longformer luke "
    "megatron-bert mobilebert modernbert mpnet mra nomic_bert nystromformer perceiver reformer "
    "rembert roberta roberta-prelayernorm roc_bert roformer squeezebert xlm xlm-roberta "
    "xlm-roberta-xl xlnet xmod yoso".split()
)
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
)


def check(path: pathlib.Path, described: Values) -> None:
    """Refuse a model that is not of the kind that is tuned here. Raises UserError."""
    kind = described.get("model_type")
    if not isinstance(kind, str):
        saved_files.refuse(path, "has no model_type: it does not describe a model")
    if described.get("is_encoder_decoder"):
        saved_files.refuse(path, f"describes {kind}, an encoder with a decoder", _OTHER_MODEL)

    text = text_part(described)
    if _is_bidirectional(kind, described) or _is_bidirectional(kind, text):
        what = f"describes {kind}, which reads text in both directions"
        saved_files.refuse(path, what, _OTHER_MODEL)

    method = _quantisation(described) or _quantisation(text)
    if method:
        what = f"describes weights quantised by {method}, which cannot be trained"
        saved_files.refuse(path, what, "give the model that they were made from, in 16 or 32 bits")


def text_part(described: Values) -> Values:
    """Return the text part of a multimodal model, or the whole configuration."""
    part = described.get("text_config")
    if isinstance(part, dict):
        return typing.cast(Values, part)
    return described


def check_embeddings(path: pathlib.Path, described: Values, shapes: weights.Shapes) -> None:
    """Refuse weights of another model: their embeddings have another shape. Raises UserError."""
    text = text_part(described)
    num_ids = text.get("vocab_size")
    width = next((text[name] for name in _WIDTHS if name in text), None)
    is_projected = {"word_embed_proj_dim", "embedding_size"} & text.keys()
    for name, shape in shapes.items():
        if not name.endswith(_EMBEDDINGS) or len(shape) != 2:
            continue
        has_other_ids = num_ids not in (None, shape[0])
        has_other_width = width not in (None, shape[1]) and not is_projected
        if has_other_ids or has_other_width:
            what = f"describes embeddings of {num_ids} x {width}, the weights' {name}"
            what += f" is {shape[0]} x {shape[1]}: these are files of two models"
            saved_files.refuse(path, what, "download both again")


def _is_bidirectional(kind: str, values: Values) -> bool:
    if values.get("is_causal") is False or values.get("use_bidirectional_attention") is True:
        return True
    return kind in _BIDIRECTIONAL and not values.get("is_decoder")


def _quantisation(values: Values) -> str:
    """Return the method that quantised the weights, or ""."""
    found = values.get("quantization_config") or values.get("compression_config")
    if not isinstance(found, dict):
        return ""
    chosen = typing.cast(Values, found)
    if chosen.get("quant_method"):
        return str(chosen["quant_method"])
    return "bitsandbytes" if "load_in_8bit" in chosen or "load_in_4bit" in chosen else "a method"

"""The one judge of a model's folder: configuration, tokenizer and the headers of the weights.

Standard library only, in milliseconds for all but the tokenizer: it runs where a job is submitted,
and again before rank 0 makes the tokens. What it does not know passes: transformers judges.
"""

import collections.abc
import pathlib
import typing

from ddptrain.ground import errors
from ddptrain.model_folder import configuration, saved_files, weights

CONFIG = "config.json"
_FLAG = "--model-local-dir"
_TOKENIZER = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"
# Read beside config.json if they are there
_TOKENIZER_JSON = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Read only without tokenizer.json
_VOCABULARIES = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# Their JSON says which file they are (saved_files.kind_of)
_TELLING = ("generation_config.json", _TOKENIZER, "tokenizer_config.json")
_MAY_BE_ALIKE = ("special_tokens_map.json", "added_tokens.json")  # old ones, of few tokens


def check(model: pathlib.Path, tokenizer: pathlib.Path | None = None) -> list[str]:
    """Check a model's folder, and its tokenizer's if that is another one.

    Returns remarks on what is taken all the same. Raises UserError: one line that names the file
    and the remedy.
    """
    config = _check_place(model)
    texts: dict[pathlib.Path, bytes] = {}
    described = _read_object(config, texts)
    configuration.check(config, described)
    _read_if_there(model / "generation_config.json", texts)
    num_ids = _check_tokenizer(tokenizer or model, texts)
    _check_alike(texts)

    shapes = weights.check(model)
    configuration.check_embeddings(config, described, shapes)
    return _compare_ids(tokenizer or model, num_ids, model, described)


def _check_place(model: pathlib.Path) -> pathlib.Path:
    """Return the path of a model's configuration. Raises UserError if the folder holds none."""
    config = model / CONFIG
    if config.exists() or config.is_symlink():
        return config
    what = f"{_FLAG} {model} holds no model: it has no {CONFIG}"
    remedy = "save the model there with save_pretrained"
    if (model / "adapter_config.json").exists():
        what = f"{_FLAG} {model} holds an adapter, not a whole model"
        remedy = "merge it into its model with merge_and_unload, and save that"
    raise errors.UserError(f"{what}; {remedy}")


def _read_object(path: pathlib.Path, texts: dict[pathlib.Path, bytes]) -> configuration.Values:
    """Read a JSON object, and keep its text in `texts`. Raises UserError if it is another file."""
    texts[path] = saved_files.read(path)
    content = saved_files.parse(path, texts[path])
    kind = saved_files.kind_of(content)
    if path.name in _TELLING and kind not in ("", path.name):
        saved_files.refuse(path, f"holds what belongs into {kind}")
    return content


def _read_if_there(
    path: pathlib.Path, texts: dict[pathlib.Path, bytes]
) -> configuration.Values | None:
    return _read_object(path, texts) if path.exists() else None


def _check_tokenizer(place: pathlib.Path, texts: dict[pathlib.Path, bytes]) -> int | None:
    """Check a tokenizer's files, and return its number of ids if that is known. Raises UserError."""
    folder = place if place.is_dir() else place.parent
    whole = folder / _TOKENIZER if place.is_dir() else place
    for name in _TOKENIZER_JSON:
        _read_if_there(folder / name, texts)

    template = folder / _TEMPLATE
    if template.exists():
        texts[template] = saved_files.read(template)
        saved_files.check_template(template, texts[template])

    if whole.exists():
        return _count_ids(whole, _read_object(whole, texts))
    for name in _VOCABULARIES:
        path = folder / name
        if not path.exists():
            continue
        saved_files.read_start(path)
        if path.suffix == ".json":
            _read_object(path, texts)
    return None


def _count_ids(path: pathlib.Path, tokenizer: configuration.Values) -> int | None:
    """Return the highest id of a tokenizer.json and 1; None if its form is unknown.

    Raises UserError if it is none.
    """
    core = tokenizer.get("model")
    if not isinstance(core, dict):
        saved_files.refuse(path, "is no tokenizer: it has no model")
    vocabulary = typing.cast(configuration.Values, core).get("vocab")
    ids = [-1]
    if isinstance(vocabulary, dict):
        ids += _numbers(typing.cast(configuration.Values, vocabulary).values())
    elif isinstance(vocabulary, list):  # Unigram's: pairs, their place is the id
        ids.append(len(typing.cast(list[object], vocabulary)) - 1)
    else:
        return None
    for token in tokenizer.get("added_tokens") or ():
        if isinstance(token, dict):
            ids += _numbers([typing.cast(configuration.Values, token).get("id")])
    return max(ids) + 1


def _numbers(values: collections.abc.Iterable[object]) -> list[int]:
    return [value for value in values if isinstance(value, int)]


def _check_alike(texts: dict[pathlib.Path, bytes]) -> None:
    """Refuse two files with the same content: one has replaced the other. Raises UserError."""
    owners: dict[bytes, pathlib.Path] = {}
    for path, content in texts.items():
        if path.name in _MAY_BE_ALIKE:
            continue
        other = owners.setdefault(content, path)
        if other != path:
            saved_files.refuse(path, f"has the same content as {other}", "download both again")


def _compare_ids(
    tokenizer: pathlib.Path,
    num_ids: int | None,
    model: pathlib.Path,
    described: configuration.Values,
) -> list[str]:
    """Return a remark if a tokenizer has more ids than the model."""
    known = configuration.text_part(described).get("vocab_size")
    if num_ids is None or not isinstance(known, int) or num_ids <= known:
        return []
    what = f"the tokenizer in {tokenizer} has {num_ids} ids, the model in {model} knows {known}"
    return [f"{what}; its embeddings grow if the texts use the others"]

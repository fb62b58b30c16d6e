"""The one judge of a model's folder: configuration, tokenizer and the headers of the weights.

Standard library only, in milliseconds for all but the tokenizer: it runs when a job is submitted,
and again before rank 0 makes the tokens. It passes kinds that it does not know: transformers
judges them.
"""

import pathlib

from ddptrain.ground import errors
from ddptrain.model_folder import configuration, saved_files, weights

CONFIG = "config.json"
_FLAG = "--model-local-dir"
_TOKENIZER = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"
# Read in addition to config.json if they are there
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


def check(model: pathlib.Path, tokenizer: pathlib.Path | None = None) -> None:
    """Check a model's folder, and its tokenizer's if that is another one.

    Raises UserError: one line that names the file and the remedy.
    """
    config = _check_place(model)
    texts: dict[pathlib.Path, bytes] = {}
    described = _read_object(config, texts)
    configuration.check(config, described)
    _read_if_there(model / "generation_config.json", texts)
    _check_tokenizer(tokenizer or model, texts)
    _check_alike(texts)

    shapes = weights.check(model)
    configuration.check_embeddings(config, described, shapes)


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


def _read_if_there(path: pathlib.Path, texts: dict[pathlib.Path, bytes]) -> None:
    if path.exists():
        _read_object(path, texts)


def _check_tokenizer(place: pathlib.Path, texts: dict[pathlib.Path, bytes]) -> None:
    """Check the files of a tokenizer that transformers reads. Raises UserError."""
    if not place.exists():
        return  # who loads it names the option
    folder = place if place.is_dir() else place.parent
    whole = folder / _TOKENIZER if place.is_dir() else place
    for name in _TOKENIZER_JSON:
        _read_if_there(folder / name, texts)

    template = folder / _TEMPLATE
    if template.exists():
        texts[template] = saved_files.read(template)
        saved_files.check_template(template, texts[template])

    if whole.exists():
        content = _read_object(whole, texts)
        if not isinstance(content.get("model"), dict):
            saved_files.refuse(whole, "is not a tokenizer: it has no model")
        return
    for name in _VOCABULARIES:
        path = folder / name
        if not path.exists():
            continue
        saved_files.read_start(path)
        if path.suffix == ".json":
            _read_object(path, texts)


def _check_alike(texts: dict[pathlib.Path, bytes]) -> None:
    """Refuse two files with the same content: one has replaced the other. Raises UserError."""
    owners: dict[bytes, pathlib.Path] = {}
    for path, content in texts.items():
        if path.name in _MAY_BE_ALIKE or content.strip() == b"{}":
            continue
        other = owners.setdefault(content, path)
        if other != path:
            saved_files.refuse(path, f"has the same content as {other}", "download both again")

"""Whether a dataset goes with the model or the checkpoint that it is given to, as far as small files tell.

What cannot be read here is left to the payload, which looks again, with the model's own tokenizer, before it trains.
"""

import collections.abc
import typing
import zlib

from ddp.base import ParameterError, Settings, shown
from ddp.run import control
from ddp.workspace import folders, operations

_MOST_PADDING = 2  # a model's embedding may be rounded up, but no model doubles its tokenizer's ids


def check_model(settings: Settings, dataset: str, trained: collections.abc.Iterable[str]) -> None:
    """Raise ParameterError where a dataset is not whole, or its tokens cannot be those of a model that it tunes."""
    try:
        read = folders.call(settings, operations.read_dataset, folder=dataset)
    except folders.HangingError:
        raise
    except folders.MissingError:
        return  # it is made first, or is the text itself
    except folders.WorkspaceError as e:
        raise ParameterError("dataset", f"{e}; {_again(settings, dataset)}") from e
    if misfit := read["misfit"]:
        held = (
            "is not there" if misfit["bytes"] is None else f"has {misfit['bytes']} bytes instead of {misfit['wanted']}"
        )
        path = control.printable(misfit["path"])
        raise ParameterError("dataset", f"{path} {held}; {_again(settings, dataset)}")
    made = _tokenizer(read["manifest"])
    if made is None:
        return
    kind, ids = made
    for folder in trained:
        config = _read(settings, f"{folder}/config.json")
        knows = config.get("vocab_size") or _dict(config.get("text_config")).get("vocab_size")
        if isinstance(knows, int) and not ids <= knows <= _MOST_PADDING * ids:
            text = f"{dataset} was tokenised with {kind} ({ids} ids), and the model in {folder} knows {knows}"
            example = f"dataset={settings.workspace}/chat.jsonl"
            raise ParameterError("dataset", f"{text}; give the text itself, a file or folder of JSON lines: {example}")


def check_origin(settings: Settings, dataset: str, run: str, *, is_same_run: bool) -> None:
    """Raise ParameterError where the checkpoint to resume from was made of another dataset."""
    learned = _dict(_dict(_read(settings, f"{settings.runs / run}/latest/manifest.json").get("meta")).get("data"))
    manifest = _read(settings, f"{dataset}/dataset.json")
    theirs, ours = _tokenizer(learned), _tokenizer(manifest)
    if theirs is None or ours is None:
        return
    if learned["tokenizer"] != manifest["tokenizer"]:
        what = (
            f"{dataset} was tokenised with {ours[0]} ({ours[1]} ids), and {run} has learned {theirs[0]} ({theirs[1]})"
        )
    elif (found := _fingerprint(manifest)) is not None and found != learned.get("fingerprint", found):
        what = f"{run} has learned from {shown(learned.get('name'))}, and {dataset} holds something else"
    else:
        return
    before = str(control.about(settings, run).get("dataset") or "")
    same = f"give dataset={control.printable(before).removeprefix(f'{settings.datasets}/')[:200]}" if before else ""
    anew = "another name for run" if is_same_run else "omit resume"
    raise ParameterError("dataset", f"{what}; {f'{same}, or' if same else 'to begin anew'} {anew}")


def _again(settings: Settings, dataset: str) -> str:
    name = dataset.removeprefix(f"{settings.datasets}/")
    return f"{settings.typed('prepare-dataset', name=name, source='...')} makes again what is missing"


def _tokenizer(record: folders.Json) -> tuple[str, int] | None:
    """Return the kind and the number of ids of a tokenizer as the payload records it."""
    about = _dict(record.get("tokenizer"))
    ids = about.get("vocab")
    return (shown(about.get("kind")).strip("'"), ids) if isinstance(ids, int) and ids > 0 else None


def _fingerprint(manifest: folders.Json) -> str | None:
    """Compute a dataset's fingerprint as the payload's shards.open_dataset does; each checkpoint's manifest has it."""
    try:
        parts = [str(manifest["tokenizer"]["sha256"])]
        parts += [f"{split} {shard['crc32']}" for split in ("train", "val") for shard in manifest["splits"][split]]
    except (KeyError, TypeError):
        return None
    return f"{zlib.crc32(' '.join(parts).encode()):08x}"


def _read(settings: Settings, path: str) -> folders.Json:
    try:
        return folders.call(settings, operations.read_json, path=path)
    except folders.HangingError:
        raise
    except folders.WorkspaceError:
        return {}


def _dict(value: object) -> dict[str, typing.Any]:
    return typing.cast(dict[str, typing.Any], value) if isinstance(value, dict) else {}

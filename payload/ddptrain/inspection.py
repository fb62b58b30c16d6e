"""`inspect`: describe a run, a checkpoint or a dataset, and verify it."""

import argparse
import contextlib
import json
import pathlib
import sys
import typing

from ddptrain.data import shards, unread
from ddptrain.ground import errors, files, log

_SHOWN = ("created", "step", "epoch", "format", "world_size")  # of a checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "path", type=pathlib.Path, help="folder of a run, a checkpoint or a dataset"
    )
    parser.add_argument("--json", action="store_true", help="print nothing but one JSON object")


def check(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options. Raises UserError if the path is not a folder."""
    if not args.path.is_dir():
        raise errors.UserError(f"{args.path}: no such folder")
    return args


def run(args: argparse.Namespace) -> int:
    """Describe the folder, and return the exit code: 0 if it is whole.

    Raises UserError for a foreign folder.
    """
    path: pathlib.Path = args.path
    describe = _dataset if (path / shards.MANIFEST).exists() else _checkpoints
    facts, damage = describe(path)
    if args.json:
        print(json.dumps({**facts, "damage": damage}, indent=2))
    else:
        print(json.dumps(facts, indent=2))
    # With --json a program reads the object
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        for text in damage:
            log.fatal(text)
    if not damage and not args.json:
        print("verified: whole")
    return 1 if damage else 0


def _dataset(path: pathlib.Path) -> tuple[dict[str, typing.Any], list[str]]:
    try:
        dataset = shards.open_dataset(path)
    except shards.ShardError as e:
        return {"kind": "dataset", "path": str(path)}, [str(e)]
    manifest = files.read_json(path / shards.MANIFEST)
    facts: dict[str, typing.Any] = {
        "kind": "dataset",
        "path": str(path),
        "name": dataset.name,
        "not-read": str(unread.Unread(manifest.get("not_read", {}))),
        "not-learned": "; ".join(dataset.not_learned),
        "tokenizer": dataset.tokenizer["kind"],
        "vocabulary": dataset.vocab,
        "fingerprint": dataset.fingerprint,
        "totals": {},
        "shards": [],
    }
    for split, total in manifest["totals"].items():
        facts["totals"][split] = f"{total['tokens']} tokens, {total['docs']} documents"
    for split in shards.SPLITS:
        for shard in dataset.splits[split]:
            name = str(shard.path.relative_to(path))
            about = {"file": name, "tokens": shard.tokens, "bytes": shard.size_bytes}
            facts["shards"].append(about)
    return facts, shards.damaged(dataset)


def _checkpoints(path: pathlib.Path) -> tuple[dict[str, typing.Any], list[str]]:
    """Describe a checkpoint, or each of a run's."""
    from ddptrain.checkpoint import stored

    is_one = (path / stored.MANIFEST).exists() or path.name.startswith("epoch-")
    found = [path] if is_one else stored.candidates(path)
    if not found:
        what = f"{path} holds neither checkpoints nor a dataset"
        raise errors.UserError(f"{what}; give a folder that does")
    damage: list[str] = []
    listed: dict[str, object] = {}
    for one in found:
        try:
            meta = stored.verify(one).meta
        except stored.CheckpointError as e:
            damage.append(str(e))
        else:
            listed[one.name] = {name: meta[name] for name in _SHOWN}
    kind = "checkpoint" if is_one else "run"
    return {"kind": kind, "path": str(path), "checkpoints": listed}, damage

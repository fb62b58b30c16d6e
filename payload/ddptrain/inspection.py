"""`inspect`: describe a run, a checkpoint or a dataset, and verify it."""

import argparse
import contextlib
import json
import pathlib
import sys
import typing

from ddptrain.data import shards, unread
from ddptrain.ground import errors, files, log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "path", type=pathlib.Path, help="folder of a run, a checkpoint or a dataset"
    )
    parser.add_argument("--json", action="store_true", help="print nothing but one JSON object")


def check(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options. Raises UserError if the path is no folder."""
    if not args.path.is_dir():
        raise errors.UserError(f"{args.path}: no such folder")
    return args


def run(args: argparse.Namespace) -> int:
    """Print what the folder is and return the exit code: 0 when it is whole. Raises UserError for a foreign folder."""
    path: pathlib.Path = args.path
    facts, damage = _dataset(path) if (path / shards.MANIFEST).exists() else _checkpoints(path)
    print(json.dumps({**facts, "damage": damage} if args.json else facts, indent=2))
    with contextlib.redirect_stdout(
        sys.stderr if args.json else sys.stdout
    ):  # a program reads the object
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
    found = [shard for split in shards.SPLITS for shard in dataset.splits[split]]
    facts: dict[str, typing.Any] = {
        "kind": "dataset",
        "path": str(path),
        "name": dataset.name,
        "not-read": str(unread.Unread(manifest.get("not_read", {}))),
        "tokenizer": dataset.tokenizer["kind"],
        "vocabulary": dataset.vocab,
        "fingerprint": dataset.fingerprint,
        "totals": {
            k: f"{v['tokens']} tokens, {v['docs']} documents" for k, v in manifest["totals"].items()
        },
        "shards": [
            {"file": str(s.path.relative_to(path)), "tokens": s.tokens, "bytes": s.size_bytes}
            for s in found
        ],
    }
    return facts, shards.damaged(dataset)


def _checkpoints(path: pathlib.Path) -> tuple[dict[str, typing.Any], list[str]]:
    """Describe a checkpoint, or each of a run's."""
    from ddptrain.checkpoint import stored

    is_one = (path / stored.MANIFEST).exists() or path.name.startswith("epoch-")
    found = [path] if is_one else stored.candidates(path)
    if not found:
        raise errors.UserError(
            f"{path} holds neither checkpoints nor a dataset; give a folder that does"
        )
    damage: list[str] = []
    listed: dict[str, object] = {}
    for one in found:
        try:
            meta = stored.verify(one).meta
        except stored.CheckpointError as e:
            damage.append(str(e))
        else:
            listed[one.name] = {
                name: meta[name] for name in ("created", "step", "epoch", "format", "world_size")
            }
    return {
        "kind": "checkpoint" if is_one else "run",
        "path": str(path),
        "checkpoints": listed,
    }, damage

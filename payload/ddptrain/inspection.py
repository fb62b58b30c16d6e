"""`inspect`: describe a run, a checkpoint or a dataset, and verify it."""

import argparse
import contextlib
import json
import pathlib
import sys
import typing

from ddptrain import errors, files, markers, report, resume, shards, sources

_RUN_FILES = (report.METRICS, report.SUMMARY, "config.json", "latest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("path", type=pathlib.Path, help="folder of a run, a checkpoint or a dataset")
    parser.add_argument("--json", action="store_true", help="print nothing but one JSON object")


def check(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options. Raises UserError if the path is no folder."""
    if not args.path.is_dir():
        raise errors.UserError(f"{args.path}: no such folder")
    return args


def run(args: argparse.Namespace) -> int:
    """Print what the folder is and return the exit code: 0 when it is whole. Raises UserError for a foreign folder."""
    path: pathlib.Path = args.path
    if (path / shards.MANIFEST).exists():
        facts, damage = _dataset(path)
    elif (path / "manifest.json").exists() or path.name.startswith("epoch-"):
        facts, damage = _checkpoint(path)
    elif any((path / name).exists() for name in _RUN_FILES) or any(path.glob("epoch-*")):
        facts, damage = _run(path)
    else:
        text = "is neither a run, nor a checkpoint, nor a dataset; give a folder that this program made"
        raise errors.UserError(f"{path} {text}")
    print(json.dumps({**facts, "damage": damage} if args.json else facts, indent=2))
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):  # a program reads the object
        for text in damage:
            markers.fatal(text)
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
        "created": manifest.get("created"),
        "source": manifest.get("source"),
        "not-read": str(sources.Unread(manifest.get("not_read", {}))),
        "tokenizer": dataset.tokenizer["kind"],
        "vocabulary": dataset.vocab,
        "dtype": dataset.dtype,
        "masked": dataset.masked,
        "fingerprint": dataset.fingerprint,
        "totals": {k: f"{v['tokens']} tokens, {v['docs']} documents" for k, v in manifest["totals"].items()},
        "shards": [{"file": str(s.path.relative_to(path)), "tokens": s.tokens, "bytes": s.size_bytes} for s in found],
    }
    return facts, shards.damaged(dataset)


def _checkpoint(path: pathlib.Path) -> tuple[dict[str, typing.Any], list[str]]:
    from ddptrain import checkpoint

    try:
        found = checkpoint.verify(path)
    except checkpoint.CheckpointError as e:
        return {"kind": "checkpoint", "path": str(path)}, [str(e)]
    meta = found.meta
    kept = {name: meta[name] for name in ("created", "step", "epoch", "format")}
    facts = {"kind": "checkpoint", "path": str(path), **kept, "saved_by_ranks": meta["world_size"]}
    if meta["format"] != resume.SCRIPT:
        facts |= {name: meta[name] for name in ("torch", "progress", "model")}
        facts |= {"data": meta["data"]["name"], "global_batch": meta["plan"]["global_batch"]}
    return {**facts, "files": files.read_json(path / checkpoint.MANIFEST)["files"]}, []


def _run(path: pathlib.Path) -> tuple[dict[str, typing.Any], list[str]]:
    from ddptrain import checkpoint

    damage: list[str] = []
    listed: list[dict[str, object]] = []
    facts: dict[str, typing.Any] = {"kind": "run", "path": str(path), "checkpoints": listed}
    for candidate in checkpoint.candidates(path):
        try:
            found = checkpoint.verify(candidate)
        except checkpoint.CheckpointError as e:
            damage.append(str(e))
            listed.append({"name": candidate.name, "whole": False})
        else:
            val_loss = found.meta.get("progress", {}).get("val_loss")
            listed.append({"name": candidate.name, "whole": True, "step": found.step, "val_loss": val_loss})
    for link in (checkpoint.LATEST, checkpoint.BEST):
        facts[link] = (path / link).readlink().name if (path / link).is_symlink() else None
    return facts, damage

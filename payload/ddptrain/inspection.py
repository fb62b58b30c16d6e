"""`inspect`: what a run, a checkpoint or a dataset is, and whether it is whole."""

import argparse
import contextlib
import json
import pathlib
import sys
import typing

import numpy as np

from ddptrain import errors, files, markers, report, resume, shards, tokenizers

_CURVE_ROWS, _CURVE_COLUMNS = 10, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("path", type=pathlib.Path, help="folder of a run, a checkpoint or a dataset")
    parser.add_argument("--quick", action="store_true", help="check sizes only, do not read every byte")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(path: pathlib.Path, *, quick: bool, as_json: bool) -> int:
    """Print what is there and return the exit code: 0 when it is whole. Raises UserError when it is nothing of ours."""
    if not path.is_dir():
        raise errors.UserError(f"{path}: no such folder")
    if (path / shards.MANIFEST).exists():
        facts, damage = _dataset(path, quick=quick)
    elif (path / "manifest.json").exists() or path.name.startswith("epoch-"):
        facts, damage = _checkpoint(path, quick=quick)
    elif any((path / name).exists() for name in (report.METRICS, report.SUMMARY, "config.json", "latest")) or any(
        path.glob("epoch-*")
    ):
        facts, damage = _run(path, quick=quick)
    else:
        raise errors.UserError(
            f"{path} is neither a run, nor a checkpoint, nor a dataset; give a folder that this program made"
        )
    if as_json:
        print(json.dumps({**facts, "damage": damage}, indent=2))
    else:
        for key, value in facts.items():
            if key != "curve":
                _print(key, value)
        print(facts.get("curve", ""), end="")
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):  # a program reads what is there
        for text in damage:
            markers.fatal(text)
    if not damage and not as_json:
        print(f"{'verified' if not quick else 'sizes verified'}: whole")
    return 1 if damage else 0


def _print(key: str, value: object, indent: str = "") -> None:
    if isinstance(value, list) and all(isinstance(v, dict) for v in typing.cast(list[object], value)):
        print(f"{indent}{key}:")
        for entry in typing.cast(list[dict[str, object]], value):
            print(f"{indent}  " + "  ".join(f"{k}={_short(v)}" for k, v in entry.items()))
    elif isinstance(value, dict):
        print(f"{indent}{key}:")
        for name, inner in typing.cast(dict[str, object], value).items():
            if inner is not None:
                _print(name, inner, indent + "  ")
    else:
        print(f"{indent}{key}: {_short(typing.cast(object, value))}")


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)


def _dataset(path: pathlib.Path, *, quick: bool) -> tuple[dict[str, typing.Any], list[str]]:
    try:
        dataset = shards.open_dataset(path)
    except shards.ShardError as e:
        return {"kind": "dataset", "path": str(path)}, [str(e)]
    manifest = files.read_json(path / shards.MANIFEST)
    damage = [] if quick else shards.damaged(dataset)
    facts: dict[str, typing.Any] = {
        "kind": "dataset", "path": str(path), "name": dataset.name, "created": manifest.get("created"),
        "source": manifest.get("source"),
        "tokenizer": dataset.tokenizer["kind"], "vocabulary": dataset.vocab, "dtype": dataset.dtype,
        "masked": dataset.masked,
        "fingerprint": dataset.fingerprint, "totals": {k: f"{v['tokens']} tokens, {v['docs']} documents" for k,
        v in manifest["totals"].items()},
        "shards": [{"file": str(s.path.relative_to(path)), "tokens": s.tokens,
        "bytes": s.size_bytes} for part in dataset.splits.values() for s in part],
    }  # fmt: skip
    if not damage and dataset.splits["train"]:
        facts["begins"] = _beginning(dataset)
    return facts, damage


def _beginning(dataset: shards.Dataset, count: int = 40) -> str:
    shard = dataset.splits["train"][0]
    ids = np.fromfile(shard.path, dtype=shard.dtype, count=count, offset=shards.HEADER_BYTES).astype(np.int64)
    if dataset.masked:
        ids &= (1 << (np.dtype(shard.dtype).itemsize * 8 - 1)) - 1
    if dataset.tokenizer["kind"] == "byte":
        return repr(bytes(int(i) for i in ids if i < tokenizers.BYTE_END).decode(errors="replace"))
    return " ".join(str(i) for i in ids)


def _checkpoint(path: pathlib.Path, *, quick: bool) -> tuple[dict[str, typing.Any], list[str]]:
    from ddptrain import checkpoint

    try:
        found = checkpoint.verify(path, contents=not quick)
    except checkpoint.CheckpointError as e:
        return {"kind": "checkpoint", "path": str(path)}, [str(e)]
    meta = found.meta
    manifest = files.read_json(path / checkpoint.MANIFEST)
    facts = {
        "kind": "checkpoint", "path": str(path), "created": meta["created"], "step": meta["step"],
        "epoch": meta["epoch"],
        "saved_by_ranks": meta["world_size"], "format": meta["format"],
    }  # fmt: skip
    if meta["format"] != resume.SCRIPT:
        facts |= {
            "torch": meta["torch"], "progress": meta["progress"], "model": meta["model"],
            "data": meta["data"]["name"], "global_batch": meta["plan"]["global_batch"],
        }  # fmt: skip
    return {**facts, "files": manifest["files"]}, []


def _run(path: pathlib.Path, *, quick: bool) -> tuple[dict[str, typing.Any], list[str]]:
    from ddptrain import checkpoint

    facts: dict[str, typing.Any] = {"kind": "run", "path": str(path)}
    damage: list[str] = []
    for name, key in ((report.SUMMARY, "summary"), ("config.json", "config")):
        try:
            facts[key] = files.read_json(path / name)
        except FileNotFoundError:
            facts[key] = None
        except (OSError, ValueError) as e:
            damage.append(str(e))
    records = report.read_metrics(path / report.METRICS)
    steps = [
        (int(r["step"]), float(r["loss"])) for r in records if r.get("kind") == "step" and r.get("loss") is not None
    ]
    facts["metrics"] = f"{len(steps)} steps, last at {steps[-1][0]} with loss {steps[-1][1]:.4f}" if steps else "none"
    listed: list[dict[str, object]] = []
    facts["checkpoints"] = listed
    for candidate in checkpoint.candidates(path):
        try:
            found = checkpoint.verify(candidate, contents=not quick)
        except checkpoint.CheckpointError as e:
            damage.append(str(e))
            listed.append({"name": candidate.name, "whole": False})
        else:
            val_loss = found.meta.get("progress", {}).get("val_loss")
            listed.append({"name": candidate.name, "whole": True, "step": found.step, "val_loss": val_loss})
    for link in (checkpoint.LATEST, checkpoint.BEST):
        facts[link] = (path / link).readlink().name if (path / link).is_symlink() else None
    if steps:
        facts["curve"] = text_curve(steps)
    return facts, damage


def text_curve(points: list[tuple[int, float]]) -> str:
    """Return a loss curve drawn with characters, a few lines high."""
    chunks = np.array_split(np.array([loss for _, loss in points]), min(_CURVE_COLUMNS, len(points)))
    means = [float(chunk.mean()) for chunk in chunks]
    high, low = max(means), min(means)
    span = (high - low) or 1.0
    lines: list[str] = []
    for row in range(_CURVE_ROWS):
        level = high - span * row / (_CURVE_ROWS - 1)
        cells = "".join("*" if round((high - mean) / span * (_CURVE_ROWS - 1)) == row else " " for mean in means)
        lines.append(f"{level:8.3f} |{cells}".rstrip())
    lines.append(" " * 9 + "+" + "-" * len(means))
    lines.append(
        " " * 10 + f"{points[0][0]}".ljust(max(1, len(means) - len(str(points[-1][0])))) + f"{points[-1][0]}  step"
    )
    return "\n".join(lines) + "\n"

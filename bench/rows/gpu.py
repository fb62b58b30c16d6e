"""On a GPU: speed and MFU of GPT-2 124M against nanoGPT, and the checkpoint's stall."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import re
import subprocess
import typing

import torch

from bench import commands, data, peers, row
from ddptrain.data import shards

BATCH, SEQ_LEN = 32, 1024
STEPS, WARM_STEPS = 120, 20
LIMIT_S = 600


def run(scratch: pathlib.Path) -> list[row.Row | row.NotHere]:
    """Measure one after the other: two models that take turns would share the memory."""
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        raise row.NotHere(f"no GPU (torch {torch.__version__}, built for {built}, sees none)")
    dataset = data.dataset(scratch / "data", 40_000_000, 50257)
    rate, saves, summary = _ours(dataset, scratch / "run")
    mfu = summary["mfu"]
    how = f"T {SEQ_LEN} B {BATCH}, bf16, compiled, median of the steps after the first {WARM_STEPS}"
    found: list[row.Row | row.NotHere] = [_stall(saves)]
    try:
        theirs = _nanogpt(peers.nanogpt(), dataset, scratch / "theirs")
        found.append(
            row.Row(
                "train: GPT-2 124M on a GPU",
                rate,
                theirs,
                "tok/s",
                "nanoGPT's train.py",
                goal=1.0,
                note=how,
            )
        )
    except row.NotHere as e:
        found.append(e)
    if mfu is not None:
        share = mfu * rate / summary["tokens_per_second"]
        note = f"{rate:.0f} tok/s on {torch.cuda.get_device_name(0)}; 6 N + 12 L H D T over the dense bf16 peak"
        found.append(
            row.Row(
                "MFU, GPT-2 124M, T 1024",
                share,
                0.40,
                "of peak",
                "the promised share",
                goal=1.0,
                note=note,
            )
        )
    return found


def _stall(saves: list[dict[str, typing.Any]]) -> row.Row:
    """Compare the first save's stall with its limit; the second may wait for the first's write."""
    first, second = saves
    apart_s = second["time"] - first["time"]
    waits = f"the next, {apart_s:.1f} s later, {second['stall_s']:.2f} s"
    return row.Row(
        "checkpoint stall, GPT-2 124M, pinned",
        first["stall_s"],
        0.1,
        "s",
        "a limit",
        more_is_better=False,
        goal=1.0,
        note=f"on disk after {first['seconds']:.1f} s; {waits}",
    )


def _ours(
    dataset: shards.Dataset, run_dir: pathlib.Path
) -> tuple[float, list[dict[str, typing.Any]], dict[str, typing.Any]]:
    """Return the tokens per second of our run's middle, its two saves, and its summary."""
    size = ("--model", "gpt2", "--batch", BATCH, "--steps", STEPS, "--epoch-steps", STEPS // 2)
    places = ("--data", dataset.root, "--run-dir", run_dir)
    often = ("--eval-rows", 64, "--log-every", 10)
    commands.run_ddptrain("train", *places, *size, *often, timeout_s=LIMIT_S)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rates = [
        r["tokens_per_second"] for r in records if r["kind"] == "step" and r["step"] > WARM_STEPS
    ]
    saves = [r for r in records if r["kind"] == "checkpoint"]
    return row.median(rates), saves, json.loads((run_dir / "summary.json").read_text())


def _nanogpt(checkout: pathlib.Path, dataset: shards.Dataset, folder: pathlib.Path) -> float:
    """Return nanoGPT's tokens per second, from the times that it prints."""
    peers.lay_out(folder, checkout, dataset, has_vocab=False)
    size = {
        "batch_size": BATCH,
        "block_size": SEQ_LEN,
        "gradient_accumulation_steps": 1,
        "max_iters": STEPS // 2,
    }
    often = {"eval_interval": 10**9, "eval_iters": 1, "log_interval": 1, "out_dir": "out"}
    argv = peers.command(checkout, device="cuda", dtype="bfloat16", compile=True, **size, **often)
    done = subprocess.run(
        argv, cwd=folder, check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    laps_ms = [
        float(found)
        for found in re.findall(r"^iter \d+: .* time ([0-9.]+)ms", done.stdout, re.MULTILINE)
    ]
    return BATCH * SEQ_LEN / (row.median(laps_ms[WARM_STEPS:]) / 1000)

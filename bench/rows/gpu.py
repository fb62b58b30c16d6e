"""On a GPU: speed and MFU of GPT-2 124M beside nanoGPT, the checkpoint's stall, the collectives with one rank."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import re
import subprocess
import sys

import torch

from bench import commands, data, row
from bench.peers import checkouts, nanogpt
from ddptrain import shards

BATCH, SEQ_LEN = 32, 1024
STEPS, WARM_STEPS = 120, 20
LIMIT_S = 600


def run(scratch: pathlib.Path) -> list[row.Row | row.NotHere]:
    """Measure each in a time of its own: two models that take turns would share the memory."""
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        raise row.NotHere(f"no GPU here (torch {torch.__version__}, built for {built}, sees none); CUDA, NCCL and MFU")
    dataset = data.dataset(scratch / "data", 40_000_000, 50257)
    run_dir = scratch / "run"
    process = commands.start(
        1, "train", "--data", dataset.root, "--run-dir", run_dir, "--model", "gpt2", "--batch", BATCH,
        "--steps", STEPS, "--epoch-steps", STEPS // 2, "--eval-rows", 64, "--log-every", 10,
    )  # fmt: skip
    output = process.communicate(timeout=LIMIT_S)[0]
    if process.returncode:
        raise RuntimeError(output[-1000:])
    summary = json.loads((run_dir / "summary.json").read_text())
    rate = _median_rate(run_dir)
    how = f"T {SEQ_LEN} B {BATCH}, bf16, compiled, median of the steps behind the first {WARM_STEPS}"
    checkout = checkouts.look("nanoGPT")
    found: list[row.Row | row.NotHere] = []
    if isinstance(checkout, pathlib.Path):
        theirs = _nanogpt(checkout, dataset, scratch / "theirs")
        found.append(
            row.Row("train: GPT-2 124M on a GPU", rate, theirs, "tok/s", "nanoGPT's train.py", goal=1.0, note=how)
        )
    else:
        found.append(checkout)
    found += [
        row.Row(
            "checkpoint stall, GPT-2 124M, pinned", summary["checkpoint_stall_s"], 0.1, "s", "a limit",
            more_is_better=False,
        ),
    ]  # fmt: skip
    if summary["mfu"] is not None:
        mfu = summary["mfu"] * rate / summary["tokens_per_second"]
        note = f"{rate:.0f} tok/s on {torch.cuda.get_device_name(0)}; 6 N + 12 L H D T over the dense bf16 peak"
        found.append(
            row.Row("MFU, GPT-2 124M, T 1024", mfu, 0.40, "of peak", "the promised share", goal=1.0, note=note)
        )
    table = subprocess.run(
        [sys.executable, "-m", "ddptrain", "collectives", "-b", "8M", "-e", "1G", "-J", str(scratch / "c.json")],
        check=True, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert "# Out of bounds values : 0 OK" in table.stdout
    bandwidth = json.loads((scratch / "c.json").read_text())["collectives"][0]["results"][-1]["in_place"]["alg_bw"]
    found.append(row.Row("all_reduce 1 GiB, one rank", bandwidth, 1.0, "GB/s", "formula check only"))
    return found


def _median_rate(run_dir: pathlib.Path) -> float:
    """Return the tokens per second of our run's middle."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return row.median([r["tokens_per_second"] for r in records if r["kind"] == "step" and r["step"] > WARM_STEPS])


def _nanogpt(checkout: pathlib.Path, dataset: shards.Dataset, folder: pathlib.Path) -> float:
    """Return the tokens per second of nanoGPT's whole program, by the times that it prints for its steps."""
    nanogpt.lay_out(folder, checkout, dataset, has_vocab=False)
    argv = nanogpt.command(
        checkout, device="cuda", dtype="bfloat16", compile=True, out_dir="out", gradient_accumulation_steps=1,
        batch_size=BATCH, block_size=SEQ_LEN, max_iters=STEPS // 2, eval_interval=10**9, eval_iters=1, log_interval=1,
    )  # fmt: skip
    done = subprocess.run(argv, cwd=folder, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    laps_ms = [float(found) for found in re.findall(r"^iter \d+: .* time ([0-9.]+)ms", done.stdout, re.MULTILINE)]
    return BATCH * SEQ_LEN / (row.median(laps_ms[WARM_STEPS:]) / 1000)

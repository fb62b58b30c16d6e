"""On a GPU: speed and MFU of GPT-2 124M beside nanoGPT, the checkpoint's stall, the collectives with one rank."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import subprocess
import sys
import time

import torch

from bench import commands, data, row
from bench.peers import nanogpt

BATCH, SEQ_LEN, VOCAB = 32, 1024, 50304
STEPS, WARM_STEPS = 120, 20
LIMIT_S = 600


def run(scratch: pathlib.Path) -> list[row.Row]:
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
    theirs = _nanogpt(dataset.splits["train"][0].path)
    how = f"T {SEQ_LEN} B {BATCH}, bf16, compiled, median of the steps behind the first {WARM_STEPS}"
    found = [
        row.Row("train: GPT-2 124M on a GPU", rate, theirs, "tok/s", "nanoGPT's loop as shipped", goal=1.0, note=how),
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


def _nanogpt(shard: pathlib.Path) -> float:
    """Return the tokens per second of the peer."""
    model = nanogpt.Model(12, 12, 768, SEQ_LEN, VOCAB)
    loop = nanogpt.Loop(shard, batch=BATCH, model=model, device="cuda")
    laps: list[float] = []
    for _ in range(STEPS // 2):
        began = time.perf_counter()
        loop.step()  # it reads the loss, so the GPU has finished
        laps.append(time.perf_counter() - began)
    return BATCH * SEQ_LEN / row.median(laps[WARM_STEPS:])

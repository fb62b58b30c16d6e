"""On a GPU: speed and MFU of GPT-2 124M, the checkpoint's stall, the collectives' table with one rank."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import subprocess
import sys

import torch

from bench import commands, data, row


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure against the share of the peak that is promised; without a GPU there is nothing to measure."""
    if not torch.cuda.is_available():
        return []
    dataset = data.dataset(scratch / "data", 40_000_000, 50257)
    run_dir = scratch / "run"
    process = commands.start(
        1, "train", "--data", dataset.root, "--run-dir", run_dir, "--model", "gpt2", "--batch", 32, "--steps", 120,
        "--epoch-steps", 60,
        "--eval-rows", 64, "--log-every", 10,
    )  # fmt: skip
    output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(output[-1000:])
    summary = json.loads((run_dir / "summary.json").read_text())
    table = subprocess.run(
        [sys.executable, "-m", "ddptrain", "collectives", "-b", "8M", "-e", "1G", "-J", str(scratch / "c.json")],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "# Out of bounds values : 0 OK" in table.stdout
    bandwidth = json.loads((scratch / "c.json").read_text())["collectives"][0]["results"][-1]["in_place"]["alg_bw"]
    found = [
        row.Row(
            "checkpoint stall, GPT-2 124M, pinned",
            summary["checkpoint_stall_s"],
            0.1,
            "s",
            "a limit",
            more_is_better=False,
        )
    ]
    found.append(row.Row("all_reduce 1 GiB, one rank", bandwidth, 1.0, "GB/s", "formula check only"))
    if summary["mfu"] is not None:
        rate = summary["tokens_per_second"]
        note = f"{rate:.0f} tok/s; 6 N + 12 L H D T over the dense bf16 peak"
        found.append(
            row.Row(
                "MFU, GPT-2 124M, T 1024", summary["mfu"], 0.40, "of peak", "the promised share", goal=1.0, note=note
            )
        )
    return found

"""20 steps in one go, against 10 and a resumed 10: how many of the last ten losses are the same."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import re
import subprocess

from bench import commands, data, peers, row
from ddptrain.data import shards

_ITER = re.compile(r"^iter (\d+): loss ([0-9.]+)", re.MULTILINE)
LAST = range(10, 20)  # the steps that are compared, counted from 0


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure our command and nanoGPT's own program, each with the same flags as in its uninterrupted run."""
    checkout = peers.nanogpt()
    dataset = data.dataset(scratch / "data", 200_000, 256)
    same = _ours(dataset, scratch)
    folder = scratch / "theirs"
    peers.lay_out(folder, checkout, dataset)
    whole = _their_losses(checkout, folder, "whole", steps=LAST.stop)
    # It saves before the step of that number, and ends after it
    start = _their_losses(checkout, folder, "parted", steps=LAST.start + 1)
    rest = _their_losses(checkout, folder, "parted", steps=LAST.stop, init_from="resume")
    if start != {step: whole[step] for step in start} or list(rest) != list(LAST):
        raise RuntimeError(f"nanoGPT's runs are not the same training: {whole}, {start}, {rest}")
    theirs = sum(whole[step] == rest[step] for step in LAST)
    note = "ours to the bit, stopped at its first step; the peer's as printed: it reseeds, so it draws other batches"
    measure, peer = (
        "resume: equal losses of the last 10 steps",
        "nanoGPT's train.py --init_from=resume",
    )
    return [row.Row(measure, same, theirs, "steps", peer, note=note)]


def _ours(dataset: shards.Dataset, scratch: pathlib.Path) -> int:
    """Return how many losses are the same to the bit."""
    _finish(*commands.tiny(dataset.root, scratch / "whole"), "--steps", LAST.stop)
    arguments = commands.tiny(dataset.root, scratch / "parted")
    stop = scratch / "stop"
    stop.touch()
    first = commands.start(1, *arguments, "--steps", LAST.stop, STOP_FILE=str(stop))
    first.communicate()
    stop.unlink()
    _finish(*arguments, "--steps", LAST.stop)
    whole, parted = (_losses(scratch / name) for name in ("whole", "parted"))
    return sum(whole[step + 1] == parted.get(step + 1) for step in LAST)


def _finish(*args: object) -> None:
    process = commands.start(1, *args)
    output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(output[-1000:])


def _losses(run_dir: pathlib.Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in records if r["kind"] == "step"}


def _their_losses(
    checkout: pathlib.Path,
    folder: pathlib.Path,
    name: str,
    *,
    steps: int,
    init_from: str = "scratch",
) -> dict[int, str]:
    """Run the whole program to a number of steps and return the losses that it prints."""
    size = {"batch_size": 4, "block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 64}
    rates = {
        "learning_rate": 1e-3,
        "warmup_iters": 3,
        "lr_decay_iters": LAST.stop,
        "gradient_accumulation_steps": 1,
    }
    often = {
        "max_iters": steps - 1,
        "eval_interval": LAST.start,
        "eval_iters": 2,
        "log_interval": 1,
    }
    argv = peers.command(checkout, out_dir=name, init_from=init_from, **size, **rates, **often)
    done = subprocess.run(
        argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-1000:])
    return {int(step): loss for step, loss in _ITER.findall(done.stdout)}

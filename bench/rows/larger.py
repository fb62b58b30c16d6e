"""On a GPU: a Llama by fully_shard and by peft's LoRA: memory against `ddp plan`, and resume."""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import typing

import torch

from bench import row
from ddp.prediction import memory
from ddptrain import shapes

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = ROOT / "tests" / "programs" / "code" / "larger.py"
STEPS, SAVE_AT = 10, 8
RAM = pathlib.Path("/dev/shm")
SPARE = 1.1  # of a checkpoint's size, which its folder must have
MODEL_FLOPS = {"fsdp2": 6, "lora": 4}  # of a parameter and a token: frozen weights need no gradient
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    way: str
    title: str
    model: memory.Model
    size: str
    batch: int
    seq_len: int
    recompute: bool
    limit_s: float

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.batch * self.seq_len

    def argv(self, out: pathlib.Path, resume: pathlib.Path | None) -> list[str]:
        """Return the command."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        given = ["--way", self.way, "--size", self.size, "--out", str(out)]
        given += ["--steps", str(STEPS), "--save-every", str(SAVE_AT)]
        given += ["--batch", str(self.batch), "--seq-len", str(self.seq_len)]
        if self.recompute:
            given.append("--recompute")
        if resume:
            given += ["--resume", str(resume)]
        return [*torchrun, str(PROGRAM), *given]


@dataclasses.dataclass(frozen=True)
class Seen:
    """The values that a program printed."""

    losses: dict[int, float]
    figures: dict[str, float]


FSDP2 = Case(
    "fsdp2",
    "FSDP2 3.0B",
    memory.Model(3_016_000_000, 28, 3072, 32000),
    "3b",
    batch=2,
    seq_len=2048,
    recompute=False,
    limit_s=80,
)
LORA = Case(
    "lora",
    "LoRA 8.0B",
    memory.Model(8_030_000_000, 32, 4096, 128256),
    "8b",
    batch=2,
    seq_len=2048,
    recompute=True,
    limit_s=60,
)


def run(scratch: pathlib.Path) -> typing.Iterator[row.Row | row.NotHere]:
    """Train both, and continue both at the same time: their speed is not measured twice."""
    if not torch.cuda.is_available():
        raise row.NotHere(f"no GPU (torch {torch.__version__} sees none)")
    yield from measure([FSDP2, LORA], scratch)


def measure(cases: list[Case], scratch: pathlib.Path) -> typing.Iterator[row.Row | row.NotHere]:
    """Measure the cases that this machine has the packages and the room for."""
    missing = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        raise row.NotHere(f"not installed: {', '.join(missing)}")

    with contextlib.ExitStack() as stack:
        trained: list[tuple[Case, Seen, pathlib.Path]] = []
        for case in cases:
            out = pathlib.Path(stack.enter_context(folder_for(case, scratch)))
            try:
                seen = read(start(case, out), case)
            except row.NotHere as e:
                yield e
                continue
            yield from rows_of(case, seen)
            trained.append((case, seen, out))

        resumed = [
            (case, seen, start(case, out / "again", out / f"step-{SAVE_AT:06}"))
            for case, seen, out in trained
        ]
        for case, seen, process in resumed:
            try:
                again = read(process, case)
            except row.NotHere as e:
                yield e
                continue
            yield resumed_row(case, seen, again)


def folder_for(case: Case, scratch: pathlib.Path) -> tempfile.TemporaryDirectory[str]:
    """Make a folder with room for the checkpoint: in memory if that is large enough."""
    size = (memory.WEIGHT + memory.MOMENTS) * case.model.parameters
    has_room = RAM.is_dir() and shutil.disk_usage(RAM).free > SPARE * size
    return tempfile.TemporaryDirectory(prefix="larger-", dir=RAM if has_room else scratch)


def start(
    case: Case, out: pathlib.Path, resume: pathlib.Path | None = None
) -> subprocess.Popen[str]:
    """Start the program."""
    return subprocess.Popen(
        case.argv(out, resume),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def read(process: subprocess.Popen[str], case: Case) -> Seen:
    """Wait for a program and parse its output. Raises NotHere if it failed."""
    try:
        out, errors = process.communicate(timeout=case.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
        raise row.NotHere(f"{case.title}: not done after {case.limit_s:g} s: {last(out)}") from None
    if process.returncode:
        causes = re.findall(r"^\S*(?:Error|Exception)\b.*", errors, re.MULTILINE)
        raise row.NotHere(f"{case.title}: {causes[0] if causes else last(errors)}")
    losses: dict[int, float] = {}
    for step, loss in re.findall(r"^step: (\d+) loss: (\S+)$", out, re.MULTILINE):
        losses[int(step)] = float(loss)
    return Seen(losses, json.loads(last(out)))


def rows_of(case: Case, seen: Seen) -> typing.Iterator[row.Row]:
    """Return the rows of a training: memory, speed, and the time to save."""
    figures = seen.figures
    ways = memory.needs(case.model, case.tokens, world=1)
    _, sharded, lora = ways
    own = {"fsdp2": sharded, "lora": lora}[case.way]
    predicted = own.least if case.recompute else own.total
    also = ", ".join(f"{need.way} {need.total / GIB:.0f}" for need in ways)
    losses = f"loss {seen.losses[1]:.3f} to {seen.losses[STEPS]:.3f} in {STEPS} steps"
    note = f"{figures['parameters']:.0f} parameters; planned with all kept, GiB: {also}; {losses}"
    yield row.Row(
        f"peak memory, {case.title}",
        figures.get("peak_bytes", 0) / GIB,
        predicted / GIB,
        "GiB",
        "the table of ddp plan",
        more_is_better=False,
        note=note,
    )
    rate = figures["tokens_per_second"]
    peak = None
    if torch.cuda.is_available():
        peak = shapes.peak_flops(torch.cuda.get_device_name(0))
    if peak is not None:
        mfu = MODEL_FLOPS[case.way] * figures["parameters"] * rate / peak
        note = f"{rate:.0f} tok/s, {case.tokens} tokens a step, not compiled"
        yield row.Row(f"MFU, {case.title}", mfu, 0.40, "of peak", "40 %", note=note)
    seconds = figures["saved_s"]
    size_gb = (memory.WEIGHT + memory.MOMENTS) * figures["parameters"] / 1e9
    if case.way == "fsdp2":
        note = f"{size_gb:.1f} GB"
        yield row.Row(
            f"save, {case.title}", seconds, size_gb, "s", "1 GB/s", more_is_better=False, note=note
        )


def resumed_row(case: Case, seen: Seen, again: Seen) -> row.Row:
    """Compare the last loss of a resumed run with the uninterrupted run's."""
    first = min(again.losses)
    note = f"continued at step {first}"
    return row.Row(
        f"last loss after a resume, {case.title}",
        again.losses[STEPS],
        seen.losses[STEPS],
        "nats",
        "without a stop",
        more_is_better=False,
        note=note,
    )


def last(text: str) -> str:
    """Return the last line of a text."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"

"""A GPT's step on a CPU: `ddptrain train` against nanoGPT's train.py, whole programs on the same tokens, in turns."""

# pyright: basic, reportPrivateImportUsage=false
import dataclasses
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time
import typing

from bench import data, row
from bench.peers import checkouts, nanogpt
from ddptrain import prepare, shards

TEXT_BYTES = 24 << 20
TURNS, WARM, PART = 5, 20, 10  # turns of each program that count; steps before the clock starts; steps between lines
SAMPLING = 0.03  # nats: ours validates on rows in the text's order, the peer on random ones


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how it is trained, by both."""

    layers: int
    heads: int
    width: int
    seq_len: int
    batch: int
    steps: int
    eval_rows: int
    goal: float

    def __str__(self) -> str:
        return f"{self.layers} layers {self.width} wide, T {self.seq_len} B {self.batch}"


@dataclasses.dataclass(frozen=True)
class Pace:
    """What a turn took per step, and the loss at its end."""

    wall_s: float
    cpu_s: float  # of all threads
    loss: float  # validation, nats


CASES = (Case(4, 4, 128, 64, 12, 400, 2304, 1.5), Case(6, 6, 384, 256, 8, 50, 256, 1.5))
LR, WARMUP = 1e-3, 10
_TRAIN = re.compile(r"\[TRAIN\] step=(\d+)/")
_ITER = re.compile(r"^iter (\d+):")
_VAL = re.compile(r"val(?:_loss=| loss )([0-9.]+)")


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure each case: ours in fp32 and as it chooses, the peer eager and, where it compiles, compiled."""
    checkout = checkouts.find("nanoGPT")
    dataset = _dataset(scratch)
    nanogpt.lay_out(scratch / "theirs", checkout, dataset)
    found: list[row.Row] = []
    for case in CASES:
        programs = {
            "fp32": _ours(case, dataset, "fp32"),
            "auto": _ours(case, dataset, "auto"),
            "eager": _theirs(case, checkout, compiled=False),
        }
        if shutil.which("c++"):
            programs["compiled"] = _theirs(case, checkout, compiled=True)
        paces: dict[str, list[Pace]] = {name: [] for name in programs}
        for turn in range(1 + TURNS):  # the first one is to warm up: compilers' caches, files, the processor
            for name, argv in programs.items():
                seeded = [word.replace("SEED", str(turn)) for word in argv]
                pace = _pace(seeded, scratch / "theirs", scratch / "run", case.steps)
                if turn:
                    paces[name].append(pace)
        for peer in [name for name in ("eager", "compiled") if name in programs]:
            for mine in ("fp32", "auto"):
                found.append(_row(case, mine, paces[mine], peer, paces[peer]))
    return found


def _row(case: Case, mine: str, ours: list[Pace], peer: str, theirs: list[Pace]) -> row.Row:
    losses = [[pace.loss for pace in paces] for paces in (ours, theirs)]
    apart = abs(statistics.fmean(losses[0]) - statistics.fmean(losses[1]))
    noise = SAMPLING + 4 * max(statistics.stdev(values) for values in losses)
    if apart > noise:
        raise RuntimeError(
            f"{case}: the losses are {apart:.3f} nats apart, more than {noise:.3f}: not the same training"
        )
    wall, cpu = (
        [row.median([getattr(p, key) for p in paces]) for paces in (ours, theirs)] for key in ("wall_s", "cpu_s")
    )
    spread = ", ".join(
        f"{min(p.wall_s for p in paces) * 1e3:.0f} to {max(p.wall_s for p in paces) * 1e3:.0f}"
        for paces in (ours, theirs)
    )
    tokens = case.batch * case.seq_len
    note = f"{cpu[1] / cpu[0]:.2f} by processor time; ms a step {spread}; loss {losses[0][0]:.2f}, {losses[1][0]:.2f}"
    return row.Row(
        f"train: {case}, {mine}", tokens / wall[0], tokens / wall[1], "tok/s",
        f"nanoGPT's train.py{' --compile=True' if peer == 'compiled' else ''}, fp32",
        goal=case.goal if mine == "auto" else None, note=note,
    )  # fmt: skip


def _dataset(scratch: pathlib.Path) -> shards.Dataset:
    """Prepare real text as bytes."""
    text = scratch / "text"
    text.mkdir()
    for number, document in enumerate(data.corpus(TEXT_BYTES)):
        (text / f"{number:06d}.txt").write_text(document, encoding="utf-8")
    prepare.run(prepare.Options((str(text),), scratch / "data", tokenizer="byte", workers=1))
    return shards.open_dataset(scratch / "data")


def _ours(case: Case, dataset: shards.Dataset, precision: str) -> list[str]:
    flags: dict[str, typing.Any] = {
        "data": dataset.root, "run-dir": "RUN", "layers": case.layers, "heads": case.heads, "width": case.width,
        "seq-len": case.seq_len, "batch": case.batch, "steps": case.steps, "epoch-steps": case.steps, "lr": LR,
        "warmup": WARMUP, "precision": precision, "eval-rows": case.eval_rows, "log-every": PART,
        "resume": "never", "seed": "SEED",
    }  # fmt: skip
    return [
        sys.executable,
        "-m",
        "ddptrain",
        "train",
        *(str(w) for key, value in flags.items() for w in (f"--{key}", value)),
    ]


def _theirs(case: Case, checkout: pathlib.Path, *, compiled: bool) -> list[str]:
    return nanogpt.command(
        checkout, compile=compiled, out_dir="RUN", gradient_accumulation_steps=1, batch_size=case.batch,
        block_size=case.seq_len, n_layer=case.layers, n_head=case.heads, n_embd=case.width, learning_rate=LR,
        min_lr=LR / 10, warmup_iters=WARMUP, max_iters=case.steps, lr_decay_iters=case.steps, eval_interval=case.steps,
        eval_iters=case.eval_rows // case.batch, log_interval=PART,
    )  # fmt: skip


def _pace(argv: list[str], cwd: pathlib.Path, run_dir: pathlib.Path, steps: int) -> Pace:
    """Run a program to its end, and look at its clocks when it says that it is past the first steps and at the last."""
    shutil.rmtree(run_dir, ignore_errors=True)
    argv = [str(run_dir) if word == "RUN" else word.replace("=RUN", f"={run_dir}") for word in argv]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    output: list[str] = []
    marks: dict[int, tuple[float, float]] = {}
    with subprocess.Popen(
        argv, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if found := _TRAIN.search(line) or _ITER.search(line):
                marks[int(found[1])] = time.perf_counter(), _cpu_s(process.pid)
    losses = [float(found[1]) for line in output if (found := _VAL.search(line))]
    last = max(marks, default=0)
    if process.returncode or last <= WARM or WARM not in marks or not losses:
        raise RuntimeError(f"{' '.join(argv[:4])}: exit status {process.returncode}: {''.join(output)[-2000:]}")
    # The peer's last line may come after its last validation
    last = max(step for step in marks if step < steps)
    wall, cpu = (marks[last][at] - marks[WARM][at] for at in (0, 1))
    return Pace(wall / (last - WARM), cpu / (last - WARM), losses[-1])


def _cpu_s(pid: int) -> float:
    """Processor seconds of a process so far (proc(5): utime and stime, in clock ticks)."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

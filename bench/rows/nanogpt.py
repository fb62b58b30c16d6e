"""A GPT's step on a CPU: `ddptrain train` and nanoGPT's train.py, in turns on the same tokens."""

# pyright: basic, reportPrivateImportUsage=false
import dataclasses
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

from bench import data, peers, row
from ddptrain.data import prepare, shards

TEXT_BYTES = 24 << 20
TURNS = 5  # of each program that count
WARM = 20  # steps before the clock starts
PART = 10  # steps between lines
SAMPLING = 0.03  # nats: ours validates on rows in the text's order, the peer on random ones
LR, WARMUP = 1e-3, 10
_STEP = re.compile(r"\[TRAIN\] step=(\d+)/|^iter (\d+):")
_VAL = re.compile(r"val(?:_loss=| loss )([0-9.]+)")


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
    """Seconds of a turn per step, and the validation loss at its end."""

    step_s: float
    loss: float


CASES = (Case(4, 4, 128, 64, 12, 400, 2304, 1.5), Case(6, 6, 384, 256, 8, 50, 256, 1.5))


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure each case: ours in fp32 and as it chooses, the peer eager and compiled."""
    checkout = peers.nanogpt()
    dataset = _dataset(scratch)
    peers.lay_out(scratch / "theirs", checkout, dataset)
    found: list[row.Row] = []
    for case in CASES:
        programs = {name: _ours(case, dataset, name) for name in ("fp32", "auto")}
        modes = ["eager", "compiled"] if shutil.which("c++") else ["eager"]
        programs |= {
            mode: _theirs(case, checkout, is_compiled=mode == "compiled") for mode in modes
        }
        paces: dict[str, list[Pace]] = {name: [] for name in programs}
        for turn in range(1 + TURNS):  # the first one warms up compilers' caches and files
            for name, argv in programs.items():
                seeded = [word.replace("SEED", str(turn)) for word in argv]
                pace = _pace(seeded, scratch / "theirs", scratch / "run", case.steps)
                if turn:
                    paces[name].append(pace)
        found += [
            _row(case, mine, paces[mine], mode, paces[mode])
            for mode in modes
            for mine in ("fp32", "auto")
        ]
    return found


def _row(case: Case, mine: str, ours: list[Pace], mode: str, theirs: list[Pace]) -> row.Row:
    losses = [[pace.loss for pace in side] for side in (ours, theirs)]
    apart = abs(statistics.fmean(losses[0]) - statistics.fmean(losses[1]))
    noise = SAMPLING + 4 * max(statistics.stdev(values) for values in losses)
    if apart > noise:
        raise RuntimeError(
            f"{case}: losses {apart:.3f} nats apart, more than {noise:.3f}: not the same training"
        )
    seconds = [[pace.step_s for pace in side] for side in (ours, theirs)]
    mine_rate, their_rate = (case.batch * case.seq_len / row.median(side) for side in seconds)
    note = f"{row.spread(seconds[0], 's')}, peer {row.spread(seconds[1], 's')} a step"
    return row.Row(
        f"train: {case}, {mine}",
        mine_rate,
        their_rate,
        "tok/s",
        f"nanoGPT's train.py, {mode}, fp32",
        goal=case.goal if mine == "auto" else None,
        note=f"{note}; loss {losses[0][0]:.2f}, {losses[1][0]:.2f}",
    )


def _dataset(scratch: pathlib.Path) -> shards.Dataset:
    """Prepare real text as bytes."""
    text = scratch / "text"
    text.mkdir()
    for number, document in enumerate(data.corpus(TEXT_BYTES)):
        (text / f"{number:06d}.txt").write_text(document, encoding="utf-8")
    prepare.run(prepare.Options((str(text),), scratch / "data", tokenizer="byte", workers=1))
    return shards.open_dataset(scratch / "data")


def _ours(case: Case, dataset: shards.Dataset, precision: str) -> list[str]:
    size = (
        f"--layers {case.layers} --heads {case.heads} --width {case.width} --seq-len {case.seq_len}"
    )
    steps = f"--batch {case.batch} --steps {case.steps} --epoch-steps {case.steps}"
    rate = f"--lr {LR} --warmup {WARMUP} --precision {precision}"
    rest = f"--eval-rows {case.eval_rows} --log-every {PART} --resume never --seed SEED"
    places = ["--data", str(dataset.root), "--run-dir", "RUN"]
    words = f"{size} {steps} {rate} {rest}".split()
    return [sys.executable, "-m", "ddptrain", "train", *places, *words]


def _theirs(case: Case, checkout: pathlib.Path, *, is_compiled: bool) -> list[str]:
    return peers.command(
        checkout,
        n_layer=case.layers,
        n_head=case.heads,
        n_embd=case.width,
        batch_size=case.batch,
        block_size=case.seq_len,
        gradient_accumulation_steps=1,
        learning_rate=LR,
        min_lr=LR / 10,
        warmup_iters=WARMUP,
        lr_decay_iters=case.steps,
        max_iters=case.steps,
        eval_interval=case.steps,
        eval_iters=case.eval_rows // case.batch,
        log_interval=PART,
        compile=is_compiled,
        out_dir="RUN",
    )


def _pace(argv: list[str], cwd: pathlib.Path, run_dir: pathlib.Path, steps: int) -> Pace:
    """Run a program to its end; read the clock at the steps that it reports."""
    shutil.rmtree(run_dir, ignore_errors=True)
    argv = [str(run_dir) if word == "RUN" else word.replace("=RUN", f"={run_dir}") for word in argv]
    output: list[str] = []
    marks: dict[int, float] = {}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(["env", "PYTHONUNBUFFERED=1", *argv], cwd=cwd, **pipes) as process:
        for line in process.stdout or ():
            output.append(line)
            if found := _STEP.search(line):
                marks[int(found[1] or found[2])] = time.perf_counter()
    losses = [float(found[1]) for line in output if (found := _VAL.search(line))]
    # The peer's last line may come after its last validation
    last = max((step for step in marks if step < steps), default=0)
    if process.returncode or last <= WARM or WARM not in marks or not losses:
        raise RuntimeError(
            f"{' '.join(argv[:4])}: exit status {process.returncode}: {''.join(output)[-2000:]}"
        )
    return Pace((marks[last] - marks[WARM]) / (last - WARM), losses[-1])

"""Tokens per second of a step with GPT-2's vocabulary, all cores, in turns with the loop of nanoGPT's own train.py."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib
import shutil

import torch

from bench import data, row
from bench.peers import checkouts, nanogpt
from ddptrain import config, distributed, hardware, model, planning, reader, sampler, shapes, shards, train

LAYERS, HEADS, WIDTH, SEQ_LEN, BATCH = 6, 6, 384, 256, 8
STEPS, TURNS, WARM = 2, 5, 2  # steps of a turn; turns of each; steps before the clock starts
LR = 1e-3
APART = 0.05  # nats, of the median loss of the timed steps: other batches, and other random weights at the start


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure, in turns: ours in fp32 and as it chooses, the peer's loop eager and, where it compiles, compiled."""
    checkout = checkouts.find("nanoGPT")
    dataset = data.dataset(scratch / "data", 2_000_000, shapes.padded(50257))  # batches of it are all as hard
    nanogpt.lay_out(scratch / "theirs", checkout, dataset, has_vocab=False)
    peers = {
        f"nanoGPT's train.py{' --compile=True' if compiled else ''}, fp32": nanogpt.Aside(
            checkout, scratch / "theirs", compile=compiled, gradient_accumulation_steps=1, batch_size=BATCH,
            block_size=SEQ_LEN, n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, learning_rate=LR, decay_lr=False,
            log_interval=1, eval_interval=10**9, eval_iters=1, max_iters=10**9,
        )
        for compiled in ([False, True] if shutil.which("c++") else [False])
    }  # fmt: skip
    with distributed.joined("cpu") as world:
        shape = shapes.Shape(LAYERS, HEADS, WIDTH, SEQ_LEN, shapes.padded(dataset.vocab))
        kind = model.Kind({"kind": "gpt"}, shapes.count(shape), lambda: model.GPT(shape))
        hardware.set_matmul(world.device, is_own=True)
        fp32_s, bf16_s = hardware.trial(kind.build, BATCH, SEQ_LEN, shape.vocab, world.device)
        chosen = hardware.may_gain_by_bf16(world.device) and hardware.prefers_bf16(fp32_s, bf16_s)
        ours = {
            precision: Ours(_training(dataset, kind, world, precision, scratch))
            for precision in (["fp32", "bf16"] if chosen else ["fp32"])
        }
        losses: dict[str, list[float]] = {name: [] for name in [*ours, *peers]}
        for side in [*ours.values(), *peers.values()]:
            side.run(WARM, is_timed=False)
        for _ in range(TURNS):
            for name, side in {**ours, **peers}.items():
                losses[name] += side.run(STEPS)
        for side in [*ours.values(), *peers.values()]:
            side.close()
    return [_row(mine, peer, {**ours, **peers}, losses) for peer in peers for mine in ours]


def _row(mine: str, peer: str, sides: "dict[str, Ours | nanogpt.Aside]", losses: dict[str, list[float]]) -> row.Row:
    middles = [row.median(losses[name]) for name in (mine, peer)]
    if abs(middles[0] - middles[1]) > APART:
        raise RuntimeError(f"losses of {middles[0]:.2f} ({mine}) and {middles[1]:.2f} ({peer}): not the same training")
    ours, theirs = sides[mine].laps, sides[peer].laps
    tokens = STEPS * BATCH * SEQ_LEN
    return row.Row(
        f"train step: {LAYERS} layers {WIDTH} wide, V 50304, {mine}",
        tokens / row.median(ours.wall_s), tokens / row.median(theirs.wall_s), "tok/s", peer, goal=1.5,
        note=f"{ours.beside(theirs)}; T {SEQ_LEN} B {BATCH}, {torch.get_num_threads()} threads; "
        f"loss {middles[0]:.2f}, {middles[1]:.2f}",
    )  # fmt: skip


class Ours:
    """Our steps, to be taken in turns."""

    def __init__(self, training: train.Training) -> None:
        self.training, self.laps = training, row.Laps()
        self.batches = reader.Reader(
            training.dataset, training.plan, rank=0, size=1, start=0, stop=10**6, device=training.world.device
        )
        self.batches.__enter__()

    def run(self, steps: int, *, is_timed: bool = True) -> list[float]:
        """Take so many steps, add their times to `laps` and return the losses."""
        laps = self.laps if is_timed else row.Laps()
        return laps.measure(lambda: [self._step() for _ in range(steps)])

    def close(self) -> None:
        """End the reader."""
        self.batches.__exit__(None, None, None)

    def _step(self) -> float:
        loss, *_ = self.training._step(self.batches.next(), lr=LR)
        return loss.item()


def _training(
    dataset: shards.Dataset, kind: model.Kind, world: distributed.World, precision: str, scratch: pathlib.Path
) -> train.Training:
    given = config.Config(
        run_dir=scratch / "run", data=dataset.root, layers=LAYERS, heads=HEADS, width=WIDTH, seq_len=SEQ_LEN,
        batch=BATCH, precision=precision,
    )  # fmt: skip
    return train.Training(
        settings=config.complete(given, "cpu", {}), world=world, dataset=dataset,
        plan=sampler.make_plan(1, SEQ_LEN, BATCH, dataset.tokens("train")),
        batching=planning.Batching(BATCH, BATCH, 1), schedule=planning.Schedule(1000, 1000, LR, LR / 10, 10), kind=kind,
    )  # fmt: skip

"""Tokens per second of a training step, one process on all cores, against nanoGPT's loop on the same shard."""

# pyright: basic, reportPrivateImportUsage=false
import functools
import pathlib
from collections.abc import Callable

import torch

from bench import data, row
from bench.peers import nanogpt
from ddptrain import config, distributed, hardware, model, planning, reader, sampler, shapes, train

CASES = (  # layers, heads, width, seq_len, batch, vocab, steps per turn, turns, goal
    ("4 layers 128 wide, T 64 B 12, V 320", 4, 4, 128, 64, 12, 320, 15, 9, 1.3),
    ("6 layers 384 wide, T 256 B 8, V 50304", 6, 6, 384, 256, 8, 50304, 1, 3, 1.3),
)


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure, in turns: ours, the loop as shipped, the loop with the same means."""
    found: list[row.Row] = []
    with distributed.joined("cpu") as world:
        for name, layers, heads, width, seq_len, batch, vocab, steps, turns, goal in CASES:
            dataset = data.dataset(scratch / str(width), 2_000_000, vocab)
            settings = config.complete(
                config.Config(run_dir=scratch / "run", data=dataset.root, layers=layers, heads=heads, width=width,
                seq_len=seq_len, batch=batch),
                "cpu", {},
            )  # fmt: skip
            shape = shapes.Shape(layers, heads, width, seq_len, vocab)
            kind = model.Kind({"kind": "gpt"}, shapes.count(shape), lambda shape=shape: model.GPT(shape))
            hardware.set_matmul(world.device, is_own=True)
            products = torch.get_float32_matmul_precision()
            fp32_s, bf16_s = hardware.trial(kind.build, batch, seq_len, vocab, world.device)
            bf16 = hardware.may_gain_by_bf16(world.device) and hardware.prefers_bf16(fp32_s, bf16_s)
            settings = train.dataclasses.replace(settings, precision="bf16" if bf16 else "fp32")
            plan = sampler.make_plan(1, seq_len, batch, dataset.tokens("train"))
            training = train.Training(
                settings=settings, world=world, dataset=dataset, plan=plan, batching=planning.Batching(batch, batch, 1),
                schedule=planning.Schedule(1000, 1000, 1e-3, 1e-4, 10), kind=kind,
            )  # fmt: skip
            shard = dataset.splits["train"][0].path
            loops = [
                nanogpt.Loop(shard, batch=batch, model=nanogpt.Model(layers, heads, width, seq_len, vocab), fair=fair)
                for fair in (False, True)
            ]
            with reader.Reader(dataset, plan, rank=0, size=1, start=0, stop=10**6, device=world.device) as batches:

                def our_step(training: train.Training = training, batches: reader.Reader = batches) -> None:
                    loss, *_ = training._step(batches.next(), lr=1e-3)
                    loss.item()

                def turn(step: Callable[[], object], precision: str = "highest", steps: int = steps) -> None:
                    torch.set_float32_matmul_precision(precision)
                    for _ in range(steps):
                        step()

                programs = [
                    functools.partial(turn, our_step, products),
                    *(functools.partial(turn, loop.step) for loop in loops),
                ]
                taken = row.alternate(programs, turns)
            rates = [steps * batch * seq_len / row.median(laps.wall_s) for laps in taken]
            shares = [f"{taken[0].cpu_ratio(peer)}, {taken[0].least_ratio(peer)}" for peer in taken[1:]]
            how = f"{shares[0]}; ours chose {settings.precision}, {torch.get_num_threads()} threads"
            found.append(
                row.Row(f"train: {name}", rates[0], rates[1], "tok/s", "nanoGPT's loop as shipped", goal=goal, note=how)
            )
            found.append(
                row.Row(
                    f"train: {name}",
                    rates[0],
                    rates[2],
                    "tok/s",
                    "the same with fused AdamW and bf16",
                    note=shares[1],
                )
            )
    return found

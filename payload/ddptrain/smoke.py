"""The smoke test: a small classifier on made-up data tests launcher, network, devices in seconds.

Flags, markers and meaning are from the Kubernetes training guide's `train.py`: `--batch` is per
process, the labels are the argmax of a random linear map, the model is a perceptron with one hidden
layer of 256.
"""

# pyright: basic, reportPrivateImportUsage=false
import math
import time
import typing

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn import parallel

from ddptrain.ground import attempt, errors, files, log
from ddptrain.options import smoke_options
from ddptrain.records import curve, metrics, summary
from ddptrain.world import distributed

HIDDEN = 256
IMPROVED_BELOW = 0.7  # the last loss has improved when it is below this share of the first


def run(options: smoke_options.Options, world: distributed.World) -> None:
    """Train, print the markers, write the files."""
    began = time.perf_counter()
    log.emit("STEP", "1/4 the world")
    distributed.report_world(world)
    if options.samples < world.size:
        text = f"--samples {options.samples}: fewer than the {world.size} ranks; give at least one to each"
        raise errors.SharedError(text)
    with world.together():
        if world.is_main:
            files.need_outputs(options.run_dir, {"--report-json": options.report_json})

    log.emit("STEP", "2/4 data and model")
    share = options.samples // world.size
    sizes = {"samples": options.samples, "features": options.features, "classes": options.classes}
    log.emit("DATA", **sizes, per_rank=share, batch=options.batch)
    torch.manual_seed(options.seed)
    model = nn.Sequential(
        nn.Linear(options.features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, options.classes)
    )
    model.to(world.device)
    ids = [world.device.index] if world.device.type == "cuda" else None
    ddp = parallel.DistributedDataParallel(model, device_ids=ids)
    log.emit(
        "MODEL", kind="mlp", hidden=HIDDEN, parameters=sum(p.numel() for p in model.parameters())
    )

    log.emit("STEP", "3/4 training")
    steps_per_epoch = -(-share // options.batch)
    plan = {
        "epochs": options.epochs,
        "steps_per_epoch": steps_per_epoch,
        "global_batch": options.batch * world.size,
    }
    log.emit("TRAIN", **plan, lr=options.lr)
    recorded = None
    if options.run_dir and world.is_main:
        start: dict[str, object] = {"step": 0, "total_steps": options.epochs * steps_per_epoch}
        start |= distributed.describe(world)
        recorded = metrics.Metrics(options.run_dir, start=start)
    trained = time.perf_counter()
    losses = _train(options, world, ddp, steps_per_epoch, recorded)

    log.emit("STEP", "4/4 result")
    if world.is_main:
        now = time.perf_counter()
        _conclude(options, world, recorded, losses, elapsed=now - began, training=now - trained)


def _train(
    options: smoke_options.Options,
    world: distributed.World,
    ddp: nn.Module,
    steps_per_epoch: int,
    recorded: metrics.Metrics | None,
) -> list[float]:
    """Return the loss of each step. Raises UserError when one is not a number."""
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=options.lr)
    inputs_NF, labels_N = _make_data(options)
    began = time.perf_counter()
    losses: list[float] = []
    for epoch in range(1, options.epochs + 1):
        own_N = _own_samples(options, world, epoch)
        for number, rows_B in enumerate(own_N.split(options.batch), start=1):
            optimizer.zero_grad(set_to_none=True)
            logits_BK = ddp(inputs_NF[rows_B].to(world.device))
            loss = F.cross_entropy(logits_BK, labels_N[rows_B].to(world.device))
            loss.backward()
            optimizer.step()
            (summed,) = world.sum([loss.item()])
            losses.append(summed / world.size)

            if number in (1, steps_per_epoch) or number % 10 == 0:
                log.emit("BATCH", epoch=epoch, batch=f"{number}/{steps_per_epoch}", loss=losses[-1])
            if recorded is not None:
                recorded.add(_record(options, losses, epoch, steps_per_epoch))
        log.emit(
            "EPOCH",
            epoch=f"{epoch}/{options.epochs}",
            loss=_means(losses, steps_per_epoch)[-1],
            elapsed_s=time.perf_counter() - began,
        )
    if any(math.isnan(loss) for loss in losses):
        raise errors.UserError(f"the loss is not a number at --lr {options.lr}; lower it")
    return losses


def _own_samples(options: smoke_options.Options, world: distributed.World, epoch: int) -> Tensor:
    """Return this rank's samples of an epoch, in another order each time."""
    generator = torch.Generator().manual_seed(options.seed + epoch)
    order_N = torch.randperm(options.samples, generator=generator)
    used = options.samples // world.size * world.size
    return order_N[:used][world.rank :: world.size]


def _record(
    options: smoke_options.Options, losses: list[float], epoch: int, steps_per_epoch: int
) -> dict[str, object]:
    return {
        "kind": "step",
        "step": len(losses),
        "total_steps": options.epochs * steps_per_epoch,
        "epoch": epoch,
        "loss": losses[-1],
        "lr": options.lr,
        "time": time.time(),
    }


def _means(losses: list[float], size: int) -> list[float]:
    return [sum(losses[at : at + size]) / size for at in range(0, len(losses), size)]


def _make_data(options: smoke_options.Options) -> tuple[Tensor, Tensor]:
    """Return the inputs, shape (N, F), and their labels, shape (N,)."""
    generator = torch.Generator().manual_seed(options.seed)
    inputs_NF = torch.randn(options.samples, options.features, generator=generator)
    weights_FK = torch.randn(options.features, options.classes, generator=generator)
    return inputs_NF, (inputs_NF @ weights_FK).argmax(dim=1)


def _conclude(
    options: smoke_options.Options,
    world: distributed.World,
    recorded: metrics.Metrics | None,
    losses: list[float],
    **seconds: float,
) -> None:
    samples = options.epochs * (options.samples // world.size) * world.size
    improved = losses[-1] < IMPROVED_BELOW * losses[0]
    drawn = None
    if recorded is not None and options.run_dir is not None:
        recorded.close()
        drawn = options.run_dir / curve.FILE
        curve.draw(files.read_records(recorded.path), drawn, f"smoke test on {world.size} ranks")
    rate = samples / seconds["training"]
    figures: dict[str, typing.Any] = {"first_loss": losses[0], "last_loss": losses[-1]}
    summary.write(
        world,
        options.run_dir,
        options.report_json,
        workload="smoke",
        state="done",
        steps=len(losses),
        **figures,
        best_loss=min(_means(losses, len(losses) // options.epochs)),
        samples=samples,
        samples_per_second=rate,
        elapsed_s=seconds["elapsed"],
        loss_png=str(drawn) if drawn else None,
        improved=improved,
    )
    rule = f"last<{IMPROVED_BELOW}*first"
    log.emit("RESULT", improved=improved, **figures, rule=rule, samples_per_second=rate)
    log.emit(
        "DONE",
        workload="smoke",
        ranks=world.size,
        nodes=world.num_nodes,
        elapsed_s=seconds["elapsed"],
    )
    attempt.write_outcome(options.run_dir, attempt.DONE, step=len(losses))

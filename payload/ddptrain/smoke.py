"""The smoke test: a small classifier on made-up data proves launcher, network and devices in seconds.

Flags, markers and meaning are those of the Kubernetes training guide's `train.py`: `--batch` is per process, the
labels are the argmax of a random linear map, the model is a perceptron with one hidden layer of 256.
"""

# pyright: basic, reportPrivateImportUsage=false
import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn import parallel

from ddptrain import distributed, errors, files, markers, report, smoke_options

HIDDEN = 256
IMPROVED_BELOW = 0.7  # the last loss has improved when it is below this share of the first


def run(options: smoke_options.Options, world: distributed.World) -> None:
    """Train, print the markers, write the files."""
    began = time.perf_counter()
    markers.emit("STEP", "1/4 the world")
    distributed.report_world(world)
    if options.samples < world.size:
        raise errors.SharedError(
            f"--samples {options.samples}: fewer than the {world.size} ranks; give at least one to each"
        )
    with world.together():
        if world.is_main:
            files.need_outputs(options.run_dir, {"--report-json": options.report_json})

    markers.emit("STEP", "2/4 data and model")
    generator = torch.Generator().manual_seed(options.seed)
    inputs_NF = torch.randn(options.samples, options.features, generator=generator)
    weights_FK = torch.randn(options.features, options.classes, generator=generator)
    labels_N = (inputs_NF @ weights_FK).argmax(dim=1)
    share = options.samples // world.size
    markers.emit(
        "DATA",
        samples=options.samples,
        features=options.features,
        classes=options.classes,
        per_rank=share,
        batch=options.batch,
    )
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(options.features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, options.classes)).to(
        world.device
    )
    ids = [world.device.index] if world.device.type == "cuda" else None
    ddp = parallel.DistributedDataParallel(model, device_ids=ids)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=options.lr)
    markers.emit("MODEL", kind="mlp", hidden=HIDDEN, parameters=sum(p.numel() for p in model.parameters()))

    markers.emit("STEP", "3/4 training")
    steps_per_epoch = -(-share // options.batch)
    markers.emit(
        "TRAIN",
        epochs=options.epochs,
        steps_per_epoch=steps_per_epoch,
        global_batch=options.batch * world.size,
        lr=options.lr,
    )
    metrics = report.Metrics(options.run_dir, from_step=0) if options.run_dir and world.is_main else None
    losses: list[float] = []
    epoch_losses: list[float] = []
    trained = time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        order = torch.randperm(options.samples, generator=torch.Generator().manual_seed(options.seed + epoch))
        own_N = order[: share * world.size][world.rank :: world.size]
        for number, rows_B in enumerate(own_N.split(options.batch), start=1):
            inputs_BF, labels_B = inputs_NF[rows_B].to(world.device), labels_N[rows_B].to(world.device)
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(ddp(inputs_BF), labels_B)
            loss.backward()
            optimizer.step()
            (total,) = world.sum([loss.item()])
            losses.append(total / world.size)
            if number in (1, steps_per_epoch) or number % 10 == 0:
                markers.emit("BATCH", epoch=epoch, batch=f"{number}/{steps_per_epoch}", loss=losses[-1])
            if metrics is not None:
                metrics.add({"kind": "step", "step": len(losses), "epoch": epoch, "loss": losses[-1], "lr": options.lr})
        epoch_losses.append(sum(losses[-steps_per_epoch:]) / steps_per_epoch)
        markers.emit(
            "EPOCH", epoch=f"{epoch}/{options.epochs}", loss=epoch_losses[-1], elapsed_s=time.perf_counter() - trained
        )
    if any(loss != loss for loss in losses):  # noqa: PLR0124 - NaN alone differs from itself
        raise errors.UserError(f"the loss is not a number at --lr {options.lr}; lower it")

    markers.emit("STEP", "4/4 result")
    if world.is_main:
        _conclude(
            options, world, metrics, losses=losses, epoch_losses=epoch_losses, began=began,
            training_s=time.perf_counter() - trained
        )  # fmt: skip


def _conclude(
    options: smoke_options.Options, world: distributed.World, metrics: report.Metrics | None, *,
    losses: list[float], epoch_losses: list[float], began: float, training_s: float,
) -> None:  # fmt: skip
    samples = options.epochs * (options.samples // world.size) * world.size
    improved = losses[-1] < IMPROVED_BELOW * losses[0]
    curve = None
    if metrics is not None and options.run_dir is not None:
        metrics.close()
        curve = options.run_dir / report.CURVE
        report.draw_curve(report.read_metrics(metrics.path), curve, f"smoke test on {world.size} ranks")
    summary = report.Summary(
        workload="smoke", state="done", nodes=world.num_nodes, world_size=world.size, ranks=world.members,
        steps=len(losses),
        first_loss=losses[0], last_loss=losses[-1], best_loss=min(epoch_losses), samples=samples,
        samples_per_second=samples / training_s, elapsed_s=time.perf_counter() - began,
        loss_png=str(curve) if curve else None, extra={"improved": improved},
    )  # fmt: skip
    if options.run_dir is not None:
        report.write_summary(options.run_dir, summary)
    if options.report_json is not None:
        figures = {"world_size": world.size, "tokens": samples, "elapsed": training_s, "tokens/s": samples / training_s}
        files.write_json(options.report_json, {**figures, **summary.as_record()})
    markers.emit(
        "RESULT", improved=improved, first_loss=losses[0], last_loss=losses[-1], rule=f"last<{IMPROVED_BELOW}*first",
        samples_per_second=summary.samples_per_second,
    )  # fmt: skip
    markers.emit("DONE", workload="smoke", ranks=world.size, nodes=world.num_nodes, elapsed_s=summary.elapsed_s)
    report.write_outcome(options.run_dir, "done", step=len(losses))

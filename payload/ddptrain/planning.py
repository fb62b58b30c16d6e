"""What a training will do, decided before it begins: checked, completed, and the same on every rank.

All of it is a function of the settings, the data, the number of ranks and the checkpoint that is resumed.
"""

# pyright: basic, reportPrivateImportUsage=false
import dataclasses
import math
import pathlib
import typing

from ddptrain import (
    checkpoint,
    config,
    distributed,
    errors,
    files,
    finetune,
    hardware,
    markers,
    model,
    sampler,
    shapes,
    shards,
)


@dataclasses.dataclass(frozen=True)
class Batching:
    """How a step's sequences are spread."""

    global_batch: int
    micro_batch: int  # sequences of one forward pass on one rank
    accumulate: int  # forward passes of a rank per step


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate and the epochs, functions of the step alone."""

    steps: int
    epoch_steps: int
    peak: float
    floor: float
    warmup: int

    def lr(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0: a linear warm-up, then half a cosine."""
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.floor + 0.5 * (self.peak - self.floor) * (1 + math.cos(math.pi * min(1.0, done)))

    def epoch(self, step: int) -> int:
        """Return the epoch, from 1, in which the `step`-th step (from 1) lies."""
        return max(1, -(-step // self.epoch_steps))

    def ends_epoch(self, step: int) -> bool:
        """Return whether an epoch ends with that many steps done; the last one may be short."""
        return step % self.epoch_steps == 0 or step == self.steps


@dataclasses.dataclass(frozen=True)
class Decided:
    """A training that can begin."""

    settings: config.Config
    dataset: shards.Dataset
    plan: sampler.Plan
    batching: Batching
    schedule: Schedule
    kind: model.Kind
    found: checkpoint.Checkpoint | None  # what it goes on from


def decide(asked: config.Config, world: distributed.World) -> Decided:
    """Complete the configuration that was asked for. Raises SharedError on every rank when it cannot be done."""
    assert asked.run_dir is not None
    assert asked.data is not None
    run_dir = asked.run_dir
    with world.together():
        if world.is_main or (world.leads_node and asked.checkpoint_format == "dcp"):  # which all ranks write
            files.need_outputs(run_dir, {"--report-json": asked.report_json})
    dataset = _open_data(asked, world)
    with world.together():
        found = checkpoint.choose(run_dir, asked.resume) if world.is_main else None
    found = typing.cast(checkpoint.Checkpoint | None, world.broadcast(found))

    with world.together():
        settings = config.complete(asked, world.device.type, found.meta["config"] if found else {})
        batching = spread(asked, settings, world.size, found.meta if found else None)
        assert settings.seq_len is not None
        plan = sampler.make_plan(settings.seed, settings.seq_len, batching.global_batch, dataset.tokens("train"))
        if found:
            plan = dataclasses.replace(
                plan, lanes=found.meta["plan"]["lanes"], window_rows=found.meta["plan"]["window_rows"]
            )
        index = sampler.Sampler(plan, dataset.splits["train"])
        schedule = make_schedule(asked, settings, index.steps_per_pass, world.device.type)
        kind = _model_kind(settings, dataset)
        if found:
            _same_training(found, kind.identity, dataset, plan)
        extra = (
            checkpoint.NUM_BUFFERS * 12 * kind.parameters
            if world.is_main and settings.checkpoint_format == "torch"
            else 0
        )
        if world.device.type == "cpu":
            hardware.need_memory(kind.parameters, world.device, sharers=world.place.local_size, extra_bytes=extra)
        else:
            hardware.need_memory(kind.parameters, world.device, sharers=1, extra_bytes=0)
            hardware.need_buffers(extra)
        if world.is_main:
            hardware.need_disk(run_dir, kind.parameters)
    hardware.keep_memory(world.device)
    hardware.set_matmul(world.device, is_own=kind.identity["kind"] == "gpt")
    settings = _choose_precision(settings, world, kind, dataset.vocab, batching)
    config.show(settings)
    markers.emit(
        "DATA", dataset=dataset.root, tokenizer=dataset.tokenizer["kind"], vocab=dataset.vocab,
        train_tokens=dataset.tokens("train"),
        val_tokens=dataset.tokens("val"), steps_per_pass=index.steps_per_pass, lanes=plan.lanes,
        window_rows=plan.window_rows,
        dropped_rows=index.rows - index.steps_per_pass * plan.global_batch,
    )  # fmt: skip
    return Decided(settings, dataset, plan, batching, schedule, kind, found)


def spread(asked: config.Config, settings: config.Config, ranks: int, saved: dict[str, typing.Any] | None) -> Batching:
    """Return how the batch is spread. A resumed training keeps its global batch, whatever the number of ranks.

    Raises UserError when it cannot be divided.
    """
    assert settings.batch is not None
    assert settings.grad_accum is not None
    whole = settings.batch * settings.grad_accum * ranks
    if saved is None:
        return Batching(whole, settings.batch, settings.grad_accum)
    before = int(saved["plan"]["global_batch"])
    if asked.grad_accum is not None and whole != before:
        raise errors.UserError(
            f"--batch {settings.batch} x {ranks} ranks x --grad-accum {settings.grad_accum} is {whole} sequences "
            f"per step, the checkpoint's "
            f"training has {before}; omit --grad-accum, or start anew with --resume never"
        )
    if before % ranks:
        fitting = ", ".join(str(n) for n in range(1, before + 1) if before % n == 0 and abs(n - ranks) <= max(8, ranks))
        raise errors.UserError(
            f"the checkpoint's batch of {before} sequences is not divisible by {ranks} ranks; use one of "
            f"{fitting} ranks"
        )
    share = before // ranks
    micro = max(n for n in range(1, min(settings.batch, share) + 1) if share % n == 0)
    return Batching(before, micro, share // micro)


def make_schedule(asked: config.Config, settings: config.Config, steps_per_pass: int, device: str) -> Schedule:
    """Return the schedule, its gaps filled from the length of a pass over the data."""
    on_gpu = device == "cuda"
    epoch_steps = asked.epoch_steps
    if epoch_steps is None:
        epoch_steps = steps_per_pass if asked.epochs else min(steps_per_pass, 1000 if on_gpu else 50)
    if asked.steps:
        steps = asked.steps
    elif asked.epochs:
        steps = asked.epochs * epoch_steps
    else:
        steps = steps_per_pass if on_gpu else 200
    assert settings.lr is not None
    warmup = settings.warmup if settings.warmup is not None else min(700, steps // 10)
    return Schedule(
        steps, min(epoch_steps, steps), settings.lr, settings.lr * settings.min_lr_ratio, min(warmup, steps - 1)
    )


def _open_data(asked: config.Config, world: distributed.World) -> shards.Dataset:
    """Return the dataset, on every rank; JSON lines are tokenised first, by rank 0.

    Rank 0 reads it for all; one rank of each other node looks whether that node has the same.
    """
    assert asked.data is not None
    root = asked.data
    if asked.model_local_dir is not None:
        with world.together():
            prepared = finetune.prepare_data(asked) if world.is_main else None
        root = typing.cast(pathlib.Path, world.broadcast(prepared))
    with world.together():
        dataset = shards.open_dataset(root) if world.is_main else None
    dataset = typing.cast(shards.Dataset, world.broadcast(dataset))
    with world.together():
        if world.leads_node and not world.is_main and shards.fingerprint(root) != dataset.fingerprint:
            raise errors.UserError(f"--data {root} is not rank 0's; is it on the shared filesystem?")
    return dataset


def _model_kind(settings: config.Config, dataset: shards.Dataset) -> model.Kind:
    """Return the model that the settings describe."""
    if settings.model_local_dir is not None:
        return finetune.model_kind(settings.model_local_dir, dataset, settings)
    assert settings.model is not None
    assert settings.seq_len is not None
    layers, heads, width = shapes.SIZES[settings.model]
    layers, heads, width = settings.layers or layers, settings.heads or heads, settings.width or width
    if width % heads:
        raise errors.UserError(f"--width {width} is not divisible by --heads {heads}")
    shape = shapes.Shape(layers, heads, width, settings.seq_len, shapes.padded(dataset.vocab), settings.dropout)
    identity = {"kind": "gpt", **{k: v for k, v in dataclasses.asdict(shape).items() if k != "dropout"}}
    return model.Kind(identity, shapes.count(shape), lambda: model.GPT(shape))


def _same_training(
    found: checkpoint.Checkpoint, identity: dict[str, typing.Any], dataset: shards.Dataset, plan: sampler.Plan
) -> None:
    """Raise UserError when the checkpoint belongs to another model, dataset or order."""
    before = found.meta["model"]
    if before != identity:
        names = sorted(k for k in before.keys() | identity.keys() if before.get(k) != identity.get(k))
        differences = ", ".join(f"{k} {before.get(k)} there, {identity.get(k)} here" for k in names)
        raise errors.UserError(
            f"{found.path} is a checkpoint of another model ({differences}); give its settings, or --resume never"
        )
    data = found.meta["data"]
    if data["tokenizer"] != dataset.tokenizer:
        raise errors.UserError(
            f"{found.path} was trained with {data['tokenizer']['kind']} tokens (vocabulary "
            f"{data['tokenizer']['vocab']}), --data has "
            f"{dataset.tokenizer['kind']} ({dataset.vocab}); use a dataset prepared alike, or --resume never"
        )
    if data["fingerprint"] != dataset.fingerprint:
        raise errors.UserError(
            f"{found.path} was trained on dataset {data['name']} with other contents than --data; use that, or "
            f"--resume never"
        )
    if found.meta["plan"] != dataclasses.asdict(plan):
        names = [k for k, v in dataclasses.asdict(plan).items() if found.meta["plan"].get(k) != v]
        raise errors.UserError(
            f"{found.path} took the data in another order ({', '.join(names)} differ); give its settings, or "
            f"--resume never"
        )


def _choose_precision(
    settings: config.Config,
    world: distributed.World,
    kind: model.Kind,
    vocab: int,
    batching: Batching,
) -> config.Config:
    """Return the settings with precision decided, the same on every rank: in doubt by a short trial on all of them."""
    if settings.precision != "auto":
        return settings
    able = world.sum([float(hardware.may_gain_by_bf16(world.device))]) == [world.size]
    if not able or world.device.type == "cuda":
        return dataclasses.replace(settings, precision="bf16" if able else "fp32")
    assert settings.seq_len is not None
    fp32_s, bf16_s = world.sum(
        list(hardware.trial(kind.build, batching.micro_batch, settings.seq_len, vocab, world.device))
    )
    choice = "bf16" if hardware.prefers_bf16(fp32_s, bf16_s) else "fp32"
    markers.emit(
        "ENV",
        f"precision {choice}: a trial step took so much of the processors",
        fp32_ms=1000 * fp32_s / world.size,
        bf16_ms=1000 * bf16_s / world.size,
    )
    return dataclasses.replace(settings, precision=choice)

"""What a training will do, decided before it begins: checked, completed, and the same on every rank.

All of it is a function of the settings, the data, the number of ranks and the checkpoint that is resumed.
"""

# pyright: basic, reportPrivateImportUsage=false
import dataclasses
import math
import pathlib
import typing

import torch

from ddptrain import finetune, model, shapes
from ddptrain.checkpoint import stored
from ddptrain.data import sampler, shards
from ddptrain.ground import errors, files, log
from ddptrain.options import config, recipe
from ddptrain.records import report
from ddptrain.world import distributed, hardware

_OR_NEVER = ", or start over with --resume never"


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
        return self.floor + 0.5 * (self.peak - self.floor) * (
            1 + math.cos(math.pi * min(1.0, done))
        )

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
    found: stored.Checkpoint | None = None  # what it goes on from
    changes: tuple[recipe.Change, ...] = ()  # of the settings, that of this attempt last


def decide(asked: config.Config, world: distributed.World) -> Decided:
    """Complete the configuration that was asked for. Raises SharedError on every rank when it cannot be done."""
    run_dir = asked.run_dir
    assert run_dir is not None
    with world.together():
        if world.is_main:
            files.need_outputs(run_dir, {"--report-json": asked.report_json})
    with world.together():
        origin = _find_origin(asked) if world.is_main else None
    origin = typing.cast(Origin, world.broadcast(origin))
    found = origin.found
    settings = config.complete(asked, world.device.type, origin.settings)
    dataset = _open_data(settings, world)

    with world.together():
        batching = spread(settings, world.size, found.meta if found else None)
        assert settings.seq_len is not None
        plan = sampler.make_plan(
            settings.seed, settings.seq_len, batching.global_batch, dataset.tokens("train")
        )
        if found:
            kept = {name: found.meta["plan"][name] for name in ("lanes", "window_rows")}
            plan = dataclasses.replace(plan, **kept)
        index = sampler.Sampler(plan, dataset.splits["train"])
        settings = with_length(settings, index.steps_per_pass, world.device.type)
        schedule = make_schedule(settings)
        kind = _model_kind(settings, dataset)
        if found:
            _same_training(found, kind.identity, dataset, plan)
        if world.is_main:
            hardware.need_disk(run_dir, kind.parameters)
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    hardware.keep_memory(world.device)
    settings = _choose_precision(settings, world)
    text = {"dataset": dataset.root, "tokenizer": dataset.tokenizer["kind"], "vocab": dataset.vocab}
    tokens = {f"{split}_tokens": dataset.tokens(split) for split in shards.SPLITS}
    order = {
        "steps_per_pass": index.steps_per_pass,
        "lanes": plan.lanes,
        "window_rows": plan.window_rows,
    }
    dropped = index.rows - index.steps_per_pass * plan.global_batch
    log.emit("DATA", **text, **tokens, **order, dropped_rows=dropped)
    return Decided(
        settings, dataset, plan, batching, schedule, kind, found, _changes(origin, settings)
    )


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a training goes on from."""

    found: stored.Checkpoint | None = None
    record: recipe.Record = dataclasses.field(
        default_factory=dict[str, typing.Any]
    )  # of the state's settings
    settings: recipe.Record = dataclasses.field(
        default_factory=dict[str, typing.Any]
    )  # for all that is not given


def _find_origin(asked: config.Config) -> Origin:
    """Find the checkpoint and the record that a training goes on from; both are absent at a beginning. Rank 0 only."""
    assert asked.run_dir is not None
    found = stored.choose(asked.run_dir, asked.resume)
    if asked.resume == "never":
        return Origin()
    if found and not _is_within(found.path, asked.run_dir):
        there = found.meta["config"]
        return Origin(found, there, recipe.settings_of(there, is_own=False))

    own = recipe.read(asked.run_dir)
    saved = found.meta["config"] if found else own
    own = {**(own or saved), **_resolved(own or saved, asked.run_dir)}
    return Origin(found, saved, recipe.settings_of(own, is_own=True))


def _is_within(path: pathlib.Path, run_dir: pathlib.Path) -> bool:
    return path.parent.resolve() == run_dir.resolve()


def _resolved(record: recipe.Record, run_dir: pathlib.Path) -> dict[str, typing.Any]:
    """Return the warm-up that a run had by default if its record lacks it, as before 29 November 2026.

    The learning rate of its first step tells: it is the peak's share of one step of the warm-up (`Schedule.lr`).
    """
    peak = record.get("lr")
    if record.get("warmup") is not None or not peak:
        return {}
    for line in files.read_records(run_dir / report.METRICS):
        if line.get("kind") == "step" and line.get("step") == 1 and line.get("lr"):
            return {"warmup": max(0, round(peak / line["lr"]) - 1)}
    return {}


def _changes(origin: Origin, settings: config.Config) -> tuple[recipe.Change, ...]:
    """Return the changes of the settings up to here; at a beginning there are none."""
    step = origin.found.step if origin.found else 0
    new = recipe.changes(origin.record, config.as_record(settings), step)
    return (*recipe.history(origin.record), *new)


def spread(settings: config.Config, ranks: int, saved: dict[str, typing.Any] | None) -> Batching:
    """Return how the batch is spread; a resumed training keeps its global batch. Raises UserError if it cannot."""
    assert settings.batch is not None
    assert settings.grad_accum is not None
    whole = settings.batch * settings.grad_accum * ranks
    if saved is None:
        return Batching(whole, settings.batch, settings.grad_accum)
    before = int(saved["plan"]["global_batch"])
    if "grad_accum" in settings.given and whole != before:
        product = f"--batch {settings.batch} x {ranks} ranks x --grad-accum {settings.grad_accum} is {whole} sequences"
        raise errors.UserError(
            f"{product} per step, the checkpoint's training has {before}; omit --grad-accum{_OR_NEVER}"
        )
    if before % ranks:
        fitting = ", ".join(
            str(n)
            for n in range(1, before + 1)
            if before % n == 0 and abs(n - ranks) <= max(8, ranks)
        )
        what = f"the checkpoint's batch of {before} sequences is not divisible by {ranks} ranks"
        raise errors.UserError(f"{what}; use one of {fitting} ranks")
    share = before // ranks
    micro = max(n for n in range(1, min(settings.batch, share) + 1) if share % n == 0)
    return Batching(before, micro, share // micro)


def with_length(settings: config.Config, steps_per_pass: int, device: str) -> config.Config:
    """Return the settings with steps, epochs' steps and warm-up, their gaps filled from a pass over the data.

    They go into the record, so that a later release has no other ones for this run.
    """
    on_gpu = device == "cuda"
    epoch_steps = settings.epoch_steps
    if epoch_steps is None:
        epoch_steps = (
            steps_per_pass if settings.epochs else min(steps_per_pass, 1000 if on_gpu else 50)
        )
    settings = dataclasses.replace(settings, epoch_steps=epoch_steps)
    if settings.epochs is None and settings.steps is None:
        settings = dataclasses.replace(settings, steps=steps_per_pass if on_gpu else 200)
    if settings.warmup is not None:
        return settings
    steps = recipe.num_steps(config.as_record(settings))
    assert steps is not None
    return dataclasses.replace(settings, warmup=min(700, steps // 2, max(40, steps // 5)))


def make_schedule(settings: config.Config) -> Schedule:
    """Return the schedule of settings without gaps."""
    steps = recipe.num_steps(config.as_record(settings))
    assert steps is not None
    assert settings.epoch_steps is not None
    assert settings.lr is not None
    assert settings.warmup is not None
    floor = settings.lr * settings.min_lr_ratio
    epoch_steps, warmup = min(settings.epoch_steps, steps), min(settings.warmup, steps - 1)
    return Schedule(steps, epoch_steps, settings.lr, floor, warmup)


def _open_data(settings: config.Config, world: distributed.World) -> shards.Dataset:
    """Return the dataset, which rank 0 reads for all, and one rank of each other node compares."""
    assert settings.data is not None
    root = settings.data
    if settings.model_local_dir is not None:
        with world.together():
            prepared = finetune.prepare_data(settings) if world.is_main else None
        root = typing.cast(pathlib.Path, world.broadcast(prepared))
    with world.together():
        dataset = shards.open_dataset(root) if world.is_main else None
    dataset = typing.cast(shards.Dataset, world.broadcast(dataset))
    with world.together():
        if (
            world.leads_node
            and not world.is_main
            and shards.fingerprint(root) != dataset.fingerprint
        ):
            raise errors.UserError(
                f"--data {root} is not rank 0's; is it on the shared filesystem?"
            )
    return dataset


def _model_kind(settings: config.Config, dataset: shards.Dataset) -> model.Kind:
    if settings.model_local_dir is not None:
        return finetune.model_kind(settings.model_local_dir, dataset, settings)
    assert settings.model is not None
    assert settings.seq_len is not None
    layers, heads, width = shapes.SIZES[settings.model]
    layers, heads, width = (
        settings.layers or layers,
        settings.heads or heads,
        settings.width or width,
    )
    if width % heads:
        raise errors.UserError(f"--width {width} is not divisible by --heads {heads}")
    shape = shapes.Shape(
        layers, heads, width, settings.seq_len, shapes.padded(dataset.vocab), settings.dropout
    )
    identity = {
        "kind": "gpt",
        **{k: v for k, v in dataclasses.asdict(shape).items() if k != "dropout"},
    }
    return model.Kind(identity, shapes.count(shape), lambda: model.GPT(shape))


def _same_training(
    found: stored.Checkpoint,
    identity: dict[str, typing.Any],
    dataset: shards.Dataset,
    plan: sampler.Plan,
) -> None:
    """Raise UserError when the checkpoint belongs to another model, dataset or order."""
    before, data, order = found.meta["model"], found.meta["data"], dataclasses.asdict(plan)
    problem = ""
    if before != identity:
        names = sorted(
            k for k in before.keys() | identity.keys() if before.get(k) != identity.get(k)
        )
        unlike = ", ".join(f"{k} {before.get(k)} there, {identity.get(k)} here" for k in names)
        problem = f"is a checkpoint of another model ({unlike}); give its settings"
    elif data["tokenizer"] != dataset.tokenizer:
        there, here = (
            f"{t['kind']} tokens (vocabulary {t['vocab']})"
            for t in (data["tokenizer"], dataset.tokenizer)
        )
        problem = f"was trained with {there}, --data has {here}; use a dataset prepared alike"
    elif data["fingerprint"] != dataset.fingerprint:
        problem = f"was trained on dataset {data['name']} with other contents than --data; use that"
    elif found.meta["plan"] != order:
        names = [k for k, v in order.items() if found.meta["plan"].get(k) != v]
        problem = f"took the data in another order ({', '.join(names)} differ); give its settings"
    if problem:
        raise errors.UserError(f"{found.path} {problem}{_OR_NEVER}")


def _choose_precision(settings: config.Config, world: distributed.World) -> config.Config:
    """Return the settings with precision decided by the ranks' hardware, the same on every rank."""
    if settings.precision != "auto":
        return settings
    able = world.sum([float(hardware.has_bf16(world.device))]) == [world.size]
    precision = "bf16" if able and not settings.deterministic else "fp32"
    log.emit(
        "ENV", f"precision {precision}", bf16_in_hardware=able, deterministic=settings.deterministic
    )
    return dataclasses.replace(settings, precision=precision)

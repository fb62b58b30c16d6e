"""The plan of a training before it begins: checked, completed, and the same on every rank.

All of it is a function of the settings, the data, the number of ranks and the checkpoint that is
resumed.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
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
from ddptrain.records import metrics
from ddptrain.world import diloco, distributed, hardware, sites

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
        """Return the learning rate of `step`, from 0: a linear warm-up, then half a cosine."""
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 1 + math.cos(math.pi * min(1.0, done))
        return self.floor + 0.5 * (self.peak - self.floor) * cosine

    def epoch(self, step: int) -> int:
        """Return the epoch, from 1, of the `step`-th step (from 1)."""
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
    place: tuple[int, ...] = ()  # the site of each rank; () without exchanges
    found: stored.Checkpoint | None = None  # that it continues from
    changes: tuple[recipe.Change, ...] = ()  # of the settings, this attempt's last

    def new_changes(self) -> list[recipe.Change]:
        """Return the changes of the settings since the checkpoint that it goes on from."""
        if self.found is None:
            return []
        return [change for change in self.changes if change.step == self.found.step]


@dataclasses.dataclass(frozen=True)
class Origin:
    """The checkpoint and the settings that a training continues from."""

    found: stored.Checkpoint | None = None
    # Of the state's settings
    record: recipe.Record = dataclasses.field(default_factory=dict[str, typing.Any])
    # For all that is not given
    settings: recipe.Record = dataclasses.field(default_factory=dict[str, typing.Any])


def decide(asked: config.Config, world: distributed.World) -> Decided:
    """Complete the requested configuration.

    Raises SharedError on every rank if that is not possible.
    """
    with world.together():
        if world.is_main:
            files.need_outputs(asked.run_dir, {"--report-json": asked.report_json})
    with world.together():
        origin = _find_origin(asked) if world.is_main else None
    origin = typing.cast(Origin, world.broadcast(origin))
    settings = config.complete(asked, world.device.type, origin.settings)
    dataset = _open_data(settings, world)

    with world.together():
        place = _divide(settings, world) if world.is_main else ()
    place = typing.cast(tuple[int, ...], world.broadcast(place))
    with world.together():
        decided = _decide(asked, settings, dataset, origin, world)
        if world.is_main:
            num_sites = 1 + max(place, default=-1)
            hardware.need_disk(asked.run_dir, decided.kind.parameters, num_sites)
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    hardware.keep_memory(world.device)
    settings = choose_precision(decided.settings, world)
    _report_data(decided)
    changes = _changes(origin, settings)
    return dataclasses.replace(decided, settings=settings, changes=changes, place=place)


def _divide(settings: config.Config, world: distributed.World) -> tuple[int, ...]:
    """Return the site of each rank; () without exchanges. Rank 0 only."""
    if not settings.sync_every:
        return ()
    hosts = [str(member["host"]) for member in world.members]
    place = sites.divide(hosts, settings.sites)
    for member, site in zip(world.members, place, strict=True):
        member["site"] = site
    return tuple(place)


def _decide(
    asked: config.Config,
    settings: config.Config,
    dataset: shards.Dataset,
    origin: Origin,
    world: distributed.World,
) -> Decided:
    """Return the training that settings, data and checkpoint determine, all but its precision."""
    found = origin.found
    is_fixed = asked.grad_accum is not None
    saved = found.meta if found else None
    batching = spread(settings, world.size, saved, is_fixed=is_fixed)
    num_tokens = dataset.tokens("train")
    plan = sampler.make_plan(settings.seed, settings.seq_len, batching.global_batch, num_tokens)
    if found:
        before = found.meta["plan"]
        plan = dataclasses.replace(plan, lanes=before["lanes"], window_rows=before["window_rows"])
    index = sampler.Sampler(plan, dataset.splits["train"])
    settings = with_length(settings, index.steps_per_pass, world.device.type)
    if settings.sync_every:
        settings = _with_outer(settings)
    kind = _model_kind(settings, dataset)
    if found:
        _same_training(found, kind.identity, dataset, plan)
    schedule = make_schedule(settings)
    return Decided(settings, dataset, plan, batching, schedule, kind, found=found)


def _report_data(decided: Decided) -> None:
    dataset = decided.dataset
    plan = decided.plan
    index = sampler.Sampler(plan, dataset.splits["train"])
    tokens = {f"{split}_tokens": dataset.tokens(split) for split in shards.SPLITS}
    log.emit(
        "DATA",
        dataset=dataset.root,
        tokenizer=dataset.tokenizer["kind"],
        vocab=dataset.vocab,
        **tokens,
        steps_per_pass=index.steps_per_pass,
        lanes=plan.lanes,
        window_rows=plan.window_rows,
        dropped_rows=index.rows - index.steps_per_pass * plan.global_batch,
    )


def _find_origin(asked: config.Config) -> Origin:
    """Find the checkpoint and the record that a training continues from, if any.

    Only rank 0 calls it.
    """
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
    """Return the default warm-up of a run from before 29 November 2026, whose record lacks it.

    The learning rate of its first step shows it: it is the peak's share of one step of the warm-up
    (`Schedule.lr`).
    """
    peak = record.get("lr")
    if record.get("warmup") is not None or not peak:
        return {}
    for line in files.read_records(run_dir / metrics.FILE):
        if line.get("kind") == "step" and line.get("step") == 1 and line.get("lr"):
            return {"warmup": max(0, round(peak / line["lr"]) - 1)}
    return {}


def _changes(origin: Origin, settings: config.Config) -> tuple[recipe.Change, ...]:
    """Return the changes of the settings up to here; at a beginning there are none."""
    step = origin.found.step if origin.found else 0
    new = recipe.changes(origin.record, config.as_record(settings), step)
    return (*recipe.history(origin.record), *new)


def spread(
    settings: config.Config,
    ranks: int,
    saved: dict[str, typing.Any] | None,
    *,
    is_fixed: bool,
) -> Batching:
    """Return the distribution of the batch; a resumed training keeps its global batch.

    With `is_fixed` the number of forward passes per step was asked for, and stays. Raises UserError
    if the batch cannot be kept.
    """
    whole = settings.batch * settings.grad_accum * ranks
    if saved is None:
        return Batching(whole, settings.batch, settings.grad_accum)
    before = int(saved["plan"]["global_batch"])
    if is_fixed and whole != before:
        product = f"--batch {settings.batch} x {ranks} ranks x --grad-accum {settings.grad_accum}"
        what = f"{product} is {whole} sequences per step, the checkpoint's training has {before}"
        raise errors.UserError(f"{what}; omit --grad-accum{_OR_NEVER}")
    if before % ranks:
        what = f"the checkpoint's batch of {before} sequences is not divisible by {ranks} ranks"
        raise errors.UserError(f"{what}; use one of {_fitting(before, ranks)} ranks")
    share = before // ranks
    micro = max(n for n in range(1, min(settings.batch, share) + 1) if share % n == 0)
    return Batching(before, micro, share // micro)


def _fitting(batch: int, ranks: int) -> str:
    """Name the numbers of ranks near this one that a batch can be spread over."""
    found: list[str] = []
    for number in range(1, batch + 1):
        if batch % number == 0 and abs(number - ranks) <= max(8, ranks):
            found.append(str(number))
    return ", ".join(found)


def _with_outer(settings: config.Config) -> config.Config:
    """Fill in the rate and the momentum of the exchanges if they were not given."""
    lr, momentum = diloco.outer_for(settings.sync_every)
    if settings.outer_lr is not None:
        lr = settings.outer_lr
    if settings.outer_momentum is not None:
        momentum = settings.outer_momentum
    return dataclasses.replace(settings, outer_lr=lr, outer_momentum=momentum)


def with_length(settings: config.Config, steps_per_pass: int, device: str) -> config.Config:
    """Return the settings with steps, epochs' steps and warm-up; a pass over the data fills gaps.

    They go into the record, so that a later release does not choose other ones for this run.
    """
    on_gpu = device == "cuda"
    if settings.epoch_steps is None:
        epoch_steps = steps_per_pass
        if not settings.epochs:
            epoch_steps = min(steps_per_pass, 1000 if on_gpu else 50)
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
    floor = settings.lr * settings.min_lr_ratio
    epoch_steps, warmup = min(settings.epoch_steps, steps), min(settings.warmup, steps - 1)
    return Schedule(steps, epoch_steps, settings.lr, floor, warmup)


def _open_data(settings: config.Config, world: distributed.World) -> shards.Dataset:
    """Return the dataset, which rank 0 reads for all, and one rank of each other node compares."""
    root = settings.data
    if settings.model_local_dir is not None:
        with world.together():
            prepared = finetune.prepare_data(settings) if world.is_main else None
        root = typing.cast(pathlib.Path, world.broadcast(prepared))
    with world.together():
        dataset = shards.open_dataset(root) if world.is_main else None
    dataset = typing.cast(shards.Dataset, world.broadcast(dataset))
    with world.together():
        is_other_node = world.leads_node and not world.is_main
        if is_other_node and shards.fingerprint(root) != dataset.fingerprint:
            what = f"--data {root} is not rank 0's"
            raise errors.UserError(f"{what}; is it on the shared filesystem?")
    return dataset


def _model_kind(settings: config.Config, dataset: shards.Dataset) -> model.Kind:
    if settings.model_local_dir is not None:
        return finetune.model_kind(settings.model_local_dir, dataset, settings)
    layers, heads, width = shapes.SIZES[settings.model]
    layers = settings.layers or layers
    heads = settings.heads or heads
    width = settings.width or width
    if width % heads:
        raise errors.UserError(f"--width {width} is not divisible by --heads {heads}")
    vocab = shapes.padded(dataset.vocab)
    shape = shapes.Shape(layers, heads, width, settings.seq_len, vocab, settings.dropout)
    identity = {"kind": "gpt", **dataclasses.asdict(shape)}
    del identity["dropout"]
    return model.Kind(identity, shapes.count(shape), lambda: model.GPT(shape))


def _same_training(
    found: stored.Checkpoint,
    identity: dict[str, typing.Any],
    dataset: shards.Dataset,
    plan: sampler.Plan,
) -> None:
    """Raise UserError when the checkpoint belongs to another model, dataset or order."""
    problem = _unlike(found.meta, identity, dataset, dataclasses.asdict(plan))
    if problem:
        raise errors.UserError(f"{found.path} {problem}{_OR_NEVER}")


def _unlike(
    meta: dict[str, typing.Any],
    identity: dict[str, typing.Any],
    dataset: shards.Dataset,
    order: dict[str, typing.Any],
) -> str:
    """Return how a checkpoint's training differs, with the remedy, or ""."""
    model_before = meta["model"]
    if model_before != identity:
        names = sorted(
            name
            for name in model_before.keys() | identity.keys()
            if model_before.get(name) != identity.get(name)
        )
        each = [f"{n} {model_before.get(n)} there, {identity.get(n)} here" for n in names]
        return f"is a checkpoint of another model ({', '.join(each)}); give its settings"
    data = meta["data"]
    if data["tokenizer"] != dataset.tokenizer:
        there = _tokens(data["tokenizer"])
        here = _tokens(dataset.tokenizer)
        remedy = "use a dataset prepared alike"
        return f"was trained with {there}, --data has {here}; {remedy}"
    if data["fingerprint"] != dataset.fingerprint:
        what = f"was trained on dataset {data['name']} with other contents than --data"
        return f"{what}; use that"
    if meta["plan"] != order:
        names = [name for name, value in order.items() if meta["plan"].get(name) != value]
        return f"took the data in another order ({', '.join(names)} differ); give its settings"
    return ""


def _tokens(tokenizer: collections.abc.Mapping[str, typing.Any]) -> str:
    return f"{tokenizer['kind']} tokens (vocabulary {tokenizer['vocab']})"


def choose_precision(settings: config.Config, world: distributed.World) -> config.Config:
    """Return the settings with precision decided by the ranks' hardware, the same on every rank."""
    if settings.precision != "auto":
        return settings
    able = world.sum([float(hardware.has_bf16(world.device))]) == [world.size]
    # On a CPU the kernels of bf16 depend on its instructions, such as AMX
    is_portable = settings.deterministic and world.device.type == "cpu"
    precision = "bf16" if able and not is_portable else "fp32"
    what = f"precision {precision}"
    log.emit("ENV", what, bf16_in_hardware=able, deterministic=settings.deterministic)
    return dataclasses.replace(settings, precision=precision)

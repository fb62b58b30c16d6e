"""The training: a GPT on a prepared dataset, or a local model fine-tuned, over any number of ranks.

Read it from `run` downwards. Decisions before the first step are in planning.py; optimiser, DDP and
profiler in engine.py; logs and files in journal.py. Decisions that every rank must take alike
(which checkpoint, whether to stop, whether this is the best) are taken by rank 0 or from a sum over
the ranks, never by each rank for itself.
"""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import dataclasses
import math
import pathlib
import time
import typing

import numpy as np
import torch
from torch import Tensor, nn

from ddptrain import engine, finetune, journal, model, planning, shapes
from ddptrain.checkpoint import arithmetic, parts, progress, saver, stored, tensors
from ddptrain.data import batches
from ddptrain.ground import attempt, errors, log
from ddptrain.options import config, recipe
from ddptrain.world import agreement, diloco, distributed, sites, stragglers

# A request to stop leaves so much time for the checkpoint; one that names no time waits as long for
# the sites' next exchange. The shortest warning before a time limit is 30 s
_SAVING_S = 15.0
_BETWEEN_SITES_S = 10.0  # between agreements of sites, which each cost several round trips
_DIVERGED = "lower --lr, or use --precision fp32, and resume"


def run(asked: config.Config, world: distributed.World) -> str:
    """Train to the end or until asked to stop, and return which."""
    began = time.perf_counter()
    distributed.report_world(world)
    decided = planning.decide(asked, world)
    with Training(decided, world) as training:
        if decided.found:
            training.resume(decided.found)
        return training.run(began)


@dataclasses.dataclass(frozen=True)
class Taken:
    """A step as this rank took it; the tensors are still on the device."""

    loss: Tensor  # this rank's share: the step's is the mean of all
    norm: Tensor  # of the gradients
    has_targets: bool  # on any rank


class Training:
    """The model, its optimiser and everything around the loop; a context manager."""

    def __init__(self, decided: planning.Decided, world: distributed.World) -> None:
        self.world = world
        self.settings = decided.settings
        self.dataset = decided.dataset
        self.plan = decided.plan
        self.batching = decided.batching
        self.schedule = decided.schedule
        self.identity = decided.kind.identity
        self.record = recipe.as_record(decided.settings, decided.changes)
        self.changed = decided.new_changes()
        self.run_dir = pathlib.Path(self.settings.run_dir)

        engine.set_modes(self.settings)
        self.core = decided.kind.build().to(world.device)
        self.optimizer = engine.make_optimizer(self.core, self.settings, world.device)
        self.place = list(decided.place)
        self.link = self._make_link()
        self.ddp = engine.wrap(
            self.core, self.settings, world, self.link.sites if self.link else None
        )
        self.autocast = self.settings.precision == "bf16"

        self.mask_bit = batches.mask_bit(self.dataset)
        self.take_val = batches.fixed_rows(
            self.dataset, "val", self.plan.seq_len, self.settings.eval_rows
        )
        self.step_tokens = self.batching.global_batch * self.plan.seq_len
        self.progress = progress.Progress()
        self.journal = journal.Journal(decided, world, self.progress, self._size())
        self.agreement = self._make_agreement()
        self.pace = stragglers.Pace(world)
        self.saver: saver.Saver | None = None
        self.resumed_from: str | None = None

        self._first = 1  # the attempt's first step
        self._asked_at = math.inf  # to stop
        self._pending: list[Taken] = []  # since the ranks last agreed
        self._agreed_at = time.perf_counter()
        self._saved_at = time.monotonic()

    def _make_link(self) -> diloco.Link | None:
        """Return the sites and their exchanges; None without them."""
        settings = self.settings
        if not settings.sync_every:
            return None
        assert settings.outer_lr is not None, "planning chose it"
        assert settings.outer_momentum is not None, "planning chose it"
        within = sites.Sites(self.world, self.place)
        rhythm = diloco.Rhythm(
            settings.sync_every,
            self.schedule.warmup,
            settings.outer_lr,
            settings.outer_momentum,
            self.schedule.epoch_steps,
            self.schedule.steps,
        )
        log.emit(
            "DDP",
            sites=within.count,
            sync_every=rhythm.every,
            averaged_until=rhythm.warmup,
            averaged_from=rhythm.averaged_from,
            outer_lr=rhythm.lr,
            outer_momentum=rhythm.momentum,
        )
        return diloco.Link(within, rhythm, diloco.Exchange(self.core.parameters(), within))

    def _make_agreement(self) -> agreement.Agreement:
        """Return the ranks' agreement; between sites it is rare, and else with each exchange."""
        if self.link is None:
            return agreement.Agreement(self.world, at_most=self.settings.log_every)
        return agreement.Agreement(
            self.world, at_most=self.settings.sync_every, target_s=_BETWEEN_SITES_S
        )

    @property
    def leads(self) -> bool:
        """Return whether this rank saves and restores: rank 0, or the leader of each site."""
        return self.link.sites.leads if self.link else self.world.is_main

    @property
    def num_together(self) -> int:
        """Return over how many ranks the gradients are summed."""
        return self.link.sites.size if self.link else self.world.size

    def _size(self) -> journal.Size:
        parameters = model.num_parameters(self.core)
        flops_per_token = 6.0 * parameters
        if isinstance(self.core, model.GPT):
            flops_per_token = shapes.flops_per_token(self.core.shape, parameters)
        return journal.Size(parameters, flops_per_token, self.step_tokens)

    def __enter__(self) -> "Training":
        if self.leads:
            place = parts.ALONE
            if self.link:
                place = parts.Place(self.link.sites.number, self.link.sites.count)
            self.saver = saver.Saver(
                self.run_dir,
                keep=self.settings.keep_checkpoints,
                attempt=attempt.name(),
                pin=self.world.device.type == "cuda",
                before_commit=self.journal.sync,
                on_saved=self.journal.saved,
                place=place,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.saver is not None:
            self.saver.close()

    def resume(self, found: stored.Checkpoint) -> None:
        """Continue from a checkpoint: rank 0, or each site's leader, reads it for the others."""
        engine.fill_optimizer(self.optimizer)
        with self.world.together():
            if self.leads:
                self._restore(found)
        if self.num_together > 1:
            group = self.link.sites.group if self.link else None
            leader = self.link.sites.leader if self.link else 0
            for tensor in tensors.leaves(tensors.state_of(self.core, self.optimizer)):
                torch.distributed.broadcast(tensor, src=leader, group=group)
        for name, value in found.meta["progress"].items():
            setattr(self.progress, name, value)
        self.resumed_from = str(found.path)
        if self.world.is_main:
            self._report_resumed(found)

    def _restore(self, found: stored.Checkpoint) -> None:
        """Read a checkpoint's common part, and at the same number of sites this site's own part."""
        if self.link is None or "sites" not in found.meta:
            tensors.restore(found, self.core, self.optimizer)
            if self.link:
                self.link.exchange.begin()
            return

        state = tensors.state_of(self.core, self.optimizer)
        state["outer"] = self.link.exchange.state()
        tensors.read_into(found.path, state)
        sites_before = found.meta["sites"]
        number = self.link.sites.number
        if number and sites_before["count"] == self.link.sites.count:
            own = tensors.state_of(self.core, self.optimizer)
            if sites_before["is_synced"]:
                del own["model"]
            tensors.read_into(found.path / parts.folder(number), own)

    def _report_resumed(self, found: stored.Checkpoint) -> None:
        for change in self.changed:
            log.emit("CKPT", str(change))
        differences = self._differences(found)
        log.emit(
            "CKPT",
            resumed=found.path,
            step=found.step,
            saved_by_ranks=found.meta["world_size"],
            ranks=self.world.size,
            exact=not differences,
            why="; ".join(differences) or None,
        )

    def _differences(self, found: stored.Checkpoint) -> list[str]:
        """Return why the next steps differ in bits from those of an uninterrupted training."""
        differences = [str(change) for change in self.changed if change.has_effect]
        before = found.meta["world_size"]
        if before != self.world.size:
            differences.append(f"{before} ranks there, {self.world.size} here")
        differences += self._sites_differences(found)
        micro = self.batching.micro_batch
        return differences + arithmetic.differences(found, self.settings, micro, self.world)

    def _sites_differences(self, found: stored.Checkpoint) -> list[str]:
        before = found.meta.get("sites", {})
        num_before = before.get("count", 1)
        num_sites = self.link.sites.count if self.link else 1
        if num_before != num_sites:
            what = f"{num_before} sites there, {num_sites} here"
            return [f"{what}: all go on with site 0's moments"]
        if self.link and before.get("place", self.place) != self.place:
            return ["the sites have other ranks"]
        return []

    def run(self, began: float) -> str:
        """Take the remaining steps, and write the files for people and the batch script."""
        self.journal.begin(self.record)
        outcome = attempt.DONE
        if self.progress.step < self.schedule.steps:
            outcome = self._loop()
        if self.saver is not None:
            self.saver.wait()
        if self.saver is not None and self.world.is_main:
            if outcome == attempt.DONE and isinstance(self.core, finetune.Wrapped):
                finetune.export(self.core, self.settings, self.run_dir / "model")
            self.journal.finish(
                outcome,
                checkpoint=self.saver.last or self.resumed_from,
                resumed_from=self.resumed_from,
                stall_s=max(self.saver.stall_s, default=None),
                elapsed_s=time.perf_counter() - began,
            )
        return outcome

    def _loop(self) -> str:
        """Train to the last step, or until the ranks agree to stop; return the outcome."""
        self._first = self.progress.step + 1
        self._agreed_at = time.perf_counter()
        self._saved_at = time.monotonic()
        self.core.train()
        with self._reader() as data, self._recorder() as recorder:
            for step in range(self._first, self.schedule.steps + 1):
                self._pending.append(self._next_step(step, data))
                is_synced = self._exchange_if_due(step)
                recorder.step()
                if step == self._first:
                    self._prepare_saver()
                is_due = self.agreement.is_due() or (self.link is not None and is_synced)
                if not is_due and not self.schedule.ends_epoch(step):
                    continue
                stop = self._agree_and_save(step, is_synced=is_synced)
                if stop and step < self.schedule.steps:
                    return attempt.PREEMPTED
        return attempt.DONE

    def _agree_and_save(self, step: int, *, is_synced: bool) -> bool:
        """Exchange the pending steps, save if it is time, and return whether the ranks stop."""
        stop, save = self._agree(step)
        if self.schedule.ends_epoch(step):
            self._end_epoch(step)
        elif stop or (save and is_synced):
            self._save(step, ends_epoch=False)
        if self.saver is not None:
            self.saver.check()
        return stop

    def _exchange_if_due(self, step: int) -> bool:
        """Let the sites exchange if it is time; return whether all have the same weights now."""
        if self.link is None:
            return True
        if not self.link.rhythm.is_due(step):
            return False
        self.link.exchange(*self.link.rhythm.outer(step))
        return True

    def _reader(self) -> batches.Reader:
        return batches.Reader(
            self.dataset,
            self.plan,
            rank=self.world.rank,
            size=self.world.size,
            start=self.progress.step,
            stop=self.schedule.steps,
            device=self.world.device,
        )

    def _recorder(self) -> contextlib.AbstractContextManager[typing.Any]:
        name = f"{attempt.name()}.rank-{self.world.rank}.json.gz"
        path = self.run_dir / "profile" / name
        return engine.recording(self.settings, self.world.rank, self._first, path)

    def _prepare_saver(self) -> None:
        """Allocate the saver's memory, now that the optimiser has its state."""
        if self.saver is not None:
            self.saver.prepare(self._state())

    def _next_step(self, step: int, data: batches.Reader) -> Taken:
        with self.pace.own():
            rows_BT1 = data.next()
        # Dropout does not need any state for a resume
        engine.seed_all(self.settings.seed, self.world.rank, step)
        return self.step(rows_BT1, lr=self.schedule.lr(step - 1))

    def step(self, rows_BT1: Tensor, *, lr: float) -> Taken:
        """Do one optimiser step."""
        weights, num_targets = self._weights(rows_BT1)
        rows_BT1 = rows_BT1.to(self.world.device, non_blocking=True)
        tokens_BT, targets_BT = batches.split_batch(rows_BT1, self.mask_bit)
        total = torch.zeros((), device=self.world.device)
        size = self.batching.micro_batch
        for part, weight in enumerate(weights):
            rows = slice(part * size, (part + 1) * size)
            is_last = part == len(weights) - 1
            with self._gradients(is_last=is_last):
                loss = self._forward(tokens_BT[rows], targets_BT[rows])
                (loss * weight).backward()
            total += loss.detach() * weight
        norm = self._update(lr)
        return Taken(total, norm, num_targets > 0)

    def _gradients(self, *, is_last: bool) -> contextlib.AbstractContextManager[typing.Any]:
        """Return the context of a backward pass: only the step's last one sums over the ranks."""
        if is_last or self.num_together == 1:
            return contextlib.nullcontext()
        return self.ddp.no_sync()  # type: ignore[operator]

    def _forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        with self._precision(), self.pace.own():
            return self.ddp(tokens_BT, targets_BT)

    def _precision(self) -> torch.autocast:
        device = self.world.device.type
        return torch.autocast(device, dtype=torch.bfloat16, enabled=self.autocast)

    def _update(self, lr: float) -> Tensor:
        """Change the weights by their gradients, and return the norm that these had."""
        limit = self.settings.clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.core.parameters(), limit)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.saver is not None:
            self.saver.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _weights(self, rows_BT1: Tensor) -> tuple[list[float], float]:
        """Compute the weight of each of this rank's forward passes, and the number of targets.

        DDP takes the mean of the ranks' gradients. With prompts masked the passes have unlike
        numbers of targets: each then counts for as many as it has, so that the step's loss is the
        mean over its tokens, however it is spread.
        """
        parts = self.batching.accumulate
        if self.mask_bit is None:
            return [1 / parts] * parts, float(self.step_tokens)
        learned = batches.num_learned(rows_BT1, self.mask_bit)
        counts = learned.view(parts, -1).sum(dim=1).tolist()
        own = float(sum(counts))
        total = self.link.sites.sum(own) if self.link else self.world.sum([own])[0]
        return [count * self.num_together / max(1.0, total) for count in counts], total

    def _agree(self, step: int) -> tuple[bool, bool]:
        """Exchange the pending steps with the other ranks; return whether to stop, and to save."""
        own, norms = _read(self._pending)  # on a GPU, here the CPU waits for it
        elapsed_s = time.perf_counter() - self._agreed_at
        self._agreed_at = time.perf_counter()
        save_due = float(self._is_save_due())
        waits = float(self._waits_for_exchange(step, elapsed_s / len(own)))
        agreed = self.agreement.reach(elapsed_s, [save_due, waits, *own], self.pace.take())
        save, waiting, *totals = agreed.sums
        if agreed.stop:
            self._asked_at = min(self._asked_at, time.monotonic())

        steps = self._known_to_all(step, totals, norms)
        is_measured = step - len(steps) >= self._first
        if is_measured and self.world.is_main:
            self.pace.add(agreed.own, elapsed_s)
        self._pending.clear()
        _raise_if_diverged(steps)
        slowest = self.pace.slowest
        exchanges = self.link.exchange.take_figures() if self.link else {}
        self.journal.steps(
            steps, elapsed_s, is_measured=is_measured, slowest=slowest, exchanges=exchanges
        )
        return agreed.stop and not waiting, save > 0

    def _waits_for_exchange(self, step: int, step_s: float) -> bool:
        """Return whether a stop can wait for the next exchange, the best moment to save.

        Rank 0 decides.
        """
        if self.link is None or not self.world.is_main:
            return False
        more = self.link.rhythm.until(step)
        if not more:
            return False
        exchanged_s = more * step_s + self.link.exchange.last_s
        stop_by = self.agreement.stop_by()
        if stop_by is not None:
            return time.time() + exchanged_s < stop_by - _SAVING_S
        since_s = max(0.0, time.monotonic() - self._asked_at)
        return since_s + exchanged_s < _SAVING_S

    def _known_to_all(
        self, last: int, totals: list[float], norms: list[float]
    ) -> list[journal.Step]:
        """Return the pending steps, up to `last`, with the means of the ranks' losses."""
        found: list[journal.Step] = []
        number = last - len(totals)
        for taken, total, norm in zip(self._pending, totals, norms, strict=True):
            number += 1
            loss = total / self.world.size if taken.has_targets else None
            found.append(journal.Step(number, loss, norm))
        return found

    def _is_save_due(self) -> bool:
        every_s = 60 * self.settings.save_minutes
        waited_s = time.monotonic() - self._saved_at
        return self.world.is_main and 0 < every_s < waited_s

    def _end_epoch(self, step: int) -> None:
        began = time.perf_counter()
        val_loss = self.evaluate()
        if val_loss is not None and not math.isfinite(val_loss):
            # Such weights are of no use to go on from
            what = f"the validation loss is {val_loss} at step {step}"
            raise errors.SharedError(f"{what}; {_DIVERGED}")
        is_best = self.progress.evaluate(step, val_loss)
        self.journal.evaluation(step, is_best=is_best, seconds=time.perf_counter() - began)
        self._save(step, ends_epoch=True, is_best=is_best)

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Return the mean loss over the fixed validation set, in nats per token; None without it.

        The model runs as it is, never compiled: without gradients, and for the last rows of a rank
        in other shapes, it would be compiled again, for a few passes only. Which is quicker was not
        measured on a GPU.
        """
        world = self.world
        count = self.take_val.count
        if not count:
            return None
        self.core.eval()
        total = 0.0
        tokens = 0.0
        first = world.rank * count // world.size
        last = (world.rank + 1) * count // world.size
        for at in range(first, last, self.batching.micro_batch):
            rows = self.take_val(at, min(last, at + self.batching.micro_batch))
            loss, learned = self._evaluate_rows(torch.from_numpy(rows.astype(np.int64)))
            total += loss * learned
            tokens += learned
        self.core.train()
        total, tokens = world.sum([total, tokens])
        return total / tokens if tokens else None

    def _evaluate_rows(self, rows_BT1: Tensor) -> tuple[float, int]:
        """Return the mean loss of some rows, and over how many targets."""
        device = self.world.device
        tokens_BT, targets_BT = batches.split_batch(rows_BT1, self.mask_bit)
        learned = int((targets_BT != batches.IGNORED).sum())
        if not learned:
            return 0.0, 0
        with self._precision():
            loss = self.core(tokens_BT.to(device), targets_BT.to(device))
        return loss.item(), learned

    def _save(self, step: int, *, ends_epoch: bool, is_best: bool = False) -> None:
        name = stored.name_of(self.schedule.epoch(step), step, ends_epoch=ends_epoch)
        if self.saver is not None:
            self.saver.save(name, self._state(), self._meta(), is_best=is_best)
        self._saved_at = time.monotonic()
        self._agreed_at = time.perf_counter()

    def _state(self) -> tensors.State:
        """List the tensors that this rank saves: all, or those that only its site has."""
        state = tensors.state_of(self.core, self.optimizer)
        if self.link is None:
            return state
        if self.world.is_main:
            state["outer"] = self.link.exchange.state()
        elif self._is_synced:
            del state["model"]
        return state

    @property
    def _is_synced(self) -> bool:
        return self.link is None or self.link.rhythm.is_due(self.progress.step)

    def _meta(self) -> dict[str, typing.Any]:
        meta = self._described()
        if self.link:
            meta["sites"] = {
                "count": self.link.sites.count,
                "place": self.place,
                "is_synced": self._is_synced,
            }
        return meta

    def _described(self) -> dict[str, typing.Any]:
        data = self.dataset
        return {
            "format": tensors.DCP,
            "step": self.progress.step,
            "epoch": self.schedule.epoch(self.progress.step),
            "world_size": self.world.size,
            "progress": dataclasses.asdict(self.progress),
            "plan": dataclasses.asdict(self.plan),
            "model": self.identity,
            "data": {
                "name": data.name,
                "fingerprint": data.fingerprint,
                "tokenizer": data.tokenizer,
            },
            "config": self.record,
            "arithmetic": arithmetic.VERSION,
            "device": arithmetic.device_name(self.world),
            "torch": torch.__version__,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }


def _read(pending: list[Taken]) -> tuple[list[float], list[float]]:
    """Return this rank's losses and norms.

    A loss with a bad gradient is nan: it has spoilt the weights already.
    """
    losses = torch.stack([taken.loss for taken in pending]).double().tolist()
    norms = torch.stack([taken.norm for taken in pending]).tolist()
    for at, norm in enumerate(norms):
        if not math.isfinite(norm):
            losses[at] = math.nan
    return losses, norms


def _raise_if_diverged(steps: list[journal.Step]) -> None:
    for step in steps:
        if not step.is_finite:
            norm = f"the gradients' norm {step.norm} at step {step.number}"
            raise errors.SharedError(f"the loss is {step.loss}, {norm}; {_DIVERGED}")

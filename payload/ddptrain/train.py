"""The training: a GPT on a prepared dataset, or a local model fine-tuned, over any number of ranks.

Read it from `run` downwards; what was decided before is in planning.py, what surrounds the model in engine.py. All
decisions that every rank must take alike (which checkpoint, whether to stop, whether this is the best) are taken by
rank 0 or from a sum over the ranks, never by each rank for itself.
"""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import dataclasses
import math
import os
import pathlib
import resource
import time
import typing

import numpy as np
import torch
from torch import Tensor, nn

from ddptrain import engine, finetune, model, planning, profiling, resume, shapes
from ddptrain.checkpoint import arithmetic, saver, stored
from ddptrain.data import batches
from ddptrain.ground import errors, files, log
from ddptrain.options import config, recipe
from ddptrain.records import report, trackers
from ddptrain.world import distributed, stragglers

_DIVERGED = "lower --lr, or use --precision fp32, and resume"


@dataclasses.dataclass
class Progress:
    """How far the training is; part of every checkpoint."""

    step: int = 0
    tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    val_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None


def run(asked: config.Config, world: distributed.World) -> str:
    """Train to the end or until asked to stop, and return which."""
    began = time.perf_counter()
    distributed.report_world(world)
    decided = planning.decide(asked, world)
    with Training(decided, world) as training:
        if decided.found:
            training.resume(decided.found)
        return training.run(began)


class Training:
    """The model, its optimiser and everything around the loop; a context manager."""

    def __init__(self, decided: planning.Decided, world: distributed.World) -> None:
        self.settings, self.dataset, self.plan = decided.settings, decided.dataset, decided.plan
        self.batching, self.schedule, self.identity = (
            decided.batching,
            decided.schedule,
            decided.kind.identity,
        )
        self.record = recipe.as_record(decided.settings, decided.changes)
        self.changed = [
            change
            for change in decided.changes
            if decided.found and change.step == decided.found.step
        ]
        self.world = world
        assert self.settings.run_dir is not None
        self.run_dir: pathlib.Path = self.settings.run_dir
        self.progress = Progress()
        self._set_modes()
        self.core = decided.kind.build().to(world.device)
        self.parameters = model.num_parameters(self.core)
        self.optimizer = engine.make_optimizer(self.core, self.settings, world.device)
        self.ddp = engine.wrap(self.core, self.settings, world)
        self.autocast = self.settings.precision == "bf16"
        self.saver: saver.Saver | None = None
        self.metrics: report.Metrics | None = None
        self.mask_bit = batches.mask_bit(self.dataset)
        self.take_val = batches.fixed_rows(
            self.dataset, "val", self.plan.seq_len, self.settings.eval_rows
        )
        self.resumed_from: str | None = None
        self.pace = stragglers.Pace(world)
        self.train_s = 0.0  # time in training steps, the first one of the attempt not counted
        self.train_tokens = 0
        self.step_tokens = self.batching.global_batch * self.plan.seq_len

    def __enter__(self) -> "Training":
        if self.world.is_main:
            kept = {"keep": self.settings.keep_checkpoints, "pin": self.world.device.type == "cuda"}
            attempt = resume.attempt_id()
            self.saver = saver.Saver(
                self.run_dir, attempt=attempt, on_saved=self._record_saved, **kept
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.saver is not None:
            self.saver.close()

    def resume(self, found: stored.Checkpoint) -> None:
        """Continue from a checkpoint: rank 0 reads it, the others receive it."""
        world = self.world
        engine.fill_optimizer(self.optimizer)
        with world.together():
            if world.is_main:
                stored.restore(found, self.core, self.optimizer)
        if world.size > 1:
            for tensor in saver.tensors(stored.state_of(self.core, self.optimizer)):
                torch.distributed.broadcast(tensor, src=0)
        self.progress = Progress(**found.meta["progress"])
        self.resumed_from = str(found.path)
        if world.is_main:
            self._report_resumed(found)

    def _report_resumed(self, found: stored.Checkpoint) -> None:
        for change in self.changed:
            log.emit("CKPT", str(change))
        differences = self._differences(found)
        ranks = {"saved_by_ranks": found.meta["world_size"], "ranks": self.world.size}
        why = "; ".join(differences) or None
        log.emit(
            "CKPT", resumed=found.path, step=found.step, **ranks, exact=not differences, why=why
        )

    def _differences(self, found: stored.Checkpoint) -> list[str]:
        """Return why the next steps are not those, to the bit, that the training would have had without a break."""
        differences = [str(change) for change in self.changed if change.has_effect]
        before, now = found.meta["world_size"], self.world.size
        if before != now:
            differences.append(f"{before} ranks there, {now} here")
        micro = self.batching.micro_batch
        return differences + arithmetic.differences(found, self.settings, micro, self.world)

    def run(self, began: float) -> str:
        """Run the steps that are left; write the files that people and the batch script read."""
        world, schedule = self.world, self.schedule
        if world.is_main:
            (self.run_dir / report.SUMMARY).unlink(missing_ok=True)  # of an earlier attempt
            files.write_json(self.run_dir / config.FILE, self.record)
            start = {
                "step": self.progress.step,
                "total_steps": schedule.steps,
                **distributed.describe(world),
            }
            sinks = [
                trackers.Background(target) for target in trackers.targets(self.run_dir, os.environ)
            ]
            self.metrics = report.Metrics(self.run_dir, start=start, sinks=sinks)
        about = {"parameters": self.parameters, "mflop_per_token": self._flops_per_token() / 1e6}
        log.emit("MODEL", **self.identity, precision=self.settings.precision, **about)
        b = self.batching
        steps = {
            "steps": schedule.steps,
            "epoch_steps": schedule.epoch_steps,
            "from_step": self.progress.step,
        }
        batch = {
            "global_batch": b.global_batch,
            "micro_batch": b.micro_batch,
            "grad_accum": b.accumulate,
        }
        log.emit("TRAIN", **steps, **batch, tokens_per_step=self.step_tokens)
        state = resume.DONE if self.progress.step >= schedule.steps else self._loop()
        if self.saver is not None:
            self.saver.wait()
            self._conclude(state, began, self.saver)
        return state

    def _loop(self) -> str:
        world, schedule = self.world, self.schedule
        first = self.progress.step
        pending: list[tuple[Tensor, Tensor, bool]] = []  # of each step since the ranks last agreed
        agreement = resume.Agreement(world, at_most=self.settings.log_every)
        since, last_save = time.perf_counter(), time.monotonic()
        span = {"rank": world.rank, "size": world.size, "start": first, "stop": schedule.steps}
        data = batches.Reader(self.dataset, self.plan, **span, device=world.device)
        self.core.train()
        trace = self.run_dir / "profile" / f"{resume.attempt_id()}.rank-{world.rank}.json.gz"
        with data, profiling.recording(self.settings, world.rank, first + 1, trace) as recorder:
            for step in range(first + 1, schedule.steps + 1):
                with self.pace.own():
                    rows_BT1 = data.next()
                engine.seed_all(
                    self.settings.seed, world.rank, step
                )  # dropout has no state that a resume would need
                pending.append(self._step(rows_BT1, lr=schedule.lr(step - 1)))
                if recorder:
                    recorder.step()
                if step == first + 1 and self.saver is not None:
                    self.saver.prepare(stored.state_of(self.core, self.optimizer))
                at_end = schedule.ends_epoch(step)
                if not agreement.is_due() and not at_end:
                    continue

                losses, norms, learned = zip(*pending, strict=True)
                own = torch.stack(losses).double().tolist()  # on a GPU, here the CPU waits for it
                norms = torch.stack(norms).tolist()
                # Such a gradient has spoilt the weights already, though the loss before it was fine.
                own = [
                    loss if math.isfinite(norm) else math.nan
                    for loss, norm in zip(own, norms, strict=True)
                ]
                now = time.perf_counter()
                elapsed, since = now - since, now
                save_s = 60 * self.settings.save_minutes
                save_due = world.is_main and 0 < save_s < time.monotonic() - last_save
                stop, (save, *sums) = agreement.reach(
                    elapsed, [float(save_due), *own, *self.pace.share()]
                )
                sums, seconds = sums[: len(own)], sums[len(own) :]
                means = [
                    v / world.size if counts else None
                    for v, counts in zip(sums, learned, strict=True)
                ]
                if step - len(pending) > first:
                    self.pace.add(seconds, elapsed)
                self._record(step, means, norms, elapsed, counted=step - len(pending) > first)
                pending.clear()

                if at_end:
                    self._end_epoch(step)
                elif stop or save:
                    self._save(step, ends_epoch=False)
                if at_end or stop or save:
                    last_save, since = time.monotonic(), time.perf_counter()
                if self.saver is not None:
                    self.saver.check()
                if stop and step < schedule.steps:
                    return resume.PREEMPTED
        return resume.DONE

    def _step(self, rows_BT1: Tensor, *, lr: float) -> tuple[Tensor, Tensor, bool]:
        """Do one optimiser step.

        Return this rank's share of the loss (the step's is their mean) and the gradients' norm, both still on the
        device, and whether any target of the step counted.
        """
        device, parts = self.world.device, self.batching.accumulate
        weights, learned = self._weights(rows_BT1)
        tokens_BT, targets_BT = batches.split_batch(
            rows_BT1.to(device, non_blocking=True), self.mask_bit
        )
        total = torch.zeros((), device=device)
        size = self.batching.micro_batch
        for part in range(parts):
            last = part == parts - 1
            rows = slice(part * size, (part + 1) * size)
            with contextlib.nullcontext() if last or self.world.size == 1 else self.ddp.no_sync():  # type: ignore[operator]
                with (
                    torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.autocast),
                    self.pace.own(),
                ):
                    loss = self.ddp(tokens_BT[rows], targets_BT[rows])
                (loss * weights[part]).backward()
            total += loss.detach() * weights[part]
        limit = self.settings.clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.core.parameters(), limit)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.saver is not None:
            self.saver.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm, learned > 0

    def _weights(self, rows_BT1: Tensor) -> tuple[list[float], float]:
        """Compute the weight of each of this rank's forward passes in the step, and the step's number of targets.

        DDP takes the mean of the ranks' gradients. With prompts masked the passes have unlike numbers of targets: each
        then counts for as many as it has, so that the step's loss is the mean over its tokens, however it is spread.
        """
        parts, size = self.batching.accumulate, self.world.size
        if self.mask_bit is None:
            return [1 / parts] * parts, float(self.step_tokens)
        counts = batches.num_learned(rows_BT1, self.mask_bit).view(parts, -1).sum(dim=1).tolist()
        (learned,) = self.world.sum([float(sum(counts))])
        return [count * size / max(1.0, learned) for count in counts], learned

    def _record(
        self,
        step: int,
        losses: list[float | None],
        norms: list[float],
        elapsed: float,
        *,
        counted: bool,
    ) -> None:
        """Record the steps up to `step`, one for each loss; a step that had nothing to learn has none."""
        p, tokens, total = self.progress, self.step_tokens, self.schedule.steps
        begin = step - len(losses) + 1
        for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=begin):
            if loss is not None and not math.isfinite(loss):
                what = f"the loss is {loss}, the gradients' norm {norm} at step {number}"
                raise errors.SharedError(f"{what}; {_DIVERGED}")
        rate = len(losses) * tokens / elapsed
        mfu = self._mfu(rate)
        if counted:
            self.train_s += elapsed
            self.train_tokens += len(losses) * tokens
        for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=begin):
            p.first_loss = loss if p.first_loss is None else p.first_loss
            p.last_loss = p.last_loss if loss is None else loss
            p.step, p.tokens = number, p.tokens + tokens
            epoch = self.schedule.epoch(number)
            figures = {
                "loss": loss,
                "lr": self.schedule.lr(number - 1),
                "grad_norm": norm,
                "tokens_per_second": rate,
            }
            if self.metrics is not None:
                more: dict[str, object] = {} if mfu is None else {"mfu": mfu}
                if number == step:
                    more |= {
                        "memory_mib": self._memory_mib(),
                        **({"slowest": s} if (s := self.pace.slowest) else {}),
                    }
                place = {"step": number, "total_steps": total, "epoch": epoch, "tokens": p.tokens}
                self.metrics.add({"kind": "step", **place, **figures, "time": time.time(), **more})
            if number in (1, total) or number % self.settings.log_every == 0:
                use = {"mfu": mfu, "memory_mib": self._memory_mib()}
                log.emit("TRAIN", step=f"{number}/{total}", epoch=epoch, **figures, **use)
        if self.metrics is not None:
            self.metrics.flush()

    def _record_saved(self, record: dict[str, typing.Any]) -> None:
        if self.metrics is not None:
            self.metrics.add(record)
            self.metrics.flush()

    def _end_epoch(self, step: int) -> None:
        p, epoch = self.progress, self.schedule.epoch(step)
        began = time.perf_counter()
        p.val_loss = self.evaluate()
        if p.val_loss is not None and not math.isfinite(
            p.val_loss
        ):  # such weights are of no use to go on from
            raise errors.SharedError(
                f"the validation loss is {p.val_loss} at step {step}; {_DIVERGED}"
            )
        is_best = p.val_loss is not None and (p.best_loss is None or p.val_loss < p.best_loss)
        if is_best:
            p.best_loss, p.best_step = p.val_loss, step
        figures = {
            "val_loss": p.val_loss,
            "perplexity": None if p.val_loss is None else perplexity(p.val_loss),
        }
        if self.metrics is not None and p.val_loss is not None:
            place = {"step": step, "epoch": epoch, "tokens": p.tokens}
            self.metrics.add({"kind": "eval", **place, **figures, "time": time.time()})
            self.metrics.flush()
        place = {"epoch": f"{epoch}/{self.schedule.epoch(self.schedule.steps)}", "step": step}
        eval_s = time.perf_counter() - began
        log.emit("EPOCH", **place, train_loss=p.last_loss, **figures, best=is_best, eval_s=eval_s)
        self._save(step, ends_epoch=True, is_best=is_best)

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Return the mean loss over the fixed validation set, in nats per token, or None when there is no such set.

        The model runs as it is, never compiled: without gradients, and for the last rows of a rank in other shapes, it
        would be compiled again, for a few passes only. Which is quicker was not measured on a GPU.
        """
        world = self.world
        count: int = self.take_val.count  # type: ignore[attr-defined]
        if not count:
            return None
        self.core.eval()
        total, tokens = 0.0, 0.0
        first, last = world.rank * count // world.size, (world.rank + 1) * count // world.size
        for at in range(first, last, self.batching.micro_batch):
            rows = self.take_val(at, min(last, at + self.batching.micro_batch))
            tokens_BT, targets_BT = batches.split_batch(
                torch.from_numpy(rows.astype(np.int64)), self.mask_bit
            )
            learned = int((targets_BT != model.IGNORED).sum())
            if learned:
                with torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=self.autocast):
                    loss = self.core(tokens_BT.to(world.device), targets_BT.to(world.device))
                total, tokens = total + loss.item() * learned, tokens + learned
        self.core.train()
        total, tokens = world.sum([total, tokens])
        return total / tokens if tokens else None

    def _save(self, step: int, *, ends_epoch: bool, is_best: bool = False) -> None:
        name = stored.name_of(self.schedule.epoch(step), step, ends_epoch=ends_epoch)
        if self.saver is not None:
            state = stored.state_of(self.core, self.optimizer)
            self.saver.save(name, state, self._meta(), is_best=is_best)

    def _meta(self) -> dict[str, typing.Any]:
        data = self.dataset
        return {
            "format": stored.DCP,
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

    def _conclude(self, state: str, began: float, saved: saver.Saver) -> None:
        """Write summary, curve and outcome. Rank 0 only."""
        assert self.metrics is not None
        p = self.progress
        facts = {"step": p.step, "loss": p.last_loss, "checkpoint": saved.last or self.resumed_from}
        self.metrics.close()
        if state == resume.PREEMPTED:  # printed before the rest, which may be cut short
            report.write_outcome(self.run_dir, state, **facts)
            log.emit("PREEMPT", "asked to stop: saved", **facts)
        curve = self._draw_curve(self.metrics.path)
        rate = self.train_tokens / self.train_s if self.train_s else None
        if state == resume.DONE and isinstance(self.core, finetune.Wrapped):
            finetune.export(self.core, self.settings, self.run_dir / "model")
        losses: dict[str, typing.Any] = {
            "first_loss": p.first_loss,
            "last_loss": p.last_loss,
            "best_loss": p.best_loss,
        }
        figures = {
            "tokens": p.tokens,
            "tokens_per_second": rate,
            "mfu": self._mfu(rate) if rate else None,
        }
        summary = report.write_summary(
            self.world,
            self.run_dir,
            self.settings.report_json,
            workload=self.identity["kind"],
            state=state,
            steps=p.step,
            **losses,
            **figures,
            elapsed_s=time.perf_counter() - began,
            checkpoint=facts["checkpoint"],
            loss_png=str(curve) if curve else None,
            val_loss=p.val_loss,
            best_step=p.best_step,
            parameters=self.parameters,
            precision=self.settings.precision,
            flops_per_token=self._flops_per_token(),
            resumed_from=self.resumed_from,
            checkpoint_stall_s=max(saved.stall_s, default=None),
            data=str(self.dataset.root),
        )
        for sink in self.metrics.sinks:
            with contextlib.suppress(Exception):  # the run is over, and its own files are written
                sink.close(summary)
        if state == resume.DONE:
            log.emit("RESULT", **losses, val_loss=p.val_loss, **figures, curve=curve)
            end = {
                "steps": p.step,
                "checkpoint": facts["checkpoint"],
                "elapsed_s": summary["elapsed_s"],
            }
            log.emit("DONE", workload=self.identity["kind"], **end)
            report.write_outcome(self.run_dir, state, **facts)

    def _draw_curve(self, metrics: pathlib.Path) -> pathlib.Path | None:
        """Write loss.png; a training never fails for its picture."""
        curve = self.run_dir / report.CURVE
        title = f"{self.run_dir.name}: {self.identity['kind']} on {self.world.size} ranks"
        try:
            report.draw_curve(files.read_records(metrics), curve, title)
        except (ImportError, OSError, RuntimeError, ValueError) as e:
            log.warn("RESULT", f"no {report.CURVE}: {e}")
            return None
        return curve

    def _set_modes(self) -> None:
        if self.settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        engine.seed_all(self.settings.seed)  # of the weights, the same on every rank

    def _flops_per_token(self) -> float:
        if isinstance(self.core, model.GPT):
            return shapes.flops_per_token(self.core.shape, self.parameters)
        return 6.0 * self.parameters

    def _mfu(self, tokens_per_second: float) -> float | None:
        """Return model FLOP/s (see shapes.flops_per_token) over the sum of the devices' dense bf16 peaks."""
        device = self.world.device
        peak = (
            shapes.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        )
        return (
            tokens_per_second * self._flops_per_token() / (peak * self.world.size) if peak else None
        )

    def _memory_mib(self) -> float:
        if self.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def perplexity(loss: float) -> float:
    """Return e to the loss, infinite where it would overflow."""
    return math.exp(loss) if loss < 700 else math.inf

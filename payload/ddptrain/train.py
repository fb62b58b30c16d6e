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
import time
import typing

import numpy as np
import torch
from torch import Tensor, nn

from ddptrain import (
    checkpoint,
    config,
    crossentropy,
    distributed,
    engine,
    errors,
    files,
    finetune,
    hardware,
    markers,
    model,
    planning,
    profiling,
    progress,
    reader,
    report,
    resume,
    sampler,
    shapes,
    shards,
)

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
    training = Training(
        settings=decided.settings, world=world, dataset=decided.dataset, plan=decided.plan, batching=decided.batching,
        schedule=decided.schedule, kind=decided.kind,
    )  # fmt: skip
    with training:
        if decided.found:
            training.resume(decided.found)
        return training.run(began)


class Training:
    """The model, its optimiser and everything around the loop; a context manager."""

    def __init__(
        self, *, settings: config.Config, world: distributed.World, dataset: shards.Dataset, plan: sampler.Plan,
        batching: planning.Batching, schedule: planning.Schedule, kind: model.Kind,
    ) -> None:  # fmt: skip
        self.settings, self.world, self.dataset, self.plan = settings, world, dataset, plan
        self.batching, self.schedule, self.identity = batching, schedule, kind.identity
        assert settings.run_dir is not None
        self.run_dir: pathlib.Path = settings.run_dir
        self.progress = Progress()
        self._set_modes()
        self.core = kind.build().to(world.device)
        self.parameters = model.num_parameters(self.core)
        self.optimizer = engine.make_optimizer(self.core, settings, world.device)
        self.ddp = engine.wrap(self.core, settings, world)
        self.autocast = settings.precision == "bf16"
        self.saver: checkpoint.Saver | None = None
        self.metrics: report.Metrics | None = None
        self.mask_bit = reader.mask_bit(dataset)
        self.take_val = reader.fixed_rows(dataset, "val", plan.seq_len, settings.eval_rows)
        self.resumed_from: str | None = None
        self.gpu_use = hardware.GpuUse(world.device)
        self.train_s = 0.0  # time in training steps, the first one of the attempt not counted
        self.train_tokens = 0
        self.last_checkpoint: str | None = None

    def __enter__(self) -> "Training":
        if self.world.is_main and self.settings.checkpoint_format == "torch":
            self.saver = checkpoint.Saver(
                self.run_dir,
                keep=self.settings.keep_checkpoints,
                attempt=resume.attempt_id(),
                pin=self.world.device.type == "cuda",
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.saver is not None:
            self.saver.close()

    def resume(self, found: checkpoint.Checkpoint) -> None:
        """Take over a checkpoint: rank 0 reads it, the others receive it."""
        world = self.world
        engine.fill_optimizer(self.optimizer)
        if found.meta["format"] == "dcp":
            checkpoint.load_dcp(found.path, self.core, self.optimizer)
        with world.together():
            if world.is_main and found.meta["format"] == "torch":
                self.core.load_state_dict(checkpoint.load(found.path, "model"))
                self.optimizer.load_state_dict(checkpoint.load(found.path, "optimizer"))
        if world.size > 1 and found.meta["format"] == "torch":
            engine.broadcast_state(self.core, self.optimizer)
        is_exact = found.meta["world_size"] == world.size
        rngs: list[checkpoint.State] = []
        with world.together():
            if world.is_main and is_exact:
                rngs = checkpoint.load_random_states(found.path, world.size)
        if is_exact:
            checkpoint.restore_random_states(world.scatter(rngs))
        else:
            engine.seed_all(self.settings.seed + found.step, world.rank)
        self.progress = Progress(**found.meta["progress"])
        self.resumed_from = self.last_checkpoint = str(found.path)
        markers.emit(
            "CKPT", resumed=found.path, step=found.step, saved_by_ranks=found.meta["world_size"], ranks=world.size,
            exact=is_exact,
        )  # fmt: skip

    def run(self, began: float) -> str:
        """Run the steps that are left; write what people and the batch script want to know."""
        world, schedule = self.world, self.schedule
        if world.is_main:
            files.write_json(self.run_dir / "config.json", config.as_record(self.settings))
            self.metrics = report.Metrics(
                self.run_dir, from_step=self.progress.step, sinks=report.open_sinks(self.run_dir)
            )
        flops = self._flops_per_token()
        markers.emit(
            "MODEL", **{k: v for k, v in self.identity.items() if k != "kind"}, kind=self.identity["kind"],
            parameters=self.parameters,
            precision=self.settings.precision, mflop_per_token=flops / 1e6,
        )  # fmt: skip
        markers.emit(
            "TRAIN", steps=schedule.steps, epoch_steps=schedule.epoch_steps, global_batch=self.batching.global_batch,
            micro_batch=self.batching.micro_batch, grad_accum=self.batching.accumulate,
            tokens_per_step=self._tokens_per_step(),
            from_step=self.progress.step,
        )  # fmt: skip
        state = resume.DONE if self.progress.step >= schedule.steps else self._loop()
        if self.saver is not None:
            self.saver.wait()
            self.last_checkpoint = self.saver.last or self.last_checkpoint
        if world.is_main:
            self._conclude(state, began, flops)
        return state

    def _loop(self) -> str:
        world, schedule, progress_ = self.world, self.schedule, self.progress
        first = progress_.step
        pending_losses: list[Tensor] = []
        pending_norms: list[Tensor] = []
        pending_learned: list[bool] = []
        agreement = resume.Agreement(world, at_most=self.settings.log_every)
        since, last_save = time.perf_counter(), time.monotonic()
        bar = progress.Bar(schedule.steps, "training", unit="step", start=first, enabled=world.is_main)
        data = reader.Reader(
            self.dataset,
            self.plan,
            rank=world.rank,
            size=world.size,
            start=first,
            stop=schedule.steps,
            device=world.device,
        )
        self.core.train()
        with data, bar, self._recorder() as recorder:
            for step in range(first + 1, schedule.steps + 1):
                recorder.before(step)
                loss, norm, learned = self._step(data.next(), lr=schedule.lr(step - 1))
                recorder.after(step)
                pending_losses.append(loss)
                pending_norms.append(norm)
                pending_learned.append(learned)
                if step == first + 1 and self.saver is not None:
                    self.saver.prepare(self.core.state_dict(), self.optimizer.state_dict())
                at_end = schedule.ends_epoch(step)
                if not agreement.is_due() and not at_end:
                    continue

                mean = torch.stack(pending_losses).double().tolist()  # on a GPU, here the CPU waits for it
                norms = torch.stack(pending_norms).tolist()
                # Such a gradient has spoilt the weights already, though the loss before it was fine.
                mean = [loss if math.isfinite(norm) else math.nan for loss, norm in zip(mean, norms, strict=True)]
                now = time.perf_counter()
                elapsed, since = now - since, now
                save_due = (
                    self.settings.save_minutes > 0 and time.monotonic() - last_save > 60 * self.settings.save_minutes
                )
                stop, (save, *sums) = agreement.reach(elapsed, [float(world.is_main and save_due), *mean])
                losses = [v / world.size if learned else None for v, learned in zip(sums, pending_learned, strict=True)]
                self._record(step, losses, norms, elapsed, counted=step - len(mean) >= first + 1)
                bar.advance(len(losses), "" if progress_.last_loss is None else f"loss {progress_.last_loss:.3f}")
                pending_losses.clear()
                pending_norms.clear()
                pending_learned.clear()

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

    def _recorder(self) -> profiling.Recorder:
        settings, rank = self.settings, self.world.rank
        kind = settings.profile if rank in config.profiled_ranks(settings.profile_ranks) else None
        path = self.run_dir / "profile" / f"{resume.attempt_id()}.rank-{rank}.json.gz"
        return profiling.Recorder(kind, config.profiled_steps(settings.profile_steps), path, self.world.device)

    def _step(self, rows_BT1: Tensor, *, lr: float) -> tuple[Tensor, Tensor, bool]:
        """Do one optimiser step.

        Return this rank's share of the loss (the step's is their mean) and the gradients' norm, both still on the
        device, and whether any target of the step counted.
        """
        device, parts = self.world.device, self.batching.accumulate
        weights, learned = self._weights(rows_BT1)
        tokens_BT, targets_BT = reader.split_batch(rows_BT1.to(device, non_blocking=True), self.mask_bit)
        total = torch.zeros((), device=device)
        size = self.batching.micro_batch
        for part in range(parts):
            last = part == parts - 1
            rows = slice(part * size, (part + 1) * size)
            with contextlib.nullcontext() if last or self.world.size == 1 else self.ddp.no_sync():  # type: ignore[operator]
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.autocast):
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
            return [1 / parts] * parts, float(self._tokens_per_step())
        counts = reader.num_learned(rows_BT1, self.mask_bit).view(parts, -1).sum(dim=1).tolist()
        (learned,) = self.world.sum([float(sum(counts))])
        return [count * size / max(1.0, learned) for count in counts], learned

    def _record(
        self, step: int, losses: list[float | None], norms: list[float], elapsed: float, *, counted: bool
    ) -> None:
        """Take note of the steps since the last sync; a step that nothing was learnt in has no loss."""
        p, tokens = self.progress, self._tokens_per_step()
        bad = next((i for i, loss in enumerate(losses) if loss is not None and not math.isfinite(loss)), None)
        if bad is not None:
            at = step - len(losses) + 1 + bad
            raise errors.SharedError(
                f"the loss is {losses[bad]}, the gradients' norm {norms[bad]} at step {at}; {_DIVERGED}"
            )
        rate = len(losses) * tokens / elapsed
        if counted:
            self.train_s += elapsed
            self.train_tokens += len(losses) * tokens
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
            number = step - len(losses) + 1 + i
            p.first_loss = loss if p.first_loss is None else p.first_loss
            p.last_loss = p.last_loss if loss is None else loss
            p.step, p.tokens = number, p.tokens + tokens
            lr = self.schedule.lr(number - 1)
            if self.metrics is not None:
                used = self._used() if number == step else {}
                self.metrics.add({
                    "kind": "step", "step": number, "epoch": self.schedule.epoch(number), "loss": loss, "lr": lr,
                    "grad_norm": norm,
                    "tokens": p.tokens, "tokens_per_second": rate, "time": time.time(), **used,
                })  # fmt: skip
            if number == 1 or number % self.settings.log_every == 0 or number == self.schedule.steps:
                markers.emit(
                    "TRAIN", step=f"{number}/{self.schedule.steps}", epoch=self.schedule.epoch(number), loss=loss,
                    lr=lr, grad_norm=norm,
                    tokens_per_second=rate, mfu=self._mfu(rate), memory_mib=self._memory_mib(),
                )  # fmt: skip
        if self.metrics is not None:
            self.metrics.flush()

    def _end_epoch(self, step: int) -> None:
        p = self.progress
        began = time.perf_counter()
        p.val_loss = self.evaluate()
        if p.val_loss is not None and not math.isfinite(p.val_loss):  # to go on from such weights would be no use
            raise errors.SharedError(f"the validation loss is {p.val_loss} at step {step}; {_DIVERGED}")
        is_best = p.val_loss is not None and (p.best_loss is None or p.val_loss < p.best_loss)
        if is_best:
            p.best_loss, p.best_step = p.val_loss, step
        epochs = self.schedule.epoch(self.schedule.steps)
        if self.metrics is not None and p.val_loss is not None:
            self.metrics.add({
                "kind": "eval", "step": step, "epoch": self.schedule.epoch(step), "val_loss": p.val_loss,
                "perplexity": perplexity(p.val_loss),
                "tokens": p.tokens, "time": time.time(),
            })  # fmt: skip
            self.metrics.flush()
        markers.emit(
            "EPOCH", epoch=f"{self.schedule.epoch(step)}/{epochs}", step=step, train_loss=p.last_loss,
            val_loss=p.val_loss,
            perplexity=perplexity(p.val_loss) if p.val_loss is not None else None, best=is_best,
            eval_s=time.perf_counter() - began,
        )  # fmt: skip
        self._save(step, ends_epoch=True, is_best=is_best)

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Return the mean loss over the fixed validation set, in nats per token, or None when there is no such set.

        The model runs as it is, never compiled: without gradients, and for the last rows of a rank in other shapes, it
        would be compiled anew, for a few passes only. Which is quicker was not measured on a GPU.
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
            tokens_BT, targets_BT = reader.split_batch(torch.from_numpy(rows.astype(np.int64)), self.mask_bit)
            learned = int((targets_BT != crossentropy.IGNORED).sum())
            if learned:
                with torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=self.autocast):
                    loss = self.core(tokens_BT.to(world.device), targets_BT.to(world.device))
                total, tokens = total + loss.item() * learned, tokens + learned
        self.core.train()
        total, tokens = world.sum([total, tokens])
        return total / tokens if tokens else None

    def _save(self, step: int, *, ends_epoch: bool, is_best: bool = False) -> None:
        """Write a checkpoint; every rank hands over its random states."""
        name = checkpoint.name_of(self.schedule.epoch(step), step, ends_epoch=ends_epoch)
        rngs = self.world.collect(checkpoint.random_states())
        if self.settings.checkpoint_format == "dcp":
            self.last_checkpoint = checkpoint.save_dcp(
                self.run_dir, name, attempt=resume.attempt_id(), module=self.core, optimizer=self.optimizer,
                meta=self._meta(), rngs=rngs,
                world=self.world, is_best=is_best, keep=self.settings.keep_checkpoints,
            )  # fmt: skip
        elif self.saver is not None:
            self.saver.save(
                name, self.core.state_dict(), self.optimizer.state_dict(), self._meta(), rngs, is_best=is_best
            )

    def _meta(self) -> dict[str, typing.Any]:
        return {
            "format": self.settings.checkpoint_format,
            "step": self.progress.step,
            "epoch": self.schedule.epoch(self.progress.step),
            "world_size": self.world.size,
            "progress": dataclasses.asdict(self.progress),
            "plan": dataclasses.asdict(self.plan),
            "model": self.identity,
            "data": {
                "name": self.dataset.name,
                "fingerprint": self.dataset.fingerprint,
                "tokenizer": self.dataset.tokenizer,
            },
            "config": config.as_record(self.settings),
            "torch": torch.__version__,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _conclude(self, state: str, began: float, flops: float) -> None:
        """Write summary, curve and outcome. Rank 0 only."""
        assert self.metrics is not None
        p = self.progress
        facts = {"step": p.step, "loss": p.last_loss, "checkpoint": self.last_checkpoint}
        self.metrics.close()
        if state == resume.PREEMPTED:  # printed before the rest, which may be cut short
            report.write_outcome(self.run_dir, state, **facts)
            markers.emit("PREEMPT", "asked to stop: saved", **facts)
        curve = self._draw_curve(self.metrics.path)
        rate = self.train_tokens / self.train_s if self.train_s else None
        if state == resume.DONE and isinstance(self.core, finetune.Wrapped):
            finetune.export(self.core, self.settings, self.run_dir / "model")
        stalls = self.saver.stall_s if self.saver else []
        summary = report.Summary(
            workload=self.identity["kind"], state=state, nodes=self.world.num_nodes, world_size=self.world.size,
            ranks=self.world.members,
            steps=p.step, first_loss=p.first_loss, last_loss=p.last_loss, best_loss=p.best_loss, tokens=p.tokens,
            tokens_per_second=rate,
            elapsed_s=time.perf_counter() - began, checkpoint=self.last_checkpoint,
            loss_png=str(curve) if curve else None,
            extra={
                "val_loss": p.val_loss, "best_step": p.best_step, "parameters": self.parameters,
                "precision": self.settings.precision,
                "mfu": self._mfu(rate) if rate else None, "flops_per_token": flops, "resumed_from": self.resumed_from,
                "checkpoint_stall_s": max(stalls) if stalls else None, "run_dir": str(self.run_dir),
                "data": str(self.dataset.root),
            },
        )  # fmt: skip
        report.write_summary(self.run_dir, summary)
        for sink in self.metrics.sinks:
            with contextlib.suppress(Exception):  # the run is over, and its own files are written
                sink.close(summary.as_record())
        if self.settings.report_json is not None:
            figures = {
                "world_size": self.world.size,
                "tokens": p.tokens,
                "elapsed": summary.elapsed_s,
                "tokens/s": rate,
            }
            files.write_json(self.settings.report_json, {**figures, **summary.as_record()})
        if state == resume.DONE:
            markers.emit(
                "RESULT", first_loss=p.first_loss, last_loss=p.last_loss, val_loss=p.val_loss, best_loss=p.best_loss,
                tokens=p.tokens,
                tokens_per_second=rate, mfu=summary.extra["mfu"], curve=curve,
            )  # fmt: skip
            markers.emit(
                "DONE",
                workload=self.identity["kind"],
                steps=p.step,
                checkpoint=self.last_checkpoint,
                elapsed_s=summary.elapsed_s,
            )
            report.write_outcome(self.run_dir, state, **facts)

    def _draw_curve(self, metrics: pathlib.Path) -> pathlib.Path | None:
        """Write loss.png; a training never fails for its picture."""
        curve = self.run_dir / report.CURVE
        title = f"{self.run_dir.name}: {self.identity['kind']} on {self.world.size} ranks"
        try:
            report.draw_curve(report.read_metrics(metrics), curve, title)
        except (ImportError, OSError, RuntimeError, ValueError) as e:
            markers.warn("RESULT", f"no {report.CURVE}: {e}")
            return None
        return curve

    def _set_modes(self) -> None:
        if self.settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        # The weights are the same on every rank; engine.wrap seeds anew, so that each rank's dropout is its own.
        engine.seed_all(self.settings.seed, 0)

    def _tokens_per_step(self) -> int:
        return self.batching.global_batch * self.plan.seq_len

    def _flops_per_token(self) -> float:
        if isinstance(self.core, model.GPT):
            return shapes.flops_per_token(self.core.shape, self.parameters)
        return 6.0 * self.parameters

    def _mfu(self, tokens_per_second: float) -> float | None:
        """Return model FLOP/s (see shapes.flops_per_token) over the sum of the devices' dense bf16 peaks."""
        peak = hardware.peak_flops(self.world.device)
        return tokens_per_second * self._flops_per_token() / (peak * self.world.size) if peak else None

    def _used(self) -> dict[str, float]:
        """Measure this rank's use of memory and GPU, for metrics.jsonl."""
        percent = self.gpu_use.percent()
        return {"memory_mib": self._memory_mib()} | ({} if percent is None else {"gpu_percent": percent})

    def _memory_mib(self) -> float:
        if self.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        return hardware.peak_resident_bytes() / 2**20


def perplexity(loss: float) -> float:
    """Return e to the loss, infinite where it would overflow."""
    return math.exp(loss) if loss < 700 else math.inf

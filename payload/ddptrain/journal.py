"""The journal of a training: the lines of its log, its files for people, and its outcome."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import dataclasses
import math
import os
import pathlib
import resource
import time
import types
import typing

import torch

from ddptrain import planning, shapes
from ddptrain.checkpoint import progress
from ddptrain.ground import attempt, files, log
from ddptrain.options import config
from ddptrain.records import curve, metrics, summary, trackers
from ddptrain.world import distributed

Record = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step as all ranks know it."""

    number: int
    loss: float | None  # None: nothing to learn in it
    norm: float  # of the gradients

    @property
    def is_finite(self) -> bool:
        """Return whether the training can go on from it."""
        return self.loss is None or math.isfinite(self.loss)


@dataclasses.dataclass(frozen=True)
class Size:
    """How much a training computes."""

    parameters: int
    flops_per_token: float
    step_tokens: int


class Journal:
    """Records the events of a training, one call for each, on every rank; only rank 0 writes."""

    def __init__(
        self,
        decided: planning.Decided,
        world: distributed.World,
        so_far: progress.Progress,
        size: Size,
    ) -> None:
        self._settings = decided.settings
        self._schedule = decided.schedule
        self._batching = decided.batching
        self._identity = decided.kind.identity
        self._dataset = decided.dataset
        self._world = world
        self._so_far = so_far
        self._size = size
        self._run_dir = pathlib.Path(decided.settings.run_dir)
        self._metrics: metrics.Metrics | None = None
        self._trackers = trackers.Trackers({})
        # Of the steps of this attempt, but for those up to the first agreement
        self._measured_s = 0.0
        self._measured_tokens = 0
        # Since the sites' last exchange
        self._alone_s = 0.0
        self._alone_steps = 0
        self._sites = _hosts_of_sites(world.members)

    def begin(self, record: Record) -> None:
        """Write the run's settings, and print the model and the plan."""
        so_far = self._so_far
        if self._world.is_main:
            (self._run_dir / summary.FILE).unlink(missing_ok=True)  # of an earlier attempt
            files.write_json(self._run_dir / config.FILE, record)
            start = {"step": so_far.step, "total_steps": self._schedule.steps}
            start |= distributed.describe(self._world)
            if self._sites:
                start["sites"] = self._sites
            if self._dataset.not_learned:
                start["not_learned"] = self._dataset.not_learned
            self._trackers = trackers.Trackers(trackers.targets(self._run_dir, os.environ))
            self._metrics = metrics.Metrics(self._run_dir, start=start, sinks=self._trackers)
        for line in self._dataset.not_learned:
            log.warn("DATA", line)
        log.emit(
            "MODEL",
            **self._identity,
            precision=self._settings.precision,
            parameters=self._size.parameters,
            mflop_per_token=self._size.flops_per_token / 1e6,
        )
        log.emit(
            "TRAIN",
            steps=self._schedule.steps,
            epoch_steps=self._schedule.epoch_steps,
            from_step=so_far.step,
            global_batch=self._batching.global_batch,
            micro_batch=self._batching.micro_batch,
            grad_accum=self._batching.accumulate,
            tokens_per_step=self._size.step_tokens,
        )

    def steps(
        self,
        steps: list[Step],
        elapsed_s: float,
        *,
        is_measured: bool,
        slowest: dict[str, object],
        exchanges: collections.abc.Mapping[str, float] = types.MappingProxyType({}),
    ) -> None:
        """Record the steps since the last call, which took `elapsed_s`, and the slowest rank.

        `exchanges` are the figures of the sites' exchanges in these steps.
        """
        tokens = len(steps) * self._size.step_tokens
        rate = tokens / elapsed_s
        synced = self._per_step(exchanges, elapsed_s, len(steps))
        if is_measured:
            self._measured_s += elapsed_s
            self._measured_tokens += tokens
        for step in steps:
            self._so_far.advance(step.number, self._size.step_tokens, step.loss)
            is_last = step is steps[-1]
            self._step(step, rate, slowest, synced if is_last else {}, is_last=is_last)
        self._flush()

    def _per_step(
        self, exchanges: collections.abc.Mapping[str, float], elapsed_s: float, num_steps: int
    ) -> Record:
        """Return an exchange's figures, its share of the time, bytes per step; {} before one."""
        self._alone_s += elapsed_s
        self._alone_steps += num_steps
        if not exchanges.get("sync_s"):
            return {}
        found: Record = dict(exchanges)
        found["sites"] = self._sites  # for who reads only the end of the file
        found["sync_share"] = found["sync_s"] / self._alone_s
        found["sync_bytes_per_step"] = found["sync_mib"] * 2**20 / self._alone_steps
        self._alone_s = 0.0
        self._alone_steps = 0
        return found

    def _step(
        self,
        step: Step,
        rate: float,
        slowest: dict[str, object],
        synced: Record,
        *,
        is_last: bool,
    ) -> None:
        total = self._schedule.steps
        epoch = self._schedule.epoch(step.number)
        mfu = self._mfu(rate)
        figures = {
            "loss": step.loss,
            "lr": self._schedule.lr(step.number - 1),
            "grad_norm": step.norm,
            "tokens_per_second": rate,
        }
        more: Record = dict(synced)
        if mfu is not None:
            more["mfu"] = mfu
        if is_last:
            more["memory_mib"] = _memory_mib(self._world.device)
        if is_last and slowest:
            more["slowest"] = slowest
        place = {"step": step.number, "total_steps": total, "epoch": epoch}
        place["tokens"] = self._so_far.tokens
        self._add({"kind": "step", **place, **figures, "time": time.time(), **more})

        if step.number in (1, total) or step.number % self._settings.log_every == 0:
            place = f"{step.number}/{total}"
            memory = _memory_mib(self._world.device)
            log.emit("TRAIN", step=place, epoch=epoch, **figures, mfu=mfu, memory_mib=memory)

    def evaluation(self, step: int, *, is_best: bool, seconds: float) -> None:
        """Take the validation after a step, which ends an epoch."""
        so_far = self._so_far
        epoch = self._schedule.epoch(step)
        figures: Record = {"val_loss": so_far.val_loss, "perplexity": None}
        if so_far.val_loss is not None:
            figures["perplexity"] = perplexity(so_far.val_loss)
            place = {"step": step, "epoch": epoch, "tokens": so_far.tokens}
            self._add({"kind": "eval", **place, **figures, "time": time.time()})
            self._flush()
        log.emit(
            "EPOCH",
            epoch=f"{epoch}/{self._schedule.epoch(self._schedule.steps)}",
            step=step,
            train_loss=so_far.last_loss,
            **figures,
            best=is_best,
            eval_s=seconds,
        )

    def sync(self) -> None:
        """Make the records durable, from another thread: no checkpoint may outlive them."""
        if self._metrics is not None:
            self._metrics.sync()

    def saved(self, record: Record) -> None:
        """Take the record of a checkpoint that is complete; from another thread."""
        self._add(record)
        self._flush()

    def finish(
        self,
        state: str,
        *,
        checkpoint: str | None,
        resumed_from: str | None,
        stall_s: float | None,
        elapsed_s: float,
    ) -> None:
        """Write summary, curve and outcome. Rank 0 only."""
        assert self._metrics is not None
        self._metrics.close()
        so_far = self._so_far
        facts = {"step": so_far.step, "loss": so_far.last_loss, "checkpoint": checkpoint}
        if state == attempt.PREEMPTED:  # printed before the rest, which may be cut short
            attempt.write_outcome(self._run_dir, state, **facts)
            log.emit("PREEMPT", "asked to stop: saved", **facts)

        drawn = self._draw()
        losses: Record = {
            "first_loss": so_far.first_loss,
            "last_loss": so_far.last_loss,
            "best_loss": so_far.best_loss,
        }
        rate = self._measured_tokens / self._measured_s if self._measured_s else None
        figures: Record = {
            "tokens": so_far.tokens,
            "tokens_per_second": rate,
            "mfu": self._mfu(rate) if rate else None,
        }
        written = summary.write(
            self._world,
            self._run_dir,
            self._settings.report_json,
            workload=self._identity["kind"],
            state=state,
            steps=so_far.step,
            **losses,
            **figures,
            elapsed_s=elapsed_s,
            checkpoint=checkpoint,
            loss_png=str(drawn) if drawn else None,
            val_loss=so_far.val_loss,
            best_step=so_far.best_step,
            parameters=self._size.parameters,
            precision=self._settings.precision,
            flops_per_token=self._size.flops_per_token,
            resumed_from=resumed_from,
            checkpoint_stall_s=stall_s,
            data=str(self._dataset.root),
            not_learned=self._dataset.not_learned,
        )
        self._trackers.close(written)
        if state != attempt.DONE:
            return
        log.emit("RESULT", **losses, val_loss=so_far.val_loss, **figures, curve=drawn)
        log.emit(
            "DONE",
            workload=self._identity["kind"],
            steps=so_far.step,
            checkpoint=checkpoint,
            elapsed_s=elapsed_s,
        )
        attempt.write_outcome(self._run_dir, state, **facts)

    def _draw(self) -> pathlib.Path | None:
        """Write loss.png; a training never fails for its picture."""
        assert self._metrics is not None
        path = self._run_dir / curve.FILE
        title = f"{self._run_dir.name}: {self._identity['kind']} on {self._world.size} ranks"
        try:
            curve.draw(files.read_records(self._metrics.path), path, title)
        except (ImportError, OSError, RuntimeError, ValueError) as e:
            log.warn("RESULT", f"no {curve.FILE}: {e}")
            return None
        return path

    def _add(self, record: Record) -> None:
        if self._metrics is not None:
            self._metrics.add(record)

    def _flush(self) -> None:
        if self._metrics is not None:
            self._metrics.flush()

    def _mfu(self, tokens_per_second: float) -> float | None:
        """Return model FLOP/s (shapes.flops_per_token) over the devices' dense bf16 peaks."""
        device = self._world.device
        if device.type != "cuda":
            return None
        peak = shapes.peak_flops(torch.cuda.get_device_name(device))
        if peak is None:
            return None
        return tokens_per_second * self._size.flops_per_token / (peak * self._world.size)


def _hosts_of_sites(members: list[dict[str, object]]) -> str:
    """Return the hosts of each site such as `a,b c`; "" without exchanges."""
    found: dict[object, dict[str, None]] = {}
    for member in members:
        if "site" in member:
            found.setdefault(member["site"], {})[str(member["host"])] = None
    return " ".join(",".join(hosts) for hosts in found.values())


def perplexity(loss: float) -> float:
    """Return e to the loss, infinite if it would overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def _memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

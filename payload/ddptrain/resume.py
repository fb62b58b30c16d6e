"""Stop, save and resume, for any training loop: what the job asks of a script, in one module.

A job that must make way creates the file `$STOP_FILE`, or sends SIGTERM or SIGUSR1. The script saves, reports the
outcome `preempted` and ends; the job is queued again, and the same command continues from its newest complete
checkpoint in `$RUN_DIR`. docs/howto/resume.md has a whole script. Needs torch when used, not when imported.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import os
import pathlib
import sys
import time
import typing

from ddptrain.ground import errors, files, log
from ddptrain.records import report, script_log

if typing.TYPE_CHECKING:
    from ddptrain.world import distributed

DONE, PREEMPTED = "done", "preempted"  # outcomes
RUN_DIR, STOP_FILE, ATTEMPT = "RUN_DIR", "STOP_FILE", "RUN_ATTEMPT_ID"  # what the job sets
SCRIPT = "script"  # the format of a script's checkpoints: only it knows what the files mean
TARGET_S = 1.0  # how long a request to stop may go unnoticed
_NAMES = {  # what libraries call the quantities that every view of a run knows
    **dict.fromkeys(("train_loss", "train/loss", "train_loss_step", "loss_step"), "loss"),
    **dict.fromkeys(
        ("eval_loss", "eval/loss", "val/loss", "valid_loss", "validation_loss"), "val_loss"
    ),
    "learning_rate": "lr",
}
_AT_MOST = (
    50  # steps between two agreements: steps may become slower, and the ranks do not know before
)


def folder() -> pathlib.Path:
    """Return where this run saves: the job's run directory, or outside of a job `run` in the current directory."""
    return pathlib.Path(os.environ.get(RUN_DIR) or "run").absolute()


def attempt_id() -> str:
    """Return the name of this attempt at the run, `local` outside of a job."""
    return os.environ.get(ATTEMPT) or "local"


class Agreement:
    """Whether to stop, decided by all ranks at the same step. Any rank's signal counts, and rank 0's look at the file.

    The ranks agree about each TARGET_S, at a step that all of them know; every other step costs one comparison.
    """

    def __init__(self, world: "distributed.World", *, at_most: int = _AT_MOST) -> None:
        self._world, self._at_most = world, at_most
        self._stop_file = pathlib.Path(path) if (path := os.environ.get(STOP_FILE)) else None
        self._steps, self._interval = 0, 1

    def is_due(self) -> bool:
        """Count a step, and return whether the ranks agree after it."""
        self._steps += 1
        return self._steps >= self._interval

    def reach(
        self, elapsed_s: float, values: collections.abc.Sequence[float] = ()
    ) -> tuple[bool, list[float]]:
        """Return whether to stop, and the sums of `values` over the ranks, which cost nothing more. All ranks call it.

        `elapsed_s` is the time of the steps since the last agreement.
        """
        wanted = min(self._at_most, max(1, round(TARGET_S * self._steps / max(elapsed_s, 1e-6))))
        interval = float(wanted) if self._world.is_main else 0.0
        *sums, stop, interval = self._world.sum([*values, float(self._is_asked()), interval])
        self._steps, self._interval = 0, int(interval)
        return stop > 0, sums

    def _is_asked(self) -> bool:
        if self._world.stop_requested.is_set():
            return True
        return self._world.is_main and self._stop_file is not None and self._stop_file.exists()


class Run:
    """This attempt at a run, for a script that connects its ranks itself. Every rank makes one, in its main thread.

    From then on SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 ask the script to stop. `keep` is the number of checkpoints that
    stay. Raises UserError when the run has checkpoints and none of them is complete.
    """

    def __init__(self, *, keep: int = 2) -> None:
        from ddptrain.checkpoint import stored
        from ddptrain.world import distributed

        self.folder, self.attempt = folder(), attempt_id()
        self._keep, self._world = keep, distributed.adopted()
        self.rank, self.size = self._world.rank, self._world.size
        log.setup(rank=self.rank)
        found: stored.Checkpoint | None = None
        with self._world.together():
            if self._world.is_main:
                if keep < 2:
                    raise errors.UserError(
                        f"keep={keep}: must be at least 2, or a crash while saving could leave none"
                    )
                files.need_folder(self.folder, RUN_DIR)
                stored.remove_leftovers(self.folder)
                found = stored.newest(self.folder, "move them away to start over")
        found = self._world.broadcast(found)
        self.resumed: pathlib.Path | None = (
            found.path if found else None
        )  # the newest complete checkpoint
        self.step: int = found.step if found else 0  # its step
        if self.resumed:
            log.emit("CKPT", resumed=self.resumed, step=self.step, attempt=self.attempt)
        self._saved = str(self.resumed) if self.resumed else None
        self._agreement, self._since = Agreement(self._world), time.perf_counter()
        self._logbook: script_log.Logbook | None = None

    def log(self, step: int, **metrics: object) -> None:
        """Append a line to metrics.jsonl: on rank 0, in the background; nothing is raised, whatever the values are.

        They are numbers, texts, or tensors of one element; one on a GPU is waited for.
        """
        if not self._world.is_main:
            return
        with contextlib.suppress(RuntimeError):  # no further thread can be started
            start = {"step": self.step, "attempt": self.attempt, "world_size": self.size}
            self._logbook = self._logbook or script_log.Logbook(self.folder / report.METRICS, start)
            self._logbook.add(step, metrics)

    def log_named(self, step: int, metrics: collections.abc.Mapping[str, object]) -> None:
        """Log what a library measured, with its names for losses and the learning rate replaced by ours."""
        named = {
            _NAMES.get(name, name): value
            for name, value in metrics.items()
            if name not in ("step", "self")
        }
        self.log(step, **named)

    def should_stop(self) -> bool:
        """Return whether to save and leave now: the same on every rank. Every rank calls it once after each step."""
        if not self._agreement.is_due():
            return False
        stop, _ = self._agreement.reach(time.perf_counter() - self._since)
        self._since = time.perf_counter()
        return stop

    @contextlib.contextmanager
    def saving(self, step: int, *, epoch: int = 0) -> collections.abc.Iterator[pathlib.Path]:
        """Yield a folder for this rank's files, `rank-<r>` of a checkpoint that appears whole or not at all.

        Every rank enters and leaves the block, also those that write nothing. Raises on all ranks when one fails.
        """
        from ddptrain.checkpoint import stored

        world, name = self._world, stored.name_of(epoch, step, ends_epoch=False)
        with contextlib.ExitStack() as stack:
            draft = stored.Draft(self.folder, name, self.attempt)
            with world.together():
                if world.is_main:
                    stack.enter_context(draft)
            with world.together():
                own = draft.path / f"rank-{self.rank:04d}"
                own.mkdir()
                yield own
                draft.adopt(own)
            listed = world.collect(draft.listed)
            with world.together():
                if world.is_main:
                    draft.listed = [entry for entries in listed for entry in entries]
                    path = draft.commit(self._meta(step, epoch))
                    stored.settle(self.folder, path, is_best=False, keep=self._keep)
                    self._saved = str(path)
                    log.emit("CKPT", saved=name, step=step)
        self._since = time.perf_counter()

    def seal(self, path: pathlib.Path, step: int) -> None:
        """Make a checkpoint in the run's folder count as complete that a library has written. Every rank calls it."""
        from ddptrain.checkpoint import stored

        self._world.barrier()  # every rank has written
        with self._world.together():
            if self._world.is_main:
                stored.seal(path, self._meta(step, 0))
                files.replace_link(self.folder / stored.LATEST, path.name)
                self._saved = str(path)
                log.emit("CKPT", saved=path.name, step=step)
        self._since = time.perf_counter()

    def leave(self, *, step: int, loss: float | None = None) -> typing.NoReturn:
        """Report the outcome `preempted` and end this process: the job is queued again. Every rank calls it.

        The exit code is 0 as at the end: torchrun makes 1 of any other, and starts the ranks again at once.
        """
        self._report(PREEMPTED, step, loss)
        log.emit("PREEMPT", "asked to stop: saved", step=step, loss=loss, checkpoint=self._saved)
        self._world.leave(with_script=True)
        sys.exit(0)

    def done(self, *, step: int, loss: float | None = None) -> None:
        """Report the outcome `done`. Every rank calls it, at the very end."""
        self._report(DONE, step, loss)
        self._world.leave(with_script=False)
        log.emit("DONE", step=step, loss=loss, checkpoint=self._saved)

    def _report(self, outcome: str, step: int, loss: float | None) -> None:
        self._world.barrier()  # no rank has failed
        if self._logbook is not None:
            self._logbook.end()
            self._logbook = None
        if self._world.is_main:
            report.write_outcome(self.folder, outcome, step=step, loss=loss, checkpoint=self._saved)

    def _meta(self, step: int, epoch: int) -> dict[str, object]:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        known = {
            "format": SCRIPT,
            "world_size": self.size,
            "attempt": self.attempt,
            "created": created,
        }
        return {"step": step, "epoch": epoch, **known}


def trainer_callback(run: Run) -> typing.Any:
    """Return a callback that logs what transformers' Trainer logs, and lets it stop, save and leave after a step.

    Its checkpoints count once every rank has written: give the Trainer `output_dir=str(run.folder)`, and
    `trainer.train(resume_from_checkpoint=...)` the path `run.resumed`.
    """
    import transformers  # pyright: ignore[reportMissingImports] - an optional extra

    class Callback(transformers.TrainerCallback):
        """Asks at each step's end; on_train_end runs when the last checkpoint is complete."""

        is_stopping = False

        def on_train_begin(self, args: typing.Any, *_: object, **__: object) -> None:
            if args.world_size != run.size:
                text = f"the Trainer has {args.world_size} of {run.size} ranks"
                raise errors.UserError(f"{text}; on CPUs give TrainingArguments use_cpu=True")

        def on_step_end(
            self, _: object, state: typing.Any, control: typing.Any, **__: object
        ) -> None:
            if run.should_stop() and state.global_step < state.max_steps:
                self.is_stopping = control.should_save = control.should_training_stop = True

        def on_log(
            self, _: object, state: typing.Any, *__: object, logs: dict[str, object], **___: object
        ) -> None:
            if "train_runtime" not in logs:  # the summary of all
                run.log_named(state.global_step, {"total_steps": state.max_steps, **logs})

        def on_save(self, args: typing.Any, state: typing.Any, *_: object, **__: object) -> None:
            run.seal(
                pathlib.Path(args.output_dir, f"checkpoint-{state.global_step}"), state.global_step
            )

        def on_train_end(self, _: object, state: typing.Any, *__: object, **___: object) -> None:
            if self.is_stopping:
                run.leave(step=state.global_step)

    return Callback()


def lightning_logger(run: Run) -> typing.Any:
    """Return a logger for Lightning's `Trainer(logger=...)`, which logs to metrics.jsonl."""
    from lightning.pytorch import loggers  # pyright: ignore[reportMissingImports] - only in a user's environment

    class Logger(loggers.Logger):
        """Lightning calls it on rank 0."""

        name, version = "ddptrain", run.attempt

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            run.log_named(step or 0, metrics)

        def log_hyperparams(self, *_: object, **__: object) -> None:
            """Do nothing: the run's folder has the job's options."""

    return Logger()


def accelerate_tracker(run: Run) -> typing.Any:
    """Return a tracker for `Accelerator(log_with=...)`; `accelerator.log(values, step=...)` logs to metrics.jsonl."""
    from accelerate import tracking  # pyright: ignore[reportMissingImports] - only in a user's environment

    class Tracker(tracking.GeneralTracker):
        """Accelerate calls it on the main process."""

        name, requires_logging_directory, tracker = "ddptrain", False, run

        def log(self, values: dict[str, object], step: int | None = None, **_: object) -> None:
            run.log_named(step or 0, values)

    return Tracker()

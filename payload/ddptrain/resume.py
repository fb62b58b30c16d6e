"""Stop, save and resume, for any training loop: all that a job expects of a script, in one module.

A job that must make way creates the file `$STOP_FILE`, or sends SIGTERM or SIGUSR1. The script
saves, reports the outcome `preempted` and ends; the job is queued again, and the same command
continues from its newest complete checkpoint in `$RUN_DIR`. docs/howto/resume.md has a whole
script. Needs torch when used, not when imported.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import itertools
import os
import pathlib
import sys
import time
import typing

from ddptrain.checkpoint import stored
from ddptrain.ground import attempt, errors, files, log
from ddptrain.records import metrics as metrics_file
from ddptrain.records import script_log

if typing.TYPE_CHECKING:
    from ddptrain.world import diloco

RUN_DIR, STOP_FILE, ATTEMPT = attempt.RUN_DIR, attempt.STOP_FILE, attempt.ATTEMPT
DONE, PREEMPTED = attempt.DONE, attempt.PREEMPTED
SCRIPT = "script"  # the format of a script's checkpoints: only it knows what the files mean
_NAMES = {  # what libraries call the quantities that every view of a run knows
    **dict.fromkeys(("train_loss", "train/loss", "train_loss_step", "loss_step"), "loss"),
    **dict.fromkeys(
        ("eval_loss", "eval/loss", "val/loss", "valid_loss", "validation_loss"), "val_loss"
    ),
    "learning_rate": "lr",
}


def folder() -> pathlib.Path:
    """Return this run's folder: the job's, or `run` in the current directory without a job."""
    return pathlib.Path(os.environ.get(RUN_DIR) or "run").absolute()


def attempt_id() -> str:
    """Return the name of this attempt at the run, `local` outside of a job."""
    return attempt.name()


class Run:
    """This attempt at a run, for a script that connects its ranks itself.

    Every rank makes one, in its main thread. From then on SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 ask
    the script to stop. `keep` is the number of checkpoints that stay. Raises UserError if the run
    has checkpoints but no complete one.
    """

    def __init__(self, *, keep: int = 2) -> None:
        from ddptrain.checkpoint import draft
        from ddptrain.world import agreement, distributed

        self.folder = folder()
        self.attempt = attempt_id()
        self._keep = keep
        self._world = distributed.adopted()
        self.rank = self._world.rank
        self.size = self._world.size
        log.setup(rank=self.rank)
        found: stored.Checkpoint | None = None
        with self._world.together():
            if self._world.is_main:
                if keep < 2:
                    why = "must be at least 2, or a crash while saving could leave none"
                    raise errors.UserError(f"keep={keep}: {why}")
                files.need_folder(self.folder, RUN_DIR)
                draft.remove_leftovers(self.folder)
                found = stored.newest(self.folder, "move them away to start over")
        found = self._world.broadcast(found)
        self.resumed: pathlib.Path | None = None  # the newest complete checkpoint
        self.step = 0  # its step
        self._saved: str | None = None
        if found:
            self.resumed = found.path
            self.step = found.step
            self._saved = str(found.path)
            log.emit("CKPT", resumed=self.resumed, step=self.step, attempt=self.attempt)
        self._agreement = agreement.Agreement(self._world)
        self._since = time.perf_counter()
        self._log: script_log.ScriptLog | None = None
        self._loop: diloco.Loop | None = None

    def log(self, step: int, **metrics: object) -> None:
        """Append a line to metrics.jsonl: on rank 0, in the background. It never raises.

        They are numbers, texts, or tensors of one element; one on a GPU is waited for.
        """
        if not self._world.is_main:
            return
        with contextlib.suppress(RuntimeError):  # no further thread can be started
            start = {"step": self.step, "attempt": self.attempt, "world_size": self.size}
            if self._log is None:
                self._log = script_log.ScriptLog(self.folder / metrics_file.FILE, start)
            self._log.add(step, metrics)

    def log_named(self, step: int, metrics: collections.abc.Mapping[str, object]) -> None:
        """Log a library's figures, under our names for losses and the learning rate."""
        named: dict[str, object] = {}
        for name, value in metrics.items():
            if name not in ("step", "self"):
                named[_NAMES.get(name, name)] = value
        self.log(step, **named)

    @contextlib.contextmanager
    def low_communication(
        self,
        model: typing.Any,
        optimizer: typing.Any,
        *,
        every: int,
        warmup: int = 200,
        steps: int | None = None,
        sites: int | None = None,
    ) -> collections.abc.Iterator["diloco.Loop"]:
        """Train the sites by themselves, with an exchange every so many optimizer steps (DiLoCo).

        Near nodes are a site, or `sites` equal parts of the ranks. In the first `warmup` steps the
        sites take the plain mean every 10 steps. If you give `steps`, the number of all steps, they
        also take it in the last tenth of them. `should_stop` answers after an exchange. Every rank
        enters and leaves the block.
        """
        from ddptrain.world import diloco
        from ddptrain.world import sites as sites_of

        place: list[int] = []
        with self._world.together():
            if self._world.is_main:
                hosts = [str(member["host"]) for member in self._world.members]
                place = sites_of.divide(hosts, sites)
        within = sites_of.Sites(self._world, place)
        lr, momentum = diloco.outer_for(every)
        rhythm = diloco.Rhythm(every, warmup, lr, momentum, steps=steps or sys.maxsize)
        exchange = diloco.Exchange(model.parameters(), within)
        loop = diloco.Loop(diloco.Link(within, rhythm, exchange), self.step)
        self._loop = loop
        log.emit("DDP", sites=within.count, sync_every=every, outer_lr=rhythm.lr)
        hook = optimizer.register_step_post_hook(loop.after_step)
        try:
            yield loop
        finally:
            hook.remove()
            self._loop = None

    def should_stop(self) -> bool:
        """Return whether to save and leave now, the same on all ranks.

        Every rank calls it once after each step.
        """
        if self._loop is not None and not self._loop.is_synced:
            return False
        is_due = self._agreement.is_due()
        if not is_due and self._loop is None:  # an exchange costs more than an agreement
            return False
        agreed = self._agreement.reach(time.perf_counter() - self._since)
        self._since = time.perf_counter()
        return agreed.stop

    @contextlib.contextmanager
    def saving(self, step: int, *, epoch: int = 0) -> collections.abc.Iterator[pathlib.Path]:
        """Yield this rank's folder `rank-<r>` of a checkpoint that appears whole or not at all.

        Every rank enters and leaves the block, also those that write nothing. Raises on all ranks
        when one fails.
        """
        from ddptrain.checkpoint import draft

        world = self._world
        name = stored.name_of(epoch, step, ends_epoch=False)
        with contextlib.ExitStack() as stack:
            made = draft.Draft(self.folder, name, self.attempt)
            with world.together():
                if world.is_main:
                    stack.enter_context(made)
            with world.together():
                own = made.path / f"rank-{self.rank:04d}"
                own.mkdir()
                yield own
                made.adopt(own)
            listed = world.collect(made.listed)
            with world.together():
                if world.is_main:
                    made.listed = list(itertools.chain.from_iterable(listed))
                    self._sync_log()
                    path = made.commit(self._meta(step, epoch))
                    draft.settle(self.folder, path, is_best=False, keep=self._keep)
                    self._saved = str(path)
                    log.emit("CKPT", saved=name, step=step)
        self._since = time.perf_counter()

    def seal(self, path: pathlib.Path, step: int) -> None:
        """Mark a checkpoint that a library wrote to the run's folder as complete.

        Every rank calls it.
        """
        from ddptrain.checkpoint import draft

        self._world.barrier()  # every rank has written
        with self._world.together():
            if self._world.is_main:
                self._sync_log()
                draft.seal(path, self._meta(step, 0))
                draft.point(self.folder / stored.LATEST, path)
                self._saved = str(path)
                log.emit("CKPT", saved=path.name, step=step)
        self._since = time.perf_counter()

    def leave(self, *, step: int, loss: float | None = None) -> typing.NoReturn:
        """Report the outcome `preempted` and end this process: the job is queued again.

        Every rank calls it. The exit code is 0 as at the end: torchrun makes 1 of any other, and
        starts the ranks again at once.
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
        if self._log is not None:
            self._log.end()
            self._log = None
        if self._world.is_main:
            facts = {"step": step, "loss": loss, "checkpoint": self._saved}
            attempt.write_outcome(self.folder, outcome, **facts)

    def _sync_log(self) -> None:
        """Make the lines of the steps durable that the next checkpoint has."""
        if self._log is not None:
            self._log.sync()

    def _meta(self, step: int, epoch: int) -> dict[str, object]:
        return {
            "step": step,
            "epoch": epoch,
            "format": SCRIPT,
            "world_size": self.size,
            "attempt": self.attempt,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }


def trainer_callback(run: Run) -> typing.Any:
    """Return a callback that logs for transformers' Trainer, and saves and leaves on request.

    Its checkpoints count once every rank has written: give the Trainer
    `output_dir=str(run.folder)`, and `trainer.train(resume_from_checkpoint=...)` the path
    `run.resumed`.
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
    """Return a tracker for `Accelerator(log_with=...)`.

    `accelerator.log(values, step=...)` logs to metrics.jsonl.
    """
    from accelerate import tracking  # pyright: ignore[reportMissingImports] - only in a user's environment

    class Tracker(tracking.GeneralTracker):
        """Accelerate calls it on the main process."""

        name, requires_logging_directory, tracker = "ddptrain", False, run

        def log(self, values: dict[str, object], step: int | None = None, **_: object) -> None:
            run.log_named(step or 0, values)

    return Tracker()

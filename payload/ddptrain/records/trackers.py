"""MLflow, W&B and TensorBoard, beside metrics.jsonl, which is the record. None may stop or slow a training.

Each has a thread with a bounded queue, in which records wait for a dead or slow server; the oldest beyond the bound are
dropped and counted. The end of a training waits for it only some seconds. Rank 0 alone tracks. A run has one MLflow
run: its id is kept in the run's `tracking.json`, so that a resumed training continues it, and sends what it lacks.
"""

# pyright: basic
import collections
import collections.abc
import contextlib
import os
import pathlib
import threading
import time
import typing

from ddptrain.ground import files, log
from ddptrain.options import config

Record = dict[str, typing.Any]

NOTE, METRICS = "tracking.json", "metrics.jsonl"
URI, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"
TENSORBOARD, WANDB = "DDPTRAIN_TENSORBOARD", "DDPTRAIN_WANDB"
ARTIFACTS = ("config.json", "summary.json", "loss.png")
CLOSE_S = 30.0  # how long the end of a training waits for the last records
_QUEUED = 20_000
_BATCH = 500  # MLflow takes up to 1000 metrics in one call (its REST API, log-batch)
_FLUSH_S = 2.0
_SENT = "sent_step"  # the tag of an MLflow run with the step of the last record that the server has
_FIGURES = ("best_loss", "tokens_per_second", "samples_per_second", "mfu")  # of the summary
_STATES = {"done": "FINISHED", "failed": "FAILED", "preempted": "SCHEDULED"}
# One try of some seconds for each call: a server that does not respond must not hold the thread for minutes.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class Background:
    """Hands records to a tracker from a thread, in order; a batch that fails is sent again, after another `open`."""

    def __init__(
        self,
        target: typing.Any,
        *,
        close_s: float = CLOSE_S,
        queued: int | None = _QUEUED,
        flush_s: float = _FLUSH_S,
    ) -> None:
        self.name = type(target).__name__
        self.dropped = 0
        self._target, self._close_s, self._flush_s = target, close_s, flush_s
        self._retry_s = 2 * flush_s
        self._queue: collections.deque[Record] = collections.deque(
            maxlen=queued
        )  # None: without a limit
        self._summary: Record = {}
        self._ending = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"track-{self.name}", daemon=True)
        self._thread.start()

    def record(self, record: Record) -> None:
        """Take one metrics record, at once."""
        self.dropped += len(self._queue) == self._queue.maxlen
        self._queue.append(record)

    def close(self, summary: Record) -> None:
        """Take the run's summary, and wait a little for what is still to be sent."""
        self._summary = summary
        self._ending.set()
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self.warn(f"gave no answer within {self._close_s:g} s; it lacks the last records")
        elif self.dropped:
            self.warn(
                f"{self.dropped} records were not sent; metrics.jsonl has them all", again=True
            )

    def _run(self) -> None:
        opened, is_last, retry_at, waiting = False, False, 0.0, list[Record]()
        while True:
            if not (ending := self._ending.is_set()):
                self._ending.wait(self._flush_s)
            if not opened and (ending or time.monotonic() >= retry_at):
                opened = self._try(self._target.open)
                retry_at = time.monotonic() + self._retry_s
                if opened and isinstance(self._target, MLflow):  # which got them from metrics.jsonl
                    self.dropped = 0
            while opened and (waiting or self._queue):
                with contextlib.suppress(IndexError):
                    while len(waiting) < _BATCH:
                        waiting.append(self._queue.popleft())
                opened = self._try(self._target.send, waiting)
                waiting = [] if opened else waiting
            if ending and opened and self._try(self._target.close, self._summary):
                return
            if is_last:
                self.dropped += len(waiting) + len(self._queue)
                return
            if ending:  # a server that is restarted gets a second chance
                opened, is_last = False, True
                time.sleep(self._retry_s)

    def _try(self, work: collections.abc.Callable[..., None], *args: object) -> bool:
        try:
            work(*args)
        except Exception as e:  # whatever a client may raise: tracking never stops a training
            self.warn(f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")
            return False
        return True

    def warn(self, text: str, *, again: bool = False) -> None:
        """Print a warning, the first one only."""
        if not self._warned or again:
            self._warned = True
            log.warn("TRACK", f"{self.name}: {text}")


class MLflow:
    """One MLflow run for the whole training, also after it was resumed."""

    def __init__(self, run_dir: pathlib.Path, uri: str) -> None:
        self.run_dir, self.uri = run_dir, uri
        self._client: typing.Any = None
        self._entities: typing.Any = None  # the module
        self._run_id = ""

    def open(self) -> None:
        """Find the run's MLflow run, or make it."""
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        artifacts = None  # a server knows where they go
        if self.uri.startswith("sqlite:///"):
            folder = pathlib.Path(self.uri.removeprefix("sqlite:///")).parent
            folder.mkdir(parents=True, exist_ok=True)
            artifacts = str(folder / "artifacts")
        from mlflow import entities, tracking  # pyright: ignore[reportMissingImports] - only where tracking is asked for

        client = tracking.MlflowClient(tracking_uri=self.uri)
        note: Record = {}
        with contextlib.suppress(OSError, ValueError):
            note = files.read_json(self.run_dir / NOTE)
        if note.get("uri") == self.uri and note.get("run_id"):
            run_id = str(note["run_id"])
        else:
            name = os.environ.get(EXPERIMENT) or "slurm-ddp"
            experiment = client.get_experiment_by_name(name)
            number = (
                experiment.experiment_id
                if experiment
                else client.create_experiment(name, artifacts)
            )
            run_id = client.create_run(number, run_name=self.run_dir.name).info.run_id
            url = (
                f"{self.uri}/#/experiments/{number}/runs/{run_id}"
                if self.uri.startswith("http")
                else self.uri
            )
            files.write_json(
                self.run_dir / NOTE,
                {"uri": self.uri, "run_id": run_id, "experiment": name, "url": url},
            )
        known = client.get_run(run_id).data
        client.update_run(run_id, status="RUNNING")
        self._client, self._entities, self._run_id = client, entities, run_id
        self._describe(known.params)
        if job := os.environ.get("SLURM_JOB_ID"):
            client.set_tag(run_id, "slurm_job_id", job)
        log.emit("TRACK", mlflow=self.uri, run_id=run_id)
        records = files.read_records(self.run_dir / METRICS)
        sent = int(known.tags.get(_SENT, 0))
        self.send(
            [
                record
                for record in records
                if record.get("kind") != "start" and record.get("step", 0) >= sent
            ]
        )

    def send(self, records: list[Record]) -> None:
        """Log the numbers of the records. A record that is sent twice counts once: a metric has its record's time."""
        metrics = [
            (step, self._entities.Metric(name, value, int(1000 * time_s), step))
            for step, time_s, figures in _numbers(records)
            for name, value in figures.items()
        ]
        for at in range(0, len(metrics), 1000):
            part = metrics[at : at + 1000]
            tag = self._entities.RunTag(
                _SENT, str(part[-1][0])
            )  # stored after the metrics of the same call
            self._client.log_batch(self._run_id, metrics=[metric for _, metric in part], tags=[tag])

    def close(self, summary: Record) -> None:
        """Log the summary's figures, how the training ended, and the run's small files as artifacts."""
        self.send(
            [
                {
                    "step": summary.get("steps", 0),
                    **{f"final_{name}": summary.get(name) for name in _FIGURES},
                }
            ]
        )
        self._client.set_terminated(
            self._run_id, status=_STATES.get(str(summary.get("state")), "FINISHED")
        )
        for path in (self.run_dir / name for name in ARTIFACTS):
            if path.exists():
                self._client.log_artifact(self._run_id, str(path))

    def _describe(self, known: Record) -> None:
        """Log the options that MLflow does not know yet: it refuses another value of one that it does."""
        config = _config(self.run_dir)
        params = [
            self._entities.Param(name, str(value)[:500])
            for name, value in config.items()
            if name not in known
        ]
        self._client.log_batch(self._run_id, params=params[:100])
        self._client.set_tag(self._run_id, "run_dir", str(self.run_dir))


class WandB:
    """Offline runs of Weights & Biases in the run's folder `wandb/`, one for each attempt, all with one id."""

    def __init__(self, run_dir: pathlib.Path) -> None:
        self.run_dir = run_dir
        self._wandb = self._run = typing.cast(typing.Any, None)

    def open(self) -> None:
        """Begin an offline run; `wandb sync` joins those of all attempts."""
        os.environ.setdefault(
            "WANDB_ERROR_REPORTING", "false"
        )  # read at the import: nothing leaves the cluster
        import wandb  # pyright: ignore[reportMissingImports] - only where tracking is asked for

        self._wandb = wandb
        before = sorted(self.run_dir.glob("wandb/offline-run-*-*"))
        quiet = wandb.Settings(
            mode="offline", console="off", silent=True, x_disable_stats=True, disable_git=True
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "slurm-ddp",
            id=before[0].name.rpartition("-")[2] if before else None,
            resume="allow" if before else None,
            name=self.run_dir.name,
            dir=str(self.run_dir),
            config=_config(self.run_dir),
            settings=quiet,
        )
        self._run.define_metric(
            "*", step_metric="step"
        )  # W&B's own only rises, also over the steps of a resumed run
        log.emit("TRACK", wandb=self._run.dir)

    def send(self, records: list[Record]) -> None:
        """Log the numbers of the records."""
        for step, _, figures in _numbers(records):
            self._run.log({"step": step, **figures})

    def close(self, summary: Record) -> None:
        """Note the summary's figures, and end the run."""
        self._run.summary.update({f"final_{name}": summary.get(name) for name in _FIGURES})
        self._run.finish(exit_code=int(summary.get("state") == "failed"))
        self._wandb.teardown()  # waits for W&B's own process, which writes the last records


class TensorBoard:
    """Event files in the run's folder `tensorboard/`."""

    def __init__(self, run_dir: pathlib.Path) -> None:
        self.folder = run_dir / "tensorboard"
        self._writer: typing.Any = None

    def open(self) -> None:
        """Begin a new event file; TensorBoard joins those of all attempts."""
        from torch.utils import tensorboard

        self._writer = tensorboard.SummaryWriter(str(self.folder))
        log.emit("TRACK", tensorboard=self.folder)

    def send(self, records: list[Record]) -> None:
        """Write the numbers of the records."""
        for step, _, figures in _numbers(records):
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, _: Record) -> None:
        """End the file."""
        self._writer.close()


def _config(run_dir: pathlib.Path) -> Record:
    """Return the options of the training that have a value."""
    with contextlib.suppress(OSError, ValueError):
        settings = files.read_json(run_dir / config.FILE)
        settings.pop(config.CHANGES, None)
        return {name: value for name, value in settings.items() if value is not None}
    return {}


def _numbers(
    records: list[Record],
) -> collections.abc.Iterator[tuple[int, float, dict[str, float]]]:
    """Yield (step, time, figures by name) of the records; the time is in seconds since 1970."""
    for record in records:
        numbers = {
            k: v
            for k, v in record.items()
            if isinstance(v, int | float) and not isinstance(v, bool)
        }
        step, time_s = numbers.pop("step", 0), numbers.pop("time", None) or time.time()
        numbers.pop("total_steps", None)
        yield int(step), time_s, {name: float(value) for name, value in numbers.items()}


def targets(
    run_dir: pathlib.Path, env: collections.abc.Mapping[str, str]
) -> list[MLflow | WandB | TensorBoard]:
    """Make the trackers that the environment asks for: MLFLOW_TRACKING_URI and the flags of 1."""
    found: list[MLflow | WandB | TensorBoard] = []
    if uri := env.get(URI, "").strip():
        found.append(MLflow(run_dir, store_uri(uri)))
    wanted = ((WANDB, WandB), (TENSORBOARD, TensorBoard))
    return found + [tracker(run_dir) for name, tracker in wanted if env.get(name) == "1"]


def store_uri(uri: str) -> str:
    """Return the URI to track to: a path becomes an SQLite store in it, as MLflow since 3.13 refuses plain files."""
    path = uri.removeprefix("file://") if uri.startswith("file:") else uri
    if "://" in path:
        return uri.rstrip("/")
    store = f"sqlite:///{pathlib.Path(path).absolute() / 'mlflow.db'}"
    why = "MLflow keeps no runs in plain files since 3.13"
    log.emit("TRACK", f"{why}: {uri} becomes {store}; for many writers use a server")
    return store

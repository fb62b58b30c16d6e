"""MLflow and TensorBoard, beside metrics.jsonl, which is the record. Neither may stop or slow a training.

Each has a thread with a bounded queue: the records that a dead or slow server cannot take are dropped and counted, and
the end of a training waits for it only some seconds. Rank 0 alone tracks. A run has one MLflow run: its id is kept in
the run's `tracking.json`, so that a resumed training continues it.
"""

# pyright: basic
import collections.abc
import contextlib
import os
import pathlib
import queue
import threading
import time
import typing

from ddptrain import files, markers

Record = dict[str, typing.Any]

NOTE = "tracking.json"
URI, EXPERIMENT, TENSORBOARD = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "DDPTRAIN_TENSORBOARD"
CLOSE_S = 30.0  # how long the end of a training waits for the last records
_QUEUED = 20_000
_BATCH = 500  # MLflow takes up to 1000 metrics in one call (its REST API, log-batch)
_FLUSH_S = 2.0
_STATES = {"done": "FINISHED", "failed": "FAILED", "preempted": "SCHEDULED"}
# One try of some seconds for each call: a server that does not respond must not hold the thread for minutes.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class Background:
    """Hands records to an MLflow or TensorBoard from a thread of its own."""

    def __init__(
        self, target: typing.Any, *, close_s: float = CLOSE_S, queued: int = _QUEUED, flush_s: float = _FLUSH_S
    ) -> None:
        self.name = type(target).__name__
        self.dropped = 0
        self._target, self._close_s, self._flush_s = target, close_s, flush_s
        self._queue: queue.Queue[Record] = queue.Queue(queued)  # 0: without a limit
        self._summary: Record | None = None
        self._ending = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"track-{self.name}", daemon=True)
        self._thread.start()

    def record(self, record: Record) -> None:
        """Take one metrics record, at once."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self, summary: Record) -> None:
        """Take the run's summary, and wait a little for what is still to be sent."""
        self._summary = summary
        self._ending.set()
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self.warn(f"gave no answer within {self._close_s:g} s; it lacks the last records")
        elif self.dropped:
            self.warn(f"{self.dropped} records were not sent; metrics.jsonl has them all", again=True)

    def _run(self) -> None:
        opened = False
        retry_at = 0.0
        while True:
            ending = self._ending.is_set()
            records = self._take(wait_s=0.0 if ending else self._flush_s)
            if not opened and time.monotonic() >= retry_at:
                opened = self._try(self._target.open)
                retry_at = time.monotonic() + 30
            while records:
                if not opened or not self._try(lambda records=records: self._target.send(records)):
                    self.dropped += len(records)
                records = self._take(wait_s=0.0)
            if ending:
                if opened:
                    self._try(lambda: self._target.close(self._summary))
                return

    def _take(self, *, wait_s: float) -> list[Record]:
        """Take at most a batch of the queued records, after waiting up to `wait_s` for more."""
        if wait_s:
            self._ending.wait(wait_s)
        found: list[Record] = []
        with contextlib.suppress(queue.Empty):
            while len(found) < _BATCH:
                found.append(self._queue.get_nowait())
        return found

    def _try(self, work: collections.abc.Callable[[], None]) -> bool:
        try:
            work()
        except Exception as e:  # whatever a client may raise: tracking never stops a training
            self.warn(f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")
            return False
        return True

    def warn(self, text: str, *, again: bool = False) -> None:
        """Print a warning, the first one only."""
        if not self._warned or again:
            self._warned = True
            markers.warn("TRACK", f"{self.name}: {text}")


class MLflow:
    """One MLflow run for the whole training, also after it was resumed."""

    def __init__(self, run_dir: pathlib.Path, uri: str) -> None:
        self.run_dir, self.uri = run_dir, uri
        self._client: typing.Any = None
        self._run_id = ""

    def open(self) -> None:
        """Find the run's MLflow run, or make it."""
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        if self.uri.startswith("sqlite:///"):
            pathlib.Path(self.uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        from mlflow import tracking  # pyright: ignore[reportMissingImports] - only where tracking is asked for

        client = tracking.MlflowClient(tracking_uri=self.uri)
        note: Record = {}
        with contextlib.suppress(OSError, ValueError):
            note = files.read_json(self.run_dir / NOTE)
        if note.get("uri") == self.uri and note.get("run_id"):
            run_id = str(note["run_id"])
            client.update_run(run_id, status="RUNNING")
        else:
            name = os.environ.get(EXPERIMENT) or "slurm-ddp"
            experiment = client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else client.create_experiment(name)
            run_id = client.create_run(number, run_name=self.run_dir.name).info.run_id
            url = f"{self.uri}/#/experiments/{number}/runs/{run_id}" if self.uri.startswith("http") else self.uri
            files.write_json(self.run_dir / NOTE, {"uri": self.uri, "run_id": run_id, "experiment": name, "url": url})
            self._describe(client, run_id)
        self._client, self._run_id = client, run_id
        if job := os.environ.get("SLURM_JOB_ID"):
            client.set_tag(run_id, "slurm_job_id", job)
        markers.emit("TRACK", mlflow=self.uri, run_id=run_id)

    def send(self, records: list[Record]) -> None:
        """Log the numbers of the records."""
        from mlflow import entities  # pyright: ignore[reportMissingImports] - only where tracking is asked for

        now = int(time.time() * 1000)
        metrics = [entities.Metric(name, float(value), now, step) for step, name, value in _numbers(records)]
        for at in range(0, len(metrics), 1000):
            self._client.log_batch(self._run_id, metrics=metrics[at : at + 1000])

    def close(self, summary: Record | None) -> None:
        """Log the summary's figures and how the training ended."""
        summary = summary or {}
        figures = {name: summary.get(name) for name in ("best_loss", "tokens_per_second", "samples_per_second", "mfu")}
        self.send([{"step": summary.get("steps", 0), **{f"final_{k}": v for k, v in figures.items() if v is not None}}])
        self._client.set_terminated(self._run_id, status=_STATES.get(str(summary.get("state")), "FINISHED"))

    def _describe(self, client: typing.Any, run_id: str) -> None:
        from mlflow import entities  # pyright: ignore[reportMissingImports] - only where tracking is asked for

        config: Record = {}
        with contextlib.suppress(OSError, ValueError):
            config = files.read_json(self.run_dir / "config.json")
        params = [entities.Param(name, str(value)[:500]) for name, value in config.items() if value is not None]
        client.log_batch(run_id, params=params[:100])
        client.set_tag(run_id, "run_dir", str(self.run_dir))


class TensorBoard:
    """Event files in the run's folder `tensorboard/`."""

    def __init__(self, run_dir: pathlib.Path) -> None:
        self.folder = run_dir / "tensorboard"
        self._writer: typing.Any = None

    def open(self) -> None:
        """Begin a new event file; TensorBoard joins those of all attempts."""
        from torch.utils import tensorboard

        self._writer = tensorboard.SummaryWriter(str(self.folder))
        markers.emit("TRACK", tensorboard=self.folder)

    def send(self, records: list[Record]) -> None:
        """Write the numbers of the records."""
        for step, name, value in _numbers(records):
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, summary: Record | None) -> None:
        """End the file."""
        del summary
        self._writer.close()


def _numbers(records: list[Record]) -> collections.abc.Iterator[tuple[int, str, float]]:
    """Yield (step, name, value) of the figures in the records."""
    for record in records:
        for name, value in record.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and name not in ("step", "total_steps", "time"):
                yield int(record.get("step", 0)), name, value


def connect(run_dir: pathlib.Path) -> list[Background]:
    """Return the trackers that the environment asks for."""
    return [Background(target) for target in targets(run_dir, os.environ)]


def targets(run_dir: pathlib.Path, env: collections.abc.Mapping[str, str]) -> list[MLflow | TensorBoard]:
    """Make the trackers that the environment asks for: MLFLOW_TRACKING_URI, DDPTRAIN_TENSORBOARD=1."""
    found: list[MLflow | TensorBoard] = []
    if uri := env.get(URI, "").strip():
        found.append(MLflow(run_dir, store_uri(uri)))
    if env.get(TENSORBOARD) == "1":
        found.append(TensorBoard(run_dir))
    return found


def store_uri(uri: str) -> str:
    """Return the URI to track to: a path becomes an SQLite store in it, as MLflow since 3.13 refuses plain files."""
    path = uri.removeprefix("file://") if uri.startswith("file:") else uri
    if "://" in path:
        return uri.rstrip("/")
    store = f"sqlite:///{pathlib.Path(path).absolute() / 'mlflow.db'}"
    why = "MLflow keeps no runs in plain files since 3.13"
    markers.emit("TRACK", f"{why}: {uri} becomes {store}; for many writers use a server")
    return store

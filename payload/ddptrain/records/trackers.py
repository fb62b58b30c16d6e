"""MLflow, W&B and TensorBoard: copies of metrics.jsonl. None may stop or slow a training.

Each library sends in the background itself: MLflow's asynchronous logging, W&B's process,
TensorBoard's thread. Records that MLflow's server missed are sent from metrics.jsonl at the end, or
by the next attempt. Only rank 0 tracks. A run has one MLflow run, whose id is kept in the run's
`tracking.json`.
"""

# pyright: basic
import collections.abc
import contextlib
import functools
import logging
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
_RETRY_S = 4.0
_SEND_S = 10.0  # between two batches of records
_MOST_WAITING = 20_000  # records that wait until the server has a run
_BATCH = 1000  # metrics in one call, at most (MLflow's REST API, log-batch)
_SENT = "sent_step"  # the tag of an MLflow run: the server has all records up to this step
_FIGURES = ("best_loss", "tokens_per_second", "samples_per_second", "mfu")  # of the summary
_STATES = {"done": "FINISHED", "failed": "FAILED", "preempted": "SCHEDULED"}
_MLFLOW = {
    # One try of some seconds for each call: a server that does not respond must not hold a thread
    # for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ASYNC_LOGGING_THREADPOOL_SIZE": "1",
}


Begin = collections.abc.Callable[[], typing.Any]  # makes a tracker: record(record), close(summary)


class Trackers:
    """All trackers of a run. A tracker that raises is reported and dropped."""

    def __init__(
        self, begin: collections.abc.Mapping[str, Begin], *, close_s: float = CLOSE_S
    ) -> None:
        self._close_s = close_s
        self._open: dict[str, typing.Any] = {}
        for name, make in begin.items():
            with _surviving(name):
                self._open[name] = make()

    def record(self, record: Record) -> None:
        """Hand a record of metrics.jsonl to each."""
        for name, tracker in list(self._open.items()):
            with _surviving(name):
                tracker.record(record)
                continue
            del self._open[name]

    def close(self, summary: Record) -> None:
        """Note how the run ended, and wait a little for the last records."""
        for name, tracker in self._open.items():
            end = threading.Thread(target=_end, args=(name, tracker, summary), daemon=True)
            end.start()
            end.join(self._close_s)
            if end.is_alive():
                what = f"gave no answer within {self._close_s:g} s; it lacks the last records"
                _warn(name, what)
        self._open = {}


def _end(name: str, tracker: typing.Any, summary: Record) -> None:
    with _surviving(name):
        tracker.close(summary)


@contextlib.contextmanager
def _surviving(name: str) -> collections.abc.Iterator[None]:
    """Turn any error of a client into a warning."""
    try:
        yield
    except Exception as e:  # tracking never stops a training
        _warn(name, _text(e))


def _text(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"


def _warn(name: str, text: str) -> None:
    log.warn("TRACK", f"{name}: {text}")


class MLflow:
    """One MLflow run for the whole training, also after it was resumed.

    A record that is sent twice counts once: a metric has its record's time.
    """

    def __init__(
        self, run_dir: pathlib.Path, uri: str, *, retry_s: float = _RETRY_S, send_s: float = _SEND_S
    ) -> None:
        self.run_dir = run_dir
        self.uri = uri
        self._retry_s = retry_s
        self._send_s = send_s
        self._client: typing.Any = None
        self._entities: typing.Any = None  # the module
        self._run_id = ""
        self._waiting: list[Record] = []
        self._last_send = time.monotonic()
        self._batches: list[tuple[int, typing.Any]] = []  # first step, MLflow's operation
        self._lacks_from: int | None = None  # the first step that the server may lack
        self._ending = threading.Event()
        # MLflow makes a run while its caller waits, so a thread calls it until the server answers
        self._opening = threading.Thread(target=self._open_patiently, name="mlflow", daemon=True)
        self._opening.start()

    def record(self, record: Record) -> None:
        """Take one metrics record, at once."""
        self._waiting.append(record)
        if self._opening.is_alive():
            if len(self._waiting) > _MOST_WAITING:
                self._miss(_figures(self._waiting[0]).step)
                self._waiting.clear()
        elif time.monotonic() - self._last_send > self._send_s:
            self._send_waiting()

    def close(self, summary: Record) -> None:
        """Send missing records, the summary's figures, the final state and the small files."""
        self._ending.set()
        self._opening.join()
        for is_last in (False, True):  # a server that is restarted gets a second chance
            try:
                self._finish(summary)
            except Exception as e:  # a client may raise anything
                if not is_last:
                    time.sleep(self._retry_s)
                    continue
                missing = len(self._records_from(self._lacks_from or 0))
                what = f"{missing} records were not sent; metrics.jsonl has them all"
                _warn("MLflow", f"{what}: {_text(e)}")
            else:
                return

    def _open_patiently(self) -> None:
        """Open the run, again and again until the server answers or the training ends."""
        has_warned = False
        while not self._ending.is_set():
            try:
                self._open()
            except Exception as e:  # a client may raise anything
                if not has_warned:
                    _warn("MLflow", _text(e))
                has_warned = True
                self._ending.wait(self._retry_s)
            else:
                return

    def _open(self) -> None:
        """Find or make the run's MLflow run, and send the missing records of earlier attempts."""
        for name, value in _MLFLOW.items():
            os.environ.setdefault(name, value)
        from mlflow import entities, tracking  # pyright: ignore[reportMissingImports] - only where tracking is asked for

        _say_once("mlflow.utils.async_logging.async_logging_queue")
        client = tracking.MlflowClient(tracking_uri=self.uri)
        run_id = self._known_run() or self._make_run(client)
        known = client.get_run(run_id).data
        client.update_run(run_id, status="RUNNING")
        self._client = client
        self._entities = entities
        self._describe(run_id, known.params)
        self._send_now(run_id, self._records_from(int(known.tags.get(_SENT, 0))))
        self._run_id = run_id
        log.emit("TRACK", mlflow=self.uri, run_id=run_id)

    def _known_run(self) -> str:
        """Return the id of the MLflow run of an earlier attempt, or an empty text."""
        with contextlib.suppress(OSError, ValueError):
            note = files.read_json(self.run_dir / NOTE)
            if note.get("uri") == self.uri:
                return str(note.get("run_id") or "")
        return ""

    def _make_run(self, client: typing.Any) -> str:
        name = os.environ.get(EXPERIMENT) or "slurm-ddp"
        experiment = client.get_experiment_by_name(name)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            number = client.create_experiment(name, self._artifacts())
        run_id: str = client.create_run(number, run_name=self.run_dir.name).info.run_id
        note = {"uri": self.uri, "run_id": run_id, "experiment": name, "url": self.uri}
        if self.uri.startswith("http"):
            note["url"] = f"{self.uri}/#/experiments/{number}/runs/{run_id}"
        files.write_json(self.run_dir / NOTE, note)
        return run_id

    def _artifacts(self) -> str | None:
        """Return the folder for artifacts of an SQLite store; a server has its own."""
        if not self.uri.startswith("sqlite:///"):
            return None
        folder = pathlib.Path(self.uri.removeprefix("sqlite:///")).parent
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder / "artifacts")

    def _describe(self, run_id: str, known: Record) -> None:
        """Log options that are new to MLflow, which refuses another value for a known one."""
        params: list[typing.Any] = []
        for name, value in _config(self.run_dir).items():
            if name not in known:
                params.append(self._entities.Param(name, str(value)[:500]))
        self._client.log_batch(run_id, params=params[:100])
        self._client.set_tag(run_id, "run_dir", str(self.run_dir))
        job = os.environ.get("SLURM_JOB_ID")
        if job:
            self._client.set_tag(run_id, "slurm_job_id", job)

    def _send_waiting(self) -> None:
        """Hand the waiting records to MLflow's queue."""
        records = self._waiting
        self._waiting = []
        self._last_send = time.monotonic()
        for metrics in self._metrics(records):
            operation = self._client.log_batch(self._run_id, metrics=metrics, synchronous=False)
            self._batches.append((metrics[0].step, operation))

    def _send_now(self, run_id: str, records: list[Record]) -> None:
        """Send records, and note on the server that it has them."""
        for metrics in self._metrics(records):
            self._client.log_batch(run_id, metrics=metrics)
        if records:
            self._client.set_tag(run_id, _SENT, str(_figures(records[-1]).step))

    def _finish(self, summary: Record) -> None:
        if not self._run_id:
            self._open()
        self._send_waiting()
        for step, operation in self._batches:
            try:
                operation.wait()
            except Exception:  # MLflow gave up, for any reason
                self._miss(step)
        self._batches = []
        if self._lacks_from is not None:
            self._send_now(self._run_id, self._records_from(self._lacks_from))

        final: Record = {"step": summary.get("steps", 0)}
        for name in _FIGURES:
            final[f"final_{name}"] = summary.get(name)
        self._send_now(self._run_id, [final])
        status = _STATES.get(str(summary.get("state")), "FINISHED")
        self._client.set_terminated(self._run_id, status=status)
        for name in ARTIFACTS:
            if (self.run_dir / name).exists():
                self._client.log_artifact(self._run_id, str(self.run_dir / name))

    def _miss(self, step: int) -> None:
        """Note that the server may lack the records from a step on."""
        if self._lacks_from is None or step < self._lacks_from:
            self._lacks_from = step

    def _records_from(self, step: int) -> list[Record]:
        """Return the run's records of a step and later ones."""
        found: list[Record] = []
        for record in files.read_records(self.run_dir / METRICS):
            if record.get("kind") != "start" and record.get("step", 0) >= step:
                found.append(record)
        return found

    def _metrics(self, records: list[Record]) -> collections.abc.Iterator[list[typing.Any]]:
        """Yield the numbers of records as MLflow's metrics, as many as one call takes."""
        part: list[typing.Any] = []
        for record in records:
            found = _figures(record)
            time_ms = int(1000 * found.time_s)
            for name, value in found.by_name.items():
                part.append(self._entities.Metric(name, value, time_ms, found.step))
            if len(part) > _BATCH - 50:
                yield part
                part = []
        if part:
            yield part


def _say_once(name: str) -> None:
    """Let a logger report only its first failure: a dead server causes one every few seconds."""
    logger = logging.getLogger(name)
    if not logger.filters:
        first = iter([True])
        logger.addFilter(lambda _: next(first, False))


class WandB:
    """Offline runs of Weights & Biases in the run's `wandb/`, one per attempt, all with one id."""

    def __init__(self, run_dir: pathlib.Path) -> None:
        """Begin an offline run; `wandb sync` joins the runs of all attempts."""
        # Read at the import: nothing leaves the cluster
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # pyright: ignore[reportMissingImports] - only where tracking is asked for

        self._wandb: typing.Any = wandb
        before = sorted(run_dir.glob("wandb/offline-run-*-*"))
        quiet = wandb.Settings(
            mode="offline", console="off", silent=True, x_disable_stats=True, disable_git=True
        )
        self._run: typing.Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "slurm-ddp",
            id=before[0].name.rpartition("-")[2] if before else None,
            resume="allow" if before else None,
            name=run_dir.name,
            dir=str(run_dir),
            config=_config(run_dir),
            settings=quiet,
        )
        # W&B's own step only rises, also over the steps of a resumed run
        self._run.define_metric("*", step_metric="step")
        log.emit("TRACK", wandb=self._run.dir)

    def record(self, record: Record) -> None:
        """Log the numbers of a record: W&B's own process writes them."""
        found = _figures(record)
        self._run.log({"step": found.step, **found.by_name})

    def close(self, summary: Record) -> None:
        """Note the summary's figures, and end the run."""
        self._run.summary.update({f"final_{name}": summary.get(name) for name in _FIGURES})
        self._run.finish(exit_code=int(summary.get("state") == "failed"))
        self._wandb.teardown()  # waits for W&B's own process, which writes the last records


class TensorBoard:
    """Event files in the run's folder `tensorboard/`."""

    def __init__(self, run_dir: pathlib.Path) -> None:
        """Begin a new event file; TensorBoard joins the files of all attempts."""
        from torch.utils import tensorboard

        folder = run_dir / "tensorboard"
        self._writer: typing.Any = tensorboard.SummaryWriter(str(folder))
        log.emit("TRACK", tensorboard=folder)

    def record(self, record: Record) -> None:
        """Hand the numbers of a record to TensorBoard's own thread."""
        found = _figures(record)
        for name, value in found.by_name.items():
            self._writer.add_scalar(name, value, found.step)

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


class _Figures(typing.NamedTuple):
    """The numbers of a record, by name."""

    step: int
    time_s: float  # since 1970
    by_name: dict[str, float]


def _figures(record: Record) -> _Figures:
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    step = numbers.pop("step", 0.0)
    time_s = numbers.pop("time", 0.0) or time.time()
    numbers.pop("total_steps", None)
    return _Figures(int(step), time_s, numbers)


def targets(run_dir: pathlib.Path, env: collections.abc.Mapping[str, str]) -> dict[str, Begin]:
    """Return how to begin each tracker that MLFLOW_TRACKING_URI and the flags of 1 ask for."""
    found: dict[str, Begin] = {}
    uri = env.get(URI, "").strip()
    if uri:
        found["MLflow"] = functools.partial(MLflow, run_dir, store_uri(uri))
    if env.get(WANDB) == "1":
        found["WandB"] = functools.partial(WandB, run_dir)
    if env.get(TENSORBOARD) == "1":
        found["TensorBoard"] = functools.partial(TensorBoard, run_dir)
    return found


def store_uri(uri: str) -> str:
    """Return the tracking URI, an SQLite store for a path.

    MLflow since 3.13 refuses plain files.
    """
    path = uri.removeprefix("file://") if uri.startswith("file:") else uri
    if "://" in path:
        return uri.rstrip("/")
    store = f"sqlite:///{pathlib.Path(path).absolute() / 'mlflow.db'}"
    why = "MLflow keeps no runs in plain files since 3.13"
    log.emit("TRACK", f"{why}: {uri} becomes {store}; for many writers use a server")
    return store

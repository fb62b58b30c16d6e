"""The layout of a run's folder: the only module that opens files below runs/<run>/. Call it through folders.call."""

import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import math
import os
import pathlib
import re
import shutil
import time

from ddp.host.files import MAX_LISTED, RefusedError, replace
from ddp.node import rank_connections, small_files, unpacking
from ddp.node.diagnosis import absent_ranks, attempt_files, evidence, excerpts, first_failure
from ddp.run import metrics, places, reading, state
from ddp.run.model import Attempt, Checkpoint, Failure, Run
from ddp.run.reading import Json
from ddp.slurm import jobs

RECORD, METRICS = "job.json", "metrics.jsonl"
RUN_FILES = frozenset(
    "logs control job.sbatch parts.sbatch job.json program sweep.jsonl args code code.json".split()
)
_WRITERS = 8
_BRIEF_BYTES = 1 << 16  # of a metrics.jsonl that is looked at briefly
_LOG_BYTES = 256 * 1024
_MAX_ROWS = 200  # attempts or failures
_MAX_CHECKPOINTS = 20
_MAX_FRAMES = 200  # lines of a traceback
_LIVE_S = 60.0  # clocks of nodes differ
_SUBMISSION_S = 600.0  # an intent this old belongs to no submission that is still under way


# -- writing -----------------------------------------------------------------------------------------------------------


def create(
    path: pathlib.Path, texts: dict[str, str], *, again: bool
) -> dict[str, str | None] | None:
    """Make a run's folder with its files, by name. Raises RefusedError if it exists, unless `again`.

    Returns the former content of these files, None for one that did not exist; None if the folder is new.
    """
    former: dict[str, str | None] | None = None
    try:
        path.mkdir(mode=0o755)
    except FileExistsError:
        if not again:
            raise RefusedError(f"{path} exists already") from None
        former = dict.fromkeys(texts)
        for name in texts:
            with contextlib.suppress(FileNotFoundError):
                former[name] = (path / name).read_text(errors="replace")
    for name in ("logs", "control"):
        (path / name).mkdir(mode=0o755, exist_ok=True)
    _write_all(path, texts)
    return former


def undo(path: pathlib.Path, former: dict[str, str | None] | None, elements: int = 0) -> None:
    """Undo `create` or `create_sweep`: remove a new folder unless a job has used it, give another its former files."""
    if former is None:
        remove(*_places(path, elements))
        return
    _write_all(path, {name: text for name, text in former.items() if text is not None})
    for name in (name for name, text in former.items() if text is None):
        (path / name).unlink(missing_ok=True)


def remove(*paths: pathlib.Path) -> None:
    """Remove the folders of runs that never started; one that holds more than `create` wrote stays."""
    for path in paths:
        held = set(reading.names(path))
        if held <= RUN_FILES and not any(
            reading.names(path / name) for name in held & {"logs", "control"}
        ):
            shutil.rmtree(path)


def create_sweep(
    path: pathlib.Path, texts: dict[str, str], elements: collections.abc.Sequence[dict[str, str]]
) -> None:
    """Make a sweep's folder and one for each of its runs, or none of them."""
    places = _places(path, len(elements))
    for place in filter(os.path.lexists, places):
        if not is_unfinished(place, "" if place == path else path.name):
            raise RefusedError(f"{place} exists already")
    made: list[pathlib.Path] = []
    try:
        for place, files in zip(places, [texts, *elements], strict=True):
            place.mkdir(mode=0o755, exist_ok=True)
            made.append(place)
            create(place, files, again=True)
    except BaseException:
        for place in made:
            shutil.rmtree(place, ignore_errors=True)
        raise


def _places(path: pathlib.Path, elements: int) -> list[pathlib.Path]:
    return [path, *(path.with_name(f"{path.name}-{number}") for number in range(elements))]


def is_unfinished(path: pathlib.Path, sweep: str = "") -> bool:
    """Return whether a submission died on its way, as with its mount: no job ever used this run's folder.

    It holds nothing but what `create` writes, or a part of that. `sweep` is the one that the run is of.
    """
    record = read_record(path)
    is_of_another = bool(record) and record.get("sweep", "") != sweep
    if is_of_another or record.get("job_id") is not None or "previous" in record:
        return False
    held = reading.names(path)
    is_of_pods = "code" in held and "job.sbatch" not in held  # of `ddp render --kubernetes`
    is_ours = all(name in RUN_FILES or _is_partial(name) for name in held)
    return (
        is_ours
        and not is_of_pods
        and not any(reading.names(path / name) for name in ("logs", "control"))
    )


def _is_partial(name: str) -> bool:
    """Return whether a file's name is the one that `replace` gave it while it was written."""
    return name.startswith(".") and name[1:].rpartition(".")[0] in RUN_FILES


def kind_of(path: pathlib.Path) -> str | None:
    """Return the kind of a folder's run; "" if its job.json is lost and no other file tells; None: it is no run's."""
    if record := read_record(path):
        return str(record["kind"]) if "kind" in record else None
    found = read(path)
    has_started = bool(
        found.attempts or found.checkpoints or found.metrics.num_records or found.job_id
    )
    is_of_pods = not os.path.lexists(path / "job.sbatch")
    return found.kind if has_started and not is_of_pods else None


def write_record(path: pathlib.Path, record: collections.abc.Mapping[str, object]) -> None:
    """Write a run's job.json."""
    replace(path / RECORD, dump(record))


def is_intent(record: Json) -> bool:
    """Whether a job.json was written before sbatch, and nobody has noted sbatch's answer in it."""
    return record.get("job_id") is None and "submission" in record


def settle(path: pathlib.Path, job_id: int | None) -> None:
    """Complete an intent with its job, or if Slurm has none for it give it up, for the record that it replaced."""
    record = read_record(path)
    if not is_intent(record):
        return
    if job_id is not None:
        write_record(path, {**without_previous(record), "job_id": job_id})
    elif time.time() - (path / RECORD).stat().st_mtime > _SUBMISSION_S:
        del record["submission"]
        write_record(path, reading.as_object(record.get("previous")) or record)


def without_previous(record: Json) -> Json:
    """Return a record without the one that it replaced."""
    return {name: value for name, value in record.items() if name != "previous"}


def dump(record: collections.abc.Mapping[str, object]) -> str:
    """Format a job.json."""
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


def _write_all(path: pathlib.Path, texts: dict[str, str]) -> None:
    """Write files, many at a time: most of a small file's way to a network filesystem is waiting."""
    for name in texts:
        for above in reversed(pathlib.PurePath(name).parents[:-1]):
            (path / above).mkdir(mode=0o755, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(_WRITERS) as pool:
        for written in [pool.submit(replace, path / name, text) for name, text in texts.items()]:
            written.result()


# -- reading -----------------------------------------------------------------------------------------------------------


def read_record(path: pathlib.Path) -> Json:
    """Read a run's job.json; empty if there is none."""
    return reading.json_object(path / RECORD)


def read_places(path: pathlib.Path) -> places.Places:
    """Read where a run's code came from, and which copy it ran."""
    record = read_record(path)
    code, of = (
        reading.as_object(record.get("code")),
        path.with_name(str(record.get("sweep") or path.name)),
    )
    own = reading.json_object(of / "program" / RECORD).get("origin") or code.get("origin") or ""
    return places.Places(str(own).rstrip("/"), str(of / str(code.get("folder") or "code")))


def summarised(path: pathlib.Path) -> float:
    """Return when a run's summary was written, in seconds since 1970; 0 if it has none."""
    return reading.written(path / "summary.json") or 0.0


def read(
    path: pathlib.Path,
    *,
    is_brief: bool = False,
    reader: metrics.Reader | None = None,
    user: str = "",
) -> Run:
    """Read a run; absent and damaged files are named in its notes. Raises FileNotFoundError if it does not exist.

    With `is_brief` only the end of metrics.jsonl and no checkpoints; `reader` has read its metrics.jsonl before.
    """
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such run", str(path))
    notes: list[str] = []
    record = reading.json_object(path / RECORD, notes)
    summary = reading.json_object(path / "summary.json", notes)
    if (
        record.get("summary_before")
        and reading.written(path / "summary.json") == record["summary_before"]
    ):
        summary = {}  # of an earlier job
    reader = reader or metrics.Reader(path / METRICS, tail_bytes=_BRIEF_BYTES if is_brief else None)
    measured = reader.read()
    if measured.bad_lines > 0:
        notes.append(f"{METRICS}: {measured.bad_lines} lines are not records and were skipped")
    number = _job_id(path, record)
    failures = read_failures(path)
    attempts = _attempts(path, failures)
    changed = [path / RECORD, path / "summary.json", path / METRICS]
    times = [reading.written(one) or 0.0 for one in changed]
    times += [one.ended for one in attempts if one.ended]
    hosts = (
        " ".join(reading.tail(path / "control" / f"{number}.hosts", 1 << 20)).split()
        if number
        else []
    )
    ranks = [reading.as_object(rank) for rank in reading.as_list(summary.get("ranks"))]
    found = Run(
        name=path.absolute().name,
        folder=path.absolute(),
        record=record,
        config=reading.json_object(path / "config.json", notes),
        summary=summary,
        metrics=measured,
        job_id=number,
        attempts=tuple(attempts[-_MAX_ROWS:]),
        failures=tuple(failures[-_MAX_ROWS:]),
        checkpoints=() if is_brief else tuple(_checkpoints(path)),
        hosts=tuple(hosts)
        or tuple(dict.fromkeys(str(rank["host"]) for rank in ranks if rank.get("host"))),
        tracking_url=str(reading.json_object(path / "tracking.json").get("url") or ""),
        curve_png=str(path / "loss.png") if (path / "loss.png").is_file() else "",
        written=max(times),
        checkpointed=reading.written(path / "latest"),
        notes=tuple(notes),
        unpacked_percent=tuple(_unpacked_percent(path / "control")),
        remark=_remark(path / "control", attempts),
        user=user,
    )
    return state.with_job(found, jobs.NOT_ASKED)


def _unpacked_percent(control: pathlib.Path) -> collections.abc.Iterator[int]:
    """Yield the percentages that nodes write every second; a file that is older was left by a node that failed."""
    for path in (
        control / name for name in reading.names(control) if name.endswith(unpacking.UNPACKING)
    ):
        if time.time() - (reading.written(path) or 0.0) < _LIVE_S:
            yield reading.number("".join(reading.tail(path, 16)), 0)


def _remark(control: pathlib.Path, attempts: list[Attempt]) -> str:
    """Read what the last attempt's first node found strange: that its ranks never connected."""
    own = [one.name for one in attempts if one.order[0] >= 0]  # a failure's name may be anything
    return (
        " ".join(reading.tail(control / f"{own[-1]}{rank_connections.SUFFIX}", 2000)).strip()
        if own
        else ""
    )


def names(runs: pathlib.Path) -> list[str]:
    """List the runs, the last submitted first; a folder without any of a run's files is not one."""
    found: list[tuple[float, str]] = []
    if not runs.exists():  # this user has submitted nothing yet
        return []
    with os.scandir(runs) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                    continue
                places = [
                    pathlib.Path(entry.path, name) for name in (RECORD, METRICS, "summary.json")
                ]
                times = [
                    reading.written(place) or 0.0 if place.is_file() else 0.0 for place in places
                ]
                if any(times):
                    found.append((times[0] or max(times), entry.name))
    return [name for _, name in sorted(found, reverse=True)[:MAX_LISTED]]


def newest(runs: pathlib.Path, *, is_started: bool) -> str | None:
    """Return the run submitted last, except what a submission started by itself and elements that have not started.

    With `is_started` a sweep does not count either: it has no job of its own to look into.
    """
    for name in names(runs):
        record = read_record(runs / name)
        is_waiting = "sweep" in record and not reading.tail(runs / name / "control" / "job", 100)
        if not (
            record.get("automatic") or is_waiting or (is_started and record.get("kind") == "sweep")
        ):
            return name
    return None


def read_failures(path: pathlib.Path) -> list[Failure]:
    """Read control/<job>.failures: time, attempt, fault, node and reason, tab-separated."""
    found: list[Failure] = []
    own = read_places(path)
    for name in reading.names(path / "control"):
        if name.endswith(".failures"):
            rows = (
                own.translate(line).split("\t", 4)
                for line in reading.tail(path / "control" / name, _LOG_BYTES)
            )
            found += [Failure(*words) for words in rows if len(words) == 5]
    return sorted(found, key=lambda failure: failure.time)


def _job_id(path: pathlib.Path, record: Json) -> int | None:
    """Return the id of the run's last job, of a sweep's element that of its task; without job.json the newest log's."""
    started = reading.tail(
        path / "control" / "job", 100
    )  # an element's job has its id once it starts
    if started and (number := reading.number(started[-1].strip(), 0)):
        return number
    if "sweep" in record:
        return None
    if record and not is_intent(record):
        number = record.get("job_id")
        return number if type(number) is int else None
    logs = [path / "logs" / name for name in reading.names(path / "logs") if name.endswith(".out")]
    log = max(logs, key=lambda log: reading.written(log) or 0.0, default=path / "logs" / "none")
    is_later = not record or (reading.written(log) or 0.0) >= (
        reading.written(path / RECORD) or 0.0
    )
    return reading.number(log.stem, 0) or None if is_later else None


def _attempts(path: pathlib.Path, failed: list[Failure]) -> list[Attempt]:
    """Read the attempts that left an outcome, a failure or logs, in the order of their start.

    The launcher makes the folder of an attempt's logs when it starts the ranks, so its time is the attempt's start.
    """
    control, logs = path / "control", reading.names(path / "logs")
    outcomes = {
        name.removesuffix(".outcome")
        for name in reading.names(control)
        if name.endswith(".outcome")
    }
    failures = {failure.attempt: failure for failure in failed}
    found: list[Attempt] = []
    for name in (
        outcomes
        | failures.keys()
        | {name for name in logs if attempt_files.attempt_order(name)[0] >= 0}
    ):
        place = (
            control / f"{name}.outcome" if name in outcomes else None
        )  # a failure's name may be anything
        outcome = reading.json_object(place) if place else {}
        failure = failures.get(name)
        code = outcome.get("exit_code")
        why = str(outcome.get("error") or (failure.reason if failure else ""))
        found.append(
            Attempt(
                name=name,
                began=reading.written(path / "logs" / name) if name in logs else None,
                ended=reading.written(place) if place else None,
                outcome=str(outcome.get("outcome") or ("failed" if failure else "")),
                step="" if outcome.get("step") is None else str(outcome["step"]),
                why=why or (f"exit code {code}" if code is not None else ""),
                exit_code=code if type(code) is int else None,
                loss=reading.real(outcome.get("loss")),
            )
        )
    return sorted(
        found, key=lambda attempt: (attempt.began or attempt.ended or math.inf, attempt.order)
    )


def _checkpoints(path: pathlib.Path) -> collections.abc.Iterator[Checkpoint]:
    links = (path / "latest", path / "best")
    latest, best = (link.readlink().name if link.is_symlink() else "" for link in links)
    for place in sorted(path.glob("epoch-*"))[-_MAX_CHECKPOINTS:]:
        if manifest := reading.json_object(place / "manifest.json"):
            meta = reading.as_object(manifest.get("meta")) or manifest
            yield Checkpoint(place.name, meta.get("step"), place.name == latest, place.name == best)


# -- jobs and elements -------------------------------------------------------------------------------------------------


def find_job(runs: pathlib.Path, job_id: int, element: int | None = None) -> str | None:
    """Find the run of a job, or of an element of a sweep's array.

    Of several it is the last written, since a new controller counts job ids from 1.
    """
    if element is None and (logs := list(runs.glob(f"*/logs/{int(job_id)}.out"))):
        return max(logs, key=lambda path: reading.written(path) or 0.0).parent.parent.name
    for name in names(runs):
        record = read_record(runs / name)
        if job_id not in (record.get("job_id"), record.get("array_job_id")) or "sweep" in record:
            continue
        if element is None:
            return name
        if record.get("kind") == "sweep" and element < reading.number(str(record.get("count")), 0):
            return f"{name}-{element}"
    return None


# -- logs --------------------------------------------------------------------------------------------------------------


def _outputs(path: pathlib.Path, job_id: int, rank: int | None) -> list[pathlib.Path]:
    """Return a job's merged log, or the files of one rank's output in its last attempt, the last written last."""
    if rank is None:
        return [path / "logs" / f"{job_id}.out"]
    found = [log for log in attempt_files.rank_logs(path, job_id) if log.rank == rank]
    return [log.path for log in sorted(found, key=lambda log: log.written)]


def read_log(
    path: pathlib.Path, job_id: int, *, lines: int, rank: int | None
) -> tuple[str, list[str]]:
    """Return where a job's output is, or one rank's in its last attempt, and its last lines with the user's paths."""
    found = _outputs(path, job_id, rank)
    if not found:
        raise FileNotFoundError(
            errno.ENOENT, f"no output of rank {rank}", str(path / "logs" / f"{job_id}.r*")
        )
    text = [line for place in found for line in small_files.tail(place, small_files.MAX_TAIL_BYTES)]
    where = found[0] if rank is None else found[0].parent
    return str(where), list(map(read_places(path).translate, text[-lines:]))


def follow_log(
    path: pathlib.Path, job_id: int, *, rank: int | None, offsets: dict[str, int]
) -> tuple[list[str], dict[str, int]]:
    """Read the whole lines behind `offsets`, of a new file its last lines; return also up to where each was read."""
    lines: list[str] = []
    after = dict(offsets)
    for place in _outputs(path, job_id, rank):
        new, after[str(place)] = new_lines(place, offsets.get(str(place)))
        lines += new
    return list(map(read_places(path).translate, lines)), after


def new_lines(path: pathlib.Path, begin: int | None) -> tuple[list[str], int]:
    """Read the whole lines behind `begin`, at most MAX_TAIL_BYTES, and up to where; None: the last lines."""
    with contextlib.suppress(OSError), small_files.opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - small_files.MAX_TAIL_BYTES)
        begin = last if begin is None else max(begin if 0 <= begin <= size else 0, last)
        file.seek(begin)
        data = file.read(small_files.MAX_TAIL_BYTES)
        whole = data.rfind(b"\n") + 1 or (
            len(data) if len(data) == small_files.MAX_TAIL_BYTES else 0
        )
        return data[:whole].decode(errors="replace").splitlines(), begin + whole
    return [], begin or 0


def last_lines(run: Run, lines: int = 40) -> list[str]:
    """Read the last lines of the log of a run's last job; none if it is unreadable."""
    return list(
        map(read_places(run.folder).translate, reading.tail(run.log_path, _LOG_BYTES)[-lines:])
    )


@dataclasses.dataclass(frozen=True)
class FirstFailure:
    """The rank that failed first with its last lines, or the ranks that never joined."""

    rank: int | None
    host: str
    lines: list[str]
    place: str  # in the user's code, such as train.py:21
    absent_ranks: list[int]
    absent_nodes: list[str]


def find_failure(path: pathlib.Path, job_id: int, lines: int) -> FirstFailure:
    """Find why a job failed, with the user's own paths."""
    in_order = reading.tail(path / "control" / f"{int(job_id)}.hosts", 1 << 20)
    hosts = " ".join(in_order).split()  # of the ranks
    found = evidence.gather(path, job_id, hosts=hosts, max_lines=_MAX_FRAMES)
    failure = first_failure.find(found)
    absent = absent_ranks.find(found, failure.lines)

    known = read_places(path)
    return FirstFailure(
        rank=failure.rank,
        host=found.host(failure.node),
        lines=[known.translate(line) for line in failure.lines[-lines:]],
        place=known.find(failure.lines),
        absent_ranks=absent.ranks,
        absent_nodes=absent.hosts,
    )


def find_failed_elements(path: pathlib.Path, array: int) -> list[tuple[int, str]]:
    """Find the elements of an array whose logs end with an error, each with that line, at most ten."""
    failed: list[tuple[int, str]] = []
    numbered = [
        (log.stem.rpartition("_")[2], log) for log in (path / "logs").glob(f"{int(array)}_*.out")
    ]
    for number, log in sorted((int(number), log) for number, log in numbered if number.isdecimal()):
        lines = [line.strip() for line in reading.tail(log, 65536) if line.strip()]
        errors = [line for line in lines if excerpts.is_error(line)]
        if errors and not any(line.startswith("[DONE]") for line in lines[-1:]):
            failed.append((number, re.sub(r"^\w+:ddptrain:\[FATAL\] ", "", errors[-1])[:500]))
    return failed[:10]


def measured_rates(runs: pathlib.Path) -> list[Json]:
    """Read the rates of the newest finished trainings, with what they depend on."""
    rates: list[Json] = []
    for name in names(runs)[:100]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            config = small_files.read_object(runs / name / "config.json")
            summary = small_files.read_object(runs / name / "summary.json")
            rate, world = float(summary["tokens_per_second"]), int(summary["world_size"])
            if rate > 0 and world > 0:
                about = {
                    key: config.get(key)
                    for key in ("model", "seq_len", "batch", "grad_accum", "precision")
                }
                about |= {
                    "nodes": summary.get("nodes"),
                    "run": name,
                    "tokens_per_second": rate,
                    "world_size": world,
                }
                rates.append(about | {"on_gpu": str(summary["ranks"][0]["device"]) != "cpu"})
    return rates

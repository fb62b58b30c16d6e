"""Operations of operations.py on runs: made, removed, read, followed."""

import concurrent.futures
import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import stat

from ddp.node.explain import (
    MAX_JSON_BYTES,
    MAX_TAIL_BYTES,
    TELLING,
    Json,
    absentees,
    attempt_of,
    first_failure,
    opened,
    rank_logs,
    read_object,
    tail,
)
from ddp.workspace.files import MAX_LISTED, RefusedError, replace

RUN_FILES = {
    "logs", "control", "job.sbatch", "job.json", "program", "sweep.jsonl", "args", "code",
}  # fmt: skip
_WRITERS = 8


def create_run(workspace: str, run: str, texts: dict[str, str], again: bool) -> Json:
    """Make a run's folder with its files. An existing run is refused unless `again`."""
    folder = pathlib.Path(workspace, "runs", run)
    try:
        folder.mkdir(mode=0o755)
    except FileExistsError:
        if not again:
            raise RefusedError(f"{folder} exists already") from None
    for name in ("logs", "control"):
        (folder / name).mkdir(mode=0o755, exist_ok=True)
    _write_all(folder, texts)
    return {}


def _write_all(folder: pathlib.Path, texts: dict[str, str]) -> None:
    """Write files, many at a time: most of a small file's way to a network filesystem is waiting."""
    for name in texts:
        for above in reversed(pathlib.PurePath(name).parents[:-1]):
            (folder / above).mkdir(mode=0o755, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(_WRITERS) as pool:
        for written in [pool.submit(replace, folder / name, text) for name, text in texts.items()]:
            written.result()


def create_sweep(workspace: str, run: str, texts: dict[str, str], elements: list[dict[str, str]]) -> Json:
    """Make a sweep's folder and one for each of its runs, or none of them."""
    top = pathlib.Path(workspace, "runs")
    folders = [top / run, *(top / f"{run}-{number}" for number in range(len(elements)))]
    if taken := [path for path in folders if path.exists() or path.is_symlink()]:
        raise RefusedError(f"{taken[0]} exists already")
    made: list[pathlib.Path] = []
    try:
        for folder, files in zip(folders, [texts, *elements], strict=True):
            folder.mkdir(mode=0o755)
            made.append(folder)
            for name in ("logs", "control"):
                (folder / name).mkdir(mode=0o755)
            _write_all(folder, files)
    except BaseException:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return {}


def remove_sweep(workspace: str, run: str, count: int) -> Json:
    """Remove the folders of a sweep that never started."""
    for name in [run, *(f"{run}-{number}" for number in range(count))]:
        remove_run(workspace, name)
    return {}


def number_sweep(workspace: str, run: str, count: int, job_id: int) -> Json:
    """Note in the sweep's and its runs' job.json as which job they were submitted."""
    for name in [run, *(f"{run}-{number}" for number in range(count))]:
        path = pathlib.Path(workspace, "runs", name, "job.json")
        replace(path, json.dumps({**read_object(path), "job_id": job_id}, indent=1, sort_keys=True) + "\n")
    return {}


def read_sweep(workspace: str, run: str) -> Json:
    """Return how each run of a sweep stands: its job once it has one, its last outcome and its last loss."""
    top = pathlib.Path(workspace, "runs")
    about = read_object(top / run / "job.json")
    rows: list[Json] = []
    for number in range(min(int(about["count"]), MAX_LISTED)):
        told = read_run(workspace, f"{run}-{number}", None)
        job: Json = told["job"] or {}
        summary: Json = told["summary"] or {}
        metric: Json = told["metric"] or {}
        started = bool(job.get("started"))
        loss = summary.get("last_loss", metric.get("loss"))
        row: Json = {"run": f"{run}-{number}", "job_id": job.get("job_id") if started else None, "outcome": None}
        if started:
            outcomes = sorted((top / row["run"] / "control").glob(f"{int(row['job_id'])}.r*.outcome"), key=attempt_of)
            with contextlib.suppress(OSError, ValueError, IndexError):
                row["outcome"] = read_object(outcomes[-1]).get("outcome")
        rows.append({**row, "choice": job.get("choice", ""), "loss": loss, "step": metric.get("step")})
    return {"job_id": about.get("job_id"), "rows": rows}


def remove_run(workspace: str, run: str) -> Json:
    """Remove the folder of a run that never started; one that holds more than `create_run` put there stays."""
    folder = pathlib.Path(workspace, "runs", run)
    held = {path.name for path in folder.iterdir()}
    used = any(any((folder / name).iterdir()) for name in held & {"logs", "control"})
    if held <= RUN_FILES and not used:
        shutil.rmtree(folder)
        return {"removed": True}
    return {"removed": False}


def list_runs(workspace: str) -> Json:
    """Return the names of the runs that hold a job, the last submitted first."""
    found: list[tuple[float, str]] = []
    for path in pathlib.Path(workspace, "runs").iterdir():
        with contextlib.suppress(OSError):
            found.append(((path / "job.json").lstat().st_mtime, path.name))
    return {"runs": [name for _, name in sorted(found, reverse=True)[:MAX_LISTED]]}


def find_element(workspace: str, array: int, element: int) -> Json:
    """Return the run that this element of an array is, or is a part of; None where there is no such element."""
    for run in list_runs(workspace)["runs"]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            job = read_object(pathlib.Path(workspace, "runs", run, "job.json"))
            if job.get("kind") == "sweep" and job["job_id"] == array:
                return {"run": f"{run}-{element}" if element < int(job["count"]) else None, "of": run}
            if job.get("kind") == "prepare" and job["array_job_id"] == array:
                return {"run": run if element < int(job["elements"]) else None, "of": run}
    return {"run": None, "of": None}


def find_run(workspace: str, job_id: int) -> Json:
    """Return the run that this job is, or was, an attempt at: the last written, since a new controller counts anew."""
    if logs := sorted(pathlib.Path(workspace, "runs").glob(f"*/logs/{int(job_id)}.out"), key=_time):
        return {"run": logs[-1].parent.parent.name}
    for run in list_runs(workspace)["runs"]:
        with contextlib.suppress(OSError, ValueError):
            if read_object(pathlib.Path(workspace, "runs", run, "job.json")).get("job_id") == job_id:
                return {"run": run}
    return {"run": None}


def read_run(workspace: str, run: str, job_id: int | None) -> Json:
    """Return what a run says of itself: job.json, summary.json, the job's last outcome and the last step's metric."""
    folder = pathlib.Path(workspace, "runs", run)
    answer: Json = {"job": None, "summary": None, "outcome": None, "metric": None, "summary_written": 0.0}
    with contextlib.suppress(OSError, ValueError):
        answer["job"] = read_object(folder / "job.json")
        if "sweep" in answer["job"]:  # the job of one task of an array is known when it has started
            with contextlib.suppress(OSError, ValueError, IndexError):
                answer["job"]["job_id"] = int(tail(folder / "control" / "job", 100)[-1])
                answer["job"]["started"] = True
    with contextlib.suppress(OSError, ValueError):
        answer["summary"] = read_object(folder / "summary.json")
        answer["summary_written"] = (folder / "summary.json").stat().st_mtime
    if job_id is not None:
        outcomes = sorted((folder / "control").glob(f"{int(job_id)}.r*.outcome"), key=attempt_of)
        with contextlib.suppress(OSError, ValueError, IndexError):
            answer["outcome"] = read_object(outcomes[-1])
    with contextlib.suppress(OSError):
        for line in reversed(tail(folder / "metrics.jsonl", 65536)):
            with contextlib.suppress(ValueError, RecursionError):
                metric = json.loads(line)
                if isinstance(metric, dict) and "step" in metric:
                    answer["metric"] = metric
                    break
    return answer


def read_log(
    workspace: str, run: str, job_id: int, *, lines: int, rank: int | None, element: int | None = None
) -> Json:
    """Return the last lines of a job's merged log, or of one rank's own output in its last attempt."""
    logs = pathlib.Path(workspace, "runs", run, "logs")
    if rank is None:
        path = logs / _log_name(job_id, element)
        return {"path": str(path), "lines": tail(path, MAX_TAIL_BYTES)[-lines:]}
    found = [log for log in rank_logs(pathlib.Path(workspace, "runs", run), job_id) if log["rank"] == rank]
    if not found:
        raise FileNotFoundError(errno.ENOENT, f"no output of rank {rank}", str(logs / f"{job_id}.r*"))
    found.sort(key=lambda log: log["written"])
    text = [line for log in found for line in tail(pathlib.Path(log["path"]), MAX_TAIL_BYTES)]
    return {"path": str(pathlib.Path(found[0]["path"]).parent), "lines": text[-lines:]}


def follow_log(
    workspace: str, run: str, job_id: int, *, rank: int | None, offsets: dict[str, int], element: int | None = None
) -> Json:
    """Return whole lines that a log has gained since `offsets`, and the new offsets; of a new file the lines so far."""
    folder = pathlib.Path(workspace, "runs", run)
    paths = [str(folder / "logs" / _log_name(job_id, element))]
    if rank is not None:
        paths = [log["path"] for log in rank_logs(folder, job_id) if log["rank"] == rank]
    lines: list[str] = []
    after = dict(offsets)
    for path in paths:
        with contextlib.suppress(FileNotFoundError), opened(pathlib.Path(path)) as file:
            size = os.fstat(file.fileno()).st_size
            begin = offsets.get(path, max(0, size - MAX_TAIL_BYTES))
            file.seek(begin if begin <= size else 0)
            data = file.read(MAX_TAIL_BYTES)
            whole = data.rfind(b"\n") + 1 or (len(data) if len(data) == MAX_TAIL_BYTES else 0)
            lines += data[:whole].decode(errors="replace").splitlines()
            after[path] = (begin if begin <= size else 0) + whole
    return {"lines": lines, "offsets": after}


def find_failure(workspace: str, run: str, job_id: int, lines: int) -> Json:
    """Return the last lines of the rank that failed first, or else of the job's log; and what failed before that."""
    folder = pathlib.Path(workspace, "runs", run)
    history: list[str] = []
    with contextlib.suppress(OSError):
        history = tail(folder / "control" / f"{int(job_id)}.failures", 65536)
    failure = first_failure(folder, job_id, lines)
    hosts: list[str] = []
    with contextlib.suppress(OSError):  # in the order of the ranks, which is not that of the names
        hosts = " ".join(tail(folder / "control" / f"{int(job_id)}.hosts", 1 << 20)).split()
    node: int | None = failure["node"]
    ranks, nodes = absentees(folder, int(job_id), failure["lines"], hosts)
    host = hosts[node] if node is not None and node < len(hosts) else ""
    return {**failure, "host": host, "history": history, "absent_ranks": ranks, "absent_nodes": nodes}


def list_results(workspace: str, limit: int) -> Json:
    """Return the runs, the newest first, each with job.json, summary.json, its last outcome and its last metric.

    What cannot be read counts as not there; a folder with none of our files is foreign.
    """
    found: list[tuple[float, pathlib.Path]] = []
    foreign = 0
    with os.scandir(pathlib.Path(workspace, "runs")) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                    continue
                times = [
                    _time(pathlib.Path(entry.path, name)) for name in ("job.json", "metrics.jsonl", "summary.json")
                ]
                if any(times):
                    found.append((times[0] or max(times), pathlib.Path(entry.path)))
                else:
                    foreign += 1
    found.sort(reverse=True, key=lambda pair: (pair[0], pair[1].name))
    runs: list[Json] = []
    for _, folder in found[: max(1, limit)]:
        one = read_run(workspace, folder.name, None)
        whole: Json = one["summary"] or {}
        summary: Json = {key: value for key, value in whole.items() if not isinstance(value, dict | list)}
        told: Json = {"name": folder.name, "job": one["job"], "metric": one["metric"]}
        runs.append(told | {"summary": summary, "outcome": _outcome(folder, one["job"])})
    return {"runs": runs, "count": len(found), "foreign": foreign}


def read_result(workspace: str, run: str) -> Json:
    """Return all that a run left: what was asked, settings, figures, checkpoints, attempts, the curve in points."""
    folder = pathlib.Path(workspace, "runs", run)
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such run", str(folder))
    one = read_run(workspace, run, None)
    answer: Json = {"name": run, "job": one["job"], "summary": one["summary"], "outcome": _outcome(folder, one["job"])}
    for key, name in (("config", "config.json"), ("tracking", "tracking.json")):
        answer[key] = None
        with contextlib.suppress(OSError, ValueError):
            answer[key] = read_object(folder / name)
    answer |= {"steps": [], "evals": [], "lines": 0, "lost": None}
    with contextlib.suppress(OSError):
        answer |= _curve(folder / "metrics.jsonl")
    checkpoints: list[Json] = []
    for path in sorted(folder.glob("epoch-*"))[-MAX_LISTED:]:
        with contextlib.suppress(OSError, ValueError):
            manifest = read_object(path / "manifest.json")
            meta: Json = manifest["meta"] if isinstance(manifest.get("meta"), dict) else manifest
            checkpoints.append({"name": path.name, "step": meta.get("step")})
    answer["checkpoints"] = checkpoints[-20:]
    for link in ("latest", "best"):
        answer[link] = None
        with contextlib.suppress(OSError):
            answer[link] = (folder / link).readlink().name
    attempts: list[Json] = []
    for path in sorted((folder / "control").glob("*.outcome"), key=_time)[-20:]:
        with contextlib.suppress(OSError, ValueError):
            told = read_object(path)
            name = path.name.removesuffix(".outcome")
            attempts.append({"attempt": name, "outcome": str(told.get("outcome"))[:40], "step": told.get("step")})
    answer["attempts"] = attempts
    png = folder / "loss.png"
    answer["png"] = str(png) if _time(png) else None
    return answer


def read_curve(workspace: str, run: str) -> Json:
    """Return (step, loss) of training and validation; nothing where a run has no metrics."""
    with contextlib.suppress(OSError):
        return _curve(pathlib.Path(workspace, "runs", run, "metrics.jsonl"))
    return {"steps": [], "evals": [], "lines": 0, "lost": None}


def read_briefly(workspace: str, runs: list[str]) -> Json:
    """Return of each run job.json, config.json, summary.json, its last outcome and its last metric."""
    found: list[Json] = []
    for run in runs:
        one = read_run(workspace, run, None)
        folder = pathlib.Path(workspace, "runs", run)
        config: Json | None = None
        with contextlib.suppress(OSError, ValueError):
            config = read_object(folder / "config.json")
        found.append({**one, "name": run, "config": config, "outcome": _outcome(folder, one["job"])})
    return {"runs": found}


def find_failed_elements(workspace: str, run: str, array: int) -> Json:
    """Return the elements of an array whose logs say why they failed, each with that line, at most ten."""
    failed: list[Json] = []
    logs = pathlib.Path(workspace, "runs", run, "logs")
    numbered = [(path.stem.rpartition("_")[2], path) for path in logs.glob(f"{int(array)}_*.out")]
    for number, path in sorted((int(number), path) for number, path in numbered if number.isdecimal()):
        with contextlib.suppress(OSError):
            lines = [line.strip() for line in tail(path, 65536) if line.strip()]
            telling = [line for line in lines if TELLING.search(line)]
            if telling and not any(line.startswith("[DONE]") for line in lines[-1:]):
                line = re.sub(r"^\w+:ddptrain:\[FATAL\] ", "", telling[-1])
                failed.append({"element": number, "line": line[:500]})
    return {"failed": failed[:10]}


def measured_rates(workspace: str) -> Json:
    """Return the rates that the newest finished trainings left, with what they depend on."""
    rates: list[Json] = []
    for run in list_runs(workspace)["runs"][:100]:
        folder = pathlib.Path(workspace, "runs", run)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            config, summary = read_object(folder / "config.json"), read_object(folder / "summary.json")
            device = str(summary["ranks"][0]["device"])
            rate, world = float(summary["tokens_per_second"]), int(summary["world_size"])
            if rate > 0 and world > 0:
                about = {name: config.get(name) for name in ("model", "seq_len", "batch", "grad_accum", "precision")}
                about["nodes"] = summary.get("nodes")
                rates.append(
                    about | {"run": run, "tokens_per_second": rate, "world_size": world, "on_gpu": device != "cpu"}
                )
    return {"rates": rates}


def _log_name(job_id: int, element: int | None) -> str:
    return f"{int(job_id)}.out" if element is None else f"{int(job_id)}_{int(element)}.out"


def _time(path: pathlib.Path) -> float:
    """Return when a file was written; 0 where there is none."""
    with contextlib.suppress(OSError):
        about = path.lstat()
        return about.st_mtime if stat.S_ISREG(about.st_mode) else 0.0
    return 0.0


def _outcome(folder: pathlib.Path, job: Json | None) -> Json | None:
    """Return what the last attempt of a run's last job wrote."""
    number = (job or {}).get("job_id")
    found = sorted((folder / "control").glob("*.outcome"), key=_time)
    found = [path for path in found if number is None or path.name.startswith(f"{number}.")]
    for path in reversed(found):
        with contextlib.suppress(OSError, ValueError):
            return read_object(path)
    return None


def _curve(path: pathlib.Path) -> Json:
    """Return (step, loss) of training and validation and how many records there are; of a large file a sample.

    `lost` is the first step of those at the end whose loss is not a finite number; None where the last one's is.
    """
    steps: dict[int, float] = {}
    evals: dict[int, float] = {}
    not_finite: list[int] = []
    lines = 0
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        blocks = [(0, size)] if size <= MAX_JSON_BYTES else [(size * part // 64, 65536) for part in range(64)]
        if len(blocks) > 1:
            blocks.append((size - 65536, 65536))
        for at, length in blocks:
            file.seek(at)
            text = file.read(length).decode(errors="replace")
            pieces = text.split("\n")[1 if at else 0 :]
            lines += len(pieces)
            for piece in pieces:
                try:
                    record = json.loads(piece)
                    step = int(record["step"])
                    key, target = ("val_loss", evals) if record.get("kind") == "eval" else ("loss", steps)
                    value = float(record[key])
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                    continue  # half a line, or somebody's own
                if abs(value) < 1e300:
                    target[step] = value
                elif target is steps:
                    not_finite.append(step)
    known = len(steps) + len(evals) + len(not_finite)
    if len(blocks) > 1 and lines:
        known = int(known * size / sum(length for _, length in blocks))
    lost = min((step for step in not_finite if step > max(steps, default=-1)), default=None)
    return {"steps": _thinned(steps), "evals": _thinned(evals), "lines": known, "lost": lost}


def _thinned(points: dict[int, float]) -> list[tuple[int, float]]:
    ordered = sorted(points.items())
    every = -(-len(ordered) // 2000) or 1
    return ordered[::every] if not ordered or ordered[-1] in ordered[::every] else [*ordered[::every], ordered[-1]]

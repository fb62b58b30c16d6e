"""A run's folder before its job: made whole, undone, or unfinished. Call it in `Workspace.do`."""

import collections.abc
import concurrent.futures
import contextlib
import functools
import os
import pathlib
import shutil
import typing

from ddp.host.files import RefusedError, replace
from ddp.node import small_files, spec
from ddp.run import folder, untrusted

_WRITERS = 8
_MAX_FUNCTION_BYTES = 4 << 30  # of arguments that were pickled
FUNCTION = "function.pkl"  # the ranks read it: ddptrain.functions.calls
RUN_FILES = frozenset(
    f"logs control job.sbatch parts.sbatch job.json program sweep.jsonl args code code.json {FUNCTION}".split()
)

Former = dict[str, bytes | None]  # the content of each file before; None: it is new


def create(
    path: pathlib.Path, texts: dict[str, str], *, program: bytes = b"", again: bool
) -> Former | None:
    """Make a run's folder with files of these texts, and with the program of its job.

    With `again` the folder may exist: returns what each file held. Returns None if the folder is
    new. Raises RefusedError if it exists.
    """
    files = {name: text.encode() for name, text in texts.items()}
    if program:
        files[f"program/{spec.PROGRAM}"] = program
    former: Former | None = None
    try:
        path.mkdir(mode=0o755)
    except FileExistsError:
        if not again:
            raise RefusedError(f"{path} exists already") from None
        former = {name: _read(path / name) for name in files}
    for name in ("logs", "control"):
        (path / name).mkdir(mode=0o755, exist_ok=True)
    # A job of this run may be starting from these files, through a cache of its node that knows the
    # old ones
    changed = {name: data for name, data in files.items() if not former or former[name] != data}
    _write_all(path, changed)
    return former


def _read(path: pathlib.Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def undo(path: pathlib.Path, former: Former | None, elements: int = 0) -> None:
    """Undo `create` or `create_sweep`: remove new folders, give an old one its former files back.

    A folder that a job has used stays.
    """
    if former is None:
        remove(*_places(path, elements))
        return
    _write_all(path, {name: data for name, data in former.items() if data is not None})
    for name, data in former.items():
        if data is None:
            (path / name).unlink(missing_ok=True)


def remove(*paths: pathlib.Path) -> None:
    """Remove the folders of runs that never started, unless they hold more than `create` wrote."""
    for path in paths:
        is_ours = RUN_FILES.issuperset(untrusted.names(path))
        if is_ours and not _was_used(path):
            shutil.rmtree(path)


def _was_used(path: pathlib.Path) -> bool:
    """Return whether a job has written into a run's folder."""
    return any(untrusted.names(path / name) for name in ("logs", "control"))


def keep_function(path: pathlib.Path, source: pathlib.Path) -> None:
    """Copy the file with a function's calls into a run's folder, which only its owner reads.

    Raises RefusedError.
    """
    partial = path / f".{FUNCTION}.{os.getpid()}"
    try:
        with small_files.opened(source) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > _MAX_FUNCTION_BYTES:
                text = f"{source} has {num_bytes >> 20} MiB; at most {_MAX_FUNCTION_BYTES >> 20}"
                raise RefusedError(f"{text} are sent along, so let the function read its data")
            with _private_file(partial) as target:
                shutil.copyfileobj(file, target, 1 << 20)
                target.flush()
                os.fsync(target.fileno())
        partial.replace(path / FUNCTION)
    except OSError as e:
        raise RefusedError(f"{source} cannot be copied to {path}: {e.strerror or e}") from e
    finally:
        partial.unlink(missing_ok=True)


def _private_file(path: pathlib.Path) -> typing.BinaryIO:
    """Make a file that only this account can read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def create_sweep(
    path: pathlib.Path,
    texts: dict[str, str],
    elements: collections.abc.Sequence[dict[str, str]],
    *,
    program: bytes,
) -> None:
    """Make a sweep's folder and one for each of its runs, all or nothing."""
    places = _places(path, len(elements))
    for place in filter(os.path.lexists, places):
        sweep = "" if place == path else path.name
        if not is_unfinished(place, sweep):
            raise RefusedError(f"{place} exists already")
    made: list[pathlib.Path] = []
    try:
        for place in places:
            place.mkdir(mode=0o755, exist_ok=True)
            made.append(place)
        create(path, texts, program=program, again=True)
        # Several at a time: a small file on a network filesystem is mostly waiting
        fill = functools.partial(create, again=True)
        with concurrent.futures.ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(fill, places[1:], elements))
    except BaseException:
        for place in made:
            shutil.rmtree(place, ignore_errors=True)
        raise


def _places(path: pathlib.Path, elements: int) -> list[pathlib.Path]:
    return [path, *(path.with_name(f"{path.name}-{number}") for number in range(elements))]


def is_unfinished(path: pathlib.Path, sweep: str = "") -> bool:
    """Return whether a submission died on its way, for example with its mount.

    Then no job used the run's folder, and it holds at most the files that `create` writes. `sweep`
    is the sweep that the run belongs to.
    """
    record = folder.read_record(path)
    is_of_another = bool(record) and record.get("sweep", "") != sweep
    has_job = record.get("job_id") is not None or "previous" in record
    if is_of_another or has_job:
        return False

    held = untrusted.names(path)
    is_of_pods = "code" in held and "job.sbatch" not in held  # of `ddp render --kubernetes`
    is_ours = all(name in RUN_FILES or _is_partial(name) for name in held)
    return is_ours and not is_of_pods and not _was_used(path)


def _is_partial(name: str) -> bool:
    """Return whether this is the name of a file that `replace` had not finished."""
    return name.startswith(".") and name[1:].rpartition(".")[0] in RUN_FILES


def kind_of(path: pathlib.Path) -> str | None:
    """Return the kind of the run in a folder; None if the folder is not a run's.

    If job.json is lost, the kind is "" unless another file tells.
    """
    record = folder.read_record(path)
    if record:
        return str(record["kind"]) if "kind" in record else None
    found = folder.read(path)
    has_results = bool(found.attempts or found.checkpoints or found.metrics.num_records)
    has_started = has_results or bool(found.job_id)
    is_of_pods = not os.path.lexists(path / "job.sbatch")
    if is_of_pods or not has_started:
        return None
    return found.kind


def _write_all(path: pathlib.Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (path / name).parent.mkdir(mode=0o755, exist_ok=True)
        replace(path / name, data)

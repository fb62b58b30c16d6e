"""The specification of a job: one JSON file beside the program, written at submission, parsed strictly in the job."""

import dataclasses
import json
import types
import typing

MAX_BYTES = 4 * 1024 * 1024


class SpecError(Exception):
    """The file is not a job's specification; `str()` names the field at fault."""


@dataclasses.dataclass(frozen=True)
class Word:
    """A word of the ranks' command: a text, or the value of `RUN_DIR` or `resume`."""

    text: str
    is_variable: bool = False


@dataclasses.dataclass(frozen=True)
class Environment:
    """The Python environment that the job unpacks on each node."""

    archive: str
    cache: str  # folder on the node's own disk, private to the job's user
    sha256: str
    unpacked_bytes: int
    python: str  # version, such as 3.12
    trusted_uids: tuple[int, ...]  # who may own the archive and the folders above it, beside root and the job's user
    remedy: str  # the command that builds a damaged archive anew
    parts: tuple[tuple[int, str], ...] = ()  # bytes and SHA-256 of each part of the archive; () where it is one


@dataclasses.dataclass(frozen=True)
class Fabric:
    """One kind of network, as ddp.submit.fabrics describes it."""

    name: str
    variables: tuple[tuple[str, str], ...]
    interface: str
    found_by: tuple[str, ...]
    needs: tuple[str, ...]
    hint: str
    library_path: str
    profile: str
    afterwards: tuple[tuple[str, str], ...]
    mounts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Container:
    """The image that the ranks run in instead of an environment."""

    image: str
    payload: str  # folder that holds the payload's package
    variables: str  # names of the variables that go before the image's, comma-separated


@dataclasses.dataclass(frozen=True)
class Profile:
    """The profiler, and the ranks that it records."""

    kind: str  # nsys or torch
    ranks: str  # comma-separated
    has_window: bool  # the payload starts and stops the recording


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A training, or each task of a sweep."""

    run: str
    job_dir: str
    workspace: str
    cache: str  # folder on each node's own disk, for the environment and for output until it is copied
    command: tuple[Word, ...]
    resume: str  # the value of the word `resume` in a run without a checkpoint of its own
    leaves_outcome: bool  # the program writes its outcome to a file
    ranks_per_node: int
    gpus_per_node: int
    launcher: str  # torchrun or srun
    variables: tuple[tuple[str, str], ...]
    fabric: str  # a name, or auto
    fabrics: tuple[Fabric, ...]
    environment: Environment | None
    container: Container | None
    profile: Profile | None
    max_requeues: int
    max_restarts: int
    nodelist: tuple[str, ...]
    exclude: tuple[str, ...]
    reservation: str
    is_sweep: bool
    token_path: str  # file with a Hugging Face token; empty: the job gets none


@dataclasses.dataclass(frozen=True)
class PrepareSpec:
    """The preparation of a dataset: one job, or each element of an array."""

    run_dir: str
    cache: str
    environment: Environment
    commands: tuple[tuple[str, ...], ...]  # arguments of `python -m`, in turn
    elements: int  # of the array; 0: there is none


Spec = typing.TypeVar("Spec")


def dump(spec: JobSpec | PrepareSpec) -> str:
    """Serialize a specification to JSON."""
    return json.dumps(dataclasses.asdict(spec), indent=1) + "\n"


def load(kind: type[Spec], path: str) -> Spec:
    """Parse the specification in a file. Raises SpecError, or OSError where it cannot be read."""
    with open(path, encoding="utf-8") as file:
        return parse(kind, file.read(MAX_BYTES), path)


def parse(kind: type[Spec], text: str, path: str) -> Spec:
    """Parse a specification's text, which the file `path` holds. Raises SpecError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise SpecError(f"{path} is not JSON: {e}") from e
    return _parse(kind, value, path)


def _parse(kind: typing.Any, value: typing.Any, where: str) -> typing.Any:
    """Parse `value` as a `kind`, a type of the dataclasses above. Raises SpecError."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _parse(inner[0], value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise SpecError(f"{where} must be a list")
        items = typing.cast(list[typing.Any], value)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_parse(inner[0], item, f"{where}[{n}]") for n, item in enumerate(items))
        if len(items) != len(inner):
            raise SpecError(f"{where} must have {len(inner)} items")
        return tuple(_parse(one, item, f"{where}[{n}]") for n, (one, item) in enumerate(zip(inner, items, strict=True)))
    if not dataclasses.is_dataclass(kind):
        if type(value) is not kind:
            raise SpecError(f"{where} must be of type {kind.__name__}")
        return value
    if not isinstance(value, dict):
        raise SpecError(f"{where} must be an object")
    given = typing.cast(dict[str, typing.Any], value)
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    if set(given) != set(fields):
        raise SpecError(f"{where}: unknown or missing: {', '.join(sorted(set(given) ^ set(fields)))}")
    parsed = {name: _parse(fields[name], given[name], f"{where}: {name}") for name in fields}
    return typing.cast(typing.Any, kind)(**parsed)

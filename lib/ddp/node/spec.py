"""The specification of a job: a JSON file that submission writes and the job parses."""

import dataclasses
import itertools
import json
import os
import types
import typing

PROGRAM = "ddp.pyz"  # the archive of the job's program, next to its specification


def program_of(spec_path: str) -> str:
    """Return the path of the program that a specification is for."""
    return os.path.join(os.path.dirname(spec_path), PROGRAM)


@dataclasses.dataclass(frozen=True)
class Word:
    """A word of the ranks' command: a text, or the value of `RUN_DIR` or `resume`."""

    text: str
    is_variable: bool = False


@dataclasses.dataclass(frozen=True)
class Archive:
    """An archive that is unpacked to a folder of its name without `.tar.zst`."""

    path: str
    sha256: str
    unpacked_bytes: int
    remedy: str  # the command that builds a damaged archive again
    parts: tuple[tuple[int, str], ...] = ()  # bytes and SHA-256 of each; (): it is one part


@dataclasses.dataclass(frozen=True)
class Environment:
    """The Python environment that the job unpacks on each node."""

    layers: tuple[Archive, ...]  # the environment, then a layer in front, whose Python then runs
    cache: str  # folder on the node's own disk, private to the job's user
    python: str  # version, such as 3.12; empty: it is an image
    # Accounts that may own the archives and the folders above, like root and the job's user
    trusted_uids: tuple[int, ...]
    cache_remedy: str = ""  # what to type for another folder than `cache`


@dataclasses.dataclass(frozen=True)
class Fabric:
    """One kind of network, as ddp.options.fabrics describes it."""

    name: str
    variables: tuple[tuple[str, str], ...] = ()
    interface: str = ""
    found_by: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    hint: str = ""
    library_path: str = ""
    profile: str = ""
    afterwards: tuple[tuple[str, str], ...] = ()
    mounts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Container:
    """The image that the ranks run in; an imported one is unpacked as the job's environment."""

    image: str
    variables: str  # names of the variables that go before the image's, comma-separated
    oci_fixed: tuple[str, ...] = ()  # the versions of Slurm whose OCI runtime is safe; empty: any


@dataclasses.dataclass(frozen=True)
class Accelerate:
    """The settings of `accelerate launch`, which its own parser reads on each node."""

    words: tuple[str, ...] = ()  # its flags
    configuration: str = ""  # the text of its file; "": it has none
    suffix: str = ""  # of that file


@dataclasses.dataclass(frozen=True)
class Mirror:
    """The target of finished checkpoints, and the environment of the program that copies them."""

    url: str  # of a bucket, and a prefix in it
    environment: Environment


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A training, or each task of a sweep."""

    run: str
    job_dir: str
    workspace: str
    cache: str  # folder on each node's own disk, for the environment and output not yet copied
    command: tuple[Word, ...]
    resume: str  # the value of the word `resume` in a run that has no checkpoint yet
    leaves_outcome: bool  # the program writes its outcome to a file
    ranks_per_node: int
    gpus_per_node: int
    variables: tuple[tuple[str, str], ...]
    fabric: str  # a name, or auto
    fabrics: tuple[Fabric, ...]
    environment: Environment | None
    container: Container | None
    max_requeues: int
    max_restarts: int
    nodelist: tuple[str, ...]
    exclude: tuple[str, ...]
    reservation: str
    is_sweep: bool
    token_path: str  # file with a Hugging Face token; empty: the job gets none
    metrics: tuple[tuple[str, str], ...]  # in rank 0's output: names, and the text around each
    workdir: str  # the folder that the ranks start in
    origin: str = ""  # the root of the user's project, which may have been copied
    secrets_path: str = ""  # JSON object of variables that only the user may read; empty: none
    notify_path: str = ""  # file with the URL to post to at the end; empty: none
    python: str = ""  # of the user's own environment, which runs in place; empty: another one
    nodes: int = 0  # that the ranks use, if the job has spare ones; 0: all of the job's
    payload: str = ""  # folder with the payload's package, for an image and the user's own Python
    stop_signal: str = ""  # to the ranks as they are asked to stop, such as USR1; "": $STOP_FILE
    again: tuple[str, ...] = ()  # arguments that let the program continue: ddp.node.continuation
    launcher: str = "torchrun"  # or node: one process a node, which may start ranks of its own
    is_command: bool = False  # the command's first word is looked up on the environment's PATH
    accelerate: Accelerate | None = None
    mirror: Mirror | None = None
    jupyter: Environment | None = None  # of a notebook's server


@dataclasses.dataclass(frozen=True)
class PrepareSpec:
    """The preparation of a dataset: one job, or each element of an array."""

    run_dir: str
    cache: str
    environment: Environment
    commands: tuple[tuple[str, ...], ...]  # arguments of `python -m`, in turn
    elements: int  # of the array; 0: there is none


Spec = typing.TypeVar("Spec")


def dump(spec: JobSpec | PrepareSpec | Environment) -> str:
    """Serialize a specification to JSON."""
    return json.dumps(dataclasses.asdict(spec), indent=1) + "\n"


def load(kind: type[Spec], path: str) -> Spec:
    """Parse the specification in a file. Raises OSError if it cannot be read."""
    with open(path, encoding="utf-8") as file:
        return parse(kind, file.read())


def parse(kind: type[Spec], text: str) -> Spec:
    """Parse a specification of this kind that `dump` serialized."""
    return build(kind, json.loads(text))


def build(kind: typing.Any, value: typing.Any) -> typing.Any:
    """Build a `kind`, a dataclass or a type of its fields, from JSON or TOML.

    Names may have hyphens.
    """
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is types.UnionType:
        return None if value is None else build(inner[0], value)
    if typing.get_origin(kind) is tuple:
        kinds = itertools.repeat(inner[0]) if inner[-1] is Ellipsis else inner
        pairs = zip(kinds, value)  # noqa: B905 - repeat() is endless
        return tuple(build(one, item) for one, item in pairs)
    if dataclasses.is_dataclass(kind):
        kinds = {field.name: field.type for field in dataclasses.fields(kind)}
        given: dict[str, typing.Any] = {}
        for key, item in value.items():
            name = key.replace("-", "_")
            if name in kinds:
                given[name] = build(kinds[name], item)
        return typing.cast(typing.Any, kind)(**given)
    return value

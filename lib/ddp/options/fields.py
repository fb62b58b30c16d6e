"""The types of options: each text has an alphabet, each number bounds, each error one line.

No alphabet has quotes, blanks (except in lists of words), control characters, `$`, backquotes,
backslashes or braces, so nothing passes that a shell, Slurm, jinja2 or a terminal would interpret.
Values of sbatch's own options are Slurm's to judge: any printable ASCII without quotes and
backslashes, which reaches only directives of a script and the command lines of Slurm's programs.
Arguments and variables of a program may hold any character: they travel as JSON and reach the
program as they are, never a shell.
"""

import collections.abc
import dataclasses
import re
import shlex
import typing
import urllib.parse

import pydantic

from ddp.node import continuation, output_metrics
from ddp.options import fabrics
from ddp.problem import ParameterError, shown
from slurm_ddp.slurm import times

MAX_NODES, MAX_GPUS, MAX_CPUS = 4096, 64, 4096
MAX_LINES = 1000
MAX_SWEEP = 256  # runs of one sweep
MAX_PROFILED_STEPS = 1000  # a trace of more is too large to look at
MAX_WORDS = 32_768  # characters of arguments or variables
# Variables that ddp.node and torchrun set in each job
RESERVED = frozenset(
    """
    HEAD_IP HEAD_NODE HEAD_PORT JOB_DIR LIFELINE MY_IP NNODES NODE_RANK NPROC PROGRAM_PORT
    PYTHONFAULTHANDLER PYTHONSAFEPATH PYTHONUNBUFFERED RUN_ATTEMPT_ID RUN_DIR STOP_FILE TORCH_FR_BUFFER_SIZE
    TORCH_FR_DUMP_TEMP_FILE TORCH_NCCL_DUMP_ON_TIMEOUT
    GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT RANK ROLE_NAME ROLE_RANK
    ROLE_WORLD_SIZE TORCHELASTIC_ERROR_FILE TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE TORCHELASTIC_MAX_RESTARTS
    TORCHELASTIC_RESTART_COUNT TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE WORLD_SIZE
    """.split()
)
Check = collections.abc.Callable[[str], str]  # of a text, which it returns. Raises ValueError
# Names of variables with secrets, by their ends
_SECRET = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD|PASSPHRASE)", re.ASCII | re.IGNORECASE)
# sbatch(1), output environment variables: Slurm sets them in every job
_SLURMS = re.compile(r"SLURMD?_.*")
# sbatch(1), long options: the job sets these and relies on them
SBATCH_KEPT = tuple(
    """
    array batch bb bbf chdir clusters container cores-per-socket cpus-per-gpu cpus-per-task error export export-file
    extra-node-info get-user-env gid gpus gpus-per-socket gpus-per-task hold ignore-pbs input job-name
    kill-on-invalid-dep mem mem-per-cpu mem-per-gpu mincpus no-kill no-requeue nodes ntasks ntasks-per-core
    ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output overcommit parsable propagate quiet requeue
    signal test-only time tres-per-task uid use-min-nodes verbose version wait wait-all-nodes wrap
    """.split()
)


@dataclasses.dataclass(frozen=True)
class Limits(pydantic.AfterValidator):
    """Two bounds or a few choices, which the declaration of an option shows."""

    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Directive:
    """The option of sbatch(1) that an option sets, with the same value unless that is computed."""

    name: str
    # `ddp.submit.resources` computes the value, also for an option that is not given
    is_computed: bool = False


def matches(pattern: str, limit: int, allowed: str, also: Check = str) -> pydantic.AfterValidator:
    """Return a check of a text's length and pattern; `allowed` says in the error what passes."""

    def check(value: str) -> str:
        if len(value) > limit:
            raise ValueError(f"{len(value)} characters; at most {limit} are allowed")
        if not re.fullmatch(pattern, value, re.ASCII):  # compiled on use: no command needs them all
            raise ValueError(f"{shown(value)} is not allowed; {allowed}")
        return also(value)

    return pydantic.AfterValidator(check)


def between(least: int, most: int) -> pydantic.AfterValidator:
    """Return a check of a whole number's bounds."""

    def check(value: int) -> int:
        if not least <= value <= most:
            raise ValueError(f"{value} is not allowed; a whole number from {least} to {most}")
        return value

    return Limits(check, least, most)


def among(*choices: str) -> pydantic.AfterValidator:
    """Return a check that a text is one of a few choices."""

    def check(value: str) -> str:
        if value not in choices:
            raise ValueError(f"{shown(value)} is not allowed; one of: {', '.join(choices)}")
        return value

    return Limits(check, choices=choices)


_QUANTITY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,63}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)


def _check_path(value: str) -> str:
    if {"..", "."} & set(value.split("/")):
        raise ValueError(f"{shown(value)} is not allowed; write the path without . and .. as parts")
    return value


def _check_time(value: str) -> str:
    seconds = times.parse_time(value)
    if value not in times.NO_LIMIT and (seconds is None or not 60 <= seconds <= 365 * 86400):
        raise ValueError(f"{shown(value)} is not allowed; {_TIME}")
    return value


def _check_grid(value: str) -> str:
    names = [word.partition("=")[0] for word in value.split()]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice")
    return value


def _check_steps(value: str) -> str:
    first, last = (int(part) for part in value.split("-"))
    if not 1 <= first <= last or last - first >= MAX_PROFILED_STEPS:
        rule = f"first and last step, at most {MAX_PROFILED_STEPS} of them"
        raise ValueError(f"{shown(value)} is not allowed; {rule}")
    return value


def _check_words(value: str) -> str:
    try:
        shlex.split(value)
    except ValueError as e:
        why = f"{str(e).lower()}: write \\ before a quote or a backslash"
        raise ValueError(f"{shown(value)} is not allowed; {why}") from e
    return value


def _check_env(value: str) -> str:
    for word in shlex.split(value):
        name, equals, _ = word.partition("=")
        if not _VARIABLE.fullmatch(name):
            how = "quote a value with blanks, as in A='b c'"
            raise ValueError(f"{shown(word)} is not NAME=value; {how}")
        check_unreserved(name)
        _check_secrecy(name, has_value=bool(equals))
        if not equals:
            raise ValueError(f"{name} has no value; write {name}=value")
    return value


def _check_secrecy(name: str, *, has_value: bool) -> None:
    """Raise ValueError for a secret, which others could read in the job's script."""
    is_readable = f"{name} would be in the job's script for others to read"
    if name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        raise ValueError(f"{is_readable}; use the trainer's hf-token")
    if not is_secret(name):
        return
    if not has_value:
        how = f"export {name}, or use env-file with a file of mode 0600"
        raise ValueError(f"{name} has no value; {how}")
    how = "use env-file with a file of mode 0600"
    how += ", or in a terminal export it and give env its name alone"
    raise ValueError(f"{is_readable}; {how}")


def check_unreserved(name: str) -> None:
    """Raise ValueError for a variable that the job itself sets."""
    if name in RESERVED or _SLURMS.fullmatch(name):
        raise ValueError(f"{name} is set by the job itself; choose another variable")


def is_secret(name: str) -> bool:
    """Return whether a variable holds a secret, by its name."""
    return _SECRET.fullmatch(name) is not None


def parse_variables(text: str) -> dict[str, str]:
    """Parse lines of NAME=value, in quotes or not, and comments after #.

    Raises ValueError, which shows no value.
    """
    found: dict[str, str] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").partition("=")
        if not equals or not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ValueError(f"line {number} is not NAME=value")
        check_unreserved(name)
        is_quoted = re.fullmatch(r"'.*'|\".*\"", value) is not None
        found[name] = value[1:-1] if is_quoted else value
    return found


def _check_metric(value: str) -> str:
    for line in value.splitlines():
        name, _, text = line.partition("=")
        if not _QUANTITY.fullmatch(name) or name in ("kind", "time", "best"):
            raise ValueError(f"{shown(line)} is not allowed; NAME=TEXT, such as 'loss=loss: {{}}'")
        try:
            output_metrics.Text(text)
        except ValueError as e:
            raise ValueError(f"{shown(line)}: {e}, such as '{name}={name}: {{}}'") from None
    return value


def _check_again(value: str) -> str:
    continuation.check(shlex.split(_check_words(value)))
    return value


def _check_notify(value: str) -> str:
    return _check_path(value) if value.startswith("/") else check_url(value)


def check_url(value: str) -> str:
    """Return an http(s) URL. Raises ValueError, which shows nothing of it: it may be a secret."""
    try:
        parts = urllib.parse.urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or not re.fullmatch(r"[!-~]{1,2048}", value):
        raise ValueError("is not an http(s) URL; give one, or the absolute path of a file with one")
    return value


def parse_gpus(text: str) -> tuple[tuple[str, int], ...]:
    """Split GPUs, as --gpus-per-node names them, into types and numbers; "" means any type.

    If a type is repeated, Slurm takes its last number. Raises ValueError.
    """
    found: dict[str, int] = {}
    for item in text.split(","):
        kind, _, number = item.rpartition(":")
        if not number.isdecimal():  # a type alone is one of it
            kind = item
            number = "1"
        if not item or item.startswith(":") or ":" in kind:
            raise ValueError(f"{shown(text)} is not allowed; a number, or TYPE:NUMBER")
        found[kind] = int(number)
    return tuple(found.items())


def num_gpus(text: str | None) -> int | None:
    """Return the number of GPUs that a checked text names; None if there is none."""
    if text is None:
        return None
    return sum(number for _, number in parse_gpus(text))


def gpus_of_gres(text: str) -> str:
    """Return the GPUs that --gres names, as --gpus-per-node names them, or ""."""
    found: list[str] = []
    for item in text.split(","):
        name, _, rest = item.removeprefix("gres:").partition(":")
        if name == "gpu":
            found.append(rest or "1")
    return ",".join(found)


def _check_gpus(value: str) -> str:
    total = sum(number for _, number in parse_gpus(value))
    if total > MAX_GPUS:
        raise ValueError(f"{shown(value)} is not allowed; a number from 0 to {MAX_GPUS}")
    return value


_WORD = "[A-Za-z0-9][A-Za-z0-9._-]*"
_PATH = r"/[A-Za-z0-9._/+@=-]*"
_PATH_RULE = "an absolute path of letters, digits and . _ / + @ = -"
_NAME_RULE = "only letters, digits and . _ -, beginning with a letter or digit"
_TIME = (
    "minutes, MM:SS, H:MM:SS, D-H, D-H:MM or D-HH:MM:SS, from 1 minute to 365 days, or UNLIMITED"
)


def _path(*words: str) -> pydantic.AfterValidator:
    """Return a check that a text is an absolute path, or one of some words."""
    also = f"{', '.join(words)} or " if words else ""
    return matches("|".join((*words, _PATH)), 1024, f"{also}{_PATH_RULE}", _check_path)


Name = typing.Annotated[str, matches(_WORD, 64, _NAME_RULE)]
# Something is put before or behind it
ShortName = typing.Annotated[str, matches(_WORD, 56, _NAME_RULE)]
Names = typing.Annotated[
    str, matches(f"{_WORD}([, ] ?{_WORD})*", 600, "names, separated by commas or blanks")
]
Path = typing.Annotated[str, _path()]
_MODULE = r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)*"  # gpt and smoke among them
Workload = typing.Annotated[
    str, matches(f"{_MODULE}|{_PATH}", 1024, f"gpt, smoke or {_PATH_RULE}", _check_path)
]
Python = typing.Annotated[str, _path("auto", "none")]
Source = typing.Annotated[str, _path("python-stdlib")]
Tokenizer = typing.Annotated[str, _path("auto", "byte", "gpt2")]
Dataset = typing.Annotated[
    str,
    matches(
        rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,63}}|{_PATH}",
        1024,
        f"a dataset's name or {_PATH_RULE}",
        _check_path,
    ),
]
Words = typing.Annotated[
    str, matches(r"[^\0]*", MAX_WORDS, "words without NUL, quoted as in a shell", _check_words)
]
Again = typing.Annotated[
    str, matches(r"[^\0]*", MAX_WORDS, "words without NUL, quoted as in a shell", _check_again)
]
Metrics = typing.Annotated[
    str, matches(r"[ -~\n]*", 2000, "NAME=TEXT with printable ASCII", _check_metric)
]
Notify = typing.Annotated[str, pydantic.AfterValidator(_check_notify)]
_BUCKET = r"(s3|gs|az)://[a-z0-9][a-z0-9._-]{1,62}(/[A-Za-z0-9._=-]+)*/?|file:///[A-Za-z0-9._/=-]+"
_BUCKET_RULE = "a bucket without credentials, such as s3://models/physics, gs:// or az://"
Bucket = typing.Annotated[str, matches(_BUCKET, 512, _BUCKET_RULE, _check_path)]
Env = typing.Annotated[Words, pydantic.AfterValidator(_check_env)]
_AXIS = r"[a-z][A-Za-z0-9_.-]*=[A-Za-z0-9._+/:@%^-]+(,[A-Za-z0-9._+/:@%^-]+)*"
_GRID_RULE = "options with their values, such as: lr=0.001,0.003 batch=8,16"
Grid = typing.Annotated[str, matches(rf"( *{_AXIS} *)*", 4096, _GRID_RULE, _check_grid)]
# Values of sbatch's own options, which Slurm judges
_SLURMS_FIRST, _SLURMS_REST = r"[!#-&(-,.-\[\]-_a-~]", r"([ !#-&(-\[\]-_a-~]*[!#-&(-\[\]-_a-~])?"
_SLURMS_RULE = "printable ASCII without quotes and backslashes, as sbatch takes it"
SlurmsOwn = typing.Annotated[str, matches(_SLURMS_FIRST + _SLURMS_REST, 1024, _SLURMS_RULE)]
Time = typing.Annotated[
    str, matches(rf"[0-9:-]+|{'|'.join(times.NO_LIMIT)}", 24, _TIME, _check_time)
]
_MEMORY, _MEMORY_RULE = r"[1-9][0-9]{0,8}[MGT]?", "a whole number with M, G or T, such as 8G"
SITE = "site"
Memory = typing.Annotated[str, matches(f"{_MEMORY}|{SITE}", 10, f"{_MEMORY_RULE}, or {SITE}")]
MemoryPerCpu = typing.Annotated[str, matches(_MEMORY, 10, _MEMORY_RULE)]
_IMAGE = rf"[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?([#/]{_WORD})*(:[A-Za-z0-9_][A-Za-z0-9._-]*|@sha256:[0-9a-f]{{64}})"
_IMAGE_RULE = (
    "an imported image's name, an image with its tag, such as "
    "nvcr.io#nvidia/pytorch:25.01-py3, or a file's path"
)
Image = typing.Annotated[str, matches(rf"{_WORD}|{_IMAGE}|{_PATH}", 512, _IMAGE_RULE, _check_path)]
_SOURCE_RULE = "docker://IMAGE:TAG, docker-archive:FILE or oci-archive:FILE, as skopeo takes them"
ImageSource = typing.Annotated[
    str, matches(r"(docker:/|(docker|oci)-archive:)[\w./:@+=-]+", 512, _SOURCE_RULE)
]
Ranks = typing.Annotated[str, matches(r"[0-9]{1,6}(,[0-9]{1,6})*", 256, "ranks such as 0 or 0,8")]
_SBATCH_WORD = r"--[a-z][a-z0-9-]{1,40}(=[!#-&(-\[\]-_a-~]{1,200})?"
_SBATCH_RULE = "sbatch's own long options, separated by blanks, such as --nice=100 --switches=1"
Sbatch = typing.Annotated[str, matches(rf"({_SBATCH_WORD}( {_SBATCH_WORD})*)?", 1024, _SBATCH_RULE)]
Steps = typing.Annotated[
    str, matches(r"[0-9]{1,9}-[0-9]{1,9}", 20, "first and last step, such as 10-12", _check_steps)
]
Size = typing.Annotated[
    str, matches(r"[1-9][0-9]{0,11}[KMG]?", 13, "a number of bytes with K, M or G, such as 64M")
]
States = typing.Annotated[
    str, matches(r"[A-Za-z_]+(,[A-Za-z_]+)*", 200, "Slurm's states, such as RUNNING,PENDING")
]
Glob = typing.Annotated[
    str, matches(r"[A-Za-z0-9][A-Za-z0-9._*-]*", 80, "a name in which * is any text, such as lrs*")
]
_SINCE_RULE = "a time ago such as 90m, 12h or 2d, or a date such as 2026-11-20"
Since = typing.Annotated[
    str, matches(r"[1-9][0-9]{0,4}[mhdw]|[12][0-9]{3}[0-9T:Z.+-]{0,36}", 40, _SINCE_RULE)
]
Folder = typing.Annotated[
    str,
    matches(
        r"/[A-Za-z0-9._/-]+", 200, "an absolute path of letters, digits and . _ / -", _check_path
    ),
]
# As useradd and directories take them: the name of a user, or of a group
Login = typing.Annotated[
    str, matches(r"[A-Za-z_][A-Za-z0-9_.-]*", 32, "the name of an account on this host")
]
# Slurm keeps them in lower case
SlurmAccount = typing.Annotated[
    str, matches(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", 64, "letters, digits and . _ -")
]
# An address, a page or a name
Contact = typing.Annotated[
    str, matches(r"[A-Za-z0-9@._:/+ -]*", 100, "an address such as hpc@example.org, or nothing")
]
Account = typing.Annotated[str, matches(r"([a-z_][a-z0-9_-]*)?", 32, "the name of an account")]
_URL = r"https?://[A-Za-z0-9._:/+-]+"
Index = typing.Annotated[
    str, matches(rf"({_URL})?", 500, "the URL of a package index without credentials, or nothing")
]
Tracking = typing.Annotated[
    str,
    matches(
        rf"({_URL}|{_PATH})?",
        500,
        "a server's http(s) URI without credentials, or a path, or nothing",
    ),
]
Lines = typing.Annotated[int, between(1, MAX_LINES)]
Seconds = typing.Annotated[int, between(1, 30 * 86400)]
Count = typing.Annotated[int, between(1, 1 << 20)]
TorchBuild = typing.Annotated[str, among("auto", "cpu", "cuda")]
_VERSION = r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}"
TorchVersion = typing.Annotated[
    str, matches(rf"({_VERSION})?", 11, "a version of torch such as 2.15.0")
]
Torch = typing.Annotated[
    str, matches(rf"auto|cpu|cuda|{_VERSION}", 11, "auto, cpu, cuda, or a version such as 2.15.0")
]
Fabric = typing.Annotated[str, among(*fabrics.NAMES)]

# Options of several verbs that set a directive of sbatch
Partition = typing.Annotated[SlurmsOwn | None, Directive("partition", is_computed=True)]
Nodes = typing.Annotated[
    typing.Annotated[int, between(1, MAX_NODES)] | None, Directive("nodes", is_computed=True)
]
_Gpus = typing.Annotated[SlurmsOwn, pydantic.AfterValidator(_check_gpus)]
_Cpus = typing.Annotated[int, between(1, MAX_CPUS)]
Gpus = typing.Annotated[_Gpus | None, Directive("gpus-per-node", is_computed=True)]
Cpus = typing.Annotated[_Cpus | None, Directive("cpus-per-task", is_computed=True)]


class Parsed(pydantic.BaseModel):
    """Options under their hyphenated names; unknown ones are rejected."""

    model_config = pydantic.ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        alias_generator=lambda name: name.replace("_", "-"),
        defer_build=True,  # until it is used: a command uses two or three of all models
    )


Model = typing.TypeVar("Model", bound=Parsed)


def parse(model: type[Model], given: collections.abc.Mapping[str, object]) -> Model:
    """Parse options; a whole number counts as its text, since YAML makes 30 a number.

    Raises ParameterError.
    """
    known = {
        field.alias or name: field
        for name, field in model.model_fields.items()
        if not field.exclude
    }
    for name in sorted(given):
        if name not in known:
            others = ", ".join(sorted(known))
            raise ParameterError(shown(name)[1:-1], f"unknown option; there are: {others}")

    values = dict(given)
    for name, value in given.items():
        is_text = base_of(known[name].annotation)[0] is str
        if is_text and type(value) is int:  # not True
            values[name] = str(value)

    try:
        return model.model_validate(values)
    except pydantic.ValidationError as e:
        error = e.errors(include_url=False)[0]
        name = str(error["loc"][0])
        raise ParameterError(name, _explain(error, given.get(name))) from None


def base_of(annotation: typing.Any) -> tuple[type, list[object]]:
    """Return the type behind `X | None` and `Annotated`, and its annotations."""
    arguments = typing.get_args(annotation)
    if not arguments:
        return annotation, []
    if hasattr(annotation, "__metadata__"):
        base, marks = base_of(arguments[0])
        return base, [*marks, *annotation.__metadata__]
    return base_of(next(argument for argument in arguments if argument is not type(None)))


_WANTED = {"string": "a text", "int": "a whole number", "bool": "true or false"}


def _explain(error: typing.Any, value: object) -> str:
    """Say in our words what pydantic rejects."""
    kind = str(error["type"])
    if kind == "missing":
        return "must be given"
    for prefix, wanted in _WANTED.items():
        if kind.startswith(prefix):
            return f"{shown(value)} is not allowed; {wanted}"
    return str(error.get("ctx", {}).get("error", error["msg"]))


def directives(model: type[Parsed]) -> dict[str, Directive]:
    """Map a model's attributes to the directives of sbatch that they set, in the declared order."""
    found: dict[str, Directive] = {}
    for name, field in model.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, Directive):
                found[name] = mark
    return found


def variables(text: str) -> tuple[tuple[str, str], ...]:
    """Split a checked `env` into names and values."""
    pairs = (word.partition("=") for word in shlex.split(text))
    return tuple((name, value) for name, _, value in pairs)


def metrics(text: str) -> tuple[tuple[str, str], ...]:
    """Split a checked `metric` into names and the texts around their numbers."""
    lines = (line.partition("=") for line in text.splitlines())
    return tuple((name, around) for name, _, around in lines)


def memory_mb(text: str) -> int:
    """Convert a checked `memory` to MiB; 0 leaves it to the site."""
    if text == SITE:
        return 0
    factors = {"M": 1, "G": 1024, "T": 1024 * 1024}
    unit = text[-1]
    if unit in factors:
        return int(text[:-1]) * factors[unit]
    return int(text)

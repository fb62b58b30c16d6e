"""The charm's edge: options and action parameters, parsed once into frozen models; what is wrong is named in one line.

Every text is held to an alphabet without quotes, blanks (except where words are listed), control characters, `$`,
backquotes, backslashes or braces, so nothing that a shell, Slurm, jinja2 or a terminal would interpret gets any further
than here.
"""

import collections.abc
import re
import typing

import pydantic

from slurm_ddp.slurm import jobs
from trainer_base import ParameterError, shown

MAX_NODES, MAX_GPUS, MAX_CPUS = 4096, 64, 4096
MAX_LINES = 1000
_RESERVED = re.compile(
    r"(SLURM|SBATCH|SRUN|RUN|TORCHELASTIC|PET|ENVIRONMENT)_.*|(MASTER|HEAD)_(ADDR|PORT|IP)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)"
    r"|NODE_RANK|STOP_FILE|OUTCOME|PY|PYTHON.*|NPROC|LD_PRELOAD|BASH.*|ENV|IFS|PATH|HOME|USER|LOGNAME|SHELL|UID|EUID|PPID"
)


_STRICT = pydantic.Strict()


def _matches(pattern: str, limit: int, allowed: str) -> pydantic.AfterValidator:
    """Hold a text to at most `limit` characters and to a pattern; `allowed` says to a person what that is."""
    compiled = re.compile(pattern, re.ASCII)

    def check(value: str) -> str:
        if len(value) > limit:
            raise ValueError(f"{len(value)} characters; at most {limit} are allowed")
        if not compiled.fullmatch(value):
            raise ValueError(f"{shown(value)} is not allowed; {allowed}")
        return value

    return pydantic.AfterValidator(check)


def _between(least: int, most: int) -> pydantic.AfterValidator:
    """Hold a whole number between two bounds."""

    def check(value: int) -> int:
        if not least <= value <= most:
            raise ValueError(f"{value} is not allowed; a whole number from {least} to {most}")
        return value

    return pydantic.AfterValidator(check)


def _among(*choices: str) -> pydantic.AfterValidator:
    """Hold a text to a few choices."""

    def check(value: str) -> str:
        if value not in choices:
            raise ValueError(f"{shown(value)} is not allowed; one of: {', '.join(choices)}")
        return value

    return pydantic.AfterValidator(check)


def _check_path(value: str) -> str:
    parts = value.split("/")
    if ".." in parts or "." in parts:
        raise ValueError(f"{shown(value)} is not allowed; write the path without . and .. as parts")
    return value


def _check_time(value: str) -> str:
    seconds = jobs.parse_time(value)
    if seconds is None or not 60 <= seconds <= 365 * 86400:
        raise ValueError(f"{shown(value)} is not allowed; minutes, H:MM:SS or D-HH:MM:SS, from 1 minute to 365 days")
    return value


def _check_env(value: str) -> str:
    names: set[str] = set()
    for word in value.split():
        name, _, _ = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}=.*", word):
            raise ValueError(f"{shown(word)} is not NAME=value; separate several by blanks")
        if _RESERVED.fullmatch(name):
            raise ValueError(f"{name} is set by the job itself; choose another variable")
        if name in names:
            raise ValueError(f"{name} is given twice")
        names.add(name)
    return value


_NAME = "only letters, digits and . _ -, beginning with a letter or digit"
_TIME = "minutes, H:MM:SS or D-HH:MM:SS, from 1 minute to 365 days"
Name = typing.Annotated[str, _STRICT, _matches(r"[A-Za-z0-9][A-Za-z0-9._-]*", 64, _NAME)]
_PATH = r"/[A-Za-z0-9._/+@=-]*"
_PATH_TEXT = "an absolute path of letters, digits and . _ / + @ = -"
_checked_path = pydantic.AfterValidator(_check_path)
Workload = typing.Annotated[
    str, _STRICT, _matches(rf"gpt|smoke|{_PATH}", 1024, f"gpt, smoke or {_PATH_TEXT}"), _checked_path
]
Source = typing.Annotated[
    str, _STRICT, _matches(rf"python-stdlib|{_PATH}", 1024, f"python-stdlib or {_PATH_TEXT}"), _checked_path
]
Dataset = typing.Annotated[
    str,
    _STRICT,
    _matches(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,63}}|{_PATH}", 1024, f"a dataset's name or {_PATH_TEXT}"),
    _checked_path,
]
Words = typing.Annotated[
    str, _STRICT, _matches(r"[A-Za-z0-9 ._+=/:,@%^-]*", 4096, "only letters, digits, blanks and . _ + = / : , @ % ^ -")
]
Env = typing.Annotated[Words, pydantic.AfterValidator(_check_env)]
Constraint = typing.Annotated[
    str,
    _STRICT,
    _matches(r"[A-Za-z0-9][A-Za-z0-9._-]*([&|][A-Za-z0-9][A-Za-z0-9._-]*)*", 256, "names of features joined by & or |"),
]
Time = typing.Annotated[str, _STRICT, _matches(r"[0-9:-]+", 24, _TIME), pydantic.AfterValidator(_check_time)]
Memory = typing.Annotated[
    str, _STRICT, _matches(r"[1-9][0-9]{0,8}[MGT]?", 10, "a whole number with M, G or T behind it, such as 8G")
]
Flag = typing.Annotated[bool, _STRICT]
Lines = typing.Annotated[int, _STRICT, _between(1, MAX_LINES)]
Seconds = typing.Annotated[int, _STRICT, _between(1, 30 * 86400)]
JobId = typing.Annotated[int, _STRICT, _between(1, 2**31)]
TorchBuild = typing.Annotated[str, _STRICT, _among("auto", "cpu", "cuda")]


class Parsed(pydantic.BaseModel):
    """Options or parameters under their hyphenated names; unknown ones are refused."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", alias_generator=lambda name: name.replace("_", "-"))


class Config(Parsed):
    """The charm's options."""

    workspace: typing.Annotated[
        str,
        _STRICT,
        _matches(r"/[A-Za-z0-9._/-]+", 200, "an absolute path of letters, digits and . _ / -"),
        _checked_path,
    ] = "/mnt/shared"
    submit_user: typing.Annotated[str, _STRICT, _matches(r"[a-z_][a-z0-9_-]*", 32, "the name of an account")] = "ubuntu"
    torch_build: TorchBuild = "auto"
    torch_index: typing.Annotated[
        str,
        _STRICT,
        _matches(r"(https?://[A-Za-z0-9._:/+-]+)?", 500, "the URL of a package index without credentials, or nothing"),
    ] = ""


class Resources(Parsed):
    """The parameters with which an action asks Slurm for a place to run."""

    partition: Name | None = None
    time_limit: Time | None = None
    account: Name | None = None
    qos: Name | None = None
    reservation: Name | None = None


class InstallEnvironment(Parsed):
    """Parameters of install-environment."""

    torch: TorchBuild | None = None
    force: Flag = False


class PrepareDataset(Resources):
    """Parameters of prepare-dataset."""

    name: typing.Annotated[str, _STRICT, _matches(r"[A-Za-z0-9][A-Za-z0-9._-]*", 56, _NAME)] | None = None
    source: Source = "python-stdlib"
    tokenizer: typing.Annotated[str, _STRICT, _among("auto", "byte", "gpt2")] = "auto"
    wait: Flag = True
    wait_timeout: Seconds = 86400


class SubmitDdp(Resources):
    """Parameters of submit-ddp."""

    workload: Workload = "gpt"
    nodes: typing.Annotated[int, _STRICT, _between(1, MAX_NODES)] | None = None
    gpus_per_node: typing.Annotated[int, _STRICT, _between(0, MAX_GPUS)] | None = None
    cpus_per_task: typing.Annotated[int, _STRICT, _between(1, MAX_CPUS)] | None = None
    memory: Memory | None = None
    constraint: Constraint | None = None
    args: Words = ""
    env: Env = ""
    run: Name | None = None
    dataset: Dataset | None = None
    resume: Name = "auto"
    max_requeues: typing.Annotated[int, _STRICT, _between(0, 1000)] = 16
    dry_run: Flag = False
    wait: Flag = False
    wait_timeout: Seconds = 86400


class ListJobs(Parsed):
    """Parameters of list-jobs."""

    lines: Lines = 50


class ShowJob(Parsed):
    """Parameters of show-job."""

    job_id: JobId | None = None
    run: Name | None = None


class JobLog(Parsed):
    """Parameters of job-log."""

    job_id: JobId | None = None
    run: Name | None = None
    rank: typing.Annotated[int, _STRICT, _between(0, MAX_NODES * MAX_GPUS)] | None = None
    lines: Lines = 50


class CancelJob(Parsed):
    """Parameters of cancel-job."""

    job_id: JobId


Model = typing.TypeVar("Model", bound=Parsed)


def parse(model: type[Model], given: collections.abc.Mapping[str, object]) -> Model:
    """Return the parsed parameters or options. Raises ParameterError: what cannot be, what is allowed."""
    known = {field.alias or name: field for name, field in model.model_fields.items()}
    for name in sorted(given):
        if name not in known:
            raise ParameterError(shown(name)[1:-1], f"no such parameter; there are: {', '.join(sorted(known))}")
    try:
        return model.model_validate(dict(given))
    except pydantic.ValidationError as e:
        error = e.errors(include_url=False)[0]
        name = str(error["loc"][0])
        raise ParameterError(name, _explain(error, given.get(name))) from None


def _explain(error: typing.Any, value: object) -> str:
    kind = str(error["type"])
    if kind == "missing":
        return "must be given"
    wanted = {"string": "a text", "int": "a whole number", "bool": "true or false"}
    for prefix, what in wanted.items():
        if kind.startswith(prefix):
            return f"{shown(value)} is not allowed; {what}"
    return str(error.get("ctx", {}).get("error", error["msg"]))


def variables(text: str) -> tuple[tuple[str, str], ...]:
    """Return the names and values of a checked `env`."""
    pairs = (word.partition("=") for word in text.split())
    return tuple((name, value) for name, _, value in pairs)


def memory_mb(text: str) -> int:
    """Return the MiB that a checked `memory` means."""
    factor = {"M": 1, "G": 1024, "T": 1024 * 1024}
    return int(text[:-1]) * factor[text[-1]] if text[-1] in factor else int(text)

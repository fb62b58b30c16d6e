"""The charm's edge: options and action parameters, parsed once into frozen models; what is wrong is named in one line.

Every text is held to an alphabet without quotes, blanks (except where words are listed), control characters, `$`,
backquotes, backslashes or braces, so nothing that a shell, Slurm, jinja2 or a terminal would interpret gets any further
than here.
"""

import collections.abc
import re
import typing

import pydantic

import trainer_fabric
from slurm_ddp.slurm import jobs
from trainer_base import ParameterError, shown

MAX_NODES, MAX_GPUS, MAX_CPUS = 4096, 64, 4096
MAX_LINES = 1000
MAX_SWEEP = 256  # runs of one sweep
MAX_PROFILED_STEPS = 1000  # a trace of more is too large to look at
_RESERVED = re.compile(
    r"(SLURM|SBATCH|SRUN|RUN|JOB|TORCHELASTIC|PET|ENVIRONMENT|FABRIC|PROFILE)_.*|(MASTER|HEAD)_(ADDR|PORT|IP)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)"
    r"|NODE_RANK|STOP_FILE|OUTCOME|LAUNCHER|CONTAINER|PAYLOAD|PROFILE|FABRIC|PY|PYTHON.*|NPROC|LD_PRELOAD|BASH.*|ENV|IFS|PATH|HOME|USER|LOGNAME|SHELL|UID|EUID|PPID"
)


STRICT = pydantic.Strict()


def matches(pattern: str, limit: int, allowed: str) -> pydantic.AfterValidator:
    """Hold a text to at most `limit` characters and to a pattern; `allowed` says to a person what that is."""
    compiled = re.compile(pattern, re.ASCII)

    def check(value: str) -> str:
        if len(value) > limit:
            raise ValueError(f"{len(value)} characters; at most {limit} are allowed")
        if not compiled.fullmatch(value):
            raise ValueError(f"{shown(value)} is not allowed; {allowed}")
        return value

    return pydantic.AfterValidator(check)


def between(least: int, most: int) -> pydantic.AfterValidator:
    """Hold a whole number between two bounds."""

    def check(value: int) -> int:
        if not least <= value <= most:
            raise ValueError(f"{value} is not allowed; a whole number from {least} to {most}")
        return value

    return pydantic.AfterValidator(check)


def among(*choices: str) -> pydantic.AfterValidator:
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
    if value not in jobs.NO_LIMIT and (seconds is None or not 60 <= seconds <= 365 * 86400):
        raise ValueError(f"{shown(value)} is not allowed; {_TIME}")
    return value


def _check_grid(value: str) -> str:
    names = [word.partition("=")[0] for word in value.split()]
    if again := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{again[0]} is given twice")
    return value


def _check_steps(value: str) -> str:
    first, last = (int(part) for part in value.split("-"))
    if not 1 <= first <= last or last - first >= MAX_PROFILED_STEPS:
        raise ValueError(f"{shown(value)} is not allowed; first and last step, at most {MAX_PROFILED_STEPS} of them")
    return value


def _check_env(value: str) -> str:
    names: set[str] = set()
    for word in value.split():
        name, _, _ = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}=.*", word):
            raise ValueError(f"{shown(word)} is not NAME=value; separate several by blanks")
        if _RESERVED.fullmatch(name):
            raise ValueError(f"{name} is set by the job itself; choose another variable")
        if name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            raise ValueError(f"{name} would be in the job's script for others to read; set the option hf-token")
        if name in names:
            raise ValueError(f"{name} is given twice")
        names.add(name)
    return value


NAME_RULE = "only letters, digits and . _ -, beginning with a letter or digit"
_TIME = "minutes, MM:SS, H:MM:SS, D-H, D-H:MM or D-HH:MM:SS, from 1 minute to 365 days, or UNLIMITED"
Name = typing.Annotated[str, STRICT, matches(r"[A-Za-z0-9][A-Za-z0-9._-]*", 64, NAME_RULE)]
PATH = r"/[A-Za-z0-9._/+@=-]*"
PATH_RULE = "an absolute path of letters, digits and . _ / + @ = -"
checked_path = pydantic.AfterValidator(_check_path)
Workload = typing.Annotated[
    str, STRICT, matches(rf"gpt|smoke|{PATH}", 1024, f"gpt, smoke or {PATH_RULE}"), checked_path
]
Source = typing.Annotated[
    str, STRICT, matches(rf"python-stdlib|{PATH}", 1024, f"python-stdlib or {PATH_RULE}"), checked_path
]
Dataset = typing.Annotated[
    str,
    STRICT,
    matches(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,63}}|{PATH}", 1024, f"a dataset's name or {PATH_RULE}"),
    checked_path,
]
Words = typing.Annotated[
    str, STRICT, matches(r"[A-Za-z0-9 ._+=/:,@%^-]*", 4096, "only letters, digits, blanks and . _ + = / : , @ % ^ -")
]
Env = typing.Annotated[Words, pydantic.AfterValidator(_check_env)]
_GRID_RULE = "options with their values, such as: lr=0.001,0.003 batch=8,16"
Grid = typing.Annotated[
    str,
    STRICT,
    matches(r"( *[a-z][a-z0-9-]*=[A-Za-z0-9._+/:@%^-]+(,[A-Za-z0-9._+/:@%^-]+)* *)*", 4096, _GRID_RULE),
    pydantic.AfterValidator(_check_grid),
]
Constraint = typing.Annotated[
    str,
    STRICT,
    matches(r"[A-Za-z0-9][A-Za-z0-9._-]*([&|][A-Za-z0-9][A-Za-z0-9._-]*)*", 256, "names of features joined by & or |"),
]
Time = typing.Annotated[
    str, STRICT, matches(rf"[0-9:-]+|{'|'.join(jobs.NO_LIMIT)}", 24, _TIME), pydantic.AfterValidator(_check_time)
]
Memory = typing.Annotated[
    str, STRICT, matches(r"[1-9][0-9]{0,8}[MGT]?", 10, "a whole number with M, G or T behind it, such as 8G")
]
_IMAGE = (
    r"[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?([#/][A-Za-z0-9][A-Za-z0-9._-]*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]*|@sha256:[0-9a-f]{64})"
)
_IMAGE_RULE = "an image with its tag, such as nvcr.io#nvidia/pytorch:25.01-py3, or the path of an image file"
Image = typing.Annotated[str, STRICT, matches(rf"{_IMAGE}|{PATH}", 512, _IMAGE_RULE), checked_path]
Ranks = typing.Annotated[str, STRICT, matches(r"[0-9]{1,6}(,[0-9]{1,6})*", 256, "ranks such as 0 or 0,8")]
_HOSTS = r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[0-9,-]+\])?[A-Za-z0-9._-]*"
Hosts = typing.Annotated[
    str, STRICT, matches(rf"{_HOSTS}(,{_HOSTS})*", 1024, "names of nodes, such as node-[0-3],big-7")
]
_BEFORE = r"after(any|ok|notok)?(:[1-9][0-9]{0,9}(_[0-9]{1,7})?(\+[0-9]{1,6})?)+"
_BEFORE_RULE = "after, afterany, afterok or afternotok with jobs' ids, such as afterok:40:41; all with , or any with ?"
Dependency = typing.Annotated[str, STRICT, matches(rf"{_BEFORE}((,{_BEFORE})*|(\?{_BEFORE})*)", 512, _BEFORE_RULE)]
_MAIL_TYPES = (
    "ALL", "ARRAY_TASKS", "BEGIN", "END", "FAIL", "INVALID_DEPEND", "REQUEUE", "TIME_LIMIT", "TIME_LIMIT_50",
    "TIME_LIMIT_80", "TIME_LIMIT_90",
)  # fmt: skip # sbatch(1), --mail-type, without what needs a burst buffer
_MAIL_TYPE = "|".join(_MAIL_TYPES)
MailType = typing.Annotated[
    str, STRICT, matches(rf"({_MAIL_TYPE})(,({_MAIL_TYPE}))*", 128, f"joined by commas: {', '.join(_MAIL_TYPES)}")
]
MailUser = typing.Annotated[
    str,
    STRICT,
    matches(r"[A-Za-z0-9][A-Za-z0-9._+-]*(@[A-Za-z0-9][A-Za-z0-9.-]*)?", 254, "one address, such as me@example.com"),
]
Flag = typing.Annotated[bool, STRICT]
Lines = typing.Annotated[int, STRICT, between(1, MAX_LINES)]
Seconds = typing.Annotated[int, STRICT, between(1, 30 * 86400)]
JobId = typing.Annotated[int, STRICT, between(1, 2**31)]
Element = typing.Annotated[int, STRICT, between(0, 4_000_000)]  # slurm.conf(5), MaxArraySize
_STEPS_RULE = "first and last step, such as 10-12"
Steps = typing.Annotated[
    str, STRICT, matches(r"[0-9]{1,9}-[0-9]{1,9}", 20, _STEPS_RULE), pydantic.AfterValidator(_check_steps)
]
TorchBuild = typing.Annotated[str, STRICT, among("auto", "cpu", "cuda")]


class Parsed(pydantic.BaseModel):
    """Options or parameters under their hyphenated names; unknown ones are refused."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", alias_generator=lambda name: name.replace("_", "-"))


class Config(Parsed):
    """The charm's options."""

    workspace: typing.Annotated[
        str,
        STRICT,
        matches(r"/[A-Za-z0-9._/-]+", 200, "an absolute path of letters, digits and . _ / -"),
        checked_path,
    ] = "/mnt/shared"
    submit_user: typing.Annotated[str, STRICT, matches(r"[a-z_][a-z0-9_-]*", 32, "the name of an account")] = "ubuntu"
    torch_build: TorchBuild = "auto"
    torch_index: typing.Annotated[
        str,
        STRICT,
        matches(r"(https?://[A-Za-z0-9._:/+-]+)?", 500, "the URL of a package index without credentials, or nothing"),
    ] = ""
    mlflow_tracking_uri: typing.Annotated[
        str,
        STRICT,
        matches(
            rf"(https?://[A-Za-z0-9._:/+-]+|{PATH})?",
            500,
            "a server's http(s) URI without credentials, or a path, or nothing",
        ),
    ] = ""
    tensorboard: Flag = False
    transformers: Flag = False
    hf_token: typing.Annotated[str, STRICT, matches(r"(secret:[A-Za-z0-9/._-]+)?", 200, "the URI of a Juju secret")] = (
        ""
    )


class Resources(Parsed):
    """The parameters with which an action asks Slurm for a place to run."""

    partition: Name | None = None
    time_limit: Time | None = None
    account: Name | None = None
    qos: Name | None = None
    reservation: Name | None = None


class Training(Resources):
    """The parameters that describe a training, one or many."""

    workload: Workload = "gpt"
    nodes: typing.Annotated[int, STRICT, between(1, MAX_NODES)] | None = None
    gpus_per_node: typing.Annotated[int, STRICT, between(0, MAX_GPUS)] | None = None
    cpus_per_task: typing.Annotated[int, STRICT, between(1, MAX_CPUS)] | None = None
    memory: Memory | None = None
    constraint: Constraint | None = None
    nodelist: Hosts | None = None
    exclude: Hosts | None = None
    exclusive: Flag = False
    dependency: Dependency | None = None
    mail_type: MailType | None = None
    mail_user: MailUser | None = None
    args: Words = ""
    env: Env = ""
    dataset: Dataset | None = None
    launcher: typing.Annotated[str, STRICT, among("torchrun", "srun")] = "torchrun"
    fabric: typing.Annotated[str, STRICT, among(*trainer_fabric.NAMES)] = "auto"
    container_image: Image | None = None
    profile: typing.Annotated[str, STRICT, among("nsys", "torch")] | None = None
    profile_ranks: Ranks = "0"
    profile_steps: Steps | None = None
    max_requeues: typing.Annotated[int, STRICT, between(0, 1000)] = 16
    max_restarts: typing.Annotated[int, STRICT, between(0, 100)] = 0


class SubmitDdp(Training):
    """Parameters of submit-ddp."""

    run: Name | None = None
    resume: Name = "auto"
    dry_run: Flag = False
    wait: Flag = False
    wait_timeout: Seconds = 86400


class SubmitSweep(Training):
    """Parameters of submit-sweep."""

    name: typing.Annotated[str, STRICT, matches(r"[A-Za-z0-9][A-Za-z0-9._-]*", 56, NAME_RULE)] | None = None
    grid: Grid = ""
    file: typing.Annotated[str, STRICT, matches(PATH, 1024, PATH_RULE), checked_path] | None = None
    parallel: typing.Annotated[int, STRICT, between(1, MAX_SWEEP)] | None = None
    dry_run: Flag = False
    wait: Flag = False
    wait_timeout: Seconds = 86400


class ListJobs(Parsed):
    """Parameters of list-jobs."""

    lines: Lines = 50


class OneJob(Parsed):
    """The parameters that name a job."""

    job_id: JobId | None = None
    element: Element | None = None
    run: Name | None = None


class ShowJob(OneJob):
    """Parameters of show-job."""


class JobLog(OneJob):
    """Parameters of job-log."""

    rank: typing.Annotated[int, STRICT, between(0, MAX_NODES * MAX_GPUS)] | None = None
    lines: Lines = 50
    follow: Flag = False
    follow_timeout: typing.Annotated[int, STRICT, between(1, 86400)] = 60


class ResumeNow(OneJob):
    """Parameters of resume-now."""


class CancelJob(OneJob):
    """Parameters of cancel-job."""


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

"""The charm's edge: options and action parameters, parsed once into frozen models; what is wrong is named in one line.

Every text is held to an alphabet without quotes, blanks (except where words are listed), control characters, `$`,
backquotes, backslashes or braces, so nothing that a shell, Slurm, jinja2 or a terminal would interpret gets any further
than here.
"""

import collections.abc
import dataclasses
import re
import typing

import pydantic

from ddp.base import ParameterError, shown
from ddp.slurm import jobs
from ddp.submit import fabrics

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
    """Hold a text to at most `limit` characters and to a pattern; `allowed` is the error's text."""

    def check(value: str) -> str:
        if len(value) > limit:
            raise ValueError(f"{len(value)} characters; at most {limit} are allowed")
        if not re.fullmatch(pattern, value, re.ASCII):  # compiled when it is used: no command uses them all
            raise ValueError(f"{shown(value)} is not allowed; {allowed}")
        return value

    return pydantic.AfterValidator(check)


@dataclasses.dataclass(frozen=True)
class Bound(pydantic.AfterValidator):
    """Two bounds, which the declaration of an option shows."""

    least: int
    most: int


@dataclasses.dataclass(frozen=True)
class OneOf(pydantic.AfterValidator):
    """A few choices, which the declaration of an option shows."""

    choices: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Directive:
    """The option of sbatch(1) that an option sets, with the same value unless that is worked out."""

    name: str
    is_computed: bool = False  # `ddp.submit.resources` works the value out, also where the option is not given
    more: tuple[tuple[str, str], ...] = ()  # what goes with it
    is_judged: bool = True  # also by sbatch --test-only


def between(least: int, most: int) -> pydantic.AfterValidator:
    """Hold a whole number between two bounds."""

    def check(value: int) -> int:
        if not least <= value <= most:
            raise ValueError(f"{value} is not allowed; a whole number from {least} to {most}")
        return value

    return Bound(check, least, most)


def among(*choices: str) -> pydantic.AfterValidator:
    """Hold a text to a few choices."""

    def check(value: str) -> str:
        if value not in choices:
            raise ValueError(f"{shown(value)} is not allowed; one of: {', '.join(choices)}")
        return value

    return OneOf(check, choices)


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


# sbatch(1), by the long option: what the job sets and relies on
SBATCH_KEPT = (
    "array", "batch", "bb", "bbf", "chdir", "clusters", "container", "cores-per-socket", "cpus-per-gpu", "error",
    "export", "export-file", "extra-node-info", "get-user-env", "gid", "gpus", "gpus-per-socket", "gpus-per-task",
    "gres", "hold", "ignore-pbs", "input", "job-name", "kill-on-invalid-dep", "mem-per-cpu", "mem-per-gpu", "mincpus",
    "no-kill", "no-requeue", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket",
    "open-mode", "output", "overcommit", "parsable", "propagate", "quiet", "requeue", "signal", "test-only",
    "tres-per-task", "uid", "use-min-nodes", "verbose", "version", "wait", "wait-all-nodes", "wrap",
)  # fmt: skip


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
_SBATCH_WORD = r"--[a-z][a-z0-9-]{1,40}(=[A-Za-z0-9._:,@%/+-]{1,200})?"
_SBATCH_RULE = "sbatch's own long options, separated by blanks, such as --nice=100 --switches=1"
Sbatch = typing.Annotated[str, STRICT, matches(rf"({_SBATCH_WORD}( {_SBATCH_WORD})*)?", 1024, _SBATCH_RULE)]
Flag = typing.Annotated[bool, STRICT]
Lines = typing.Annotated[int, STRICT, between(1, MAX_LINES)]
Seconds = typing.Annotated[int, STRICT, between(1, 30 * 86400)]
_STEPS_RULE = "first and last step, such as 10-12"
Steps = typing.Annotated[
    str, STRICT, matches(r"[0-9]{1,9}-[0-9]{1,9}", 20, _STEPS_RULE), pydantic.AfterValidator(_check_steps)
]
TorchBuild = typing.Annotated[str, STRICT, among("auto", "cpu", "cuda")]


class Parsed(pydantic.BaseModel):
    """Options or parameters under their hyphenated names; unknown ones are refused."""

    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=lambda name: name.replace("_", "-"),
        defer_build=True,  # until it is used: a command uses two or three of all models
    )


def directives(model: type[Parsed]) -> dict[str, Directive]:
    """Map a model's attributes to the directives of sbatch that they set, in the order of declaration."""
    marks = ((name, mark) for name, field in model.model_fields.items() for mark in field.metadata)
    return {name: mark for name, mark in marks if isinstance(mark, Directive)}


Folder = typing.Annotated[
    str,
    STRICT,
    matches(r"/[A-Za-z0-9._/-]+", 200, "an absolute path of letters, digits and . _ / -"),
    checked_path,
]
Account = typing.Annotated[str, STRICT, matches(r"([a-z_][a-z0-9_-]*)?", 32, "the name of an account")]
Index = typing.Annotated[
    str,
    STRICT,
    matches(r"(https?://[A-Za-z0-9._:/+-]+)?", 500, "the URL of a package index without credentials, or nothing"),
]
Tracking = typing.Annotated[
    str,
    STRICT,
    matches(
        rf"(https?://[A-Za-z0-9._:/+-]+|{PATH})?",
        500,
        "a server's http(s) URI without credentials, or a path, or nothing",
    ),
]


class Config(Parsed):
    """The charm's options."""

    workspace: Folder = "/mnt/shared"
    submit_user: typing.Annotated[str, STRICT, matches(r"[a-z_][a-z0-9_-]*", 32, "the name of an account")] = "ubuntu"
    torch_build: TorchBuild = "auto"
    torch_index: Index = ""
    mlflow_tracking_uri: Tracking = ""
    tensorboard: Flag = False
    transformers: Flag = False
    hf_token: typing.Annotated[str, STRICT, matches(r"(secret:[A-Za-z0-9/._-]+)?", 200, "the URI of a Juju secret")] = (
        ""
    )


# Options that several verbs have, with what each sets of sbatch: a Slurm option is one such declaration.
Partition = typing.Annotated[
    Name | None,
    Directive("partition", is_computed=True),
    pydantic.Field(description="Slurm partition; default is Slurm's default partition."),
]
SlurmAccount = typing.Annotated[
    Name | None, Directive("account"), pydantic.Field(description="Slurm account to charge.")
]
Qos = typing.Annotated[Name | None, Directive("qos"), pydantic.Field(description="Slurm quality of service.")]
Reservation = typing.Annotated[Name | None, Directive("reservation"), pydantic.Field(description="Slurm reservation.")]
Nodes = typing.Annotated[
    typing.Annotated[int, STRICT, between(1, MAX_NODES)] | None,
    Directive("nodes", is_computed=True),
    pydantic.Field(description="How many nodes; default is all usable ones of the partition."),
]
GPUS = Directive("gpus-per-node", is_computed=True)
Gpus = typing.Annotated[int, STRICT, between(0, MAX_GPUS)]
CPUS = Directive("cpus-per-task", is_computed=True)
Cpus = typing.Annotated[int, STRICT, between(1, MAX_CPUS)]
Constrained = typing.Annotated[
    Constraint | None,
    Directive("constraint"),
    pydantic.Field(description="Features that the nodes must have, joined by & or |."),
]
Nodelist = typing.Annotated[
    Hosts | None,
    Directive("nodelist"),
    pydantic.Field(
        description="Nodes that must be among those of the job, such as slurmd-[0-3],slurmd-7; without nodes these are "
        "all of them."
    ),
]
Exclude = typing.Annotated[
    Hosts | None,
    Directive("exclude"),
    pydantic.Field(description="Nodes that the job must not run on, such as slurmd-5,slurmd-[8-9]."),
]
Wait = typing.Annotated[Seconds, pydantic.Field(description="How long to wait, in seconds.")]


class Resources(Parsed):
    """The parameters with which an action asks Slurm for a place to run."""

    partition: Partition = None
    time_limit: typing.Annotated[Time | None, Directive("time", is_computed=True)] = pydantic.Field(
        None,
        description=(
            "Slurm time limit, as minutes, MM:SS, H:MM:SS, D-H, D-H:MM or D-HH:MM:SS, at most the partition's; "
            "UNLIMITED or INFINITE where the partition has none. Default is the partition's."
        ),
    )
    account: SlurmAccount = None
    qos: Qos = None
    reservation: Reservation = None


class Training(Resources):
    """The parameters that describe a training, one or many."""

    workload: Workload = pydantic.Field(
        "gpt",
        description=(
            "gpt (a language model), smoke (a test of a few seconds), or the path of a Python script in the workspace."
        ),
    )
    nodes: Nodes = None
    gpus_per_node: typing.Annotated[Gpus | None, GPUS] = pydantic.Field(
        None,
        description="GPUs on each node, one rank each; 0 trains on CPUs with one rank for each node; default is all.",
    )
    cpus_per_task: typing.Annotated[Cpus | None, CPUS] = pydantic.Field(
        None,
        description="Cores on each node, shared by its ranks; default is the share that goes with the GPUs, or all.",
    )
    memory: typing.Annotated[Memory | None, Directive("mem", is_computed=True)] = pydantic.Field(
        None, description="Memory on each node, such as 8G; default is the share that goes with the cores and GPUs."
    )
    constraint: Constrained = None
    nodelist: Nodelist = None
    exclude: Exclude = None
    exclusive: typing.Annotated[Flag, Directive("exclusive")] = pydantic.Field(
        False,
        description="Share the nodes with no other job; cores and memory are then the whole nodes' unless they are "
        "given.",
    )
    dependency: typing.Annotated[
        Dependency | None,
        Directive("dependency", more=(("kill-on-invalid-dep", "yes"),), is_judged=False),  # it finds no time for such
    ] = pydantic.Field(
        None,
        description=(
            "Wait for other jobs: afterok:40 (it ended well), afternotok:40, afterany:40 (it ended), after:40 (it "
            "began), several as afterok:40:41, all of them joined by a comma or any by a question mark. Where "
            "that can no longer come true, Slurm cancels the job."
        ),
    )
    mail_type: typing.Annotated[MailType | None, Directive("mail-type")] = pydantic.Field(
        None,
        description=(
            "When slurmctld writes a mail, such as END,FAIL: BEGIN, END, FAIL, REQUEUE, ALL, TIME_LIMIT, "
            "TIME_LIMIT_90, TIME_LIMIT_80, TIME_LIMIT_50, INVALID_DEPEND, ARRAY_TASKS (one for each run of a "
            "sweep)."
        ),
    )
    mail_user: typing.Annotated[MailUser | None, Directive("mail-user")] = pydantic.Field(
        None,
        description=(
            "Address for mail-type, such as me@example.com; default is submit-user, whom slurmctld's host must know."
        ),
    )
    sbatch: Sbatch = pydantic.Field(
        "",
        description="Options of sbatch that have none of their own here, such as --nice=100 --switches=1@60; what the "
        "job relies on is refused.",
    )
    args: Words = pydantic.Field(
        "",
        description=(
            "Arguments for the workload, separated by blanks. Letters, digits and . _ + = / : , @ % ^ - are allowed."
        ),
    )
    env: Env = pydantic.Field(
        "", description="Environment variables for the job as NAME=value, separated by blanks. Not for secrets."
    )
    dataset: Dataset | None = pydantic.Field(
        None,
        description=(
            "Name of a dataset in the workspace, or its path; default is python-stdlib. For fine-tuning also a "
            "file or folder of JSON lines."
        ),
    )
    launcher: typing.Annotated[str, STRICT, among("torchrun", "srun")] = pydantic.Field(
        "torchrun",
        description=(
            "torchrun starts one agent on each node, which starts its ranks; srun starts each rank as a task of "
            "its own, with cores bound by Slurm and no port fixed beforehand. A script finds RANK, WORLD_SIZE, "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT under both."
        ),
    )
    fabric: typing.Annotated[str, STRICT, among(*fabrics.NAMES)] = pydantic.Field(
        "auto",
        description=(
            "The network between the nodes, whose variables NCCL and gloo then get: efa (AWS), gib and tcpxo "
            "(Google Cloud), infiniband, roce, tcp (no RDMA), tailscale; auto looks on the nodes. Variables in "
            "env go before it."
        ),
    )
    container_image: Image | None = pydantic.Field(
        None,
        description=(
            "Run the ranks in this image, such as nvcr.io#nvidia/pytorch:25.01-py3 or "
            "/mnt/shared/images/torch.sqsh, with pyxis where Slurm has it, else with apptainer. The image brings "
            "Python, torch and numpy; the workspace is mounted in it."
        ),
    )
    profile: typing.Annotated[str, STRICT, among("nsys", "torch")] | None = pydantic.Field(
        None,
        description=(
            "Record what some ranks do, into the run's folder profile: nsys (Nsight Systems, must be on the "
            "nodes) or torch (torch's profiler, workload gpt only; the trace opens in a browser)."
        ),
    )
    profile_ranks: Ranks = pydantic.Field("0", description="Ranks to record, separated by commas, such as 0,8.")
    profile_steps: Steps | None = pydantic.Field(
        None,
        description="First and last step to record, such as 10-12; default is 10-12 with torch, everything with nsys.",
    )
    max_requeues: typing.Annotated[int, STRICT, between(0, 1000)] = pydantic.Field(
        16, description="How often a job that reached its time limit and has saved may be queued again."
    )
    max_restarts: typing.Annotated[int, STRICT, between(0, 100)] = pydantic.Field(
        0,
        description=(
            "How often ranks that failed may be started again from their last checkpoint. Where a node is at "
            "fault (a broken GPU, a lost filesystem, a node that stopped responding) the job is queued again without "
            "that node; a mistake in the parameters is never tried again."
        ),
    )
    environment: Name | None = pydantic.Field(
        None, description="Name of an environment of one's own, as ddp env create makes them; default is the cluster's."
    )
    snapshot: Flag = pydantic.Field(
        True,
        description="Keep the folder of a script with the run, and start that copy: what is edited afterwards changes "
        "neither a job that waits nor one that is requeued. What .ddpignore names is left out.",
    )
    arguments: tuple[str, ...] = pydantic.Field((), exclude=True)  # of the command line, behind the workload

    @pydantic.field_validator("sbatch")
    @classmethod
    def _check_sbatch(cls, value: str) -> str:
        own = {directive.name: cls.model_fields[name].alias for name, directive in directives(cls).items()}
        for word in value.split():
            name = word.partition("=")[0].removeprefix("--")
            # sbatch takes what an option's name begins with for the option
            if ours := next((ours for theirs, ours in own.items() if theirs.startswith(name)), None):
                raise ValueError(f"--{name} has an option of its own; give {ours}")
            if kept := next((theirs for theirs in SBATCH_KEPT if theirs.startswith(name)), None):
                raise ValueError(f"--{kept} is set by the job itself, which relies on it; omit it")
        return value

    @property
    def words(self) -> tuple[str, ...]:
        """Return the arguments of the workload, as they are."""
        return (*self.args.split(), *self.arguments)


class SubmitDdp(Training):
    """Parameters of submit-ddp."""

    run: Name | None = pydantic.Field(
        None,
        description=(
            "Name of the run and of its folder; default is the workload and the time. An existing run is continued."
        ),
    )
    resume: Name = pydantic.Field(
        "auto",
        description=(
            "auto goes on from the run's last checkpoint where there is one, never begins anew, the name of "
            "another run begins from its last checkpoint."
        ),
    )
    dry_run: Flag = pydantic.Field(
        False,
        description="Return the script, the checks that it passed and Slurm's verdict on it; write and submit nothing.",
    )
    wait: Flag = pydantic.Field(False, description="Wait for the job's end and return its result.")
    wait_timeout: Wait = 86400


class SubmitSweep(Training):
    """Parameters of submit-sweep."""

    name: typing.Annotated[str, STRICT, matches(r"[A-Za-z0-9][A-Za-z0-9._-]*", 56, NAME_RULE)] | None = pydantic.Field(
        None, description="Name of the sweep; default is sweep and the time."
    )
    grid: Grid = pydantic.Field(
        "",
        description=(
            'Options with their values, such as "lr=0.001,0.003 batch=8,16" for four runs; every combination is '
            "one run."
        ),
    )
    file: typing.Annotated[str, STRICT, matches(PATH, 1024, PATH_RULE), checked_path] | None = pydantic.Field(
        None,
        description=(
            "In place of grid: path of a file in the workspace with one JSON object of options on each line, such "
            'as {"lr": 0.001, "model": "tiny", "compile": true}.'
        ),
    )
    parallel: typing.Annotated[int, STRICT, between(1, MAX_SWEEP)] | None = pydantic.Field(
        None, description="How many runs at a time; default is as many as there is room for."
    )
    dry_run: Flag = pydantic.Field(
        False, description="Return the script, Slurm's verdict on it and the runs; write and submit nothing."
    )
    wait: Flag = pydantic.Field(False, description="Wait for the end of all runs and return their table, and the best.")
    wait_timeout: Wait = 86400


Model = typing.TypeVar("Model", bound=Parsed)


def parse(model: type[Model], given: collections.abc.Mapping[str, object]) -> Model:
    """Return the parsed parameters or options. Raises ParameterError: what cannot be, what is allowed."""
    known = {field.alias or name: field for name, field in model.model_fields.items() if not field.exclude}
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

"""The options of each verb; options.toml has their texts, and how they are typed."""

import functools
import shlex
import typing

import pydantic

from ddp.node import spec
from ddp.options import fields
from ddp.options.fields import Directive, Parsed, among, between
from ddp.problem import shown

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "alltoall", "all")
_DATATYPES = ("float", "double", "half", "bfloat16", "int8", "uint8", "int32", "int64")
_MODELS = ("tiny", "small", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


class Place(Parsed):
    """Options that ask Slurm for a place to run."""

    partition: fields.Partition = None
    account: typing.Annotated[fields.SlurmsOwn | None, Directive("account")] = None
    qos: typing.Annotated[fields.SlurmsOwn | None, Directive("qos")] = None
    reservation: typing.Annotated[fields.SlurmsOwn | None, Directive("reservation")] = None
    sbatch: fields.Sbatch = ""

    @property
    def gpus_of_gres(self) -> str:
        """The GPUs that `sbatch` asks for by --gres, such as a100:2, or ""."""
        for word in self.sbatch.split():
            name, _, value = word.partition("=")
            if name == "--gres":
                return fields.gpus_of_gres(value)
        return ""

    @pydantic.field_validator("sbatch")
    @classmethod
    def _check_sbatch(cls, value: str) -> str:
        for word in value.split():
            name = word.partition("=")[0].removeprefix("--")
            cls._check_sbatch_option(name)
        return value

    @classmethod
    def _check_sbatch_option(cls, name: str) -> None:
        # sbatch accepts a prefix of an option's name for the option
        for attribute, directive in fields.directives(cls).items():
            if directive.name.startswith(name):
                ours = cls.model_fields[attribute].alias
                raise ValueError(f"--{name} has its own option; use {ours}")
        if name and "clusters".startswith(name):
            how = "set the variable SLURM_CLUSTERS: then all commands of ddp ask that cluster"
            raise ValueError(f"--{name} would leave the job out of ddp list; {how}")
        for kept in fields.SBATCH_KEPT:
            if kept.startswith(name):
                raise ValueError(f"--{kept} is set by the job itself, which relies on it; omit it")


class Resources(Place):
    """Options of a job."""

    time_limit: typing.Annotated[fields.Time | None, Directive("time", is_computed=True)] = None


class Nodes(Resources):
    """Options that choose the nodes of a job."""

    nodes: fields.Nodes = None
    gpus_per_node: fields.Gpus = None
    constraint: typing.Annotated[fields.SlurmsOwn | None, Directive("constraint")] = None
    nodelist: typing.Annotated[fields.SlurmsOwn | None, Directive("nodelist")] = None
    exclude: typing.Annotated[fields.SlurmsOwn | None, Directive("exclude")] = None

    @property
    def gpus(self) -> fields.Gpus:
        """The GPUs on each node, by `gpus_per_node` or by --gres; None if neither is given."""
        return self.gpus_per_node or self.gpus_of_gres or None

    @property
    def num_gpus(self) -> int | None:
        """The number of `gpus`; None if they are not given."""
        return fields.num_gpus(self.gpus)


class Training(Nodes):
    """Options that describe a training, one or many."""

    module: bool = False
    launcher: typing.Annotated[str, among("torchrun", "node")] = "torchrun"
    ranks_per_node: typing.Annotated[int, between(1, fields.MAX_GPUS)] | None = None
    workload: fields.Workload = pydantic.Field("gpt", validate_default=True)
    cpus_per_task: fields.Cpus = None
    memory: typing.Annotated[fields.Memory | None, Directive("mem", is_computed=True)] = None
    mem_per_cpu: typing.Annotated[
        fields.MemoryPerCpu | None, Directive("mem-per-cpu", is_computed=True)
    ] = None
    exclusive: typing.Annotated[bool, Directive("exclusive")] = False
    dependency: typing.Annotated[fields.SlurmsOwn | None, Directive("dependency")] = None
    args: fields.Words = ""
    env: fields.Env = ""
    env_file: fields.Path | None = None
    notify: fields.Notify | None = pydantic.Field(None, repr=False)
    function: fields.Path | None = None
    mirror: fields.Bucket | None = None
    metric: fields.Metrics = ""
    dataset: fields.Dataset | None = None
    fabric: fields.Fabric = "auto"
    container_image: fields.Image | None = None
    accept_risk: bool = False
    profile: typing.Annotated[str, among("torch")] | None = None
    profile_ranks: fields.Ranks = "0"
    profile_steps: fields.Steps | None = None
    max_requeues: typing.Annotated[int, between(0, 1000)] = 16
    max_restarts: typing.Annotated[int, between(0, 100)] = 0
    stop_signal: typing.Annotated[str, among("auto", "TERM", "USR1", "USR2", "INT")] | None = None
    again: fields.Again = ""
    spare_nodes: typing.Annotated[int, between(0, 64)] = 0
    environment: fields.Name | None = None
    python: fields.Python = "auto"
    requirements: fields.Path | None = None
    snapshot: bool = True
    # What only a terminal knows: an action leaves these empty
    arguments: tuple[str, ...] = pydantic.Field((), exclude=True)  # behind the workload
    is_command: bool = pydantic.Field(False, exclude=True)  # `workload` is a command's name
    accelerate: spec.Accelerate | None = pydantic.Field(None, exclude=True)  # of its launcher
    remarks: tuple[str, ...] = pydantic.Field((), exclude=True)  # on the command line
    secrets: dict[str, str] = pydantic.Field({}, exclude=True, repr=False)  # variables of `env`
    typed_in: str = pydantic.Field("", exclude=True)  # the folder
    active: str = pydantic.Field("", exclude=True)  # the folder of the active environment

    @pydantic.field_validator("workload")
    @classmethod
    def _check_workload(cls, value: str, info: pydantic.ValidationInfo) -> str:
        is_module_name = value not in ("gpt", "smoke") and not value.startswith("/")
        wants_module = bool(info.data.get("module"))
        if wants_module and not is_module_name:
            how = "with module the name of one, such as train.main"
            raise ValueError(f"{shown(value)} is not allowed; {how}")
        if is_module_name and not wants_module:
            raise ValueError(f"{shown(value)} is not allowed; gpt, smoke or an absolute path")
        return value

    @property
    def script(self) -> str:
        """The path of the user's script; empty: the workload is a module or a command."""
        return "" if self.module or self.is_command else self.workload

    @property
    def own_python(self) -> str:
        """The interpreter of the user's own environment; "" if the job uses another environment."""
        return self.python if self.python.startswith("/") else ""

    @property
    def memory_mb(self) -> int | None:
        """`memory` in MiB; 0 if the site decides, None if it is not given."""
        return None if self.memory is None else fields.memory_mb(self.memory)

    @property
    def mem_per_cpu_mb(self) -> int:
        """`mem_per_cpu` in MiB; 0 if it is not given."""
        return 0 if self.mem_per_cpu is None else fields.memory_mb(self.mem_per_cpu)

    @functools.cached_property
    def variables(self) -> dict[str, str]:
        """The variables of `env`."""
        return dict(fields.variables(self.env))

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of the workload."""
        return (*shlex.split(self.args), *self.arguments)


class SubmitDdp(Training):
    """Options of submit."""

    local: bool = False
    ranks: typing.Annotated[int, between(1, fields.MAX_GPUS)] | None = None  # with `local`
    run: fields.Name | None = None
    resume: fields.Name = "auto"
    dry_run: bool = False
    wait: bool = False
    wait_limit: fields.Seconds | None = None
    wait_timeout: fields.Seconds = 86400


class Session(Nodes):
    """Options of an allocation that the user works in."""

    cpus_per_task: fields.Cpus = None
    memory: typing.Annotated[fields.Memory | None, Directive("mem", is_computed=True)] = None
    env: fields.Env = ""
    environment: fields.Name | None = None
    python: fields.Python = "auto"
    requirements: fields.Path | None = None
    # What only a terminal knows
    typed_in: str = pydantic.Field("", exclude=True)  # the folder
    active: str = pydantic.Field("", exclude=True)  # the folder of the active environment

    def as_training(self) -> Training:
        """Return the options of a training in the same place, on one node by default."""
        given: dict[str, object] = {"workload": "/session"}
        if self.nodelist is None:
            given["nodes"] = 1
        for name in _OF_SESSION:
            value = getattr(self, name)
            if value is not None:
                given[name.replace("_", "-")] = value
        training = fields.parse(Training, given)
        paths = {name: getattr(self, name) for name in ("python", "requirements")}
        return training.model_copy(
            update={**paths, "typed_in": self.typed_in, "active": self.active}
        )


_OF_SESSION = (*Nodes.model_fields, "cpus_per_task", "memory", "env", "environment")


class OpenShell(Session):
    """Options of shell."""

    run: fields.Name | None = None  # or a job's id
    rank: typing.Annotated[int, between(0, fields.MAX_NODES * fields.MAX_GPUS)] | None = None


class Notebook(Session):
    """Options of notebook."""

    run: fields.ShortName = "notebook"


class Render(SubmitDdp):
    """Options of render."""

    kubernetes: bool = False
    claim: fields.Name = "shared"
    namespace: fields.Name = "default"


class SubmitSweep(Training):
    """Options of sweep."""

    name: fields.ShortName | None = None
    grid: fields.Grid = ""
    parallel: typing.Annotated[int, between(1, fields.MAX_SWEEP)] | None = None
    dry_run: bool = False
    wait: bool = False
    wait_limit: fields.Seconds | None = None
    wait_timeout: fields.Seconds = 86400


class PrepareDataset(Resources):
    """Options of prepare."""

    source: fields.Source = "python-stdlib"
    name: fields.ShortName | None = None
    tokenizer: fields.Tokenizer = "auto"
    errors: typing.Annotated[str, among("strict", "replace")] = "strict"
    elements: typing.Annotated[int, between(1, 1000)] | None = None
    parallel: typing.Annotated[int, between(1, 1000)] | None = None
    wait: bool = True
    wait_limit: fields.Seconds | None = None
    wait_timeout: fields.Seconds = 86400


class OneRun(Parsed):
    """Options of show and resume: a run."""

    run: fields.Name | None = None  # or a job's id


class StopWaiting(Parsed):
    """Options of stop-waiting."""

    run: fields.Name | None = None  # or a job's id


class ListRuns(Parsed):
    """Options of list."""

    everyone: bool = False
    state: fields.States | None = None
    name: fields.Glob | None = None
    since: fields.Since | None = None
    sort: typing.Annotated[
        str, among("submitted", "name", "state", "loss", "best", "rate", "step")
    ] = "submitted"
    lines: fields.Lines = 50


class RunLog(OneRun):
    """Options of log."""

    rank: typing.Annotated[int, between(0, fields.MAX_NODES * fields.MAX_GPUS)] | None = None
    lines: fields.Lines = 50
    follow: bool = False
    follow_timeout: typing.Annotated[int, between(1, 86400)] = 60


class WatchRun(OneRun):
    """Options of watch."""

    is_json: bool = pydantic.Field(False, exclude=True)  # of the command line


class Fetch(Parsed):
    """Options of fetch."""

    run: fields.Name
    to: fields.Path | None = None
    arguments: tuple[str, ...] = pydantic.Field((), exclude=True)  # paths


class CancelRun(Parsed):
    """Options of cancel."""

    run: fields.Names


class RemoveRuns(Parsed):
    """Options of remove."""

    run: fields.Names
    checkpoints: bool = False


class Prune(Parsed):
    """Options of prune."""

    older: fields.Since = "30d"
    keep_best: bool = False
    keep_last: typing.Annotated[int, between(1, 1000)] | None = None
    dry_run: bool = False
    yes: bool = False


class Export(Parsed):
    """Options of export."""

    run: fields.Name
    to: fields.Path
    checkpoint: fields.Name = "latest"


class CompareRuns(Parsed):
    """Options of compare."""

    runs: fields.Names | None = None


class Report(CompareRuns):
    """Options of report."""

    output: fields.Path | None = None


class Usage(Parsed):
    """Options of usage."""

    since: fields.Since = "30d"
    by: typing.Annotated[str, among("account", "user")] = "account"


class AddUser(Parsed):
    """Options of user add."""

    user: fields.Login
    account: fields.SlurmAccount
    new_account: bool = False
    dry_run: bool = False


class SyncUsers(Parsed):
    """Options of user sync."""

    group: fields.Login
    account: fields.SlurmAccount | None = None
    new_account: bool = False
    remove: bool = False
    dry_run: bool = False


class InstallEnvironment(Parsed):
    """Options of env install."""

    torch: fields.Torch | None = None
    force: bool = False
    wheelhouse: fields.Path | None = None


class CreateEnvironment(Parsed):
    """Options of env create."""

    name: fields.Name
    requirements: fields.Path | None = None
    project: fields.Path | None = None
    extra: fields.Names | None = None
    torch: fields.Torch | None = None
    force: bool = False


class OneEnvironment(Parsed):
    """Options of env show and env remove."""

    name: fields.Name


class EnvironmentPath(Parsed):
    """Options of env path."""

    name: fields.Name | None = None


class ImportImage(Parsed):
    """Options of image import."""

    source: fields.ImageSource
    name: fields.Name


class Doctor(Place):
    """Options of doctor."""

    nodes: typing.Annotated[fields.SlurmsOwn | None, Directive("nodelist", is_computed=True)] = None
    idle: bool = False
    wait_timeout: typing.Annotated[int, between(1, 3600)] = 60


class BenchmarkCollectives(Nodes):
    """Options of bench."""

    collective: typing.Annotated[str, among(*COLLECTIVES)] = "all_reduce"
    min_bytes: fields.Size | None = None
    max_bytes: fields.Size | None = None
    step_factor: typing.Annotated[int, between(2, 1024)] | None = None
    iters: typing.Annotated[int, between(1, 100_000)] | None = None
    warmup_iters: typing.Annotated[int, between(0, 100_000)] | None = None
    datatype: typing.Annotated[str, among(*_DATATYPES)] | None = None
    env: fields.Env = ""
    fabric: fields.Fabric = "auto"
    wait_limit: fields.Seconds | None = None
    wait_timeout: fields.Seconds = 86400


class Plan(Parsed):
    """Options of plan."""

    partition: fields.Partition = None
    nodes: fields.Nodes = None
    gpus_per_node: fields.Gpus = None
    model: typing.Annotated[str, among(*_MODELS)] | None = None
    parameters: typing.Annotated[int, between(1, 10**13)] | None = None
    seq_len: fields.Count | None = None
    batch: fields.Count | None = None
    grad_accum: fields.Count = 1
    dataset: fields.Dataset | None = None
    tokens_per_second: typing.Annotated[int, between(1, 10**9)] | None = None

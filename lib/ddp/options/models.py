"""Parameters of the actions on environments, datasets, runs and the cluster itself."""

import typing

import pydantic

from ddp.options import fields
from ddp.submit import fabrics


class InstallEnvironment(fields.Parsed):
    """Parameters of install-environment."""

    torch: fields.TorchBuild | None = pydantic.Field(
        None, description="Which build of torch; default is the option torch-build."
    )
    force: fields.Flag = pydantic.Field(False, description="Make it again even if it is there.")
    wheelhouse: (
        typing.Annotated[
            str,
            fields.STRICT,
            fields.matches(fields.PATH, 1024, fields.PATH_RULE),
            fields.checked_path,
        ]
        | None
    ) = pydantic.Field(
        None,
        description=(
            "Where all wheels come from, for clusters that reach no package index: a folder in the workspace, or "
            "a .tar, .tar.zst or .zip in it, such as /mnt/shared/wheels.tar.zst. Must hold the locked packages "
            "and torch with all that it needs."
        ),
    )


class CreateEnvironment(fields.Parsed):
    """Options of env create."""

    name: fields.Name = pydantic.Field(description="Name that ddp submit --env takes.")
    requirements: typing.Annotated[
        str, fields.STRICT, fields.matches(fields.PATH, 1024, fields.PATH_RULE), fields.checked_path
    ] = pydantic.Field(
        description="A requirements.txt, or a pyproject.toml, whose packages come beside torch and the payload's."
    )
    torch: fields.TorchBuild | None = pydantic.Field(
        None, description="Which build of torch; default is the cluster's."
    )
    force: fields.Flag = pydantic.Field(False, description="Make it again even if it is there.")


class ListEnvironments(fields.Parsed):
    """Options of env list: none."""


class OneEnvironment(fields.Parsed):
    """Options of env show and env remove."""

    name: fields.Name = pydantic.Field(description="Name of the environment.")


class PrepareDataset(fields.Resources):
    """Parameters of prepare-dataset."""

    name: (
        typing.Annotated[
            str,
            fields.STRICT,
            fields.matches(r"[A-Za-z0-9][A-Za-z0-9._-]*", 56, fields.NAME_RULE),
        ]
        | None
    ) = pydantic.Field(None, description="Name of the dataset; default is made from the source.")
    source: fields.Source = pydantic.Field(
        "python-stdlib",
        description=(
            "python-stdlib (Python's own source code, which needs no network), or the path of a file or folder in "
            "the workspace, such as /mnt/shared/raw/openwebtext."
        ),
    )
    tokenizer: typing.Annotated[str, fields.STRICT, fields.among("auto", "byte", "gpt2")] = pydantic.Field(
        "auto", description="How text becomes tokens; auto is gpt2 where its vocabulary is at hand, else byte."
    )
    elements: typing.Annotated[int, fields.STRICT, fields.between(1, 1000)] | None = pydantic.Field(
        None,
        description=(
            "Into how many elements of a Slurm array the work is cut; default is one for each 256 MiB, at most "
            "64. One element is a single job; with more, a job that verifies the whole waits for all of them."
        ),
    )
    parallel: typing.Annotated[int, fields.STRICT, fields.between(1, 1000)] | None = pydantic.Field(
        None, description="How many elements may run at once, such as 8; default is all."
    )
    wait: fields.Flag = pydantic.Field(True, description="Wait for the job's end.")
    wait_timeout: fields.Wait = 86400


class Doctor(fields.Parsed):
    """Parameters of doctor."""

    partition: fields.Partition = None
    nodes: fields.Hosts | None = pydantic.Field(
        None,
        description="Which nodes, such as slurmd-[0-3],slurmd-7; default is every node of the partition, at most 64.",
    )
    account: fields.SlurmAccount = None
    qos: fields.Qos = None
    reservation: fields.Reservation = None
    wait_timeout: typing.Annotated[int, fields.STRICT, fields.between(1, 3600)] = pydantic.Field(
        60, description="How long to wait for the nodes to be free, in seconds; a core and 1 GiB on each is enough."
    )


def _as_text(value: object) -> object:
    return str(value) if type(value) is int else value  # Juju reads run=40 as a number


# A run's name, a job's id, or an element of an array such as 40_3
RunOrJob = typing.Annotated[fields.Name, pydantic.BeforeValidator(_as_text)]
_NAMES = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}([, ] ?[A-Za-z0-9][A-Za-z0-9._-]{0,63})*"
_Names = typing.Annotated[
    str, fields.STRICT, fields.matches(_NAMES, 1100, "names of runs or ids of jobs, separated by commas or blanks")
]
_RunNames = typing.Annotated[_Names, pydantic.BeforeValidator(_as_text)]


class ListRuns(fields.Parsed):
    """Parameters of list-runs."""

    state: (
        typing.Annotated[str, fields.STRICT, fields.matches(r"[A-Za-z_, ]+", 200, "states such as FAILED")] | None
    ) = pydantic.Field(None, description="Only runs in this state, such as RUNNING, or in one of several.")
    name: (
        typing.Annotated[
            str, fields.STRICT, fields.matches(r"[A-Za-z0-9][A-Za-z0-9._*-]*", 80, "a pattern such as lrs*")
        ]
        | None
    ) = pydantic.Field(None, description="Only runs whose name matches this pattern, such as lrs*.")
    since: (
        typing.Annotated[str, fields.STRICT, fields.matches(r"[0-9][0-9TZmhdw:.+-]*", 40, "2d, 12h or a date")] | None
    ) = pydantic.Field(None, description="Only runs with changes since then: 30m, 12h, 2d, 1w, or a date.")
    sort: typing.Annotated[
        str, fields.STRICT, fields.among("submitted", "name", "state", "loss", "best", "rate", "step")
    ] = pydantic.Field("submitted", description="Order of the list; submitted puts the newest first.")
    all: fields.Flag = pydantic.Field(False, description="List everybody's jobs, too.")
    lines: fields.Lines = pydantic.Field(50, description="Largest number of runs to list.")


class OneRun(fields.Parsed):
    """Parameters that name a run."""

    run: RunOrJob | None = pydantic.Field(
        None, description="Run's name, job's id, or an element of an array such as 40_3. Defaults to the newest run."
    )


class ShowRun(OneRun):
    """Parameters of show-run."""


class WatchRun(OneRun):
    """Options of watch."""


class ResumeRun(OneRun):
    """Parameters of resume-run."""


class RunLog(OneRun):
    """Parameters of run-log."""

    rank: typing.Annotated[int, fields.STRICT, fields.between(0, fields.MAX_NODES * fields.MAX_GPUS)] | None = (
        pydantic.Field(None, description="Show this rank's own output.")
    )
    lines: fields.Lines = pydantic.Field(50, description="Largest number of lines to show.")
    follow: fields.Flag = pydantic.Field(False, description="Show new lines until the job ends or the time is over.")
    follow_timeout: typing.Annotated[int, fields.STRICT, fields.between(1, 86400)] = pydantic.Field(
        60, description="For how long to follow, in seconds."
    )


class CancelRun(fields.Parsed):
    """Parameters of cancel-run."""

    run: _RunNames | None = pydantic.Field(
        None, description="Runs' names or jobs' ids, separated by commas. A sweep is cancelled with all its runs."
    )


class Report(fields.Parsed):
    """Options of report."""

    runs: _RunNames | None = pydantic.Field(None, description="Runs' names. Defaults to the newest run.")
    output: typing.Annotated[str, fields.STRICT] | None = pydantic.Field(None, description="Where to write the page.")


class CompareRuns(fields.Parsed):
    """Parameters of compare-runs."""

    runs: _RunNames | None = pydantic.Field(
        None,
        description="Two to eight runs, such as night,dawn, or sweeps. Defaults to the two newest with results.",
    )


_Size = typing.Annotated[
    str,
    fields.STRICT,
    fields.matches(r"[1-9][0-9]{0,11}[KMG]?", 13, "a number of bytes, with K, M or G behind it, such as 64M"),
]


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "alltoall", "sendrecv", "all")


class BenchmarkCollectives(fields.Resources):
    """Parameters of benchmark-collectives."""

    collective: typing.Annotated[str, fields.STRICT, fields.among(*COLLECTIVES)] = pydantic.Field(
        "all_reduce", description="Which collective; all_reduce is what DDP does in every step."
    )
    nodes: fields.Nodes = None
    gpus_per_node: typing.Annotated[fields.Gpus | None, fields.GPUS] = pydantic.Field(
        None, description="GPUs on each node, one rank each; 0 measures CPUs with gloo; default is all."
    )
    constraint: fields.Constrained = None
    nodelist: fields.Nodelist = None
    exclude: fields.Exclude = None
    min_bytes: _Size | None = pydantic.Field(
        None, description="Smallest size, such as 8M; default is 1K on CPUs and 8M on GPUs."
    )
    max_bytes: _Size | None = pydantic.Field(
        None, description="Largest size, such as 8G; default is 64M on CPUs and 8G on GPUs."
    )
    step_factor: typing.Annotated[int, fields.STRICT, fields.between(2, 1024)] | None = pydantic.Field(
        None, description="Each size is so many times the one before; default is 4 on CPUs and 2 on GPUs."
    )
    iters: typing.Annotated[int, fields.STRICT, fields.between(1, 100_000)] | None = pydantic.Field(
        None, description="Timed calls for each size; default is 10 on CPUs and 50 on GPUs."
    )
    warmup_iters: typing.Annotated[int, fields.STRICT, fields.between(0, 100_000)] | None = pydantic.Field(
        None, description="Calls before those; default is 2 on CPUs and 5 on GPUs."
    )
    datatype: (
        typing.Annotated[
            str,
            fields.STRICT,
            fields.among("float", "double", "half", "bfloat16", "int8", "uint8", "int32", "int64"),
        ]
        | None
    ) = pydantic.Field(None, description="Type of the elements; default is float.")
    env: fields.Env = pydantic.Field(
        "", description="Environment variables for the job as NAME=value, separated by blanks, such as NCCL_DEBUG=INFO."
    )
    fabric: typing.Annotated[str, fields.STRICT, fields.among(*fabrics.NAMES)] = pydantic.Field(
        "auto", description="Which network the ranks use, as for submit-ddp."
    )
    store: typing.Annotated[str, fields.STRICT, fields.among("auto", "always", "never")] = pydantic.Field(
        "auto",
        description=(
            "Whether the figures become the baseline; auto stores them unless they are more than a tenth slower "
            "than the stored."
        ),
    )
    wait_timeout: fields.Seconds = pydantic.Field(86400, description="How long to wait for the job's end, in seconds.")


class Plan(fields.Parsed):
    """Parameters of plan."""

    partition: fields.Partition = None
    nodes: fields.Nodes = None
    gpus_per_node: fields.Gpus | None = pydantic.Field(
        None, description="GPUs on each node, one rank each; default is all."
    )
    cpus_per_task: fields.Cpus | None = pydantic.Field(
        None, description="Cores on each node; default is the share that goes with the GPUs, or all."
    )
    model: (
        typing.Annotated[
            str,
            fields.STRICT,
            fields.among("tiny", "small", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
        ]
        | None
    ) = pydantic.Field(None, description="The payload's model; default is tiny on CPUs and gpt2 on GPUs.")
    parameters: typing.Annotated[int, fields.STRICT, fields.between(1, 10**13)] | None = pydantic.Field(
        None, description="Number of parameters of a model of your own, such as 7000000000, in place of model."
    )
    seq_len: typing.Annotated[int, fields.STRICT, fields.between(1, 1 << 20)] | None = pydantic.Field(
        None, description="Tokens of a sequence; default is 128 on CPUs and 1024 on GPUs."
    )
    batch: typing.Annotated[int, fields.STRICT, fields.between(1, 1 << 20)] | None = pydantic.Field(
        None, description="Sequences of a rank and forward pass; default is 16 on CPUs and 32 on GPUs."
    )
    grad_accum: typing.Annotated[int, fields.STRICT, fields.between(1, 1 << 20)] = pydantic.Field(
        1, description="Forward passes of a step; communication happens once in a step."
    )
    dataset: fields.Dataset | None = pydantic.Field(
        None, description="Dataset whose vocabulary counts; default is gpt2's on GPUs and bytes on CPUs."
    )
    tokens_per_second: typing.Annotated[int, fields.STRICT, fields.between(1, 10**9)] | None = pydantic.Field(
        None,
        description="What one rank alone computes; default is measured by an earlier run of the model, or estimated.",
    )

"""Parameters of the actions on environments, datasets, runs and the cluster itself."""

import typing

import trainer_fabric
import trainer_params


class InstallEnvironment(trainer_params.Parsed):
    """Parameters of install-environment."""

    torch: trainer_params.TorchBuild | None = None
    force: trainer_params.Flag = False
    wheelhouse: (
        typing.Annotated[
            str,
            trainer_params.STRICT,
            trainer_params.matches(trainer_params.PATH, 1024, trainer_params.PATH_RULE),
            trainer_params.checked_path,
        ]
        | None
    ) = None


class PrepareDataset(trainer_params.Resources):
    """Parameters of prepare-dataset."""

    name: (
        typing.Annotated[
            str,
            trainer_params.STRICT,
            trainer_params.matches(r"[A-Za-z0-9][A-Za-z0-9._-]*", 56, trainer_params.NAME_RULE),
        ]
        | None
    ) = None
    source: trainer_params.Source = "python-stdlib"
    tokenizer: typing.Annotated[str, trainer_params.STRICT, trainer_params.among("auto", "byte", "gpt2")] = "auto"
    elements: typing.Annotated[int, trainer_params.STRICT, trainer_params.between(1, 1000)] | None = None
    parallel: typing.Annotated[int, trainer_params.STRICT, trainer_params.between(1, 1000)] | None = None
    wait: trainer_params.Flag = True
    wait_timeout: trainer_params.Seconds = 86400


class Doctor(trainer_params.Parsed):
    """Parameters of doctor."""

    partition: trainer_params.Name | None = None
    nodes: trainer_params.Hosts | None = None
    account: trainer_params.Name | None = None
    qos: trainer_params.Name | None = None
    reservation: trainer_params.Name | None = None
    collectives: trainer_params.Flag = False
    wait_timeout: typing.Annotated[int, trainer_params.STRICT, trainer_params.between(1, 3600)] = 60


class ListRuns(trainer_params.Parsed):
    """Parameters of list-runs."""

    lines: trainer_params.Lines = 50


class ShowRun(trainer_params.Parsed):
    """Parameters of show-run."""

    run: trainer_params.Name | None = None


class CompareRuns(trainer_params.Parsed):
    """Parameters of compare-runs."""

    runs: (
        typing.Annotated[
            str,
            trainer_params.STRICT,
            trainer_params.matches(
                r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}([, ] ?[A-Za-z0-9][A-Za-z0-9._-]{0,63})*",
                600,
                "names of runs, separated by commas or blanks",
            ),
        ]
        | None
    ) = None


_Size = typing.Annotated[
    str,
    trainer_params.STRICT,
    trainer_params.matches(r"[1-9][0-9]{0,11}[KMG]?", 13, "a number of bytes, with K, M or G behind it, such as 64M"),
]
_Nodes = typing.Annotated[int, trainer_params.STRICT, trainer_params.between(1, trainer_params.MAX_NODES)]
_Gpus = typing.Annotated[int, trainer_params.STRICT, trainer_params.between(0, trainer_params.MAX_GPUS)]


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "alltoall", "sendrecv", "all")


class BenchmarkCollectives(trainer_params.Resources):
    """Parameters of benchmark-collectives."""

    collective: typing.Annotated[str, trainer_params.STRICT, trainer_params.among(*COLLECTIVES)] = "all_reduce"
    nodes: _Nodes | None = None
    gpus_per_node: _Gpus | None = None
    constraint: trainer_params.Constraint | None = None
    nodelist: trainer_params.Hosts | None = None
    exclude: trainer_params.Hosts | None = None
    min_bytes: _Size | None = None
    max_bytes: _Size | None = None
    step_factor: typing.Annotated[int, trainer_params.STRICT, trainer_params.between(2, 1024)] | None = None
    iters: typing.Annotated[int, trainer_params.STRICT, trainer_params.between(1, 100_000)] | None = None
    warmup_iters: typing.Annotated[int, trainer_params.STRICT, trainer_params.between(0, 100_000)] | None = None
    datatype: (
        typing.Annotated[
            str,
            trainer_params.STRICT,
            trainer_params.among("float", "double", "half", "bfloat16", "int8", "uint8", "int32", "int64"),
        ]
        | None
    ) = None
    env: trainer_params.Env = ""
    fabric: typing.Annotated[str, trainer_params.STRICT, trainer_params.among(*trainer_fabric.NAMES)] = "auto"
    store: typing.Annotated[str, trainer_params.STRICT, trainer_params.among("auto", "always", "never")] = "auto"
    wait_timeout: trainer_params.Seconds = 86400


class Plan(trainer_params.Parsed):
    """Parameters of plan."""

    partition: trainer_params.Name | None = None
    nodes: _Nodes | None = None
    gpus_per_node: _Gpus | None = None
    cpus_per_task: (
        typing.Annotated[int, trainer_params.STRICT, trainer_params.between(1, trainer_params.MAX_CPUS)] | None
    ) = None
    model: (
        typing.Annotated[
            str,
            trainer_params.STRICT,
            trainer_params.among("tiny", "small", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
        ]
        | None
    ) = None
    parameters: typing.Annotated[int, trainer_params.STRICT, trainer_params.between(1, 10**13)] | None = None
    seq_len: typing.Annotated[int, trainer_params.STRICT, trainer_params.between(1, 1 << 20)] | None = None
    batch: typing.Annotated[int, trainer_params.STRICT, trainer_params.between(1, 1 << 20)] | None = None
    grad_accum: typing.Annotated[int, trainer_params.STRICT, trainer_params.between(1, 1 << 20)] = 1
    dataset: trainer_params.Dataset | None = None
    tokens_per_second: typing.Annotated[int, trainer_params.STRICT, trainer_params.between(1, 10**9)] | None = None

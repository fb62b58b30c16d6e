"""Parameters of submitit's executors, as options of ddp."""

import pathlib
import tomllib
import typing

from ddptrain.functions import options as named

_TABLE = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
_OTHERS = ("local", "debug")  # executors whose parameters do not count on Slurm
# submitit's own: one node, one task with one core, no GPU
_DEFAULTS: dict[str, typing.Any] = {"nodes": 1, "gpus_per_node": 0, "ranks_per_node": 1}
_SAME = {"timeout_min": "time", "mem_gb": "mem", "tasks_per_node": "ntasks_per_node"}
_GENERIC = frozenset(
    "name timeout_min mem_gb nodes cpus_per_task gpus_per_node tasks_per_node stderr_to_stdout".split()
)

Parameters = dict[str, typing.Any]


def check(given: Parameters) -> None:
    """Raise ValueError for a parameter that submitit does not know, or that ddp cannot follow."""
    for name in given:
        bare = _bare(name)
        if bare is None:
            continue
        if bare in _TABLE["refused"]:
            raise ValueError(f"{name} is not supported: {_TABLE['refused'][bare]}")
        if bare not in _known():
            raise ValueError(f"unknown parameter {name}; there are: {', '.join(sorted(_known()))}")


def options(given: Parameters) -> named.Options:
    """Return ddp's options for the parameters; Slurm's override the general ones."""
    bare = _for_slurm(given)
    found = dict(_DEFAULTS)
    for name, option in _TABLE["options"].items():
        if name in bare:
            found[option] = bare[name]
    if isinstance(bare.get("mem"), int | float):  # of mem_gb
        found["memory"] = f"{int(bare['mem'] * 1024)}M"
    _count_cores(found, bare)

    words = [f"{flag}={bare[name]}" for name, flag in _TABLE["sbatch"].items() if name in bare]
    for name, value in dict(bare.get("additional_parameters") or {}).items():
        option = name.replace("-", "_")
        if option in named.NAMES:
            found[option] = value
        else:
            flag = f"--{name.replace('_', '-')}"
            words.append(flag if value is True else f"{flag}={value}")
    if words:
        found["sbatch"] = words
    return found


def _for_slurm(given: Parameters) -> Parameters:
    """Return the parameters that count on Slurm, by their names without slurm_."""
    bare: Parameters = {}
    for name, value in sorted(given.items(), key=lambda pair: pair[0].startswith("slurm_")):
        short = _bare(name)
        if short is not None and value is not None:
            bare[_SAME.get(short, short)] = value
    return bare


def label(given: Parameters) -> str:
    """Return the name of jobs, or ""."""
    return str(given.get("slurm_job_name") or given.get("job_name") or given.get("name") or "")


def _count_cores(found: named.Options, bare: Parameters) -> None:
    """Multiply submitit's counts for a task or a GPU, because ddp counts for a node."""
    ranks = max(1, int(found["ranks_per_node"] or 1))
    found["ranks_per_node"] = ranks
    if "gpus_per_task" in bare:
        found["gpus_per_node"] = int(bare["gpus_per_task"]) * ranks
    found["cpus_per_task"] = int(bare.get("cpus_per_task") or 1) * ranks
    gpus = found["gpus_per_node"]
    if not str(gpus).isdecimal():  # such as a100:2
        gpus = str(gpus).rpartition(":")[2]
    if "cpus_per_gpu" in bare:
        found["cpus_per_task"] = int(bare["cpus_per_gpu"]) * int(gpus)
    if "mem_per_gpu" in bare:
        size = str(bare["mem_per_gpu"]).removesuffix("B")
        unit = size[-1] if size[-1].isalpha() else "M"
        found["memory"] = f"{int(size.rstrip('KMGT')) * int(gpus)}{unit}"


def _bare(name: str) -> str | None:
    """Return a parameter's name without slurm_; None for one of another executor."""
    prefix, _, rest = name.partition("_")
    if prefix in _OTHERS:
        return None
    return rest if prefix == "slurm" else name


def _known() -> frozenset[str]:
    tables = ("options", "sbatch", "per_rank", "per_gpu")
    names = {name for table in tables for name in _TABLE[table]}
    return frozenset(
        {*names, *_GENERIC, *_TABLE["ours"]["names"], "job_name", "additional_parameters"}
    )

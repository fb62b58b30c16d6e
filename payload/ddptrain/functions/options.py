"""The options of `ddp submit` that a function's job takes, as keywords."""

import collections.abc
import pathlib
import typing

from ddptrain.functions import errors

NAMES = frozenset(
    """
    accept_risk account constraint container_image cpus_per_task dependency env env_file environment exclude exclusive
    fabric gpus_per_node max_requeues max_restarts mem_per_cpu memory metric nodelist nodes notify partition python qos
    ranks_per_node requirements reservation run sbatch snapshot spare_nodes stop_signal time_limit
    """.split()
)
OF_SWEEPS = frozenset({"parallel"})
_REPEATED = frozenset({"env", "metric"})

Options = dict[str, typing.Any]


def flags(options: Options, *, is_sweep: bool = False) -> list[str]:
    """Format options as ddp's flags. Raises FunctionError for an unknown one."""
    known = NAMES | OF_SWEEPS if is_sweep else NAMES
    found: list[str] = []
    for name, value in options.items():
        if name not in known:
            raise errors.FunctionError(
                f"{name} is not an option of a job; there are: {', '.join(sorted(known))}"
            )
        if value is not None:
            flag = "name" if is_sweep and name == "run" else name.replace("_", "-")
            found += _flag(flag, value)
    return found


def _flag(name: str, value: object) -> list[str]:
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"] if name == "snapshot" else []
    if isinstance(value, collections.abc.Mapping):
        pairs = typing.cast("collections.abc.Mapping[str, object]", value)
        return [f"--{name}={key}={item}" for key, item in pairs.items()]
    if isinstance(value, list | tuple):
        words = [str(one) for one in typing.cast("collections.abc.Iterable[object]", value)]
        if name in _REPEATED:
            return [f"--{name}={word}" for word in words]
        return [f"--{name}={' '.join(words) if name == 'sbatch' else ','.join(words)}"]
    if isinstance(value, pathlib.Path):
        value = value.expanduser()
    return [f"--{name}={value}"]

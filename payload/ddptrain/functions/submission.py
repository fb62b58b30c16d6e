"""Submit functions: `job = submit(train, lr=0.1, nodes=2)`, and one for each of many arguments."""

import collections.abc
import dataclasses
import inspect
import itertools
import pathlib
import re
import tempfile
import typing

from ddptrain.functions import calls, command, errors, jobs
from ddptrain.functions import options as named
from ddptrain.functions.watch import Watch

R = typing.TypeVar("R")
Function = collections.abc.Callable[..., R]
MODULE = "ddptrain.functions"
MOST = 256  # runs of one sweep


@dataclasses.dataclass(frozen=True)
class Submit:
    """Submits functions; every rank of a job calls its function once.

    A keyword that names an option of the job (nodes, gpus_per_node, time_limit, ...) goes to the
    job, and each other one to the function. After `submit.options(...)`, all of them go to the
    function.
    """

    given: named.Options = dataclasses.field(default_factory=dict[str, typing.Any])
    is_divided: bool = False  # keywords are the function's alone

    def options(self, **options: typing.Any) -> "Submit":
        """Return a submit with these options of jobs; its keywords go to the function alone."""
        named.flags(options, is_sweep=True)
        return Submit({**self.given, **options}, is_divided=True)

    def __call__(
        self, function: "Function[R]", /, *args: typing.Any, **keywords: typing.Any
    ) -> jobs.Job[R]:
        """Submit a call of a function. Raises FunctionError."""
        kwargs, options = self._divide(function, keywords, named.NAMES)
        return submit_one(calls.Call(function, args, kwargs), options)

    def map(
        self,
        function: "Function[R]",
        /,
        *iterables: collections.abc.Iterable[typing.Any],
        **keywords: typing.Any,
    ) -> jobs.Jobs[R]:
        """Submit a function for many arguments, as sweeps; return the jobs in their order.

        Iterables are walked side by side, as map() does. Keywords with a list or a range make every
        combination, the last one changing fastest; any other value is the same for all. Raises
        FunctionError.
        """
        kwargs, options = self._divide(function, keywords, named.NAMES | named.OF_SWEEPS)
        rows = [()] if not iterables else list(zip(*iterables))  # noqa: B905 - as map() does
        many = [
            calls.Call(function, tuple(row), chosen)
            for row in rows
            for chosen in _combinations(kwargs)
        ]
        return submit_many(many, options)

    def job(self, run: str) -> jobs.Job[typing.Any]:
        """Return the job of a run by its name, for instance after a notebook's restart.

        Raises FunctionError.
        """
        about = command.ask("show", run)
        return jobs.Job(
            about["run"], pathlib.Path(about["run_dir"]), str(about.get("job_id") or "")
        )

    def _divide(
        self,
        function: "Function[R]",
        keywords: dict[str, typing.Any],
        known: collections.abc.Set[str],
    ) -> tuple[dict[str, typing.Any], named.Options]:
        """Divide keywords between the function and the job. Raises FunctionError."""
        if self.is_divided:
            return keywords, self.given
        own = _parameters(function)
        kwargs: dict[str, typing.Any] = {}
        options: named.Options = dict(self.given)
        for name, value in keywords.items():
            if name not in known:
                kwargs[name] = value
                continue
            if name in own:
                how = f"write submit.options({name}=...)(...) for the job's"
                raise errors.FunctionError(
                    f"{name} is an option of the job and of the function; {how}"
                )
            options[name] = value
        return kwargs, options


submit = Submit()


def submit_one(call: calls.Call, options: named.Options, label: str = "") -> jobs.Job[typing.Any]:
    """Submit a call; its run is named after `label`, or after the function.

    Raises FunctionError.
    """
    own = {name: value for name, value in options.items() if name not in named.OF_SWEEPS}
    found = _submit([call], ["submit", *named.flags(_with_signal(call, own))], label)
    return jobs.Job(found["run"], pathlib.Path(found["run-dir"]), str(found["job-id"]))


def submit_many(
    many: collections.abc.Sequence[calls.Call], options: named.Options, label: str = ""
) -> jobs.Jobs[typing.Any]:
    """Submit calls as sweeps of at most MOST runs, named as one is. Raises FunctionError."""
    found: jobs.Jobs[typing.Any] = jobs.Jobs()
    for first in range(0, len(many), MOST):
        part = list(many[first : first + MOST])
        numbers = ",".join(map(str, range(len(part))))
        flags = named.flags(_with_signal(part[0], options), is_sweep=True)
        answer = _submit(part, ["sweep", f"--grid=call={numbers}", *flags], label)
        sweep = answer["sweep"]
        folder = pathlib.Path(answer["run-dir"]).parent
        watch = Watch(f"{sweep}-*")
        for number in range(len(part)):
            run = f"{sweep}-{number}"
            found.append(jobs.Job(run, folder / run, f"{answer['job-id']}_{number}", watch))
    return found


def _submit(many: list[calls.Call], words: list[str], label: str) -> command.Json:
    """Hand calls to ddp in a file, which it copies into the run's folder."""
    label = re.sub(r"[^A-Za-z0-9._-]", "-", label or many[0].name)[:40]
    with tempfile.TemporaryDirectory(prefix="ddp-function-") as folder:
        path = pathlib.Path(folder, f"{label}.pkl")
        calls.write(path, many)
        return command.ask(*words, f"--function={path}", "-m", MODULE, is_quiet=False)


def _with_signal(call: calls.Call, options: named.Options) -> named.Options:
    """Return the options, with the signal that ends a function with a method `checkpoint`."""
    if not hasattr(call.function, "checkpoint"):
        return options
    return {"stop_signal": calls.STOP_SIGNAL, **options}


def _combinations(kwargs: dict[str, typing.Any]) -> collections.abc.Iterator[dict[str, typing.Any]]:
    """Yield the keywords of each run: every combination of those with a list or a range."""
    swept: dict[str, collections.abc.Iterable[typing.Any]] = {}
    for name, value in kwargs.items():
        if isinstance(value, list | range):
            swept[name] = typing.cast("collections.abc.Iterable[typing.Any]", value)
    for values in itertools.product(*swept.values()):
        yield {**kwargs, **dict(zip(swept, values, strict=True))}


def _parameters(
    function: collections.abc.Callable[..., typing.Any],
) -> collections.abc.Container[str]:
    """Return the names of a function's parameters, as far as Python knows them."""
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):  # of a built-in
        return ()

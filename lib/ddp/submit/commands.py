"""Commands that people type: `torchrun ...` and `python ...` become options of submit.

Other launchers are refused, with the line to type instead.
"""

import collections.abc
import pathlib
import re
import shlex

from ddp.problem import ParameterError, one_line

# torchrun's options that are ours by another name: https://docs.pytorch.org/docs/stable/elastic/run.html
_OURS = {"nnodes": "nodes", "nproc-per-node": "ranks", "max-restarts": "max-restarts"}
_RENDEZVOUS = re.compile(r"rdzv-.*|standalone|node-rank|master-(addr|port)|local-addr")
_SETTING = re.compile(r"[A-Za-z_]\w*=")
Values = dict[str, object]  # of options
_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
_LAUNCHERS = frozenset(
    "accelerate bash colossalai composer conda coverage deepspeed fabric horovodrun ipython jsrun lightning micromamba "
    "mpiexec mpirun nohup pixi poetry sbatch sh srun uv".split()
)


def unwrap(values: Values, arguments: tuple[str, ...]) -> tuple[Values, tuple[str, ...]]:
    """Replace a typed launcher by the program that it starts; return the options and arguments.

    An environment's Python or torchrun that is typed with its path makes the option `active`.
    Raises ParameterError: the command has an option that ddp sets itself, or starts no Python
    program.
    """
    workload = values.get("workload")
    typed = workload if isinstance(workload, str) else ""
    name = pathlib.PurePath(typed).name
    if _is_python(name):
        values = values | _active(typed)
        return _torchrun(values, arguments) if name == "torchrun" else _python(values, arguments)
    is_launcher = name in _LAUNCHERS
    if not values.get("module") and not _is_ours(name):
        _refuse_setting(typed, arguments)
        # as `time python train.py` and `pdm run train.py` do
        is_launcher |= any(_is_python(word) or word.endswith(".py") for word in arguments)
    if is_launcher and not pathlib.Path(typed).is_file():
        text = f"{name}: ddp starts the ranks itself; {instead(arguments)}"
        raise ParameterError("workload", text)
    return values, arguments


def _active(typed: str) -> Values:
    """Return the environment of a Python that is typed with its path, as an option."""
    if "/" not in typed:
        return {}
    prefix = pathlib.Path(typed).absolute().parent.parent
    markers = (prefix / "pyvenv.cfg", prefix / "conda-meta")
    return {"active": str(prefix)} if any(marker.exists() for marker in markers) else {}


def _is_ours(name: str) -> bool:
    return name in ("", "gpt", "smoke") or name.endswith(".py")


def _refuse_setting(typed: str, arguments: tuple[str, ...]) -> None:
    """Raise ParameterError for NAME=value, as a shell takes it before a command."""
    if _SETTING.match(typed):
        rest = [word for word in arguments if not _is_python(word)]
        line = f"ddp submit --env {shlex.join((typed, *rest))}"
        raise ParameterError("workload", f"{typed}: write: {line}")


def _is_python(word: str) -> bool:
    name = pathlib.PurePath(word).name
    return name == "torchrun" or _PYTHON.fullmatch(name) is not None


def _torchrun(values: Values, arguments: tuple[str, ...]) -> tuple[Values, tuple[str, ...]]:
    words = list(arguments)
    found: Values = {}
    while words and words[0].startswith("-"):
        if words[0] == "--":
            words.pop(0)
            break
        flag, separator, value = words.pop(0).partition("=")
        name = flag.lstrip("-").replace("_", "-")
        if name in ("m", "module"):
            found["module"] = True
        elif _RENDEZVOUS.fullmatch(name):
            raise ParameterError(
                "workload", f"torchrun's {flag}: ddp sets the rendezvous itself; omit it"
            )
        elif name not in _OURS:
            raise ParameterError(
                "workload", f"torchrun's {flag} has no counterpart; omit it, see: ddp submit --help"
            )
        else:
            if not separator:
                value = words.pop(0) if words else ""
            found |= _option(flag, name, value)
    return _program(values | _agreed(values, found), words, "torchrun")


def _option(flag: str, name: str, value: str) -> Values:
    """Return our option for one of torchrun's."""
    if name == "nproc-per-node" and value in ("auto", "gpu", "cpu"):
        return {"gpus-per-node": 0} if value == "cpu" else {}
    low, _, high = value.partition(":")
    if not low.isdecimal() or (high and high != low):
        raise ParameterError("workload", f"torchrun's {flag} {value}: give one whole number")
    return {_OURS[name]: int(low)}


def _agreed(values: Values, found: Values) -> Values:
    """Return the options found.

    Raises ParameterError if the same option of ours was given another value.
    """
    for name, value in found.items():
        ours = "gpus-per-node" if name == "ranks" else name
        given = values.get(ours)
        is_same = given is None or str(given) == str(value)
        if not is_same and not (name == "ranks" and str(given) == "0"):
            raise ParameterError(ours, f"{given} and torchrun's {value} disagree; give one of them")
    return found


def _python(values: Values, arguments: tuple[str, ...]) -> tuple[Values, tuple[str, ...]]:
    words, is_module = list(arguments), False
    while words and words[0].startswith("-") and not is_module:
        word = words.pop(0)
        if word == "--":
            break
        flags, m, rest = word[1:].partition("m")
        if set(flags) - {*"uBEq"} or word == "-":  # these change nothing in a job
            how = f"a variable does, as in --env PYTHONOPTIMIZE=1; {instead((word, *words))}"
            raise ParameterError("workload", f"python's {word} is not passed on; {how}")
        is_module, words[:0] = bool(m), [rest] * bool(rest)
    if is_module and words[:1] in (["torch.distributed.run"], ["torch.distributed.launch"]):
        return _torchrun(values, tuple(words[1:]))
    if is_module and words and words[0].partition(".")[0] in _LAUNCHERS:
        raise ParameterError(
            "workload", f"{words[0]}: ddp starts the ranks itself; {instead(words[1:])}"
        )
    return _program(values | {"module": True} if is_module else values, words, "python")


def _program(values: Values, words: list[str], launcher: str) -> tuple[Values, tuple[str, ...]]:
    if not words:
        raise ParameterError(
            "workload", f"{launcher} without a program; write: ddp submit train.py"
        )
    return values | {"workload": words[0]}, tuple(words[1:])


def instead(words: collections.abc.Sequence[str]) -> str:
    """Return the line to type for the program that a launcher's command seems to start."""
    starts = (
        n
        for n, word in enumerate(words)
        if word.endswith(".py") or (word == "-m" and words[n + 1 :])
    )
    if (start := next(starts, None)) is None:
        return "write the program alone: ddp submit train.py"
    return f"write: ddp submit {one_line(shlex.join(words[start:]), 200)}"

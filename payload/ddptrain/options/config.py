"""Settings of a training: declared once, read from flags and a file, completed, printed back and kept whole.

The file is the config.json that a run keeps: given back, it is the same training.

A value comes from, first that has one: the flag, the file, the record of the run that goes on (recipe.py), the defaults
of the device.
"""

# ruff: noqa: RUF009 - option returns a dataclasses.field
import argparse
import collections.abc
import contextlib
import dataclasses
import operator
import os
import pathlib
import typing

from ddptrain.ground import errors, files

MODELS = ("tiny", "small", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

TIMEOUT_MINUTES = 30.0
_TIMEOUT = (
    "how long ranks wait for one another, as for a first compilation, before a hang ends the run"
)
_PRECISION = "auto: fp32 with --deterministic, otherwise bf16 if the hardware has it"


def option(
    default: typing.Any, text: str, kind: type | None = None, **more: typing.Any
) -> typing.Any:
    """Make the field of a setting: `more` are bounds, choices, a `short` flag, and what argparse takes."""
    return dataclasses.field(
        default=default, metadata={"text": text, "kind": kind or type(default), **more}
    )


def timeout() -> typing.Any:
    """Make the field of `timeout_minutes`."""
    return option(TIMEOUT_MINUTES, _TIMEOUT, least=0.1, most=1440.0)


_Path = pathlib.Path
# Each group of the help, and its first setting.
_GROUPS = {
    "run_dir": "run",
    "model": "model",
    "batch": "batch",
    "lr": "optimiser",
    "precision": "speed",
    "profile": "profile",
    "eval_rows": "checkpoints",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """A training's settings. None means: not given, to be completed."""

    run_dir: _Path | None = option(None, "folder of the run: checkpoints, metrics, summary", _Path)
    data: _Path | None = option(
        None, "dataset folder made by `prepare`; for fine-tuning also .jsonl", _Path
    )
    resume: str = option(
        "auto", "auto: from the newest complete checkpoint; never; or a run or checkpoint folder"
    )
    device: str = option(
        "auto", "auto: a GPU if torch sees one, otherwise the CPU", choices=("auto", "cpu", "cuda")
    )
    seed: int = option(42, "seed of weights, order and dropout", least=0)
    deterministic: bool = option(
        False, "only operations that give the same bits every time; slower on GPUs"
    )
    timeout_minutes: float = timeout()
    report_json: _Path | None = option(None, "also write the summary to this file", _Path)

    model: str | None = option(
        None, "size [default: tiny on a CPU, gpt2 on a GPU]", str, choices=MODELS
    )
    layers: int | None = option(None, "layers, instead of the size's", int, least=1)
    heads: int | None = option(None, "attention heads, instead of the size's", int, least=1)
    width: int | None = option(None, "model width, instead of the size's", int, least=1)
    seq_len: int | None = option(
        None, "tokens of a sequence [default: 128 on a CPU, 1024 on a GPU]", int, least=1
    )
    dropout: float = option(0.0, "share of activations dropped in training", least=0.0, below=1.0)
    model_local_dir: _Path | None = option(
        None, "fine-tune the model saved by transformers in this folder", _Path
    )
    tokenizer_local_dir: _Path | None = option(
        None, "its tokenizer [default: the model's folder]", _Path
    )
    errors: str = option(
        "strict", "how to treat bytes that are not text", choices=("strict", "replace")
    )
    local_files_only: bool = option(
        True, "never look anything up on the network; there is no other way here"
    )

    batch: int | None = option(
        None,
        "sequences per process and forward pass [default: 16 on a CPU, 32 on a GPU]",
        int,
        least=1,
    )
    grad_accum: int | None = option(
        None,
        "forward passes per step; a step has batch x ranks x grad-accum [default: 1]",
        int,
        least=1,
    )
    steps: int | None = option(
        None,
        "optimiser steps in all [default: 200 on a CPU, one pass over the data on a GPU]",
        int,
        least=1,
    )
    epochs: int | None = option(None, "epochs in all, instead of steps", int, least=1)
    epoch_steps: int | None = option(
        None,
        "steps between validations with a checkpoint [default: a pass, at most 50 / 1000]",
        int,
        least=1,
    )

    lr: float | None = option(
        None,
        "peak learning rate [default: 0.002 for tiny, 0.0006; fine-tuning 0.00002]",
        float,
        above=0.0,
    )
    min_lr_ratio: float = option(
        0.1, "the cosine ends at this share of the peak", least=0.0, most=1.0
    )
    warmup: int | None = option(
        None, "steps of linear warm-up [default: a fifth, from 40 to 700]", int, least=0
    )
    weight_decay: float = option(0.1, "AdamW's decay of matrices", least=0.0)
    beta2: float = option(0.95, "AdamW's second momentum", least=0.0, below=1.0)
    clip: float = option(1.0, "largest norm of the gradients; 0 for no clipping", least=0.0)

    precision: str = option("auto", _PRECISION, choices=("auto", "bf16", "fp32"))
    compile: bool | None = option(
        None, "compile the model [default: on a GPU with a C compiler]", bool
    )
    bucket_mb: int = option(25, "DDP's bucket size", int, least=1)

    profile: bool = option(False, "record some steps of some ranks with torch's profiler")
    profile_ranks: str = option("0", "ranks to record, such as 0,8")
    profile_steps: str = option("10-12", "first and last step to record")

    eval_rows: int = option(256, "sequences of the fixed validation set", least=0)
    keep_checkpoints: int = option(2, "newest ones to keep beside the best", least=2)
    save_minutes: float = option(
        15.0, "also save after so many minutes within an epoch; 0: never", least=0.0
    )
    log_every: int = option(10, "steps between [TRAIN] lines", least=1)

    # Which of them flags or the file have; no setting itself
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, repr=False)


FILE = "config.json"  # of a run
CHANGES = (
    "changes"  # beside the settings in a config.json: which of them changed, and from which step
)
GONE = {"checkpoint_format", CHANGES}  # in the config.json of older runs, or no setting
LENGTH = ("steps", "epochs")  # one of them says how long the training is

_FIELDS = {field.name: field for field in dataclasses.fields(Config) if field.metadata}


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as everything else is reported."""

    def error(self, message: str) -> typing.NoReturn:
        """Raise UserError."""
        raise errors.SharedError(f"{message}; see `{self.prog} --help`")


def names() -> tuple[str, ...]:
    """Return the names of all settings, in the order of their declaration."""
    return tuple(_FIELDS)


def profiled_steps(text: str) -> tuple[int, int]:
    """Return the first and the last step that `10-12` means. Raises UserError."""
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()) or not 1 <= int(first) <= int(last):
        raise errors.UserError(f"--profile-steps {text}: first and last step, such as 10-12")
    return int(first), int(last)


def profiled_ranks(text: str) -> frozenset[int]:
    """Return the ranks that `0,8` means. Raises UserError."""
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise errors.UserError(f"--profile-ranks {text}: ranks separated by commas, such as 0,8")
    return frozenset(int(word) for word in words)


def add_arguments(parser: argparse.ArgumentParser, hidden: tuple[str, ...] = ()) -> None:
    """Declare `--config` and a flag for every setting of a training; the help leaves out `hidden`."""
    parser.add_argument(
        "--config", type=_Path, help="settings, such as a run's config.json; a flag beside it wins"
    )
    declare(parser, Config, _GROUPS, hidden)


def declare(
    parser: argparse.ArgumentParser,
    options: typing.Any,
    groups: typing.Any = (),
    hidden: tuple[str, ...] = (),
) -> None:
    """Declare a flag for every field of a dataclass of options; one that is not given is None."""
    group: typing.Any = parser
    for field in dataclasses.fields(options):
        meta, name = field.metadata, field.name
        if not meta:
            continue
        flags = [flag for flag in (meta.get("short"), f"--{name.replace('_', '-')}") if flag]
        if name in groups:
            group = parser.add_argument_group(groups[name])
        default = field.default if meta["kind"] is not bool else "yes" if field.default else "no"
        has_default = (
            field.default not in (None, dataclasses.MISSING) and "default" not in meta["text"]
        )
        text = (
            argparse.SUPPRESS
            if name in hidden
            else meta["text"] + f" [default: {default}]" * has_default
        )
        if meta["kind"] is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=text)
            continue
        word = (
            None
            if "choices" in meta
            else {int: "N", float: "X", _Path: "PATH"}.get(meta["kind"], "TEXT")
        )
        more = {
            key: meta[key] for key in ("choices", "metavar", "nargs", "required") if key in meta
        }
        group.add_argument(*flags, type=meta["kind"], help=text, **{"metavar": word, **more})


def given(args: argparse.Namespace, options: typing.Any) -> typing.Any:
    """Return the options that `declare` has declared, each checked. Raises UserError naming the one that cannot be."""
    values: dict[str, typing.Any] = {}
    for field in dataclasses.fields(options):
        if (value := getattr(args, field.name)) is not None:
            _check(field, value)
            values[field.name] = (
                tuple(typing.cast(list[object], value)) if isinstance(value, list) else value
            )
    return options(**values)


def check(args: argparse.Namespace) -> Config:
    """Return the settings given by file and flags, each checked. Raises UserError naming the one that cannot be."""
    values: dict[str, typing.Any] = _from_file(args.config) if args.config else {}
    flags = {name: value for name in _FIELDS if (value := getattr(args, name)) is not None}
    values = without_other_length(values, flags) | flags
    for name in ("run_dir", "data"):
        if (
            values.get(name) is None
            and name == "run_dir"
            and (from_env := os.environ.get("RUN_DIR"))
        ):
            values[name] = pathlib.Path(from_env)
        if values.get(name) is None:
            raise errors.UserError(
                f"--{name.replace('_', '-')} is missing; see `python -m ddptrain train --help`"
            )
    for name, value in values.items():
        _check(_FIELDS[name], value)
    config = Config(**values, given=frozenset(values))
    if config.steps is not None and config.epochs is not None:
        raise errors.UserError("--steps and --epochs exclude each other; give one")
    if not config.local_files_only:
        raise errors.UserError(
            "--no-local-files-only: models come from --model-local-dir only; copy yours there"
        )
    profiled_steps(config.profile_steps)
    profiled_ranks(config.profile_ranks)
    if config.tokenizer_local_dir and not config.model_local_dir:
        raise errors.UserError("--tokenizer-local-dir goes with --model-local-dir; give both")
    return config


def complete(
    config: Config, device: str, recorded: collections.abc.Mapping[str, typing.Any]
) -> Config:
    """Return the settings without gaps, except those that only the data can fill.

    `recorded` are values of the run that goes on; they fill what flags and file do not say.
    """
    kept = without_other_length(recorded, config.given)
    silent = {name: value for name, value in kept.items() if name not in config.given}
    config = dataclasses.replace(config, **silent)

    cpu = device == "cpu"
    model = config.model or ("tiny" if cpu else "gpt2")
    lr = 2e-5 if config.model_local_dir else 2e-3 if model == "tiny" else 6e-4
    defaults = {
        "model": model,
        "seq_len": 128 if cpu else 1024,
        "batch": 16 if cpu else 32,
        "grad_accum": 1,
        "lr": lr,
        "compile": not cpu,
    }
    return dataclasses.replace(
        config, **{k: v for k, v in defaults.items() if getattr(config, k) is None}
    )


def without_other_length(
    values: collections.abc.Mapping[str, typing.Any], chosen: collections.abc.Collection[str]
) -> dict[str, typing.Any]:
    """Return the values without steps and epochs if one of them is chosen elsewhere: they exclude each other."""
    if any(name in chosen for name in LENGTH):
        return {name: value for name, value in values.items() if name not in LENGTH}
    return dict(values)


def as_record(config: Config) -> dict[str, typing.Any]:
    """Return the settings as JSON values, in the form that `--config` reads."""
    values = {name: getattr(config, name) for name in _FIELDS}
    return {
        name: str(value) if isinstance(value, pathlib.Path) else value
        for name, value in values.items()
    }


def from_record(table: collections.abc.Mapping[str, typing.Any]) -> dict[str, typing.Any]:
    """Return the settings in a run's record, of any release; what this one does not know is left out."""
    values: dict[str, typing.Any] = {}
    for name, value in table.items():
        if name in _FIELDS and value is not None:
            with contextlib.suppress(TypeError):
                values[name] = _of_kind(name, value)
    return values


def _from_file(path: pathlib.Path) -> dict[str, typing.Any]:
    try:
        table = files.read_json(path)
    except (OSError, ValueError) as e:
        raise errors.UserError(
            f"--config {path}: {e.strerror if isinstance(e, OSError) else e}"
        ) from e
    values: dict[str, typing.Any] = {}
    for name, value in table.items():
        if name in GONE or value is None:  # null in JSON: not given
            continue
        if name not in _FIELDS:
            raise errors.UserError(
                f"--config {path}: unknown setting {name!r}; the settings are {', '.join(_FIELDS)}"
            )
        try:
            values[name] = _of_kind(name, value)
        except TypeError as e:
            raise errors.UserError(f"--config {path}: {e}") from e
    return values


def _of_kind(name: str, value: object) -> object:
    """Return a JSON value as the setting has it. Raises TypeError."""
    kind = _FIELDS[name].metadata["kind"]
    if kind is pathlib.Path and isinstance(value, str):
        return pathlib.Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{name} must be of type {kind.__name__}, not {value!r}")
    return value


def _check(field: typing.Any, value: typing.Any) -> None:
    meta = field.metadata
    flag = f"--{field.name.replace('_', '-')} {value}"
    if "choices" in meta and value not in meta["choices"]:
        raise errors.UserError(f"{flag}: must be one of {', '.join(meta['choices'])}")
    if isinstance(value, float) and not -1e300 < value < 1e300:
        raise errors.UserError(f"{flag}: must be a finite number")
    for rule, words, holds in _RULES:
        if rule in meta and not holds(value, meta[rule]):
            raise errors.UserError(f"{flag}: must be {words} {meta[rule]}")


_RULES = (
    ("least", "at least", operator.ge),
    ("most", "at most", operator.le),
    ("above", "above", operator.gt),
    ("below", "below", operator.lt),
)

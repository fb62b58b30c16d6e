"""Settings of a training: declared once, read from flags and a file, completed and recorded.

The file is the config.json that a run keeps: given back, it is the same training.

A value comes from the first that has one: the flag, the file, the record of the run that goes on
(recipe.py), or the defaults of the device.
"""

# ruff: noqa: RUF009 - flags.setting returns a dataclasses.field
import argparse
import collections.abc
import contextlib
import dataclasses
import os
import pathlib
import typing

from ddptrain.ground import errors, files
from ddptrain.options import flags

MODELS = ("tiny", "small", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
FILE = "config.json"  # of a run
CHANGES = "changes"  # in a config.json: the settings that changed, and when
GONE = {"checkpoint_format", CHANGES}  # in the config.json of older runs, or no setting
LENGTH = ("steps", "epochs")  # one of them says how long the training is
# Of an attempt, not of the run: paths and monitoring, which may change at each submission.
OF_ATTEMPT = frozenset(
    "run_dir data resume device timeout_minutes report_json local_files_only profile profile_ranks "
    "profile_steps sites".split()
)

_PRECISION = "auto: bf16 if the hardware has it; on CPUs fp32 with --deterministic"
_Path = pathlib.Path
# Each group of the help, and its first setting.
_GROUPS = {
    "run_dir": "run",
    "model": "model",
    "batch": "batch",
    "lr": "optimiser",
    "precision": "speed",
    "gradients": "network",
    "profile": "profile",
    "eval_rows": "checkpoints",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """A training's settings: as given, with None for those that were not, or completed.

    Types describe completed settings; only the optional ones may stay None.
    """

    run_dir: _Path = flags.setting(None, "folder of the run: checkpoints, metrics, summary", _Path)
    data: _Path = flags.setting(
        None, "dataset folder made by `prepare`; for fine-tuning also .jsonl", _Path
    )
    resume: str = flags.setting(
        "auto", "auto: from the newest complete checkpoint; never; or a run or checkpoint folder"
    )
    device: str = flags.setting(
        "auto", "auto: a GPU if torch sees one, otherwise the CPU", choices=("auto", "cpu", "cuda")
    )
    seed: int = flags.setting(42, "seed of weights, order and dropout", least=0)
    deterministic: bool = flags.setting(
        False, "only operations that give the same bits every time; slower on GPUs"
    )
    timeout_minutes: float = flags.timeout()
    report_json: _Path | None = flags.setting(None, "also write the summary to this file", _Path)

    model: str = flags.setting(
        None, "size [default: tiny on a CPU, gpt2 on a GPU]", str, choices=MODELS
    )
    layers: int | None = flags.setting(None, "layers, instead of the size's", int, least=1)
    heads: int | None = flags.setting(None, "attention heads, instead of the size's", int, least=1)
    width: int | None = flags.setting(None, "model width, instead of the size's", int, least=1)
    seq_len: int = flags.setting(
        None, "tokens of a sequence [default: 128 on a CPU, 1024 on a GPU]", int, least=1
    )
    dropout: float = flags.setting(
        0.0, "share of activations dropped in training", least=0.0, below=1.0
    )
    model_local_dir: _Path | None = flags.setting(
        None, "fine-tune the model saved by transformers in this folder", _Path
    )
    tokenizer_local_dir: _Path | None = flags.setting(
        None, "its tokenizer [default: the model's folder]", _Path
    )
    errors: str = flags.setting(
        "strict", "how to treat bytes that are not text", choices=("strict", "replace")
    )
    local_files_only: bool = flags.setting(
        True, "never look anything up on the network; there is no other way here"
    )

    batch: int = flags.setting(
        None,
        "sequences per process and forward pass [default: 16 on a CPU, 32 on a GPU]",
        int,
        least=1,
    )
    grad_accum: int = flags.setting(
        None,
        "forward passes per step; a step has batch x ranks x grad-accum [default: 1]",
        int,
        least=1,
    )
    steps: int | None = flags.setting(
        None,
        "optimiser steps in all [default: 200 on a CPU, one pass over the data on a GPU]",
        int,
        least=1,
    )
    epochs: int | None = flags.setting(None, "epochs in all, instead of steps", int, least=1)
    epoch_steps: int = flags.setting(
        None,
        "steps between validations with a checkpoint [default: a pass, at most 50 / 1000]",
        int,
        least=1,
    )

    lr: float = flags.setting(
        None,
        "peak learning rate [default: 0.002 for tiny, 0.0006; fine-tuning 0.00002]",
        float,
        above=0.0,
    )
    min_lr_ratio: float = flags.setting(
        0.1, "the cosine ends at this share of the peak", least=0.0, most=1.0
    )
    warmup: int = flags.setting(
        None, "steps of linear warm-up [default: a fifth, from 40 to 700]", int, least=0
    )
    weight_decay: float = flags.setting(0.1, "AdamW's decay of matrices", least=0.0)
    beta2: float = flags.setting(0.95, "AdamW's second momentum", least=0.0, below=1.0)
    clip: float = flags.setting(1.0, "largest norm of the gradients; 0 for no clipping", least=0.0)

    precision: str = flags.setting("auto", _PRECISION, choices=("auto", "bf16", "fp32"))
    compile: bool = flags.setting(
        None, "compile the model [default: on a GPU with a C compiler]", bool
    )
    bucket_mb: int = flags.setting(25, "DDP's bucket size", int, least=1)

    gradients: str = flags.setting(
        "fp32", "type in which gradients travel between ranks", choices=("fp32", "bf16")
    )
    sync_every: int = flags.setting(
        0, "steps between exchanges of sites that train by themselves (DiLoCo); 0: DDP", least=0
    )
    sites: int | None = flags.setting(
        None,
        "number of sites, equal parts of the ranks [default: by the round trips of nodes]",
        int,
        least=1,
    )
    outer_lr: float | None = flags.setting(
        None, "rate of an exchange [default: 0.3 up to every 10 steps, 1.0]", float, above=0.0
    )
    outer_momentum: float | None = flags.setting(
        None,
        "Nesterov momentum of the exchanges [default: 0.9 up to every 10 steps, 0.8]",
        float,
        least=0.0,
        below=1.0,
    )

    profile: bool = flags.setting(False, "record some steps of some ranks with torch's profiler")
    profile_ranks: str = flags.setting("0", "ranks to record, such as 0,8")
    profile_steps: str = flags.setting("10-12", "first and last step to record")

    eval_rows: int = flags.setting(256, "sequences of the fixed validation set", least=0)
    keep_checkpoints: int = flags.setting(2, "newest ones to keep beside the best", least=2)
    save_minutes: float = flags.setting(
        15.0, "also save after so many minutes within an epoch; 0: never", least=0.0
    )
    log_every: int = flags.setting(10, "steps between [TRAIN] lines", least=1)


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}
_DEFAULTS = {name: field.metadata["default"] for name, field in _FIELDS.items()}


def names() -> tuple[str, ...]:
    """Return the names of all settings, in the order of their declaration."""
    return tuple(_FIELDS)


def profiled_steps(text: str) -> tuple[int, int]:
    """Return the first and the last step that `10-12` means. Raises UserError."""
    first, dash, last = text.partition("-")
    is_range = bool(dash) and first.isdecimal() and last.isdecimal()
    if not is_range or not 1 <= int(first) <= int(last):
        raise errors.UserError(f"--profile-steps {text}: first and last step, such as 10-12")
    return int(first), int(last)


def profiled_ranks(text: str) -> frozenset[int]:
    """Return the ranks that `0,8` means. Raises UserError."""
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise errors.UserError(f"--profile-ranks {text}: ranks separated by commas, such as 0,8")
    return frozenset(int(word) for word in words)


def add_arguments(parser: argparse.ArgumentParser, hidden: tuple[str, ...] = ()) -> None:
    """Declare `--config` and a flag for every setting; the help leaves out `hidden`."""
    text = "settings, such as a run's config.json; a flag beside it wins"
    parser.add_argument("--config", type=_Path, help=text)
    flags.declare(parser, Config, _GROUPS, hidden)


def check(args: argparse.Namespace) -> Config:
    """Return the settings given by file and flags, each checked.

    Settings of the attempt have their defaults already: no record of a run can fill them. Raises
    UserError, which names the first invalid one.
    """
    values = _given(args)
    _need(values)
    for name, value in values.items():
        flags.check(_FIELDS[name], value)
    attempt = {name: _DEFAULTS[name] for name in OF_ATTEMPT}
    asked = _filled(Config(**values), attempt)
    _check_together(asked)
    return asked


def _given(args: argparse.Namespace) -> dict[str, typing.Any]:
    values: dict[str, typing.Any] = _from_file(args.config) if args.config else {}
    typed: dict[str, typing.Any] = {}
    for name in _FIELDS:
        value = getattr(args, name)
        if value is not None:
            typed[name] = value
    return without_other_length(values, typed) | typed


def _need(values: dict[str, typing.Any]) -> None:
    """Take the run's folder from the job if it is not given.

    Raises UserError if something needed is missing.
    """
    from_job = os.environ.get("RUN_DIR")
    if "run_dir" not in values and from_job:
        values["run_dir"] = pathlib.Path(from_job)
    for name in ("run_dir", "data"):
        if name not in values:
            flag = f"--{name.replace('_', '-')}"
            raise errors.UserError(f"{flag} is missing; see `python -m ddptrain train --help`")


def _check_together(asked: Config) -> None:
    """Raise UserError for settings that exclude or need each other."""
    if asked.steps is not None and asked.epochs is not None:
        raise errors.UserError("--steps and --epochs exclude each other; give one")
    if not asked.local_files_only:
        what = "--no-local-files-only: models come from --model-local-dir only"
        raise errors.UserError(f"{what}; copy yours there")
    profiled_steps(asked.profile_steps)
    profiled_ranks(asked.profile_ranks)
    if asked.tokenizer_local_dir and not asked.model_local_dir:
        raise errors.UserError("--tokenizer-local-dir goes with --model-local-dir; give both")


def complete(
    asked: Config, device: str, recorded: collections.abc.Mapping[str, typing.Any]
) -> Config:
    """Return the settings without gaps, except those that only the data can fill.

    `recorded` has the values of the run that is resumed, for settings that were not given.
    """
    given = [name for name in _FIELDS if getattr(asked, name) is not None]
    settings = _filled(asked, without_other_length(recorded, given))
    settings = _filled(settings, {"model": "tiny" if device == "cpu" else "gpt2"})
    settings = _filled(settings, _by_device(settings, device))
    return _filled(settings, _DEFAULTS)


def _by_device(settings: Config, device: str) -> dict[str, typing.Any]:
    """Return the defaults that depend on the device and the model."""
    is_cpu = device == "cpu"
    lr = 2e-3 if settings.model == "tiny" else 6e-4
    if settings.model_local_dir:
        lr = 2e-5
    return {
        "seq_len": 128 if is_cpu else 1024,
        "batch": 16 if is_cpu else 32,
        "grad_accum": 1,
        "lr": lr,
        "compile": not is_cpu,
    }


def _filled(settings: Config, values: collections.abc.Mapping[str, typing.Any]) -> Config:
    """Return the settings with values for those that are None."""
    missing: dict[str, typing.Any] = {}
    for name, value in values.items():
        if getattr(settings, name) is None:
            missing[name] = value
    return dataclasses.replace(settings, **missing)


def without_other_length(
    values: collections.abc.Mapping[str, typing.Any], chosen: collections.abc.Collection[str]
) -> dict[str, typing.Any]:
    """Return the values without steps and epochs, which exclude each other, if either is chosen."""
    if any(name in chosen for name in LENGTH):
        return {name: value for name, value in values.items() if name not in LENGTH}
    return dict(values)


def as_record(settings: Config) -> dict[str, typing.Any]:
    """Return the settings as JSON values, in the form that `--config` reads."""
    record: dict[str, typing.Any] = {}
    for name in _FIELDS:
        value = getattr(settings, name)
        record[name] = str(value) if isinstance(value, pathlib.Path) else value
    return record


def from_record(table: collections.abc.Mapping[str, typing.Any]) -> dict[str, typing.Any]:
    """Return the settings in a run's record, of any release, without those unknown to this one."""
    values: dict[str, typing.Any] = {}
    for name, value in table.items():
        if name in _FIELDS and value is not None:
            with contextlib.suppress(TypeError):
                values[name] = _of_kind(name, value)
    return values


def _from_file(path: pathlib.Path) -> dict[str, typing.Any]:
    try:
        table = files.read_json(path)
    except OSError as e:
        raise errors.UserError(f"--config {path}: {e.strerror}") from e
    except ValueError as e:
        raise errors.UserError(f"--config {path}: {e}") from e
    values: dict[str, typing.Any] = {}
    for name, value in table.items():
        if name in GONE or value is None:  # null in JSON: not given
            continue
        if name not in _FIELDS:
            what = f"unknown setting {name!r}; the settings are {', '.join(_FIELDS)}"
            raise errors.UserError(f"--config {path}: {what}")
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

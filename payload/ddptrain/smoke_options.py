"""The smoke test's command line, apart from its work: it is looked at where there is no torch."""

import argparse
import dataclasses
import pathlib

from ddptrain import config, errors


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line."""

    epochs: int
    batch: int
    samples: int
    features: int
    classes: int
    lr: float
    seed: int
    device: str
    timeout_minutes: float
    run_dir: pathlib.Path | None
    report_json: pathlib.Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    whole = {
        "epochs": (2, "passes over the samples"),
        "batch": (256, "samples per process and step"),
        "samples": (4096, "samples in all"),
        "features": (128, "inputs of a sample"),
        "classes": (4, "classes to tell apart"),
        "seed": (42, "seed of data, model and order"),
    }
    for name, (default, text) in whole.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate (default: 0.003)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU where there is one"
    )
    config.add_timeout(parser)
    parser.add_argument("--run-dir", type=pathlib.Path, help="folder for summary.json, metrics.jsonl and loss.png")
    parser.add_argument("--report-json", type=pathlib.Path, help="also write the figures to this file")


def check(args: argparse.Namespace) -> Options:
    """Return the options. Raises UserError naming the flag that cannot be."""
    options = Options(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Options)})
    for name, least in {"epochs": 1, "batch": 1, "samples": 1, "features": 1, "classes": 2, "seed": 0}.items():
        if getattr(options, name) < least:
            raise errors.UserError(f"--{name} {getattr(options, name)}: must be at least {least}")
    if not 0 < options.lr < float("inf"):
        raise errors.UserError(f"--lr {options.lr}: must be above 0")
    config.check_timeout(options.timeout_minutes)
    return options

"""The smoke test's command line, apart from its work: it is looked at where there is no torch."""

# ruff: noqa: RUF009 - config.option returns a dataclasses.field
import dataclasses
import functools
import pathlib

from ddptrain.options import config


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line."""

    epochs: int = config.option(2, "passes over the samples", least=1)
    batch: int = config.option(256, "samples per process and step", least=1)
    samples: int = config.option(4096, "samples in all", least=1)
    features: int = config.option(128, "inputs of a sample", least=1)
    classes: int = config.option(4, "classes to tell apart", least=2)
    seed: int = config.option(42, "seed of data, model and order", least=0)
    lr: float = config.option(3e-3, "AdamW's learning rate", above=0)
    device: str = config.option(
        "auto", "auto: a GPU where there is one", choices=("auto", "cpu", "cuda")
    )
    timeout_minutes: float = config.timeout()
    run_dir: pathlib.Path | None = config.option(
        None, "folder for summary.json, metrics.jsonl and loss.png", pathlib.Path
    )
    report_json: pathlib.Path | None = config.option(
        None, "also write the figures to this file", pathlib.Path
    )


add_arguments = functools.partial(config.declare, options=Options)
check = functools.partial(config.given, options=Options)

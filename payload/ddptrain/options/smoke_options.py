"""The smoke test's command line. It is checked on machines without torch."""

# ruff: noqa: RUF009 - flags.option returns a dataclasses.field
import dataclasses
import functools
import pathlib

from ddptrain.options import flags


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line."""

    epochs: int = flags.option(2, "passes over the samples", least=1)
    batch: int = flags.option(256, "samples per process and step", least=1)
    samples: int = flags.option(4096, "samples in all", least=1)
    features: int = flags.option(128, "inputs of a sample", least=1)
    classes: int = flags.option(4, "classes to tell apart", least=2)
    seed: int = flags.option(42, "seed of data, model and order", least=0)
    lr: float = flags.option(3e-3, "AdamW's learning rate", above=0)
    device: str = flags.option(
        "auto", "auto: a GPU where there is one", choices=("auto", "cpu", "cuda")
    )
    timeout_minutes: float = flags.timeout()
    run_dir: pathlib.Path | None = flags.option(
        None, "folder for summary.json, metrics.jsonl and loss.png", pathlib.Path
    )
    report_json: pathlib.Path | None = flags.option(
        None, "also write the figures to this file", pathlib.Path
    )


add_arguments = functools.partial(flags.declare, options=Options)
check = functools.partial(flags.given, options=Options)

"""`python -m ddptrain`: what can be asked, and how it ends when it cannot be done."""

import argparse
import collections.abc
import pathlib
import sys
import typing

from ddptrain import __version__, config, errors, markers, prepare

EXAMPLES = """examples:
  python -m ddptrain prepare --source python-stdlib --output data --tokenizer byte
  torchrun --nproc-per-node=2 -m ddptrain train --data data --run-dir runs/first
  python -m ddptrain inspect runs/first
  torchrun --nproc-per-node=2 -m ddptrain smoke
  torchrun --nproc-per-node=2 -m ddptrain collectives

Several nodes: the same command on each, under torchrun with --nnodes and --node-rank, or under srun with one task per rank.
To stop a training early and keep it: send SIGTERM or SIGUSR1, or create the file that $STOP_FILE names.
It saves, leaves, and the same command goes on where it was."""


def main(argv: collections.abc.Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0 fine, 1 failed, 2 the user can mend it (one [FATAL] line says how)."""
    markers.setup(rank=_rank())
    parser = _parser()
    args = parser.parse_args(argv)
    run_dir: pathlib.Path | None = getattr(args, "run_dir", None)
    try:
        return args.command(args)
    except errors.SharedError as e:
        if _rank() == 0:
            _fail(str(e), run_dir)
        code = 2
    except errors.UserError as e:
        _fail(str(e), run_dir)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except Exception as e:
        import traceback  # noqa: PLC0415

        traceback.print_exc()
        _fail(_explain(e), run_dir)
        code = 1
    if "torch" in sys.modules and _rank_count() > 1:
        from ddptrain import distributed  # noqa: PLC0415

        distributed.leave(code)
    return code


def _smoke(args: argparse.Namespace) -> int:
    from ddptrain import distributed, smoke  # noqa: PLC0415 - torch takes a second, --help should not

    options = smoke.check(args)
    with distributed.joined(options.device, options.run_dir) as world:
        smoke.run(options, world)
    return 0


def _train(args: argparse.Namespace) -> int:
    from ddptrain import distributed, train  # noqa: PLC0415

    settings = config.from_arguments(args)
    with distributed.joined(settings.device, settings.run_dir) as world:
        train.run(settings, world)
    return 0


def _prepare(args: argparse.Namespace) -> int:
    prepare.run(prepare.check(args))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddptrain",
        description=__import__("ddptrain").__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str,
        run: collections.abc.Callable[[argparse.Namespace], int],
        declare: typing.Any,
        text: str,
        more: str = "",
    ) -> None:
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}")
        sub.set_defaults(command=run)
        declare(sub)

    command("train", _train, config.add_arguments, "train a GPT on a dataset, or fine-tune a local model", _TRAIN)
    command("smoke", _smoke, _declare_smoke, "prove that all ranks, their network and devices work, in seconds")
    command("prepare", _prepare, prepare.add_arguments, "turn text into a dataset of token shards", _PREPARE)
    return parser


_TRAIN = """A step takes batch x ranks x grad-accum sequences. Each epoch ends with a validation on a fixed set and a checkpoint.
The same command again goes on from the newest whole checkpoint, bit for bit the same on as many ranks, with the same samples
on another number that divides the batch."""
_PREPARE = """It can be stopped and started again, and be spread over a Slurm array (--task slurm, then --finalize): parts that are
done are kept, and the result is the same bytes."""


def _declare_smoke(parser: argparse.ArgumentParser) -> None:
    from ddptrain import smoke  # noqa: PLC0415

    smoke.add_arguments(parser)


def _fail(text: str, run_dir: pathlib.Path | None) -> None:
    """Say once why it ends, in the log and to the batch script."""
    markers.fatal(text)
    from ddptrain import report  # noqa: PLC0415

    try:
        report.write_outcome(run_dir, "failed", error=text[:500])
    except OSError:
        markers.warn("ENV", "the outcome file could not be written")


def _explain(e: Exception) -> str:
    text = f"{type(e).__name__}: {e}"
    if "out of memory" in text.lower() or "can't allocate memory" in text or isinstance(e, MemoryError):
        return "out of memory; lower --batch (and raise --grad-accum to keep the step's size), --seq-len or --model"
    return text


def _rank() -> int:
    import os  # noqa: PLC0415

    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def _rank_count() -> int:
    import os  # noqa: PLC0415

    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1)

"""`python -m ddptrain`: its commands, and how they end when they fail."""

import argparse
import collections.abc
import functools
import importlib
import os
import pathlib
import re
import sys
import time
import traceback
import typing

from ddptrain import __version__
from ddptrain.ground import attempt, error_file, errors, files, log
from ddptrain.options import flags

# How long a rank lingers after an error that all share: the first to leave makes torchrun kill the others, and rank 0,
# which reports it and may hold the rendezvous store, must have done so by then.
_GRACE_S = 1.5
# gloo's words: ranks connect at their first message, which one that hangs never sends
_LATE = re.compile(
    r"Timed out waiting|[Oo]peration timed out|collective operation timeout|Connect timeout"
).search
_LOST = re.compile(
    r"[Cc]onnection (?:closed|reset|refused)|Broken pipe|remote process exited"
).search


EXAMPLES = """examples:
  python -m ddptrain prepare --source python-stdlib --output data --tokenizer byte
  torchrun --nproc-per-node=2 -m ddptrain train --data data --run-dir runs/first
  torchrun --nproc-per-node=8 -m ddptrain train --config runs/first/config.json --run-dir runs/second --lr 3e-4
  torchrun --nproc-per-node=8 -m ddptrain train --model-local-dir m --data chat.jsonl --epochs 2 --run-dir runs/chat
  python -m ddptrain inspect runs/first/latest --json
  torchrun --nproc-per-node=2 -m ddptrain smoke
  torchrun --nproc-per-node=8 -m ddptrain collectives -b 8M -e 8G -f 2

To stop a training early and keep it, send SIGTERM or SIGUSR1, or create the file that $STOP_FILE names. It saves and
leaves; the same command continues from there."""


def main(argv: collections.abc.Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0 fine, 1 failed, 2 the user can fix it (one [FATAL] line says how)."""
    log.setup(rank=_rank())
    argv = sys.argv[1:] if argv is None else argv
    args = argparse.Namespace()
    try:
        _parser(argv).parse_args(argv, args)
        return args.command(args)
    except errors.SharedError as e:
        if _rank() == 0:
            _report(args, e)
        if _rank_count() > 1:
            time.sleep(_GRACE_S)
        code = 2
    except errors.PeerError as e:
        text = f"rank {_rank()} leaves: {e}"
        error_file.leave(e, text)
        print(text, file=sys.stderr, flush=True)
        code = 1
    except errors.UserError as e:
        _report(args, e)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except Exception as e:  # a bug: the traceback is shown whole
        _report(args, e)
        code = 2 if isinstance(e, OSError) else 1
    if "torch" in sys.modules and _rank_count() > 1:
        from ddptrain.world import alarm

        alarm.leave(code)
    return code


def _run_ranks(module: str, args: argparse.Namespace) -> int:
    """Check the options, join the other ranks and run. An option that one rank rejects ends all of them."""
    from ddptrain.world import distributed

    program = _module(_PROGRAMS.get(args.name, args.name))
    options, problem = None, None
    try:
        options = _module(module).check(args)
        args.run_dir = options.run_dir  # of train it may come from the file
    except errors.UserError as e:
        if (cause := errors.cause_of(e)) and cause.is_of_filesystem:
            raise  # no mistake in the options, and its file says so
        problem = str(e)
    device, minutes = (
        (options.device, options.timeout_minutes) if options else ("cpu", flags.TIMEOUT_MINUTES)
    )
    args.timeout_minutes = minutes
    with distributed.joined(
        device, problem, functools.partial(_report, args), timeout_minutes=minutes
    ) as world:
        program.run(options, world)
    return 0


def _run_alone(module: str, args: argparse.Namespace) -> int:
    program = _module(module)
    return program.run(program.check(args)) or 0


def _module(name: str) -> typing.Any:
    return importlib.import_module(f"ddptrain.{name}")


def _parser(argv: collections.abc.Sequence[str]) -> argparse.ArgumentParser:
    parser = flags.Parser(
        prog="python -m ddptrain",
        description=__import__("ddptrain").__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (run, module, text) in _COMMANDS.items():
        # no abbreviations: who submits a job reads the flags, too
        sub = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        sub.set_defaults(command=functools.partial(run, module), name=name)
        if name in argv:  # the others' modules need not be imported
            _module(module).add_arguments(sub)
    return parser


# How each command runs, the module that declares and checks its options, and its help.
_COMMANDS = {
    "train": (_run_ranks, "options.config", "train a GPT on a dataset, or fine-tune a local model"),
    "smoke": (
        _run_ranks,
        "options.smoke_options",
        "prove in seconds that ranks, network and devices work",
    ),
    "prepare": (_run_alone, "data.prepare", "turn text into a dataset of token shards"),
    "collectives": (
        _run_ranks,
        "world.collectives",
        "measure and check the ranks' network as nccl-tests does",
    ),
    "inspect": (_run_alone, "inspection", "show a run, a checkpoint or a dataset, and verify it"),
}


_PROGRAMS = {"collectives": "world.collectives"}  # of the others the command is the module's name


def _report(args: argparse.Namespace, e: Exception) -> None:
    """Report once why the command ends: in the log, and to the batch script."""
    if getattr(args, "has_reported", False):
        return
    args.has_reported = True
    name = getattr(args, "name", None)
    text, retry = files.describe(e)
    if not isinstance(e, errors.UserError) and not (isinstance(e, OSError) and e.errno is not None):
        traceback.print_exception(e)
        text, retry = _explain(e, name, getattr(args, "timeout_minutes", None)), True
    error_file.leave(e, text, of_peer=_has_lost_peer(e))
    log.fatal(text)
    run_dir: pathlib.Path | None = _run_dir(args)
    try:
        if not (
            isinstance(e, errors.LostError) and attempt.has_outcome(run_dir)
        ):  # of a rank that knows the cause
            attempt.write_outcome(run_dir, attempt.FAILED, error=text[:500], retry=retry)
    except OSError:
        log.warn("ENV", "the outcome file could not be written")


def _run_dir(args: argparse.Namespace) -> pathlib.Path | None:
    """Return the run's folder as far as it is known if the settings could not be read."""
    if (given := getattr(args, "run_dir", None)) is not None:
        return given
    from_env = os.environ.get("RUN_DIR")
    return pathlib.Path(from_env) if from_env and getattr(args, "name", None) == "train" else None


_ROOM = {
    "train": "lower --batch (and raise --grad-accum to keep the step's size), --seq-len or --model",
    "smoke": "lower --batch, --samples or --features",
    "prepare": "use fewer --workers or a smaller --part-mib",
    "collectives": "lower --max-bytes",
}


def _explain(e: Exception, name: str | None, timeout_minutes: float | None) -> str:
    text = f"{type(e).__name__}: {e}"
    if (
        "out of memory" in text.lower()
        or "can't allocate memory" in text
        or isinstance(e, MemoryError)
    ):
        return f"out of memory; {_ROOM.get(name or '', 'give the job more')}"
    if type(e).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
        return f"the model could not be compiled; use --no-compile: {text}"
    if timeout_minutes is not None and _LATE(text):
        return (
            f"a rank did not answer within --timeout-minutes {timeout_minutes:g}: it hangs or is far behind; look at "
            f"its log, or raise the timeout: {e}"
        )
    if _LOST(text):
        return f"a rank was lost, killed (out of memory?) or with its host; look at its log: {e}"
    return text


def _has_lost_peer(e: Exception) -> bool:
    """Return whether an error is gloo's or NCCL's about another rank: one that failed itself reports first."""
    is_ours = isinstance(e, errors.UserError | OSError)
    text = f"{type(e).__name__}: {e}"
    return not is_ours and bool(_LATE(text) or _LOST(text))


def _rank() -> int:
    return int(os.environ.get("RANK") or 0)


def _rank_count() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)

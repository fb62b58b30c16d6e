"""`python -m ddptrain`: its commands, and how they end when they fail."""

import argparse
import collections.abc
import dataclasses
import functools
import importlib
import os
import pathlib
import re
import sys
import time
import traceback
import typing

import ddptrain
from ddptrain.ground import attempt, error_file, errors, files, log
from ddptrain.options import flags

# How long a rank lingers after an error that all share: the first to leave makes torchrun kill the
# others, and rank 0, which reports it and may hold the rendezvous store, must have done so by then.
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
  python -m ddptrain export runs/first/best --output model
  torchrun --nproc-per-node=2 -m ddptrain smoke
  torchrun --nproc-per-node=8 -m ddptrain collectives -b 8M -e 8G -f 2

To stop a training early and keep it, send SIGTERM or SIGUSR1, or create the file that $STOP_FILE names. It saves and
leaves; the same command continues from there."""


def main(argv: collections.abc.Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    It is 0 for success, 1 for a failure, and 2 if the user can fix it (one [FATAL] line says how).
    """
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


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: the modules of its work and options, its help, and whether ranks run it."""

    program: str
    options: str
    text: str
    has_ranks: bool = True


_COMMANDS = {
    "train": Command(
        "train", "options.config", "train a GPT on a dataset, or fine-tune a local model"
    ),
    "smoke": Command(
        "smoke", "options.smoke_options", "prove in seconds that ranks, network and devices work"
    ),
    "prepare": Command(
        "data.prepare", "data.prepare", "turn text into a dataset of token shards", has_ranks=False
    ),
    "collectives": Command(
        "world.collectives",
        "world.collectives",
        "measure and check the ranks' network as nccl-tests does",
    ),
    "export": Command(
        "export",
        "export",
        "write a checkpoint as a model for transformers: safetensors, settings, license",
        has_ranks=False,
    ),
    "mirror": Command(
        "mirror",
        "mirror",
        "copy a checkpoint to a bucket, and read the copy back",
        has_ranks=False,
    ),
    "inspect": Command(
        "inspection",
        "inspection",
        "show a run, a checkpoint or a dataset, and verify it",
        has_ranks=False,
    ),
}


def _run_ranks(command: Command, args: argparse.Namespace) -> int:
    """Check the options, join the other ranks and run.

    An option that one rank rejects ends all of them.
    """
    from ddptrain.world import distributed

    program = _module(command.program)
    options: typing.Any = None
    problem: str | None = None
    device = "cpu"
    minutes = flags.TIMEOUT_MINUTES
    try:
        options = _module(command.options).check(args)
    except errors.UserError as e:
        cause = errors.cause_of(e)
        if cause is not None and cause.is_of_filesystem:
            raise  # no mistake in the options, and its file says so
        problem = str(e)
    else:
        args.run_dir = options.run_dir  # of train it may come from the file
        device = options.device
        minutes = options.timeout_minutes
    args.timeout_minutes = minutes
    report = functools.partial(_report, args)
    with distributed.joined(device, problem, report, timeout_minutes=minutes) as world:
        program.run(options, world)
    return 0


def _run_alone(command: Command, args: argparse.Namespace) -> int:
    options = _module(command.options).check(args)
    return _module(command.program).run(options) or 0


def _module(name: str) -> typing.Any:
    return importlib.import_module(f"ddptrain.{name}")


def _parser(argv: collections.abc.Sequence[str]) -> argparse.ArgumentParser:
    parser = flags.Parser(
        prog="python -m ddptrain",
        description=ddptrain.__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=ddptrain.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        text = command.text
        # No abbreviations: who submits a job reads the flags, too
        sub = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        run = _run_ranks if command.has_ranks else _run_alone
        sub.set_defaults(command=functools.partial(run, command), name=name)
        if name in argv:  # the others' modules need not be imported
            _module(command.options).add_arguments(sub)
    return parser


def _report(args: argparse.Namespace, e: Exception) -> None:
    """Report once why the command ends: in the log, and to the batch script."""
    if getattr(args, "has_reported", False):
        return
    args.has_reported = True
    name = getattr(args, "name", None)
    text, retry = files.describe(e)
    is_refused = isinstance(e, OSError) and e.errno is not None
    if not isinstance(e, errors.UserError) and not is_refused:
        traceback.print_exception(e)
        text = _explain(e, name, getattr(args, "timeout_minutes", None))
        retry = True
    error_file.leave(e, text, of_peer=_has_lost_peer(e))
    log.fatal(text)
    run_dir: pathlib.Path | None = _run_dir(args)
    try:
        if isinstance(e, errors.LostError) and attempt.has_outcome(run_dir):
            return  # of a rank that knows the cause
        attempt.write_outcome(run_dir, attempt.FAILED, error=text[:500], retry=retry)
    except OSError:
        log.warn("ENV", "the outcome file could not be written")


def _run_dir(args: argparse.Namespace) -> pathlib.Path | None:
    """Return the run's folder as far as it is known if the settings could not be read."""
    given = getattr(args, "run_dir", None)
    if given is not None:
        return given
    from_job = os.environ.get(attempt.RUN_DIR)
    if not from_job or getattr(args, "name", None) != "train":
        return None
    return pathlib.Path(from_job)


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
    """Return whether gloo's or NCCL's error is about another rank, which reports its own first."""
    is_ours = isinstance(e, errors.UserError | OSError)
    text = f"{type(e).__name__}: {e}"
    return not is_ours and bool(_LATE(text) or _LOST(text))


def _rank() -> int:
    return int(os.environ.get("RANK") or 0)


def _rank_count() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)

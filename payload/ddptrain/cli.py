"""`python -m ddptrain`: what can be asked, and how it ends when it cannot be done."""

import argparse
import collections.abc
import gc
import json
import os
import pathlib
import re
import sys
import time
import traceback
import typing

from ddptrain import __version__, config, errors, files, inspection, markers, prepare, smoke_options

# How long a rank lingers after an error that all share: the first to leave makes torchrun kill the others, and rank 0,
# which tells the user and may hold the rendezvous store, must have done so by then.
_GRACE_S = 1.5
# gloo's words: ranks connect at their first message, which one that hangs never sends
_LATE = re.compile(r"Timed out waiting|[Oo]peration timed out|collective operation timeout|Connect timeout").search
_LOST = re.compile(r"[Cc]onnection (?:closed|reset|refused)|Broken pipe|remote process exited").search

EXAMPLES = """examples:
  python -m ddptrain prepare --source python-stdlib --output data --tokenizer byte
  torchrun --nproc-per-node=2 -m ddptrain train --data data --run-dir runs/first
  python -m ddptrain inspect runs/first
  torchrun --nproc-per-node=2 -m ddptrain smoke
  torchrun --nproc-per-node=2 -m ddptrain collectives

Several nodes: the same command on each, under torchrun with --nnodes and --node-rank, or under srun with one task per
rank. To stop a training early and keep it: send SIGTERM or SIGUSR1, or create the file that $STOP_FILE names.
It saves, leaves, and the same command goes on where it was."""


def main(argv: collections.abc.Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0 fine, 1 failed, 2 the user can fix it (one [FATAL] line says how)."""
    markers.setup(rank=_rank())
    argv = sys.argv[1:] if argv is None else argv
    args = argparse.Namespace(began=time.time())
    try:
        _parser(argv).parse_args(argv, args)
        return args.command(args)
    except errors.SharedError as e:
        if _rank() == 0:
            _tell(e, args)
        if _rank_count() > 1:
            time.sleep(_GRACE_S)
        code = 2
    except errors.PeerError as e:
        _record(e, f"rank {_rank()} leaves: {e}")
        print(f"rank {_rank()} leaves: {e}", file=sys.stderr, flush=True)
        code = 1
    except errors.UserError as e:
        _tell(e, args)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except Exception as e:  # a bug: the traceback is shown whole, and the run's files record it too
        _tell(e, args)
        code = 2 if isinstance(e, OSError) else 1
    if "torch" in sys.modules and _rank_count() > 1:
        from ddptrain import distributed

        distributed.leave(code)
    return code


def _smoke(args: argparse.Namespace) -> int:
    from ddptrain import smoke

    return _on_all_ranks(args, smoke_options.check, smoke.run)


def _train(args: argparse.Namespace) -> int:
    from ddptrain import train

    return _on_all_ranks(args, config.from_arguments, train.run)


def _collectives(args: argparse.Namespace) -> int:
    from ddptrain import collectives

    return _on_all_ranks(args, collectives.check, collectives.run)


def _on_all_ranks(args: argparse.Namespace, check: typing.Any, run: typing.Any) -> int:
    """Check the options, join the other ranks and run. What one rank refuses ends all of them."""
    from ddptrain import distributed

    end_imports()
    options, problem = None, None
    try:
        options = check(args)
        args.run_dir = options.run_dir  # of train it may come from the TOML file
    except errors.UserError as e:
        problem = str(e)
    device, minutes = (options.device, options.timeout_minutes) if options else ("cpu", config.TIMEOUT_MINUTES)
    args.timeout_minutes = minutes
    joined = distributed.joined(device, _run_dir(args), problem, lambda e: _tell(e, args), timeout_minutes=minutes)
    with joined as world:
        run(options, world)
    return 0


def _prepare(args: argparse.Namespace) -> int:
    end_imports()
    prepare.run(prepare.check(args))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    end_imports()
    return inspection.run(args.path, quick=args.quick, as_json=args.json)


def end_imports() -> None:
    """Look for garbage again (see __main__), but never among what was imported: a pause that other ranks wait for."""
    gc.freeze()
    gc.enable()


def _parser(argv: collections.abc.Sequence[str]) -> argparse.ArgumentParser:
    parser = config.Parser(
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
        sub = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. {more}",
            epilog=_EXAMPLES_OF[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # who submits a job reads the flags, too
        )
        sub.set_defaults(command=run, name=name)
        if name in argv:  # the others' modules need not be imported
            declare(sub)

    command("train", _train, config.add_arguments, "train a GPT on a dataset, or fine-tune a local model", _TRAIN)
    command(
        "smoke", _smoke, smoke_options.add_arguments, "prove that all ranks, their network and devices work, in seconds"
    )
    command("prepare", _prepare, prepare.add_arguments, "turn text into a dataset of token shards", _PREPARE)
    command(
        "collectives", _collectives, _declare_collectives, "measure the ranks' network as nccl-tests does, and check it"
    )
    command("inspect", _inspect, inspection.add_arguments, "show a run, a checkpoint or a dataset, and verify it")
    return parser


_TRAIN = """

A step takes batch x ranks x grad-accum sequences. Each epoch ends with a validation on a fixed set and a
checkpoint. The same command again goes on from the newest whole checkpoint, bit for bit the same on as many ranks,
with the same samples on another number that divides the batch."""
_PREPARE = """

It can be stopped and started again, and be spread over a Slurm array (--task slurm, then --finalize):
parts that are done are kept, and the result is the same bytes."""

_EXAMPLES_OF = {
    "train": """examples:
  a small GPT on two cores, 200 steps:
    torchrun --nproc-per-node=2 -m ddptrain train --data data --run-dir runs/first
  GPT-2 124M on the 8 GPUs of each of 4 nodes, half a million tokens a step; on every node:
    torchrun --nnodes=4 --nproc-per-node=8 --node-rank=$SLURM_NODEID --master-addr=NODE0 --master-port=29500 \\
        -m ddptrain train --data /shared/owt --run-dir /shared/runs/owt --model gpt2 --batch 16
  the same from a file, one value changed:
    ... -m ddptrain train --config owt.toml --lr 3e-4
      # owt.toml
      data = "/shared/owt"
      run-dir = "/shared/runs/owt"
      model = "gpt2"
      batch = 16
  fine-tune a model that lies in a folder, on JSON lines, as one task per rank under srun:
    srun -N2 -n16 python -m ddptrain train --model-local-dir m --data chat.jsonl --epochs 2 --run-dir /shared/runs/chat

  the same training again, elsewhere, from what the first one kept:
    ... -m ddptrain train --config /shared/runs/owt/config.json --run-dir /shared/runs/again

Every setting is printed back in [CONFIG] lines and kept in RUN_DIR/config.json, which --config reads as well.""",
    "smoke": """examples:
  torchrun --nproc-per-node=2 -m ddptrain smoke
  srun -N2 -n2 python -m ddptrain smoke --run-dir /shared/smoke
[RESULT] improved=yes and exit code 0 say that ranks, network and devices work.""",
    "prepare": """examples:
  python -m ddptrain prepare --source python-stdlib --output data --tokenizer byte
  python -m ddptrain prepare --source texts chat.jsonl set-000.tar --output /shared/mixed --tokenizer gpt2
  in a Slurm array of 8, then once more to finish:
    sbatch --array=0-7 --wrap 'python -m ddptrain prepare --source /shared/raw --output /shared/owt --task slurm'
    python -m ddptrain prepare --source /shared/raw --output /shared/owt --finalize
JSON lines: {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., "content": ...}]}.
Files named val.* are the validation set; without one a share of the text is held out.""",
    "collectives": """examples:
  torchrun --nproc-per-node=8 -m ddptrain collectives -b 8M -e 8G -f 2
  srun -N2 -n16 python -m ddptrain collectives --collective all --run-dir /shared/bench -J bench.json
A result that arrives wrong is counted under #wrong and ends with [FATAL] and exit code 2.""",
    "inspect": """examples:
  python -m ddptrain inspect runs/first
  python -m ddptrain inspect runs/first/latest --json
  python -m ddptrain inspect /shared/owt --quick
The exit code is 1 when anything is damaged; each damage is a [FATAL] line that names the file.""",
}


def _declare_collectives(parser: argparse.ArgumentParser) -> None:
    from ddptrain import collectives

    collectives.add_arguments(parser)


def _tell(e: Exception, args: argparse.Namespace) -> None:
    """Say once why it ends: in the log, to the batch script, and in the run's summary."""
    if getattr(args, "has_reported", False):
        return
    args.has_reported = True
    name = getattr(args, "name", None)
    if isinstance(e, errors.UserError):
        text, retry = str(e), e.retry
    elif isinstance(e, OSError) and e.errno is not None:
        text, retry = files.explain(e), True
    else:
        traceback.print_exception(e)
        text, retry = _explain(e, name, getattr(args, "timeout_minutes", None)), True
    _record(e, text)
    markers.fatal(text)
    run_dir: pathlib.Path | None = _run_dir(args)
    from ddptrain import report

    if isinstance(e, errors.LostError) and run_dir is not None and report.has_failed(run_dir, since=args.began):
        return
    try:
        report.write_outcome(run_dir, "failed", error=text[:500], retry=retry)
        if run_dir is not None and run_dir.is_dir() and name in {"train", "smoke"}:
            workload = "smoke" if name == "smoke" else "finetune" if args.model_local_dir else "gpt"
            report.write_failure(run_dir, workload, text[:500], world_size=_rank_count())
    except OSError:
        markers.warn("ENV", "the outcome file and summary.json could not be written")


def _record(e: Exception, text: str) -> None:
    """Write this rank's error file for the launcher, as `record` of torch.distributed.elastic does.

    Not by that decorator: it imports torch, which a mistake in the options need not wait for, and it takes no
    exception that ends in an exit code. The format is error_handler.py's, since torch 1.9. A bug has its stack in it.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    is_bug = not isinstance(e, errors.UserError | errors.PeerError | OSError)
    stack = "".join(traceback.format_exception(e)) if is_bug else ""
    about = {"py_callstack": f"{stack}[FATAL] {text}\n", "timestamp": str(int(time.time()))}
    try:
        with pathlib.Path(path).open("w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": about}}, file)
    except OSError:
        markers.warn("ENV", "the error file could not be written")


def _run_dir(args: argparse.Namespace) -> pathlib.Path | None:
    """Return the run's folder, as far as it is known when the settings could not be read."""
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
    if "out of memory" in text.lower() or "can't allocate memory" in text or isinstance(e, MemoryError):
        return f"out of memory; {_ROOM.get(name or '', 'give the job more')}"
    if type(e).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
        return f"the model could not be compiled; use --no-compile: {text}"
    if timeout_minutes is not None and _LATE(text):
        return (
            f"a rank did not answer within --timeout-minutes {timeout_minutes:g}: it hangs or is far behind; look at "
            f"its log, or raise the timeout: {e}"
        )
    if _LOST(text):  # gloo's and NCCL's words; a rank that failed otherwise would have reported by now
        return f"a rank was lost, killed (for want of memory?) or with its host; look at its log: {e}"
    return text


def _rank() -> int:
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def _rank_count() -> int:
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1)

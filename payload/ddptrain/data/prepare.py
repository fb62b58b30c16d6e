"""`prepare`: text to a dataset, in parallel and resumable, same bytes for any number of workers.

The sources are cut into parts. Workers, on one machine or as elements of a Slurm array, take parts
by number and need no locks. `dataset.json` comes last.
"""

# ruff: noqa: RUF009 - flags.option returns a dataclasses.field
import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import multiprocessing.process
import os
import pathlib
import threading
import time
import typing

from ddptrain.data import chats, lessons, names, parts, shards, sources, tokenizers, unread
from ddptrain.ground import errors, files, log
from ddptrain.options import flags

_STDLIB = f"{sources.STDLIB} (Python's own source code: needs no network)"
_SOURCES = f"{_STDLIB}, folders or files: {names.READS}"
_MOST_PART_BYTES = 64 << 20
_LEAST_PART_BYTES = 4 << 20
_MUCH_BYTES = 1 << 30  # above it a smaller share is enough to validate
# Bytes of shards for a byte of text: two for each byte's token, less for other tokenizers.
_GROWTH = {"byte": 2.1}
_USUAL_GROWTH = 1.5

Entry = dict[str, typing.Any]  # of a shard, in a note and in dataset.json


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line."""

    source: tuple[str, ...] = flags.option(
        dataclasses.MISSING, _SOURCES, str, nargs="+", metavar="SRC", required=True
    )
    output: pathlib.Path = flags.option(
        dataclasses.MISSING, "folder of the dataset", pathlib.Path, required=True
    )
    tokenizer: str = flags.option(
        "auto", "auto: gpt2 from 256 MiB of text, otherwise byte", choices=("auto", "byte", "gpt2")
    )
    tokenizer_local_dir: pathlib.Path | None = flags.option(
        None, "folder of a tokenizer that transformers or tokenizers saved", pathlib.Path
    )
    workers: int = flags.option(0, "processes [default: one per core]", least=0)
    task: str | None = flags.option(
        None,
        "do only the parts of element K of N (from 0), or of this Slurm array element",
        str,
        metavar="K/N|slurm",
    )
    finalize: bool = flags.option(False, "only check the parts and write dataset.json")
    mask_prompts: bool = flags.option(False, "learn only completions and the assistant's messages")
    val_share: float | None = flags.option(
        None,
        "share of the text held out [default: 0.01, above 1 GiB 0.0005]",
        float,
        least=0,
        below=1,
    )
    part_mib: float | None = flags.option(
        None,
        "text per part [default: depends on the amount, at most 64]",
        float,
        least=0.01,
        most=4096,
    )
    errors: str = flags.option(
        "strict", "how to treat bytes that are not text", choices=("strict", "replace")
    )


add_arguments = functools.partial(flags.declare, options=Options)
check = functools.partial(flags.given, options=Options)


def run(options: Options) -> None:
    """Make the missing parts, then the manifest unless this is one element of an array."""
    began = time.monotonic()
    _check_output(options.output)
    items, left = sources.find(options.source, options.errors, options.output)
    tokenizer = tokenizers.make(
        options.tokenizer,
        local_dir=options.tokenizer_local_dir,
        text_bytes=parts.total_bytes(items),
    )
    if options.tokenizer == "auto":  # the workers must not decide again
        options = dataclasses.replace(options, tokenizer=tokenizer.identity.kind)

    if isinstance(tokenizer, tokenizers.HfTokenizer) and tokenizer.has_unused_template:
        what = "the tokenizer's chat template is not used: it does not show the assistant's part"
        log.warn("DATA", f"{what}; messages are written as <role>, a line break and the text")

    plan = make_plan(options, tokenizer.identity, items, left)
    _report_plan(options, plan)
    (options.output / parts.FOLDER).mkdir(parents=True, exist_ok=True)
    if not options.finalize:
        first, stride = _share(options.task)
        _work(options, plan, plan.parts[first::stride], tokenizer)
    if options.task is None:
        dataset = finalize(options, plan)
        _report_dataset(dataset, time.monotonic() - began)


def make_plan(
    options: Options, identity: tokenizers.Identity, items: parts.Items, left: unread.Unread
) -> parts.Plan:
    """Return the parts of the sources, and how they are tokenised."""
    total = parts.total_bytes(items)
    part_bytes = min(_MOST_PART_BYTES, max(_LEAST_PART_BYTES, total // 8))
    if options.part_mib:
        part_bytes = int(options.part_mib * 2**20)
    val_share = options.val_share
    if val_share is None:
        val_share = 0.01 if total < _MUCH_BYTES else 0.0005

    has_val_files = any(item.validation for item in items)
    grouped = parts.grouped(items, part_bytes)
    return parts.Plan(grouped, identity, options.mask_prompts, val_share, has_val_files, left)


def _report_plan(options: Options, plan: parts.Plan) -> None:
    log.emit(
        "DATA",
        sources=sum(len(part.items) for part in plan.parts),
        bytes=plan.num_bytes,
        parts=len(plan.parts),
        tokenizer=plan.identity.kind,
        vocab=plan.identity.vocab,
        output=options.output,
    )


def _report_dataset(dataset: shards.Dataset, elapsed_s: float) -> None:
    log.emit(
        "DONE",
        workload="prepare",
        dataset=dataset.root,
        train_tokens=dataset.tokens("train"),
        val_tokens=dataset.tokens("val"),
        shards=sum(len(split) for split in dataset.splits.values()),
        elapsed_s=elapsed_s,
    )


def finalize(options: Options, plan: parts.Plan) -> shards.Dataset:
    """Check every part and write dataset.json. Raises UserError naming the missing parts."""
    notes = _all_notes(options, plan)
    entries: list[Entry] = []
    found = lessons.Lessons(unread.Unread(plan.unread))
    for note in notes:
        entries += note["shards"]
        found.left_out.merge(note["unread"])
        found.merge(note["lessons"])
    splits = {split: _of_split(entries, split) for split in shards.SPLITS}

    _check_splits(options, splits)
    not_learned = lessons.describe(found, masked=plan.masked)
    for line in not_learned:
        log.warn("DATA", line)
    if plan.masked:
        _check_conversations(options, found)
        _check_learned(options, plan, splits["train"])

    wanted = {plan.note_path(options.output, part) for part in plan.parts}
    wanted |= {options.output / entry["file"] for entry in entries}
    _remove_strays(options.output, wanted)
    manifest = {
        "format": shards.FORMAT,
        "name": options.output.name,
        "tokenizer": plan.identity.as_record(),
        "dtype": plan.dtype,
        "masked": plan.masked,
        "val_share": plan.val_share,
        "source": list(options.source),
        "not_read": found.left_out,  # by suffix or reason: files, bytes
        "lessons": found.as_record(),
        "not_learned": not_learned,
        "totals": {split: _totals(found) for split, found in splits.items()},
        "splits": splits,
        "code_version": parts.CODE_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    files.write_json(options.output / shards.MANIFEST, manifest)
    return shards.open_dataset(options.output)


def _all_notes(options: Options, plan: parts.Plan) -> list[parts.Note]:
    """Return the notes of all parts. Raises UserError naming those that are missing."""
    notes: list[parts.Note] = []
    missing: list[parts.Part] = []
    for part in plan.parts:
        note = parts.valid_note(options.output, plan, part)
        if note is None:
            missing.append(part)
        else:
            notes.append(note)

    if missing:
        some = ", ".join(str(part) for part in missing[:5])
        more = ", ..." if len(missing) > 5 else ""
        what = f"{len(missing)} of {len(plan.parts)} parts are not done: {some}{more}"
        raise errors.UserError(f"{what}; run prepare again, it does only those")
    return notes


def _of_split(entries: list[Entry], split: str) -> list[Entry]:
    return [entry for entry in entries if entry["split"] == split]


def _totals(entries: list[Entry]) -> dict[str, int]:
    tokens = sum(entry["tokens"] for entry in entries)
    docs = sum(entry["docs"] for entry in entries)
    return {"tokens": tokens, "docs": docs}


def _check_splits(options: Options, splits: dict[str, list[Entry]]) -> None:
    """Warn if there is nothing to validate on. Raises UserError if there is nothing to train on."""
    if not splits["train"]:
        what = "no training text; all of it is validation or empty"
        raise errors.UserError(f"{' '.join(options.source)}: {what}")
    if not splits["val"]:
        remedy = "give a file named val.jsonl or val.txt, or raise --val-share"
        log.warn("DATA", f"no validation text: {remedy}")


def _check_conversations(options: Options, found: lessons.Lessons) -> None:
    """Raise UserError if most conversations lack a message of the assistant."""
    if 2 * found.unanswered > found.conversations:
        what = f"{' '.join(options.source)}: {found.idle_text}"
        rule = f"only messages of the role {chats.ASSISTANT} are learned"
        raise errors.UserError(f"{what}; {rule}: rename the roles, or remove these conversations")


def _check_learned(options: Options, plan: parts.Plan, train: list[Entry]) -> None:
    """Raise UserError if no token would be learned."""
    for entry in train:
        shard = shards.Shard(options.output / entry["file"], entry["tokens"], plan.dtype)
        if shards.num_learned(shard, plan.identity.eot_id, masked=True):
            return
    what = "no token would be learned: all completions and assistant's messages are empty"
    raise errors.UserError(f"{' '.join(options.source)}: {what}")


def _work(
    options: Options,
    plan: parts.Plan,
    asked: tuple[parts.Part, ...],
    tokenizer: tokenizers.Tokenizer,
) -> None:
    """Tokenise the parts that are not done yet."""
    todo = [part for part in asked if parts.valid_note(options.output, plan, part) is None]
    if len(asked) > len(todo):
        kept = f"{len(asked) - len(todo)} of {len(asked)} parts are done already and kept"
        log.emit("DATA", kept)
    if not todo:
        return

    _check_room(options, plan, todo)
    (options.output / shards.MANIFEST).unlink(missing_ok=True)  # from here on it is not a dataset
    workers = min(len(todo), options.workers or len(os.sched_getaffinity(0)))
    if workers > 1:
        _work_in_parallel(options, plan, todo, workers)
        return
    for part in todo:
        _report_part(part, parts.tokenize(options.output, plan, part, tokenizer), plan)


def _check_room(options: Options, plan: parts.Plan, todo: list[parts.Part]) -> None:
    growth = _GROWTH.get(plan.identity.kind, _USUAL_GROWTH)
    need = int(sum(part.num_bytes for part in todo) * growth)
    free = files.free_bytes(options.output)
    if free < need:
        what = f"{need >> 20} MiB needed, {free >> 20} MiB free"
        raise errors.UserError(f"--output {options.output}: {what}; {files.MAKE_ROOM}")


def _work_in_parallel(
    options: Options, plan: parts.Plan, todo: list[parts.Part], workers: int
) -> None:
    # So that no worker waits long for the last one
    biggest_first = sorted(todo, key=lambda part: part.num_bytes, reverse=True)
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (options,))
    with pool:
        futures: dict[concurrent.futures.Future[parts.Note], parts.Part] = {}
        for part in biggest_first:
            futures[pool.submit(_tokenize_in_worker, options.output, plan, part)] = part
        try:
            for future in concurrent.futures.as_completed(futures):
                _report_part(futures[future], future.result(), plan)
        except concurrent.futures.BrokenExecutor as e:
            what = "a worker was killed, most likely out of memory"
            raise errors.UserError(f"{what}; use fewer --workers or a smaller --part-mib") from e
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_worker_tokenizer: list[tokenizers.Tokenizer] = []


def _start_worker(options: Options) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    tokenizer = tokenizers.make(options.tokenizer, local_dir=options.tokenizer_local_dir)
    _worker_tokenizer.append(tokenizer)


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    """End this worker with the command, which may be killed."""
    parent.join()
    os._exit(1)


def _tokenize_in_worker(output: pathlib.Path, plan: parts.Plan, part: parts.Part) -> parts.Note:
    return parts.tokenize(output, plan, part, _worker_tokenizer[0])


def _report_part(part: parts.Part, note: parts.Note, plan: parts.Plan) -> None:
    log.emit(
        "DATA",
        part=f"{part.number + 1}/{len(plan.parts)}",
        files=len(part.items),
        bytes=part.num_bytes,
        tokens=sum(entry["tokens"] for entry in note["shards"]),
    )


def _share(task: str | None) -> tuple[int, int]:
    """Return the first part and the stride of an array element.

    Raises UserError if there is no such element.
    """
    if task is None:
        return 0, 1
    try:
        element, count = _slurm_element() if task == "slurm" else map(int, task.split("/"))
    except (KeyError, ValueError) as e:
        remedy = "give K/N with K from 0 to N-1, or slurm inside a Slurm array job"
        raise errors.UserError(f"--task {task}: {remedy}") from e
    if not 0 <= element < count:
        what = f"element {element} of {count} does not exist"
        raise errors.UserError(f"--task {task}: {what}; K goes from 0 to N-1")
    return element, count


def _slurm_element() -> tuple[int, int]:
    first = int(os.environ.get("SLURM_ARRAY_TASK_MIN", "0"))
    number = int(os.environ["SLURM_ARRAY_TASK_ID"])
    return number - first, int(os.environ["SLURM_ARRAY_TASK_COUNT"])


def _check_output(output: pathlib.Path) -> None:
    """Refuse a folder that holds something else. Raises UserError."""
    if output.exists() and not output.is_dir():
        raise errors.UserError(f"--output {output} is a file; give a folder")
    files.need_folder(output, "--output")
    ours = (parts.FOLDER, *shards.SPLITS)
    for name in ours:
        if (output / name).is_dir():
            files.need_folder(output / name, "--output")

    if not output.is_dir():
        return
    known = {shards.MANIFEST, *ours}
    for path in output.iterdir():
        if path.name not in known and not path.name.startswith("."):
            remedy = "give an empty folder or an earlier dataset"
            raise errors.UserError(f"--output {output} holds other files; {remedy}")


def _remove_strays(output: pathlib.Path, wanted: set[pathlib.Path]) -> None:
    """Remove shards and notes of an earlier plan with more parts, and of killed workers."""
    for name in (parts.FOLDER, *shards.SPLITS):
        folder = output / name
        for path in folder.glob("*"):
            if path not in wanted and path.suffix in (".bin", ".json", ".tmp"):  # only ours
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not there, or not empty
            folder.rmdir()

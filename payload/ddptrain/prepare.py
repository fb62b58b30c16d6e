"""Text to a dataset: tokenised in parallel, resumable, the same bytes however many workers there were.

The sources are cut into parts. A part becomes at most one training and one validation shard whose names and contents
depend on the part alone, and a note in `parts/` that says from what. A part whose note still holds is not done again.
Workers, on one machine or as elements of a Slurm array, take parts by number and need no locks. `dataset.json` comes
last.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import multiprocessing.process
import os
import pathlib
import re
import shutil
import sys
import threading
import time
import typing
import zlib

import numpy as np

from ddptrain import errors, files, markers, progress, shards, sources, tokenizers

CODE_VERSION = 1  # raise it when the same text would become other tokens
MASK_NOTE = "top bit set: read, not learned"
_PART_BYTES = 64 << 20
_SMALL_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line."""

    source: tuple[str, ...]
    output: pathlib.Path
    tokenizer: str = "auto"
    vocabulary: pathlib.Path | None = None
    tokenizer_local_dir: pathlib.Path | None = None
    workers: int = 0
    task: str | None = None
    finalize: bool = False
    mask_prompts: bool = False
    val_share: float | None = None
    part_mib: float | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """What one worker does in one go."""

    number: int
    items: tuple[sources.Item, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of the sources, as stored."""
        return sum(item.num_bytes for item in self.items)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All parts, and what turns each into the same bytes wherever it is done."""

    parts: tuple[Part, ...]
    identity: tokenizers.Identity
    masked: bool
    val_share: float
    has_val_files: bool

    @property
    def dtype(self) -> str:
        """Return the tokens' dtype."""
        return shards.dtype_for(self.identity.vocab, masked=self.masked)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--source", nargs="+", required=True, metavar="SRC",
        help=f"{sources.STDLIB} (Python's own source code: needs no network), folders or files: {sources.READS}",
    )  # fmt: skip
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder of the dataset")
    parser.add_argument(
        "--tokenizer",
        choices=("auto", "byte", "gpt2"),
        default="auto",
        help="auto: gpt2 from 256 MiB of text on, else byte",
    )
    parser.add_argument(
        "--vocabulary", type=pathlib.Path, help="GPT-2's vocab.bpe, or its folder (default: the packaged one)"
    )
    parser.add_argument("--tokenizer-local-dir", type=pathlib.Path, help="folder of a tokenizer saved by transformers")
    parser.add_argument("--workers", type=int, default=0, help="processes (default: one per core)")
    parser.add_argument(
        "--task",
        metavar="K/N|slurm",
        help="do only the parts of element K of N (from 0), or of this Slurm array element",
    )
    parser.add_argument("--finalize", action="store_true", help="do nothing but check the parts and write dataset.json")
    parser.add_argument(
        "--mask-prompts", action="store_true", help="learn only completions and the assistant's messages"
    )
    parser.add_argument(
        "--val-share", type=float, help="share of the text held out (default: 0.01, above 1 GiB 0.0005)"
    )
    parser.add_argument("--part-mib", type=float, help="size of a part (default: 64, less for little text)")


def check(args: argparse.Namespace) -> Options:
    """Return the options. Raises UserError naming the flag that cannot be."""
    options = Options(
        **{f.name: getattr(args, f.name) for f in dataclasses.fields(Options) if f.name != "source"},
        source=tuple(args.source),
    )
    if options.workers < 0:
        raise errors.UserError(f"--workers {options.workers}: must not be negative")
    if options.val_share is not None and not 0 <= options.val_share < 1:
        raise errors.UserError(f"--val-share {options.val_share}: must be at least 0 and below 1")
    if options.part_mib is not None and not 0.01 <= options.part_mib <= 4096:
        raise errors.UserError(f"--part-mib {options.part_mib}: must be between 0.01 and 4096")
    return options


def run(options: Options) -> None:
    """Do what is missing, then write the manifest unless this is one element of an array."""
    began = time.monotonic()
    _check_output(options.output)
    total = sum(item.num_bytes for item in sources.find(options.source, 1 << 60))
    tokenizer = tokenizers.make(
        options.tokenizer, vocabulary=options.vocabulary, local_dir=options.tokenizer_local_dir, text_bytes=total
    )
    if options.tokenizer == "auto":  # the workers must not decide again
        options = dataclasses.replace(options, tokenizer=tokenizer.identity.kind)
    plan = make_plan(options, tokenizer.identity, total)
    markers.emit(
        "DATA", sources=len(plan.parts) and sum(len(p.items) for p in plan.parts), bytes=total, parts=len(plan.parts),
        tokenizer=plan.identity.kind, vocab=plan.identity.vocab, output=options.output,
    )  # fmt: skip
    (options.output / "parts").mkdir(parents=True, exist_ok=True)
    if not options.finalize:
        first, stride = _share(options.task)
        _work(options, plan, plan.parts[first::stride], tokenizer)
    if options.task is None:
        dataset = finalize(options, plan)
        markers.emit(
            "DONE", workload="prepare", dataset=options.output, train_tokens=dataset.tokens("train"),
            val_tokens=dataset.tokens("val"),
            shards=sum(len(s) for s in dataset.splits.values()), elapsed_s=time.monotonic() - began,
        )  # fmt: skip


def make_plan(options: Options, identity: tokenizers.Identity, total: int) -> Plan:
    """Return the parts: consecutive sources up to the part size, or a piece of a big file."""
    part_bytes = int(options.part_mib * 2**20) if options.part_mib else min(_PART_BYTES, max(4 << 20, total // 8))
    share = options.val_share if options.val_share is not None else 0.01 if total < _SMALL_BYTES else 0.0005
    groups: list[list[sources.Item]] = []
    size = 0
    items = sources.find(options.source, part_bytes)
    for item in items:
        if not groups or size + item.num_bytes > part_bytes or item.kind == "tar":
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.num_bytes
    parts = tuple(Part(number, tuple(group)) for number, group in enumerate(groups))
    return Plan(parts, identity, options.mask_prompts, share, any(item.validation for item in items))


def finalize(options: Options, plan: Plan) -> shards.Dataset:
    """Check every part and write dataset.json. Raises UserError naming the parts that are missing."""
    notes = [_valid_note(options.output, plan, part) for part in plan.parts]
    missing = [number for number, note in enumerate(notes) if note is None]
    if missing:
        shown = ", ".join(f"{number} ({_inputs(plan.parts[number])})" for number in missing[:5])
        more = ", ..." if len(missing) > 5 else ""
        raise errors.UserError(
            f"{len(missing)} of {len(notes)} parts are not done: {shown}{more}; run prepare again, it does only those"
        )
    done = [note for note in notes if note is not None]
    splits = {
        split: [entry for note in done for entry in note["shards"] if entry["split"] == split]
        for split in shards.SPLITS
    }
    if not splits["train"]:
        raise errors.UserError(
            f"--source {' '.join(options.source)}: no training text; all of it is validation or empty"
        )
    if not splits["val"]:
        markers.warn("DATA", "no validation text: give a file named val.jsonl or val.txt, or raise --val-share")
    _remove_strays(options.output, {entry["file"] for entries in splits.values() for entry in entries}, len(plan.parts))
    totals = {
        split: {key: sum(entry[key] for entry in splits[split]) for key in ("tokens", "docs")}
        for split in shards.SPLITS
    }
    manifest = {
        "format": shards.FORMAT,
        "name": options.output.name,
        "tokenizer": plan.identity.as_record(),
        "dtype": plan.dtype,
        "masked": plan.masked,
        "mask": MASK_NOTE if plan.masked else None,
        "val_share": plan.val_share,
        "source": list(options.source),
        "totals": totals,
        "splits": splits,
        "code_version": CODE_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    files.write_json(options.output / shards.MANIFEST, manifest)
    return shards.open_dataset(options.output)


def _inputs(part: Part) -> str:
    """Return the part's sources in a few words."""
    first = part.items[0]
    where = f"{first.path}" + (f" from byte {first.begin}" if first.begin else "")
    return where + (f" and {len(part.items) - 1} more" if len(part.items) > 1 else "")


def tokenize_part(
    output: pathlib.Path, plan: Plan, part: Part, tokenizer: tokenizers.Tokenizer
) -> dict[str, typing.Any]:
    """Write the part's shards and its note, and return the note."""
    tokens: dict[str, list[shards.Tokens]] = {split: [] for split in shards.SPLITS}
    docs = dict.fromkeys(shards.SPLITS, 0)
    digest = hashlib.sha256()
    end = np.array([plan.identity.eot_id], dtype=plan.dtype)
    for item in part.items:
        for document in sources.documents(item):
            fresh: set[str] = set()
            for piece in sources.pieces(document):
                text = "".join(segment.text for segment in piece).encode("utf-8", errors="replace")
                digest.update(text)
                split = (
                    "val"
                    if item.validation or (not plan.has_val_files and _held_out(text, plan.val_share))
                    else "train"
                )
                if split not in fresh:
                    fresh.add(split)
                    docs[split] += 1
                    tokens[split].append(end)
                tokens[split] += [_encode(segment, tokenizer, plan) for segment in piece]
    entries: list[dict[str, object]] = []
    for split in shards.SPLITS:
        name = f"{split}/shard-{part.number:05d}.bin"
        if tokens[split]:
            facts = shards.write(output / name, tokens[split], plan.dtype)
            entries.append({"split": split, "file": name, "docs": docs[split], **facts})
    note = {"wanted": _wanted(plan, part), "text_sha256": digest.hexdigest(), "shards": entries}
    files.write_json(_note_path(output, part), note)
    return note


def _encode(segment: sources.Segment, tokenizer: tokenizers.Tokenizer, plan: Plan) -> shards.Tokens:
    ids = tokenizer.encode(segment.text).astype(plan.dtype, copy=False)
    if plan.masked and not segment.learned:
        ids = ids | ids.dtype.type(1 << (ids.itemsize * 8 - 1))
    return typing.cast(shards.Tokens, ids)


def _held_out(text: bytes, share: float) -> bool:
    """Return whether a text is for validation: decided by it alone, so workers need not know the other texts."""
    return zlib.crc32(text) % 1_000_000 < share * 1_000_000


def _wanted(plan: Plan, part: Part) -> dict[str, typing.Any]:
    """Identify the inputs of a part; a note with another value is stale."""
    items = [[str(i.path), i.size_bytes, i.mtime_ns, i.begin, i.end, i.validation] for i in part.items]
    return {
        "sources": hashlib.sha256(json.dumps(items).encode()).hexdigest(),
        "tokenizer": plan.identity.as_record(),
        "masked": plan.masked,
        "val_share": plan.val_share if not plan.has_val_files else None,
        "code_version": CODE_VERSION,
    }


def _note_path(output: pathlib.Path, part: Part) -> pathlib.Path:
    return output / "parts" / f"part-{part.number:05d}.json"


def _valid_note(output: pathlib.Path, plan: Plan, part: Part) -> dict[str, typing.Any] | None:
    """Return the part's note when it says what is wanted and its shards have their sizes."""
    try:
        note = files.read_json(_note_path(output, part))
        if note["wanted"] != _wanted(plan, part):
            return None
        for entry in note["shards"]:
            if shards.read_header(output / entry["file"]).tokens != entry["tokens"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, errors.UserError):
        return None
    return note


def _work(options: Options, plan: Plan, parts: tuple[Part, ...], tokenizer: tokenizers.Tokenizer) -> None:
    todo = [part for part in parts if _valid_note(options.output, plan, part) is None]
    if len(parts) > len(todo):
        markers.emit("DATA", f"{len(parts) - len(todo)} of {len(parts)} parts are done already and kept")
    if not todo:
        return
    size = sum(part.num_bytes for part in todo)
    need = int(size * (2.1 if plan.identity.kind == "byte" else 1.5))
    if (free := files.free_bytes(options.output)) < need:
        raise errors.UserError(
            f"--output {options.output}: {need >> 20} MiB needed, {free >> 20} MiB free; "
            f"{files.make_room(options.output)}"
        )
    (options.output / shards.MANIFEST).unlink(missing_ok=True)  # from here on the folder is no dataset
    workers = min(options.workers or _cores(), len(todo))
    with progress.Bar(size, "tokenising", unit="B") as bar:
        if workers == 1:
            _worker_tokenizer[:] = [tokenizer]
            for part in todo:
                _say(part, _one(options.output, plan, part), len(plan.parts), bar)
            return
        # A fork begins at once, with the tokenizer in its memory; beside threads it is not safe.
        forks = sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules
        pool = concurrent.futures.ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("fork" if forks else "spawn"),
            initializer=_start_worker,
            initargs=(options, tokenizer if forks else None),
        )
        with pool:
            # so that no process waits long for the last
            biggest_first = sorted(todo, key=lambda part: part.num_bytes, reverse=True)
            futures = {pool.submit(_one, options.output, plan, part): part for part in biggest_first}
            try:
                for future in concurrent.futures.as_completed(futures):
                    _say(futures[future], future.result(), len(plan.parts), bar)
            except concurrent.futures.BrokenExecutor as e:
                raise errors.UserError(
                    "a worker was killed, most likely for want of memory; use fewer --workers or a smaller --part-mib"
                ) from e
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


_worker_tokenizer: list[tokenizers.Tokenizer] = []


def _start_worker(options: Options, made: tokenizers.Tokenizer | None) -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    _worker_tokenizer[:] = [
        made or tokenizers.make(options.tokenizer, vocabulary=options.vocabulary, local_dir=options.tokenizer_local_dir)
    ]


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    """End this worker with the command: one that was killed leaves workers that wait for parts for ever."""
    parent.join()
    os._exit(1)


def _one(output: pathlib.Path, plan: Plan, part: Part) -> dict[str, typing.Any]:
    return tokenize_part(output, plan, part, _worker_tokenizer[0])


def _say(part: Part, note: dict[str, typing.Any], count: int, bar: progress.Bar) -> None:
    tokens = sum(entry["tokens"] for entry in note["shards"])
    bar.advance(part.num_bytes)
    if not bar.live:
        markers.emit(
            "DATA", part=f"{part.number + 1}/{count}", files=len(part.items), bytes=part.num_bytes, tokens=tokens
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _share(task: str | None) -> tuple[int, int]:
    """Return (first part, stride) of an array element. Raises UserError when `task` is none."""
    if task is None:
        return 0, 1
    env = os.environ
    try:
        if task == "slurm":
            element = int(env["SLURM_ARRAY_TASK_ID"]) - int(env.get("SLURM_ARRAY_TASK_MIN", "0"))
            count = int(env["SLURM_ARRAY_TASK_COUNT"])
        else:
            element, count = (int(number) for number in task.split("/"))
    except (KeyError, ValueError) as e:
        raise errors.UserError(
            f"--task {task}: give K/N with K from 0 to N-1, or slurm inside a Slurm array job"
        ) from e
    if not 0 <= element < count:
        raise errors.UserError(f"--task {task}: element {element} of {count} does not exist; K goes from 0 to N-1")
    return element, count


def _check_output(output: pathlib.Path) -> None:
    """Refuse a folder that holds something else. Raises UserError."""
    if output.exists() and not output.is_dir():
        raise errors.UserError(f"--output {output} is a file; give a folder")
    for folder in (output, *(output / name for name in ("parts", *shards.SPLITS) if (output / name).is_dir())):
        files.need_folder(folder, "--output")
    known = {shards.MANIFEST, "parts", *shards.SPLITS}
    if output.is_dir() and any(path.name not in known and not path.name.startswith(".") for path in output.iterdir()):
        raise errors.UserError(f"--output {output} holds other files; give an empty folder or an earlier dataset")


def _remove_strays(output: pathlib.Path, wanted: set[str], parts: int) -> None:
    """Remove shards and notes of an earlier plan with more parts, and what killed workers left."""
    for folder in (*shards.SPLITS, "parts"):
        for path in (output / folder).glob("*") if (output / folder).is_dir() else ():
            name = f"{folder}/{path.name}"
            number = re.fullmatch(r"part-(\d+)\.json", path.name)
            stale_note = folder == "parts" and number is not None and int(number[1]) >= parts
            old_tmp = (
                path.name.endswith(".tmp") and path.name.startswith(".") and time.time() - path.stat().st_mtime > 86400
            )
            if stale_note or old_tmp or (folder != "parts" and path.suffix == ".bin" and name not in wanted):
                path.unlink(missing_ok=True)
        if (output / folder).is_dir() and not any((output / folder).iterdir()):
            shutil.rmtree(output / folder, ignore_errors=True)

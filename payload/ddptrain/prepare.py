"""Text to a dataset: tokenised in parallel, resumable, the same bytes however many workers there were.

The sources are cut into parts. A part becomes at most one training and one validation shard whose names and contents
depend on the part alone, and a note in `parts/` that says from what. A part whose note still holds is not done again.
Workers, on one machine or as elements of a Slurm array, take parts by number and need no locks. `dataset.json` comes
last.
"""

# ruff: noqa: RUF009 - config.option returns a dataclasses.field
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import multiprocessing.process
import os
import pathlib
import threading
import time
import typing
import zlib

import numpy as np

from ddptrain import config, errors, files, markers, reading, records, shards, sources, tokenizers

CODE_VERSION = 2  # raise it when the same text would become other tokens
_SOURCES = f"{sources.STDLIB} (Python's own source code: needs no network), folders or files: {sources.READS}"
_PART_BYTES = 64 << 20
_SMALL_BYTES = 1 << 30

Note = dict[str, typing.Any]  # of a part: its inputs and its shards


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line."""

    source: tuple[str, ...] = config.option(dataclasses.MISSING, _SOURCES, str, nargs="+", metavar="SRC", required=True)
    output: pathlib.Path = config.option(dataclasses.MISSING, "folder of the dataset", pathlib.Path, required=True)
    tokenizer: str = config.option(
        "auto", "auto: gpt2 from 256 MiB of text, otherwise byte", choices=("auto", "byte", "gpt2")
    )
    tokenizer_local_dir: pathlib.Path | None = config.option(
        None, "folder of a tokenizer that transformers or tokenizers saved", pathlib.Path
    )
    workers: int = config.option(0, "processes [default: one per core]", least=0)
    task: str | None = config.option(
        None, "do only the parts of element K of N (from 0), or of this Slurm array element", str, metavar="K/N|slurm"
    )
    finalize: bool = config.option(False, "only check the parts and write dataset.json")
    mask_prompts: bool = config.option(False, "learn only completions and the assistant's messages")
    val_share: float | None = config.option(
        None, "share of the text held out [default: 0.01, above 1 GiB 0.0005]", float, least=0, below=1
    )
    part_mib: float | None = config.option(
        None, "text per part [default: depends on the amount, at most 64]", float, least=0.01, most=4096
    )
    errors: str = config.option("strict", "how to treat bytes that are not text", choices=("strict", "replace"))


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
    unread: sources.Unread  # outside archives

    @property
    def dtype(self) -> str:
        """Return the tokens' dtype."""
        return shards.dtype_for(self.identity.vocab, masked=self.masked)


add_arguments = functools.partial(config.declare, options=Options)
check = functools.partial(config.given, options=Options)


def run(options: Options) -> None:
    """Do what is missing, then write the manifest unless this is one element of an array."""
    began = time.monotonic()
    _check_output(options.output)
    total = sum(item.num_bytes for item in sources.find(options.source, 1 << 60, options.errors, options.output)[0])
    tokenizer = tokenizers.make(options.tokenizer, local_dir=options.tokenizer_local_dir, text_bytes=total)
    if options.tokenizer == "auto":  # the workers must not decide again
        options = dataclasses.replace(options, tokenizer=tokenizer.identity.kind)
    plan = make_plan(options, tokenizer.identity, total)
    amount = {"sources": sum(len(part.items) for part in plan.parts), "bytes": total, "parts": len(plan.parts)}
    kind = {"tokenizer": plan.identity.kind, "vocab": plan.identity.vocab}
    markers.emit("DATA", **amount, **kind, output=options.output)
    (options.output / "parts").mkdir(parents=True, exist_ok=True)
    if not options.finalize:
        first, stride = _share(options.task)
        _work(options, plan, plan.parts[first::stride], tokenizer)
    if options.task is None:
        dataset = finalize(options, plan)
        tokens = {f"{split}_tokens": dataset.tokens(split) for split in shards.SPLITS}
        count, elapsed_s = sum(len(s) for s in dataset.splits.values()), time.monotonic() - began
        markers.emit("DONE", workload="prepare", dataset=dataset.root, **tokens, shards=count, elapsed_s=elapsed_s)


def make_plan(options: Options, identity: tokenizers.Identity, total: int) -> Plan:
    """Return the parts: consecutive sources up to the part size, or a piece of a big file."""
    part_bytes = int(options.part_mib * 2**20) if options.part_mib else min(_PART_BYTES, max(4 << 20, total // 8))
    share = options.val_share if options.val_share is not None else 0.01 if total < _SMALL_BYTES else 0.0005
    groups: list[list[sources.Item]] = []
    size = 0
    items, unread = sources.find(options.source, part_bytes, options.errors, options.output)
    for item in items:
        if not groups or size + item.num_bytes > part_bytes or item.kind in ("tar", "zip"):
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.num_bytes
    parts = tuple(Part(number, tuple(group)) for number, group in enumerate(groups))
    return Plan(parts, identity, options.mask_prompts, share, any(item.validation for item in items), unread)


def finalize(options: Options, plan: Plan) -> shards.Dataset:
    """Check every part and write dataset.json. Raises UserError naming the parts that are missing."""
    notes = [_valid_note(options.output, plan, part) for part in plan.parts]
    missing = [number for number, note in enumerate(notes) if note is None]
    if missing:
        some = ", ".join(f"{number} ({_inputs(plan.parts[number])})" for number in missing[:5])
        what = f"{len(missing)} of {len(notes)} parts are not done: {some}{', ...' if len(missing) > 5 else ''}"
        raise errors.UserError(f"{what}; run prepare again, it does only those")
    done = [note for note in notes if note is not None]
    entries = [entry for note in done for entry in note["shards"]]
    unread = sources.Unread(plan.unread)
    for note in done:
        unread.merge(note["unread"])
    splits = {split: [entry for entry in entries if entry["split"] == split] for split in shards.SPLITS}
    if not splits["train"]:
        text = "no training text; all of it is validation or empty"
        raise errors.UserError(f"{' '.join(options.source)}: {text}")
    if not splits["val"]:
        markers.warn("DATA", "no validation text: give a file named val.jsonl or val.txt, or raise --val-share")
    if unread:
        markers.warn("DATA", f"not read: {unread}")
    if plan.masked:
        _check_learned(options, plan, done, splits["train"])
    wanted = {_note_path(options.output, part) for part in plan.parts}
    _remove_strays(options.output, wanted | {options.output / entry["file"] for entry in entries})
    keys = ("tokens", "docs")
    totals = {split: {key: sum(entry[key] for entry in found) for key in keys} for split, found in splits.items()}
    manifest = {
        "format": shards.FORMAT,
        "name": options.output.name,
        "tokenizer": plan.identity.as_record(),
        "dtype": plan.dtype,
        "masked": plan.masked,
        "val_share": plan.val_share,
        "source": list(options.source),
        "not_read": unread,  # by suffix: files, bytes
        "totals": totals,
        "splits": splits,
        "code_version": CODE_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    files.write_json(options.output / shards.MANIFEST, manifest)
    return shards.open_dataset(options.output)


def _check_learned(options: Options, plan: Plan, notes: list[Note], train: list[dict[str, typing.Any]]) -> None:
    """Raise UserError where nothing would be learned, or nothing of most conversations."""
    chats: collections.Counter[str] = collections.Counter()
    for note in notes:
        chats.update(note["chats"])
    unanswered = sum(count for roles, count in chats.items() if records.ASSISTANT not in roles.split(", "))
    what = ""
    if 2 * unanswered > chats.total():
        found = ", ".join(sorted({role for roles in chats for role in roles.split(", ")}))
        what = f"{unanswered} of {chats.total()} conversations have no message of the role {records.ASSISTANT}, which"
        what = f"{what} alone is learned; roles found: {found}; rename them"
    found = [shards.Shard(options.output / entry["file"], entry["tokens"], plan.dtype) for entry in train]
    if not what and not sum(shards.num_learned(shard, plan.identity.eot_id, masked=True) for shard in found):
        what = "no token would be learned: all completions and assistant's messages are empty"
    if what:
        raise errors.UserError(f"{' '.join(options.source)}: {what}")


def _inputs(part: Part) -> str:
    first = part.items[0]
    where = f"{first.path}" + (f" from byte {first.begin}" if first.begin else "")
    return where + (f" and {len(part.items) - 1} more" if len(part.items) > 1 else "")


def tokenize_part(output: pathlib.Path, plan: Plan, part: Part, tokenizer: tokenizers.Tokenizer) -> Note:
    """Write the part's shards and its note, and return the note."""
    tokens: dict[str, list[shards.Tokens]] = {split: [] for split in shards.SPLITS}
    docs = dict.fromkeys(shards.SPLITS, 0)
    chats: collections.Counter[str] = collections.Counter()  # by their roles
    unread = sources.Unread()
    end = np.array([plan.identity.eot_id], dtype=plan.dtype)
    for item in part.items:
        for document in reading.documents(item, unread):
            if roles := sorted({segment.role for segment in document if segment.role}):
                chats[", ".join(roles)] += 1
            fresh: set[str] = set()
            for piece in reading.pieces(document):
                text = "".join(segment.text for segment in piece).encode()
                held_out = item.validation or (not plan.has_val_files and _held_out(text, plan.val_share))
                split = "val" if held_out else "train"
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
    note = {"wanted": _wanted(plan, part), "shards": entries, "unread": unread, "chats": chats}
    files.write_json(_note_path(output, part), note)
    return note


def _encode(segment: records.Segment, tokenizer: tokenizers.Tokenizer, plan: Plan) -> shards.Tokens:
    ids = tokenizer.encode(segment.text).astype(plan.dtype, copy=False)
    if plan.masked and not segment.learned:
        ids = ids | ids.dtype.type(1 << (ids.itemsize * 8 - 1))
    return typing.cast(shards.Tokens, ids)


def _held_out(text: bytes, share: float) -> bool:
    """Return whether a text is for validation: decided by it alone, so workers need not know the other texts."""
    return zlib.crc32(text) % 1_000_000 < share * 1_000_000


def _wanted(plan: Plan, part: Part) -> dict[str, typing.Any]:
    """Identify the inputs of a part; a note with another value is stale."""
    items = [[str(i.path), i.size_bytes, i.mtime_ns, i.begin, i.end, i.validation, i.errors] for i in part.items]
    return {
        "sources": hashlib.sha256(json.dumps(items).encode()).hexdigest(),
        "tokenizer": plan.identity.as_record(),
        "masked": plan.masked,
        "val_share": plan.val_share if not plan.has_val_files else None,
        "code_version": CODE_VERSION,
    }


def _note_path(output: pathlib.Path, part: Part) -> pathlib.Path:
    return output / "parts" / f"part-{part.number:05d}.json"


def _valid_note(output: pathlib.Path, plan: Plan, part: Part) -> Note | None:
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
    need, free = int(size * (2.1 if plan.identity.kind == "byte" else 1.5)), files.free_bytes(options.output)
    if free < need:
        what = f"{need >> 20} MiB needed, {free >> 20} MiB free"
        raise errors.UserError(f"--output {options.output}: {what}; {files.MAKE_ROOM}")
    (options.output / shards.MANIFEST).unlink(missing_ok=True)  # from here on the folder is no dataset
    workers = min(options.workers or len(os.sched_getaffinity(0)), len(todo))
    if workers == 1:
        _worker_tokenizer[:] = [tokenizer]
        for part in todo:
            _report(part, _tokenize(options.output, plan, part), plan)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(options,)
    )
    with pool:
        # so that no process waits long for the last
        biggest_first = sorted(todo, key=lambda part: part.num_bytes, reverse=True)
        futures = {pool.submit(_tokenize, options.output, plan, part): part for part in biggest_first}
        try:
            for future in concurrent.futures.as_completed(futures):
                _report(futures[future], future.result(), plan)
        except concurrent.futures.BrokenExecutor as e:
            text = "a worker was killed, most likely out of memory; use fewer --workers or a smaller --part-mib"
            raise errors.UserError(text) from e
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_worker_tokenizer: list[tokenizers.Tokenizer] = []


def _start_worker(options: Options) -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    _worker_tokenizer[:] = [tokenizers.make(options.tokenizer, local_dir=options.tokenizer_local_dir)]


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    """End this worker with the command: one that was killed leaves workers that wait for parts for ever."""
    parent.join()
    os._exit(1)


def _tokenize(output: pathlib.Path, plan: Plan, part: Part) -> dict[str, typing.Any]:
    return tokenize_part(output, plan, part, _worker_tokenizer[0])


def _report(part: Part, note: Note, plan: Plan) -> None:
    tokens, number = sum(entry["tokens"] for entry in note["shards"]), f"{part.number + 1}/{len(plan.parts)}"
    markers.emit("DATA", part=number, files=len(part.items), bytes=part.num_bytes, tokens=tokens)


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
        text = "give K/N with K from 0 to N-1, or slurm inside a Slurm array job"
        raise errors.UserError(f"--task {task}: {text}") from e
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


def _remove_strays(output: pathlib.Path, wanted: set[pathlib.Path]) -> None:
    """Remove shards and notes of an earlier plan with more parts, and what killed workers left."""
    for folder in (*shards.SPLITS, "parts"):
        for path in (output / folder).glob("*"):
            if path not in wanted and path.suffix in (".bin", ".json", ".tmp"):  # nobody else's
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not there, or not empty
            (output / folder).rmdir()

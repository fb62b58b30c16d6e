"""The operations on the shared filesystem; Workspace.do gives each its deadline."""

import collections.abc
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import stat
import time
import typing

from ddp.host.files import MAX_LISTED, RefusedError, private, replace
from ddp.node import checkpoints, ownership, small_files

HF_SUFFIX = ".hf-token"
ENV_SUFFIX = ".env"
NOTIFY_SUFFIX = ".notify"
_NODE = re.compile(r"[A-Za-z0-9._-]{1,80}")
MAX_NODES = 128  # whose round trips are kept: a file of half a MiB
USERS = "users"  # in the workspace: a folder for each user but the trainer's account


@dataclasses.dataclass(frozen=True)
class Place:
    """The file or folder that a path leads to."""

    kind: str  # file, folder, absent or other
    real: str
    is_inside: bool  # the workspace
    is_readable: bool


@dataclasses.dataclass(frozen=True)
class Obstacles:
    """The reasons why some folders of the workspace cannot be used."""

    denied: tuple[str, ...]  # names of folders that this account cannot make or write
    untrusted: str  # the folder that other accounts own or can replace, and what to type; or ""


@dataclasses.dataclass(frozen=True)
class Held:
    """The content of one user's folder, and the free space there."""

    environments: tuple[small_files.Json, ...]  # their manifests
    datasets: tuple[str, ...]
    is_writable: bool
    free_bytes: int
    free_files: int
    untrusted: str  # as of Obstacles


@dataclasses.dataclass(frozen=True)
class Synced:
    """The numbers of files with the token that were changed."""

    removed: int
    replaced: int


@dataclasses.dataclass(frozen=True)
class SourceSize:
    """The size of a dataset's source."""

    num_bytes: int
    num_parts: int


def make_folders(workspace: str, names: list[str], trusted: list[int]) -> Obstacles:
    """Make these folders; return the obstacles."""
    denied: list[str] = []
    for name in names:
        path = pathlib.Path(workspace, name)
        try:
            path.mkdir(mode=folder_mode(name))
        except FileExistsError:
            pass
        except PermissionError:
            denied.append(name)
            continue
        if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
            denied.append(name)
    if not denied:
        return Obstacles((), "")
    return Obstacles(tuple(denied), _untrusted(workspace, names, trusted))


def folder_mode(name: str) -> int:
    """Return the mode of a new folder of the workspace: only its owner reads a hidden one."""
    return 0o700 if name.startswith(".") else 0o755


def make_workspace(path: str) -> None:
    """Make the workspace of a cluster without charms, in a folder that exists.

    Raises RefusedError.
    """
    folder = pathlib.Path(path)
    _make(
        folder,
        f"is the shared filesystem mounted at {folder.parent}? else name another folder with `workspace`",
    )


def make_users(workspace: str) -> None:
    """Make the folder of the users' folders in a workspace of this account.

    In root's workspace, root makes it.
    """
    if pathlib.Path(workspace).lstat().st_uid == os.geteuid():
        users = pathlib.Path(workspace, USERS)
        with contextlib.suppress(FileExistsError):
            users.mkdir()
        about = users.lstat()
        if (
            stat.S_ISDIR(about.st_mode)
            and about.st_uid == os.geteuid()
            and about.st_mode & 0o7777 != 0o1777
        ):
            users.chmod(0o1777)


def own_folder(path: str) -> None:
    """Make a user's folder in `users`, or verify that it is the user's own."""
    folder = pathlib.Path(path)
    _make(
        folder, f"the trainer makes {folder.parent}, or as root: install -d -m 1777 {folder.parent}"
    )
    check_own(path)


def check_own(path: str) -> None:
    """Verify that a user's folder in `users` is its own; one that does not exist is fine."""
    try:
        about = pathlib.Path(path).lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        what = f"belongs to uid {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}"
        raise RefusedError(
            f"{path} is not a folder that only this account can write: it {what}; as root: remove it"
        )


def look(workspace: str, names: list[str], trusted: list[int]) -> Held:
    """List a user's folder: manifests of environments, names of datasets, free space."""
    top = pathlib.Path(workspace)
    runs = top / "runs"
    datasets = sorted(path.parent.name for path in (top / "datasets").glob("*/dataset.json"))
    room = os.statvfs(runs if runs.is_dir() else top)
    free_files = 1 << 40
    if room.f_files and room.f_favail >= 0:  # CephFS has -1, others do not count
        free_files = room.f_favail
    return Held(
        environments=tuple(_manifests(top / "environments", trusted)),
        datasets=tuple(datasets[:MAX_LISTED]),
        is_writable=os.access(runs, os.W_OK | os.X_OK),
        free_bytes=room.f_bavail * room.f_frsize,
        free_files=free_files,
        untrusted=_untrusted(workspace, names, trusted),
    )


def _manifests(
    folder: pathlib.Path, trusted: list[int]
) -> collections.abc.Iterator[small_files.Json]:
    """Yield the manifests of whole archives that jobs may use."""
    for path in sorted(folder.glob("*.json"))[:MAX_LISTED]:
        try:
            manifest = small_files.read_object(path)
            archive = path.with_suffix(".tar.zst").lstat()
            is_whole = archive.st_size == manifest["size_bytes"] and path.stem == manifest["hash"]
            owners = {archive.st_uid, path.lstat().st_uid}
        except (OSError, ValueError, KeyError):
            continue  # half-written, damaged or another file
        if is_whole and owners <= set(trusted):  # a node would refuse others
            yield manifest


def free_bytes(path: str) -> int:
    """Return how much this account may still write below a folder."""
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def locate(workspace: str, path: str) -> Place:
    """Resolve all links of `path`."""
    real = pathlib.Path(os.path.realpath(path))
    top = pathlib.Path(os.path.realpath(workspace))
    is_inside = real.is_relative_to(top) and real != top
    return Place(_kind_of(real), str(real), is_inside, os.access(real, os.R_OK))


def _kind_of(path: pathlib.Path) -> str:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "absent"
    if stat.S_ISREG(mode):
        return "file"
    return "folder" if stat.S_ISDIR(mode) else "other"


def has_checkpoint(run_dir: str) -> bool:
    """Return whether a run has a checkpoint."""
    return checkpoints.newest(pathlib.Path(run_dir)) is not None


def keep_secret(secrets: str, owner: str, name: str, text: str) -> None:
    """Write a file that this account alone can read."""
    folder = private(pathlib.Path(secrets)) / owner
    folder.mkdir(mode=0o700, exist_ok=True)
    replace(private(folder) / name, text, mode=0o600)


def drop_secrets(secrets: str, owner: str, run: str) -> None:
    """Remove a run's files with the token, with variables and with the URL to notify."""
    for suffix in (HF_SUFFIX, ENV_SUFFIX, NOTIFY_SUFFIX):
        pathlib.Path(secrets, owner, f"{run}{suffix}").unlink(missing_ok=True)


def drop_variables(secrets: str, owner: str, active: list[str]) -> None:
    """Remove the files with variables, and with URLs to notify, of runs that are not active.

    Files of the last two minutes stay: their job is being submitted.
    """
    folder = pathlib.Path(secrets, owner)
    for path in (*folder.glob(f"*{ENV_SUFFIX}"), *folder.glob(f"*{NOTIFY_SUFFIX}")):
        is_old = time.time() - path.lstat().st_mtime > 120
        if path.stem not in active and is_old:
            path.unlink()


def sync_tokens(secrets: str, owner: str, token: str, active: list[str] | None) -> Synced:
    """Write the token to the files of active runs and remove the others; without one remove all.

    If `active` is None, all jobs count as active. Keep a file of the last two minutes: its job is
    being submitted.
    """
    removed = 0
    replaced = 0
    folder = pathlib.Path(secrets, owner)
    if not folder.is_dir():
        return Synced(0, 0)
    for path in sorted(private(folder).iterdir()):
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or path.name.endswith((ENV_SUFFIX, NOTIFY_SUFFIX)):
            continue  # not written by ddp, or not the trainer's
        is_ours = path.name.endswith(HF_SUFFIX) and not path.name.startswith(".")
        is_new = time.time() - about.st_mtime <= 120
        is_kept = is_new or (is_ours and _is_active(path, active))
        if not token or not is_kept:
            path.unlink()
            removed += 1
        elif is_ours and small_files.tail(path, 65536) != [token]:
            replace(path, f"{token}\n", mode=0o600)
            replaced += 1
    return Synced(removed, replaced)


def _is_active(path: pathlib.Path, active: list[str] | None) -> bool:
    """Return whether the run of a token's file is active, as far as that is known."""
    return active is None or path.name.removesuffix(HF_SUFFIX) in active


def measure_source(path: str, part_bytes: int) -> SourceSize:
    """Return the bytes below a path and the number of parts for them.

    A very large folder is read in part.
    """
    total = parts = 0
    began = time.monotonic()
    top = pathlib.Path(path)
    for number, file in enumerate([top] if top.is_file() else top.rglob("*")):
        if number >= 200_000 or time.monotonic() - began > 20:
            break
        with contextlib.suppress(OSError):
            about = file.stat()  # the hub's cache holds links to its files
            if stat.S_ISREG(about.st_mode):
                packed = file.suffix.lower() in (
                    ".tar",
                    ".tgz",
                    ".gz",
                    ".xz",
                    ".bz2",
                    ".zst",
                    ".zip",
                    ".json",
                )
                total += about.st_size
                parts += 1 if packed else -(-about.st_size // part_bytes)
    return SourceSize(total, parts)


def read_json(path: str) -> small_files.Json:
    """Return the object in a file."""
    try:
        return small_files.read_object(pathlib.Path(path))
    except ValueError as e:
        raise RefusedError(f"{path} is not a JSON object: {e}") from e


def read_baseline(path: str) -> list[small_files.Json]:
    """Return the valid entries of a baseline; [] without a file."""
    entries: list[small_files.Json] = []
    with contextlib.suppress(OSError, ValueError):
        held: typing.Any = small_files.read_object(pathlib.Path(path)).get("entries")
        for entry in _objects(held):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                points = [
                    {"bytes": int(p["bytes"]), "busbw": float(p["busbw"])} for p in entry["points"]
                ]
                names = ("collective", "backend", "created")
                numbers = {name: int(entry[name]) for name in ("nodes", "world_size")}
                if points and min(numbers.values()) > 0:
                    texts = {name: str(entry[name])[:80] for name in names}
                    entries.append(
                        texts
                        | numbers
                        | {"points": points, "average_busbw": float(entry["average_busbw"])}
                    )
    return entries


def shape(entry: small_files.Json) -> tuple[str, ...]:
    """Return the properties that comparable entries of a baseline share."""
    return tuple(str(entry.get(name)) for name in ("collective", "backend", "nodes", "world_size"))


def store_baseline(path: str, entries: list[small_files.Json]) -> None:
    """Write entries to the baseline, each in place of the one of its shape."""
    file = pathlib.Path(path)
    known: list[small_files.Json] = []
    with contextlib.suppress(OSError, ValueError):
        known = _objects(small_files.read_object(file).get("entries"))
    fresh = [shape(entry) for entry in entries]
    kept = [entry for entry in known if shape(entry) not in fresh]
    replace(file, json.dumps({"format": 1, "entries": [*kept, *entries][-500:]}, indent=1) + "\n")


def read_round_trips(path: str) -> dict[str, dict[str, float]]:
    """Return the valid round trips in a file, in ms; {} without a file."""
    trips: dict[str, dict[str, float]] = {}
    with contextlib.suppress(OSError, ValueError):
        held = small_files.read_object(pathlib.Path(path)).get("trips_ms")
        for one, others in _items(held):
            for other, trip_ms in _items(others):
                if type(trip_ms) is float and _NODE.fullmatch(one) and _NODE.fullmatch(other):
                    trips.setdefault(one, {})[other] = trip_ms
    return trips


def store_round_trips(path: str, trips: dict[str, dict[str, float]]) -> None:
    """Write round trips, each in place of the one of its nodes."""
    known = read_round_trips(path)
    for one, others in trips.items():
        known[one] = known.get(one, {}) | others
    if len(known) > MAX_NODES:
        known = trips
    if len(known) <= MAX_NODES:
        replace(pathlib.Path(path), json.dumps({"format": 1, "trips_ms": known}) + "\n")


def _items(value: object) -> list[tuple[str, typing.Any]]:
    return list(typing.cast(small_files.Json, value).items()) if isinstance(value, dict) else []


def open_examination(workspace: str, nonce: str) -> str:
    """Make the folder of doctor's test of the shared workspace, and return it; remove old ones."""
    runs = pathlib.Path(workspace, "runs")
    for path in runs.glob(".doctor-*"):
        if time.time() - path.lstat().st_mtime > 86400:
            shutil.rmtree(path, ignore_errors=True)
    folder = runs / f".doctor-{nonce}"
    folder.mkdir(mode=0o755)
    return str(folder)


def _make(folder: pathlib.Path, hint: str) -> None:
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
    except OSError as e:
        raise RefusedError(f"{folder} cannot be made ({e.strerror}); {hint}") from e


def _untrusted(workspace: str, names: list[str], trusted: list[int]) -> str:
    """Return the folder that other accounts own or can replace, and what to type; or ""."""
    for folder in (workspace, *(f"{workspace}/{name}" for name in names)):
        try:
            ownership.check_folder(folder, frozenset(trusted))
        except FileNotFoundError:
            continue
        except ownership.UntrustedError as e:
            return str(e)
    return ""


def _objects(value: object) -> list[small_files.Json]:
    found = typing.cast(list[object], value) if isinstance(value, list) else []
    return [typing.cast(small_files.Json, entry) for entry in found if isinstance(entry, dict)]

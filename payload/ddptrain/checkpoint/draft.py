"""Checkpoints in the making, their commit, and the removal of old ones."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import errno
import io
import os
import pathlib
import shutil
import typing
import uuid
import zlib

from ddptrain.checkpoint import stored, tensors
from ddptrain.ground import files, log

# Of symlink(2): SMB without Unix extensions and FUSE, or as FAT and the kernel's VFS answer
_NO_LINKS = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EPERM})
_warned: set[pathlib.Path] = set()  # runs' folders

State = dict[str, typing.Any]


class Counted(io.FileIO):
    """A new file that knows its size and CRC-32, so that the manifest needs no second read."""

    error: OSError | None = None  # torch.save raises another in its place
    size_bytes = crc32 = 0

    def write(self, data: typing.Any) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        done = 0
        try:
            while done < view.nbytes:
                done += super().write(view[done:]) or 0
        except OSError as e:
            e.filename = str(self.name)
            self.error = e
            raise
        self.size_bytes += done
        return done


class Draft:
    """A checkpoint in the making: files under a name that no reader looks for, until `commit`."""

    def __init__(self, run_dir: pathlib.Path, name: str, attempt: str) -> None:
        self.final = run_dir / name
        self.path = run_dir / f"{name}{stored.TMP}{attempt}"
        self.listed: list[State] = []  # the manifest's lines

    @property
    def size_bytes(self) -> int:
        """Return the size of the files so far."""
        return sum(entry["bytes"] for entry in self.listed)

    def __enter__(self) -> "Draft":
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def add_dcp(self, state: State) -> None:
        """Write tensors in host memory in torch's distributed format, durable and counted."""
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint import filesystem

        opened: list[Counted] = []

        class Counting(filesystem.FileSystem):
            @contextlib.contextmanager
            def create_stream(
                self, path: typing.Any, mode: str
            ) -> collections.abc.Generator[typing.Any, None, None]:
                with Counted(path, mode) as file:
                    opened.append(file)
                    yield file

        writer = dcp.FileSystemWriter(self.path / tensors.DCP)
        writer.fs = Counting()
        with tensors.plain_errors(
            lambda: next((file.error for file in opened if file.error), None)
        ):
            dcp.save(state, storage_writer=writer, no_dist=True)
        for file in opened:
            name = pathlib.Path(file.name).name.removesuffix(".tmp")
            path = f"{tensors.DCP}/{name}"
            self.listed.append({"file": path, "bytes": file.size_bytes, "crc32": file.crc32})

    def adopt(self, folder: pathlib.Path) -> None:
        """Sync and count the files that someone else wrote into a folder of the draft."""
        self.listed += _entries(self.path, folder)

    def commit(self, meta: State) -> pathlib.Path:
        """Write the manifest and rename the draft to its final name, which is returned."""
        write_manifest(self.path, meta, self.listed)
        trash = _trash(self.final)
        if self.final.exists():  # the same step again, after a crash and a resume from before it
            self.final.rename(trash)
        files.retried(lambda: self.path.rename(self.final))
        files.sync_directory(self.final.parent)
        shutil.rmtree(trash, ignore_errors=True)
        return self.final


def seal(path: pathlib.Path, meta: State) -> None:
    """Complete a checkpoint written under its final name: sync its files, write the manifest."""
    (path / stored.MANIFEST).unlink(missing_ok=True)
    write_manifest(path, meta, _entries(path, path))


def _entries(root: pathlib.Path, folder: pathlib.Path) -> list[State]:
    """Return the manifest's lines for the files below a checkpoint's folder; sync them before."""
    found: list[State] = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with files.naming(path), path.open("rb") as file:
            os.fsync(file.fileno())
        name = str(path.relative_to(root))
        found.append({"file": name, "bytes": path.stat().st_size, "crc32": files.crc32(path)})
    return found


def write_manifest(path: pathlib.Path, meta: State, listed: list[State]) -> None:
    """Write the manifest of a checkpoint, and sync its folders: from then on it is whole."""
    manifest: State = {"format": stored.FORMAT, "meta": meta, "files": listed}
    manifest["crc32"] = stored.manifest_crc32(manifest)
    files.write_json(path / stored.MANIFEST, manifest)
    for folder in {inner.parent for inner in path.rglob("*")}:
        files.sync_directory(folder)


def settle(run_dir: pathlib.Path, path: pathlib.Path, *, is_best: bool, keep: int) -> None:
    """Point the links at a new checkpoint; remove all but the best and the last `keep` ones."""
    point(run_dir / stored.LATEST, path)
    if is_best:
        point(run_dir / stored.BEST, path)
    best = path.name if is_best else stored.best_name(run_dir, path)
    for old in stored.candidates(run_dir)[keep:]:
        if old.name != best:
            with contextlib.suppress(OSError):  # another attempt, or the user, was quicker
                shutil.rmtree(old.rename(_trash(old)), ignore_errors=True)


def point(link: pathlib.Path, path: pathlib.Path) -> None:
    """Point a link at a checkpoint in the same folder.

    On a filesystem without symbolic links, warn once: readers find the newest by its manifest.
    """
    try:
        files.replace_link(link, path.name)
    except OSError as e:
        if e.errno not in _NO_LINKS:
            raise
        if link.parent not in _warned:
            _warned.add(link.parent)
            what = f"{link.parent} is on a filesystem without symbolic links"
            names = f"{stored.LATEST} and {stored.BEST}"
            log.warn("CKPT", f"{what}: no {names}; a resume finds the newest by its manifest")


def _trash(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}{stored.TRASH}{uuid.uuid4().hex[:8]}")


def remove_leftovers(run_dir: pathlib.Path) -> None:
    """Remove the unfinished files of killed attempts; one run has one attempt at a time."""
    for pattern in (f"epoch-*{stored.TMP}*", f"epoch-*{stored.TRASH}*"):
        for path in run_dir.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)

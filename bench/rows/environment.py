"""An environment with torch, archived and unpacked as on a node, against tar and zstd as a script calls them."""

# pyright: basic, reportPrivateImportUsage=false
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

from bench import row
from ddp.environment import packing
from ddp.node import environment, spec

TURNS = 5


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure each in turns, on a copy of this interpreter's environment; a turn begins with all written to disk."""
    if shutil.which("zstd") is None:
        raise row.NotHere("zstd is not installed (Debian: zstd)")
    source = scratch / "env"
    shutil.copytree(sys.prefix, source, symlinks=True)
    ours, theirs = scratch / "ours", scratch / "theirs"
    archives = scratch / "ours.tar.zst", scratch / "theirs.tar.zst"
    packed, unpacked = (row.Laps(), row.Laps()), (row.Laps(), row.Laps())
    for _ in range(TURNS + 1):
        for folder in (ours, theirs):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        os.sync()
        parts = packed[0].measure(lambda: _pack(source, archives[0]))
        os.sync()
        digest = packed[1].measure(lambda: _pack_plainly(source, archives[1]))
        os.sync()
        unpacked[0].measure(lambda parts=parts: _unpack(archives[0], parts, ours))
        os.sync()
        unpacked[1].measure(lambda digest=digest: _unpack_plainly(archives[1], digest, theirs))
        if _files(ours) != _files(theirs):
            raise RuntimeError("the two environments differ")
    for laps in (*packed, *unpacked):
        del laps.wall_s[0]  # the first turn warms the page cache
    mib = sum(path.lstat().st_size for path in source.rglob("*")) >> 20
    about = f"{mib} MiB, {len(_files(ours))} files"
    return [
        _row("environment to archive", packed, f"{about}: tar, zstd -T0 -3, sha256sum"),
        _row("archive to environment", unpacked, f"{about}: sha256sum, zstd -d, tar"),
    ]


def _row(measure: str, laps: tuple[row.Laps, row.Laps], peer: str) -> row.Row:
    ours, theirs = (row.median(one.wall_s) for one in laps)
    return row.Row(measure, ours, theirs, "s", peer, more_is_better=False, goal=1.0, note=laps[0].beside(laps[1]))


def _pack(source: pathlib.Path, target: pathlib.Path) -> list[packing.Part]:
    with target.open("wb") as file:
        _, parts = packing.pack(source, file)
        file.flush()
        os.fsync(file.fileno())
    return parts


def _pack_plainly(source: pathlib.Path, target: pathlib.Path) -> str:
    argv = ["tar", "-C", str(source), "--sort=name", "-I", "zstd -q -T0 -3", "-cf", str(target), "."]
    subprocess.run(argv, check=True)
    subprocess.run(["sync", str(target)], check=True)
    return subprocess.run(["sha256sum", str(target)], check=True, capture_output=True, text=True).stdout.split()[0]


def _unpack(archive: pathlib.Path, parts: list[packing.Part], folder: pathlib.Path) -> None:
    wanted = spec.Archive(str(archive), "", 1, "", tuple(parts))
    with archive.open("rb") as file:
        environment._extract(file.fileno(), wanted, str(folder), "")


def _unpack_plainly(archive: pathlib.Path, digest: str, folder: pathlib.Path) -> None:
    with archive.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise RuntimeError("damaged")
    subprocess.run(["tar", "--zstd", "-x", "-f", str(archive), "-C", str(folder)], check=True)


def _files(folder: pathlib.Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()}

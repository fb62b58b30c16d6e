"""An environment with torch, archived and unpacked as on a node, against tar and zstd as a script calls them."""

# pyright: basic, reportPrivateImportUsage=false
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time
import typing

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
    packed, unpacked = _Both(), _Both()
    for _ in range(TURNS + 1):
        taken: list[tuple[float, float]] = []
        parts = _timed(taken, _pack, source, scratch / "ours.tar.zst", scratch)
        digest = _timed(taken, _pack_plainly, source, scratch / "theirs.tar.zst")
        packed.add(taken)
        taken = []
        for folder in (scratch / "ours", scratch / "theirs"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        _timed(taken, _unpack, scratch / "ours.tar.zst", parts, scratch / "ours")
        _timed(taken, _unpack_plainly, scratch / "theirs.tar.zst", digest, scratch / "theirs")
        unpacked.add(taken)
        if _files(scratch / "ours") != _files(scratch / "theirs"):
            raise RuntimeError("the two environments differ")
    mib = sum(path.lstat().st_size for path in source.rglob("*")) >> 20
    about = f"{mib} MiB, {len(_files(scratch / 'ours'))} files"
    return [
        packed.as_row("environment to archive", f"{about}: tar, zstd -T0 -3, sha256sum"),
        unpacked.as_row("archive to environment", f"{about}: sha256sum, zstd -d, tar"),
    ]


class _Both:
    """Wall and processor seconds of ours and of the peer; the first turn warms the page cache."""

    def __init__(self) -> None:
        self._turns: list[list[tuple[float, float]]] = []

    def add(self, taken: list[tuple[float, float]]) -> None:
        self._turns.append(taken)

    def as_row(self, measure: str, peer: str) -> row.Row:
        turns = self._turns[1:]
        wall, cpu = ([[turn[who][at] for turn in turns] for who in (0, 1)] for at in (0, 1))
        spread = ", ".join(f"{min(walls):.1f} to {max(walls):.1f} s" for walls in wall)
        return row.Row(
            measure, row.median(wall[0]), row.median(wall[1]), "s", peer, more_is_better=False, goal=1.0,
            note=f"{row.median(cpu[1]) / row.median(cpu[0]):.2f} by processor time; {spread}",
        )  # fmt: skip


T = typing.TypeVar("T")
P = typing.ParamSpec("P")


def _timed(taken: list[tuple[float, float]], action: typing.Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    os.sync()
    wall, cpu = time.perf_counter(), _cpu_s()
    result = action(*args, **kwargs)
    taken.append((time.perf_counter() - wall, _cpu_s() - cpu))
    return result


def _cpu_s() -> float:
    """Return the processor seconds of this process and of those that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _pack(source: pathlib.Path, target: pathlib.Path, scratch: pathlib.Path) -> list[packing.Part]:
    with target.open("wb") as file:
        _, parts = packing.pack(source, file, scratch)
        file.flush()
        os.fsync(file.fileno())
    return parts


def _pack_plainly(source: pathlib.Path, target: pathlib.Path) -> str:
    argv = ["tar", "-C", str(source), "--sort=name", "-I", "zstd -q -T0 -3", "-cf", str(target), "."]
    subprocess.run(argv, check=True)
    subprocess.run(["sync", str(target)], check=True)
    return subprocess.run(["sha256sum", str(target)], check=True, capture_output=True, text=True).stdout.split()[0]


def _unpack(archive: pathlib.Path, parts: list[packing.Part], folder: pathlib.Path) -> None:
    wanted = spec.Environment(str(archive), "", "", 1, "", (), "", tuple(parts))
    descriptor = os.open(archive, os.O_RDONLY)
    try:
        environment._extract(descriptor, wanted, str(folder))
    finally:
        os.close(descriptor)


def _unpack_plainly(archive: pathlib.Path, digest: str, folder: pathlib.Path) -> None:
    with archive.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise RuntimeError("damaged")
    subprocess.run(f'zstd -q -d -c "{archive}" | tar -x -C "{folder}"', shell=True, check=True)


def _files(folder: pathlib.Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()}

"""The disk space that files take, counted like du(1), also in words."""

import contextlib
import os
import pathlib

_BLOCK_BYTES = 512  # of st_blocks: stat(2)
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


class Usage:
    """Adds up the space of files; a file with several names counts once."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._seen: set[tuple[int, int]] = set()

    def add(self, path: pathlib.Path) -> int:
        """Add a file, or a folder with all that is in it, and return its bytes.

        Links are not followed; files that vanish during the walk are not counted.
        """
        before = self.total_bytes
        self._add(path)
        if path.is_symlink():
            return self.total_bytes - before
        for folder, inner, names in os.walk(path):
            for name in [*inner, *names]:
                self._add(pathlib.Path(folder, name))
        return self.total_bytes - before

    def _add(self, path: pathlib.Path) -> None:
        with contextlib.suppress(OSError):
            about = path.lstat()
            key = (about.st_dev, about.st_ino)
            if key not in self._seen:
                self._seen.add(key)
                self.total_bytes += about.st_blocks * _BLOCK_BYTES


def in_words(size_bytes: int) -> str:
    """Return a size in words, such as 1.5 GiB."""
    size = size_bytes / 1024
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "KiB" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError(size_bytes)

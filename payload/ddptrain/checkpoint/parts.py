"""The parts of a checkpoint that other sites' leaders write: site-0001/ and so on, in its folder.

A leader writes its part next to rank 0's draft, and rank 0 moves it into the draft once it is
whole. So the parts meet on the shared filesystem, and no rank waits for another one.
"""

# pyright: basic, reportPrivateImportUsage=false
import dataclasses
import pathlib
import threading
import time

from ddptrain.checkpoint import draft, stored
from ddptrain.ground import files

LIMIT_S = 1800.0  # for the slowest link
_LOOK_S = 0.2


@dataclasses.dataclass(frozen=True)
class Place:
    """The site that saves, of how many."""

    site: int
    count: int

    @property
    def is_main(self) -> bool:
        """Return whether it commits the whole."""
        return self.site == 0


ALONE = Place(0, 1)


def folder(site: int) -> str:
    """Return the folder of a site's part in a checkpoint."""
    return f"site-{site:04d}"


def name_of(checkpoint: str, site: int) -> str:
    """Return the name of a site's part while the checkpoint is not whole."""
    return f"{checkpoint}{stored.TMP}{folder(site)}"


def adopt(
    made: draft.Draft, checkpoint: str, site: int, attempt: str, closing: threading.Event
) -> None:
    """Move a site's part into a draft once it is whole. Raises CheckpointError if it never is."""
    path = made.path.with_name(name_of(checkpoint, site))
    deadline = time.monotonic() + LIMIT_S
    while not _is_of(path, attempt):
        if closing.wait(_LOOK_S) or time.monotonic() > deadline:
            what = f"the part of site {site} is not there"
            raise stored.CheckpointError(f"{made.final.name} is not whole: {what}")

    inside = made.path / folder(site)
    path.rename(inside)
    listed = files.read_json(inside / stored.MANIFEST)["files"]
    for entry in listed:
        made.listed.append({**entry, "file": f"{inside.name}/{entry['file']}"})


def _is_of(path: pathlib.Path, attempt: str) -> bool:
    """Return whether a part is whole, and of this attempt."""
    try:
        manifest = files.read_json(path / stored.MANIFEST)
    except FileNotFoundError:
        return False
    return manifest["meta"]["attempt"] == attempt

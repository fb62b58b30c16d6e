"""Signs of a shared filesystem that was lost for a moment."""

import os
import pathlib

from ddp.node import storage


def descriptor_of(path: pathlib.Path) -> int:
    """Return this process's descriptor of a file."""
    (link,) = [
        link
        for link in pathlib.Path("/proc/self/fd").iterdir()
        if link.exists() and link.samefile(path)
    ]
    return int(link.name)


def test_a_file_that_was_held_open_tells_that_its_filesystem_was_lost(tmp_path: pathlib.Path):
    path = tmp_path / "job.json"
    path.write_text("{}")
    witness = storage.Witness(str(path))
    assert witness.trouble() == ""
    os.close(descriptor_of(path))  # as a client that is started again knows no open file
    assert witness.trouble() == "Bad file descriptor"


def test_a_file_that_cannot_be_opened_or_synced_proves_nothing(tmp_path: pathlib.Path):
    assert storage.Witness(str(tmp_path / "missing")).trouble() == ""
    assert storage.Witness("/proc/self/status").trouble() == "", "EINVAL: it knows no fsync"

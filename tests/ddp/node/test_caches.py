"""The caches of a rank's libraries: on the node's own disk, unless the home is there too."""

import os
import pathlib

import hypothesis
import pytest
from hypothesis import strategies as st

from ddp.node import caches

MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 21 0:40 / /home rw shared:1 - nfs4 server:/home rw
31 30 254:1 / /home/local rw - xfs /dev/vdb rw
32 21 0:41 / /mnt/with\\040blank rw - fuse.juicefs JuiceFS:x rw
33 21 0:42 / /scratch rw - autofs systemd-1 rw
34 21 0:43 / /scratch rw - lustre host@tcp:/scratch rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/root", "ext4"),
        ("/home/ann", "nfs4"),
        ("/home", "nfs4"),
        ("/homes/ann", "ext4"),
        ("/home/local/ann", "xfs"),
        ("/mnt/with blank/ann", "fuse.juicefs"),
        ("/scratch/ann", "lustre"),
    ],
)
def test_the_filesystem_of_a_path(path: str, kind: str):
    assert caches.filesystem(path, MOUNTS) == kind


@hypothesis.given(st.text(max_size=200), st.text(max_size=50))
def test_any_text_of_mounts_is_no_error(mounts: str, path: str):
    assert isinstance(caches.filesystem(path, mounts), str)


@pytest.mark.parametrize(
    ("kind", "is_there"), [("ext4", True), ("ext4", False), ("nfs", True), ("fuse.sshfs", True)]
)
def test_caches_leave_a_home_that_is_missing_or_shared(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_there: bool
):
    (tmp_path / "mounts").write_text(f"21 1 254:0 / / rw - {kind} x rw\n")
    monkeypatch.setattr(caches, "_MOUNTS", str(tmp_path / "mounts"))
    home = tmp_path / "home"
    if is_there:
        home.mkdir()
    env = {"HOME": str(home), "TRITON_CACHE_DIR": "/mine", "HF_HOME": "/models"}
    caches.keep_local(env, str(tmp_path / "cache"))
    moved = {name: path for name, path in env.items() if path.startswith(str(tmp_path / "cache"))}
    if kind == "ext4" and is_there:
        assert not moved
    else:
        assert sorted(moved) == ["MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"]
        assert all(os.access(path, os.W_OK) for path in moved.values())
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert (env["TRITON_CACHE_DIR"], env["HF_HOME"]) == ("/mine", "/models")

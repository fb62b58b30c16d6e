"""A machine that will not end, without a system in it: a program that mounts a FUSE filesystem and waits for itself."""

import os
import pathlib
import sys

import pytest

import sandbox.machine
from slurm_ddp import mounts

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONG_S = 120  # a deadline for what takes a moment on a machine with nothing else to do
# One thread asks, another takes the request and keeps it: SIGKILL ends neither, since their shared
# descriptor stays open
STUCK = """
import pathlib, sys, threading
place, ready, *sys.path[:0] = sys.argv[1:]
import mount_scene
place, ready = pathlib.Path(place), pathlib.Path(ready)
device, taken = mount_scene.mount_fuse(place), threading.Event()
threading.Thread(target=mount_scene.serve, args=(device, mount_scene._FUSE_LOOKUP, taken), daemon=True).start()
threading.Thread(target=(place / "name").exists, daemon=True).start()
taken.wait()
ready.touch()
threading.Event().wait()
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK),
    reason="mounts a FUSE filesystem as root",
)
@pytest.mark.skipif(
    pathlib.Path("/run/systemd/system").is_dir(),
    reason="systemd runs this computer, and its machines",
)
def test_a_machine_whose_fuse_client_waits_for_itself_is_ended(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    nspawn, place, ready = tmp_path / "systemd-nspawn", tmp_path / "mnt", tmp_path / "ready"
    nspawn.symlink_to(
        "/usr/bin/unshare"
    )  # a process of that name, with the machine's first process below it
    place.mkdir()
    monkeypatch.setattr(sandbox.machine, "NSPAWN", str(nspawn))
    machine = sandbox.machine.machine(f"test-{os.getpid()}", tmp_path)
    paths = map(str, (place, ready, ROOT / "lib", ROOT / "tests" / "lib"))
    # The first process is another one, and ends when all others did
    first = ["/bin/sh", "-c", '"$@"; exit', "first"]
    machine.launch(["--mount", "--pid", "--fork", *first, sys.executable, "-c", STUCK, *paths])
    try:
        assert sandbox.machine.wait_until(ready.exists, LONG_S), machine.last_words()
        assert machine.is_kept_running()
    finally:
        machine.kill()
    assert not machine.is_kept_running()
    assert mounts.at(place) == []

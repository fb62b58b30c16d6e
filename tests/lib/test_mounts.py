import json
import os
import pathlib
import subprocess
import sys
import time
import typing

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slurm_ddp import mount_child, mounts, processes

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

SCENE = pathlib.Path(__file__).with_name("mount_scene.py")
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def can_unshare() -> bool:
    try:
        return (
            subprocess.run(
                [*UNSHARE, "true"], capture_output=True, timeout=10, check=False
            ).returncode
            == 0
        )
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(
    not can_unshare(), reason="this machine allows no user namespaces, in which the scenes mount"
)


@pytest.fixture
def play(tmp_path: pathlib.Path) -> typing.Callable[[str], typing.Any]:
    """Return a function that plays a scene in new namespaces and returns its result."""

    def played(scene: str) -> typing.Any:
        env = os.environ | {"PYTHONPATH": str(pathlib.Path(mounts.__file__).parent.parent)}
        argv = [*UNSHARE, sys.executable, str(SCENE), scene, str(tmp_path)]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=240, env=env, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.partition("ANSWER ")[2])

    return played


MOUNTINFO = r"""
22 27 0:20 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
379 27 0:71 / /mnt/shared rw,nosuid,nodev,relatime - fuse.juicefs JuiceFS:train rw,user_id=0,allow_other
380 27 0:72 / /mnt/a\040b\134c\011d ro,relatime shared:1 master:2 - nfs4 server:/ex\040port rw,vers=4.2
381 27 0:73 / /net rw - autofs systemd-1 rw,fd=40
382 381 0:74 / /net rw - nfs4 s:/x rw
383 27 0:75 / /mnt/shared/inner rw - tmpfs  rw
not a line
"""


def test_the_table_is_read_with_its_escapes_and_optional_fields():
    found = mounts.table(MOUNTINFO)
    places = [mount.mountpoint for mount in found]  # the automounter of /net is none
    assert places == ["/sys", "/", "/mnt/shared", "/mnt/a b\\c\td", "/net", "/mnt/shared/inner"]
    share = found[3]
    assert (share.id, share.device, share.fstype, share.source) == (
        380,
        "0:72",
        "nfs4",
        "server:/ex port",
    )
    assert share.read_only
    assert not found[2].read_only
    assert found[2].source == "JuiceFS:train"


@pytest.mark.parametrize(("path", "mountpoint"), CASES["the_mount_of_a_path"])
def test_the_mount_of_a_path(path: str, mountpoint: str):
    found = mounts.find(path, mounts.table(MOUNTINFO))
    assert found is not None
    assert found.mountpoint == mountpoint


@given(st.binary(min_size=1), st.binary(min_size=1))
def test_any_name_survives_the_kernels_escaping(name: bytes, source: bytes):
    def escaped(
        raw: bytes,
    ) -> str:  # fs/proc_namespace.c, mangle(): space, tab, newline, backslash and hash
        text = b"".join(b"\\%03o" % byte if byte in b" \t\n\\#" else bytes([byte]) for byte in raw)
        return text.decode("utf-8", "surrogateescape")

    path = os.fsdecode(b"/" + name.replace(b"/", b"-"))
    line = f"9 8 0:1 / /{escaped(os.fsencode(path)[1:])} rw - tmpfs {escaped(source)} rw"
    (mount,) = mounts.table(line)
    assert mount.mountpoint == path
    assert mount.source == os.fsdecode(source)


def test_a_real_mount_is_right_without_being_root():
    assert mounts.probe("/proc", fstype="proc") == mounts.Result(mounts.State.RIGHT)


@needs_namespaces
def test_right_again_and_again_and_nothing_is_left(play: typing.Callable[[str], typing.Any]):
    found, files = play("right")
    assert found == [["right", ""], ["right", ""]]
    assert files == [".mount-probe"]


@needs_namespaces
def test_stacked_mounts_are_seen_and_cleared(
    play: typing.Callable[[str], typing.Any], tmp_path: pathlib.Path
):
    before, count, after = play("stacked")
    assert before == ["stacked", f"2 mounts lie at {tmp_path}"]
    assert count == 2
    assert after[0] == "absent"


@needs_namespaces
def test_a_mount_without_its_daemon_is_stale_and_cleared(
    play: typing.Callable[[str], typing.Any], tmp_path: pathlib.Path
):
    before, count, after = play("stale")
    assert before == ["stale", f"{tmp_path} does not open: transport endpoint is not connected"]
    assert (count, after[0]) == (1, "absent")


@needs_namespaces
def test_a_mount_that_never_answers_hangs_nobody(
    play: typing.Callable[[str], typing.Any], tmp_path: pathlib.Path
):
    opened, first, second, after = play("hung")  # the second look starts no child
    assert opened  # the daemon did take the request
    assert first == ["hung", f"{tmp_path} did not answer within 3 s"]
    assert second[0] == "hung"
    assert second[1].startswith(f"{tmp_path} has not answered since ")
    assert after[0] == "absent"


@needs_namespaces
def test_a_clients_cache_does_not_count_as_an_answer(
    play: typing.Callable[[str], typing.Any], tmp_path: pathlib.Path
):
    """JuiceFS opens its root without its engine: a mount would be right for up to a minute after that died."""
    assert play("forgetful") == [True, ["hung", f"{tmp_path} did not answer within 3 s"]]


@needs_namespaces
def test_a_mount_that_answers_while_a_write_hangs_is_slow_not_hung(
    play: typing.Callable[[str], typing.Any], tmp_path: pathlib.Path
):
    """Under heavy writing a small write waits for minutes: to kill that client would be wrong."""
    asked, first, second, reader = play("unwritten")
    assert asked
    assert first == ["slow", f"{tmp_path} answers, but a small write did not end within 3 s"]
    assert second[0] == "slow"
    assert second[1].startswith(f"{tmp_path} answers, but a small write has not ended since ")
    assert reader == ["right", ""]


def test_whoever_has_something_open_below_the_folder_uses_it(tmp_path: pathlib.Path):
    (tmp_path / "ab").mkdir()
    child = subprocess.Popen(["/bin/sleep", "60"], cwd=tmp_path / "ab")
    try:
        assert (child.pid, "sleep") in processes.users(tmp_path / "ab")  # by its working directory
        assert (child.pid, "sleep") in processes.users(tmp_path)
        assert processes.users(tmp_path / "a") == []  # a name that only begins like it
    finally:
        child.kill()
        child.wait()
    with (tmp_path / "ab/file").open("w"):
        assert [pid for pid, _ in processes.users(f"{tmp_path}/ab/")] == [os.getpid()]


def test_a_removed_probe_leaves_nothing_in_juicefs_trash(tmp_path: pathlib.Path):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder/file"
    path.touch()
    hour = time.strftime("%Y-%m-%d-%H", time.gmtime())
    kept = tmp_path / ".trash" / hour / f"{path.parent.stat().st_ino}-{path.stat().st_ino}-file"
    kept.parent.mkdir(parents=True)
    kept.touch()
    mount_child.remove(path)
    assert list(tmp_path.rglob("*file*")) == []


def test_the_helper_needs_the_standard_library_only():
    code = f"import runpy; runpy.run_path({mounts.__file__!r}, run_name='helper')"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

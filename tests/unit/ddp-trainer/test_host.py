"""The login host: folders handed over, and the wheelhouse shared."""

import os
import pathlib
import pwd

import pytest

import host

NOBODY = pwd.getpwnam("nobody")
FOLDERS = ["runs", "datasets", "environments", "baselines", ".secrets"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root hands folders over")


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_a_workspace_of_roots_is_handed_over(workspace: pathlib.Path, mode: int):
    workspace.chmod(mode)
    host.hand_over(str(workspace), FOLDERS, NOBODY)
    assert {(workspace / name).stat().st_uid for name in FOLDERS} == {NOBODY.pw_uid}
    assert (workspace / ".secrets").stat().st_mode & 0o7777 == 0o700
    users = (workspace / "users").stat()
    assert (workspace.stat().st_uid, users.st_uid, users.st_mode & 0o7777) == (0, 0, 0o1777), (
        "everybody's own"
    )


@needs_root
def test_root_touches_nothing_in_a_workspace_that_others_can_change(workspace: pathlib.Path):
    workspace.chmod(0o777)
    with pytest.raises(PermissionError, match="mode 777"):
        host.hand_over(str(workspace), ["runs"], NOBODY)
    host.hand_over(str(workspace), [], NOBODY)
    assert not list(workspace.iterdir())


@needs_root
def test_root_follows_no_link_and_takes_nothing_from_a_third_account(
    workspace: pathlib.Path, tmp_path: pathlib.Path
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (workspace / "runs").symlink_to(elsewhere)
    with pytest.raises(OSError, match="Not a directory"):
        host.hand_over(str(workspace), ["runs"], NOBODY)
    assert elsewhere.stat().st_uid == 0
    (workspace / "datasets").mkdir()
    os.chown(workspace / "datasets", 33, 33)
    with pytest.raises(PermissionError, match="belongs to uid 33"):
        host.hand_over(str(workspace), ["datasets"], NOBODY)


def test_an_attached_wheelhouse_is_copied_once_and_can_be_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host, "WHEELHOUSE", tmp_path / "shared" / "wheelhouse")
    attached = tmp_path / "resource"
    attached.touch(mode=0o600)
    assert not host.share(attached), "a placeholder is none"
    attached.write_bytes(b"wheels")
    copy = pathlib.Path(host.share(attached))
    assert (copy.read_bytes(), copy.stat().st_mode & 0o777) == (b"wheels", 0o644)
    inode = copy.stat().st_ino
    assert host.share(attached) == str(copy)
    assert copy.stat().st_ino == inode
    assert not host.share(None)
    assert not copy.exists()

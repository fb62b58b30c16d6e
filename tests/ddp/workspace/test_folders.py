"""The workspace: real files and folders, with any user content."""

import json
import os
import pathlib
import pwd
import stat
import threading

import pytest
import yaml

from ddp.settings import Settings
from ddp.workspace import folders, operations

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())


def test_the_folders_are_made_once(settings: Settings):
    for path in settings.workspace.path.iterdir():
        path.rmdir()
    settings.workspace.ensure_folders()
    before = {path.name: path.stat().st_mtime_ns for path in settings.workspace.path.iterdir()}
    settings.workspace.ensure_folders()
    assert {
        path.name: path.stat().st_mtime_ns for path in settings.workspace.path.iterdir()
    } == before
    assert set(before) == {"runs", "datasets", "environments", "baselines", ".secrets"}
    assert stat.S_IMODE((settings.workspace.path / ".secrets").stat().st_mode) == 0o700


def test_in_a_workspace_of_the_trainers_own_it_makes_the_users_folder(settings: Settings):
    for _ in range(2):
        settings.workspace.do(operations.make_users, workspace=str(settings.workspace.path))
        assert stat.S_IMODE((settings.workspace.path / "users").stat().st_mode) == 0o1777
    (settings.workspace.path / "users").rmdir()
    os.chown(settings.workspace.path, 33, 33)
    settings.workspace.do(operations.make_users, workspace=str(settings.workspace.path))
    assert not (settings.workspace.path / "users").exists(), "root makes it in root's"


def test_a_filesystem_that_hangs_is_given_up(settings: Settings):
    gate = threading.Event()

    def hang() -> dict[str, object]:
        gate.wait(60)
        return {}

    with pytest.raises(folders.HangingError) as caught:
        settings.workspace.do(hang, timeout_s=0.1)
    gate.set()
    assert (
        str(caught.value)
        == f"{settings.workspace.path} gave no answer within 0.1 s; is the filesystem's server up?"
    )


def test_an_operation_that_is_refused_says_why(settings: Settings):
    with pytest.raises(folders.MissingError, match=r"/nothing: No such file or directory$"):
        settings.workspace.read_json(str(settings.workspace.path / "nothing"))
    (settings.workspace.path / "note").write_text("[]")
    with pytest.raises(folders.WorkspaceError, match="is not a JSON object"):
        settings.workspace.read_json(str(settings.workspace.path / "note"))


@pytest.mark.parametrize("name", folders.FOLDERS)
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_folder_that_another_account_made_first_is_named(
    settings: Settings, name: str, mode: int
):
    """In a sticky root anybody can squat on a name; what lies there is never used."""
    settings.workspace.path.chmod(0o1777)
    squatted = settings.workspace.path / name
    squatted.mkdir(exist_ok=True)
    squatted.chmod(mode)
    os.chown(squatted, 33, 33)
    owner = pwd.getpwuid(os.geteuid()).pw_name
    message = f"{squatted} belongs to uid 33 (mode {mode:04o}), which is none of the trusted 0: chown {owner} {squatted}, or remove it"
    assert settings.workspace.look().untrusted == message
    assert squatted.stat().st_uid == 33


def test_a_link_in_place_of_a_folder_is_named(settings: Settings, tmp_path: pathlib.Path):
    (tmp_path / "elsewhere").mkdir()
    (settings.workspace.path / "environments").rmdir()
    (settings.workspace.path / "environments").symlink_to(tmp_path / "elsewhere")
    assert settings.workspace.look().untrusted.startswith(
        f"{settings.workspace.path}/environments is a symbolic link"
    )


@pytest.mark.parametrize("mode", [0o755, 0o1777, 0o1775, 0o700])
def test_a_workspace_that_nobody_can_change_for_others_is_trusted(settings: Settings, mode: int):
    settings.workspace.path.chmod(mode)
    assert settings.workspace.look().untrusted == ""


@pytest.mark.parametrize("name", [".", "..", "environments"])
def test_a_folder_that_others_can_write_is_named(settings: Settings, name: str):
    folder = pathlib.Path(os.path.normpath(settings.workspace.path / name))
    folder.chmod(0o777)
    message = "without the sticky bit, so any account can replace what is in it: chmod +t"
    assert settings.workspace.look().untrusted == f"{folder} has mode 0777 {message} {folder}"


def manifest(settings: Settings, digit: str = "a", **more: object) -> dict[str, object]:
    record = {
        "key": "1" * 16,
        "hash": digit * 16,
        "sha256": digit * 64,
        "size_bytes": 3,
        "unpacked_bytes": 9,
        "python": "3.12",
        "torch": "2.13.0+cpu",
        "build": "cpu",
        "created": f"2026-11-2{ord(digit) % 10}T00:00:00Z",
        **more,
    }
    (settings.workspace.environments / f"{digit * 16}.tar.zst").write_text("xyz")
    (settings.workspace.environments / f"{digit * 16}.json").write_text(json.dumps(record))
    return record


def test_environments_and_datasets_of_the_workspace_are_listed(settings: Settings):
    manifest(settings, "a")
    manifest(settings, "b")
    (settings.workspace.datasets / "web").mkdir()
    (settings.workspace.datasets / "web" / "dataset.json").write_text("{}")
    (settings.workspace.datasets / "half").mkdir()
    found = settings.workspace.look()
    assert [one.hash for one in found.environments] == ["b" * 16, "a" * 16], "the newest first"
    assert found.datasets == {"web": str(settings.workspace.datasets / "web")}
    assert found.is_writable


@pytest.mark.parametrize("more", CASES["a_manifest_that_is_not_ours_is_passed_over"])
def test_a_manifest_that_is_not_ours_is_passed_over(settings: Settings, more: dict[str, object]):
    manifest(settings, "a", **more)
    (settings.workspace.environments / "note.json").write_text("[]")
    (settings.workspace.environments / "broken.json").write_text("{")
    os.mkfifo(settings.workspace.environments / "pipe.json")
    assert settings.workspace.look().environments == ()


def test_where_a_path_leads(settings: Settings, tmp_path: pathlib.Path):
    inside, outside = settings.workspace.path / "a.py", tmp_path / "b.py"
    inside.write_text("")
    outside.write_text("")
    (settings.workspace.path / "in").symlink_to("a.py")
    (settings.workspace.path / "out").symlink_to(outside)
    (settings.workspace.path / "loop").symlink_to("loop")
    locate = settings.workspace.locate
    assert locate(str(inside)) == operations.Place("file", str(inside), True, True)
    assert locate(str(settings.workspace.path / "in")).real == str(inside)
    assert not locate(str(settings.workspace.path / "out")).is_inside
    assert locate(str(settings.workspace.runs)).kind == "folder"
    assert locate(str(settings.workspace.path / "no")).kind == "absent"
    assert not locate(str(settings.workspace.path)).is_inside, "the workspace itself is not in it"
    assert not locate("/dev/null").is_inside
    assert locate("/dev/null").kind == "other"
    with pytest.raises(folders.WorkspaceError, match="Too many levels of symbolic links"):
        locate(str(settings.workspace.path / "loop"))

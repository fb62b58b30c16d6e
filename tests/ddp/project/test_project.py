"""The project of a script: what belongs to it, and its copy, from real repositories and folders."""

import os
import pathlib
import shutil
import socket
import stat
import subprocess

import pytest

from ddp.problem import ParameterError
from ddp.project import contents, writer
from ddp.project import root as code


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    """Nothing of the developer's git, home and repositories above the tests takes part."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "gitconfig").write_text(
        '[user]\nname = A\nemail = a@example.com\n[protocol "file"]\nallow = always\n'
    )


@pytest.fixture
def project(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "project"


def write(root: pathlib.Path, *names: str, **files: str) -> None:
    """Make empty files by their names, and files with a text: `a__b_py` is a/b.py."""
    for name, text in [*((name, "") for name in names), *files.items()]:
        path = root / (name if name in names else name.replace("__", "/").replace("_", "."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def git(folder: pathlib.Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", folder, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(folder: pathlib.Path) -> str:
    if not (folder / ".git").exists():
        git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "one")
    return git(folder, "rev-parse", "HEAD")


def names(script: pathlib.Path, *own: pathlib.Path) -> set[str]:
    return set(code.find(script, own=own).files)


def test_a_repository_from_its_top_with_edits_and_new_files(project: pathlib.Path):
    write(project, "common.py", "exp/train.py", "gone.py", _gitignore="*.log\nsecret/\n")
    head = commit(project)
    write(project, "exp/new.py", "exp/out.log", "secret/key", exp__train_py="edited")
    (project / "gone.py").unlink()
    found = code.find(project / "exp" / "train.py")
    assert set(found.files) == {"common.py", "exp/train.py", "exp/new.py", ".gitignore"}
    assert (found.root, found.script, found.commit) == (project, "exp/train.py", f"{head}-dirty")
    assert found.size_bytes == sum((project / name).stat().st_size for name in found.files)


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_commit_is_recorded_if_there_is_one(project: pathlib.Path, is_committed: bool):
    write(project, "train.py")
    git(project.parent, "init", "-q", str(project))
    if is_committed:
        commit(project)
    write(project, "__pycache__/train.pyc")
    found = code.find(project / "train.py")
    assert (len(found.commit), found.files) == (40 * is_committed, ("train.py",))


def test_submodules_and_repositories_inside(project: pathlib.Path, tmp_path: pathlib.Path):
    write(tmp_path / "lib", "inner.py")
    commit(tmp_path / "lib")
    write(project, "train.py")
    commit(project)
    git(project, "submodule", "--quiet", "add", str(tmp_path / "lib"), "sub")
    git(project, "submodule", "--quiet", "add", str(tmp_path / "lib"), "absent")
    commit(project)
    git(project, "submodule", "--quiet", "deinit", "-f", "absent")
    write(project / "clone", "a.py")
    commit(project / "clone")
    assert names(project / "train.py") == {"train.py", ".gitmodules", "sub/inner.py", "clone/a.py"}


def test_ignored_files_that_a_build_made_are_sent_along(project: pathlib.Path):
    write(
        project,
        "train.py",
        "net/__init__.py",
        _gitignore="_version.py\n*.so\nbuild/\n*.bin\nvenv/\n",
    )
    commit(project)
    write(
        project,
        "net/_version.py",
        "net/fast.so",
        "net/big.bin",
        "build/lib/x.py",
        "venv/pyvenv.cfg",
        "venv/a.py",
    )
    kept = {"train.py", "net/__init__.py", ".gitignore"}
    assert names(project / "train.py") == kept | {"net/_version.py", "net/fast.so", "net/big.bin"}
    assert code.find(project / "train.py").left_out == ("build/",)
    write(project, _ddpignore="!*.bin\n*.so\n")
    assert names(project / "train.py") == kept | {"net/_version.py", "net/big.bin", ".ddpignore"}


def test_ignored_data_is_copied_for_the_user_alone_and_what_is_not_copied_is_named(
    project: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """As in nanoGPT: a script in data/ makes *.bin and *.pkl, ignored by git.

    out/ has an old run.
    """
    write(
        project, "train.py", "data/tiny/prepare.py", _gitignore="*.bin\n*.pkl\n/out\ngen/\n.env\n"
    )
    commit(project)
    write(
        project,
        "out/ckpt.pt",
        "gen/a_pb2.py",
        ".env",
        "data/tiny/meta.pkl",
        "data/other/train.bin",
        "x.egg-info/a",
    )
    for name, size in (("train.bin", 30), ("val.bin", 60)):
        (project / "data" / "tiny" / name).write_bytes(bytes(size))
    monkeypatch.setattr(contents, "IGNORED_BYTES", 80)
    found = code.find(project / "train.py")
    data = {"data/tiny/train.bin", "data/tiny/meta.pkl"}
    assert set(found.files) == {
        "train.py",
        "data/tiny/prepare.py",
        ".gitignore",
        "x.egg-info/a",
        *data,
    }
    assert set(found.left_out) == {"data/other/", "data/tiny/val.bin", "gen/", "out/"}
    writer.write(found, tmp_path / "copy")
    readable = {name for name in found.files if (tmp_path / "copy" / name).stat().st_mode & 0o077}
    assert readable == {*found.files} - data


@pytest.mark.parametrize("marker", ["pyproject.toml", ".ddpignore", None])
def test_without_git_the_nearest_marked_folder_or_the_script_s(
    project: pathlib.Path, marker: str | None
):
    write(
        project,
        "lib/a.py",
        "exp/train.py",
        "exp/data/a.csv",
        "exp/.hidden",
        *([marker] if marker else []),
    )
    write(
        project,
        "exp/__pycache__/train.pyc",
        "exp/venv/pyvenv.cfg",
        "exp/venv/lib/a.py",
        "exp/old/CACHEDIR.TAG",
    )
    found = code.find(project / "exp" / "train.py")
    below = "exp/" if marker else ""
    expected = {f"{below}train.py", f"{below}data/a.csv", f"{below}.hidden"} | (
        {"lib/a.py", marker} if marker else set()
    )
    assert (set(found.files), found.commit) == (expected, "")


def test_a_folder_that_git_ignores_is_a_project_itself(project: pathlib.Path):
    write(project, "a.py", "scratch/train.py", "scratch/b.py", _gitignore="scratch/\n")
    commit(project)
    assert names(project / "scratch" / "train.py") == {"train.py", "b.py"}


def test_a_hook_s_variables_do_not_lead_to_another_repository(
    project: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    for folder, name in ((project, "train.py"), (tmp_path / "other", "b.py")):
        write(folder, name)
        commit(folder)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert names(project / "train.py") == {"train.py"}


@pytest.mark.parametrize("is_repository", [True, False])
def test_ddpignore(project: pathlib.Path, is_repository: bool):
    write(
        project, "train.py", "data/a.csv", "data/keep.csv", "deep/top.txt", "top.txt", "closed/a.py"
    )
    write(project, _ddpignore="*.csv\n!keep.csv\n/top.txt\n# a comment\ntrain.py\nclosed/\n")
    if is_repository:
        commit(project)
    assert names(project / "train.py") == {
        "train.py",
        "data/keep.csv",
        "deep/top.txt",
        ".ddpignore",
    }


@pytest.mark.parametrize("is_repository", [True, False])
def test_of_a_home_and_of_the_workspace_s_own_folders_the_script_alone(
    tmp_path: pathlib.Path, is_repository: bool
):
    for folder in (tmp_path / "home", tmp_path / "shared"):
        write(folder, "train.py", ".ssh/id", "pyproject.toml", "tools/a.py")
        if is_repository:
            commit(folder)
        assert names(folder / "train.py", tmp_path / "shared") == {"train.py"}
    write(tmp_path / "home", "exp/fit.py", "exp/lib.py")
    if not is_repository:
        assert names(tmp_path / "home" / "exp" / "fit.py") == {"fit.py", "lib.py"}


def test_a_link_to_the_script_is_followed_as_python_does(
    project: pathlib.Path, tmp_path: pathlib.Path
):
    write(project, "train.py", "common.py")
    (tmp_path / "here.py").symlink_to(project / "train.py")
    assert code.find(tmp_path / "here.py").root == project


def copied(script: pathlib.Path) -> pathlib.Path:
    target = script.parents[1] / "copy"
    writer.write(code.find(script), target)
    return target


def test_modes_times_and_odd_names_are_kept(project: pathlib.Path):
    write(project, "train.py", "ro/a", run_sh="#!/bin/sh")
    odd = project / os.fsdecode(b"caf\xe9\n\xff.py")
    odd.write_text("odd")
    (project / "run.sh").chmod(0o4755)
    (project / "train.py").chmod(0o600)
    os.utime(project / "run.sh", ns=(1, 1_600_000_000_123_456_789))
    target = copied(project / "train.py")
    assert stat.S_IMODE((target / "run.sh").stat().st_mode) == 0o755  # no setuid
    assert stat.S_IMODE((target / "train.py").stat().st_mode) == 0o600
    assert (target / "run.sh").stat().st_mtime_ns == 1_600_000_000_123_456_789
    assert (target / odd.name).read_text() == "odd"
    (project / "train.py").write_text("edited")
    assert (target / "train.py").read_text() == ""


def test_links_lead_where_they_led_and_nothing_outside_is_copied(
    project: pathlib.Path, tmp_path: pathlib.Path
):
    write(tmp_path, "data/a.csv", key="private")
    write(project, "train.py", "lib/a.py", "big/b.bin", _ddpignore="big/\n")
    links = {
        "near": "lib/a.py",
        "lib/up": "../train.py",
        "absolute": str(project / "lib"),
        "chain": "near",
    }
    links |= {
        "key": "../key",
        "data": str(tmp_path / "data"),
        "left": "big",
        "broken": "nothing",
        "self": "self",
    }
    for name, target in links.items():
        (project / name).symlink_to(target)
    copy = copied(project / "train.py")
    shutil.move(project, tmp_path / "moved")
    outside = {"key": str(tmp_path / "key"), "left": str(project / "big")}
    expected = links | {"chain": "lib/a.py", "absolute": "lib"} | outside
    assert {name: str((copy / name).readlink()) for name in links} == expected
    assert (copy / "data/a.csv").exists()


def test_pipes_and_devices_are_never_opened(project: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    write(project, "train.py")
    os.mkfifo(project / "pipe")
    monkeypatch.chdir(project)  # a socket's path has 107 characters at most
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        assert [path.name for path in copied(project / "train.py").iterdir()] == ["train.py"]


def test_a_file_that_goes_meanwhile_is_left_out_unless_it_is_the_script(
    project: pathlib.Path, tmp_path: pathlib.Path
):
    write(project, "train.py", "a.py")
    found = code.find(project / "train.py")
    (project / "a.py").unlink()
    writer.write(found, tmp_path / "copy")
    (project / "train.py").unlink()
    with pytest.raises(
        ParameterError, match=r"train\.py: was removed while it was copied; submit again"
    ):
        writer.write(found, tmp_path / "again")


@pytest.mark.parametrize("is_repository", [True, False])
def test_too_many_files_are_named_by_folder(
    project: pathlib.Path, is_repository: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(code, "LIMIT_FILES", 50)
    write(project, "train.py", "lib/a.py", *(f"data/images/{number}" for number in range(60)))
    if is_repository:
        commit(project)
    with pytest.raises(ParameterError) as e:
        code.find(project / "train.py")
    assert str(e.value).startswith(
        f"workload: {project}: has more than 50 files, most of it in data, "
    )
    assert str(e.value).endswith(
        f"list what the job does not need in {project}/.ddpignore, or give --no-snapshot"
    )
    write(project, _ddpignore="images\n")
    assert names(project / "train.py") == {"train.py", "lib/a.py", ".ddpignore"}


def test_too_large_files_are_named_by_folder(project: pathlib.Path):
    write(project, "train.py", "weights/w.bin")
    with (project / "weights" / "w.bin").open("wb") as file:
        file.truncate(3 * 2**30)  # a hole
    with pytest.raises(ParameterError, match=r"more than 256 MiB, most of it in weights, "):
        code.find(project / "train.py")


def test_a_file_that_cannot_be_read_is_named(
    project: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    write(project, "train.py", "a.py")

    def denied(source: pathlib.Path, target: pathlib.Path) -> None:
        if source.name == "a.py":
            raise PermissionError(13, "Permission denied", str(source))
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(writer.shutil, "copyfile", denied)
    with pytest.raises(
        ParameterError, match=r"a\.py: cannot be copied: Permission denied; list what the job"
    ):
        copied(project / "train.py")


@pytest.mark.parametrize("name", ["absent.py", "", "loop"])
def test_paths_that_are_not_scripts_are_refused(project: pathlib.Path, name: str):
    project.mkdir()
    (project / "loop").symlink_to("loop")
    with pytest.raises(ParameterError, match="is not a file; give the path of a script"):
        code.find(project / name)


def test_a_repository_that_git_cannot_read_is_named(
    project: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    write(project, "train.py")
    commit(project)
    with monkeypatch.context() as context:
        context.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own tests
        with pytest.raises(
            ParameterError, match=f"git config --global --add safe.directory {project}"
        ):
            code.find(project / "train.py")
    (project / ".git" / "index").write_text("no index")
    with pytest.raises(ParameterError, match="repair the repository, or give --no-snapshot"):
        code.find(project / "train.py")

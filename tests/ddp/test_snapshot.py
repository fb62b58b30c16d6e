"""The code of a run, copied from real repositories and folders."""

import collections.abc
import os
import pathlib
import shutil
import socket
import stat
import subprocess
import sys
import time

import pytest

from ddp import snapshot


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    """Nothing of the developer's git, home and repositories above the tests takes part."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "gitconfig").write_text('[user]\nname = A\nemail = a@example.com\n[protocol "file"]\nallow = always\n')


@pytest.fixture
def project(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "project"


@pytest.fixture
def code(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where a run's code is kept."""
    (tmp_path / "runs" / "night").mkdir(parents=True)
    return tmp_path / "runs" / "night" / "code"


def write(root: pathlib.Path, **files: str) -> None:
    """Make files: `a__b_py` is a/b.py."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def git(folder: pathlib.Path, *words: str) -> str:
    return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: pathlib.Path) -> str:
    if not (folder / ".git").exists():
        git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "one")
    return git(folder, "rev-parse", "HEAD")


def names(root: pathlib.Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}


# --- what belongs to it ----------------------------------------------------------------------------------------------


def test_a_repository_is_kept_from_its_top_with_edits_and_new_files(project: pathlib.Path, code: pathlib.Path):
    write(project, common_py="x = 1", exp__train_py="old", gone_py="", _gitignore="*.log\nsecret/\n")
    head = commit(project)
    write(project, exp__train_py="edited", exp__new_py="new", exp__out_log="noise", secret__key="k")
    (project / "gone.py").unlink()
    kept = snapshot.take(project / "exp" / "train.py", code)
    assert names(code) == {"common.py", "exp/train.py", "exp/new.py", ".gitignore"}
    assert kept.path.read_text() == "edited"
    assert (kept.script, kept.commit, kept.is_dirty, kept.num_files) == ("exp/train.py", head, True, 4)
    assert kept.size_bytes == sum((code / name).stat().st_size for name in names(code))


def test_what_is_committed_is_not_dirty(project: pathlib.Path, code: pathlib.Path):
    write(project, train_py="x")
    commit(project)
    write(project, __pycache____train_pyc="made again")
    assert not snapshot.take(project / "train.py", code).is_dirty


def test_a_repository_without_a_commit(project: pathlib.Path, code: pathlib.Path):
    write(project, train_py="x")
    git(project, "init", "-q")
    kept = snapshot.take(project / "train.py", code)
    assert (kept.commit, kept.is_dirty, names(code)) == (None, True, {"train.py"})


def test_submodules_and_repositories_inside(project: pathlib.Path, tmp_path: pathlib.Path, code: pathlib.Path):
    write(tmp_path / "lib", inner_py="one", _gitignore="*.bin")
    commit(tmp_path / "lib")
    write(project, train_py="x")
    commit(project)
    git(project, "submodule", "--quiet", "add", str(tmp_path / "lib"), "sub")
    git(project, "submodule", "--quiet", "add", str(tmp_path / "lib"), "absent")
    commit(project)
    git(project, "submodule", "--quiet", "deinit", "-f", "absent")
    write(project / "sub", inner_py="edited", new_py="", data_bin="")
    write(project / "clone", a_py="")
    commit(project / "clone")
    kept = snapshot.take(project / "train.py", code)
    assert names(code) == {
        "train.py", ".gitmodules", "sub/inner.py", "sub/new.py", "sub/.gitignore", "clone/a.py",
    }  # fmt: skip
    assert (code / "sub/inner.py").read_text() == "edited"
    assert kept.is_dirty


def test_without_git_a_folder_is_kept_whole(project: pathlib.Path, code: pathlib.Path):
    write(project, train_py="x", data__a_csv="1", _hidden="h")
    write(project, __pycache____train_pyc="", venv__pyvenv_cfg="", venv__lib__a_py="", old__CACHEDIR_TAG="", old__b="")
    (project / "out").mkdir()
    kept = snapshot.take(project / "train.py", code)
    assert names(code) == {"train.py", "data/a.csv", ".hidden"}
    assert (code / "out").is_dir()  # a script may expect it
    assert (kept.commit, kept.is_dirty, kept.num_files) == (None, False, 3)


def test_a_script_that_git_ignores_has_its_folder_kept(project: pathlib.Path, code: pathlib.Path):
    write(project, a_py="", scratch__train_py="x", scratch__b_py="", _gitignore="scratch/\n")
    commit(project)
    kept = snapshot.take(project / "scratch" / "train.py", code)
    assert (names(code), kept.script, kept.commit) == ({"train.py", "b.py"}, "train.py", None)


def test_a_hook_s_variables_do_not_lead_to_another_repository(
    project: pathlib.Path, tmp_path: pathlib.Path, code: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    write(project, train_py="x")
    commit(project)
    write(tmp_path / "other", b_py="")
    commit(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    snapshot.take(project / "train.py", code)
    assert names(code) == {"train.py"}


def test_a_host_without_git_keeps_a_repository_from_its_top(
    project: pathlib.Path, code: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    write(project, common_py="", exp__train_py="x", big_log="", _gitignore="*.log")
    commit(project)
    monkeypatch.setenv("PATH", "/nonexistent")
    kept = snapshot.take(project / "exp" / "train.py", code)
    assert (names(code), kept.script) == ({"common.py", "exp/train.py", ".gitignore"}, "exp/train.py")


def test_another_account_s_repository_is_named_with_the_way_out(
    project: pathlib.Path, code: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    write(project, train_py="x")
    commit(project)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own tests
    with pytest.raises(snapshot.SnapshotError) as e:
        snapshot.take(project / "train.py", code)
    assert f"git config --global --add safe.directory {project}" in str(e.value)
    assert "--no-snapshot" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("is_repository", [True, False])
def test_ddpignore(project: pathlib.Path, code: pathlib.Path, is_repository: bool):
    write(
        project,
        train_py="x",
        data__a_csv="",
        data__keep_csv="",
        deep__b_csv="",
        deep__c_txt="",
        top_txt="",
        deep__top_txt="",
    )
    write(project, _ddpignore="*.csv\n!keep.csv\n/top.txt\n# a comment\ntrain.py\n", deep___ddpignore="!b.csv\nc.*\n")
    write(project, closed__a_py="", closed___ddpignore="!a.py\n")
    with (project / ".ddpignore").open("a") as file:
        file.write("closed/\n")
    if is_repository:
        commit(project)
    snapshot.take(project / "train.py", code)
    # the nearer file wins, nothing is taken back from a folder that is left out, the script is always there
    assert names(code) == {"train.py", "data/keep.csv", "deep/b.csv", "deep/top.txt", ".ddpignore", "deep/.ddpignore"}


def test_the_runs_themselves_and_the_keys_of_a_home_are_left_out(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    home = tmp_path / "home"
    write(
        home,
        train_py="x",
        _ssh__id="private",
        _netrc="private",
        tools___a="",
        datasets__d="",
        runs__night__job="",
        runs__old__code__x="",
    )
    kept = snapshot.take(
        home / "train.py", home / "runs" / "night" / "code", leave_out=[home / "runs", home / "datasets"]
    )
    assert names(kept.root) == {"train.py", "tools/.a"}


def test_the_run_s_own_folder_is_left_out(project: pathlib.Path):
    write(project, train_py="x", night__job_json="{}")
    kept = snapshot.take(project / "train.py", project / "night" / "code")
    assert names(kept.root) == {"train.py"}


# --- how it is copied ------------------------------------------------------------------------------------------------


def test_modes_times_and_odd_names_are_kept(project: pathlib.Path, code: pathlib.Path):
    write(project, train_py="x", run_sh="#!/bin/sh", ro__a="")
    odd = project / os.fsdecode(b"caf\xe9\n\xff.py")
    odd.write_text("odd")
    (project / "run.sh").chmod(0o4755)
    (project / "train.py").chmod(0o600)
    (project / "ro").chmod(0o555)
    os.utime(project / "run.sh", ns=(1, 1_600_000_000_123_456_789))
    os.utime(project / "ro", ns=(1, 1_500_000_000_000_000_000))
    snapshot.take(project / "train.py", code)
    assert stat.S_IMODE((code / "run.sh").stat().st_mode) == 0o755  # no setuid
    assert stat.S_IMODE((code / "train.py").stat().st_mode) == 0o600
    assert (code / "run.sh").stat().st_mtime_ns == 1_600_000_000_123_456_789
    assert (code / "ro").stat().st_mtime_ns == 1_500_000_000_000_000_000
    assert (code / odd.name).read_text() == "odd"
    assert subprocess.run([code / "run.sh"], check=False).returncode == 0


def test_links_lead_where_they_led_and_nothing_outside_is_copied(
    project: pathlib.Path, tmp_path: pathlib.Path, code: pathlib.Path
):
    write(tmp_path, key="private", data__a_csv="1")
    write(project, train_py="x", lib__a_py="a", big__b_bin="", _ddpignore="big/\n")
    links = {
        "near": "lib/a.py", "lib/up": "../train.py", "absolute": str(project / "lib"), "chain": "near",
        "key": "../key", "data": str(tmp_path / "data"), "left": "big", "broken": "nothing", "self": "self",
    }  # fmt: skip
    for name, target in links.items():
        (project / name).symlink_to(target)
    kept = snapshot.take(project / "train.py", code)
    assert kept.outside == ("data", "key", "left")
    assert (code / "key").is_symlink()
    assert (code / "data/a.csv").read_text() == "1"
    shutil.move(project, tmp_path / "moved")
    assert {name: str((code / name).readlink()) for name in links} == links | {
        "chain": "lib/a.py", "absolute": "lib", "key": str(tmp_path / "key"), "left": str(project / "big"),
    }  # fmt: skip
    assert (code / "absolute/a.py").read_text() == "a"


def test_a_link_to_the_script_is_followed_as_python_does(
    project: pathlib.Path, tmp_path: pathlib.Path, code: pathlib.Path
):
    write(project, train_py="import common", common_py="")
    (tmp_path / "here.py").symlink_to(project / "train.py")
    kept = snapshot.take(tmp_path / "here.py", code)
    assert kept.origin == project
    assert subprocess.run([sys.executable, kept.path], check=False).returncode == 0


def test_what_is_no_file_is_never_opened(project: pathlib.Path, code: pathlib.Path):
    write(project, train_py="x")
    os.mkfifo(project / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(project)  # a socket's path has 107 characters at most
        listening.bind("socket")
        os.chdir("/")
        snapshot.take(project / "train.py", code)
    assert names(code) == {"train.py"}


def test_equal_code_has_an_equal_digest(project: pathlib.Path, code: pathlib.Path):
    write(project, train_py="x", a_py="1", b_py="")
    first = snapshot.take(project / "train.py", code)
    (project / "a.py").touch()
    assert snapshot.take(project / "train.py", code.with_name("again")).sha256 == first.sha256
    digests = {first.sha256}
    for number, change in enumerate(
        (
            lambda: (project / "a.py").write_text("2"),
            lambda: (project / "a.py").rename(project / "c.py"),
            lambda: (project / "b.py").chmod(0o755),
            lambda: ((project / "b.py").unlink(), (project / "b.py").symlink_to("c.py")),
        )
    ):
        change()
        digests.add(snapshot.take(project / "train.py", code.with_name(f"code{number}")).sha256)
    assert len(digests) == 5


def test_editing_afterwards_changes_nothing(project: pathlib.Path, code: pathlib.Path):
    write(project, train_py="x")
    kept = snapshot.take(project / "train.py", code)
    write(project, train_py="y")
    assert kept.path.read_text() == "x"


def test_a_file_that_is_written_all_the_time_is_reported(
    project: pathlib.Path, code: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    write(project, train_py="x", a_log="first\n")
    real = snapshot.hashlib.sha256

    def meanwhile(*given: bytes):  # while each file is read, and each time that it is read again
        with (project / "a.log").open("a") as file:
            file.write("more\n")
        return real(*given)

    monkeypatch.setattr(snapshot.hashlib, "sha256", meanwhile)
    kept = snapshot.take(project / "train.py", code)
    assert kept.changed == ("a.log",)
    copied = (code / "a.log").read_text()
    assert (project / "a.log").read_text().startswith(copied)
    assert copied.startswith("first\n")
    assert kept.num_files == 2


def test_a_file_that_changes_once_is_copied_again(
    project: pathlib.Path, code: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    write(project, train_py="half")
    real, changes = snapshot.hashlib.sha256, ["whole of it"]

    def meanwhile(*given: bytes):
        if changes:
            (project / "train.py").write_text(changes.pop())
        return real(*given)

    monkeypatch.setattr(snapshot.hashlib, "sha256", meanwhile)
    kept = snapshot.take(project / "train.py", code)
    assert (kept.changed, kept.path.read_text()) == ((), "whole of it")


def test_a_file_that_goes_meanwhile_is_reported(
    project: pathlib.Path, code: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    write(project, train_py="x", a_py="", b_py="")
    (project / "c.py").symlink_to("b.py")
    real = snapshot.tempfile.mkdtemp

    def between(**given: str) -> str:  # after the survey, before the first copy
        for name in ("a.py", "b.py", "c.py"):
            (project / name).unlink()
        os.mkfifo(project / "a.py")
        return real(**given)

    monkeypatch.setattr(snapshot.tempfile, "mkdtemp", between)
    kept = snapshot.take(project / "train.py", code)
    assert (kept.changed, names(code), kept.num_files) == (("a.py", "b.py", "c.py"), {"train.py"}, 1)


# --- what cannot be kept ---------------------------------------------------------------------------------------------


def refused(
    script: pathlib.Path,
    destination: pathlib.Path,
    limit_bytes: int = snapshot.LIMIT_BYTES,
    limit_files: int = snapshot.LIMIT_FILES,
) -> str:
    """Return the one line of a refusal, which leaves nothing behind."""
    there = set(destination.parent.iterdir())
    with pytest.raises(snapshot.SnapshotError) as e:
        snapshot.take(script, destination, limit_bytes=limit_bytes, limit_files=limit_files)
    assert set(destination.parent.iterdir()) == there
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize("is_repository", [True, False])
def test_too_many_files_are_named_by_folder(project: pathlib.Path, code: pathlib.Path, is_repository: bool):
    write(project, train_py="x", lib__a_py="")
    for number in range(60):
        write(project, **{f"data__images__{number}": ""})
    if is_repository:
        commit(project)
    text = refused(project / "train.py", code, limit_files=50)
    assert text.startswith(f"the code to keep, {project}, holds more than 50 files, most of it in data/images (")
    assert text.endswith(f"list what the job does not need in {project}/.ddpignore, or give --no-snapshot")
    write(project, _ddpignore="images\n")
    assert snapshot.take(project / "train.py", code, limit_files=50).num_files == 3


def test_too_large_files_are_named_by_folder(project: pathlib.Path, code: pathlib.Path):
    write(project, train_py="x", many__a="", many__b="")
    (project / "weights").mkdir()
    with (project / "weights" / "w.bin").open("wb") as file:
        file.truncate(3 * 2**30)  # a hole
    text = refused(project / "train.py", code)
    assert "holds more than 256 MiB, most of it in weights (1 files, 3.0 GiB), many (2 files, 0 MiB);" in text


def test_the_root_of_the_filesystem_is_refused_quickly(code: pathlib.Path):
    script = pathlib.Path("/slurm-ddp-test.py")
    if not os.access("/", os.W_OK):
        pytest.skip("only root may write to /")
    script.write_text("")
    try:
        began = time.monotonic()
        assert "the code to keep, /, holds more than" in refused(script, code)
        assert time.monotonic() - began < 20
    finally:
        script.unlink()


def test_a_file_that_grows_beyond_the_limit_meanwhile(
    project: pathlib.Path, code: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    write(project, train_py="x", a_log="")
    real = snapshot.tempfile.mkdtemp

    def between(**given: str) -> str:
        (project / "a.log").write_bytes(b"a" * 2000)
        return real(**given)

    monkeypatch.setattr(snapshot.tempfile, "mkdtemp", between)
    assert "grew beyond" in refused(project / "train.py", code, limit_bytes=1000)


def as_user(work: collections.abc.Callable[[], str]) -> str:
    """Run `work` under an account without privileges: its result."""
    if os.geteuid() != 0:
        return work()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = "failed"
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            text = work()
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def public(tmp_path: pathlib.Path) -> collections.abc.Iterator[pathlib.Path]:
    """A folder that belongs to the account without privileges."""
    folder = pathlib.Path(f"/var/tmp/slurm-ddp-test-{os.getpid()}")
    (folder / "project").mkdir(parents=True)
    (folder / "run").mkdir()
    yield folder
    shutil.rmtree(folder)


def test_unreadable_files_and_folders_are_named(public: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(public))
    project = public / "project"
    write(project, train_py="x", a_py="", closed__b="", shut__c="")
    if os.geteuid() == 0:
        for path in (public, *public.rglob("*")):
            os.chown(path, 65534, 65534)
    (project / "a.py").chmod(0)
    (project / "closed").chmod(0)
    (project / "shut").chmod(0o400)

    def work() -> str:
        try:
            snapshot.take(project / "train.py", public / "run" / "code")
        except snapshot.SnapshotError as e:
            return str(e)
        return "kept"

    assert as_user(work).startswith(f"cannot read closed, shut/c in {project}; make them readable, list them in")
    (project / "closed").chmod(0o700)
    (project / "shut").chmod(0o700)
    assert as_user(work).startswith(f"cannot read a.py in {project}; make them readable")
    assert not list((public / "run").iterdir())
    (project / ".ddpignore").write_text("a.py\n")
    assert as_user(work) == "kept"


def test_nothing_is_replaced(project: pathlib.Path, code: pathlib.Path):
    write(project, train_py="x")
    snapshot.take(project / "train.py", code)
    assert refused(project / "train.py", code) == f"{code} exists already; give the run another name"


def test_a_destination_that_cannot_be_written(project: pathlib.Path, tmp_path: pathlib.Path):
    write(project, train_py="x")
    with pytest.raises(snapshot.SnapshotError, match="absent: No such file or directory; the code of the run is kept"):
        snapshot.take(project / "train.py", tmp_path / "absent" / "code")


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent.py", "absent.py: No such file"), ("", "project is not a file"), ("loop", "loop")],
)
def test_what_is_no_script(project: pathlib.Path, code: pathlib.Path, name: str, message: str):
    project.mkdir()
    (project / "loop").symlink_to("loop")
    text = refused(project / name, code)
    assert message in text
    assert text.endswith("give the path of a script")


def test_a_damaged_repository_is_named(project: pathlib.Path, code: pathlib.Path):
    write(project, train_py="x")
    commit(project)
    (project / ".git" / "index").write_text("no index")
    assert "repair the repository, or give --no-snapshot" in refused(project / "train.py", code)

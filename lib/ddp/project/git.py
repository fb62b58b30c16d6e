"""git's view of a folder: its repository, the files in it, and the commit."""

import os
import pathlib
import shutil
import subprocess

from ddp.project import problems

_LIMIT_S = 60.0
# Git's hooks set them, and git would read another repository: git-rev-parse(1), --local-env-vars
_LOCAL_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
)


def find_top(folder: pathlib.Path) -> pathlib.Path | None:
    """Find the top of a folder's work tree.

    None outside of a repository, in a folder that git ignores, and without git.
    """
    for top in (folder, *folder.parents):
        if (top / ".git").exists():
            break
    else:
        return None
    if shutil.which("git") is None:
        return None
    is_ignored = _run(top, "check-ignore", "--quiet", str(folder)).returncode == 0
    return None if is_ignored else top


def list_tracked(top: pathlib.Path) -> list[str]:
    """List the files that git tracks, including submodules."""
    return _ls_files(top, "--cached", "--recurse-submodules")


def list_untracked(top: pathlib.Path) -> list[str]:
    """List the files that git neither tracks nor ignores; a repository in there ends in "/"."""
    return _ls_files(top, "--others", "--exclude-standard")


def list_ignored(top: pathlib.Path) -> list[str]:
    """List the paths that git ignores; a folder that is ignored as a whole ends in "/"."""
    return _ls_files(top, "--others", "--ignored", "--exclude-standard", "--directory")


def describe_commit(top: pathlib.Path) -> str:
    """Return the commit, with "-dirty" if tracked files differ from it; "" before the first."""
    done = _run(top, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return done.stdout.strip()


def _ls_files(top: pathlib.Path, *words: str) -> list[str]:
    done = _run(top, "ls-files", "-z", *words)
    if done.returncode:
        raise problems.of_path(
            top, f"git: {done.stderr}", "repair the repository, or give --no-snapshot"
        )
    return done.stdout.split("\0")[:-1]


def _run(folder: pathlib.Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run git so that it changes nothing, not even its index, and asks nothing."""
    env = {name: value for name, value in os.environ.items() if name not in _LOCAL_VARIABLES}
    env |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    argv = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=env,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        late = f"git {words[0]} took over {_LIMIT_S:g} s"
        raise problems.of_path(folder, late, "give --no-snapshot") from e
    out = os.fsdecode(done.stdout)
    err = os.fsdecode(done.stderr)
    return subprocess.CompletedProcess(argv, done.returncode, out, err)

"""Checks of folders and paths before anything is written; each error names the option."""

from ddp.problem import Command, ParameterError, Problem
from ddp.workspace import folders, operations
from ddp.workspace.folders import Workspace

# A run's scripts, logs and figures; checkpoints check for themselves
LEAST_FREE_BYTES, LEAST_FREE_FILES = 64 << 20, 100


def trusted(contents: folders.Contents) -> None:
    """Raise Problem, before a submission, if others could replace the files that its job runs."""
    if contents.untrusted:
        raise Problem(contents.untrusted)


def check_writable(workspace: Workspace, contents: folders.Contents) -> None:
    """Raise Problem if this user cannot write the folder of the runs."""
    if not contents.is_writable:
        hint = (
            f"as root, on the filesystem's server or here: chown {workspace.user} {workspace.runs}"
        )
        raise Problem(f"{workspace.user} cannot write {workspace.runs}; {hint}")


def check_room(workspace: Workspace, contents: folders.Contents) -> list[str]:
    """Check that a run can write to the workspace. Raises Problem."""
    trusted(contents)
    check_writable(workspace, contents)
    if contents.free_bytes < LEAST_FREE_BYTES or contents.free_files < LEAST_FREE_FILES:
        what = f"{contents.free_bytes >> 20} MiB and {contents.free_files} files"
        text = f"{workspace.runs} has room for {what} only"
        raise Problem(f"{text}; enlarge the filesystem, or make room", remedy=Command("prune"))
    return [f"workspace: {workspace.runs} is writable, {contents.free_bytes >> 30} GiB are free"]


def check_inside(workspace: Workspace, name: str, path: str, *, kinds: tuple[str, ...]) -> None:
    """Raise ParameterError unless the path leads to one of these kinds inside the workspace."""
    if not path.startswith(f"{workspace.path}/"):
        raise ParameterError(name, f"{path} is outside the workspace {workspace.path}")
    found = workspace.locate(path)
    if not found.is_inside:
        raise ParameterError(
            name, f"{path} leads to {found.real}, outside the workspace {workspace.path}"
        )
    check_readable(name, path, found, kinds)


def check_readable(name: str, path: str, found: operations.Place, kinds: tuple[str, ...]) -> None:
    """Raise ParameterError unless a path is one of these kinds and this account can read it."""
    if found.kind == "absent":
        raise ParameterError(name, f"{path} does not exist")
    if found.kind not in kinds:
        raise ParameterError(name, f"{path} is not a {' or '.join(kinds)}")
    if not found.is_readable:
        raise ParameterError(
            name, f"{path} is not readable for this account; its owner can chmod -R a+rX {path}"
        )


def label(path: str) -> str:
    """Derive the first part of a run's name from a script's."""
    stem = path.rsplit("/", 1)[-1].removesuffix(".py")
    return (
        "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).strip("._-")[:40] or "script"
    )

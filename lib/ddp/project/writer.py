"""Write the files of a project to a new folder."""

import collections
import collections.abc
import concurrent.futures
import contextlib
import os
import pathlib
import shutil
import stat

from ddp.project import problems
from ddp.project import root as projects

_COPIES = 8  # at a time: most of a small file's way to a network filesystem is waiting


def write(
    project: projects.Project,
    target: pathlib.Path,
    names: collections.abc.Collection[str] | None = None,
) -> None:
    """Copy a project's files, or some, to `target`, a new folder.

    Links to files of the project stay relative. Other links keep their targets: the content is not
    copied, since others may read a run's folder. Modes and times are kept, setuid bits are not.

    Raises:
        ParameterError: a file cannot be copied; the files copied so far stay.
    """
    names = project.files if names is None else names
    target.mkdir(mode=0o755)
    for folder in {str(pathlib.PurePath(name).parent) for name in names}:
        (target / folder).mkdir(parents=True, exist_ok=True)

    def write_one(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # it was just removed
            _write(project, name, target / name)

    try:
        with concurrent.futures.ThreadPoolExecutor(_COPIES) as pool:
            collections.deque(pool.map(write_one, names), maxlen=0)
    except OSError as e:
        why = f"cannot be copied: {e.strerror}"
        raise problems.of_path(e.filename, why, problems.send_less(project.root)) from e
    if project.script in names and not (target / project.script).is_file():
        raise problems.of_path(project.script, "was removed while it was copied", "submit again")


def _write(project: projects.Project, name: str, target: pathlib.Path) -> None:
    source = project.root / name
    if source.is_symlink():
        target.symlink_to(project.link(name))
        return
    about = source.stat()
    if not stat.S_ISREG(about.st_mode):
        return  # it was just replaced
    target.touch(mode=0o600)  # others may not read an ignored file, even while it is copied
    shutil.copyfile(source, target)
    os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))
    readers = 0o700 if name in project.private else 0o777
    target.chmod(projects.mode_of(about) & readers)

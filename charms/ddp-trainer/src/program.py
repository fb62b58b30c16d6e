"""The program ddp on this host: installed for everyone, configured, and run as the submit user."""

import collections.abc
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import pwd
import re
import shutil
import signal
import subprocess
import sys
import threading
import typing

from slurm_ddp import commands, files

COMMAND = pathlib.Path("/usr/local/bin/ddp")
# With a folder for each release; other charms' files are in the same place
LIBRARY = pathlib.Path("/usr/local/lib/slurm-ddp/ddp")
# For `from ddptrain import submit` in a user's own Python, next to LIBRARY
IMPORTS = "python"
# The system Python's folder, by Debian, for modules that no package owns
SITE = pathlib.Path(f"/usr/local/lib/python3.{sys.version_info[1]}/dist-packages")
CONFIG = pathlib.Path("/etc/slurm-ddp.toml")
PYTHON = "/usr/bin/python3"
# As in pyproject.toml
NEEDS = (
    "click",
    "cloudpickle",
    "cloup",
    "jinja2",
    "pathspec",
    "plotext",
    "pydantic",
    "pyyaml",
    "rich",
)
_OURS = {"lib/ddp": "ddp", "lib/slurm_ddp": "slurm_ddp", "payload": "ddp/payload"}
_END_S = 5.0
_PROXIES = {
    "http_proxy": "JUJU_CHARM_HTTP_PROXY",
    "https_proxy": "JUJU_CHARM_HTTPS_PROXY",
    "no_proxy": "JUJU_CHARM_NO_PROXY",
}

Json = dict[str, typing.Any]
Log = collections.abc.Callable[[str], None]


class ProgramError(Exception):
    """The program did not answer; one line."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The program's answer: results, and the error of one line if it failed."""

    results: Json
    error: str = ""


def install(charm_dir: pathlib.Path) -> bool:
    """Install this charm's program and its dependencies for everyone; return whether it changed.

    root owns the files. Raises OSError.
    """
    ours = _own_files(charm_dir)
    needed = distributions()
    home = LIBRARY / _digest(ours, needed)[:16]
    launcher = (
        f"#!{PYTHON} -I\n# Installed by the charm ddp-trainer.\nimport sys\n\nsys.path.insert(0, {str(home)!r})\n"
        "from ddp import cli\n\ncli.main()\n"
    )
    if home.is_dir() and COMMAND.is_file() and COMMAND.read_text() == launcher:
        return False

    partial = LIBRARY / f".{home.name}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    for inside, path in [*ours.items(), *_files(needed)]:
        _copy(path, partial / inside)
    folders = [path for path in partial.rglob("*") if path.is_dir()]
    for path in (LIBRARY.parent, LIBRARY, partial, *folders):
        path.chmod(0o755)
    # Now, since only root can write to these folders
    commands.run(PYTHON, "-I", "-m", "compileall", "-q", partial, timeout=300)
    if not home.is_dir():
        partial.rename(home)
    files.ensure_file(COMMAND, launcher, mode=0o755)
    _offer_imports(home)
    for path in LIBRARY.iterdir():
        if path != home:
            shutil.rmtree(path, ignore_errors=True)
    return True


def _offer_imports(home: pathlib.Path) -> None:
    """Let the system's Python import ddptrain and cloudpickle, behind all that it has itself."""
    folder = LIBRARY.parent / IMPORTS
    folder.mkdir(mode=0o755, exist_ok=True)
    for name, target in (("ddptrain", "ddp/payload/ddptrain"), ("cloudpickle", "cloudpickle")):
        partial = folder / f".{name}.{os.getpid()}"
        partial.unlink(missing_ok=True)
        partial.symlink_to(home / target)
        partial.replace(folder / name)
    files.ensure_file(SITE / "slurm-ddp.pth", f"{folder}\n")


def _own_files(charm_dir: pathlib.Path) -> dict[pathlib.PurePath, pathlib.Path]:
    """List the charm's own files by their places below the program's folder."""
    found: dict[pathlib.PurePath, pathlib.Path] = {}
    for source, target in _OURS.items():
        for path in sorted((charm_dir / source).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                inside = path.relative_to(charm_dir / source)
                found[pathlib.PurePath(target) / inside] = path
    return found


def _digest(
    ours: dict[pathlib.PurePath, pathlib.Path],
    needed: dict[str, importlib.metadata.Distribution],
) -> str:
    """Compute a digest of the program's own files and of its dependencies' versions."""
    versions = sorted(f"{name} {found.version}" for name, found in needed.items())
    digest = hashlib.sha256("\0".join(versions).encode())
    for inside, path in ours.items():
        digest.update(f"{inside}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def remove() -> None:
    """Remove the program; runs stay."""
    for path in (COMMAND, CONFIG, SITE / "slurm-ddp.pth"):
        path.unlink(missing_ok=True)
    for path in (LIBRARY, LIBRARY.parent / IMPORTS):
        shutil.rmtree(path, ignore_errors=True)


def ask(user: str, request: Json, log: Log, *, timeout_s: float | None = None) -> Answer:
    """Run the program as `user` on one request and return its answer; its log is passed on live.

    Args:
        user: the account; all its groups apply.
        request: see ddp.service.
        log: gets each line of progress.
        timeout_s: in seconds; without it the program sets its own limits.

    Raises:
        ProgramError: it could not be started, ended without an answer, or did not answer in time.
    """
    account = pwd.getpwnam(user)
    given = {"HOME": account.pw_dir, "USER": user, "LOGNAME": user}
    given |= {name: os.environ[juju] for name, juju in _PROXIES.items() if os.environ.get(juju)}
    try:
        process = subprocess.Popen(
            [COMMAND, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd="/",
            env=commands.clean_env(given),
            start_new_session=True,
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=os.getgrouplist(user, account.pw_gid),
        )
    except OSError as e:
        raise ProgramError(f"{COMMAND}: {e.strerror or e}") from e
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr, _ended(process, timeout_s):
        with contextlib.suppress(BrokenPipeError):  # it ended at once: its output says why
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            try:
                reply: Json = json.loads(line)
            except ValueError:
                raise ProgramError(f"ddp printed {line[:200]!a}, which is not JSON") from None
            if "log" in reply:
                log(str(reply["log"]))
            else:
                return Answer(reply["results"], str(reply.get("error", "")))
        words = commands.last_line(process.stderr.read()) or f"exit status {process.wait()}"
    raise ProgramError(f"ddp ended without an answer: {words}")


@contextlib.contextmanager
def _ended(
    process: "subprocess.Popen[str]", timeout_s: float | None
) -> collections.abc.Generator[None]:
    """End the program behind the block, and kill it after `timeout_s` seconds."""

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(threading.TIMEOUT_MAX if timeout_s is None else timeout_s, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            kill()


def distributions() -> dict[str, importlib.metadata.Distribution]:
    """List the distributions that the program needs, with their dependencies."""
    found: dict[str, importlib.metadata.Distribution] = {}
    left: list[str] = [*NEEDS]
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        for line in found[name].requires or ():
            wanted, _, condition = line.partition(";")
            if not condition.strip():  # extras and other platforms' packages have one
                left.append(re.split(r"[\s<>=!~(\[]", wanted.strip(), maxsplit=1)[0])
    return found


def _files(
    needed: dict[str, importlib.metadata.Distribution],
) -> collections.abc.Iterator[tuple[pathlib.PurePath, pathlib.Path]]:
    """Yield (path in the library, file) of these distributions; no commands."""
    for distribution in needed.values():
        for file in distribution.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                yield file, pathlib.Path(str(distribution.locate_file(file)))


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o644)

"""The login host: packages, the program, and the workspace's folders."""

import contextlib
import os
import pathlib
import pwd
import shutil
import typing

import program
from ddp.options import config as configuration
from ddp.options import fields
from ddp.problem import ParameterError
from ddp.workspace import operations
from ddp.workspace.operations import USERS
from slurm_ddp import apt, files, mounts
from slurm_ddp.commands import CommandError

PACKAGES = ("python3-venv", "zstd")
# A copy of the resource that every account can read
WHEELHOUSE = pathlib.Path("/var/lib/ddp-trainer/wheelhouse")
_ACCOUNT = fields.matches(r"[a-z_][a-z0-9_-]*", 32, "the name of an account")
_SECRET = fields.matches(r"(secret:[A-Za-z0-9/._-]+)?", 200, "the URI of a Juju secret")
_CHARMS_OWN = {"submit_user", "hf_token", "check_idle_nodes"}  # options that the program lacks
_ANSWER_S = 120.0  # for a request that neither waits nor installs


class Config(configuration.Choices):
    """The charm's options."""

    workspace: fields.Folder = "/mnt/shared"
    submit_user: typing.Annotated[str, _ACCOUNT] = "ubuntu"
    node_cache: fields.Folder = "/var/tmp"  # noqa: S108 - what is made below is checked on use
    check_idle_nodes: bool = True
    hf_token: typing.Annotated[str, _SECRET] = ""


def account(name: str) -> pwd.struct_passwd:
    """Look up the jobs' account. Raises ParameterError if it does not exist or is root."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        text = f"useradd -m -u UID {name} here, on slurmctld's machine and each node, or use another account"
        raise ParameterError("submit-user", text) from None
    if found.pw_uid == 0:
        raise ParameterError("submit-user", "jobs never run as root; use an ordinary account")
    return found


def settings(config: Config, unit: str) -> dict[str, str | bool]:
    """Build the program's configuration."""
    own = {"workspace": config.workspace.rstrip("/"), "account": config.submit_user, "unit": unit}
    return config.model_dump(by_alias=True, exclude=_CHARMS_OWN) | own


def ensure(config: Config, unit: str, charm_dir: pathlib.Path, token: str) -> str:
    """Install packages and the program, make the workspace's folders; return an error, or ""."""
    try:
        apt.ensure_packages(PACKAGES)
        program.install(charm_dir)
        files.ensure_file(program.CONFIG, configuration.write(settings(config, unit)))
    except CommandError as e:
        return f"cannot install {' '.join(PACKAGES)}: {e}"
    except OSError as e:
        return f"cannot install ddp: {e}"
    if not _is_mounted(config.workspace):
        return ""
    denied: list[str] = []
    try:
        answer = ask(config, unit, "make-folders", token=token)
        if denied := answer.results.get("denied", []):
            if answer.results["untrusted"]:
                return str(answer.results["untrusted"])
            hand_over(config.workspace, denied, account(config.submit_user))
            answer = ask(config, unit, "make-folders", token=token)
        if denied := answer.results.get("denied", []):
            return refused(config, denied[0], "")
        if not answer.error:
            hand_over(config.workspace, [], account(config.submit_user))
        return answer.error
    except OSError as e:
        return refused(config, denied[0] if denied else USERS, f": {e.strerror or e}")
    except program.ProgramError as e:
        return str(e)


def refused(config: Config, name: str, why: str) -> str:
    """Explain that the submit user cannot write a folder of the workspace, and the remedy."""
    folder = f"{config.workspace}/{name}"
    hint = f"chown {config.submit_user} {folder}, as root, here or on the filesystem's server"
    return f"{hint}{why or ': it cannot write there'}"


def ask(
    config: Config, unit: str, do: str, *, token: str = "", timeout_s: float | None = _ANSWER_S
) -> program.Answer:
    """Run a request in the program as the submit user. Raises program.ProgramError."""
    request = {"do": do, "config": settings(config, unit), "unit": unit, "token": token}
    return program.ask(config.submit_user, request, lambda _: None, timeout_s=timeout_s)


def share(resource: pathlib.Path | None) -> str:
    """Copy the attached wheelhouse to a path that the submit user can read; return it, or ""."""
    if resource is None or not resource.stat().st_size:
        WHEELHOUSE.unlink(missing_ok=True)
        return ""
    WHEELHOUSE.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    about = resource.stat()
    with contextlib.suppress(FileNotFoundError):
        known = WHEELHOUSE.stat()
        if (known.st_size, known.st_mtime_ns) == (about.st_size, about.st_mtime_ns):
            return str(WHEELHOUSE)
    partial = WHEELHOUSE.with_name(f".{WHEELHOUSE.name}.{os.getpid()}")
    shutil.copy2(resource, partial)
    partial.chmod(0o644)
    partial.replace(WHEELHOUSE)
    return str(WHEELHOUSE)


def _is_mounted(workspace: str) -> bool:
    mount = mounts.find(workspace)
    return (
        mount is not None
        and mount.mountpoint != "/"
        and bool(mounts.probe(mount.mountpoint, deadline=5.0))
    )


def hand_over(workspace: str, names: list[str], owner: pwd.struct_passwd) -> None:
    """Make folders for `owner` in root's workspace, and `users`, in which anyone can make one.

    Only root and the owner can have put these names into such a workspace, so nothing found there
    was planted. Other files, and folders of a third account, are left alone. Raises OSError.
    """
    top = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(top)
        if about.st_uid != 0 or (about.st_mode & 0o022 and not about.st_mode & 0o1000):
            text = f"{workspace} belongs to uid {about.st_uid}, mode {about.st_mode & 0o7777:o}"
            if names:
                raise PermissionError(1, text)
            return
        for name in (*names, USERS):
            uid, gid = (0, 0) if name == USERS else (owner.pw_uid, owner.pw_gid)
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, operations.folder_mode(name), dir_fd=top)
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                found = os.fstat(folder)
                if found.st_uid not in (0, uid):
                    raise PermissionError(1, f"{workspace}/{name} belongs to uid {found.st_uid}")
                if found.st_uid != uid:
                    os.fchown(folder, uid, gid)
                if name == USERS and found.st_mode & 0o7777 != 0o1777:
                    os.fchmod(folder, 0o1777)
            finally:
                os.close(folder)
    finally:
        os.close(top)

"""Running commands from a charm: always with a deadline, never with a secret in sight."""

import collections.abc
import contextlib
import dataclasses
import os
import pathlib
import pwd
import signal
import subprocess
import urllib.parse

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/snap/bin"
_KEPT = (
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SLURM_CLUSTERS",
    "SLURM_CONF",
    "SLURM_JWT",
)
_REAP_S = 2.0  # how long a killed child may take to die; one in uninterruptible sleep is abandoned


class CommandError(Exception):
    """A command failed.

    `str()` is one line without secrets: the command's name, what happened, its last words.
    """

    def __init__(
        self, message: str, *, returncode: int | None = None, stdout: str = "", stderr: str = ""
    ) -> None:
        super().__init__(message)
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr


class CommandTimeout(CommandError):
    """The command did not end within its deadline and was killed."""


@dataclasses.dataclass(frozen=True)
class Completed:
    """The result of a finished command; the texts are scrubbed."""

    returncode: int
    stdout: str
    stderr: str


def clean_env(extra: collections.abc.Mapping[str, str] | None = None) -> dict[str, str]:
    """Build a child's environment: home, proxies, Slurm's own and `extra`.

    It lacks the hook's JUJU_* variables.
    """
    home = "/"
    with contextlib.suppress(KeyError):
        home = pwd.getpwuid(os.geteuid()).pw_dir
    env = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": home}
    env |= {name: os.environ[name] for name in _KEPT if name in os.environ}
    return env | dict(extra or {})


def scrub(text: str, secrets: collections.abc.Iterable[str]) -> str:
    """Replace each secret in `text`, raw or percent-encoded, by `***`."""
    for secret in sorted({s for s in secrets if s}, key=len, reverse=True):
        for form in (secret, urllib.parse.quote(secret, safe=""), urllib.parse.quote_plus(secret)):
            text = text.replace(form, "***")
    return text


def last_line(text: str, limit: int = 300) -> str:
    """Cut `text` to its last line that is not blank, and that to `limit` characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:limit] if lines else ""


def run(
    *argv: str | pathlib.Path,
    timeout: float = 60,
    stdin: str | None = None,
    env: collections.abc.Mapping[str, str] | None = None,
    cwd: str | pathlib.Path | None = None,
    check: bool = True,
    secrets: collections.abc.Iterable[str] = (),
) -> Completed:
    """Run a command in a clean environment and return its output.

    Args:
        argv: the command and its arguments, without a shell. Secrets go in `env` or `stdin`, never
            here.
        timeout: in seconds; then the process group is killed, and a child that cannot die (a hung
            filesystem) left.
        stdin: text for the child; without it the child reads /dev/null.
        env: variables added to `clean_env()`.
        cwd: the child's working directory.
        check: raise when the command exits with another status than 0.
        secrets: values that must not appear in the returned texts nor in an error.

    Raises:
        CommandError: the command is missing, or failed and `check` is set; `CommandTimeout` if it
            did not end in time.
    """
    arguments = [str(argument) for argument in argv]
    name = pathlib.Path(arguments[0]).name
    secrets = tuple(secrets)
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=cwd,
            start_new_session=True,
            env=clean_env(env),
        )
    except OSError as e:
        raise CommandError(f"{name}: {e.strerror or e}") from e
    try:
        stdout, stderr = process.communicate(stdin, timeout=timeout)
    except subprocess.TimeoutExpired as e:
        _kill_group(process)
        raise CommandTimeout(f"{name}: no answer within {timeout:g} s") from e
    stdout, stderr = scrub(stdout, secrets), scrub(stderr, secrets)
    if check and process.returncode != 0:
        reason = last_line(stderr) or last_line(stdout)
        message = f"{name} exited {process.returncode}" + (f": {reason}" if reason else "")
        raise CommandError(message, returncode=process.returncode, stdout=stdout, stderr=stderr)
    return Completed(process.returncode, stdout, stderr)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=_REAP_S)
    except subprocess.TimeoutExpired:
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()

"""Running commands from a charm: always with a deadline, never with a secret in sight."""

import collections.abc
import contextlib
import dataclasses
import os
import pathlib
import pwd
import select
import signal
import subprocess
import tempfile
import time
import typing
import urllib.parse

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/snap/bin"
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_REAP_S = 2.0  # how long a killed child may take to die; one in uninterruptible sleep is abandoned


class CommandError(Exception):
    """A command failed. `str()` is one line without secrets: the command's name, what happened, its last words."""

    def __init__(self, message: str, *, returncode: int | None = None, stdout: str = "", stderr: str = "") -> None:
        super().__init__(message)
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr


class CommandTimeout(CommandError):
    """The command did not end within its deadline and was killed."""


@dataclasses.dataclass(frozen=True)
class Completed:
    """What a finished command left behind; the texts are scrubbed."""

    returncode: int
    stdout: str
    stderr: str


def clean_env(extra: collections.abc.Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a small environment for a child: none of the hook's JUJU_* variables, proxies kept, plus `extra`."""
    env = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root"}
    env |= {name: os.environ[name] for name in _PROXIES if name in os.environ}
    return env | dict(extra or {})


def scrub(text: str, secrets: collections.abc.Iterable[str]) -> str:
    """Return `text` with each secret, raw or percent-encoded, replaced by `***`."""
    for secret in sorted({s for s in secrets if s}, key=len, reverse=True):
        for form in (secret, urllib.parse.quote(secret, safe=""), urllib.parse.quote_plus(secret)):
            text = text.replace(form, "***")
    return text


def last_line(text: str, limit: int = 300) -> str:
    """Return the last line of `text` that is not blank, at most `limit` characters of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:limit] if lines else ""


def run(
    *argv: str | pathlib.Path,
    timeout: float = 60,
    stdin: str | None = None,
    env: collections.abc.Mapping[str, str] | None = None,
    cwd: str | pathlib.Path | None = None,
    check: bool = True,
    user: str | None = None,
    secrets: collections.abc.Iterable[str] = (),
) -> Completed:
    """Run a command in a clean environment and return what it printed.

    Args:
        argv: the command and its arguments; no shell ever sees them. Secrets go in `env` or `stdin`, never here.
        timeout: in seconds. At the deadline the whole process group is killed; a child that cannot die (a hung
            filesystem) is left behind rather than waited for.
        stdin: text for the child; without it the child reads the null device.
        env: variables added to `clean_env()`.
        cwd: the child's working directory.
        check: raise when the command exits with another status than 0.
        user: run as this account, with its groups and home.
        secrets: values that must not appear in the returned texts nor in an error.

    Raises:
        CommandError: the command is missing, or exited with another status than 0 and `check` is set.
        CommandTimeout: it did not end in time.
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
            **_identity(user, env),
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
        said = last_line(stderr) or last_line(stdout)
        message = f"{name} exited {process.returncode}" + (f": {said}" if said else "")
        raise CommandError(message, returncode=process.returncode, stdout=stdout, stderr=stderr)
    return Completed(process.returncode, stdout, stderr)


class Dialogue:
    """A command that answers each line with one line, kept from one request to the next. Close it."""

    def __init__(self, *argv: str | pathlib.Path, user: str | None = None, cwd: str | pathlib.Path = "/") -> None:
        """Start the command in a clean environment, as `user`. Raises CommandError."""
        self._name = pathlib.Path(argv[0]).name
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this; a pipe that nobody reads would fill
        try:
            self._process = subprocess.Popen(
                [str(word) for word in argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                bufsize=0,
                cwd=cwd,
                start_new_session=True,
                **_identity(user, None),
            )
        except OSError as e:
            self._said.close()
            raise CommandError(f"{self._name}: {e.strerror or e}") from e

    @property
    def is_over(self) -> bool:
        """Return whether the command has ended."""
        return self._process.poll() is not None

    def ask(self, line: str, *, timeout: float) -> str:
        """Return the answer to a line. Where there is none the command is over.

        Raises:
            CommandError: it ended without an answer.
            CommandTimeout: it did not answer in time and was killed.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        left, answer, end = memoryview(f"{line}\n".encode()), bytearray(), time.monotonic() + timeout
        os.set_blocking(stdin.fileno(), False)
        poll = select.poll()
        poll.register(stdin, select.POLLOUT)
        poll.register(stdout, select.POLLIN)
        while (wait_s := end - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(wait_s * 1000):
                if descriptor == stdin.fileno():
                    try:
                        left = left[os.write(descriptor, left) :]
                    except BrokenPipeError:
                        left = left[:0]  # the end of its output tells the same
                    if not left:
                        poll.unregister(stdin)
                    continue
                block = os.read(descriptor, 1 << 16)
                answer += block
                if answer.endswith(b"\n"):
                    return answer.decode(errors="replace")
                if not block:
                    raise CommandError(self._last_words())
        self.close(patience=0)
        raise CommandTimeout(f"{self._name}: no answer within {timeout:g} s")

    def close(self, *, patience: float = _REAP_S) -> None:
        """End the command; one that does not end by itself is killed, one that cannot die is left behind."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
        self._said.close()

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - 4096))
        said = last_line(self._said.read().decode(errors="replace"))
        return f"{self._name} ended without an answer" + (f": {said}" if said else "")


def _identity(user: str | None, env: collections.abc.Mapping[str, str] | None) -> dict[str, typing.Any]:
    """Return Popen's arguments for a clean environment and the account to run as."""
    if user is None:
        return {"env": clean_env(env)}
    account = pwd.getpwnam(user)
    return {
        "env": clean_env({"HOME": account.pw_dir, "USER": user, "LOGNAME": user} | dict(env or {})),
        "user": account.pw_uid,
        "group": account.pw_gid,
        "extra_groups": os.getgrouplist(user, account.pw_gid),
    }


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=_REAP_S)
    except subprocess.TimeoutExpired:
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()

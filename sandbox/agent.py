"""The agent process inside a host: guest/agent.py, spoken to over its pipes."""

import collections.abc
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import typing

from sandbox.hosts import Host

Json = dict[str, typing.Any]


class Agent:
    """The agent of one host, from its start until `close`."""

    def __init__(self, host: Host, program: str) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the agent
        self.process = host.popen(
            ["/opt/sandbox/venv/bin/python", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout
        self._stdin, self._stdout = self.process.stdin, self.process.stdout

    def ask(self, request: Json, show: collections.abc.Callable[[Json], None]) -> Json:
        """Run one event; `show` gets the hook's messages as they come."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(json.dumps(request).encode() + b"\n")
            self._stdin.flush()
            for line in self._stdout:
                message = json.loads(line)
                if message["kind"] == "result":
                    return message
                show(message)
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").splitlines()[-20:] or [
            "no error output"
        ]
        problem = f"the host stopped in the middle of the hook ({last[-1]})"
        return {"ok": False, "error": problem, "trace": "\n".join(last)}

    def kill(self) -> None:
        """End the agent and the hook that it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the agent when it runs no hook any more; kill it if it does not end."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()
        self._stdout.close()
        self._stderr.close()

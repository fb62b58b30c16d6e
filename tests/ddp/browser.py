"""A real browser without a window, driven through a pipe by the DevTools protocol; it reaches no network."""

import contextlib
import fcntl
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import time
import typing

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-extensions",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)
_LIMIT_S = 60.0
Json = dict[str, typing.Any]


class Browser:
    """One tab. It keeps what the pages complain of, and what they ask the network for."""

    def __init__(self, profile: pathlib.Path) -> None:
        command = next((found for name in NAMES if (found := shutil.which(name))), None)
        assert command, (
            "no Chromium here: scripts/setup.sh test (on Ubuntu: snap install chromium, or Google's package)"
        )
        their_input, self._requests = os.pipe()
        self._answers, their_output = os.pipe()
        # The browser reads descriptor 3 and writes descriptor 4: neither may be in the way of the other.
        passed = [fcntl.fcntl(one, fcntl.F_DUPFD, 20) for one in (their_input, their_output)]
        shell = f'exec "$@" 3<&{passed[0]} 4>&{passed[1]}'
        self._log = (profile / "browser.log").open("wb")
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", command, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        for one in (*passed, their_input, their_output):
            os.close(one)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.fetched: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser and all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        self._log.close()
        os.close(self._requests)
        os.close(self._answers)

    def call(self, method: str, **params: object) -> Json:
        """Call a method of the protocol and return its result; events on the way are kept."""
        self._number += 1
        message: Json = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while (answer := self._next(method)).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, path: pathlib.Path, *, width: int = 700, height: int = 600) -> None:
        """Show a file and wait until it is there."""
        self.complaints.clear()
        self.fetched.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + _LIMIT_S
        while self.evaluate("document.readyState + ' ' + location.href") != f"complete {path.as_uri()}":
            assert time.monotonic() < deadline, f"{path} is not shown"
            time.sleep(0.05)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression: str) -> typing.Any:
        """Return the value of an expression, or of what it promises."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def media(self, *, scheme: str = "light", medium: str = "screen") -> None:
        """Behave as on a light or dark screen, or as a printer."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)

    def _next(self, method: str) -> Json:
        deadline = time.monotonic() + _LIMIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._answers, 1 << 20) if ready else b""
            assert data, f"{method}: the browser does not answer, see {self._log.name}"
            self._buffer += data
        answer, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(answer)

    def _note(self, event: Json) -> None:
        params: Json = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.fetched.append(params["request"]["url"])
            case _:
                pass

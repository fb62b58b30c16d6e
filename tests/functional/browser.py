"""Headless Chromium, driven by the DevTools protocol over two pipes (--remote-debugging-pipe)."""

import collections.abc
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import select
import shutil
import subprocess
import time
import typing

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
Json = dict[str, typing.Any]
_FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-proxy-server --no-first-run".split()
_ANSWER_S = 120.0
_MIDDLE = """(() => {
  const box = document.querySelector(%s).getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
})()"""


def find() -> str | None:
    """Return the path of an installed Chromium."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@dataclasses.dataclass
class Page:
    """A page in the browser."""

    reader: int
    writer: int
    session: str = ""
    numbers: "itertools.count[int]" = dataclasses.field(default_factory=lambda: itertools.count(1))
    rest: bytes = b""

    def call(self, method: str, **params: object) -> Json:
        """Call a method of the protocol and return its result."""
        number = next(self.numbers)
        message: Json = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_S
        while True:
            answer = self._read(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self, deadline: float) -> Json:
        while b"\0" not in self.rest:
            ready, _, _ = select.select(
                [self.reader], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready, "the browser does not answer"
            data = os.read(self.reader, 1 << 16)
            assert data, "the browser has ended"
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Load a URL."""
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer

    def evaluate(self, expression: str) -> typing.Any:
        """Return the value of a JavaScript expression, None while the page changes."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click on the middle of an element with the mouse."""
        x, y = self.evaluate(_MIDDLE % json.dumps(selector))
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button: Json = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)


@contextlib.contextmanager
def page(browser: str, folder: pathlib.Path, *, localhost: str) -> collections.abc.Generator[Page]:
    """Start a browser that reaches `localhost` at another address, as behind a tunnel."""
    commands, writer = os.pipe()
    reader, events = os.pipe()
    flags = [
        *_FLAGS,
        f"--user-data-dir={folder}",
        f"--host-resolver-rules=MAP localhost {localhost}",
    ]
    line = f'exec "$@" 3<&{commands} 4>&{events}'
    argv = ["bash", "-c", line, "bash", browser, *flags, "--remote-debugging-pipe", "about:blank"]
    process = subprocess.Popen(
        argv, pass_fds=(commands, events), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(commands)
    os.close(events)
    try:
        one = Page(reader, writer)
        target = one.call("Target.createTarget", url="about:blank")["targetId"]
        attached = one.call("Target.attachToTarget", targetId=target, flatten=True)
        one.session = attached["sessionId"]
        one.call("Page.enable")
        yield one
    finally:
        process.terminate()
        process.wait(30)
        os.close(reader)
        os.close(writer)

"""Look for secrets where others can see them: while a block of code runs, and in its leftovers."""

import base64
import collections.abc
import contextlib
import json
import os
import pathlib
import re
import threading
import urllib.parse

_MINE = os.getpid()


def forms(secret: str) -> set[bytes]:
    """Return a secret as it may show: raw, percent-encoded, in base64 at each offset, quoted in JSON."""
    raw = secret.encode()
    percent = urllib.parse.quote(secret, safe="")
    found = {
        raw,
        percent.encode(),
        re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), percent).encode(),
        urllib.parse.quote_plus(secret).encode(),
        json.dumps(secret)[1:-1].encode(),
        secret.replace("\\", "\\\\").replace('"', '\\"').encode(),
    }
    for offset in range(
        3
    ):  # what stands before it shifts base64's groups; the first and last may differ
        coded = base64.b64encode(b"x" * offset + raw)
        middle = coded[4 if offset else 0 : len(coded) // 4 * 4 - 4]
        found |= {middle, middle.translate(bytes.maketrans(b"+/", b"-_"))}
    return {form for form in found if len(form) >= 6}


def within(data: bytes, secrets: collections.abc.Iterable[str]) -> bool:
    """Tell whether any form of any of the secrets is in the data."""
    return any(form in data for secret in secrets for form in forms(secret))


def found_in(
    places: collections.abc.Mapping[str, str], secrets: collections.abc.Mapping[str, str]
) -> collections.abc.Iterator[str]:
    """Yield the name of each secret with the place whose text holds a form of it, and never the secret."""
    texts = {place: text.encode(errors="replace") for place, text in places.items()}
    for name, secret in secrets.items():
        sought = forms(secret)
        yield from (
            f"{name} in {place}"
            for place, text in texts.items()
            if any(form in text for form in sought)
        )


class Watch:
    """Reads all command lines of the machine, again and again, and the environments of other accounts' processes."""

    def __init__(self, secrets: collections.abc.Iterable[str], every_s: float) -> None:
        self._sought = re.compile(
            b"|".join(re.escape(form) for secret in secrets for form in forms(secret))
        )
        self._every_s = every_s
        self._over = threading.Event()
        self.found: list[str] = []
        self.looks = 0
        self.programs: set[str] = set()

    def run(self) -> None:
        """Look until stopped."""
        while not self._over.is_set():
            self._look()
            self.looks += 1
            self._over.wait(self._every_s)

    def stop(self) -> None:
        """Stop looking."""
        self._over.set()

    def _look(self) -> None:
        for process in pathlib.Path("/proc").iterdir():
            if process.name.isdigit() and int(process.name) != _MINE:
                with contextlib.suppress(OSError):
                    self._look_at(process)

    def _look_at(self, process: pathlib.Path) -> None:
        line = (process / "cmdline").read_bytes()
        # JuiceFS 1.3 writes its arguments again, as one text with blanks
        self.programs.add(
            pathlib.PurePath(re.split(rb"[\0 ]", line, maxsplit=1)[0].decode(errors="replace")).name
        )
        if self._sought.search(line):
            self.found.append(f"command line of {line[:60]!r}...")
        if process.stat().st_uid != 0 and self._sought.search((process / "environ").read_bytes()):
            self.found.append(f"environment of {line[:60]!r}...")


@contextlib.contextmanager
def watched(*secrets: str, every_s: float = 0.002) -> collections.abc.Generator[Watch]:
    """Fail unless no process shows one of the secrets while the block runs."""
    watch = Watch(secrets, every_s)
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.stop()
        thread.join(30)
    assert watch.looks, "nobody looked"
    assert not watch.found, "; ".join(sorted(set(watch.found)))


def in_files(folder: pathlib.Path, *secrets: str) -> list[pathlib.Path]:
    """List the files below a folder that hold a secret and that other accounts than root may read."""
    found: list[pathlib.Path] = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 22:
            private = path.stat().st_mode & 0o077 == 0
            if not private and within(path.read_bytes(), secrets):
                found.append(path)
    return found

"""The shell lines of the pages that readers type from, and their entries in walk.toml."""

import collections.abc
import dataclasses
import pathlib
import re
import shlex
import subprocess
import tomllib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
WALK: dict[str, Any] = tomllib.loads(pathlib.Path(__file__).with_name("walk.toml").read_text())
PAGES = [  # in a new user's reading order
    "README.md",
    *(
        f"docs/{path.relative_to(ROOT / 'docs')}"
        for path in sorted((ROOT / "docs").glob("tutorial/*.md"))
    ),
    *(
        f"docs/{path.relative_to(ROOT / 'docs')}"
        for path in sorted((ROOT / "docs").glob("howto/*.md"))
    ),
    "docs/ways/several-clouds.md",
]
_BLOCK = re.compile(r"^```(shell|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"\s+# .*")


@dataclasses.dataclass(frozen=True)
class Line:
    """One command of a page: a line of a shell block, or several that belong together."""

    page: str
    number: int
    text: str  # on one line if it was continued, without the comment at its end

    def __str__(self) -> str:
        return f"{self.page}:{self.number}: {self.text}"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def reason(self) -> str | None:
        """Why the line is not run; None if it is."""
        found = [
            why for why, pages in WALK["not-run"].items() if self.text in pages.get(self.page, ())
        ]
        assert len(found) <= 1, f"{self} is listed twice: {found}"
        return found[0] if found else None


def lines(page: str) -> collections.abc.Iterator[Line]:
    """Yield the commands of a page in their order."""
    text = (ROOT / page).read_text()
    for block in _BLOCK.finditer(text):
        if block[1] == "shell":
            yield from _commands(page, text.count("\n", 0, block.start(2)) + 1, block[2])


def files(page: str) -> list[str]:
    """Return the page's Python blocks in their order."""
    return [
        block[2] for block in _BLOCK.finditer((ROOT / page).read_text()) if block[1] == "python"
    ]


def _commands(page: str, first: int, block: str) -> collections.abc.Iterator[Line]:
    pending, start = "", first
    for number, line in enumerate(block.splitlines(), first):
        if not pending and (not line.strip() or line.startswith("#")):
            continue
        start = start if pending else number
        pending += line + "\n"
        if not line.endswith("\\") and _is_whole(pending):
            joined = re.sub(r"\s*\\\n\s*", " ", pending).rstrip()
            yield Line(page, start, joined if "\n" in joined else _COMMENT.sub("", joined))
            pending = ""
    assert not pending, f"{page}:{start}: a shell cannot read {pending!r}"


def _is_whole(script: str) -> bool:
    """Whether a shell reads it to its end; an open heredoc is only warned of."""
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    return not done.stderr

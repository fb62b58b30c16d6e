"""The paths of a run's code: in the run's copy, and in the folder that its user knows."""

import collections.abc
import dataclasses
import itertools
import re

from ddp.node.diagnosis import excerpts

_FRAME = re.compile(r'\bFile "([^"<]+)", line (\d+)')


@dataclasses.dataclass(frozen=True)
class CodePaths:
    """The folder that a run's code came from, and the copy that it ran."""

    own: str = ""  # empty: unknown
    copy: str = ""

    def translate(self, line: str) -> str:
        """Replace paths of the copy in a line by paths of the user's own folder."""
        if not self.own or not self.copy:
            return line
        return line.replace(f"{self.copy}/", f"{self.own}/")

    def find(self, lines: collections.abc.Sequence[str]) -> str:
        """Return the place of a failure in the user's code, such as train.py:21, or "".

        `lines` end with the error; the traceback's lines above it are indented.
        """
        last, *above = [excerpts.without_rank(line) for line in reversed(lines)] or [""]
        frames = itertools.takewhile(lambda line: line[:1].isspace(), above)
        for line in (last, *frames):
            for path, number in reversed(_FRAME.findall(self.translate(line))):
                if not path.startswith("/"):
                    return f"{path}:{number}"
                if self.own and path.startswith(f"{self.own}/"):
                    return f"{path.removeprefix(self.own)[1:]}:{number}"
        return ""

"""The code of a run as its user knows it: lines and tracebacks name the user's own folder instead of the run's copy."""

import collections.abc
import dataclasses
import itertools
import re

from ddp.node.diagnosis import excerpts

_FRAME = re.compile(r'\bFile "([^"<]+)", line (\d+)')


@dataclasses.dataclass(frozen=True)
class Places:
    """The folder that a run's code came from, and the copy that it ran."""

    own: str = ""  # empty: unknown
    copy: str = ""

    def translate(self, line: str) -> str:
        """Return a line with the paths of the copy as those of the user's own folder."""
        return line.replace(f"{self.copy}/", f"{self.own}/") if self.own and self.copy else line

    def find(self, lines: collections.abc.Sequence[str]) -> str:
        """Return where a failure arose in the user's code, such as train.py:21, by its last lines; "" if unknown."""
        last, *above = [excerpts.without_rank(line) for line in reversed(lines)] or [""]
        for line in (last, *itertools.takewhile(lambda line: line[:1].isspace(), above)):
            for path, number in reversed(_FRAME.findall(self.translate(line))):
                if not path.startswith("/"):
                    return f"{path}:{number}"
                if self.own and path.startswith(f"{self.own}/"):
                    return f"{path.removeprefix(self.own)[1:]}:{number}"
        return ""

"""Errors of the operating system in a rank's last lines: number, files and possible cause."""

import dataclasses
import re

from ddp.node import storage
from ddp.node.diagnosis import excerpts, messages

_OF_LIMITS = (12, 24, 28, 122)  # memory, open files, room, quota
_NUMBERS = {words: number for number, words in storage.LOST_ERRORS.items()}
_WORDS = "|".join(map(re.escape, _NUMBERS))
# Python's; shutil.copytree's is in a list
_REFUSED = re.compile(rf"{messages.MODULES}\w*Error: (?:\[\(.*?)?\[Errno (\d+)\]")
_REFUSED_BY_LIBRARY = re.compile(
    rf"(?:{messages.MODULES}(?:OS|IO|Runtime|Safetensor)Error: |\s*what\(\):  filesystem error: )"
    rf".*({_WORDS})"
)
_REFUSED_BEHIND_PATH = re.compile(  # of the payload (files.py) and of the shell's commands
    rf": ({_WORDS})(?:;|$)"
)
_QUOTED_PATH = re.compile(r"(['\"])(/.*?)\1")
_BARE_PATH = re.compile(r"(?<![\w.'\"/])/[^\s'\":;,()\[\]<>]+")
_RELATIVE_PATH = re.compile(r": '([^'/][^']*)'(?: -> '[^']*')?$")
# Printed without an errno once a program's files were lost: by the writers of torch, C++ and NumPy,
# and by Python's imports
_OF_FILES = re.compile(
    rf"\[Errno (?!(?:{'|'.join(map(str, _OF_LIMITS))})\])\d+\]|Bus error|SIGBUS|signal 7 |{_WORDS}"
    r"|inline_container\.cc|PytorchStream|iostream error|requested and \d+ written"
    r"|Parent directory .* does not exist|SafetensorError|ModuleNotFoundError|ImportError"
    r"|BadZipFile|EOFError"
)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A call that the operating system refused to a rank."""

    number: int  # errno.h's
    paths: tuple[str, ...]  # (): unknown, or none as of a socket
    node: str = ""  # "": the rank's own

    @property
    def is_of_filesystem(self) -> bool:
        """Return whether a shared filesystem that has failed gives this error."""
        return self.number in storage.LOST_ERRORS

    @property
    def may_be_of_files(self) -> bool:
        """Return whether lost files may be the reason, as no limit is."""
        return self.number not in _OF_LIMITS


def find(lines: list[str]) -> Refusal | None:
    """Find a refusal in a rank's last lines; one that a failed filesystem gives goes first."""
    first: Refusal | None = None
    for line in excerpts.raised(lines, with_context=True):
        refusal = _parse(line)
        if refusal is None:
            continue
        if refusal.is_of_filesystem:
            return refusal
        first = first or refusal
    return first


def _parse(line: str) -> Refusal | None:
    node = ""
    if passed_on := messages.PASSED_ON.match(line):
        node = passed_on["node"]
        line = line[passed_on.end() :]
    number = _find_number(line)
    if number is None:
        return None
    return Refusal(number, find_paths(line), node)


def _find_number(line: str) -> int | None:
    """Return the errno that an error names by number or words; None if it names none."""
    if found := _REFUSED.match(line):
        return int(found[1])
    if found := _REFUSED_BY_LIBRARY.match(line):
        return _NUMBERS[found[1]]
    found = _REFUSED_BEHIND_PATH.search(line)
    if found and find_paths(line[: found.start()]):
        return _NUMBERS[found[1]]
    return None


def find_paths(line: str) -> tuple[str, ...]:
    """Return the paths that an error names: absolute ones, and a quoted relative one at its end."""
    quoted = [match[2] for match in _QUOTED_PATH.finditer(line)]
    bare = _BARE_PATH.findall(_QUOTED_PATH.sub("", line))
    relative = _RELATIVE_PATH.findall(line)
    return (*quoted, *bare, *relative)


def may_be_of_files(line: str) -> bool:
    """Return whether an error may come from lost files: only with other evidence does it."""
    return _OF_FILES.search(line) is not None

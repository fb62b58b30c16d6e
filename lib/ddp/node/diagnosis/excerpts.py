"""The lines of an output that name the failure: its last error, and its causes."""

import itertools
import re

# A log without such a line reports no error
_TELLING = re.compile(
    r"\[FATAL\]|Traceback \(most recent call last\)|^\S*(Error|Exception)\b|Segmentation fault"
    r"|Killed|[Oo]ut of memory|^\s*what\(\): |^rank \d+ leaves: "
)
# torch's prefix of an exception's lines within a process group
_RANK = re.compile(r"^\[rank\d+\]: ?")
# Exceptions of Python, also within an exception group, and of C++, which end the process by
# SIGABRT, as NCCL's watchdog does; it then prints where they were thrown.
_REASON = re.compile(
    r"(\s*\| )?[\w.]*(Error|Exception|Interrupt|Exit|InvalidCxxCompiler)\b(?! raised from )"
    r"|\s*what\(\): "
)
_NOT_FOUND = re.compile(r": \S+: (command )?not found$")
_TRACEBACK = "Traceback (most recent call last)"
_IGNORED = "Exception ignored "  # Python's, of a destructor or the last flush; its error follows
# faulthandler's, with the stack behind it, the innermost call first
CRASH = "Fatal Python error: "
CAUSE = "The above exception was the direct cause of the following exception:"
CONTEXT = "During handling of the above exception, another exception occurred:"


def has_error(lines: list[str]) -> bool:
    """Return whether an output reports an error."""
    return any(map(is_error, lines))


def is_error(line: str) -> bool:
    """Return whether a line reports an error, or begins to."""
    return _TELLING.search(line) is not None


def without_rank(line: str) -> str:
    """Remove torch's prefix with the rank's number from a line."""
    return _RANK.sub("", line, count=1)


def last_error(text: list[str], max_lines: int) -> list[str]:
    """Return the lines up to the last `[FATAL]`, exception or crash, without those after it.

    The last line holds the whole message, with the indented lines below it, or the place of a
    crash.
    """
    text = [line for line in text if without_rank(line).strip()]
    bare = [without_rank(line) for line in text]
    reason, crash = _find_last(bare)
    is_abort_of_reason = reason >= 0 and bare[crash].startswith(f"{CRASH}Aborted")
    if crash > reason and not is_abort_of_reason:
        return _describe_crash(bare[crash:], max_lines)
    if reason < 0:
        return text[-max_lines:]

    whole = " ".join([text[reason], *_rest_of_message(bare[reason:])])
    above = text[max(0, reason + 1 - max_lines) : reason]
    return [*above, whole]


def _find_last(lines: list[str]) -> tuple[int, int]:
    """Return the places of the last error and of the last crash; -1: none."""
    reason = crash = -1
    is_raising = is_ignored = False
    for index, line in enumerate(lines):
        if line.startswith(_TRACEBACK):
            is_raising = True
        elif line.startswith(_IGNORED):
            is_ignored = True
        elif _is_reason(line) or (is_raising and not line[0].isspace()):
            if not is_ignored:
                reason = index
            is_raising = is_ignored = False
        elif line.startswith(CRASH):
            crash = index
    return reason, crash


def _is_reason(line: str) -> bool:
    return "[FATAL]" in line or _REASON.match(line) is not None


def _describe_crash(lines: list[str], max_lines: int) -> list[str]:
    """Return the stack of a crash, the innermost call last, then the crash with that call."""
    stacks = itertools.dropwhile(lambda line: not line.startswith("Current thread"), lines)
    next(stacks, None)
    frames = list(itertools.takewhile(lambda line: line.startswith("  File "), stacks))
    where = [frame.strip() for frame in frames[:1]]
    above = frames[: max_lines - 1]
    return [*reversed(above), ", ".join([lines[0], *where])]


def _rest_of_message(lines: list[str]) -> list[str]:
    """Return the lines below an error that belong to its message."""
    error, *below = lines
    if error.startswith("nccl") and below[:1] == ["Last error:"]:
        return [line.strip() for line in below[:2]]
    if "Error building extension" in error:  # torch's cpp_extension.py, then the shell's words
        return [line for line in below if _NOT_FOUND.search(line)][:1]
    if error[0].isspace():  # as in an exception group
        return []
    indented = itertools.takewhile(lambda line: line[0].isspace(), below)
    return [line.strip() for line in indented]


def raised(lines: list[str], *, with_context: bool) -> list[str]:
    """Return a rank's last line, then the first lines of the exceptions that it was raised from.

    `with_context` adds the exceptions that were being handled.
    """
    joints = (CAUSE, CONTEXT) if with_context else (CAUSE,)
    bare = [without_rank(line) for line in lines]
    found = bare[-1:]
    first = ""
    for before, line in itertools.pairwise(bare):
        if before[:1].isspace() and not line[:1].isspace():
            first = line  # behind the frames of a traceback
        if line in joints:
            found.append(first)
    return found

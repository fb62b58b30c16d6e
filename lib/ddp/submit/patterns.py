"""Refuse patterns of `--metric` that would hold up a job: this file is also the program that tries them.

Tried are lines made of what a pattern itself looks for, repeated, since these make it backtrack. The limits are the
processor's time, not a clock's, so that a busy machine refuses nothing.
"""

import importlib
import itertools
import json
import re
import resource
import sys
import time
import typing

_LENGTH = 1000  # as ddp.node.quantities searches
_LINE_S, _ALL_S = (
    0.05,
    2,
)  # of the processor, for a line, as ddp.node.quantities allows, and for all of them
_MAX_SAMPLES = 12
_CATEGORIES = {
    "DIGIT": "1",
    "SPACE": " ",
    "WORD": "a",
    "NOT_DIGIT": "a",
    "NOT_SPACE": "a",
    "NOT_WORD": "-",
}


def samples(tree: typing.Any) -> list[str]:
    """Return characters that the parts of a parsed pattern match, in their order."""
    found: list[str] = []
    for part in tree:
        is_operation = part.__class__ is tuple and len(part) == 2  # else one of several parts
        name, value = (str(part[0]), part[1]) if is_operation else ("", part)
        if name in ("LITERAL", "NOT_LITERAL") and isinstance(value, int):
            found.append(chr(value) if name == "LITERAL" else "a")
        elif name == "RANGE":
            found.append(chr(value[0]))
        elif name == "CATEGORY":
            found.append(_CATEGORIES.get(str(value).removeprefix("CATEGORY_"), "a"))
        elif name == "ANY":
            found.append("a")
        elif hasattr(value, "__len__") and not isinstance(
            value, str
        ):  # of a group, a repeat, a choice
            found += samples(value)
    return found


def lines(pattern: str) -> list[str]:
    """Return lines that may make a pattern slow."""
    parser = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
    found = samples(parser.parse(pattern))
    some = list(dict.fromkeys(found))[:_MAX_SAMPLES]
    whole = "".join(found)
    parts = [*some, *map("".join, itertools.permutations(some, 2)), whole, "a", " ", "1"]
    repeated = [
        (part * _LENGTH)[: _LENGTH - 1] + end for part in parts if part for end in ("", "\0")
    ]
    return [line[:_LENGTH] for line in [*repeated, *(whole + part * _LENGTH for part in some)]]


def main() -> None:
    """Try the patterns of standard input, and print as JSON the one that is slow, or null."""
    resource.setrlimit(
        resource.RLIMIT_CPU, (_ALL_S, _ALL_S)
    )  # a search cannot be stopped otherwise
    for pattern in json.load(sys.stdin):
        print(json.dumps(pattern), flush=True)  # the last word where the kernel ends this process
        compiled = re.compile(pattern)
        for line in lines(pattern):
            began = time.process_time()
            compiled.search(line)
            if time.process_time() - began > _LINE_S:
                return
    print("null")


if __name__ == "__main__":
    main()

"""SLURMD_OPTIONS in /etc/default/slurmd, written and read exactly as charmed-hpc's slurmd does it.

The value is `shlex.join`ed and unquoted outside:
`--conf 'cpus=2 ... features=slurmd' -Z -N slurmd-0 --conf-server slurmctld-0:6817`.
A token that starts with `-` takes the next one as its value unless that starts with `-` too.
"""

import collections.abc
import pathlib
import re
import shlex

from slurm_ddp import files

PATH = pathlib.Path("/etc/default/slurmd")

Options = dict[str, str | bool]

_LINE = re.compile(r"(?m)^SLURMD_OPTIONS=(.*)$\n?")

# What slurmutils' Node model knows; upstream refuses everything else.
NODE_KEYS = frozenset(
    "nodename nodehostname nodeaddr bcastaddr boards corespeccount corespersocket cpubind cpus cpuspeclist features "
    "gres memspeclimit port procs realmemory reason sockets socketsperboard state threadspercore tmpdisk weight".split()
)
_REFUSED = frozenset({"nodename", "nodeaddr", "nodehostname", "state", "reason", "port"})


def load(path: pathlib.Path = PATH) -> Options:
    """Return the options in the file, in their order."""
    found = _LINE.search(path.read_text()) if path.exists() else None
    if found is None:
        return {}
    words = shlex.split(re.sub(r"\s+#.*", "", found.group(1)))  # python-dotenv ends a value there
    options: Options = {}
    while words:
        name = words.pop(0)
        options[name] = words.pop(0) if words and not words[0].startswith("-") else True
    return options


def save(options: collections.abc.Mapping[str, str | bool], path: pathlib.Path = PATH) -> bool:
    """Write the options; other lines of the file stay. Return whether anything changed."""
    words = [word for name, value in options.items() for word in ([name] if value is True else [name, str(value)])]
    line = f"SLURMD_OPTIONS={shlex.join(words)}\n"
    text = path.read_text() if path.exists() else ""
    text = (
        _LINE.sub(lambda _: line, text, count=1) if _LINE.search(text) else f"{text.rstrip(chr(10))}\n{line}".lstrip()
    )
    return files.ensure_file(path, text)


def parse_node(text: str) -> dict[str, str]:
    """Return the node options in `--conf`, keys in lower case.

    Raises:
        ValueError: a word is not `key=value`. The message is one line.
    """
    node: dict[str, str] = {}
    for word in text.split():
        key, separator, value = word.partition("=")
        if not separator or not key or not value:
            raise ValueError(f"{word!r} is not of the form key=value")
        node[key.lower()] = value
    return node


def parse_parameters(text: str) -> dict[str, str]:
    """Return the node options of the action's parameter.

    Raises:
        ValueError: a word is not `key=value`, or names an option that is unknown or not the operator's to set.
    """
    node = parse_node(text)
    for key in node:
        if key in _REFUSED:
            raise ValueError(f"{key} cannot be set")
        if key not in NODE_KEYS:
            raise ValueError(f"{key} is not an option of a node")
    return node


def join_node(node: collections.abc.Mapping[str, str]) -> str:
    """Return node options as `--conf` takes them."""
    return " ".join(f"{key}={value}" for key, value in node.items())

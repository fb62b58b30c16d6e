"""The `slurm_gres` interface: compute nodes hand their gres.conf lines to the controller.

The provider is slurm-gpu on a compute node (endpoint `node-gres`), the requirer slurm-gpu on the
controller (`gres`). Each compute unit writes its own unit databag, so a node's change wakes the
controller's charm once and no other node. The controller's leader answers in its application
databag; since that wakes every node, the answer names only nodes whose databag asks for it, and
does not change otherwise.
"""

import collections.abc
import hashlib
import re
import typing

import pydantic

_NAME = "[A-Za-z0-9][A-Za-z0-9_.-]{0,252}"
_VALUE = re.compile(r"[A-Za-z0-9_./,:\[\]+-]+")
_KEYS = frozenset({"Name", "Type", "File", "MultipleFiles", "Count", "Cores", "Links", "Flags"})
MAX_LINES = 1024  # a node of 16 cards in 7 MIG instances each, with shards, needs 128


def is_node_name(text: str) -> bool:
    """Report whether a node may have this name."""
    return re.fullmatch(_NAME, text) is not None


def check_line(line: str) -> str:
    """Return the line.

    Raises `ValueError` unless it is one gres.conf record of known keys.
    """
    pairs = [word.partition("=") for word in line.split(" ")]
    keys = [key for key, _, _ in pairs]
    are_known = all(key in _KEYS and _VALUE.fullmatch(text) for key, _, text in pairs)
    are_distinct = len(set(keys)) == len(keys)
    if not are_known or not are_distinct or keys[0] != "Name":
        raise ValueError(f"not a gres.conf record: {line[:80]!r}")
    return line


_Node = typing.Annotated[str, pydantic.StringConstraints(pattern=f"^{_NAME}$")]
_Gres = typing.Annotated[str, pydantic.StringConstraints(pattern="^[A-Za-z0-9_./,:+-]*$")]
_Line = typing.Annotated[str, pydantic.AfterValidator(check_line)]
_Lines = typing.Annotated[tuple[_Line, ...], pydantic.Field(max_length=MAX_LINES)]


class NodeGres(pydantic.BaseModel, frozen=True):
    """Unit databag of a compute node. Any field may be absent: the peer may be older or newer."""

    node: _Node | None = None  # the name that slurmd registers
    gres: _Gres | None = None  # "gpu:h100:8", as in the node's --conf; empty when it has none
    lines: _Lines | None = None  # gres.conf lines without NodeName, for AutoDetect=off
    awaits: bool | None = (
        None  # the node registers only once its lines are these, or none, so it needs an answer
    )

    @property
    def digest(self) -> str:
        """The digest of the node's name and lines, the same on both sides of the relation."""
        return digest(self.node or "", self.lines or ())


class ControllerGres(pydantic.BaseModel, frozen=True):
    """The controller's application databag.

    Any field may be absent: the peer may be older or newer.
    """

    autodetect: str | None = (
        None  # what gres.conf makes nodes without lines do: "nvidia", "nvml", ... or "off"
    )
    applied: tuple[str, ...] | None = (
        None  # digests of awaited lines that the running slurmctld hands out, sorted
    )


def digest(node: str, lines: collections.abc.Iterable[str]) -> str:
    """Make 12 hexadecimal digits that differ when the node's name or any of its lines does."""
    return hashlib.sha256("\n".join((node, *lines)).encode()).hexdigest()[:12]

"""The `slurm_gres` interface: compute nodes hand their gres.conf lines to the controller.

The provider is slurm-gpu on a compute node (endpoint `node-gres`), the requirer slurm-gpu on the controller (`gres`).
Each compute unit writes its own unit databag, so a node's change wakes the controller seat once and no other node.
The controller's leader answers in its application databag; since that wakes every node, the answer names only nodes
that said they wait for it, and does not change otherwise.
"""

import collections.abc
import hashlib
import re

import pydantic

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
_VALUE = re.compile(r"[A-Za-z0-9_./,:\[\]+-]+")
_AUTODETECT = frozenset({"off", "nvidia", "nvml"})
_KEYS = frozenset({"Name", "Type", "File", "MultipleFiles", "Count", "Cores", "Links", "Flags"})
_GRES = re.compile(r"[A-Za-z0-9_./,:+-]*")
MAX_LINES = 1024  # a node of 16 cards in 7 MIG instances each, with shards, needs 128


class NodeGres(pydantic.BaseModel, frozen=True):
    """Unit databag of a compute node. Any field may be absent: the peer may be older or newer."""

    node: str | None = None  # the name that slurmd registers
    gres: str | None = None  # "gpu:h100:8", as in the node's --conf; empty when it has none
    lines: tuple[str, ...] | None = None  # gres.conf lines without NodeName; without AutoDetect they mean `off`
    awaits: bool | None = None  # the node registers only once its lines are these, or none, so it needs an answer

    @pydantic.field_validator("node")
    @classmethod
    def _check_node(cls, node: str | None) -> str | None:
        if node is not None and not is_node_name(node):
            raise ValueError("not a node name")
        return node

    @pydantic.field_validator("gres")
    @classmethod
    def _check_gres(cls, gres: str | None) -> str | None:
        if gres is not None and not _GRES.fullmatch(gres):
            raise ValueError("not a Gres string")
        return gres

    @pydantic.field_validator("lines")
    @classmethod
    def _check_lines(cls, lines: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if lines is not None:
            if len(lines) > MAX_LINES:
                raise ValueError(f"more than {MAX_LINES} lines")
            for line in lines:
                check_line(line)
        return lines

    @property
    def digest(self) -> str:
        """A fingerprint of the node's name and lines, the same on both sides of the relation."""
        return digest(self.node or "", self.lines or ())


class ControllerGres(pydantic.BaseModel, frozen=True):
    """Application databag of the controller. Any field may be absent: the peer may be older or newer."""

    autodetect: str | None = None  # what gres.conf makes nodes without lines do: "nvidia", "nvml", ... or "off"
    applied: tuple[str, ...] | None = None  # digests of awaited lines that the running slurmctld hands out, sorted


def is_node_name(text: str) -> bool:
    """Whether a node may have this name."""
    return _NAME.fullmatch(text) is not None


def check_line(line: str) -> None:
    """Raise `ValueError` unless `line` is one gres.conf record of known keys, with nothing that could add another."""
    pairs = [word.partition("=") for word in line.split(" ")]
    if pairs[0][0] == "AutoDetect" and pairs[0][2] in _AUTODETECT:
        del pairs[0]
    if not pairs or any(key not in _KEYS or not _VALUE.fullmatch(text) for key, _, text in pairs):
        raise ValueError(f"not a gres.conf record: {line[:80]!r}")
    keys = [key for key, _, _ in pairs]
    if keys[0] != "Name" or len(set(keys)) != len(keys):
        raise ValueError(f"not a gres.conf record: {line[:80]!r}")


def digest(node: str, lines: collections.abc.Iterable[str]) -> str:
    """Return 12 hexadecimal digits that differ when the node's name or any of its lines does."""
    return hashlib.sha256("\n".join((node, *lines)).encode()).hexdigest()[:12]

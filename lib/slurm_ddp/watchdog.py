"""Code that the GPU health check and the mount keeper share: both check a machine from a timer.

The system's Python runs them, apart from the charm that installed them (packing.py). So this module
and its imports need the standard library only.
"""

import collections.abc
import os
import pathlib

from slurm_ddp.commands import CommandError, run
from slurm_ddp.slurm import nodes

SCONTROL_S = 6.0
PASSES_TO_RESUME = 2  # in a row, before a node that a program drained is resumed
_MOST_REASON = 200  # characters of a drain's reason


def show_node(name: str, *, timeout: float = SCONTROL_S) -> nodes.Node:
    """Show the node as the controller reports it. Raises `CommandError`."""
    shown = nodes.parse(run(nodes.SCONTROL, "show", "node", name, "-o", timeout=timeout).stdout)
    if not shown:
        raise CommandError(f"scontrol show node {name} printed no node")
    return shown[0]


def show_nodes(*, timeout: float = SCONTROL_S) -> list[nodes.Node]:
    """Show all nodes as the controller reports them. Raises `CommandError`."""
    return nodes.parse(run(nodes.SCONTROL, "show", "nodes", "-o", timeout=timeout).stdout)


def is_drained_by(prefix: str, node: nodes.Node) -> bool:
    """Report whether the node is drained with a reason that begins with this program's prefix."""
    return node.is_drained and (node.reason or "").startswith(prefix)


def drain_reason(prefix: str, findings: collections.abc.Iterable[object]) -> str:
    """Join the findings to a drain's reason, each once; cut it to what `sinfo -R` can show."""
    return f"{prefix}{'; '.join(dict.fromkeys(map(str, findings)))}"[:_MOST_REASON]


def drain(name: str, reason: str, *, timeout: float = SCONTROL_S) -> None:
    """Drain the node. Raises `CommandError`."""
    run(
        nodes.SCONTROL,
        "update",
        f"nodename={name}",
        "state=drain",
        f"reason={reason}",
        timeout=timeout,
    )


def resume(name: str, *, timeout: float = SCONTROL_S) -> None:
    """Resume the node. Raises `CommandError`."""
    run(nodes.SCONTROL, "update", f"nodename={name}", "state=resume", timeout=timeout)


def write(path: pathlib.Path, text: str, mode: int = 0o600) -> None:
    """Replace a file atomically, without waiting for the disk as `files.ensure_file` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)

"""Slurm's scontrol, as upstream's charms use it. The stand-ins share none of this with our own charms on purpose."""

import re
import time

from slurm_ddp.run import CommandError, run

_SCONTROL = "/usr/bin/scontrol"


class SlurmError(Exception):
    """Slurm refused or did not answer. `str()` is one line in Slurm's own words."""


def node_state(name: str) -> str | None:
    """Return the node's state with its flags, such as `DOWN+DYNAMIC_NORM`; None where the controller does not know it.

    Raises:
        SlurmError: the controller does not answer.
    """
    shown = run(_SCONTROL, "show", "node", name, "-o", check=False)
    state = re.search(r"\bState=(\S+)", shown.stdout)
    if state:
        return state.group(1)
    if "not found" in shown.stdout + shown.stderr:
        return None
    raise SlurmError(f"scontrol show node {name}: {shown.stderr.strip() or shown.stdout.strip()}")


def wait_for_node(name: str, timeout_s: float = 60.0) -> None:
    """Wait until the node registered.

    Raises:
        SlurmError: it did not within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if node_state(name) is not None:
                return
        except SlurmError:
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise SlurmError(f"node {name} did not register within {timeout_s:.0f} s; see /var/log/slurm/slurmd.log")
        time.sleep(0.2)


def update_node(nodes: str, state: str, reason: str = "") -> None:
    """Set the state of nodes. Raises `SlurmError`."""
    _do("update", f"nodename={nodes}", f"state={state}", *([f"reason={reason}"] if reason else []))


def delete_node(name: str) -> None:
    """Delete a dynamic node. Raises `SlurmError`, as for a node that runs jobs."""
    _do("delete", f"nodename={name}")


def reconfigure() -> None:
    """Make all daemons read their configuration again. Raises `SlurmError`."""
    _do("reconfigure")


def _do(*arguments: str) -> None:
    try:
        run(_SCONTROL, *arguments)
    except CommandError as e:
        raise SlurmError(str(e)) from e

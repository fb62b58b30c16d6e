"""Slurm's nodes through `scontrol`: what the controller knows, and changes to it.

Functions that ask the controller raise `ControllerSilent` when it does not answer, and `NodeError`
for another failure. A state is as Slurm prints it: a base state (`IDLE`, `MIXED`, `DOWN`, ...) and
flags (`DRAIN`, `INVALID_REG`, ...).
"""

import collections.abc
import contextlib
import dataclasses
import re
import time

from slurm_ddp.commands import CommandError, Completed, last_line, run
from slurm_ddp.slurm import binaries
from slurm_ddp.slurm import show as show_text

SCONTROL = binaries.find("scontrol")
SQUEUE = binaries.find("squeue")
_TIMEOUT_S = 30.0  # MessageTimeout is 10 s; clients try a second controller before they give up
_POLL_S = 0.2

# What `sinfo` and older releases put behind a state: node_state_string() of
# src/common/slurm_protocol_defs.c.
_MARKED = "NOT_RESPONDING POWERED_DOWN POWERING_UP POWERING_DOWN POWER_DOWN MAINTENANCE REBOOT_REQUESTED REBOOT_ISSUED"
_MARKS = dict(zip("*~#%!$@^-", [*_MARKED.split(), "PLANNED"], strict=True))
_SHARED = frozenset({"shard", "mps"})
_BUSY_FLAGS = frozenset({"COMPLETING", "BLOCKED"})
_REASON = re.compile(r"^(?P<text>.*?)(?: \[[^\[\]@]+@(?P<at>[^\[\]]+)\])(?P<rest>.*)$", re.DOTALL)


class NodeError(Exception):
    """Slurm refused. `str()` is one line: the request, the node, and what Slurm printed."""


class ControllerSilent(NodeError):
    """No controller answered, or this machine cannot reach it yet. Asking again later may work."""


class NodeUnknown(NodeError):
    """The controller does not know this node."""


class NodeBusy(NodeError):
    """The node has jobs, or is part of a reservation, and must be free for the request."""


class _NoReservation(NodeError):
    """The controller does not know this reservation."""


# What clients print for each (slurm_errno.c of 24.11 and 25.11; of silence also configless clients
# without a slurmd)
_PHRASES: dict[type[NodeError], tuple[str, ...]] = {
    ControllerSilent: (
        "Unable to contact slurm controller",
        "standby mode",
        "Socket timed out",
        "Transport endpoint",
        "authentication error",
        "Unable to authenticate",
        "Could not establish a configuration source",
        "Zero Bytes were transmitted",
        "Connection refused",
    ),
    NodeBusy: ("Requested nodes are busy", "Requested node is busy"),
    NodeUnknown: ("Invalid node name specified",),
    _NoReservation: ("Requested reservation is invalid",),
}


def is_controlled() -> bool:
    """Check whether a controller is up, the primary or a backup."""
    with contextlib.suppress(CommandError):
        return " is UP" in run(SCONTROL, "ping", timeout=_TIMEOUT_S, check=False).stdout
    return False


@dataclasses.dataclass(frozen=True)
class Node:
    """One node as the controller sees it now."""

    name: str
    state: str  # the base state, in capitals
    flags: frozenset[str]
    gres: str | None  # as printed, with socket hints taken off: "gpu:h100:8"
    reason: str | None  # without the author
    alloc_tres: str | None
    fields: dict[str, str]  # the whole record
    reason_time: float | None = None  # when the reason was set, in seconds since 1970

    @property
    def is_busy(self) -> bool:
        """Whether jobs hold resources here or are being cleaned up."""
        return (
            self.state in {"ALLOCATED", "MIXED"}
            or bool(self.flags & _BUSY_FLAGS)
            or self.fields.get("CPUAlloc", "0") != "0"
            or self.alloc_tres is not None
        )

    @property
    def is_valid(self) -> bool:
        """Whether the controller accepted the node's last registration."""
        return not self.flags & {"INVALID_REG", "INVAL"}

    @property
    def is_drained(self) -> bool:
        """Whether new jobs are kept away by a drain."""
        return "DRAIN" in self.flags

    @property
    def is_down(self) -> bool:
        """Whether the node is down."""
        return self.state == "DOWN"

    @property
    def is_dynamic(self) -> bool:
        """Whether the node registered itself (`slurmd -Z`), so that it may be deleted."""
        return bool(self.flags & {"DYNAMIC_NORM", "DYNAMIC_FUTURE"})

    @property
    def address(self) -> str | None:
        """The node's address: the one that it registered from, or the one set for it."""
        return show_text.value(self.fields, "NodeAddr")

    @property
    def boot_time(self) -> float | None:
        """When the machine was booted, by slurmd's last registration; in seconds since 1970."""
        return _time(self.fields.get("BootTime"))

    @property
    def slurmd_start_time(self) -> float | None:
        """When its slurmd was started, by the last registration; in seconds since 1970."""
        return _time(self.fields.get("SlurmdStartTime"))

    @property
    def state_text(self) -> str:
        """State and flags in one word, as `scontrol` prints them."""
        return "+".join((self.state, *sorted(self.flags)))


def show(name: str) -> Node | None:
    """Ask for a node; None when the controller does not know it."""
    what = f"show node {name}"
    answer = _ask(what, SCONTROL, "show", "node", name, "-o", check=False)
    for node in parse(answer.stdout):
        if node.name == name:
            return node
    if answer.returncode == 0 or f"Node {name} not found" in answer.stdout:
        return None
    raise _error(what, answer)


def show_all() -> list[Node]:
    """Ask for all nodes, sorted by name."""
    return sorted(
        parse(_scontrol("show nodes", "-a", "show", "nodes", "-o")), key=lambda node: node.name
    )


def parse(text: str) -> list[Node]:
    """Read the output of `scontrol show node -o`."""
    return [
        _node(record)
        for record in show_text.records(text)
        if "NodeName" in record and "State" in record
    ]


def drain(name: str, reason: str) -> None:
    """Drain the node; running jobs go on."""
    update(name, "drain", reason)


def resume(name: str) -> None:
    """Resume the node after a drain, a fail or a down."""
    update(name, "resume")


def update(name: str, state: str, reason: str | None = None) -> None:
    """Set the node's state.

    `down` ends its jobs: ask `Node.is_busy` first. After `undrain` it stays down.
    """
    because = () if reason is None else (f"reason={reason}",)
    _scontrol(
        f"set node {name} to {state}", "update", f"nodename={name}", f"state={state}", *because
    )


def delete(name: str) -> None:
    """Delete a dynamic node if it is there.

    Raises `NodeBusy` if it has jobs or is part of a reservation.
    """
    with contextlib.suppress(NodeUnknown):
        _scontrol(f"delete node {name}", "delete", f"nodename={name}")


def reconfigure() -> None:
    """Make the controller read its files again and send them to the nodes."""
    _scontrol("reconfigure", "reconfigure", timeout=120)


def job_ids(name: str) -> list[str]:
    """Ask for the ids of the jobs that hold or are about to hold the node, sorted."""
    argv = (SQUEUE, "--noheader", "--nodelist", name, "--format", "%i")
    return sorted(set(_ask(f"list jobs on {name}", *argv).stdout.split()))


def remembered_jobs(name: str, gres: str) -> list[str]:
    """Return the ids of the node's jobs that asked for this Gres, sorted.

    Finished jobs are listed until MinJobAge is over.
    """
    fields = ",".join(
        ("jobarrayid:40", *(f"tres-per-{what}:400" for what in ("job", "node", "socket", "task")))
    )
    argv = (SQUEUE, "--noheader", "--states", "all", "--nodelist", name, "--Format", fields)
    rows = _ask(f"list former jobs on {name}", *argv).stdout.splitlines()
    return sorted({row.split()[0] for row in rows if f"gres/{gres}" in row})


def reservations(name: str) -> dict[str, str]:
    """Return the reservations that the node is part of, now or later.

    Each comes with its other nodes as a hostlist.

    `delete` is refused while one is active (26.05.5 removed the node from it), and removes the node
    from later ones.
    """
    found: dict[str, str] = {}
    for record in show_text.records(_scontrol("show reservations", "show", "reservations", "-o")):
        hosts = show_text.value(record, "Nodes")
        names = _scontrol(f"expand {hosts}", "show", "hostnames", hosts).split() if hosts else []
        if name in names:
            others = ",".join(other for other in names if other != name)
            short = (
                _scontrol(f"write {others}", "show", "hostlist", others).strip() if others else ""
            )
            found[record["ReservationName"]] = short
    return dict(sorted(found.items()))


def reserve(reservation: str, name: str, seconds: int) -> None:
    """Reserve the node for this many seconds, so that no new job starts on it.

    A reservation of this name is made or prolonged.

    No change of the node's state and no restart of slurmd or slurmctld ends it (24.11.5): jobs wait
    with "Reserved for maintenance", even in other reservations, and `delete` is refused.
    """
    try:
        _scontrol(
            f"prolong {reservation}",
            "update",
            f"reservationname={reservation}",
            f"endtime=now+{seconds}",
        )
    except _NoReservation:
        times = ("starttime=now", f"endtime=now+{seconds}", "flags=maint,ignore_jobs")
        who = (f"reservationname={reservation}", f"nodes={name}", "users=root")
        _scontrol(f"reserve {name}", "create", "reservation", *who, *times)


def unreserve(reservation: str) -> None:
    """End a reservation, if it is there."""
    with contextlib.suppress(_NoReservation):
        _scontrol(f"end {reservation}", "delete", f"reservationname={reservation}")


def wait(
    name: str, until: collections.abc.Callable[[Node | None], bool], *, timeout: float
) -> Node | None:
    """Return the node once `until` is true of it, or after `timeout` seconds.

    Raises `ControllerSilent` if the controller does not answer the last time.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline
        try:
            node = show(name)
            if late or until(node):
                return node
        except ControllerSilent:
            if late:
                raise
        time.sleep(_POLL_S)


def setting(name: str) -> str | None:
    """Ask for a setting of the controller's slurm.conf, None for one that is not set."""
    return show_text.value(
        show_text.config(_scontrol("show the configuration", "show", "config")), name
    )


def is_silence(printed: str) -> bool:
    """Report whether a command of Slurm's printed that no controller answers."""
    return any(phrase in printed for phrase in _PHRASES[ControllerSilent])


def same_gres(left: str | None, right: str | None) -> bool:
    """Compare two Gres strings: in any order, a missing count being one, without socket hints."""
    return gres_items(left) == gres_items(right)


def count_gres(text: str | None, name: str) -> int:
    """Count the Gres of this name, such as `gpu`, in a Gres string, over all types."""
    return sum(count for (kind, _), count in gres_items(text).items() if kind == name)


def plain_gres(text: str | None) -> str | None:
    """Return a Gres string without the socket hints `(S:0-1)` of `scontrol`; None for None."""
    return re.sub(r"\([^()]*\)", "", text or "").strip(", ") or None


def gres_items(text: str | None) -> dict[tuple[str, str], int]:
    """Count the Gres of a Gres string by name and type; the type may be empty."""
    items: dict[tuple[str, str], int] = {}
    words = (plain_gres(text) or "").split(",")
    for item in words:
        if not item.strip():
            continue
        name, *kind = item.strip().split(":")  # job requests are compared with capitals and all
        count = int(kind.pop()) if kind and kind[-1].isdigit() else 1
        # The controller always writes shares of a card with the card's type.
        key = (name, "" if name in _SHARED else ":".join(kind))
        items[key] = items.get(key, 0) + count
    return items


def _node(record: dict[str, str]) -> Node:
    state, flags = _state(record["State"])
    reason, at = _reason(show_text.value(record, "Reason"))
    return Node(
        name=record["NodeName"],
        state=state,
        flags=flags,
        gres=plain_gres(show_text.value(record, "Gres")),
        reason=reason,
        alloc_tres=show_text.value(record, "AllocTRES"),
        fields=record,
        reason_time=at,
    )


def _state(text: str) -> tuple[str, frozenset[str]]:
    base, *words = text.upper().split("+")
    flags = {word for word in words if word}
    while base and base[-1] in _MARKS:
        flags.add(_MARKS[base[-1]])
        base = base[:-1]
    return base, frozenset(flags)


def _reason(text: str | None) -> tuple[str | None, float | None]:
    """Split a reason into its text and the time when it was set.

    Who set it stands behind the first line of the text.
    """
    match = _REASON.match(text or "")
    if match is None:
        return text, None
    rest = " ".join(match["rest"].split())
    return f"{match['text']} {rest}".strip(), _time(match["at"])


def _time(text: str | None) -> float | None:
    """Read a time that Slurm printed: local, as this machine has it."""
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def _ask(what: str, *argv: str, timeout: float = _TIMEOUT_S, check: bool = True) -> Completed:
    """Run one of Slurm's commands.

    Without `check` only a controller that does not answer is an error.
    """
    try:
        answer = run(*argv, timeout=timeout, check=False)
    except CommandError as e:
        raise ControllerSilent(f"{what}: {e}") from e
    if answer.returncode:
        error = _error(what, answer)
        if check or isinstance(error, ControllerSilent):
            raise error
    return answer


def _scontrol(what: str, *arguments: str, timeout: float = _TIMEOUT_S) -> str:
    return _ask(what, SCONTROL, *arguments, timeout=timeout).stdout


def _error(what: str, answer: Completed) -> NodeError:
    printed = answer.stderr.strip() or answer.stdout.strip()
    text = f"{what}: {last_line(printed) or 'the command failed with no output'}"
    for kind, phrases in _PHRASES.items():
        if any(phrase in printed for phrase in phrases):
            return kind(text)
    return NodeError(text)

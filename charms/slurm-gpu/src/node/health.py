#!/usr/bin/env python3
"""gpu-health: check within a minute whether this machine's NVIDIA GPUs are fit for jobs.

    gpu-health [--act] [--node NAME] [--xids "+109 -74"]

It prints one JSON object, and exits 0 without findings, 2 with warnings only, 1 if jobs must stay
away. --act drains the node with a reason that begins with `gpu-health: `, and resumes a node with
such a reason after two passes without a finding to drain for. A finding that holds more than a
third of the nodes within minutes is only a warning on the others (node/fleet.py). --xids adds Xids
to drain for (+) to the table's, and names Xids to ignore (-). A value that a card does not support
is not a fault. Anything unreadable or unknown (a word, an Xid, an extra line) is a warning that
quotes it; a query that fails or hangs is a fault. Standard library only: the charm packs it with
its imports.
"""

import argparse
import collections.abc
import contextlib
import dataclasses
import json
import pathlib
import re
import sys
import time

import pci
from gpu import smi, xids
from gpu.smi import Finding
from node import fleet, kept
from slurm_ddp import files, records, watchdog
from slurm_ddp.commands import CommandError, last_line, run
from slurm_ddp.slurm import nodes

NVIDIA_SMI = "/usr/bin/nvidia-smi"
STATE = pathlib.Path("/var/lib/slurm-gpu/health.json")

KIND = kept.HEALTH
REASON = f"{KIND}: "
_SPARED = "not drained, since it holds too many nodes: see sinfo -R"
# The check must end before the 60 s limit of its unit: each query gets its own limit, or the time
# left if that is less, minus the time for the last order to Slurm.
_WHOLE_S = 53.0
_SMI_S, _LOG_S = 30.0, 8.0
_LEAST_S = 0.1
_FABRIC_SETTLES_S = 300.0  # a fabric manager has the cards of a host ready within minutes of boot

WARN, DRAIN = LEVELS = smi.LEVELS
EXIT_STATUS = {"ok": 0, DRAIN: 1, WARN: 2}


@dataclasses.dataclass(frozen=True)
class State:
    """The state that one check leaves for the next."""

    since: float = 0.0  # Xids logged before this count no longer
    passes: int = 0  # checks in a row without a finding to drain for
    drained: bool = False  # by this program
    reason: str = ""  # why jobs must stay away, from the last check
    # As `since`, of one card
    resets: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    began: str = ""  # the node's SlurmdStartTime at the last check
    spared: tuple[str, ...] = ()  # kinds of findings that are the fleet's

    @classmethod
    def load(cls) -> "State":
        """Load it, an empty one if it cannot be read."""
        return records.load(cls(), STATE)

    def save(self) -> None:
        """Keep it for the next check."""
        watchdog.write(STATE, records.text(self))


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one check found and did."""

    result: str  # "ok", or the worst finding's level
    findings: list[Finding]
    did: str
    seconds: float
    slurm: str  # why the controller could not be asked


def main(arguments: collections.abc.Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options, levels = _parse(sys.argv[1:] if arguments is None else list(arguments))
    answer = check(options.node, levels, acts=options.act)
    print(json.dumps(dataclasses.asdict(answer)))
    return EXIT_STATUS[answer.result]


def check(name: str | None, levels: dict[int, str], *, acts: bool = False) -> Answer:
    """Check once, and drain or resume the node of this name if it `acts`.

    `levels` are those that an option gives to Xids.
    """
    _Deadline.end = time.monotonic() + _WHOLE_S
    started = time.time()
    state = State.load()
    node, silent = _node(name)
    if state.drained and node is not None and not watchdog.is_drained_by(REASON, node):
        # An administrator ended the drain; but upstream's slurmd ends drains too, right after it
        # restarted its daemon, and then the hold is still there.
        was_ended = _began(node) == state.began or not kept.is_held(KIND)
        if acts and was_ended:
            kept.end(KIND)
        state = dataclasses.replace(
            state, since=started if was_ended else state.since, drained=False
        )
    findings = examine(node, levels, state)
    spared = fleet.kinds(_reason(findings)) & set(state.spared)
    if acts and node is not None and not node.is_drained:
        spared |= _shared(_reason(_demoted(findings, spared)), node)
    findings = _demoted(findings, spared)
    did = (
        act(name, node, findings, dataclasses.replace(state, spared=tuple(sorted(spared))), started)
        if acts
        else ""
    )
    level = max((finding.level for finding in findings), key=LEVELS.index, default="ok")
    return Answer(level, findings, did, round(time.time() - started, 1), silent)


def _parse(words: list[str]) -> tuple[argparse.Namespace, dict[int, str]]:
    parser = argparse.ArgumentParser(
        prog="gpu-health", description="Check this machine's NVIDIA GPUs."
    )
    parser.add_argument("--act", action="store_true", help="drain or resume the node")
    parser.add_argument("--node", help="this machine's node name in Slurm")
    parser.add_argument(
        "--xids", default="", help="Xids to drain for and to ignore besides the table: '+109 -74'"
    )
    options = parser.parse_args(words)
    try:
        return options, xids.parse(options.xids)
    except ValueError as e:
        parser.error(f"--xids: {e}")


def examine(node: nodes.Node | None, levels: dict[int, str], state: State) -> list[Finding]:
    """Look at the driver's answer, the number of GPUs, each card, and the kernel's log."""
    on_bus = [card.bus_id for card in pci.cards()]
    num_gpus = nodes.count_gres(node.gres, "gpu") if node is not None else 0
    if not on_bus and num_gpus == 0:
        return []
    findings: list[Finding] = []
    try:
        cards, findings = _ask_driver()
    except CommandError as e:
        findings.append(Finding(DRAIN, "query", str(e)))
    else:
        if cards:
            findings += _counts(cards, on_bus, num_gpus)
            findings += [finding for card in cards for finding in judge(card)]
    return findings + _xids(levels, state)


def judge(card: smi.Card) -> list[Finding]:
    """Apply the rules to one card.

    Each word without documentation, errors among them, is one warning.
    """
    findings: list[Finding] = []
    odd: dict[str, list[str]] = {}  # paths by their value
    is_joining = (
        False  # the fabric, whose status counts only once the state is "Completed" (nvml.h)
    )
    for rule in smi.RULES:
        value = card.values.get(rule.path, "").strip(" \t\r\n[]")
        if value in smi.LOST_CARDS:
            text = f"{value}: {smi.LOST_CARDS[value]}"
            return [Finding(DRAIN, "query", text, card.bus_id)]
        if rule.check == "fabric" and is_joining:
            continue

        kind = rule.kind(value)
        if kind == smi.ODD:
            odd.setdefault(value, []).append(rule.path)
        if kind != smi.BAD:
            continue
        if rule.check == "fabric":
            is_joining = True
            if _is_settling():
                continue
        findings.append(Finding(rule.level, rule.check, rule.text.format(value), card.bus_id))
    return findings + [_odd(value, paths, card.bus_id) for value, paths in odd.items()]


def _odd(value: str, paths: list[str], bus_id: str) -> Finding:
    """Warn of a word that is neither a known value nor a known fault."""
    text = f"{paths[0]} cannot be read: {value!r:.60}"
    if len(paths) > 1:
        text += f" (as {len(paths) - 1} more values)"
    return Finding(WARN, "query", text, bus_id)


def act(
    name: str | None, node: nodes.Node | None, findings: list[Finding], state: State, now: float
) -> str:
    """Drain or resume the node as the findings require, save the state, and return a line on it."""
    reason = _reason(findings)
    state = dataclasses.replace(state, passes=0 if reason else state.passes + 1)
    if name and node is not None and watchdog.is_drained_by(REASON, node):
        state = dataclasses.replace(state, drained=True)
    did = ""
    try:
        if name and node is not None:
            did, state = _order(name, node, reason, state)
    except CommandError as e:
        did = str(e)
    finally:
        if not reason and not state.drained:
            state = dataclasses.replace(state, since=now)
        if not reason and state.spared:
            reason = f"{REASON}{'; '.join(state.spared)}: {_SPARED}"
        began = _began(node) or state.began
        dataclasses.replace(state, reason=reason, began=began).save()
    return did


def _order(name: str, node: nodes.Node, reason: str, state: State) -> tuple[str, State]:
    """Drain or resume the node if that is due; return a line on it, and the new state.

    A drain with another reason is left alone. Raises `CommandError`.
    """
    is_ours = watchdog.is_drained_by(REASON, node)
    if reason and not node.is_drained:
        return _drain(name, node, reason, state)
    if reason and is_ours and not kept.is_held(KIND):
        kept.note(KIND, name, node.reason or "")
    if not reason and is_ours and state.passes >= watchdog.PASSES_TO_RESUME:
        kept.end(KIND)
        watchdog.resume(name, timeout=_left(watchdog.SCONTROL_S))
        return f"resumed {name}", dataclasses.replace(state, drained=False)
    return "", state


def _drain(name: str, node: nodes.Node, reason: str, state: State) -> tuple[str, State]:
    """Drain the node, unless others were just drained for the same reason."""
    watchdog.drain(name, reason, timeout=_left(watchdog.SCONTROL_S))
    late = _shared(reason, node)
    if late:
        watchdog.resume(name, timeout=_left(watchdog.SCONTROL_S))
        spared = tuple(sorted({*state.spared, *late}))
        did = f"resumed {name}, since too many nodes were drained for {'; '.join(sorted(late))}"
        return did, dataclasses.replace(state, spared=spared)
    kept.note(KIND, name, reason)
    return f"drained {name}", dataclasses.replace(state, drained=True)


def _reason(findings: collections.abc.Iterable[Finding]) -> str:
    """Return the reason to drain for the findings, "" for none."""
    bad = [finding for finding in findings if finding.level == DRAIN]
    return watchdog.drain_reason(REASON, bad) if bad else ""


def _demoted(findings: list[Finding], spared: collections.abc.Collection[str]) -> list[Finding]:
    """Return the findings; the fleet's become warnings."""
    found: list[Finding] = []
    for one in findings:
        is_fleets = bool(fleet.kinds(f"{REASON}{one}") & set(spared))
        if is_fleets:
            one = dataclasses.replace(one, level=WARN, text=f"{one.text} ({_SPARED})")  # noqa: PLW2901
        found.append(one)
    return found


def _shared(reason: str, node: nodes.Node) -> frozenset[str]:
    """Return the kinds in `reason` that drain too many nodes; none if Slurm lists no nodes."""
    if not reason or "Partitions" not in node.fields:  # no job can come to it
        return frozenset()
    with contextlib.suppress(CommandError):
        listed = watchdog.show_nodes(
            timeout=_left(watchdog.SCONTROL_S, spare=2 * watchdog.SCONTROL_S)
        )
        return fleet.shared(reason, node.name, listed, time.time())
    return frozenset()


def _counts(cards: list[smi.Card], on_bus: list[str], num_gpus: int) -> list[Finding]:
    """Compare the driver's number of cards with the bus, and its number of devices with Slurm."""
    findings: list[Finding] = []
    if len(cards) < len(on_bus):
        missing = " ".join(sorted(set(on_bus) - {card.bus_id for card in cards}))
        findings.append(
            Finding(
                DRAIN,
                "count",
                f"the driver has {len(cards)} of {len(on_bus)} GPUs without {missing}",
            )
        )
    devices = 0
    for card in cards:  # one that does not tell may have them all
        devices += num_gpus if card.num_devices is None else card.num_devices
    if devices < num_gpus:
        findings.append(
            Finding(DRAIN, "count", f"the driver has {devices} of the {num_gpus} GPUs in Slurm")
        )
    return findings


def _ask_driver() -> tuple[list[smi.Card], list[Finding]]:
    """Query all cards; return the driver's report, and the warnings of the queries.

    Unreadable output is a warning, and the query is repeated in another form; returns no card if
    that is unreadable too.

    Raises:
        CommandError: the driver or a card does not answer, or an earlier query was killed and still
            has not ended, so another would hang too.
    """
    if stuck := _killed(pathlib.Path(NVIDIA_SMI).name):
        raise CommandError(
            f"nvidia-smi (pid {', '.join(stuck)}) hangs in the driver since it was killed: reboot"
        )
    printed, findings = _query("-q", "-x")
    try:
        cards = smi.read(printed)
    except smi.UnreadableError as e:
        findings.append(Finding(WARN, "query", f"nvidia-smi -q -x cannot be read: {e}"))
    else:
        return cards, [*findings, *_remarks(printed)]
    printed, more = _query(*smi.QUERY, unknown=WARN)
    try:
        return smi.read_table(printed), [*findings, *more]
    except smi.UnreadableError as e:
        return [], [*findings, *(more or [Finding(WARN, "query", str(e))])]


def _query(*options: str, unknown: str = DRAIN) -> tuple[str, list[Finding]]:
    """Return the output of nvidia-smi, and the warnings of its exit status.

    Raises:
        CommandError: it failed.
    """
    done = run(NVIDIA_SMI, *options, timeout=_left(_SMI_S, spare=watchdog.SCONTROL_S), check=False)
    if done.returncode == 0:
        return done.stdout, []
    printed = last_line(done.stderr, 120) or last_line(done.stdout, 120) or "no output"
    level, text = smi.EXITS.get(done.returncode, (unknown, printed))
    trouble = Finding(level, "query", f"nvidia-smi exited {done.returncode}: {text}")
    if level == DRAIN:
        raise CommandError(trouble.text)
    return done.stdout, [trouble]


def _remarks(printed: str) -> list[Finding]:
    """Warn of each extra line that nvidia-smi printed."""
    return [Finding(WARN, "query", f"nvidia-smi: {line}") for line in smi.remarks(printed)]


def _killed(name: str) -> list[str]:
    """Return the processes of this name that cannot end although SIGKILL is pending.

    Source: proc(5), SigPnd.
    """
    found: list[str] = []
    for path in pci.PROC.glob("[0-9]*/status"):
        fields = dict(re.findall(r"^(Name|SigPnd):\s*(\S+)$", files.read(path), re.MULTILINE))
        if fields.get("Name") == name and int(fields.get("SigPnd", "0"), 16) >> 8 & 1:
            found.append(path.parent.name)
    return found


def _xids(levels: dict[int, str], state: State) -> list[Finding]:
    """Return a finding for each card and Xid that the kernel logged after `state.since`.

    Only this boot's log counts.
    """
    try:
        lines = xids.logged("short-unix", timeout=_left(_LOG_S, spare=watchdog.SCONTROL_S))
    except CommandError as e:
        return [Finding(WARN, "log", str(e))]
    found: dict[Finding, None] = {}
    for line in lines:
        stamp = re.match(r"\d+(\.\d+)?(?= )", line)
        finding = xids.judge(line, levels)
        if (
            stamp
            and finding
            and float(stamp[0]) > max(state.since, state.resets.get(finding.gpu, 0.0))
        ):
            found[finding] = None
    return list(found)


def _node(name: str | None) -> tuple[nodes.Node | None, str]:
    """Show the node; return None and why if that fails."""
    try:
        return (watchdog.show_node(name, timeout=_left(watchdog.SCONTROL_S)) if name else None), ""
    except CommandError as e:
        return None, str(e)


def _began(node: nodes.Node | None) -> str:
    return node.fields.get("SlurmdStartTime", "") if node is not None else ""


def _is_settling() -> bool:
    """Report whether a fabric manager may still be at work since the boot."""
    words = files.read(pci.PROC / "uptime").split()
    return bool(words) and float(words[0]) <= _FABRIC_SETTLES_S


class _Deadline:
    """When the whole check ends, on the monotonic clock."""

    end = float("inf")


def _left(limit: float, spare: float = 0.0) -> float:
    """Return `limit`, or the time left for the whole check if that is less.

    `spare` is reserved for the last step.
    """
    return max(_LEAST_S, min(limit, _Deadline.end - time.monotonic() - spare))


if __name__ == "__main__":
    sys.exit(main())

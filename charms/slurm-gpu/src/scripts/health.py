#!/usr/bin/env python3
"""gpu-health: are this machine's GPUs fit for jobs? One pass of the driver and the kernel's log, never over a minute.

    gpu-health check [--json] [--act] [--node NAME] [--dcgm] [--xids "+109 -74"]
    gpu-health              as Slurm's HealthCheckProgram: check --act --node $SLURMD_NODENAME

Exits 0 when all is well, 2 when there is something to look at, 1 when jobs should stay away. With --act it drains the
node with a reason that begins with `gpu-health: `, and resumes a node that carries such a reason after two passes
without a complaint. --dcgm adds NVIDIA's short diagnosis (dcgmi diag -r 1) while no job runs; --xids says of which Xids
to drain besides those of the table, and which of the table to ignore. The driver is asked with nvidia-smi, or, where
there is none, with gpu-nvml, which lies beside this program. Both run with Python's standard library only: the
slurm-gpu charm copies them to each node.

What a card does not support is no fault; a query that fails or hangs is one.
"""

import argparse
import collections.abc
import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import typing
import xml.etree.ElementTree as ET

NVIDIA_SMI = "/usr/bin/nvidia-smi"
NVML_PROGRAMS = ("gpu-nvml", "nvml.py")  # beside this one, on a node and in the charm
JOURNALCTL = "/usr/bin/journalctl"
SCONTROL = "/usr/bin/scontrol"
STATE = pathlib.Path("/var/lib/slurm-gpu/health.json")
HOLD = pathlib.Path("/var/lib/slurm-gpu/holds/gpu-health.json")  # as node_hold has it, which keeps the drain up
WATCH = "slurm-gpu-node.service"
OPTIONS = pathlib.Path("/var/lib/slurm-gpu/health-options")  # further arguments, one a line, where Slurm gives none
TEXTFILES = pathlib.Path("/var/lib/prometheus/node-exporter")  # where Debian's and Ubuntu's node exporter reads
METRICS = "gpu_health.prom"
PCI = pathlib.Path("/sys/bus/pci/devices")
SYSTEMCTL = "/usr/bin/systemctl"
DCGMI = ("/usr/bin/dcgmi", "/snap/bin/dcgmi", "/snap/bin/dcgm.dcgmi")
UPTIME = pathlib.Path("/proc/uptime")

REASON = "gpu-health: "
_MOST_REASON = 200
PASSES_TO_RESUME = 2
# All of it ends before the 60 s after which Slurm kills a HealthCheckProgram (slurm.conf(5)): each query gets what it
# should need at most, and no more than what is left of the whole but what the last order to Slurm takes.
_WHOLE_S = 53.0
_SMI_S, _LOG_S, _SCONTROL_S, _SYSTEMCTL_S, _DCGM_S = 30.0, 8.0, 6.0, 4.0, 30.0
_REAP_S = 1.0  # a process that hangs inside the driver may not die
_FABRIC_SETTLES_S = 300.0  # a fabric manager has the cards of a host ready within minutes of boot

DRAIN, WARN = "drain", "warn"

# What an Xid asks for: NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors), column "immediate action". Not listed:
# those that an application causes and those to ignore. 109 asks for a reset, but applications cause it often.
XIDS: dict[int, tuple[str, str]] = {
    46: (DRAIN, "GPU stopped processing: reset it"),
    48: (DRAIN, "double-bit ECC error: reset it"),
    54: (DRAIN, "auxiliary power is not connected: check the machine"),
    62: (DRAIN, "internal micro-controller halted: reset it"),
    63: (WARN, "a row is to be remapped at the next reset"),
    64: (DRAIN, "row remapping failed: reset it"),
    74: (DRAIN, "NVLink error: reset it"),
    79: (DRAIN, "fell off the bus: reboot"),
    92: (WARN, "many single-bit ECC errors"),
    94: (WARN, "contained ECC error"),
    95: (DRAIN, "uncontained ECC error: reset it"),
    109: (WARN, "context switch timed out"),
    110: (DRAIN, "security fault: reset it"),
    119: (DRAIN, "GSP does not answer: reset it"),
    120: (DRAIN, "GSP error: reset it"),
    136: (DRAIN, "link training failed: reset it"),
    140: (DRAIN, "unrecovered ECC error: reset it"),
    143: (DRAIN, "GPU initialization failed: reset it"),
    151: (DRAIN, "key rotation failed: restart the machine"),
    155: (DRAIN, "NVLink software-defined failure: reset it"),
    156: (DRAIN, "resource retirement: reset it"),
    158: (DRAIN, "GPU fatal timeout: reset it"),
    167: (DRAIN, "PCIe fatal timeout: reset it"),
    168: (DRAIN, "errors in protected memory: reboot, and switch ECC on if it is off"),
}
_LOGGED = r"NVRM: Xid|nvidia-nvswitch\d*: SXid"
_NVLINK5_XIDS = range(144, 151)  # NVLink 5: the line itself says whether it is fatal
_RECOVERY_XID = 154  # "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"

_SXID = "SXid"  # of an NVSwitch; where it harms a card, an Xid 74 comes with it

# nvidia-smi(1), RETURN VALUE, which are NVML's numbers; 18 is NVML_ERROR_LIB_RM_VERSION_MISMATCH of nvml.h.
SMI_EXITS: dict[int, tuple[str, str]] = {
    9: (DRAIN, "the driver is not loaded: reboot"),
    12: (DRAIN, "libnvidia-ml.so.1 is missing: install libnvidia-compute of the driver's version"),
    14: (WARN, "infoROM is corrupt"),
    15: (DRAIN, "a GPU fell off the bus: reboot"),
    18: (DRAIN, "driver and library are of different versions: reboot"),
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """What one field of `nvidia-smi -q -x` means."""

    check: str
    path: str  # below <gpu>
    level: str
    text: str  # with the field's value as {}
    good: tuple[str, ...] = ()  # the values that are fine; empty: a number
    most: int = 0  # the greatest number that is fine


# Elements as in nvsmi_device_v12.dtd. Thresholds: NVIDIA's "GPU Memory Error Management" (row remapping, SRAM
# threshold), "Dynamic Page Retirement" (a card may be returned from 60 retired pages on) and "GPU Debug Guidelines" (a
# volatile uncorrectable error asks for a reset). Correctable errors are mended; Azure's node checks count so many.
RULES = (
    Rule("recovery", "gpu_recovery_action", DRAIN, "recovery action {}", ("None",)),
    Rule("row-remap", "remapped_rows/remapped_row_failure", DRAIN, "row remapping failed: replace it", ("No",)),
    Rule("row-remap", "remapped_rows/remapped_row_pending", DRAIN, "row remapping pending: reset it", ("No",)),
    Rule("retired", "retired_pages/pending_retirement", DRAIN, "page retirement pending: reset it", ("No",)),
    Rule(
        "retired",
        "retired_pages/double_bit_retirement/retired_count",
        DRAIN,
        "{} pages retired for double-bit errors: replace it",
        most=60,
    ),
    Rule(
        "retired",
        "retired_pages/multiple_single_bit_retirement/retired_count",
        DRAIN,
        "{} pages retired for single-bit errors: replace it",
        most=60,
    ),
    Rule("ecc", "ecc_errors/volatile/dram_correctable", WARN, "{} correctable DRAM errors", most=20_000_000),
    Rule("ecc", "ecc_errors/volatile/sram_correctable", WARN, "{} correctable SRAM errors", most=10_000),
    Rule("ecc", "ecc_errors/volatile/dram_uncorrectable", DRAIN, "{} uncorrectable DRAM errors: reset it"),
    Rule("ecc", "ecc_errors/volatile/sram_uncorrectable", DRAIN, "{} uncorrectable SRAM errors: reset it"),
    Rule("ecc", "ecc_errors/volatile/sram_uncorrectable_parity", DRAIN, "{} SRAM parity errors: reset it"),
    Rule("ecc", "ecc_errors/volatile/sram_uncorrectable_secded", DRAIN, "{} SRAM SEC-DED errors: reset it"),
    Rule("sram", "ecc_errors/aggregate/sram_threshold_exceeded", DRAIN, "SRAM error threshold: replace it", ("No",)),
    Rule("repair", "ecc_errors/channel_repair_pending", DRAIN, "channel repair pending: reset it", ("No",)),
    Rule("repair", "ecc_errors/tpc_repair_pending", DRAIN, "TPC repair pending: reset it", ("No",)),
    Rule(
        "thermal",
        "clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown",
        WARN,
        "slowed down by heat",
        ("Not Active",),
    ),
    Rule(
        "power",
        "clocks_event_reasons/clocks_event_reason_hw_power_brake_slowdown",
        WARN,
        "slowed down by the power supply",
        ("Not Active",),
    ),
)
_FABRIC_MANAGER = "nvidia-fabricmanager.service"
_FABRIC = (("fabric/state", "Completed"), ("fabric/status", "Success"))
_UNKNOWN = frozenset({"", "N/A", "[N/A]", "Unknown Error", "Not Supported", "[Not Supported]", "Unknown"})


class QueryError(Exception):
    """A program failed or hung. `str()` is one line."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One complaint."""

    level: str
    check: str
    text: str
    gpu: str = ""  # its bus id

    def __str__(self) -> str:
        return f"{self.text} {self.gpu}".strip()


@dataclasses.dataclass(frozen=True)
class Node:
    """The node as the controller has it."""

    num_gpus: int
    drained: bool
    reason: str
    busy: bool = False  # jobs run here
    began: str = ""  # when its slurmd started, in Slurm's words


@dataclasses.dataclass(frozen=True)
class State:
    """What the last check left behind."""

    since: float = 0.0  # Xids before this are done with
    passes: int = 0  # checks without a complaint in a row
    drained: bool = False  # by us
    reason: str = ""  # why jobs should stay away, at the last check
    resets: dict[str, float] = dataclasses.field(default_factory=dict[str, float])  # Xids of a card before its are, too
    began: str = ""  # of the node's slurmd, at the last check

    @classmethod
    def load(cls) -> "State":
        """Return it, or a fresh one where there is none that can be read."""
        try:
            raw = json.loads(STATE.read_text())
            resets = {str(gpu): float(at) for gpu, at in raw.get("resets", {}).items()}
            told = (float(raw["since"]), int(raw["passes"]), bool(raw["drained"]), str(raw["reason"]))
            return cls(*told, resets, str(raw.get("began", "")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()

    def save(self) -> None:
        """Keep it for the next check."""
        _write(STATE, json.dumps(dataclasses.asdict(self)) + "\n")


@dataclasses.dataclass(frozen=True)
class Also:
    """What to look at besides, by option."""

    dcgm: bool = False
    drain_xids: frozenset[int] = frozenset()
    ignore_xids: frozenset[int] = frozenset()
    resets: collections.abc.Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])  # as in State


def parse_xids(text: str) -> tuple[frozenset[int], frozenset[int]]:
    """Return the Xids to drain for and those to ignore, in a text such as "+109 -74".

    Raises:
        ValueError: it is no such text; the message names the word.
    """
    wanted: dict[str, set[int]] = {"+": set(), "-": set()}
    for word in text.replace(",", " ").split():
        match = re.fullmatch(r"([+-])([0-9]{1,3})", word)
        if match is None:
            raise ValueError(f"{word!r:.60} is neither +XID (drain for it) nor -XID (ignore it), such as +109 or -74")
        wanted[match[1]].add(int(match[2]))
    both = wanted["+"] & wanted["-"]
    if both:
        raise ValueError(f"Xid {min(both)} is both to drain for and to ignore")
    return frozenset(wanted["+"]), frozenset(wanted["-"])


def are_xids(text: str) -> bool:
    """Tell whether `parse_xids` takes this text."""
    try:
        parse_xids(text)
    except ValueError:
        return False
    return True


def main(arguments: collections.abc.Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    _deadline.begin()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words and os.environ.get("SLURMD_NODENAME"):  # Slurm gives a HealthCheckProgram no arguments
        words = ["check", "--act", "--node", os.environ["SLURMD_NODENAME"], *_read(OPTIONS).splitlines()]
    parser = argparse.ArgumentParser(prog="gpu-health", description="Check this machine's NVIDIA GPUs.")
    commands = parser.add_subparsers(required=True)
    check = commands.add_parser("check", help="look once, and say what is wrong")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.add_argument("--act", action="store_true", help="drain or resume the node")
    check.add_argument("--node", help="this machine's node name in Slurm")
    check.add_argument("--dcgm", action="store_true", help="let dcgmi look as well")
    check.add_argument("--xids", default="", help="Xids to drain for and to ignore besides the table: '+109 -74'")
    options = parser.parse_args(words)
    try:
        also = Also(options.dcgm, *parse_xids(options.xids))
    except ValueError as e:
        parser.error(f"--xids: {e}")
    started = time.time()
    state = State.load()
    also = dataclasses.replace(also, resets=state.resets)
    node, silent = _node(options.node)
    if state.drained and node is not None and not (node.drained and node.reason.startswith(REASON)):
        # An administrator overruled us; but upstream's slurmd ends drains too, right after it restarted its daemon, and
        # then the hold is still there.
        overruled = node.began == state.began or not HOLD.exists()
        if options.act and overruled:
            _end_hold()
        state = dataclasses.replace(state, since=started if overruled else state.since, drained=False)
    findings = examine(node, state.since, also)
    did = ""
    if options.act:
        did = act(options.node, node, findings, state, started)
        _write_metrics(findings, started)
    level = max((finding.level for finding in findings), key=(WARN, DRAIN).index, default="ok")
    if options.json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        answer = {"result": level, "findings": listed, "did": did, "seconds": round(time.time() - started, 1)}
        print(json.dumps(answer | ({"slurm": silent} if silent else {})))
    else:
        print("\n".join([level, *(f"{finding.level}: {finding}" for finding in findings)]))
    return {"ok": 0, DRAIN: 1, WARN: 2}[level]


def examine(node: Node | None, since: float, also: Also | None = None) -> list[Finding]:
    """Return all complaints: of nvidia-smi, of the counts, of each card, of the kernel's log after `since`."""
    also = also or Also()
    on_bus = _gpus_on_bus()
    if not on_bus and (node is None or node.num_gpus == 0):
        return []
    findings: list[Finding] = []
    try:
        root, trouble = _ask_driver()
    except QueryError as e:
        findings.append(Finding(DRAIN, "query", str(e)))
    else:
        findings += [trouble] if trouble else []
        findings += _counts(root, on_bus, node)
        findings += [finding for gpu in root.iter("gpu") for finding in judge(gpu)]
        findings += _fabric_manager(root)
    findings += _xids(since, also)
    if also.dcgm and not (node is not None and node.busy) and not any(one.level == DRAIN for one in findings):
        findings += _diagnosis()
    return findings


def judge(gpu: ET.Element) -> list[Finding]:
    """Return the complaints about one card."""
    bus_id = bus(gpu.get("id") or "")
    findings: list[Finding] = []
    for rule in RULES:
        told = (gpu.findtext(rule.path) or "").strip()
        if told in _UNKNOWN:
            continue
        is_bad = told not in rule.good if rule.good else told.isdigit() and int(told) > rule.most
        if is_bad:
            findings.append(Finding(rule.level, rule.check, rule.text.format(told), bus_id))
    for path, good in _FABRIC:
        told = (gpu.findtext(path) or "").strip()
        if told not in _UNKNOWN and told != good and _uptime() > _FABRIC_SETTLES_S:
            findings.append(Finding(DRAIN, "fabric", f"{path} {told}: is nvidia-fabricmanager running?", bus_id))
            break
    return findings


def xid_finding(line: str, also: Also | None = None) -> Finding | None:
    """Return the complaint in one line of the kernel's log, None when there is none to act on."""
    also = also or Also()
    switch = re.search(r"(nvidia-nvswitch\d*): SXid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+), (Fatal|Non-fatal)?", line)
    if switch is not None:
        kind = "fatal " if switch[4] == "Fatal" else ""
        return Finding(WARN, "sxid", f"SXid {switch[3]}: {kind}error of {switch[1]}", bus(switch[2]))
    match = re.search(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(.*)", line)
    if match is None:
        return None
    where, code, rest = bus(match[1]), int(match[2]), match[3]
    if code in also.ignore_xids:
        return None
    if code in also.drain_xids:
        return Finding(
            DRAIN, "xid", f"Xid {code}: {XIDS[code][1] if code in XIDS else 'to drain for by option'}", where
        )
    if code == _RECOVERY_XID:
        action = re.search(r"to 0x[0-9a-fA-F]+ \((?!None\))([^)]*)\)", rest)
        return Finding(DRAIN, "xid", f"Xid {code}: {action[1]}", where) if action else None
    if code in _NVLINK5_XIDS:
        return Finding(DRAIN, "xid", f"Xid {code}: fatal NVLink error", where) if "Fatal" in rest else None
    if code not in XIDS:
        return None
    level, text = XIDS[code]
    return Finding(level, "xid", f"Xid {code}: {text}", where)


def act(name: str | None, node: Node | None, findings: list[Finding], state: State, now: float) -> str:
    """Drain or resume the node as the findings ask for; return what was done. The drains of others are left alone."""
    bad = [finding for finding in findings if finding.level == DRAIN]
    reason = f"{REASON}{'; '.join(dict.fromkeys(str(finding) for finding in bad))}"[:_MOST_REASON] if bad else ""
    passes = 0 if bad else state.passes + 1
    drained, since, did = state.drained, state.since, ""
    ours = node is not None and node.drained and node.reason.startswith(REASON)
    try:
        if bad and name and node is not None and not node.drained:
            _scontrol("update", f"nodename={name}", "state=drain", f"reason={reason}")
            _begin_hold(name, reason)
            drained, did = True, f"drained {name}"
        elif not bad and ours and name and passes >= PASSES_TO_RESUME:
            with _holds():
                HOLD.unlink(missing_ok=True)
                _scontrol("update", f"nodename={name}", "state=resume")
            _wake()
            drained, did = False, f"resumed {name}"
        elif ours:
            drained = True
            if bad and name and node is not None and not HOLD.exists():
                _begin_hold(name, node.reason)
    except QueryError as e:
        did = str(e)
    if not bad and not drained:
        since = now
    State(since, passes, drained, reason, state.resets, node.began if node is not None else state.began).save()
    return did


def _begin_hold(name: str, reason: str) -> None:
    """Have the drain kept up, and the node reserved, by the charm's service."""
    with _holds():
        _write(HOLD, json.dumps({"node": name, "reason": reason}) + "\n")
    _wake()


def _end_hold() -> None:
    with _holds():
        HOLD.unlink(missing_ok=True)
    _wake()


@contextlib.contextmanager
def _holds() -> collections.abc.Generator[None]:
    """Have the holds to oneself, as `node_hold.lock`."""
    HOLD.parent.mkdir(parents=True, exist_ok=True)
    with (HOLD.parent / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _wake() -> None:
    with contextlib.suppress(QueryError):
        _run(SYSTEMCTL, "start", "--no-block", WATCH, timeout=_SYSTEMCTL_S)


def bus(text: str) -> str:
    """Return a bus id as sysfs spells it. NVML has eight digits of domain and capitals, the kernel no function."""
    match = re.fullmatch(r"([0-9a-fA-F]+):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?", text.strip())
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4] or 0}".lower() if match else text.strip()


def _counts(root: ET.Element, on_bus: list[str], node: Node | None) -> list[Finding]:
    cards = root.findall("gpu")
    told = (root.findtext("attached_gpus") or "").strip()
    count = int(told) if told.isdigit() else len(cards)
    findings: list[Finding] = []
    if on_bus and count < len(on_bus):
        missing = sorted(set(on_bus) - {bus(card.get("id") or "") for card in cards})
        without = f" without {' '.join(missing)}" if missing else ""
        findings.append(Finding(DRAIN, "count", f"the driver has {count} of {len(on_bus)} GPUs{without}"))
    instances = [len(card.findall("mig_devices/mig_device")) for card in cards]
    devices = sum(number or 1 for number in instances)
    if node is not None and devices < node.num_gpus:
        findings.append(Finding(DRAIN, "count", f"the driver has {devices} of the {node.num_gpus} GPUs in Slurm"))
    return findings


def _ask_driver() -> tuple[ET.Element, Finding | None]:
    """Return what the driver tells of all cards, and what its exit status warns of."""
    argv = _driver_query()
    program = "nvidia-smi" if argv[0] == NVIDIA_SMI else NVML_PROGRAMS[0]
    done = _run(*argv, timeout=_SMI_S)
    trouble: Finding | None = None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        level, text = SMI_EXITS.get(done.returncode, (DRAIN, (said[-1] if said else "no word")[:120]))
        text = f"{program} exited {done.returncode}: {text}"
        if level == DRAIN:
            raise QueryError(text)
        trouble = Finding(level, "query", text)
    try:
        return ET.fromstring(done.stdout), trouble  # noqa: S314 - the driver's own program wrote it
    except ET.ParseError as e:
        raise QueryError(f"{program} returned invalid XML ({e})") from e


def _driver_query() -> tuple[str, ...]:
    if pathlib.Path(NVIDIA_SMI).exists():
        return (NVIDIA_SMI, "-q", "-x")
    here = pathlib.Path(__file__).resolve()
    programs = [here.with_name(name) for name in NVML_PROGRAMS]
    return (sys.executable, "-I", str(next((path for path in programs if path.exists()), programs[0])))


def _fabric_manager(root: ET.Element) -> list[Finding]:
    """Return a complaint where there are NVSwitches, no card says how its fabric is (A100), and nothing manages it."""
    told = {(gpu.findtext("fabric/state") or "").strip() for gpu in root.iter("gpu")}
    if told - _UNKNOWN or not _on_bus("0x0680") or _uptime() <= _FABRIC_SETTLES_S:
        return []
    try:
        done = _run(SYSTEMCTL, "is-active", "--quiet", _FABRIC_MANAGER, timeout=_SYSTEMCTL_S)
    except QueryError as e:
        return [Finding(WARN, "fabric", str(e))]
    return [Finding(DRAIN, "fabric", f"{_FABRIC_MANAGER} does not run")] if done.returncode else []


def _diagnosis() -> list[Finding]:
    """Return what NVIDIA's short diagnosis complains of. One that cannot be made is only a warning."""
    program = next((path for path in DCGMI if pathlib.Path(path).exists()), None)
    if program is None:
        return [Finding(WARN, "dcgm", "there is no dcgmi on this machine")]
    try:
        done = _run(program, "diag", "-r", "1", "-j", timeout=_DCGM_S)
    except QueryError as e:
        return [Finding(WARN, "dcgm", str(e))]
    begin = done.stdout.find("{")
    answer: object = None
    with contextlib.suppress(ValueError):
        answer = json.loads(done.stdout[begin:]) if begin >= 0 else None
    if not isinstance(answer, dict):
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return [Finding(WARN, "dcgm", f"dcgmi exited {done.returncode}: {(said[-1] if said else 'no word')[:120]}")]
    failed = _failed_tests(typing.cast("object", answer))
    return [Finding(DRAIN, "dcgm", f"dcgmi: {name} failed{where}") for name, where in failed]


def _failed_tests(answer: object, name: str = "") -> list[tuple[str, str]]:
    """Return the tests that failed and on which card, from DCGM's JSON.

    Both DCGM 3 and 4 have `tests` with a `name`, and results with a `status` and the card: `gpu_ids` or `entity_id`.
    """
    if isinstance(answer, list):
        items = typing.cast("list[object]", answer)
        return list(dict.fromkeys(found for item in items for found in _failed_tests(item, name)))
    if not isinstance(answer, dict):
        return []
    fields = typing.cast("dict[str, object]", answer)
    name = str(fields.get("name", name))
    if str(fields.get("status", "")).lower() == "fail":
        where = fields.get("gpu_ids", fields.get("entity_id"))
        return [(name, f" on GPU {where}" if where is not None else "")]
    found = [one for key, value in fields.items() if key != "test_summary" for one in _failed_tests(value, name)]
    if not found and "test_summary" in fields:
        found = _failed_tests(fields["test_summary"], name)
    return list(dict.fromkeys(found))


def _xids(since: float, also: Also) -> list[Finding]:
    """Return what the kernel logged in this boot and after `since`, once for each card and Xid."""
    try:
        done = _run(JOURNALCTL, "-k", "-b", "-q", "--no-pager", "-o", "short-unix", "-g", _LOGGED, timeout=_LOG_S)
    except QueryError as e:
        return [Finding(WARN, "log", str(e))]
    if done.returncode not in {0, 1} or done.stderr.strip():  # 1: no such line
        return [Finding(WARN, "log", f"journalctl exited {done.returncode}: {done.stderr.strip()[:120]}")]
    found: dict[Finding, None] = {}
    for line in done.stdout.splitlines():
        stamp = line.partition(" ")[0]
        finding = xid_finding(line, also)
        if finding is None or not re.fullmatch(r"\d+(\.\d+)?", stamp):
            continue
        if float(stamp) > max(since, also.resets.get(finding.gpu, 0.0)):
            found[finding] = None
    return list(found)


def _node(name: str | None) -> tuple[Node | None, str]:
    """Return the node, and why it cannot be had."""
    if not name:
        return None, ""
    try:
        done = _scontrol("show", "node", name, "-o")
    except QueryError as e:
        return None, str(e)
    gres = re.search(r" Gres=(\S+)", done)
    state = re.search(r" State=(\S+)", done)
    reason = re.search(r" Reason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?\s*$", done, re.MULTILINE)
    gpus = re.sub(r"\([^()]*\)", "", gres[1] if gres else "").split(",")
    counts = [item.rpartition(":")[2] for item in gpus if item.partition(":")[0] == "gpu"]
    num_gpus = sum(int(count) if count.isdigit() else 1 for count in counts)
    states = state[1].split("+") if state else []
    busy = bool(states) and (states[0].rstrip("*~#%!$@^-") in {"ALLOCATED", "MIXED"} or "COMPLETING" in states)
    began = re.search(r" SlurmdStartTime=(\S+)", done)
    return Node(num_gpus, "DRAIN" in states, reason[1] if reason else "", busy, began[1] if began else ""), ""


def _gpus_on_bus() -> list[str]:
    return _on_bus("0x0300", "0x0302")


def _on_bus(*classes: str) -> list[str]:
    """Return the bus ids of NVIDIA's devices of these PCI classes: 0x0680 is an NVSwitch up to NVLink 4."""
    found: list[str] = []
    for device in PCI.glob("*"):
        if _read(device / "vendor") == "0x10de" and _read(device / "class").startswith(classes):
            found.append(device.name)
    return sorted(found)


def _uptime() -> float:
    words = _read(UPTIME).split()
    return float(words[0]) if words else float("inf")


def _write_metrics(findings: list[Finding], now: float) -> None:
    """Tell Prometheus, where a node exporter reads text files. One exporter is enough."""
    if not TEXTFILES.is_dir():
        return
    counts: dict[tuple[str, str, str], int] = {}
    for finding in findings:
        key = (finding.level, finding.check, finding.gpu)
        counts[key] = counts.get(key, 0) + 1
    healthy = int(not any(finding.level == DRAIN for finding in findings))
    rows = [
        "# HELP gpu_health_ok Whether jobs may use this machine's GPUs.",
        "# TYPE gpu_health_ok gauge",
        f"gpu_health_ok {healthy}",
        "# HELP gpu_health_checked_seconds When that was found out, in seconds since 1970.",
        "# TYPE gpu_health_checked_seconds gauge",
        f"gpu_health_checked_seconds {now:.0f}",
        "# HELP gpu_health_findings Complaints of the last check.",
        "# TYPE gpu_health_findings gauge",
        *(
            f'gpu_health_findings{{level="{level}",check="{check}",gpu="{gpu}"}} {count}'
            for (level, check, gpu), count in sorted(counts.items())
        ),
    ]
    _write(TEXTFILES / METRICS, "\n".join(rows) + "\n", mode=0o644)


def _scontrol(*arguments: str) -> str:
    done = _run(SCONTROL, *arguments, timeout=_SCONTROL_S)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise QueryError(f"scontrol {arguments[0]}: {said[-1][:160] if said else 'failed without a word'}")
    return done.stdout


def _run(*argv: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program, and give up on it after `timeout` seconds even where it cannot be killed."""
    name = pathlib.Path(argv[0]).name
    timeout = _deadline.at_most(timeout, spare=0.0 if argv[0] == SCONTROL else _SCONTROL_S)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as e:
        raise QueryError(f"{name}: {e.strerror or e}") from e
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as e:
        os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdout, process.stderr):
            typing.cast("typing.IO[str]", stream).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_REAP_S)
        raise QueryError(f"{name} does not answer within {timeout:g} s") from e
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)


class _Deadline:
    """The end of the whole check."""

    def __init__(self) -> None:
        self._end = float("inf")

    def begin(self) -> None:
        """Count from now."""
        self._end = time.monotonic() + _WHOLE_S

    def at_most(self, timeout: float, spare: float) -> float:
        """Return `timeout`, or less where less is left; `spare` is kept for what comes last."""
        return max(0.1, min(timeout, self._end - time.monotonic() - spare))


_deadline = _Deadline()


def _write(path: pathlib.Path, text: str, mode: int = 0o600) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())

"""Parse the values of nvidia-smi that decide whether cards are fit.

The rest of its output cannot break the parser: the XML of `nvidia-smi -q -x` has raw process names
(`a&b<c`, control characters), some drivers close the wrong element after a clock, and warnings
surround the document. So the parser cuts out the document, splits it into cards, drops everything
that processes may have written, and reads only the requested elements. Standard library only.
"""

import csv
import dataclasses
import re
import typing
import xml.etree.ElementTree as ET

import pci

WARN, DRAIN = LEVELS = ("warn", "drain")

_DOCUMENT = re.compile(r"<nvidia_smi_log>.*</gpu>\s*</nvidia_smi_log>", re.DOTALL)
_COUNT = re.compile(r"<attached_gpus>\s*(\d+)\s*</attached_gpus>")
_CARD = re.compile(r'(?:^[ \t]*|</(?:gpu|attached_gpus)>\s*)<gpu id="([^"<&]*)">', re.MULTILINE)
_NAME = re.compile(r"<process_name>.*?</process_name>(?=\s*<used_memory>)", re.DOTALL)
# To the last end of a card, since a name may close each of them (nvsmi_device_v12.dtd has them
# behind all values)
_PROCESSES = re.compile(
    r"<processes>.*</processes>|<accounted_processes>.*</accounted_processes>", re.DOTALL
)
# The beginning of the document itself
_PROLOGUE = re.compile(r"<\?xml [^>]*\?>|<!DOCTYPE [^>]*>")
_LINE_CHARS, _NUM_REMARKS = 120, 5
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


# nvidia-smi(1), RETURN VALUE, which are NVML's numbers; 18 is NVML_ERROR_LIB_RM_VERSION_MISMATCH of
# nvml.h.
EXITS: dict[int, tuple[str, str]] = {
    9: (DRAIN, "the driver is not loaded: reboot"),
    12: (DRAIN, "libnvidia-ml.so.1 is missing: install libnvidia-compute of the driver's version"),
    14: (WARN, "infoROM is corrupt"),
    15: (DRAIN, "a GPU fell off the bus: reboot"),
    18: (DRAIN, "driver and library are of different versions: reboot"),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    level: str
    check: str
    text: str
    gpu: str = ""  # its bus id

    def __str__(self) -> str:
        return f"{self.text} {self.gpu}".strip()


class Card(typing.NamedTuple):
    """What one card reports."""

    bus_id: str  # as sysfs spells it
    values: dict[str, str]  # by the paths of `RULES`
    num_devices: int | None = (
        None  # its MIG devices, 1 for a whole card; None if that is not reported
    )


class Rule(typing.NamedTuple):
    """What one field of `nvidia-smi -q -x` means."""

    check: str
    path: str  # below <gpu>
    level: str
    text: str  # with the field's value as {}
    good: str | int  # the value that is fine, or the greatest number that is
    bad: tuple[str, ...] = ()  # the words that are not; numbers have none

    def kind(self, value: str) -> str:
        """Return the kind of the value: ABSENT, GOOD, BAD, or ODD if it is undocumented."""
        if value in NOT_REPORTED:
            return ABSENT
        if isinstance(self.good, int):
            if not _NUMBER.fullmatch(value):
                return ODD
            return BAD if int(value) > self.good else GOOD
        if value == self.good:
            return GOOD
        return BAD if value in self.bad else ODD


ABSENT, GOOD, BAD, ODD = "absent", "good", "bad", "odd"
# nvidia-smi(1): "N/A" and "Not Supported" mean that a card lacks the feature; `--query-gpu` prints
# the third for a field that a later driver dropped. Tables put them in brackets. Error words
# ("Unknown Error", "ERR!") are not data.
NOT_REPORTED = frozenset(
    {"", "N/A", "Not Supported", "Deprecated", "Requested functionality has been deprecated"}
)
# NvmlErrorString of nvml.h
LOST_CARDS = {"GPU is lost": "reboot", "GPU requires reset": "reset it"}
_NUMBER = re.compile(r"[0-9]{1,18}")

_YES, _ACTIVE = ("Yes",), ("Active",)
# NVIDIA's "GPU Memory Error Management" and nvmlDeviceGpuRecoveryAction_t of nvml.h; both spellings
# are in use
_RECOVERY = (
    "Reset",
    "GPU Reset",
    "GPU Reset Required",
    "Reboot",
    "Node Reboot",
    "Node Reboot Required",
    "Drain P2P",
    "Drain and Reset",
    "Bus Reset",
)
# nvmlGpuFabricState_t of nvml.h
_UNFINISHED = ("Not Started", "In Progress")
# What registering with the fabric can fail with: the words of nvmlReturn_t (DCGM's
# nvml_error_strings.h), but for those that say nothing of the fabric: "Unknown Error" and
# "Insufficient Permissions" are an answer that is an error
_FABRIC_ERRORS = (
    "Uninitialized",
    "Invalid Argument",
    "Already Initialized",
    "Not Found",
    "Insufficient Size",
    "Insufficient External Power",
    "Driver Not Loaded",
    "Timeout",
    "Interrupt Request Issue",
    "NVML Shared Library Not Found",
    "Function Not Found",
    "Corrupted infoROM",
    "GPU access blocked by the operating system",
    "Driver/library version mismatch",
    "In use by another client",
    "Insufficient Memory",
    "Insufficient Resources",
)
_ECC, _SLOW = "ecc_errors/volatile/", "clocks_event_reasons/clocks_event_reason_hw_"
_ROWS, _FABRIC = "remapped_rows/remapped_row_", "is nvidia-fabricmanager running?"
_DOUBLE = "retired_pages/double_bit_retirement/retired_count"
_SINGLE = "retired_pages/multiple_single_bit_retirement/retired_count"
_SRAM = "ecc_errors/aggregate/sram_threshold_exceeded"
# Elements as in nvsmi_device_v12.dtd. Thresholds: NVIDIA's "GPU Memory Error Management" (row
# remapping, SRAM threshold), "Dynamic Page Retirement" (a card may be returned from 60 retired
# pages on) and "GPU Debug Guidelines" (a volatile uncorrectable error asks for a reset).
# Correctable errors are repaired; Azure's node checks count so many. fmt: off
RULES = (
    Rule("recovery", "gpu_recovery_action", DRAIN, "recovery action {}", "None", _RECOVERY),
    Rule("row-remap", f"{_ROWS}failure", DRAIN, "row remapping failed: replace it", "No", _YES),
    Rule("row-remap", f"{_ROWS}pending", DRAIN, "row remapping pending: reset it", "No", _YES),
    Rule(
        "retired",
        "retired_pages/pending_retirement",
        DRAIN,
        "page retirement pending: reset it",
        "No",
        _YES,
    ),
    Rule("retired", _DOUBLE, DRAIN, "{} pages retired for double-bit errors: replace it", 60),
    Rule("retired", _SINGLE, DRAIN, "{} pages retired for single-bit errors: replace it", 60),
    Rule("ecc", f"{_ECC}dram_correctable", WARN, "{} correctable DRAM errors", 20_000_000),
    Rule("ecc", f"{_ECC}sram_correctable", WARN, "{} correctable SRAM errors", 10_000),
    Rule("ecc", f"{_ECC}dram_uncorrectable", DRAIN, "{} uncorrectable DRAM errors: reset it", 0),
    Rule("ecc", f"{_ECC}sram_uncorrectable", DRAIN, "{} uncorrectable SRAM errors: reset it", 0),
    Rule("ecc", f"{_ECC}sram_uncorrectable_parity", DRAIN, "{} SRAM parity errors: reset it", 0),
    Rule("ecc", f"{_ECC}sram_uncorrectable_secded", DRAIN, "{} SRAM SEC-DED errors: reset it", 0),
    Rule("sram", _SRAM, DRAIN, "SRAM error threshold: replace it", "No", _YES),
    Rule(
        "repair",
        "ecc_errors/channel_repair_pending",
        DRAIN,
        "channel repair pending: reset it",
        "No",
        _YES,
    ),
    Rule(
        "repair", "ecc_errors/tpc_repair_pending", DRAIN, "TPC repair pending: reset it", "No", _YES
    ),
    Rule("thermal", f"{_SLOW}thermal_slowdown", WARN, "slowed down by heat", "Not Active", _ACTIVE),
    Rule(
        "power",
        f"{_SLOW}power_brake_slowdown",
        WARN,
        "slowed down by the power supply",
        "Not Active",
        _ACTIVE,
    ),
    Rule(
        "fabric", "fabric/state", DRAIN, f"fabric/state {{}}: {_FABRIC}", "Completed", _UNFINISHED
    ),
    Rule(
        "fabric",
        "fabric/status",
        DRAIN,
        f"fabric/status {{}}: {_FABRIC}",
        "Success",
        _FABRIC_ERRORS,
    ),
)
# fmt: on
# The fields of `nvidia-smi --query-gpu` that give the same values without XML
FIELDS = {
    f"{_ROWS}failure": "remapped_rows.failure",
    f"{_ROWS}pending": "remapped_rows.pending",
    "retired_pages/pending_retirement": "retired_pages.pending",
    _DOUBLE: "retired_pages.double_bit.count",
    _SINGLE: "retired_pages.single_bit_ecc.count",
    f"{_ECC}dram_correctable": "ecc.errors.corrected.volatile.dram",
    f"{_ECC}dram_uncorrectable": "ecc.errors.uncorrected.volatile.dram",
    f"{_ECC}sram_uncorrectable": "ecc.errors.uncorrected.volatile.sram",
}
# Elements below <gpu>
_READ = tuple(dict.fromkeys([*(rule.path.split("/")[0] for rule in RULES), "mig_devices"]))
QUERY = (f"--query-gpu={','.join(('pci.bus_id', *FIELDS.values()))}", "--format=csv,noheader")


class UnreadableError(Exception):
    """An answer cannot be read. `str()` is one line that quotes the bad lines."""


def read(printed: str) -> list[Card]:
    """Return the cards in the document of `nvidia-smi -q -x`.

    Raises:
        UnreadableError: there is no document, an element is not XML, or the cards cannot be
            distinguished.
    """
    found = _DOCUMENT.search(printed)
    if found is None:
        raise UnreadableError(f"it holds no <nvidia_smi_log>, but {_line(printed, 0)}")
    text = _NAME.sub("", found[0])
    cards = list(_CARD.finditer(text))
    count = _COUNT.search(text, 0, cards[0].end() if cards else len(text))
    num_cards = int(count[1]) if count else len(cards)
    if num_cards == 1:
        del cards[1:]  # by a process's name
    if len(cards) != num_cards or len({card[1] for card in cards}) != num_cards:
        raise UnreadableError(f"it lists {len(cards)} of {num_cards} GPUs")
    ends = [card.start() for card in cards[1:]] + [len(text)]
    return [_card(card[1], text[card.end() : end]) for card, end in zip(cards, ends, strict=True)]


def remarks(printed: str) -> list[str]:
    """Return the lines that nvidia-smi printed around the document.

    One is "WARNING: infoROM is corrupted at gpu ...".

    It exits with 0 all the same. Long lines are cut; of many lines the first come, then their
    number.
    """
    around = _PROLOGUE.sub("", _DOCUMENT.sub("\n", printed, count=1))
    lines = [" ".join(line.split()) for line in around.splitlines()]
    distinct = list(dict.fromkeys(line[:_LINE_CHARS] for line in lines if line))
    if len(distinct) > _NUM_REMARKS:
        return [*distinct[:_NUM_REMARKS], f"and {len(distinct) - _NUM_REMARKS} more lines"]
    return distinct


def read_table(printed: str) -> list[Card]:
    """Return the cards of the answer to `QUERY`. Raises `UnreadableError`."""
    cards: list[Card] = []
    for row in csv.reader(printed.splitlines(), skipinitialspace=True):
        if len(row) != len(FIELDS) + 1 or not re.fullmatch(r"[0-9A-Fa-f:.]+", row[0]):
            raise UnreadableError(f"nvidia-smi --query-gpu printed {_line(','.join(row), 0)}")
        cards.append(Card(pci.spell(row[0]), dict(zip(FIELDS, row[1:], strict=True))))
    if not cards:
        raise UnreadableError("nvidia-smi --query-gpu printed nothing")
    return cards


def _card(bus_id: str, text: str) -> Card:
    body = _NO_XML.sub("", _PROCESSES.sub("", text))
    gpu = ET.Element("gpu")
    gpu.extend([element for name in _READ if (element := _element(body, name)) is not None])
    values = {rule.path: _value(gpu, rule.path) for rule in RULES}
    return Card(pci.spell(bus_id), values, len(gpu.findall("mig_devices/mig_device")) or 1)


def _value(gpu: ET.Element, path: str) -> str:
    """Return an element's text.

    Its parent's, if that has a word in place of elements, such as `N/A`.
    """
    at = gpu
    for name in path.split("/"):
        below = at.find(name)
        if below is None:
            is_word = at is not gpu and len(at) == 0
            return (at.text or "") if is_word else ""
        at = below
    return at.text or ""


def _element(body: str, name: str) -> ET.Element | None:
    found = re.search(rf"<{name}>.*?</{name}>", body, re.DOTALL)
    if found is None:
        return None
    try:
        return ET.fromstring(found[0])  # noqa: S314 - the driver's own program wrote it
    except ET.ParseError as e:
        raise UnreadableError(f"{name}: {_line(found[0], e.position[0] - 1)}") from e


def _line(text: str, number: int) -> str:
    """Quote a line of an answer for a warning."""
    lines = text.strip().splitlines() or [""]
    return repr(lines[min(number, len(lines) - 1)].strip()[:100])

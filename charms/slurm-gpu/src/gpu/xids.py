"""NVIDIA's Xids, the driver's errors in the kernel's log, and what each asks for.

Standard library only.
"""

import collections.abc
import re

import pci
from gpu import smi
from gpu.smi import DRAIN, WARN
from slurm_ddp.commands import CommandError, run

JOURNALCTL = "/usr/bin/journalctl"
# What to do about an Xid: NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors), column
# "immediate action". Left out: Xids that applications cause and Xids to ignore. 109 asks for a
# reset, but applications cause it often.
TABLE: dict[int, tuple[str, str]] = {
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
    119: (DRAIN, "GSP does not respond: reset it"),
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
# Xids that need no action on the machine: the catalog says that an application causes them or to
# ignore them
OF_PROGRAMS = frozenset(
    {
        *(8, 11, 13, 25, 31, 32, 37, 38, *range(39, 42), 43, 44, 45, 60, 66, 67, *range(68, 73)),
        *(*range(75, 78), 80, *range(82, 87), 88, 89, 93, *range(96, 106), 106, 107, 121),
        *(*range(126, 136), 137, 139, 141, 152, 153, 157, 160, 161),
    }
)
# Xids that drain only if the line says so: 154 names the recovery action ("GPU recovery action
# changed from 0x0 (None) to 0x1 (GPU Reset Required)"), the Xids of NVLink 5 say whether they are
# fatal.
_BY_TEXT: dict[int, tuple[str, str]] = {
    154: (r"to 0x[0-9a-fA-F]+ \((?!None\))([^)]*)\)", "{}"),
    **dict.fromkeys(range(144, 151), (r"Fatal", "fatal NVLink error")),
}
# NVIDIA's "Xid Errors", how they are reported: with MIG the GPU instance and its compute instance
# follow the card, (PCI:0000:01:00 GPU-I:05) and (PCI:0000:01:00 GPU-I:05 GPU-CI:00)
LINE = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)(?: GPU-I:\d+)?(?: GPU-CI:\d+)?\): (\d+)(.*)"
)
_ANY = re.compile(r"NVRM: Xid.*")


def parse(text: str) -> dict[int, str]:
    """Parse the levels of Xids, "" for those to ignore, from a text such as "+109 -74".

    Raises:
        ValueError: the message names the word that is wrong.
    """
    levels: dict[int, str] = {}
    for word in text.replace(",", " ").split():
        match = re.fullmatch(r"([+-])([0-9]{1,3})", word)
        if match is None:
            raise ValueError(
                f"write +XID (drain for it) or -XID (ignore it), such as +109 or -74, not {word!r:.25}"
            )
        code, level = int(match[2]), DRAIN if match[1] == "+" else ""
        if levels.setdefault(code, level) != level:
            raise ValueError(f"Xid {code} is both to drain for and to ignore")
    return levels


def logged(output: str, *, timeout: float) -> list[str]:
    """Return the Xids that the kernel logged in this boot.

    Raises:
        CommandError: the log cannot be read.
    """
    argv = (JOURNALCTL, "-k", "-b", "-q", "--no-pager", "-o", output, "-g", "NVRM: Xid")
    done = run(*argv, timeout=timeout, check=False)
    if done.returncode not in (0, 1) or done.stderr.strip():  # 1: no such line
        raise CommandError(f"journalctl exited {done.returncode}: {done.stderr.strip()[:120]}")
    return done.stdout.splitlines()


def judge(line: str, levels: collections.abc.Mapping[int, str] | None = None) -> smi.Finding | None:
    """Judge one line of the kernel's log, with the option's levels; None if it asks for nothing.

    A line about an Xid that no pattern fits, and an Xid that is not known here, are warnings.
    """
    match = LINE.search(line)
    if match is None:
        found = _ANY.search(line)
        return smi.Finding(WARN, "xid", f"not understood: {found[0]:.100}") if found else None
    code = int(match[2])
    level, text = _asked(code, match[3], levels or {})
    return smi.Finding(level, "xid", f"Xid {code}: {text}", pci.spell(match[1])) if level else None


def _asked(code: int, rest: str, levels: collections.abc.Mapping[int, str]) -> tuple[str, str]:
    """Return the level and text of an Xid by the rest of its line; "" if it asks for nothing."""
    if code in levels:
        return levels[code], TABLE.get(code, ("", ""))[1] or "to drain for by option"
    if code in _BY_TEXT:
        pattern, form = _BY_TEXT[code]
        found = re.search(pattern, rest)
        return (DRAIN, form.format(*found.groups())) if found else ("", "")
    if code in OF_PROGRAMS:
        return "", ""
    return TABLE.get(code, (WARN, f"unknown here, see NVIDIA's Xid errors:{rest.lstrip(',')[:60]}"))

"""Read what `scontrol show` prints, from Slurm 24.11 to 26.05.

A record is one line of `Key=Value` fields. Slurm quotes nothing: a job's name, a reason or a
comment may hold spaces, equals signs and line breaks, and each release adds fields. So a field ends
where the next key begins, except that a field of free text ends only at a key that Slurm prints
after it, and a node's Reason only behind the author and the time that Slurm appends to it; and of
two fields with one key the first counts. Fields before the first free text of a record are
therefore certain (a node's name, State, Gres); fields after a text that users choose (JobName) can
be imitated by that text and must not decide about permissions.
"""

import collections.abc
import re

_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9_:/]*)=")
_ABSENT = frozenset({"", "(null)", "N/A", "n/a", "None", "Unknown"})

# Fields of free text, and the keys that may follow each. From src/api/node_info.c,
# src/api/job_info.c and src/scontrol/info_job.c of Slurm 24.11 and 25.11; a key that only some
# releases print does no harm here.
_AFTER_REASON = frozenset(
    "Comment Extra InstanceId InstanceType ReservationName TLSCertTokenSet TLSCertLastRenewal Topology "
    "Parameters".split()
)
_AFTER_PATHS = frozenset(
    "AdminComment BatchFeatures BurstBuffer BurstBufferState Comment Container ContainerID CpusPerTres Extra MailType "
    "MailUser MemPerTres NtasksPerTRES OriginCluster Power PrepareTime ResourceUsage SELinuxContext SLUID SiteFactor "
    "StdErr StdIn StdOut Switches SystemComment TresAllocUpdate TresBind TresFreq TresPerJob TresPerNode TresPerSocket "
    "TresPerTask".split()
)
_FOLLOWERS: dict[str, frozenset[str]] = {
    "OS": frozenset({"RealMemory"}),
    "JobName": frozenset({"UserId"}),
    "Command": frozenset({"SubmitLine", "WorkDir"}),
    "SubmitLine": frozenset({"WorkDir"}),
    **dict.fromkeys(("Comment", "Extra"), _AFTER_REASON | _AFTER_PATHS),
    **dict.fromkeys(
        ("WorkDir", "StdErr", "StdIn", "StdOut", "AdminComment", "SystemComment"), _AFTER_PATHS
    ),
}
# " [root@2026-11-20T18:51:55]", behind a node's Reason
_STAMP = re.compile(r" \[[^\s\[\]@]+@[^\s\[\]]+\](?=\s|$)")


def records(text: str) -> list[dict[str, str]]:
    """Split the output of `scontrol show ENTITY -o` into the fields of each record.

    `value()` recognizes an absent one.

    Lines that hold no record (`No nodes in the system`) are ignored.
    """
    found: list[str] = []
    first_key: str | None = None
    for line in text.splitlines():
        start = _KEY.match(line)
        if start and (first_key is None or start[1] == first_key):
            first_key = start[1]
            found.append(line)
        elif found:  # a line break inside a text
            found[-1] += f"\n{line}"
    return [_fields(record) for record in found]


def config(text: str) -> dict[str, str]:
    """Read the output of `scontrol show config`, with the settings of plugins.

    Of two settings with one name the first counts.
    """
    pairs = [line.partition("=")[::2] for line in text.splitlines() if "=" in line]
    return {key.strip(): value.strip() for key, value in reversed(pairs)}


def value(record: collections.abc.Mapping[str, str], key: str) -> str | None:
    """Read the field; None for each of Slurm's ways to print an absent one."""
    text = record.get(key, "")
    return None if text in _ABSENT else text


def _fields(record: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    first = key = ""
    start = stamped = 0  # where the field begins; where the author of a node's reason ends
    for match in _KEY.finditer(record):
        if match.start() < stamped:
            continue
        if key:
            is_reason = not stamped and (first, key) == ("NodeName", "Reason")
            if match[1] not in (_AFTER_REASON if is_reason else _FOLLOWERS.get(key, {match[1]})):
                continue
            fields.setdefault(key, record[start : match.start()].strip())
        key, start = match[1], match.end()
        first = first or key
        if (first, key) == ("NodeName", "Reason"):  # a job's is one word
            stamp = _STAMP.search(record, start)
            stamped = stamp.end() if stamp else 0
    if key:
        fields.setdefault(key, record[start:].strip())
    return fields

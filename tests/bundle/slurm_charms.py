"""What upstream's Slurm charms refuse in their options, or overwrite, and claim of their hosts."""

import collections.abc
import functools
import re

import slurmutils

# What slurmctld's charm writes into slurm.conf itself (charms/slurmctld/src/charm.py @e292de4,
# _on_start). The option's text is the last include.
_SLURM_CONF_TAKEN = set(
    "ClusterName SlurmctldHost AuthAltParameters AuthAltTypes AuthType CredType MaxNodeCount "
    "PluginDir SelectType SlurmctldParameters SlurmctldPort SlurmdPort StateSaveLocation "
    "SlurmdSpoolDir SlurmUser SlurmdUser Include AccountingStorageHost AccountingStorageType "
    "NodeName NodeSet PartitionName".split()
)
# Written by slurmd's charm (charms/slurmd/src/config.py @e292de4, _build_partition), the third by
# slurmctld's (charm.py, _on_slurmd_ready)
_PARTITION_TAKEN = {"partitionname", "nodes", "default"}
# slurm.conf(5): slurmctld is fatal over them without slurmdbd. Relations come after the first
# start, and a unit whose start hook failed handles no relation.
AFTER_SLURMDBD = {"AccountingStorageTRES", "AccountingStorageEnforce"}
# The port that each opens, and what it alone may write or read on its host (internal/slurm-ops
# @e292de4; tests/upstream compares them)
CLAIMS = {
    "slurmctld": {"port 6817", "/etc/slurm/slurm.conf"},
    "slurmrestd": {"port 6820", "/etc/slurm/slurm.conf"},
    "slurmdbd": {"port 6819", "/etc/slurm/slurmdbd.conf"},
    "sackd": {"port 6818", "/etc/slurm/slurm.conf"},
    "slurmd": {"port 6818", "/etc/slurm/slurm.conf"},
}

Problems = collections.abc.Iterator[str]


def slurm_conf_problems(text: str) -> Problems:
    """Yield why slurmctld's option slurm-conf-parameters cannot have this text.

    Upstream's charm gives it to slurmutils' SlurmConfig (charms/slurmctld/src/config.py @e292de4)
    and then to slurmctld.
    """
    yield from _refusal("slurm-conf-parameters", slurmutils.SlurmConfig.from_str, text)
    for line in filter(None, map(str.strip, text.splitlines())):
        # A file of the site's; upstream's charm parses slurm.conf.* itself
        if re.fullmatch(r"include (?!slurm\.conf)\w+\.conf", line):
            continue
        key, equals, value = line.partition("=")
        if not (equals and value) or not key.isalpha() or re.search(r"\s\w+=", value):
            yield f"slurm-conf-parameters has one KEY=VALUE in a line, not {line}"
        elif key in _SLURM_CONF_TAKEN:
            yield f"slurm-conf-parameters: the charm itself says {key}"


def cgroup_problems(text: str) -> Problems:
    """Yield why slurmctld's option cgroup-parameters cannot have this text."""
    yield from _refusal("cgroup-parameters", slurmutils.CGroupConfig.from_str, text)


def partition_problems(text: str) -> Problems:
    """Yield why slurmd's option partition-config cannot have this text."""
    yield from _refusal("partition-config", slurmutils.Partition.from_str, text)
    if "\n" in text:
        yield "partition-config is one line"
    for word in text.split():
        key, equals, value = word.partition("=")
        if not (equals and value) or key.lower() in _PARTITION_TAKEN:
            yield f"partition-config has no {word} for an operator to say"


CHECKS: dict[str, collections.abc.Callable[[str], Problems]] = {
    "slurm-conf-parameters": slurm_conf_problems,
    "cgroup-parameters": cgroup_problems,
    "partition-config": partition_problems,
}


@functools.cache  # slurmutils takes long
def _refusal(
    option: str, read: collections.abc.Callable[[str], object], text: str
) -> tuple[str, ...]:
    try:
        read(text)
    except (slurmutils.ModelError, ValueError) as e:  # upstream's charms are Blocked then
        why = str(e).splitlines()[0].partition(". valid ")[0]
        return (f"{option}: slurmutils refuses it: {why}",)
    return ()

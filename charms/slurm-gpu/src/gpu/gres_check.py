"""Let slurmd itself read a node's gres.conf before Slurm is touched: `slurmd -G`.

It needs no controller and exits 0 in any case, so its output is compared. Seen on 24.11.5, 25.11.7
and 26.05.5:

    slurmd-n0: Gres Name=gpu Type=h100 Count=1 Index=0 ID=7696487 File=/dev/nvidia0 Cores=0-55
    CoreCnt=224
"""

import collections.abc
import logging
import pathlib
import re
import socket
import tempfile

import template
from gpu import gres
from slurm_ddp.commands import CommandError, run

logger = logging.getLogger(__name__)

SLURMD = "/usr/sbin/slurmd"
_TIMEOUT_S = 20.0  # it answers in milliseconds, and waits 20 s for a missing device file
_SHAPE = ("cpus", "boards", "sockets", "socketsperboard", "corespersocket", "threadspercore")
_RECORD = re.compile(r"Gres (?P<fields>Name=(?:gpu|shard|mps)\b.*)")
_FAILURE = re.compile(r"(?:error|fatal|warning): (?P<text>.*(?:gres|gpu|/dev/).*)", re.IGNORECASE)
_INVALID = re.compile(r"error: (?P<text>Invalid GRES data.*)")  # it prints the device all the same

# The compared fields of each device, by its Gres' name and its file
_Records = dict[tuple[str, str], dict[str, str]]


def difference(
    node: str,
    plan: gres.Plan,
    lines: collections.abc.Sequence[str],
    settings: collections.abc.Mapping[str, str],
    autodetect: str = "off",
) -> str | None:
    """Return how slurmd's devices with these lines differ from the plan; None if they do not.

    `settings` is the node's `--conf`; `autodetect` is the setting in gres.conf for all nodes. Also
    returns None if slurmd prints no device or does not answer.
    """
    try:
        printed = _print_gres(
            node, plan.gres, settings, [f"AutoDetect={autodetect}", *gres.node_lines(node, lines)]
        )
    except CommandError as e:
        logger.warning("the lines of %s are not checked: %s", node, e)
        return None
    found = _records(match["fields"] for match in _RECORD.finditer(printed))
    failure, invalid = _FAILURE.search(printed), _INVALID.search(printed)
    if not found and failure is None:
        logger.warning("the lines of %s are not checked: slurmd -G prints no device", node)
        return None
    wanted = _records(plan.lines)
    problem = _compare(wanted, found, optional=set() if lines else {"Cores"})
    if problem is not None:
        return f"slurmd -G: {problem}" + (f" ({failure['text'].strip()[:160]})" if failure else "")
    return f"slurmd -G: {invalid['text'].strip()[:160]}" if invalid else None


def _print_gres(
    node: str, gres_text: str, settings: collections.abc.Mapping[str, str], rows: list[str]
) -> str:
    """Return the output of `slurmd -G` with these rows in gres.conf, both streams."""
    with tempfile.TemporaryDirectory(prefix="slurmd-") as name:
        directory = pathlib.Path(name)
        spool = directory / "spool"  # slurmd makes a socket here
        spool.mkdir()
        conf = template.fill(
            "slurm.conf",
            spool=spool,
            node=node,
            host=socket.gethostname().partition(".")[0],
            shape=" ".join(f"{key}={settings[key]}" for key in _SHAPE if key in settings),
            gres=gres_text,
            types=",".join(sorted({item.partition(":")[0] for item in gres_text.split(",")})),
        )
        (directory / "slurm.conf").write_text(conf)
        (directory / "gres.conf").write_text("".join(f"{row}\n" for row in rows))
        (directory / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        done = run(
            SLURMD, "-G", "-f", str(directory / "slurm.conf"), check=False, timeout=_TIMEOUT_S
        )
    return f"{done.stdout}\n{done.stderr}"


def _records(lines: collections.abc.Iterable[str]) -> _Records:
    records: _Records = {}
    for line in lines:
        fields = gres.fields(line)
        keys = ("Type", "Cores") if fields["Name"] == "gpu" else ("Count",)
        compared = {key: fields[key] for key in keys if fields.get(key, "(null)") != "(null)"}
        for file in gres.device_files(line):
            records.setdefault((fields["Name"], file), {}).update(compared)
    return records


def _compare(
    wanted: _Records, found: _Records, optional: collections.abc.Collection[str]
) -> str | None:
    for (name, file), fields in wanted.items():
        which = file if name == "gpu" else f"{name} of {file}"
        if (name, file) not in found:
            return f"it finds no {which}"
        for key, value in fields.items():
            other = found[name, file].get(key)
            if other != value and not (other is None and key in optional):
                return f"{which} has {key}={other or '(none)'}, not {value}"
    return None

"""What slurmd itself makes of a node's gres.conf lines, before Slurm is touched: `slurmd -G` on a configuration aside.

It needs no controller and no munge, opens nothing but the files it is given, and exits 0 whatever it found, so what it
prints is compared. Seen on 22.05.8, 25.11.7 and 26.05.5 (with the time in front):

    slurmd-n0: Gres Name=gpu Type=h100 Count=1 Index=0 ID=7696487 File=/dev/nvidia0 Cores=0-55 CoreCnt=224 Links=-1,0

For MultipleFiles 25.11 prints the files with commas, 22.05 a line for each.
"""

import collections.abc
import hashlib
import logging
import pathlib
import re
import socket
import tempfile

import gpu_detect
import gres as gres_rules
from slurm_ddp import files
from slurm_ddp.run import CommandError, run

logger = logging.getLogger(__name__)

SLURMD = "/usr/sbin/slurmd"
ACCEPTED = pathlib.Path("/var/lib/slurm-gpu/accepted")  # a fingerprint of what slurmd agreed to last
_TIMEOUT_S = 20.0  # it answers in milliseconds, and waits 20 s for a device file that is not there
_SHAPE = ("cpus", "boards", "sockets", "socketsperboard", "corespersocket", "threadspercore")
_CGROUP_DISABLED_SINCE = (23, 11)  # 22.05 exits over the word
_RECORD = re.compile(r"Gres Name=(?P<name>gpu|shard|mps)\b(?P<rest>.*)")
_FIELD = re.compile(r"(?<!\S)(?P<key>\w+)=(?P<value>\S+)")
_FAILURE = re.compile(r"(?:error|fatal|warning): (?P<text>.*(?:gres|gpu|/dev/).*)", re.IGNORECASE)

_INVALID = re.compile(r"error: (?P<text>Invalid GRES data.*)")  # it prints the device all the same

_Records = dict[tuple[str, str], dict[str, str]]  # what tells of each device, by the name of its Gres and its file

_CONF = """\
ClusterName=check
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
GresTypes={types}
SlurmdSpoolDir={spool}
NodeName={node} NodeHostname={host} {shape} Gres={gres}
"""


def difference(
    node: str,
    gres: str,
    lines: collections.abc.Sequence[str],
    settings: collections.abc.Mapping[str, str],
    version: tuple[int, int],
) -> str | None:
    """Return how slurmd reads these lines otherwise than they are meant, or None when it agrees.

    What it agreed to once is not asked again. A slurmd that cannot be asked is no difference.

    Args:
        node: the node's name.
        gres: its Gres, "gpu:h100:8".
        lines: its gres.conf lines, without NodeName.
        settings: the node's `--conf`, for its sockets and cores.
        version: slurmd's.
    """
    refused = refusal(node, lines, settings) if version >= gres_rules.AUTODETECT_NVIDIA_SINCE else None
    if refused:
        return f"Slurm would refuse {node}: {refused}"
    shape = " ".join(f"{key}={settings[key]}" for key in _SHAPE if key in settings)
    mark = hashlib.sha256("\n".join((node, gres, shape, str(version), *lines)).encode()).hexdigest()
    if _accepted() == mark:
        return None
    try:
        said = _ask(node, gres, lines, shape, version)
    except CommandError as e:
        logger.warning("the lines of %s are not checked: %s", node, e)
        return None
    found = _by_file(said)
    failure = _FAILURE.search(said)
    if not found and failure is None:
        logger.warning("the lines of %s are not checked: slurmd -G prints no device", node)
        return None
    problem = _compare(_wanted(lines), found)
    invalid = _INVALID.search(said)
    if problem is None and invalid is not None:
        return f"slurmd -G: {invalid['text'].strip()[:160]}"
    if problem is None:
        files.ensure_file(ACCEPTED, mark + "\n")
        return None
    return f"slurmd -G: {problem}" + (f" ({failure['text'].strip()[:160]})" if failure else "")


def refusal(node: str, lines: collections.abc.Iterable[str], settings: collections.abc.Mapping[str, str]) -> str | None:
    """Return with which words the controller of Slurm 24.11 and later refuses these lines, None when it takes them.

    It wants the Cores of a card to be those of one whole socket, or all (_check_core_range_matches_sock() of
    src/interfaces/gres.c); `slurmd -G` does not look at that.

    Args:
        node: the node's name.
        lines: its gres.conf lines.
        settings: the node's `--conf`; without sockets and cores in it nothing can be said.
    """
    try:
        sockets = int(settings.get("boards", "1")) * int(settings.get("socketsperboard", settings.get("sockets", "1")))
        size = int(settings["corespersocket"])
    except (KeyError, ValueError):
        return None
    for line in lines:
        cores = next((word.removeprefix("Cores=") for word in line.split() if word.startswith("Cores=")), None)
        near = gpu_detect.parse_cpu_list(cores) if cores else None
        if near is None or near == frozenset(range(sockets * size)):
            continue
        socket_number = min(near) // size
        whole = range(socket_number * size, (socket_number + 1) * size)
        if near != frozenset(whole):
            return (
                f"gres/gpu GRES core specification {cores} for node {node} doesn't match socket boundaries. "
                f"(Socket {socket_number} is cores {whole[0]}-{whole[-1]})"
            )
    return None


def _ask(node: str, gres: str, lines: collections.abc.Sequence[str], shape: str, version: tuple[int, int]) -> str:
    """Return what `slurmd -G` prints, on both streams."""
    with tempfile.TemporaryDirectory(prefix="slurm-gpu-") as name:
        directory = pathlib.Path(name)
        host = socket.gethostname().partition(".")[0]
        types = ",".join(sorted({item.partition(":")[0] for item in gres.split(",")}))
        text = _CONF.format(spool=directory / "spool", node=node, host=host, shape=shape, gres=gres, types=types)
        (directory / "slurm.conf").write_text(text)
        (directory / "gres.conf").write_text("".join(f"NodeName={node} AutoDetect=off {line}\n" for line in lines))
        if version >= _CGROUP_DISABLED_SINCE:
            (directory / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        done = run(SLURMD, "-G", "-f", str(directory / "slurm.conf"), check=False, timeout=_TIMEOUT_S)
    return f"{done.stdout}\n{done.stderr}"


def _wanted(lines: collections.abc.Iterable[str]) -> _Records:
    records: _Records = {}
    for line in lines:
        fields = dict(word.split("=", 1) for word in line.split())
        for file in (fields.get("File") or fields.get("MultipleFiles", "")).split(","):
            records.setdefault((fields["Name"], file), {}).update(_telling(fields))
    return records


def _by_file(text: str) -> _Records:
    records: _Records = {}
    for match in _RECORD.finditer(text):
        fields = {field["key"]: field["value"] for field in _FIELD.finditer(match["rest"])} | {"Name": match["name"]}
        for file in fields.get("File", "").split(","):
            if file:
                records.setdefault((match["name"], file), {}).update(_telling(fields))
    return records


def _telling(fields: collections.abc.Mapping[str, str]) -> dict[str, str]:
    keys = ("Type", "Cores", "Links") if fields.get("Name", "gpu") == "gpu" else ("Count",)
    return {key: fields[key] for key in keys if fields.get(key, "(null)") != "(null)"}


def _compare(wanted: _Records, found: _Records) -> str | None:
    for (name, file), fields in wanted.items():
        which = file if name == "gpu" else f"{name} of {file}"
        if (name, file) not in found:
            return f"it finds no {which}"
        for key, value in fields.items():
            other = found[name, file].get(key)
            if other != value:
                return f"{which} has {key}={other or '(none)'}, not {value}"
    return None


def _accepted() -> str | None:
    try:
        return ACCEPTED.read_text().strip()
    except OSError:
        return None

"""The distribution's slurmctld, configured as upstream does: configless, dynamic nodes, a partition per application."""

import collections.abc
import dataclasses
import pathlib
import time
import typing

from common import munge, scontrol

from slurm_ddp import apt, files, systemd
from slurm_ddp.run import CommandError, run

SERVICE = "slurmctld.service"
PACKAGES = ("slurmctld", "slurm-client", munge.PACKAGE)
ETC = pathlib.Path("/etc/slurm")
LOG = pathlib.Path("/var/log/slurm/slurmctld.log")

_START_S = 30.0
_DROPIN = "[Service]\nRestart=on-failure\nRestartSec=5\n"
_OVERRIDES = "slurm.conf.overrides"
_PARTITION = "slurm.conf."  # + the partition's name, as upstream names these files

# Upstream's settings (slurmctld charm.py:255-330 of 25.11), in what 22.05 has of them. In containers upstream, too,
# takes linuxproc and leaves out task/cgroup. ReturnToService is upstream's: absent, so 0.
_SETTINGS = {
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    "GresTypes": "gpu",
    "MaxNodeCount": "65533",
    "MpiDefault": "none",
    "PluginDir": "/usr/lib/x86_64-linux-gnu/slurm-wlm",
    "ProctrackType": "proctrack/linuxproc",
    "RebootProgram": '"/usr/sbin/reboot --reboot"',
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU_Memory",
    "SlurmUser": "slurm",
    "SlurmctldLogFile": str(LOG),
    "SlurmctldParameters": "enable_configless",
    "SlurmctldPort": "6817",
    "SlurmdLogFile": "/var/log/slurm/slurmd.log",
    "SlurmdPort": "6818",
    "SlurmdSpoolDir": "/var/lib/slurm/slurmd",
    "StateSaveLocation": "/var/lib/slurm/checkpoint",
    "TaskPlugin": "task/affinity",
}
_CGROUP_SETTINGS = {
    "ConstrainCores": "yes",
    "ConstrainDevices": "yes",
    "ConstrainRAMSpace": "yes",
    "ConstrainSwapSpace": "yes",
}


class ControllerError(Exception):
    """slurmctld does not run as configured. `str()` is one line."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the controller should run with."""

    cluster_name: str
    host: str
    partitions: tuple[dict[str, object], ...]  # as the slurmd applications sent them, sorted by name
    default_partition: str
    overrides: dict[str, str]
    cgroup: dict[str, str]


def install() -> None:
    """Install slurmctld; it starts when its configuration is written."""
    apt.ensure_packages(PACKAGES)
    for path in ("/var/lib/slurm/checkpoint", "/var/log/slurm"):
        run("/usr/bin/install", "-d", "-o", "slurm", "-g", "slurm", "-m", "0755", path)
    systemd.ensure_dropin(SERVICE, "10-charmed-hpc.conf", _DROPIN)


def ensure(settings: Settings, key: str) -> bool:
    """Make slurmctld run with `settings` and munge's `key`; return whether it had to be restarted.

    Raises:
        ControllerError: it does not start; what was configured last is to blame.
    """
    restart = munge.ensure_key(key)
    texts = render(settings)
    for name, text in texts.items():
        restart |= files.ensure_file(ETC / name, text)
    for path in ETC.glob(f"{_PARTITION}*"):
        if path.name not in texts:
            restart |= files.ensure_absent(path)
    if not (ETC / "gres.conf").exists():
        # Upstream writes AutoDetect=nvidia here, once; 22.05 does not know that value.
        restart |= files.ensure_file(ETC / "gres.conf", "AutoDetect=off\n")
    if not restart and is_running():
        return False
    before = is_running()
    try:
        systemd.enable_now(SERVICE)
        if before:
            systemd.restart(SERVICE)
        _wait_until_answers()
    except (CommandError, scontrol.SlurmError) as e:
        raise ControllerError(f"slurmctld does not start: {_complaint()}") from e
    try:
        scontrol.reconfigure()  # nodes and login hosts fetch what changed
    except scontrol.SlurmError as e:
        raise ControllerError(str(e)) from e
    return True


def render(settings: Settings) -> dict[str, str]:
    """Return the configuration files of /etc/slurm that are the charm's own, by name."""
    main = {"ClusterName": settings.cluster_name, "SlurmctldHost": settings.host} | _SETTINGS
    partitions = {f"{_PARTITION}{partition['partitionname']}": partition for partition in settings.partitions}
    includes = [*sorted(partitions), *([_OVERRIDES] if settings.overrides else [])]
    overridden = {key.lower() for key in settings.overrides}
    lines = [f"{key}={value}" for key, value in main.items() if key.lower() not in overridden]
    texts = {"slurm.conf": "\n".join([*lines, *(f"Include {name}" for name in includes)]) + "\n"}
    for name, partition in partitions.items():
        texts[name] = _render_partition(partition, settings.default_partition)
    if settings.overrides:
        texts[_OVERRIDES] = "".join(f"{key}={value}\n" for key, value in settings.overrides.items())
    cgroup = _merged(_CGROUP_SETTINGS, settings.cgroup)
    texts["cgroup.conf"] = "".join(f"{key}={value}\n" for key, value in cgroup.items())
    return texts


def current_config() -> str:
    """Return slurm.conf as slurmctld read it, includes put in their place."""
    lines: list[str] = []
    for line in (ETC / "slurm.conf").read_text().splitlines():
        name = line.removeprefix("Include ")
        lines += (ETC / name).read_text().splitlines() if name != line else [line]
    return "\n".join(lines)


def stop() -> None:
    """Stop slurmctld for good; its files stay."""
    systemd.stop(SERVICE)
    run("/usr/bin/systemctl", "disable", SERVICE, check=False)


def is_configured() -> bool:
    """Tell whether slurmctld was given a configuration."""
    return (ETC / "slurm.conf").exists()


def is_running() -> bool:
    """Tell whether slurmctld runs."""
    return systemd.is_active(SERVICE)


def version() -> str:
    """Return slurmctld's version."""
    return run("/usr/sbin/slurmctld", "-V").stdout.split()[-1]


def _render_partition(partition: dict[str, object], default: str) -> str:
    name = str(partition["partitionname"])
    options = {key: value for key, value in partition.items() if key not in ("partitionname", "nodes")}
    if name == default:
        options["default"] = "yes"
    words = [f"partitionname={name}", f"nodes={name}", *(f"{key}={_text(value)}" for key, value in options.items())]
    return f"nodeset={name} feature={name}\n{' '.join(words)}\n"


def _text(value: object) -> str:
    return ",".join(map(str, typing.cast(list[object], value))) if isinstance(value, list) else str(value)


def _merged(own: collections.abc.Mapping[str, str], given: collections.abc.Mapping[str, str]) -> dict[str, str]:
    """Return the settings, the given ones winning; Slurm's keys do not distinguish case."""
    lower = {key.lower() for key in given}
    return {key: value for key, value in own.items() if key.lower() not in lower} | dict(given)


def _wait_until_answers() -> None:
    deadline = time.monotonic() + _START_S
    while is_running() and time.monotonic() < deadline:
        if "is UP" in run("/usr/bin/scontrol", "ping", check=False).stdout:
            return
        time.sleep(0.2)
    raise scontrol.SlurmError("slurmctld does not answer")


def _complaint() -> str:
    """Return why slurmctld ended, from its journal: the first error where `fatal` only says that there were some."""
    journal = run("/usr/bin/journalctl", "-u", SERVICE, "-n", "60", "-o", "cat", "--no-pager", check=False).stdout
    last_start = journal.rpartition("Started slurmctld")[2]
    lines = [line.removeprefix("slurmctld: ").strip() for line in last_start.splitlines()]
    errors = [line for line in lines if line.startswith("error:")]
    fatal = next((line for line in lines if line.startswith("fatal:")), "see journalctl -u slurmctld")
    return (errors[0] if errors and "configuration file" in fatal else fatal)[:200]

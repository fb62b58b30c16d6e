"""slurmctld and its files, as upstream leaves them: written once, then changed setting by setting.

Line numbers of upstream's are in ../../README.md.
"""

import json
import pathlib
import shutil
import time

import slurmutils
from common import conf, service

SERVICE = service.Service(
    "slurmctld",
    owner="slurm",
    packages=("slurm-client", "slurm-wlm-jwt-plugin"),
    dropin="[Service]\nLimitMEMLOCK=infinity\nLimitNOFILE=1048576\nRestart=on-failure\nRestartSec=10\n",
    raises_limits=True,
)

_BESIDE = ("accounting", "profiling", "overrides")
SHARED = pathlib.Path("/srv/slurmctld-statefs")  # what several controllers mount
_CLUSTER_NAMES = tuple(folder / "checkpoint" / "clustername" for folder in (service.VAR, SHARED))


def parse(text: str) -> slurmutils.SlurmConfig:
    """Return the option slurm-conf-parameters, or raise `conf.OptionsRefused`."""
    try:
        overrides = slurmutils.SlurmConfig.from_str(text)
    except (slurmutils.ModelError, ValueError) as e:
        raise conf.OptionsRefused({"slurm-conf-parameters": str(e)}) from e
    if overrides.slurmctld_parameters:
        overrides.slurmctld_parameters["enable_configless"] = True
    return overrides


def slurm_conf() -> conf.ConfigFile[slurmutils.SlurmConfig]:
    """Return slurm.conf."""
    return conf.ConfigFile(slurmutils.SlurmConfigEditor(), service.ETC / "slurm.conf", "slurm")


def hosts() -> list[str]:
    """Return SlurmctldHost of slurm.conf, the primary first; none before there is one."""
    return list(slurm_conf().load().slurmctld_host or []) if slurm_conf().path.exists() else []


def write_once(cluster_name: str, hosts: list[str]) -> None:
    """Write slurm.conf, its included files, and gres.conf, each only if it is missing.

    `hosts` are SlurmctldHost. MetricsType, which upstream sets, is unknown to Slurm 24.11.
    """
    main = slurm_conf()
    if not main.path.exists():
        config = slurmutils.SlurmConfig.from_str(
            (pathlib.Path(__file__).parent / "slurm.conf").read_text()
        )
        config.cluster_name = cluster_name
        config.slurmctld_host = hosts
        config.auth_alt_parameters = {"jwt_key": str(SERVICE.jwt_key_path)}
        config.include = [main.beside(suffix).path.name for suffix in _BESIDE]
        main.dump(config)
        for suffix in _BESIDE:  # each as it is, empty if it is missing
            with main.beside(suffix).edit():
                pass
    gres = conf.ConfigFile[slurmutils.GresConfig](
        slurmutils.GresConfigEditor(), service.ETC / "gres.conf", "slurm"
    )
    if not gres.path.exists():
        with gres.edit() as config:
            config.auto_detect = "nvidia"


def write_options(overrides: slurmutils.SlurmConfig) -> None:
    """Write slurm.conf.overrides and cgroup.conf."""
    slurm_conf().beside("overrides").dump(overrides)
    cgroup = slurmutils.CGroupConfig()
    cgroup.constrain_cores = cgroup.constrain_devices = True
    cgroup.constrain_ram_space = cgroup.constrain_swap_space = True
    cgroup.signal_children_processes = True
    editor, path = slurmutils.CGroupConfigEditor(), service.ETC / "cgroup.conf"
    conf.ConfigFile[slurmutils.CGroupConfig](editor, path, "slurm").dump(cgroup)


def set_partition(partition: slurmutils.Partition, default_partition: str) -> None:
    """Write slurm.conf.<partition> and include it; its nodes have its name as a feature."""
    name = str(partition.partition_name)
    if name == default_partition:
        partition.default = True
    file = slurm_conf().beside(name)
    with file.edit() as config:
        config.nodesets[name] = slurmutils.NodeSet(nodeset=name, feature=name)
        config.partitions[name] = partition
    _include(file.path.name)


def remove_partition(name: str) -> None:
    """Remove slurm.conf.<partition>."""
    file = slurm_conf().beside(name)
    _exclude(file.path.name)
    file.path.unlink(missing_ok=True)


def set_accounting(host: str) -> None:
    """Let slurmctld account with the slurmdbd on `host`.

    A slurmctld that ran alone gave itself a ClusterID. slurmdbd takes it over since 25.11
    (SchedMD/slurm 6086f2c3);
    24.11 gives another one, which is fatal for slurmctld unless its own is removed.
    """
    with slurm_conf().beside("accounting").edit() as config:
        if config.accounting_storage_host is None:
            for file in _CLUSTER_NAMES:
                file.unlink(missing_ok=True)
        config.accounting_storage_host = host
        config.accounting_storage_port = 6819
        config.accounting_storage_type = "accounting_storage/slurmdbd"
    _include(slurm_conf().beside("profiling").path.name)


def unset_accounting() -> None:
    """Let slurmctld account no more."""
    with slurm_conf().beside("accounting").edit() as config:
        del config.accounting_storage_host
        del config.accounting_storage_port
        del config.accounting_storage_type
    _exclude(slurm_conf().beside("profiling").path.name)


def _include(name: str) -> None:
    with slurm_conf().edit() as config:
        if name not in (config.include or []):
            config.include = [name, *(config.include or [])]


def _exclude(name: str) -> None:
    with slurm_conf().edit() as config:
        config.include = [other for other in config.include or [] if other != name]


def share_settings(*, is_leader: bool) -> None:
    """Link /etc/slurm to the shared filesystem; the leader copies it there, keeping the old."""
    target = SHARED / "etc" / "slurm"
    if service.ETC.is_symlink():
        return
    if is_leader and not target.exists():
        target.parent.mkdir(parents=True)
        service.run("/usr/bin/cp", "--archive", str(service.ETC), str(target), timeout=600)
    old = f"{service.ETC}_{time.strftime('%Y%m%d_%H%M%S')}"
    shutil.move(service.ETC, old)  # a rename fails where an image's layer has it (EXDEV)
    service.ETC.symlink_to(target)


def share_state() -> None:
    """Move StateSaveLocation to the controllers' shared filesystem; start slurmctld afterwards."""
    with slurm_conf().edit() as config:
        source = pathlib.Path(str(config.state_save_location))
        target = SHARED / source.name
        if not target.exists():
            service.systemctl("stop", SERVICE.name)
            service.run("/usr/bin/cp", "--archive", str(source), str(target), timeout=600)
        config.state_save_location = str(target)


def all_settings() -> dict[str, dict[str, object]]:
    """Return the settings of slurm.conf and of its companions, as slurmrestd gets them."""
    main = slurm_conf()
    return {file.path.name: file.load().dict() for file in (main, *main.all_beside())}


def controller_status(host: str) -> str:
    """Return the report of `scontrol ping` on `host`, such as `primary - UP`; "" on failure."""
    try:
        pings = json.loads(service.scontrol("ping", "--json"))["pings"]
    except (service.SlurmError, ValueError, KeyError):
        return ""
    return next(
        (f"{ping['mode']} - {ping['pinged']}" for ping in pings if ping["hostname"] == host), ""
    )

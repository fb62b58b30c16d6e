"""slurmdbd and its files, as upstream leaves them."""

import slurmutils
from common import conf, service

SERVICE = service.Service("slurmdbd", owner="slurm", packages=("slurm-wlm-jwt-plugin",))
DATABASE = "slurm_acct_db"


def slurmdbd_conf() -> conf.ConfigFile[slurmutils.SlurmdbdConfig]:
    """Return slurmdbd.conf, which only slurmdbd's account reads: it holds the database's password."""
    return conf.ConfigFile(slurmutils.SlurmdbdConfigEditor(), service.ETC / "slurmdbd.conf", "slurm", mode=0o600)


def write_options(host: str, address: str, overrides: slurmutils.SlurmdbdConfig) -> None:
    """Write slurmdbd.conf's settings of the charm's own and slurmdbd.conf.overrides."""
    main = slurmdbd_conf()
    with main.edit() as config:
        config.auth_alt_parameters = {"jwt_key": str(SERVICE.jwt_key_path)}
        config.auth_alt_types = ["auth/jwt"]
        config.auth_type = "auth/slurm"
        config.dbd_addr = address
        config.dbd_host = host
        config.dbd_port = 6819
        config.log_file = "/var/log/slurm/slurmdbd.log"
        config.pid_file = "/var/run/slurmdbd/slurmdbd.pid"
        config.plugin_dir = ["/usr/lib/x86_64-linux-gnu/slurm-wlm"]
        config.slurm_user = "slurm"
        config.storage_type = "accounting_storage/mysql"
    main.beside("overrides").dump(overrides)


def write_storage(user: str, password: str, endpoint: str) -> None:
    """Write slurmdbd.conf.storage. `endpoint` is host:port, an IPv6 address in brackets."""
    host, _, port = endpoint.rpartition(":")
    config = slurmutils.SlurmdbdConfig()
    config.storage_user = user
    config.storage_pass = password
    config.storage_loc = DATABASE
    config.storage_host = host.removeprefix("[").removesuffix("]")
    config.storage_port = int(port)
    slurmdbd_conf().beside("storage").dump(config)


def merge_and_restart() -> None:
    """Put the files beside slurmdbd.conf into it, in the folder's order, and start slurmdbd. Raises `SlurmError`."""
    main = slurmdbd_conf()
    others = [file.load() for file in main.all_beside()]
    with main.edit() as config:
        for other in others:
            config.update(other)
    SERVICE.reconfigure()

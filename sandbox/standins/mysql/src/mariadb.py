"""Debian's MariaDB, reachable by the model's other machines."""

import pathlib

from slurm_ddp import apt, files, systemd
from slurm_ddp.run import run

SERVICE = "mariadb.service"
PORT = 3306

_CONFIG = pathlib.Path("/etc/mysql/mariadb.conf.d/60-sandbox.cnf")
# Clients are known by address alone: no machine of a model resolves another. 20 MB is what `profile=testing` takes.
_SETTINGS = "[mariadbd]\nbind-address = 0.0.0.0\nskip-name-resolve\ninnodb_buffer_pool_size = 20M\n"


def install() -> None:
    """Install MariaDB and start it."""
    files.ensure_file(_CONFIG, _SETTINGS)
    apt.ensure_packages(("mariadb-server",))
    systemd.enable_now(SERVICE)


def version() -> str:
    """Return the server's version, such as 10.11.6."""
    return _sql("SELECT VERSION();").partition("-")[0].strip()


def is_running() -> bool:
    """Return whether the server runs."""
    return systemd.is_active(SERVICE)


def create(database: str, user: str, password: str) -> None:
    """Make a database and the account that may do everything in it."""
    _sql(
        f"CREATE DATABASE IF NOT EXISTS `{database}`;\n"
        f"CREATE OR REPLACE USER '{user}'@'%' IDENTIFIED BY '{password}';\n"
        f"GRANT ALL PRIVILEGES ON `{database}`.* TO '{user}'@'%';\n",
        password,
    )


def _sql(statements: str, *secrets: str) -> str:
    """Run SQL as root over the server's socket and return the rows. Raises CommandError."""
    return run("/usr/bin/mariadb", "--batch", "--skip-column-names", stdin=statements, secrets=secrets).stdout

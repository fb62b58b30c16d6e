"""Debian packages as desired state.

charmlibs-apt was weighed: it has no deadline, does not wait for the lock that unattended-upgrades holds on a fresh
machine, and installs package by package, where one transaction is faster and either happens or does not.
"""

import collections.abc

from slurm_ddp.run import CommandError, run

_APT_GET = ("/usr/bin/apt-get", "-o", "DPkg::Lock::Timeout=600", "-y")
_ENV = {"DEBIAN_FRONTEND": "noninteractive"}


def ensure_packages(names: collections.abc.Sequence[str], *, timeout: float = 1800) -> bool:
    """Install the packages that are missing, in one transaction; return whether any was.

    Raises:
        CommandError: a package is not in the configured archives, or cannot be installed within `timeout` seconds.
    """
    missing = [name for name in names if not is_installed(name)]
    if not missing:
        return False
    install = (*_APT_GET, "--no-install-recommends", "install", *missing)
    try:
        run(*install, env=_ENV, timeout=timeout)
    except CommandError:  # most often a package list that is missing or older than the archive
        run(*_APT_GET, "update", env=_ENV, timeout=timeout)
        run(*install, env=_ENV, timeout=timeout)
    return True


def is_installed(name: str) -> bool:
    """Tell whether the package is installed and configured."""
    status = run("/usr/bin/dpkg-query", "-W", "-f", "${db:Status-Status}", name, check=False)
    return status.returncode == 0 and status.stdout == "installed"

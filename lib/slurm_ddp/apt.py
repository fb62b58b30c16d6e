"""Debian packages as desired state.

charmlibs-apt was weighed: it has no deadline, does not wait for the lock that unattended-upgrades holds on a fresh
machine, and installs package by package, where one transaction is faster and either happens or does not.
"""

import collections.abc
import dataclasses
import re

from slurm_ddp.run import CommandError, last_line, run

_APT_GET = ("/usr/bin/apt-get", "-o", "DPkg::Lock::Timeout=600", "-y")
_EXACT = ("--no-install-recommends", "--allow-downgrades", "--allow-change-held-packages", "install")
_ENV = {"DEBIAN_FRONTEND": "noninteractive"}
_REMOVED = re.compile(r"^(?:Remv|Purg) (\S+)", re.MULTILINE)


class AptError(Exception):
    """The packages cannot be had as asked. `str()` is one line with apt's own words."""


@dataclasses.dataclass(frozen=True)
class Version:
    """One version of a package that the archives offer."""

    number: str  # "1:580.173.02-0ubuntu0.24.04.1"
    depends: tuple[tuple[str, ...], ...] = ()  # clauses of alternatives: (("libc6 (>= 2.34)",), ("a (= 1)", "b"))

    @property
    def upstream(self) -> str:
        """The number without epoch and Debian revision."""
        return upstream(self.number)


def upstream(number: str) -> str:
    """Return a Debian version without its epoch and revision: 580.173.02."""
    return number.rpartition(":")[2].rpartition("-")[0] or number.rpartition(":")[2]


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
        update(timeout=timeout)
        run(*install, env=_ENV, timeout=timeout)
    return True


def is_installed(name: str) -> bool:
    """Tell whether the package is installed and configured."""
    status = run("/usr/bin/dpkg-query", "-W", "-f", "${db:Status-Status}", name, check=False)
    return status.returncode == 0 and status.stdout == "installed"


def update(*, timeout: float = 1800) -> None:
    """Read the archives' package lists anew."""
    run(*_APT_GET, "update", env=_ENV, timeout=timeout)


def installed(*patterns: str) -> dict[str, str]:
    """Return the versions of the installed packages whose names match any of the shell patterns."""
    row = "${db:Status-Status} ${Package} ${Version}\\n"
    listed = run("/usr/bin/dpkg-query", "-W", "-f", row, *patterns, check=False)
    rows = (line.split() for line in listed.stdout.splitlines())
    return {row[1]: row[2] for row in rows if len(row) == 3 and row[0] == "installed"}


def versions(names: collections.abc.Iterable[str]) -> dict[str, tuple[Version, ...]]:
    """Return what the configured archives offer of each package, the newest first; a package they lack is left out."""
    wanted = sorted(set(names))
    if not wanted:
        return {}
    told = run("/usr/bin/apt-cache", "show", *wanted, check=False)
    found: dict[str, list[Version]] = {}
    for stanza in told.stdout.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Depends|Pre-Depends): (.*)$", stanza, re.MULTILINE))
        if fields.get("Package") in wanted and "Version" in fields:
            clauses = ", ".join(fields[key] for key in ("Pre-Depends", "Depends") if key in fields)
            depends = tuple(
                tuple(choice.strip() for choice in clause.split("|")) for clause in clauses.split(",") if clause.strip()
            )
            found.setdefault(fields["Package"], []).append(Version(fields["Version"], depends))
    return {name: tuple(dict.fromkeys(offers)) for name, offers in found.items()}


def removed_by(packages: collections.abc.Mapping[str, str], *, timeout: float = 120) -> tuple[str, ...]:
    """Return which installed packages would have to go for exactly these versions. Changes nothing.

    Raises:
        AptError: apt finds no way to install them together.
    """
    try:
        told = run(*_APT_GET, "--simulate", *_EXACT, *_assigned(packages), env=_ENV, timeout=timeout)
    except CommandError as e:
        unmet = re.findall(r"^ (\S+ : (?:Pre)?Depends: .*)$", e.stdout, re.MULTILINE)
        raise AptError(unmet[0].strip() if unmet else last_line(e.stderr) or str(e)) from e
    return tuple(sorted(set(_REMOVED.findall(told.stdout))))


def install_exact(packages: collections.abc.Mapping[str, str], *, timeout: float = 3600) -> None:
    """Install exactly these versions, held or not, older or newer, in one transaction.

    Raises:
        AptError: it did not come to that.
    """
    try:
        run(*_APT_GET, *_EXACT, *_assigned(packages), env=_ENV, timeout=timeout)
    except CommandError as e:
        raise AptError(str(e)) from e


def repair(*, timeout: float = 1800) -> None:
    """Finish what an interrupted dpkg left half done.

    Raises:
        AptError: it cannot be finished.
    """
    try:
        run("/usr/bin/dpkg", "--configure", "-a", "--force-confdef", "--force-confold", env=_ENV, timeout=timeout)
    except CommandError as e:
        raise AptError(str(e)) from e


def held() -> set[str]:
    """Return the packages that apt does not touch by itself."""
    return set(run("/usr/bin/apt-mark", "showhold", check=False).stdout.split())


def ensure_held(names: collections.abc.Iterable[str]) -> bool:
    """Keep apt from touching these packages by itself; return whether any was not held yet."""
    missing = sorted(set(names) - held())
    if missing:
        run("/usr/bin/apt-mark", "hold", *missing)
    return bool(missing)


def ensure_not_held(names: collections.abc.Iterable[str]) -> bool:
    """Let apt handle these packages again; return whether any was held."""
    there = sorted(set(names) & held())
    if there:
        run("/usr/bin/apt-mark", "unhold", *there)
    return bool(there)


def _assigned(packages: collections.abc.Mapping[str, str]) -> list[str]:
    return [f"{name}={number}" for name, number in sorted(packages.items())]

"""Debian packages as desired state.

charmlibs-apt was considered: it lacks a deadline, does not wait for the lock that
unattended-upgrades holds on a fresh machine, and installs packages one by one, although one
transaction is faster and atomic.
"""

import collections.abc
import contextlib
import dataclasses
import re
import tempfile
import time

from slurm_ddp.commands import CommandError, last_line, run

_LOCK_S, _LOCK_POLL_S = 600, 2.0  # how long another process may hold one of apt's locks
_APT_GET = ("/usr/bin/apt-get", "-o", f"DPkg::Lock::Timeout={_LOCK_S}", "-y")
# A hold keeps a package from being removed for another, too, despite --allow-change-held-packages
_EXACT = (
    *(
        "-o",
        "APT::Ignore-Hold=true",
        "--no-install-recommends",
        "--allow-downgrades",
        "--allow-change-held-packages",
    ),
    "install",
)
_ENV = {"DEBIAN_FRONTEND": "noninteractive"}
_CHANGE_S = 1800.0
# Versions by package, both as patterns of apt_preferences(5)
_Pins = collections.abc.Mapping[str, str] | None
_REMOVED = re.compile(r"^(?:Remv|Purg) (\S+)", re.MULTILINE)


class AptError(Exception):
    """apt finds no way to install the packages. `str()` is one line of apt's output."""


@dataclasses.dataclass(frozen=True)
class Changes:
    """The changes that apt would make."""

    installed: dict[str, str]  # versions by package: new, upgraded and downgraded ones
    removed: tuple[str, ...]


def upstream(number: str) -> str:
    """Cut epoch and revision off a Debian version: 580.173.02."""
    return number.rpartition(":")[2].rpartition("-")[0] or number.rpartition(":")[2]


def ensure_packages(names: collections.abc.Sequence[str]) -> None:
    """Install the packages that are missing, in one transaction. Raises `CommandError`."""
    missing = sorted(set(names) - installed(*names).keys())
    if not missing:
        return
    install = ("--no-install-recommends", "install", *missing)
    try:
        _change(*install)
    except CommandError:  # most often a package list that is missing or older than the archive
        update()
        _change(*install)


def is_installed(name: str) -> bool:
    """Report whether the package is installed and configured."""
    status = run("/usr/bin/dpkg-query", "-W", "-f", "${db:Status-Status}", name, check=False)
    return status.returncode == 0 and status.stdout == "installed"


def update() -> None:
    """Refresh the package index."""
    _change("update")


def installed(*patterns: str) -> dict[str, str]:
    """List the versions of the installed packages whose names match any of the shell patterns."""
    row = "${db:Status-Status} ${Package} ${Version}\\n"
    listed = run("/usr/bin/dpkg-query", "-W", "-f", row, *patterns, check=False)
    rows = (line.split() for line in listed.stdout.splitlines())
    return {row[1]: row[2] for row in rows if len(row) == 3 and row[0] == "installed"}


def candidates(names: collections.abc.Iterable[str], pins: _Pins = None) -> dict[str, str]:
    """Return the version of each package that apt would install.

    Packages that no archive has are omitted.
    """
    with _preferences(pins) as options:
        policy = run(
            "/usr/bin/apt-cache", *options, "policy", *sorted(set(names)), check=False
        ).stdout
    rows = re.findall(r"^(\S+):\n(?:  Installed: .*\n)?  Candidate: (\S+)$", policy, re.MULTILINE)
    return {name: number for name, number in rows if number != "(none)"}


def depends(names: collections.abc.Iterable[str]) -> dict[str, str]:
    """Return the field Depends of each package's candidate.

    Packages that no archive has are omitted.
    """
    shown = run(
        "/usr/bin/apt-cache", "--no-all-versions", "show", *sorted(set(names)), check=False
    ).stdout
    stanzas = (
        dict(re.findall(r"^(Package|Depends): (.*)$", text, re.MULTILINE))
        for text in shown.split("\n\n")
    )
    return {
        fields["Package"]: fields.get("Depends", "") for fields in stanzas if "Package" in fields
    }


def simulate(packages: collections.abc.Iterable[str], pins: _Pins = None) -> Changes:
    """Simulate the installation of packages (`name` or `name=version`).

    Raises `AptError` if they do not go together.

    The pins apply to dependencies too.
    """
    try:
        with _preferences(pins) as options:
            done = run(*_APT_GET, "--simulate", *options, *_EXACT, *packages, env=_ENV, timeout=120)
    except CommandError as e:
        unmet = re.findall(r"^ (\S+ : (?:Pre)?Depends: .*)$", e.stdout, re.MULTILINE)
        raise AptError(unmet[0].strip() if unmet else last_line(e.stderr) or str(e)) from e
    installed = dict(re.findall(r"^Inst (\S+)(?: \[[^]]*\])? \((\S+)", done.stdout, re.MULTILINE))
    return Changes(installed, tuple(sorted(set(_REMOVED.findall(done.stdout)))))


def install_exact(packages: collections.abc.Mapping[str, str]) -> None:
    """Install exactly these versions in one transaction, held or not, older or newer.

    Raises `CommandError`.
    """
    _change(*_EXACT, *assigned(packages), timeout_s=2 * _CHANGE_S)


def repair() -> None:
    """Finish an interrupted dpkg run. Raises `CommandError`."""
    run(
        "/usr/bin/dpkg",
        "--configure",
        "-a",
        "--force-confdef",
        "--force-confold",
        env=_ENV,
        timeout=_CHANGE_S,
    )


def held() -> set[str]:
    """List the packages on hold."""
    return set(run("/usr/bin/apt-mark", "showhold").stdout.split())


def ensure_held(names: collections.abc.Iterable[str]) -> None:
    """Put these packages on hold."""
    if missing := sorted(set(names) - held()):
        run("/usr/bin/apt-mark", "hold", *missing)


def ensure_not_held(names: collections.abc.Iterable[str]) -> None:
    """Take these packages off hold."""
    if there := sorted(set(names) & held()):
        run("/usr/bin/apt-mark", "unhold", *there)


def assigned(packages: collections.abc.Mapping[str, str]) -> list[str]:
    """Format versions by package as apt-get's arguments, `name=version`."""
    return [f"{name}={number}" for name, number in sorted(packages.items())]


def _change(*words: str, timeout_s: float = _CHANGE_S) -> None:
    """Run apt-get, and again while another process holds the lock of the lists or of the downloads.

    DPkg::Lock::Timeout covers dpkg's locks only: apt-get fails at once on its own two.
    """
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            run(*_APT_GET, *words, env=_ENV, timeout=timeout_s)
        except CommandError as e:
            if "Could not get lock" not in e.stderr or time.monotonic() > deadline:
                raise
        else:
            return
        time.sleep(_LOCK_POLL_S)


@contextlib.contextmanager
def _preferences(pins: _Pins) -> collections.abc.Generator[tuple[str, ...]]:
    """Yield apt's options that make these pins count instead of /etc/apt/preferences.

    The files in preferences.d still count.
    """
    if not pins:
        yield ()
        return
    with tempfile.NamedTemporaryFile("w", prefix="slurm-ddp-pins-") as file:
        for name, number in pins.items():
            file.write(f"Package: {name}\nPin: version {number}\nPin-Priority: 1001\n\n")
        file.flush()
        yield ("-o", f"Dir::Etc::Preferences={file.name}")

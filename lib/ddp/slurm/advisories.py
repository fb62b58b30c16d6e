"""Which of Slurm's security fixes a version lacks."""

import dataclasses
import pathlib

from ddp.node import slurm_calls
from slurm_ddp import backports

_TABLE = pathlib.Path(__file__).with_name("advisories.toml")
OCI = "CVE-2026-65109"  # in the spool of the containers that `srun --container` starts


@dataclasses.dataclass(frozen=True)
class Advisory:
    """A security release."""

    date: str
    cves: tuple[str, ...]
    fixed: tuple[str, ...]  # the first version of each release that has the fixes
    means: str
    since: str = ""  # the first release that is affected

    def __str__(self) -> str:
        """Name the fixes, as `those of 2026-09-02 (CVE-2026-65107, -65108)`."""
        if not self.cves:
            return f"those of {self.date}"
        first, *others = self.cves
        shown = [first, *(f"-{cve.rpartition('-')[2]}" for cve in others)]
        return f"those of {self.date} ({', '.join(shown)})"


def known() -> tuple[Advisory, ...]:
    """Return the security releases, the oldest first."""
    found: list[Advisory] = []
    for date, about in sorted(backports.read_toml(_TABLE).items()):
        cves, fixed = tuple(about["cves"]), tuple(about["fixed"])
        found.append(Advisory(date, cves, fixed, about["means"], about.get("since", "")))
    return tuple(found)


def missing(version: str) -> tuple[Advisory, ...]:
    """Return the security releases that this version of Slurm lacks; () if it is not a version."""
    return tuple(one for one in known() if slurm_calls.lacks_fix(version, one.fixed, one.since))


def fix_of(cve: str) -> tuple[str, ...]:
    """Return the first fixed versions of a CVE."""
    (found,) = (one.fixed for one in known() if cve in one.cves)
    return found


def upgrade(version: str) -> str:
    """Return the oldest version with all fixes known here, for each release from this one on."""
    fixed: dict[str, str] = {}
    for one in known():
        fixed |= {text.rpartition(".")[0]: text for text in one.fixed}
    release = version.rpartition(".")[0]
    return " or ".join(text for name, text in sorted(fixed.items()) if name >= release)

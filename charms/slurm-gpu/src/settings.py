"""The options for registering a compute node and for when it takes jobs.

The driver's options are in `driver.plan`. Standard library only.
"""

import dataclasses

from gpu import xids

_HEALTH = ("auto", "never")
_MOST_SHARDS = 1024


@dataclasses.dataclass(frozen=True)
class Config:
    """The options of the compute role."""

    health_check: str = "auto"
    health_xids: str = ""
    shards_per_gpu: int = 0
    resume_after_reboot: bool = True
    resume_when_ready: bool = False

    @property
    def problem(self) -> str | None:
        """One line about the first option with an invalid value; None if all are valid."""
        if self.health_check not in _HEALTH:
            return f"health-check: {self.health_check!r:.60} is none of {', '.join(_HEALTH)}"
        if not 0 <= self.shards_per_gpu <= _MOST_SHARDS:
            return f"shards-per-gpu: {self.shards_per_gpu} is not between 0 and {_MOST_SHARDS}"
        try:
            xids.parse(self.health_xids)
        except ValueError as e:
            return f"health-xids: {e}"
        return None

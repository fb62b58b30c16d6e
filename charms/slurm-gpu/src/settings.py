"""The options about what a compute node registers and when it takes jobs, and which of them contradict each other.

The driver's options are in `driver.plan`.
"""

import pydantic

from gpu import xids
from node import resume
from slurm_ddp.charm import naming

_HEALTH = ("auto", "always", "never")
_MOST_SHARDS = 1024


class Config(pydantic.BaseModel, frozen=True):
    """The options of the compute role."""

    health_check: str = "auto"
    health_xids: str = ""
    shards_per_gpu: int = 0
    resume_after_reboot: bool = True
    resume_when_ready: bool = False

    @property
    def policy(self) -> resume.Policy:
        """Which nodes are resumed."""
        return resume.Policy(rebooted=self.resume_after_reboot, new=self.resume_when_ready)

    def check(self) -> None:
        """Raise `ValueError` for an option without a valid value: one line that begins with its name."""
        if self.health_check not in _HEALTH:
            raise ValueError(f"health-check: {self.health_check!r:.60} is none of {', '.join(_HEALTH)}")
        with naming("health-xids"):
            xids.parse(self.health_xids)
        if not 0 <= self.shards_per_gpu <= _MOST_SHARDS:
            raise ValueError(f"shards-per-gpu: {self.shards_per_gpu} is not between 0 and {_MOST_SHARDS}")

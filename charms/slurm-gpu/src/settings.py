"""The options about what a compute node registers and when it takes jobs, and which of them contradict each other.

The driver's options are in `driver.plan`.
"""

import pydantic

from gpu import gres
from node import resume
from scripts import health
from slurm_ddp.charm import naming

_HEALTH = ("auto", "on", "off", "slurm")
SHARES = {"shard": "shards-per-gpu", "mps": "mps-per-gpu"}  # the option of each kind of share
_MOST = {"shard": 1024, "mps": 10_000}


class Config(pydantic.BaseModel, frozen=True):
    """The options of the compute role."""

    gpu_type_alias: str = ""
    health_check: str = "auto"
    health_dcgm: bool = False
    health_xids: str = ""
    shards_per_gpu: int = 0
    mps_per_gpu: int = 0
    resume_after_reboot: bool = True
    resume_when_ready: bool = False

    @property
    def shares(self) -> gres.Shares | None:
        """What each card is shared as."""
        if self.shards_per_gpu:
            return gres.Shares("shard", self.shards_per_gpu)
        return gres.Shares("mps", self.mps_per_gpu) if self.mps_per_gpu else None

    @property
    def policy(self) -> resume.Policy:
        """Which nodes are resumed."""
        return resume.Policy(rebooted=self.resume_after_reboot, new=self.resume_when_ready)

    def check(self) -> dict[str, str]:
        """Return the aliases by the type that they replace.

        Raises:
            ValueError: an option has no valid value, or two contradict each other; one line that begins with its name.
        """
        if self.health_check not in _HEALTH:
            raise ValueError(f"health-check: {self.health_check!r:.60} is none of {', '.join(_HEALTH)}")
        with naming("health-xids"):
            health.parse_xids(self.health_xids)
        for kind, count in (("shard", self.shards_per_gpu), ("mps", self.mps_per_gpu)):
            if not 0 <= count <= _MOST[kind]:
                raise ValueError(f"{SHARES[kind]}: {count} is not between 0 and {_MOST[kind]}")
        if self.shards_per_gpu and self.mps_per_gpu:
            raise ValueError("shards-per-gpu and mps-per-gpu contradict each other: set one of them to 0")
        with naming("gpu-type-alias"):
            return gres.parse_aliases(self.gpu_type_alias)

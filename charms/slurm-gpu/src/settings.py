"""The options that say what a compute node registers and when it takes jobs, and which of them cannot go together."""

import collections.abc
import dataclasses
import typing

from gpu import gres
from node import resume as bring_up
from scripts import health as gpu_health

HEALTH = ("auto", "on", "off", "slurm")
SHARES = {"shard": "shards-per-gpu", "mps": "mps-per-gpu"}  # the option behind each kind of share
_MOST_SHARDS = 1024
_MOST_MPS = 10_000


class SettingsError(Exception):
    """An option cannot be. `str()` is one line that begins with its name and says what to type."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of the compute seat."""

    aliases: str = ""  # gpu-type-alias
    health: str = "auto"  # health-check
    dcgm: bool = False  # health-dcgm
    xids: str = ""  # health-xids
    shards: int = 0  # shards-per-gpu
    mps: int = 0  # mps-per-gpu
    policy: bring_up.Policy = dataclasses.field(
        default_factory=bring_up.Policy
    )  # resume-after-reboot, resume-when-ready

    @classmethod
    def of(cls, config: collections.abc.Mapping[str, typing.Any]) -> "Settings":
        """Return them as configured."""
        return cls(
            aliases=str(config["gpu-type-alias"]),
            health=str(config["health-check"]),
            dcgm=bool(config["health-dcgm"]),
            xids=str(config["health-xids"]),
            shards=int(config["shards-per-gpu"]),
            mps=int(config["mps-per-gpu"]),
            policy=bring_up.Policy(rebooted=bool(config["resume-after-reboot"]), new=bool(config["resume-when-ready"])),
        )

    @property
    def shares(self) -> gres.Shares | None:
        """What each card is shared as."""
        if self.shards:
            return gres.Shares("shard", self.shards)
        return gres.Shares("mps", self.mps) if self.mps else None

    @property
    def is_valid(self) -> bool:
        """Whether `check` has nothing to say."""
        try:
            self.check()
        except SettingsError:
            return False
        return True

    def check(self) -> dict[str, str]:
        """Return the aliases by the type that they replace.

        Raises:
            SettingsError: an option is not what it may be, or two contradict each other.
        """
        if self.health not in HEALTH:
            raise SettingsError(f"health-check: {self.health!r:.60} is none of {', '.join(HEALTH)}")
        try:
            gpu_health.parse_xids(self.xids)
        except ValueError as e:
            raise SettingsError(f"health-xids: {e}") from e
        if not 0 <= self.shards <= _MOST_SHARDS:
            raise SettingsError(f"shards-per-gpu: {self.shards} is not between 0 and {_MOST_SHARDS}")
        if not 0 <= self.mps <= _MOST_MPS:
            raise SettingsError(f"mps-per-gpu: {self.mps} is not between 0 and {_MOST_MPS}")
        if self.shards and self.mps:
            raise SettingsError("shards-per-gpu and mps-per-gpu contradict each other: set one of them to 0")
        try:
            return gres.parse_aliases(self.aliases)
        except gres.GresError as e:
            raise SettingsError(f"gpu-type-alias: {e}") from e

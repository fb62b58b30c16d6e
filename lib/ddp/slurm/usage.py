"""The cluster's usage by accounts and users, from slurmdbd's hourly sums (sreport(1))."""

import dataclasses
import datetime

from ddp.slurm import jobs

GPU, CPU = "gres/gpu", "cpu"
_FIELDS = "Account,Login,TRESName,Used"
_TIME = "%Y-%m-%dT%H:%M:%S"


@dataclasses.dataclass(frozen=True)
class Used:
    """The seconds of one resource that a user's jobs under one account had."""

    account: str
    user: str
    tres: str  # gres/gpu or cpu
    seconds: int


def ask(begin: datetime.datetime, end: datetime.datetime) -> tuple[Used, ...]:
    """Return the usage between two times of UTC. Raises SlurmError."""
    words = (
        *("-n", "-P", "-T", "ALL", "-t", "Seconds", "cluster", "AccountUtilizationByUser"),
        f"Start={begin.strftime(_TIME)}",
        f"End={end.strftime(_TIME)}",
        f"Format={_FIELDS}",
    )
    return parse(jobs.ask("sreport", *words))


def parse(text: str) -> tuple[Used, ...]:
    """Parse what sreport printed; rows without a user are sums over users and accounts below."""
    found: list[Used] = []
    for line in text.splitlines():
        account, *rest = line.split("|")
        if len(rest) != _FIELDS.count(","):
            continue
        user, tres, seconds = rest
        if user and tres in (GPU, CPU) and seconds.isdecimal():
            found.append(Used(account.strip(), user, tres, int(seconds)))
    return tuple(found)

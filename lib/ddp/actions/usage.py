"""usage: the GPU-hours and CPU-hours of accounts or users."""

import collections
import datetime

from ddp.actions import list as listing
from ddp.options import models
from ddp.problem import ParameterError, Problem, Step
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog
from ddp.run.model import UTC
from ddp.settings import Settings
from ddp.slurm import jobs
from ddp.slurm import usage as slurm_usage
from ddp.slurm.usage import CPU, GPU

_ACCOUNTING = "AccountingStorageType"
_TRACKED = "AccountingStorageTRES"
_RELATE = Step("relate-slurmdbd", "set up slurmdbd: https://slurm.schedmd.com/accounting.html")
_COUNT_GPUS = Step("count-gpus", "AccountingStorageTRES=gres/gpu in slurm.conf counts them")


def usage(settings: Settings, params: models.Usage, _: Log) -> Result:
    """Return the hours since a time, a line for each account or user, most GPU-hours first.

    Raises Problem if Slurm keeps no accounting.
    """
    begin = datetime.datetime.fromtimestamp(listing.begin_of(params.since), UTC)
    now = datetime.datetime.now(UTC)
    if begin >= now:
        raise ParameterError("since", f"{params.since} is not in the past")
    with jobs.asking():
        config = jobs.configuration()
    counts_gpus = GPU in config.get(_TRACKED, "").split(",")
    hours = _sum(_ask(config, begin, now), params.by)

    columns = (GPU, CPU) if counts_gpus else (CPU,)
    ranked = sorted(hours, key=lambda name: [-hours[name][tres] for tres in columns])
    rows = [[params.by.upper(), *(_title(tres) for tres in columns)]]
    for name in ranked:
        rows.append([name, *(f"{hours[name][tres]:.1f}" for tres in columns)])
    total: dict[str, float] = {}
    for tres in columns:
        total[tres] = sum(one[tres] for one in hours.values())
    rows.append(["total", *(f"{total[tres]:.1f}" for tres in columns)])

    shown = {"since": begin.isoformat(timespec="minutes"), "usage": catalog.aligned(rows)}
    values: dict[str, object] = {
        "since": begin.isoformat(timespec="seconds"),
        "by": params.by,
        "usage": [{params.by: name} | _as_values(hours[name], columns) for name in ranked],
        "total": _as_values(total, columns),
    }
    if not counts_gpus:
        note = f"Slurm counts no GPUs here; {settings.render(_COUNT_GPUS)}"
        shown["note"] = note
        values["note"] = note
    return Result(shown, values)


def _ask(
    config: dict[str, str], begin: datetime.datetime, end: datetime.datetime
) -> tuple[slurm_usage.Used, ...]:
    """Ask slurmdbd. Raises Problem, also if there is none."""
    if "slurmdbd" not in config.get(_ACCOUNTING, ""):
        raise Problem("this Slurm keeps no accounting, so it knows no usage", remedy=_RELATE)
    try:
        return slurm_usage.ask(begin, end)
    except jobs.SlurmError as e:
        raise Problem(f"Slurm's accounting does not answer: {e}", remedy=_RELATE) from e


def _sum(used: tuple[slurm_usage.Used, ...], by: str) -> dict[str, dict[str, float]]:
    """Return the hours of each resource, by account or user."""
    hours: dict[str, dict[str, float]] = collections.defaultdict(lambda: {GPU: 0.0, CPU: 0.0})
    for one in used:
        name = one.account if by == "account" else one.user
        hours[name][one.tres] += one.seconds / 3600
    return dict(hours)


def _title(tres: str) -> str:
    return "GPU-HOURS" if tres == GPU else "CPU-HOURS"


def _as_values(hours: dict[str, float], columns: tuple[str, ...]) -> dict[str, object]:
    return {_title(tres).lower().replace("-", "_"): round(hours[tres], 4) for tres in columns}

"""stop-waiting: end the waiting of commands for a run, on this host."""

from ddp.host import waits
from ddp.options import models
from ddp.problem import Problem
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog
from ddp.settings import Settings


def stop_waiting(_: Settings, params: models.StopWaiting, __: Log) -> Result:
    """End the waiting of this account's commands and actions for a run; its job goes on.

    Raises Problem.
    """
    ended = waits.stop(params.run)
    if not ended:
        text = f"no command of this account waits for {params.run or 'a run'} on this host"
        raise Problem(text, remedy=catalog.LIST)
    lines: list[str] = []
    for names in ended:
        has_job = len(names) > 1
        lines.append(" ".join(names) if has_job else f"{names[0]}, as soon as its job is submitted")
    return Result({"stopped": "\n".join(lines)}, {"stopped": ended})

"""stop-waiting: end the waiting of commands for a run, on this host."""

from ddp.base import Log, Settings, TrainerError
from ddp.options import models
from ddp.run import catalog
from ddp.view.result import Result
from ddp.workspace import waits


def stop_waiting(_: Settings, params: models.StopWaiting, __: Log) -> Result:
    """Let commands and actions of this account that wait for a run end now; its job goes on. Raises TrainerError."""
    ended = waits.stop(params.run)
    if not ended:
        what = params.run or "a run"
        raise TrainerError(f"no command of this account waits for {what} on this host", remedy=catalog.LIST)
    lines: list[str] = []
    for names in ended:
        has_job = len(names) > 1
        lines.append(" ".join(names) if has_job else f"{names[0]}, as soon as its job is submitted")
    return Result({"stopped": "\n".join(lines)}, {"stopped": ended})

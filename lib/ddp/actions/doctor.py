"""doctor: examine the nodes that are named, or check idle ones."""

from ddp.actions import idle_nodes
from ddp.doctor import examine
from ddp.options import models
from ddp.problem import Results
from ddp.results.progress import Log
from ddp.settings import Settings


def doctor(settings: Settings, params: models.Doctor, log: Log) -> Results:
    """Return the report. Raises Problem, with it, if a run would break."""
    if params.idle:
        return idle_nodes.check(settings, params, log)
    return examine.doctor(settings, params, log)

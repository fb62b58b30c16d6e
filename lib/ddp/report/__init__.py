"""`ddp report`: one page of HTML about runs, and what it is made from."""

from ddp.report.facts import Attempt, Failure, RunFacts, read_run
from ddp.report.page import page

__all__ = ["Attempt", "Failure", "RunFacts", "page", "read_run"]

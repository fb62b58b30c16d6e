"""`ddp watch`: a live view of a run."""

from ddp.watch.frame import Frame, JobView, Memory, gather
from ddp.watch.view import changes, render, watch

__all__ = ["Frame", "JobView", "Memory", "changes", "gather", "render", "watch"]

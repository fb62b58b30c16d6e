"""`ddp watch`: a live view of a run."""

from ddp.watch.frame import Frame, JobView, Memory, gather
from ddp.watch.view import render, watch

__all__ = ["Frame", "JobView", "Memory", "gather", "render", "watch"]

"""Lines of progress that a command logs while it works."""

import collections.abc
import concurrent.futures
import time
import typing

from ddp.results import tables

Log = collections.abc.Callable[[str], None]
REPORT_S = 4.0  # between two lines of progress

T = typing.TypeVar("T")


def ahead(work: collections.abc.Callable[[], T]) -> concurrent.futures.Future[T]:
    """Start work in a thread, and return its future."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def with_progress(log: Log, text: str, work: collections.abc.Callable[[], T]) -> T:
    """Do work in a thread and return its result; log every few seconds that it goes on."""
    log(tables.Step(text, text))
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while True:
            try:
                return future.result(timeout=REPORT_S)
            except concurrent.futures.TimeoutError:
                if future.done():  # the work itself raised it
                    raise
                elapsed_s = time.monotonic() - began
                log(tables.Step(f"{text}: {elapsed_s:.0f} s", text))

"""An accident: rank 1 waits $SLOW_S seconds for the data of each step."""

# pyright: basic, reportPrivateImportUsage=false
import os
import time

from ddptrain import pace, reader

_next = reader.Reader.next


def wait_and_take(self):
    if os.environ["RANK"] == "1":
        time.sleep(float(os.environ["SLOW_S"]))
    return _next(self)


reader.Reader.next = wait_and_take
pace.WINDOW_S = 0.5  # so that a short training has several

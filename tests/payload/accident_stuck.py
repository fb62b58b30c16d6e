"""An accident: rank 1 stands still before step $STUCK_AT; rank 0, waiting for it, gets SIGTERM, then both SIGKILL.

SIGKILL comes when rank 0 has written its outcome, or after a minute.
"""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib
import signal
import time

from ddptrain import distributed, train

distributed.STUCK_S = 1.0
_step = train.Training._step


def await_sleep(pid):
    """Return when a process's main thread has slept for a while: it waits for this rank in its backward pass."""
    asleep = 0
    while asleep < 10:
        state = pathlib.Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
        time.sleep(0.05)


def step(self, *args, **kwargs):
    if self.progress.step + 1 == int(os.environ["STUCK_AT"]):
        peers = self.world.broadcast(self.world.collect(os.getpid()))
        if self.world.rank == 1:
            await_sleep(peers[0])
            os.kill(peers[0], signal.SIGTERM)
            outcome = pathlib.Path(self.run_dir, "control", f"{os.environ['RUN_ATTEMPT_ID']}.outcome")
            deadline = time.monotonic() + 60
            while not outcome.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            for peer in peers:
                os.kill(peer, signal.SIGKILL)
    return _step(self, *args, **kwargs)


train.Training._step = step

"""doctor's second job: one all_reduce between the ranks of the nodes, compared with the cluster's baseline."""

import collections.abc
import contextlib
import dataclasses
import re
import time
import typing

from ddp.base import Log, Settings, TrainerError
from ddp.measure import collectives, forecast
from ddp.options import fields, models
from ddp.run import control
from ddp.slurm import jobs

SIZE_BYTES = 16 << 20  # of the order of DDP's buckets
_JOB_S = 240  # beyond the wait for free nodes: the environment may have to be unpacked first
# What NCCL sends over, such as Socket or IB, as NCCL_DEBUG=INFO prints it
_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_DEBUG = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET"
SOCKETS = "Socket"


@dataclasses.dataclass(frozen=True)
class Sample:
    """The result of the job."""

    outcome: typing.Literal["measured", "failed", "missed"]
    text: str  # the figure, or the reason why there is none
    share: float | None = None  # of the baseline's bandwidth; None without a comparable baseline
    ready_s: float | None = None  # from the begin of the job's script to the first all_reduce
    network: str = ""  # what NCCL sends over, as it prints it; empty with gloo


def take(
    settings: Settings,
    params: models.Doctor,
    log: Log,
    *,
    partition: str,
    hosts: collections.abc.Sequence[str],
    gpus: int,
) -> Sample:
    """Run the job on these nodes, with `gpus` on each; its measurement is not stored."""
    given = {
        "partition": partition, "nodelist": ",".join(hosts), "gpus-per-node": gpus, "account": params.account,
        "qos": params.qos, "reservation": params.reservation, "min-bytes": "16M", "max-bytes": "16M", "env": _DEBUG,
        "time-limit": "10", "store": "never", "wait-timeout": params.wait_timeout + _JOB_S,
    }  # fmt: skip
    asked = fields.parse(
        models.BenchmarkCollectives, {name: value for name, value in given.items() if value is not None}
    )
    began = time.monotonic()
    try:
        submitted, _ = collectives.measure(settings, asked, log)
        took_s = time.monotonic() - began
        measured, (entry, *_) = collectives.read_measurement(settings, submitted)
        printed = "\n".join(collectives.read_printed(settings, submitted))
    except TrainerError as e:
        job = str(e.results.get("job-id", ""))
        if e.results.get("state") not in ("PENDING", "RUNNING", "CONFIGURING"):
            return Sample("failed", str(e))
        with contextlib.suppress(jobs.SlurmError):
            jobs.cancel(job)
        return Sample("missed", f"job {job} did not end in time and was cancelled")
    old = {collectives.shape(stored): stored for stored in collectives.read_baseline(settings)}
    before = old.get(collectives.shape(entry))
    rate = float(entry["points"][0]["busbw"])
    text = f"all_reduce of 16 MiB over {entry['world_size']} ranks: {rate:.3g} GB/s ({entry['backend']}"
    text += f" over {measured['iface']})" if measured["iface"] else ")"
    share = None
    if before is not None and (known := forecast.busbw(SIZE_BYTES, before["points"])):
        share = rate / known
        text += f", {share:.0%} of the baseline of {before['created']}"
    text += f"; the job took {took_s:.0f} s from its submission"
    found = _NETWORK.search(printed)
    network = control.printable(found[1]).strip() if found else ""
    ready_s = measured.get("ready_s")
    return Sample("measured", text, share, ready_s if isinstance(ready_s, int | float) else None, network)

"""A measurement of collectives as the payload leaves it."""

import json
import typing

from cluster import Job
from left_by_jobs import write_result

Json = dict[str, typing.Any]
TABLE = """# nThread 1 nGpus 1 minBytes 1024 maxBytes 4096 step: 4(factor) warmup iters: 2 iters: 10 agg iters: 1 validation: 1 graph: 0
#
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
        1024           256     float     sum      -1     10.0    0.10    0.10       0     10.0    0.10    0.10       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 1.5
#
# Collective test concluded: all_reduce_perf"""


def measured(busbw: float = 1.5, **more: object) -> Json:
    """Make the payload's collectives.json."""
    rows = [
        {
            "size": size,
            "count": size // 4,
            "out_of_place": None,
            "in_place": {"time": size / busbw / 1e3, "alg_bw": busbw, "bus_bw": busbw, "nwrong": 0},
        }
        for size in (1 << 20, 64 << 20)
    ]
    one = {"collective": "all_reduce", "results": rows, "average_bus_bandwidth": {"bandwidth": busbw}}
    return {
        "world_size": 2,
        "nodes": 2,
        "ranks": [{"rank": n, "host": f"slurmd-{n}", "device": "cpu"} for n in (0, 1)],
        "torch": "2.13.0+cpu",
        "backend": "gloo",
        "iface": "eth0",
        "created": "2026-11-20T18:00:00Z",
        "collectives": [one],
        **more,
    }


def leave(job: Job, what: Json) -> None:
    """Leave what a measurement leaves in its run's folder."""
    write_result(job)
    folder = job.script.parent
    (folder / "collectives.json").write_text(json.dumps(what))
    (folder / "summary.json").unlink()
    logs = folder / "logs" / f"{job.job_id}.r0" / "node-0" / "x" / "attempt_0" / "0"
    logs.mkdir(parents=True)
    (logs / "stdout.log").write_text(f"[DDP] world_size=2\n{TABLE}\n[RESULT] collective=all_reduce\n[DONE] ok\n")

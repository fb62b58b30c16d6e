"""all_reduce on two gloo ranks: `ddptrain collectives` against a bare loop of dist.all_reduce, programs in turns."""

# pyright: basic, reportPrivateImportUsage=false
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

from bench import commands, row

SIZES = (1 << 20, 16 << 20, 64 << 20)
ITERS, WARM, TURNS = 20, 5, 5
LIMIT_S = 100


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure both, five turns each."""
    out = scratch / "out.json"
    words = (
        "collectives",
        "-b",
        SIZES[0],
        "-e",
        SIZES[-1],
        "-f",
        4,
        "-n",
        ITERS,
        "-w",
        WARM,
        "-J",
        out,
    )
    ours: dict[int, list[float]] = {size: [] for size in SIZES}
    bare: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(TURNS):
        _finish(commands.argv(2, *words))
        results = json.loads(out.read_text())["collectives"][0]["results"]
        measured = {int(one["size"]): one["in_place"] for one in results}
        for size in SIZES:
            ours[size].append(measured[size]["alg_bw"])
        _finish([*commands.torchrun(2), "-m", __name__, str(out)])
        for size, bandwidth in json.loads(out.read_text()).items():
            bare[int(size)].append(bandwidth)
    return [
        row.Row(
            f"all_reduce {size >> 20} MiB, two gloo ranks",
            row.median(ours[size]),
            row.median(bare[size]),
            "GB/s",
            "a bare loop of dist.all_reduce",
            goal=0.95,
            note=f"{row.spread(ours[size], 'GB/s')}, peer {row.spread(bare[size], 'GB/s')}",
        )
        for size in SIZES
    ]


def _finish(argv: list[str]) -> None:
    process = commands.popen(argv)
    output = process.communicate(timeout=LIMIT_S)[0]
    if process.returncode:
        raise RuntimeError(output[-1000:])


def main(out: pathlib.Path) -> None:
    """Write the bandwidth of each size, as one of two ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[int, float] = {}
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        for _ in range(WARM):
            dist.all_reduce(tensor)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(ITERS):
            dist.all_reduce(tensor)
        found[size] = size * ITERS / (time.perf_counter() - began) / 1e9
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

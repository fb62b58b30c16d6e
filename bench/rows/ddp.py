"""Tokens per second of two gloo ranks over a link: ours against DDP's defaults, in turns.

On two network namespaces with a shaped link where this account may make them, else on loopback.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import parallel

from bench import commands, row
from ddptrain import config, distributed, engine, model, shapes

STEPS, TURNS, BATCH, SEQ_LEN, VOCAB = 2, 6, 8, 256, 320  # the first turn warms up
RATE = "2gbit"  # of the link each way
NODES, ADDRESSES = (
    ("bench-ddp-0", "bench-ddp-1"),
    ("198.18.78.1", "198.18.78.2"),
)  # RFC 2544's, which nobody routes
WIRE = "wire"
LIMIT_S = 280


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure in two ranks."""
    can_have_nodes = (
        os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
    )
    with _nodes() if can_have_nodes else contextlib.nullcontext([[], []]) as prefixes:
        address, interface = (ADDRESSES[0], WIRE) if can_have_nodes else ("127.0.0.1", "lo")
        taken = _measure(scratch / "seconds.json", prefixes, address, interface)
    tokens = STEPS * 2 * BATCH * SEQ_LEN
    ours, defaults = (tokens / row.median(taken[name]) for name in ("ours", "defaults"))
    over = f"a link of {RATE}" if can_have_nodes else "loopback: root could make a link"
    spreads = ", ".join(row.spread(taken[name], "s") for name in ("ours", "defaults"))
    measure, peer = "DDP, 10.7 M parameters, two gloo ranks", "DDP's defaults, AdamW not fused"
    return [row.Row(measure, ours, defaults, "tok/s", peer, goal=1.0, note=f"{over}; {spreads}")]


@contextlib.contextmanager
def _nodes() -> collections.abc.Generator[list[list[str]]]:
    """Make two network namespaces with a link between them, and yield how to run a command in each."""
    ends = [["ip", "netns", "exec", node] for node in NODES]
    try:
        for node in NODES:
            _sh("ip", "netns", "add", node)
        _sh(
            "ip",
            "link",
            "add",
            WIRE,
            "netns",
            NODES[0],
            "type",
            "veth",
            "peer",
            "name",
            WIRE,
            "netns",
            NODES[1],
        )
        for end, address in zip(ends, ADDRESSES, strict=True):
            _sh(*end, "ip", "address", "add", f"{address}/24", "dev", WIRE)
            for device in ("lo", WIRE):
                _sh(*end, "ip", "link", "set", device, "up")
            shape = ("tbf", "rate", RATE, "burst", "1mb", "latency", "50ms")
            _sh(*end, "tc", "qdisc", "add", "dev", WIRE, "root", *shape)
        yield ends
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "del", node], check=False, capture_output=True)


def _sh(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


def _measure(
    out: pathlib.Path, prefixes: list[list[str]], address: str, interface: str
) -> dict[str, list[float]]:
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(commands.free_port())}
    cores = sorted(os.sched_getaffinity(0))
    ranks: list[subprocess.Popen[str]] = []
    for rank, prefix in enumerate(prefixes):
        own = {"RANK": str(rank), "LOCAL_RANK": "0", "BENCH_CORE": str(cores[rank % len(cores)])}
        command = [*prefix, sys.executable, "-m", __name__, str(out)]
        ranks.append(commands.popen(command, GLOO_SOCKET_IFNAME=interface, **meeting, **own))
    try:
        for process in ranks:
            output = process.communicate(timeout=LIMIT_S)[0]
            if process.returncode:
                raise RuntimeError(f"a rank exited {process.returncode}: {output[-500:]}")
    finally:
        for process in ranks:
            process.kill()
    return json.loads(out.read_text())


def _rank(out: pathlib.Path) -> None:
    os.sched_setaffinity(0, {int(os.environ["BENCH_CORE"])})
    torch.set_num_threads(1)
    tokens = torch.randint(VOCAB, (BATCH, SEQ_LEN + 1))
    with distributed.joined("cpu") as world:
        settings = config.complete(config.Config(model="small", precision="fp32"), "cpu", {})
        cores = [model.GPT(shapes.Shape(6, 6, 384, SEQ_LEN, VOCAB)) for _ in range(2)]
        ours = _steps(
            engine.wrap(cores[0], settings, world),
            engine.make_optimizer(cores[0], settings, world.device),
        )
        plain = _steps(
            parallel.DistributedDataParallel(cores[1]), torch.optim.AdamW(cores[1].parameters())
        )
        taken: dict[str, list[float]] = {"ours": [], "defaults": []}
        for turn in range(TURNS):
            for name, steps in (("ours", ours), ("defaults", plain)):
                world.barrier()
                began = time.perf_counter()
                steps(tokens)
                world.barrier()
                if turn:
                    taken[name].append(time.perf_counter() - began)
        if world.rank == 0:
            out.write_text(json.dumps(taken))


def _steps(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> collections.abc.Callable[[torch.Tensor], None]:
    def steps(tokens: torch.Tensor) -> None:
        for _ in range(STEPS):
            module(tokens[:, :-1], tokens[:, 1:]).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return steps


if __name__ == "__main__":
    _rank(pathlib.Path(sys.argv[1]))

"""Tokens per second of two gloo ranks over a link: ours against DDP's defaults, and against the modelled limit.

The limit is the step's computation alone plus its bytes alone over the same link, each measured in the same turns.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import typing

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel

from bench import row
from ddptrain import config, distributed, engine, model, shapes

STEPS, TURNS, BATCH, SEQ_LEN, VOCAB = 2, 6, 8, 256, 320  # the first turn warms up
RATE = "2gbit"  # of the link each way
NODES, ADDRESSES = ("bench-ddp-0", "bench-ddp-1"), ("198.18.78.1", "198.18.78.2")  # RFC 2544's, which nobody routes
WIRE = "wire"
LIMIT_S = 280


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure in two ranks: on two hosts with a shaped link where this account may make them, else on loopback."""
    can_have_nodes = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
    with _nodes() if can_have_nodes else contextlib.nullcontext([[], []]) as prefixes:
        address, name = (ADDRESSES[0], WIRE) if can_have_nodes else ("127.0.0.1", "lo")
        taken = _measure(scratch, prefixes, address, name)
    over = f"a link of {RATE}" if can_have_nodes else "loopback: root could make a link"
    tokens = STEPS * 2 * BATCH * SEQ_LEN
    median = {name: row.median(values) for name, values in taken.items()}
    limit_s = median["computation"] + median["bytes"]
    hidden = (limit_s - median["ours"]) / median["bytes"]
    spread = ", ".join(f"{min(taken[name]):.2f} to {max(taken[name]):.2f} s" for name in ("ours", "defaults"))
    parts = f"computation {median['computation'] / STEPS:.2f} s a step, bytes {median['bytes'] / STEPS:.2f} s"
    return [
        row.Row(
            "DDP, 10.7 M parameters, two gloo ranks", tokens / median["ours"], tokens / median["defaults"], "tok/s",
            "DDP's defaults, AdamW not fused", goal=1.0, note=f"{over}; {spread}",
        ),
        row.Row(
            "DDP, 10.7 M parameters, two gloo ranks", tokens / median["ours"], tokens / limit_s, "tok/s",
            "computation and bytes one after the other (a limit)", goal=0.95,
            note=f"{over}; {parts}; {100 * hidden:.0f} % of the bytes' time lies under the computation",
        ),
    ]  # fmt: skip


@contextlib.contextmanager
def _nodes() -> collections.abc.Generator[list[list[str]]]:
    """Make two network namespaces with a link between them, and yield how to run a command in each."""
    ends = [["ip", "netns", "exec", node] for node in NODES]
    try:
        for node in NODES:
            _sh("ip", "netns", "add", node)
        _sh("ip", "link", "add", WIRE, "netns", NODES[0], "type", "veth", "peer", "name", WIRE, "netns", NODES[1])
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


def _measure(scratch: pathlib.Path, prefixes: list[list[str]], address: str, interface: str) -> dict[str, list[float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface,
    }  # fmt: skip
    out = scratch / "seconds.json"
    cores = sorted(os.sched_getaffinity(0))
    ranks = [
        subprocess.Popen(
            [*prefix, sys.executable, "-m", "bench.rows.ddp", str(out)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": "0", "BENCH_CORE": str(cores[rank % len(cores)])},
            stderr=subprocess.PIPE, text=True,
        )
        for rank, prefix in enumerate(prefixes)
    ]  # fmt: skip
    for process in ranks:
        _, errors = process.communicate(timeout=LIMIT_S)
        if process.returncode:
            for other in ranks:
                other.kill()
            raise RuntimeError(f"a rank exited {process.returncode}: {errors.strip().splitlines()[-1:]}")
    return typing.cast(dict[str, list[float]], json.loads(out.read_text()))


def _rank(out: pathlib.Path) -> None:
    os.sched_setaffinity(0, {int(os.environ["BENCH_CORE"])})
    torch.set_num_threads(1)
    tokens = torch.randint(VOCAB, (BATCH, SEQ_LEN + 1))
    with distributed.joined("cpu") as world:
        settings = config.complete(config.Config(model="small", precision="fp32"), "cpu", {})
        shape = shapes.Shape(6, 6, 384, SEQ_LEN, VOCAB)
        cores = [model.GPT(shape) for _ in range(3)]
        gradients = torch.zeros(sum(p.numel() for p in cores[0].parameters()))
        ours = _steps(engine.wrap(cores[0], settings, world), engine.make_optimizer(cores[0], settings, world.device))
        plain = _steps(parallel.DistributedDataParallel(cores[1]), torch.optim.AdamW(cores[1].parameters()))
        alone = _steps(cores[2], engine.make_optimizer(cores[2], settings, world.device))
        actions = {
            "ours": lambda: ours(tokens), "defaults": lambda: plain(tokens), "computation": lambda: alone(tokens),
            "bytes": lambda: [dist.all_reduce(gradients) for _ in range(STEPS)],
        }  # fmt: skip
        taken: dict[str, list[float]] = {name: [] for name in actions}
        for turn in range(TURNS):
            for name, action in actions.items():
                world.barrier()
                began = time.perf_counter()
                action()
                world.barrier()
                if turn:
                    taken[name].append(time.perf_counter() - began)
        if world.rank == 0:
            out.write_text(json.dumps(taken))


def _steps(module: nn.Module, optimizer: torch.optim.Optimizer) -> collections.abc.Callable[[torch.Tensor], None]:
    def steps(tokens: torch.Tensor) -> None:
        for _ in range(STEPS):
            module(tokens[:, :-1], tokens[:, 1:]).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return steps


if __name__ == "__main__":
    _rank(pathlib.Path(sys.argv[1]))

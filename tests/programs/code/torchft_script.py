"""torchft's local SGD, one replica a node: `torchft_script.py STEPS [--resume FILE]`.

The first node runs the lighthouse at MASTER_ADDR:MASTER_PORT. Each node has its own manager and
store, and averages its weights with the others' every few steps.
"""

import os
import pathlib
import socket
import sys
import time

import torch
import torchft
from torch.distributed import TCPStore
from torchft import coordination, local_sgd

EVERY = 5
FOLDER = pathlib.Path("out-torchft")


def main() -> None:
    """Train a small network; save every 20 steps."""
    steps = int(sys.argv[1])
    rank, world = int(os.environ["NODE_RANK"]), int(os.environ["NNODES"])
    head, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    lighthouse = None
    if rank == 0:
        lighthouse = coordination.LighthouseServer(f"[::]:{port}", min_replicas=world)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if "--resume" in sys.argv:
        saved = pathlib.Path(sys.argv[sys.argv.index("--resume") + 1])
        held = torch.load(saved)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        first = int(saved.stem.removeprefix("step-"))
        print(f"resumed at step {first}", flush=True)

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    own = own_address(head, port)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=world,
        use_async_quorum=False,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{head}:{port}",
        replica_id=f"replica_{rank}",
        hostname=own,
    )
    torch.manual_seed(rank)
    with local_sgd.LocalSGD(manager, model, optimizer, sync_every=EVERY):
        for step in range(first + 1, steps + 1):
            inputs = torch.randn(8, 16)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.2)
            if rank == 0:
                print(f"local step {step} loss {loss.item():.4f}", flush=True)
            if step == first + EVERY:
                print("replicas", manager.num_participants(), flush=True)
            if rank == 0 and step % 20 == 0:
                save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step)
    manager.shutdown()
    if lighthouse is not None:
        lighthouse.shutdown()


def own_address(head: str, port: int) -> str:
    """Return this node's address as it reaches the first node."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((head, port))
        return probe.getsockname()[0]


def save(held: dict[str, object], step: int) -> None:
    """Save a checkpoint, which appears whole."""
    FOLDER.mkdir(exist_ok=True)
    torch.save(held, FOLDER / "draft.pt")
    (FOLDER / "draft.pt").replace(FOLDER / f"step-{step:06}.pt")


if __name__ == "__main__":
    main()

"""torch's own FSDP2 (fully_shard) with distributed checkpoints: `fsdp2.py STEPS [--resume FOLDER]`."""

import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train a sharded network; save every 20 steps."""
    steps = int(sys.argv[1])
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    kind = "cuda" if has_gpu else "cpu"
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = dist.device_mesh.init_device_mesh(kind, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model.to(kind)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    print("sharded:", type(next(model.parameters()).data).__name__, flush=True)

    first = 0
    if "--resume" in sys.argv:
        folder = sys.argv[sys.argv.index("--resume") + 1]
        weights, moments = states.get_state_dict(model, optimizer)
        held = {"model": weights, "optimizer": moments}
        dcp.load(held, checkpoint_id=folder)
        states.set_state_dict(
            model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
        )
        first = int(folder.rstrip("/").rsplit("-", 1)[1])
        print(f"resumed at step {first}", flush=True)
    for step in range(first + 1, steps + 1):
        inputs = torch.randn(8, 16, device=kind)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.2)
        if dist.get_rank() == 0:
            print(f"step: {step} loss: {loss.item():.4f}", flush=True)
        if step % 20 == 0:
            weights, moments = states.get_state_dict(model, optimizer)
            held = {"model": weights, "optimizer": moments}
            dcp.save(held, checkpoint_id=f"out-fsdp2/draft-{step:06}")
            dist.barrier()
            if dist.get_rank() == 0:
                pathlib.Path(f"out-fsdp2/draft-{step:06}").rename(f"out-fsdp2/step-{step:06}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

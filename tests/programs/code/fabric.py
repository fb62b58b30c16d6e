"""Lightning Fabric over two nodes: `fabric.py STEPS [--resume FILE]`."""

import sys
import time

import lightning
import torch


def main() -> None:
    """Train a small network; save every 20 steps."""
    steps = int(sys.argv[1])
    fabric = lightning.Fabric(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        num_nodes=2,
        strategy="ddp",
    )
    fabric.launch()
    print("world", fabric.world_size, flush=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if "--resume" in sys.argv:
        fabric.load(sys.argv[sys.argv.index("--resume") + 1], state)
        print(f"resumed at step {state['step']}", flush=True)
    for step in range(state["step"] + 1, steps + 1):
        inputs = torch.randn(8, 16, device=fabric.device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.2)
        if fabric.is_global_zero:
            print(f"step: {step} loss: {loss.item():.4f}", flush=True)
        if step % 20 == 0:
            state["step"] = step
            fabric.save(f"out-fabric/step-{step:06}.ckpt", state)


if __name__ == "__main__":
    main()

"""An Accelerate script with save_state and load_state: `accelerate_script.py STEPS [--resume latest]`."""

import pathlib
import sys
import time

import accelerate
import torch


def main() -> None:
    """Train a small network; save every 20 steps."""
    steps = int(sys.argv[1])
    accelerator = accelerate.Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    print(f"{accelerator.distributed_type} {accelerator.mixed_precision}", flush=True)

    first = 0
    saved = sorted(pathlib.Path("out-accelerate").glob("step-*"))
    if "--resume" in sys.argv and saved:
        accelerator.load_state(str(saved[-1]))
        first = int(saved[-1].name.removeprefix("step-"))
        print(f"resumed at step {first}", flush=True)
    for step in range(first + 1, steps + 1):
        inputs = torch.randn(8, 16, device=accelerator.device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.2)
        if accelerator.is_main_process:
            print(f"step: {step} loss: {loss.item():.4f}", flush=True)
        if step % 20 == 0:
            accelerator.save_state(f"out-accelerate/step-{step:06}")


if __name__ == "__main__":
    main()

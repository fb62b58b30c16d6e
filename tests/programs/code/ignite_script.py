"""PyTorch-Ignite over two nodes: `ignite_script.py STEPS [--resume FILE]`."""

import sys
import time

import ignite.distributed as idist
import torch
from ignite import engine, handlers
from ignite.engine import Events

FOLDER = "out-ignite"


def main() -> None:
    """Train in ignite's own context of processes."""
    with idist.Parallel(backend="nccl" if torch.cuda.is_available() else "gloo") as parallel:
        parallel.run(train)


def train(_: int) -> None:
    """Train a small network; save every 20 steps."""
    steps = int(sys.argv[1])
    print("world", idist.get_world_size(), flush=True)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)]
    model = idist.auto_model(torch.nn.Sequential(*layers))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(_: engine.Engine, inputs: torch.Tensor) -> float:
        inputs = inputs.to(idist.device())
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.2)
        return loss.item()

    trainer = engine.Engine(step)
    held = {"trainer": trainer, "model": model, "optimizer": optimizer}
    saver = handlers.Checkpoint(
        held,
        handlers.DiskSaver(FOLDER, create_dir=True, require_empty=False),
        n_saved=None,
        global_step_transform=lambda *_: trainer.state.iteration,
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=20), saver)

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(running: engine.Engine) -> None:
        if idist.get_rank() == 0:
            print(f"step: {running.state.iteration} loss: {running.state.output:.4f}", flush=True)

    if "--resume" in sys.argv:
        saved = torch.load(sys.argv[sys.argv.index("--resume") + 1])
        handlers.Checkpoint.load_objects(held, saved)
        print(f"resumed at step {trainer.state.iteration}", flush=True)
    data = idist.auto_dataloader(torch.randn(16 * steps, 16), batch_size=16)
    trainer.run(data, max_epochs=1)


if __name__ == "__main__":
    main()

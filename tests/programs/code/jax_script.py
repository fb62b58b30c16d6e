"""JAX, one process a node with all of the node's devices: `jax_script.py STEPS [--resume FILE]`."""

import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils


def main() -> None:
    """Fit a line by gradients that are averaged over the processes; save every 20 steps."""
    steps = int(sys.argv[1])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT'])}",
        int(os.environ["WORLD_SIZE"]),
        int(os.environ["RANK"]),
    )
    print("processes", jax.process_count(), flush=True)
    weights, first = np.zeros(16), 0
    if "--resume" in sys.argv:
        saved = pathlib.Path(sys.argv[sys.argv.index("--resume") + 1])
        weights, first = np.load(saved), int(saved.stem.removeprefix("step-"))
        print(f"resumed at step {first}", flush=True)
    slope = jax.jit(jax.value_and_grad(lambda w, x: jnp.mean((x @ w - x.sum(1)) ** 2)))
    random = np.random.default_rng(jax.process_index())
    for step in range(first + 1, steps + 1):
        loss, gradient = slope(jnp.asarray(weights), jnp.asarray(random.normal(size=(8, 16))))
        mean = multihost_utils.process_allgather(gradient).mean(0)
        weights = weights - 0.01 * np.asarray(mean)
        time.sleep(0.2)
        if jax.process_index() == 0:
            print(f"step: {step} loss: {float(loss):.4f}", flush=True)
            if step % 20 == 0:
                folder = pathlib.Path("out-jax")
                folder.mkdir(exist_ok=True)
                np.save(folder / "draft.npy", weights)
                (folder / "draft.npy").replace(folder / f"step-{step:06}.npy")


if __name__ == "__main__":
    main()

"""What surrounds the model in training: seeds, the optimiser, DDP and compilation, one state for all ranks."""

# pyright: basic, reportPrivateImportUsage=false
import inspect
import random
import typing

import numpy as np
import torch
from torch import nn
from torch.nn import parallel

from ddptrain.ground import log
from ddptrain.options import config
from ddptrain.world import distributed, hardware


def seed_all(*parts: int) -> None:
    """Seed every random number generator of this process by some numbers: a seed, and the rank, the step."""
    mixed = int(np.random.SeedSequence(parts).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.default_generator.manual_seed(
        mixed
    )  # torch.manual_seed takes 0.15 ms to look for other kinds of devices
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)


def make_optimizer(
    module: nn.Module, settings: config.Config, device: torch.device
) -> torch.optim.AdamW:
    """Return AdamW, fused, decaying matrices and embeddings but neither biases nor norms."""
    learned = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learned if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in learned if p.dim() < 2], "weight_decay": 0.0},
    ]
    assert settings.lr is not None
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=(0.9, settings.beta2), fused=device.type in ("cpu", "cuda")
    )


def wrap(module: nn.Module, settings: config.Config, world: distributed.World) -> nn.Module:
    """Return the module as it is called in training: DDP over several ranks, then compiled on a GPU.

    Compiling what DDP wraps, not wrapping what was compiled, keeps gradients moving while the backward pass runs.
    """
    wrapped = module
    if world.size > 1:
        ids = [world.device.index] if world.device.type == "cuda" else None
        known = inspect.signature(parallel.DistributedDataParallel).parameters
        buffers = (
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        )  # since torch 2.13
        more = {
            "bucket_cap_mb": settings.bucket_mb,
            "gradient_as_bucket_view": True,
            buffers: False,
        }
        wrapped = parallel.DistributedDataParallel(module, device_ids=ids, **more)
    if settings.compile:
        if not (reason := hardware.can_compile()):
            return typing.cast(nn.Module, torch.compile(wrapped))
        log.warn("MODEL", f"not compiled: {reason}")
    return wrapped


def fill_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimiser its state tensors without changing a weight: a step of size 0 on gradients of 0."""
    rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, (lr, decay) in zip(optimizer.param_groups, rates, strict=True):
        group["lr"], group["weight_decay"] = lr, decay

"""The model's surroundings in training: modes, seeds, optimiser, DDP, compilation and profiler."""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import inspect
import os
import pathlib
import random
import typing

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import parallel

from ddptrain.ground import log
from ddptrain.options import config
from ddptrain.world import distributed, hardware, sites


def set_modes(settings: config.Config) -> None:
    """Seed the weights, the same on every rank, and set deterministic operations if requested."""
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    seed_all(settings.seed)


def seed_all(*parts: int) -> None:
    """Seed every random generator of this process by numbers such as the seed, rank and step."""
    mixed = int(np.random.SeedSequence(parts).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    # torch.manual_seed takes 0.15 ms to look for other kinds of devices
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)


def make_optimizer(
    module: nn.Module, settings: config.Config, device: torch.device
) -> torch.optim.AdamW:
    """Return AdamW, fused, decaying matrices and embeddings but neither biases nor norms."""
    learned = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in learned if p.dim() >= 2]
    others = [p for p in learned if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(0.9, settings.beta2),
        fused=device.type in ("cpu", "cuda"),
    )


def wrap(
    module: nn.Module,
    settings: config.Config,
    world: distributed.World,
    within: sites.Sites | None = None,
) -> nn.Module:
    """Return the module to call in training: DDP over the ranks, or a site's, compiled on a GPU.

    The DDP module is compiled, not the reverse: so gradients move while the backward pass runs.
    """
    size = within.size if within else world.size
    wrapped = module
    if size > 1:
        wrapped = _distributed(module, settings, world, within.group if within else None)
    if not settings.compile:
        return wrapped
    reason = hardware.can_compile()
    if reason:
        log.warn("MODEL", f"not compiled: {reason}")
        return wrapped
    return typing.cast(nn.Module, torch.compile(wrapped))


def _distributed(
    module: nn.Module, settings: config.Config, world: distributed.World, group: typing.Any
) -> nn.Module:
    known = inspect.signature(parallel.DistributedDataParallel).parameters
    more: dict[str, typing.Any] = {"broadcast_buffers": False}
    if "forward_sync_buffers" in known:  # its name since torch 2.13
        more = {"forward_sync_buffers": False}
    wrapped = parallel.DistributedDataParallel(
        module,
        process_group=group,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=settings.bucket_mb,
        gradient_as_bucket_view=True,
        **more,
    )
    if settings.gradients == "bf16":
        hook = default_hooks.bf16_compress_hook if world.backend == "nccl" else reduce_bf16
        wrapped.register_comm_hook(group, hook)
    return wrapped


def reduce_bf16(group: typing.Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Take the mean of a bucket of gradients in bf16, like torch's own hook, which needs NCCL."""
    buffer = bucket.buffer()
    wire = buffer.bfloat16().div_(dist.get_world_size(group))
    work = dist.all_reduce(wire, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: buffer.copy_(wire))


def fill_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimiser's state by a step of size 0 on gradients of 0; no weight changes."""
    rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, (lr, decay) in zip(optimizer.param_groups, rates, strict=True):
        group["lr"], group["weight_decay"] = lr, decay


class _Nothing:
    """Records no step."""

    def step(self) -> None:
        """Do nothing."""


def recording(settings: config.Config, rank: int, begin: int, path: pathlib.Path) -> typing.Any:
    """Return a context manager whose value records the chosen steps; call `step` after each.

    `begin` is the first step of this training: one that is resumed behind the first chosen step
    records the rest.
    """
    first, last = config.profiled_steps(settings.profile_steps)
    first = max(first, begin)
    is_chosen = rank in config.profiled_ranks(settings.profile_ranks)
    if not settings.profile or not is_chosen or first > last:
        return contextlib.nullcontext(_Nothing())

    def write(trace: torch.profiler.profile) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
            log.every_rank("PROFILE", steps=f"{first}-{last}", trace=path)
        except (OSError, RuntimeError) as e:  # a training never ends for its profile
            log.warn("PROFILE", f"{path} could not be written: {e}")

    before = first - begin
    warmup = min(before, 1)
    plan = torch.profiler.schedule(
        wait=before - warmup, warmup=warmup, active=last - first + 1, repeat=1
    )
    return torch.profiler.profile(schedule=plan, on_trace_ready=write)

"""The payload's arithmetic: whether the steps after a checkpoint have the same bits as before.

Two releases of one VERSION compute the same bits from the same state, settings and data, on the
same number of ranks, with the same torch on the same kind of device. tests/payload/test_earlier.py
continues runs of earlier releases.
"""

# pyright: basic, reportPrivateImportUsage=false
import torch

from ddptrain.checkpoint import stored
from ddptrain.options import config
from ddptrain.world import distributed

VERSION = 2
# Version 1, until 28 November 2026: dropout came from a generator whose state was saved, and on
# CPUs large logits were made some rows at a time
_GENERATOR = "rng.pt"
_LARGE_BYTES = 16 << 20


def device_name(world: distributed.World) -> str:
    """Return the kind of rank 0's device: the card's name, or its processor's instruction set."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def differences(
    found: stored.Checkpoint,
    settings: config.Config,
    micro_batch: int,
    world: distributed.World,
) -> list[str]:
    """List the reasons why this attempt computes other bits than the checkpoint's attempt."""
    reasons: list[str] = []
    now = {"torch": torch.__version__, "device": device_name(world)}
    for name, here in now.items():
        there = found.meta.get(name, here)
        if there != here:
            reasons.append(f"{name} {there} there, {here} here")

    if world.device.type == "cuda" and not settings.deterministic:
        reasons.append("sums on GPUs without --deterministic")

    version = _version(found)
    if version == 1 and _is_as_version_1(found, settings, micro_batch, world):
        version = VERSION
    if version != VERSION:
        reasons.append(f"saved by a release of other arithmetic ({version} there, {VERSION} here)")
    return reasons


def _version(found: stored.Checkpoint) -> int:
    """Return the version of the release that saved a checkpoint."""
    noted = found.meta.get("arithmetic")
    if noted:
        return noted
    return 1 if _has_generator(found) else VERSION


def _has_generator(found: stored.Checkpoint) -> bool:
    return (found.path / _GENERATOR).exists() or any(found.path.glob(f"rank-*/{_GENERATOR}"))


def _is_as_version_1(
    found: stored.Checkpoint,
    settings: config.Config,
    micro_batch: int,
    world: distributed.World,
) -> bool:
    if settings.dropout or world.device.type != "cpu" or found.meta["model"]["kind"] != "gpt":
        return False
    model = found.meta["model"]
    return 4 * micro_batch * model["seq_len"] * model["vocab"] < _LARGE_BYTES

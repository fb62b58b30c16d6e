"""The loss of a language model: cross-entropy in nats. B sequences, T tokens, V vocabulary, N = B T."""

# pyright: basic, reportPrivateImportUsage=false
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

IGNORED = -100  # a target that counts for nothing


def token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats over the targets that are not ignored, shape (); 0 where all are."""
    logits_NV, targets_N = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
    total = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")
    return total / (targets_N != IGNORED).sum().clamp(min=1)

"""The loss of a language model: cross-entropy in nats, and the form of it that spares a CPU's memory.

N tokens (B sequences of T), R of them at a time, C model width, V vocabulary.
"""

# pyright: basic, reportPrivateImportUsage=false
import typing

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

IGNORED = -100  # a target that counts for nothing
_ROWS = 128  # tokens whose logits are held in fp32 at a time: 26 MB at GPT-2's vocabulary
_WORTH_BYTES = 16 << 20  # below so much of fp32 logits the plain form is as quick


def token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats over the targets that are not ignored, shape (); 0 where all are."""
    logits_NV, targets_N = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
    total = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")
    return total / (targets_N != IGNORED).sum().clamp(min=1)


def projected_loss(x_BTC: Tensor, weight_VC: Tensor, targets_BT: Tensor) -> Tensor:
    """Return `token_loss` of the logits x_BTC @ weight_VC.T, shape ().

    With a vocabulary of 50 304 the logits of 2048 tokens are 412 MB in fp32, and the plain form walks through several
    such tensors, each fresh from the kernel. On a CPU they are therefore made a few rows at a time, and what is kept
    is their gradient, in the precision of the matrix product: less than half the time of a step. A GPU has the room.
    """
    fp32_bytes = 4 * targets_BT.numel() * weight_VC.shape[0]
    if x_BTC.device.type != "cpu" or fp32_bytes < _WORTH_BYTES:
        return token_loss(F.linear(x_BTC, weight_VC), targets_BT)
    args = (x_BTC.flatten(0, 1), weight_VC, targets_BT.flatten(), torch.is_grad_enabled())
    return typing.cast(Tensor, _ProjectedLoss.apply(*args))


class _ProjectedLoss(torch.autograd.Function):
    """The loss and, while its logits are at hand, its gradient by them."""

    @staticmethod
    def forward(ctx: typing.Any, x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, learns: bool) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_NC.dtype
        low_NC, low_VC = x_NC.to(dtype), weight_VC.to(dtype)
        counts_N = targets_N != IGNORED
        share = 1.0 / counts_N.sum().clamp(min=1)  # of a token in the mean
        grad_NV = torch.empty(len(targets_N), len(weight_VC), dtype=dtype) if learns else None
        total = torch.zeros(())
        for first in range(0, len(targets_N), _ROWS):
            span = slice(first, first + _ROWS)
            target_R1 = targets_N[span].clamp(min=0).unsqueeze(1)
            logits_RV = (low_NC[span] @ low_VC.t()).float()
            top_R1 = logits_RV.amax(dim=1, keepdim=True)
            picked_R1 = logits_RV.gather(1, target_R1) - top_R1
            odds_RV = logits_RV.sub_(top_R1).exp_()
            sum_R1 = odds_RV.sum(dim=1, keepdim=True)
            weight_R1 = (counts_N[span] * share).unsqueeze(1)
            total += torch.where(counts_N[span], (sum_R1.log() - picked_R1).squeeze(1), 0.0).sum()
            if grad_NV is not None:
                grad_NV[span] = odds_RV.mul_(weight_R1 / sum_R1).scatter_add_(1, target_R1, -weight_R1)
        ctx.save_for_backward(grad_NV, low_NC, low_VC)
        ctx.dtypes = x_NC.dtype, weight_VC.dtype
        return total * share

    @staticmethod
    def backward(ctx: typing.Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_NV, low_NC, low_VC = ctx.saved_tensors
        scale = grads[0].to(low_NC.dtype)
        x_dtype, weight_dtype = ctx.dtypes
        grad_NC, grad_VC = (grad_NV @ low_VC) * scale, grad_NV.t() @ (low_NC * scale)
        return grad_NC.to(x_dtype), grad_VC.to(weight_dtype), None, None

"""The model's short cuts: what they compute is what the plain form computes."""

# pyright: basic, reportPrivateImportUsage=false

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ddptrain import crossentropy, model

B, T, C, V = 4, 300, 16, 5000


def loss_and_gradients(form, *, bf16: bool, targets_BT: Tensor) -> tuple[float, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x_BTC = torch.randn(B, T, C, generator=generator, requires_grad=True)
    weight_VC = torch.randn(V, C, generator=generator).mul_(0.3).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = form(x_BTC, weight_VC, targets_BT)
    (loss / 3).backward()
    assert x_BTC.grad is not None
    assert weight_VC.grad is not None
    return loss.item(), x_BTC.grad, weight_VC.grad


def plain(x_BTC: Tensor, weight_VC: Tensor, targets_BT: Tensor) -> Tensor:
    return crossentropy.token_loss(F.linear(x_BTC, weight_VC), targets_BT)


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-5), (True, 1e-2)])
def test_the_loss_in_pieces_is_the_loss_and_so_are_its_gradients(
    bf16: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
):
    targets_BT = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(4))
    targets_BT[:, ::7] = crossentropy.IGNORED
    targets_BT[1] = crossentropy.IGNORED
    wanted = loss_and_gradients(plain, bf16=bf16, targets_BT=targets_BT)
    monkeypatch.setattr(crossentropy, "token_loss", None)  # it must be the other form that answers
    found = loss_and_gradients(crossentropy.projected_loss, bf16=bf16, targets_BT=targets_BT)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for got, want in zip(found[1:], wanted[1:], strict=True):
        assert want.abs().max() > 0
        assert (got - want).abs().max() <= tolerance * want.abs().max()


def test_few_logits_and_a_batch_with_nothing_to_learn_are_right_too():
    few = torch.randn(2, 8, C), torch.randn(V, C), torch.randint(V, (2, 8))
    assert torch.equal(crossentropy.projected_loss(*few), plain(*few))
    nothing_BT = torch.full((B, T), crossentropy.IGNORED)
    for loss in (plain, crossentropy.projected_loss):
        value, *gradients = loss_and_gradients(loss, bf16=False, targets_BT=nothing_BT)
        assert value == 0
        assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("seq_len", [1, 7, 64])
def test_attention_from_all_scores_at_once_is_torchs(seq_len: int):
    generator = torch.Generator().manual_seed(1)
    joint = torch.randn(3, 2, 4, seq_len, 8, generator=generator, dtype=torch.float64)
    grads = []
    for attend in (
        lambda q, k, v: model._whole_attention(q, k, v, 0.0),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ):
        parts = joint.clone().requires_grad_()
        out_BHTD = attend(*parts)
        (out_BHTD * torch.arange(1, seq_len + 1).view(-1, 1)).sum().backward()
        grads.append((out_BHTD, parts.grad))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)

"""The model's shortcuts compute the same as the plain form."""

# pyright: basic, reportPrivateImportUsage=false

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from ddptrain import model
from ddptrain.data import batches


def test_a_batch_with_nothing_to_learn_has_no_loss_and_no_gradient():
    logits_BTV = torch.randn(2, 3, 5, requires_grad=True)
    loss = model.token_loss(logits_BTV, torch.full((2, 3), batches.IGNORED))
    loss.backward()
    assert loss == 0
    assert logits_BTV.grad is not None
    assert not logits_BTV.grad.any()


@pytest.mark.parametrize("seq_len", [1, 7, 64])
def test_attention_from_all_scores_at_once_is_torchs(seq_len: int):
    generator = torch.Generator().manual_seed(1)
    joint = torch.randn(3, 2, 4, seq_len, 8, generator=generator, dtype=torch.float64)
    grads = []
    for attend in (
        lambda q, k, v: model.whole_attention(q, k, v, 0.0),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ):
        parts = joint.clone().requires_grad_()
        out_BHTD = attend(*parts)
        (out_BHTD * torch.arange(1, seq_len + 1).view(-1, 1)).sum().backward()
        grads.append((out_BHTD, parts.grad))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)

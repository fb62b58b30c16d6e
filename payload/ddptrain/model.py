"""A GPT: decoder-only transformer with learned positions, pre-norm blocks and tied embeddings.

Shapes are part of the names: B sequences, T tokens, C model width, E = 3 C, H heads, D width of a
head, V vocabulary, N = B T.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import dataclasses
import math
import typing

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ddptrain import shapes
from ddptrain.data import batches

# torch's blockwise attention on a CPU costs more than its products on short sequences: in bf16 some
# 18 ms a backward pass for any size (torch 2.13, AMX), in fp32 through oneDNN 7 ms for 64
# tokens of 48 heads. Below so many tokens all scores are computed at once, in fp32.
_WHOLE_BELOW = 512


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model before it is built."""

    identity: dict[str, typing.Any]  # JSON; two models with the same one can share a checkpoint
    parameters: int
    build: collections.abc.Callable[[], nn.Module]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: shapes.Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Attend from each position to those before it, shape (B, T, C)."""
        B, T, C = x_BTC.shape
        joint_BTE = self.qkv(x_BTC)
        is_whole = x_BTC.device.type == "cpu" and T < _WHOLE_BELOW
        if is_whole:
            joint_BTE = joint_BTE.float()
        parts = joint_BTE.split(C, dim=2)
        q_BHTD, k_BHTD, v_BHTD = (
            part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in parts
        )

        dropout = self.dropout if self.training else 0.0
        if is_whole:
            with torch.autocast("cpu", enabled=False):
                y_BHTD = whole_attention(q_BHTD, k_BHTD, v_BHTD, dropout)
        else:
            y_BHTD = F.scaled_dot_product_attention(
                q_BHTD, k_BHTD, v_BHTD, dropout_p=dropout, is_causal=True
            )
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))


def whole_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, dropout: float) -> Tensor:
    """Return causal attention, shape (B, H, T, D), from the scores of all pairs at once."""
    B, H, T, D = q_BHTD.shape
    q_NTD, k_NTD, v_NTD = (part.reshape(B * H, T, D) for part in (q_BHTD, k_BHTD, v_BHTD))
    later_TT = q_NTD.new_full((T, T), -math.inf).triu(1)
    scores_NTT = torch.baddbmm(later_TT, q_NTD, k_NTD.transpose(1, 2), alpha=1 / math.sqrt(D))
    weights_NTT = F.dropout(scores_NTT.softmax(-1), dropout)
    return torch.bmm(weights_NTT, v_NTD).view(B, H, T, D)


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on a normalised copy and added back."""

    def __init__(self, shape: shapes.Shape) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.width, bias=False)
        self.attention = Attention(shape)
        self.norm_2 = nn.LayerNorm(shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return the block's output, shape (B, T, C)."""
        x_BTC = x_BTC + self.dropout(self.attention(self.norm_1(x_BTC)))
        # The exact form: on CPUs far quicker than the tanh one
        hidden = F.gelu(self.up(self.norm_2(x_BTC)))
        return x_BTC + self.dropout(self.down(hidden))


class GPT(nn.Module):
    """The language model. Called with targets it returns the loss, otherwise the logits."""

    def __init__(self, shape: shapes.Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocab, shape.width)
        self.position = nn.Embedding(shape.seq_len, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.head.weight = self.token.weight
        self.apply(_init)
        # The sum over 2L residual branches keeps its size (Radford et al. 2019, section 2.3).
        for block in typing.cast(list[Block], self.blocks):
            for linear in (block.attention.out, block.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy in nats, shape (), or without targets logits, (B, T, V).

        Targets of -100 do not count.
        """
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.dropout(self.token(tokens_BT) + self.position(positions_T))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.head(self.norm(x_BTC))
        if targets_BT is None:
            return logits_BTV
        return token_loss(logits_BTV, targets_BT)


def token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats over targets that are not ignored, shape (), or 0."""
    logits_NV = logits_BTV.flatten(0, 1).float()
    targets_N = targets_BT.flatten()
    total = F.cross_entropy(logits_NV, targets_N, ignore_index=batches.IGNORED, reduction="sum")
    return total / (targets_N != batches.IGNORED).sum().clamp(min=1)


def num_parameters(model: nn.Module) -> int:
    """Return how many numbers are learned; tied ones count once."""
    return sum(p.numel() for p in model.parameters())


def _init(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)

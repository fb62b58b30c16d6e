"""nanoGPT's training loop, reimplemented from its README and the behaviour of its `train.py`.

What it does on a CPU: random offsets into a memory map that is opened anew for each batch, fp32, AdamW that is fused on
CUDA only, gradients clipped at 1, exact GELU, tied embeddings, DDP on CUDA only, a checkpoint that is one file
written in place. On a GPU: the model compiled, bf16, TF32 for what is left in fp32, AdamW fused, batches copied from
pinned memory while the backward pass runs.
"""

# pyright: basic, reportPrivateImportUsage=false
import math
import pathlib
import typing

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention through scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.joint = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (B, T, C)."""
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in self.joint(x).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).contiguous().view(b, t, c))


class Layer(nn.Module):
    """Pre-norm attention and perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)])
        self.attend = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (B, T, C)."""
        x = x + self.attend(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """The GPT."""

    def __init__(self, layers: int, heads: int, width: int, seq_len: int, vocab: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(seq_len, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                nn.init.normal_(
                    p, std=0.02 / math.sqrt(2 * layers) if name.endswith(("project.weight", "2.weight")) else 0.02
                )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        h = self.tokens(x) + self.places(torch.arange(x.size(1), device=x.device))
        for layer in self.layers:
            h = layer(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1)


class Loop:
    """Its loop: `step()` is one iteration. `fair` adds what the CPU would allow: the fused optimiser and bf16.

    On a GPU it is as shipped, and `fair` or not makes no difference.
    """

    def __init__(
        self,
        shard: pathlib.Path,
        *,
        batch: int,
        model: Model,
        fair: bool = False,
        header_bytes: int = 1024,
        device: str = "cpu",
    ) -> None:
        on_gpu = device == "cuda"
        self.shard, self.batch, self.fair, self.device = shard, batch, fair or on_gpu, device
        model = model.to(device)
        if on_gpu:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        self.model: nn.Module = typing.cast(nn.Module, torch.compile(model)) if on_gpu else model
        self.seq_len, self.header = model.places.num_embeddings, header_bytes
        decayed = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), **({"fused": True} if self.fair else {}))
        self.next = get_batch(shard, batch, self.seq_len, header_bytes, device)

    def step(self) -> float:
        """Do one iteration and return the loss, as it logs it."""
        x, y = self.next
        with torch.autocast(self.device, torch.bfloat16, enabled=self.fair):
            loss = self.model(x, y)
        self.next = get_batch(self.shard, self.batch, self.seq_len, self.header, self.device)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def get_batch(
    path: pathlib.Path, batch: int, seq_len: int, header_bytes: int = 1024, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return random rows from a memory map opened for the occasion."""
    data = np.memmap(path, dtype=np.uint16, mode="r", offset=header_bytes)
    starts = torch.randint(len(data) - seq_len, (batch,))
    x = torch.stack([torch.from_numpy(data[i : i + seq_len].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + seq_len].astype(np.int64)) for i in starts])
    if device == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x, y

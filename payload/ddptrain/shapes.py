"""The models' sizes, parameters and FLOPs, and the GPUs' peaks.

Standard library only: `ddp plan` loads this file on hosts without torch.
"""

import dataclasses

PAD_VOCABULARY_TO = 64  # a multiple of 64 lets matrix units work on whole tiles
# Dense bf16 peaks in TFLOP/s, from NVIDIA's data sheets. The first name that is among the device's
# words counts; cards with a longer name ("RTX 4090 Laptop GPU", "RTX A4000") are not listed.
_PEAKS = """B200 2250, GB200 2500, GH200 989.4, H200 NVL 835.5, H200 989.4, H100 PCIe 756.5, H100 NVL 835.5, H100 989.4,
A100 312, L40S 362, A40 149.7, A30 165, A10G 70, A10 125, L40 181.05, L4 121, RTX 6000 Ada 364.2, RTX A6000 154.8,
4090 165.2, 3090 71"""
SIZES: dict[str, tuple[int, int, int]] = {  # layers, heads, width
    "tiny": (4, 4, 128),  # 0.8 M parameters: seconds on a laptop's core
    "small": (6, 6, 384),  # 10.7 M
    "gpt2": (12, 12, 768),  # 124 M; the rest are GPT-2's published sizes
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The properties that make two models the same."""

    layers: int
    heads: int
    width: int  # C; a multiple of `heads`
    seq_len: int  # the longest T
    vocab: int  # V, padded
    dropout: float = 0.0


def padded(vocab: int) -> int:
    """Return the vocabulary's size rounded up for the matrix units."""
    return -(-vocab // PAD_VOCABULARY_TO) * PAD_VOCABULARY_TO


def count(shape: Shape) -> int:
    """Return `num_parameters` of the model of that shape without building it."""
    block = 12 * shape.width**2 + 2 * shape.width
    return (shape.vocab + shape.seq_len) * shape.width + shape.layers * block + shape.width


def flops_per_token(shape: Shape, parameters: int) -> float:
    """Return the floating-point operations of forward and backward per token: 6 N + 12 L H D T.

    N leaves the position table out (it is looked up, not multiplied). PaLM (Chowdhery et al. 2022),
    appendix B.
    """
    weights = parameters - shape.seq_len * shape.width
    return 6.0 * weights + 12.0 * shape.layers * shape.width * shape.seq_len


def peak_flops(gpu: str) -> float | None:
    """Return a GPU's dense bf16 peak in FLOP/s by its name or GRES type, None if unknown."""
    spaced = gpu.lower().replace("-", " ").replace("_", " ")
    spaced = spaced.replace("rtx", "rtx ")  # a GRES type may be rtx4090
    name = f" {' '.join(spaced.split())} "
    if " laptop " in name:
        return None
    for entry in _PEAKS.split(","):
        part, _, peak = entry.strip().lower().rpartition(" ")
        if f" {part} " in name:
            return float(peak) * 1e12
    return None

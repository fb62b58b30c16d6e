"""The memory of a rank by DDP, FSDP2 and LoRA: arithmetic, standard library only.

Weights are trained in fp32 with bf16 arithmetic and AdamW, as Trainer's `--bf16` does. LoRA's
frozen weights are in bf16. A block of width C keeps 34 C bytes of each token for the backward pass
with fused attention, and 2 C with activation checkpointing (Korthikanti et al. 2022, section 4
without the scores).
"""

import dataclasses

WEIGHT = 4  # bytes, in fp32; a gradient likewise
MOMENTS = 8  # of AdamW, in fp32
HALF = 2  # in bf16
KEPT = 34  # bytes of a token and a unit of width in a block
KEPT_OF_INPUT = 2  # if the block is computed again
LOGIT = 10  # bytes: in bf16, in fp32, and its gradients
WIDTH_OF_A_LAYER = 128  # C / L of Llama 7B (4096 / 32); of 70B it is 102
TYPICAL_VOCAB = 128256  # of Llama 3
GATHERED = 2  # blocks that FSDP2 holds whole: the one that computes and the next
RANK = 16  # of LoRA's matrices, which most examples have
LORA_WIDTHS = 20  # in + out of a block's seven linear layers (Llama 3 8B), in units of C


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model that its memory depends on."""

    parameters: int
    layers: int
    width: int
    vocab: int


@dataclasses.dataclass(frozen=True)
class Need:
    """The bytes of one rank."""

    way: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    recomputed: float  # the activations, if blocks are computed again in the backward pass

    @property
    def total(self) -> float:
        """The sum, with activations kept."""
        return self.fixed + self.activations

    @property
    def least(self) -> float:
        """The sum, with activations recomputed."""
        return self.fixed + self.recomputed

    @property
    def fixed(self) -> float:
        """The part that does not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer


def typical(parameters: int) -> Model:
    """Return the shape that models of that size have: 12 C^2 parameters a block, C / 128 blocks."""
    width = round((parameters * WIDTH_OF_A_LAYER / 12) ** (1 / 3))
    layers = max(1, round(width / WIDTH_OF_A_LAYER))
    return Model(parameters, layers, width, TYPICAL_VOCAB)


def needs(model: Model, tokens: int, world: int) -> list[Need]:
    """Return the bytes of a rank by DDP, FSDP2 and LoRA, for `tokens` in one forward pass."""
    kept = KEPT * tokens * model.width
    logits = LOGIT * tokens * model.vocab
    activations = kept * model.layers + logits
    recomputed = KEPT_OF_INPUT * tokens * model.width * model.layers + kept + logits

    size = model.parameters
    copy = HALF * size  # autocast's, of the weights
    whole = Need(
        "DDP", WEIGHT * size + copy, WEIGHT * size, MOMENTS * size, activations, recomputed
    )

    share = size / world
    gathered = GATHERED * HALF * size / model.layers
    sharded = Need(
        "FSDP2",
        WEIGHT * share + gathered,
        WEIGHT * share,
        MOMENTS * share,
        activations,
        recomputed,
    )

    adapters = RANK * LORA_WIDTHS * model.width * model.layers
    lora = Need(
        f"LoRA, rank {RANK}",
        HALF * size + WEIGHT * adapters,
        WEIGHT * adapters,
        MOMENTS * adapters,
        activations,
        recomputed,
    )
    return [whole, sharded, lora]

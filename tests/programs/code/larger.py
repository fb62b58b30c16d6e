"""A Llama of any size, made on the spot: `larger.py --way fsdp2|lora [--size 3b] [--resume FOLDER]`.

By torch's fully_shard, or with a LoRA of peft on frozen weights. Each step's tokens follow from its number, so
that a run that continues repeats the losses of one that was not stopped.
"""

import argparse
import json
import os
import pathlib
import statistics
import time
import typing

import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.models.llama import modeling_llama

SIZES = {  # width, layers, feed-forward, heads, heads of keys, vocabulary
    "tiny": (64, 2, 128, 4, 2, 256),
    "3b": (3072, 28, 8192, 24, 8, 32000),  # Llama 3.2 3B with a smaller vocabulary
    "8b": (4096, 32, 14336, 32, 8, 128256),  # Llama 3 8B
}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARM_STEPS = 3


def main() -> None:
    """Train, save, and print a line of JSON with the figures."""
    args = _arguments()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    torch.manual_seed(0)
    trained = (Sharded if args.way == "fsdp2" else Adapted)(args, device)
    first = trained.resume(args.resume) if args.resume else 0
    if args.resume:
        say(f"resumed at step {first}")

    seconds: list[float] = []
    saved_s = 0.0
    for step in range(first + 1, args.steps + 1):
        began = time.monotonic()
        loss = trained.step(tokens_of(step, args, trained.vocab, device))
        say(f"step: {step} loss: {loss:.5f}")
        seconds.append(time.monotonic() - began)
        if step % args.save_every == 0:
            began = time.monotonic()
            trained.save(pathlib.Path(args.out, f"step-{step:06}"))
            saved_s = time.monotonic() - began

    figures: dict[str, float] = {"parameters": trained.parameters, "saved_s": round(saved_s, 2)}
    warm = seconds[WARM_STEPS:] or seconds
    if warm:
        figures["tokens_per_second"] = round(args.batch * args.seq_len / statistics.median(warm))
    if has_gpu:
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    say(json.dumps(figures))
    dist.destroy_process_group()


class Sharded:
    """All parameters, sharded over the ranks in fp32, with arithmetic in bf16."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        config = config_of(args)
        with torch.device("meta"):
            self.model = transformers.LlamaForCausalLM(config)
        self.vocab = config.vocab_size
        self.parameters = sum(one.numel() for one in self.model.parameters())
        mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.model.to_empty(device=device)
        self.model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config).to(device)
        for one in self.model.parameters():
            if one.dim() > 1:
                torch.nn.init.normal_(one, std=0.02)
            else:
                torch.nn.init.ones_(one)
        recompute(self.model, args)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, ids: torch.Tensor) -> float:
        """Take a step and return its loss."""
        return take_step(self.model, self.optimizer, ids)

    def save(self, folder: pathlib.Path) -> None:
        """Save the shards of all ranks; the folder appears whole."""
        draft = folder.with_name(f"draft-{folder.name}")
        writer = dcp.FileSystemWriter(draft, thread_count=8, sync_files=False)
        dcp.save(self._held(), storage_writer=writer)
        dist.barrier()
        if dist.get_rank() == 0:
            draft.rename(folder)

    def resume(self, folder: str) -> int:
        """Load a checkpoint and return its step."""
        held = self._held()
        dcp.load(held, checkpoint_id=folder)
        states.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=held["model"],
            optim_state_dict=held["optimizer"],
        )
        return step_of(folder)

    def _held(self) -> dict[str, typing.Any]:
        weights, moments = states.get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}


class Adapted:
    """A LoRA on frozen weights in bf16; each rank has all of them."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        config = config_of(args)
        torch.set_default_dtype(torch.bfloat16)
        with device:
            frozen = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        self.vocab = config.vocab_size
        self.parameters = sum(one.numel() for one in frozen.parameters())
        recompute(frozen, args)
        wanted = peft.LoraConfig(r=16, target_modules=LINEARS, task_type="CAUSAL_LM")
        self.adapted = peft.get_peft_model(frozen, wanted)
        self.adapted.train()
        trained = [one for one in self.adapted.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self.model = self.adapted
        if dist.get_world_size() > 1:
            self.model = torch.nn.parallel.DistributedDataParallel(self.adapted)

    def step(self, ids: torch.Tensor) -> float:
        """Take a step and return its loss."""
        return take_step(self.model, self.optimizer, ids)

    def save(self, folder: pathlib.Path) -> None:
        """Save the adapter and its moments; the folder appears whole."""
        if dist.get_rank() != 0:
            return
        draft = folder.with_name(f"draft-{folder.name}")
        draft.mkdir(parents=True, exist_ok=True)
        weights = peft.get_peft_model_state_dict(self.adapted)
        held = {"adapter": weights, "optimizer": self.optimizer.state_dict()}
        torch.save(held, draft / "state.pt")
        draft.rename(folder)

    def resume(self, folder: str) -> int:
        """Load a checkpoint and return its step."""
        held = torch.load(pathlib.Path(folder, "state.pt"), weights_only=True)
        peft.set_peft_model_state_dict(self.adapted, held["adapter"])
        self.optimizer.load_state_dict(held["optimizer"])
        return step_of(folder)


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    """Take a step and return its loss."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def tokens_of(
    step: int, args: argparse.Namespace, vocab: int, device: torch.device
) -> torch.Tensor:
    """Return a step's tokens: rows that count upwards, each from a different start."""
    rows = torch.arange(args.batch) + (step * dist.get_world_size() + dist.get_rank()) * args.batch
    return ((rows[:, None] * 7 + torch.arange(args.seq_len)) % vocab).to(device)


def config_of(args: argparse.Namespace) -> transformers.LlamaConfig:
    """Return the model's shape."""
    width, layers, inner, heads, of_keys, vocab = SIZES[args.size]
    return transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=of_keys,
        vocab_size=vocab,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=False,
    )


def recompute(model: transformers.PreTrainedModel, args: argparse.Namespace) -> None:
    """Have blocks computed again in the backward pass, if that was asked for."""
    if args.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def step_of(folder: str) -> int:
    """Return the step in a checkpoint's name."""
    return int(folder.rstrip("/").rsplit("-", 1)[1])


def say(text: str) -> None:
    """Print a line on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=("fsdp2", "lora"), required=True)
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--out", default="out-larger")
    parser.add_argument("--resume")
    return parser.parse_args()


if __name__ == "__main__":
    main()

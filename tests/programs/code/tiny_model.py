"""Make a tiny causal language model, its tokenizer and a text dataset in the folder that is given."""

import json
import pathlib
import sys

import tokenizers
import transformers
from tokenizers import models, pre_tokenizers


def make(folder: pathlib.Path) -> None:
    """Write FOLDER/model and FOLDER/data/train.jsonl, once."""
    words = ["<eos>", "<unk>", *(f"w{number}" for number in range(62))]
    vocabulary = {word: number for number, word in enumerate(words)}
    raw = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    lines = []
    for start in range(512):
        text = " ".join(f"w{(start + step) % 62}" for step in range(32))
        lines.append(json.dumps({"text": text}))
    (data / "train.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))

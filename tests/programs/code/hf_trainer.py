"""transformers' Trainer on a tiny GPT-2: `hf_trainer.py FOLDER STEPS [any flag of TrainingArguments]`."""

import pathlib
import sys
import time

import torch
import transformers
from transformers import trainer_utils


class Texts(torch.utils.data.Dataset):
    """Sequences that count upwards; each batch takes a moment."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.05)
        ids = (torch.arange(32) + index) % 62
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    """Train, and continue from --resume_from_checkpoint or from the newest checkpoint."""
    model_folder, steps, *flags = sys.argv[1:]
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    defaults = [
        "--max_steps",
        steps,
        "--per_device_train_batch_size",
        "2",
        "--logging_steps",
        "5",
        "--save_steps",
        "20",
        "--report_to",
        "none",
        "--output_dir",
        "out-trainer",
    ]
    (arguments,) = parser.parse_args_into_dataclasses([*defaults, *flags])
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{model_folder}/model")
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts())
    newest = arguments.resume_from_checkpoint
    if newest is None and pathlib.Path(arguments.output_dir).is_dir():
        newest = trainer_utils.get_last_checkpoint(arguments.output_dir)
    print("resumes from", newest, flush=True)
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main()

"""TRL's SFTTrainer with a LoRA of peft: `sft.py FOLDER [any flag of SFTConfig]`."""

import sys

import datasets
import peft
import transformers
import trl


def main() -> None:
    """Tune the tiny model."""
    folder, *flags = sys.argv[1:]
    parser = transformers.HfArgumentParser(trl.SFTConfig)
    (arguments,) = parser.parse_args_into_dataclasses(flags)
    texts = datasets.load_dataset("json", data_files=f"{folder}/data/train.jsonl", split="train")
    trainer = trl.SFTTrainer(
        model=f"{folder}/model",
        args=arguments,
        train_dataset=texts,
        peft_config=peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"),
    )
    print("resumes from", arguments.resume_from_checkpoint, flush=True)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)


if __name__ == "__main__":
    main()

"""sentence-transformers' trainer on the tiny model: `embeddings.py FOLDER [any flag of its arguments]`."""

import sys

import datasets
import sentence_transformers
import transformers
from sentence_transformers.sentence_transformer import losses


def main() -> None:
    """Train embeddings that bring the two halves of a text close."""
    folder, *flags = sys.argv[1:]
    parser = transformers.HfArgumentParser(
        sentence_transformers.SentenceTransformerTrainingArguments
    )
    (arguments,) = parser.parse_args_into_dataclasses(flags)
    texts = datasets.load_dataset("json", data_files=f"{folder}/data/train.jsonl", split="train")
    model = sentence_transformers.SentenceTransformer(f"{folder}/model")
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=texts.map(halve, remove_columns=["text"]),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    print("resumes from", arguments.resume_from_checkpoint, flush=True)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)


def halve(row: dict[str, str]) -> dict[str, str]:
    """Return the two halves of a text."""
    words = row["text"].split()
    middle = len(words) // 2
    return {"anchor": " ".join(words[:middle]), "positive": " ".join(words[middle:])}


if __name__ == "__main__":
    main()

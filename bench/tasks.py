"""`python -m bench.tasks ours|CHECKOUT TEXT OUTPUT N`: tokenise JSON lines with N tasks; print what it took.

In a process of its own that has not imported torch, as both commands run: beside torch's threads ours would not fork.
The last line is JSON: wall and processor seconds, and the number of tokens.
"""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import sys

from bench import row
from bench.peers import preparation
from ddptrain import prepare, shards


def main(who: str, text: pathlib.Path, output: pathlib.Path, tasks: int) -> dict[str, float]:
    """Tokenise. Ours reads the texts and loads the vocabulary in the time that is taken, the peer before it."""
    assert "torch" not in sys.modules
    laps = row.Laps()
    if who == "ours":
        options = prepare.Options((str(text),), output, tokenizer="gpt2", workers=tasks, part_mib=4.0)
        laps.measure(lambda: prepare.run(options))
        dataset = shards.open_dataset(output)
        tokens = sum(dataset.tokens(split) for split in dataset.splits)
    else:
        output.mkdir()
        documents = [
            json.loads(line)["text"]
            for path in sorted(text.iterdir())
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        laps.measure(preparation.Preparation(pathlib.Path(who), documents, output, tasks).run)
        tokens = preparation.count(output)
    return {"wall_s": laps.wall_s[0], "cpu_s": laps.cpu_s[0], "tokens": tokens}


if __name__ == "__main__":
    _, kind, texts, folder, number = sys.argv
    print(f"\n{json.dumps(main(kind, pathlib.Path(texts), pathlib.Path(folder), int(number)))}")

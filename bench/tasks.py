"""`python -m bench.tasks ours|peer TEXT OUTPUT N`: tokenise a folder of texts with N tasks and print the seconds.

In a process of its own that has not imported torch, as both commands run: beside torch's threads ours would not fork.
"""

# pyright: basic, reportPrivateImportUsage=false
import pathlib
import sys
import time

from bench.peers import preparation
from ddptrain import prepare, tokenizers

DOCUMENT_CHARS = 20_000


def main(who: str, text: pathlib.Path, output: pathlib.Path, tasks: int) -> float:
    """Return how many seconds the work took. Ours reads the texts and loads the vocabulary in them, the peer before."""
    assert "torch" not in sys.modules
    if who == "ours":
        began = time.perf_counter()
        prepare.run(prepare.Options((str(text),), output, tokenizer="gpt2", workers=tasks, part_mib=4.0))
        return time.perf_counter() - began
    documents: list[str] = []
    for path in sorted(text.iterdir()):
        whole = path.read_text(encoding="utf-8")
        documents += [whole[at : at + DOCUMENT_CHARS] for at in range(0, len(whole), DOCUMENT_CHARS)]
    peer = preparation.Preparation(documents, tokenizers.Gpt2Tokenizer()._core.encode_ordinary, tokenizers.GPT2_END)
    began = time.perf_counter()
    peer.run(output, tasks)
    return time.perf_counter() - began


if __name__ == "__main__":
    _, kind, texts, folder, number = sys.argv
    print(f"\nseconds {main(kind, pathlib.Path(texts), pathlib.Path(folder), int(number))}")

"""Fine-tuning on two nodes, with the option transformers: the model is made here, tiny, inside the jobs' environment.

The environment with transformers is made once, for this file alone; the option is taken back at the end.
"""

import json
import typing

import pytest

from functional.conftest import Cluster

pytestmark = [pytest.mark.long, pytest.mark.trains, pytest.mark.timeout(1800)]

HOME = "/mnt/shared/tuning"
# Without an argument: a model of random weights with a tokenizer of bytes, and JSON lines in three shapes.
# With one: the model in that folder is loaded as a user would, and asked for a word.
SCRIPT = """
import json, pathlib, sys
import tokenizers, torch, transformers
home = pathlib.Path("/mnt/shared/tuning")
if len(sys.argv) > 1:
    core = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], local_files_only=True)
    words = transformers.AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
    before = transformers.AutoModelForCausalLM.from_pretrained(home / "tiny", local_files_only=True)
    asked = words("repeat red: ", return_tensors="pt").input_ids
    output = core.generate(asked, max_new_tokens=3, do_sample=False)
    name = "transformer.h.0.attn.c_attn.weight"
    same = torch.equal(core.state_dict()[name], before.state_dict()[name])
    print("loaded", type(core).__name__, output.shape[1] - asked.shape[1], "same" if same else "tuned", flush=True)
    raise SystemExit
alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
core = tokenizers.Tokenizer(tokenizers.models.BPE({c: n for n, c in enumerate(["<end>", *sorted(alphabet)])}, []))
core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
core.decoder = tokenizers.decoders.ByteLevel()
words = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
words.save_pretrained(home / "tiny")
torch.manual_seed(3)
shape = dict(vocab_size=len(words), n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(home / "tiny")
(home / "chat").mkdir(exist_ok=True)
for name, count in (("train", 240), ("val", 40)):
    lines = []
    for n in range(count):
        word = ("red", "green", "blue", "white")[n % 4]
        asked, answer = f"repeat {word}: ", f"{word} {word} {word}"
        output = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        lines.append(({"text": asked + answer}, {"prompt": asked, "completion": answer}, {"messages": output})[n % 3])
    (home / "chat" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""
SMALL = ("gpus-per-node=0", "cpus-per-task=1", "memory=1G", "wait=true")


@pytest.fixture(scope="module")
def tuning(cluster: Cluster) -> typing.Iterator[Cluster]:
    """The cluster with the option set, a model and JSON lines."""
    cluster.on("sackd/0", "sh", "-c", f"mkdir -p {HOME}; cat > {HOME}/model.py <<'END'\n{SCRIPT}\nEND\n")
    cluster.on("sackd/0", "chown", "-R", "ubuntu", HOME)
    cluster.ok("config", "trainer", "transformers=true")
    try:
        cluster.action("install-environment", timeout=1500)
        cluster.action("submit-ddp", f"workload={HOME}/model.py", "nodes=1", "launcher=srun", *SMALL)
        yield cluster
    finally:
        cluster.ok("config", "trainer", "transformers=false")


def test_a_local_model_is_tuned_on_two_nodes_and_loads_in_transformers(tuning: Cluster):
    arguments = f"args=--model-local-dir {HOME}/tiny --steps 40 --epoch-steps 20 --seq-len 32 --batch 4 --lr 0.003"
    options = (f"dataset={HOME}/chat", "nodes=2", "env=OMP_NUM_THREADS=1", *SMALL)
    result = tuning.action("submit-ddp", arguments, *options, timeout=1200)
    assert result["state"] == "COMPLETED", result
    summary = json.loads(tuning.on("sackd/0", "cat", f"{result['run-dir']}/summary.json"))
    assert (summary["workload"], summary["state"], summary["steps"]) == ("finetune", "done", 40)
    assert {rank["host"] for rank in summary["ranks"]} == {"slurmd-0", "slurmd-1"}
    assert summary["last_loss"] < 0.8 * summary["first_loss"]
    tokens = json.loads(tuning.on("sackd/0", "cat", f"{result['run-dir']}/tokens/dataset.json"))
    assert (tokens["masked"], tokens["totals"]["train"]["docs"]) == (True, 240)
    model = f"{result['run-dir']}/model"
    names = tuning.on("slurmd/1", "ls", model).split()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    loaded = tuning.action(
        "submit-ddp", f"workload={HOME}/model.py", f"args={model}", "nodes=1", "launcher=srun", *SMALL
    )
    assert "loaded GPT2LMHeadModel 3 tuned" in tuning.on("sackd/0", "cat", loaded["log"])

"""A model's folder is judged before anything is made of it.

The models are made here, tiny and random.
"""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import shutil
import subprocess
import sys
import time
import typing

import builders
import conftest
import hypothesis
import pytest
import ranks
import torch
import yaml
from hypothesis import strategies as st

from ddptrain.ground import errors
from ddptrain.model_folder import judge

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
tokenizers = pytest.importorskip(
    "tokenizers", reason="the optional extra transformers is not installed"
)
transformers = pytest.importorskip(
    "transformers", reason="the optional extra transformers is not installed"
)
jinja2 = pytest.importorskip("jinja2")

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize 988097824\n" % (
    b"4" * 64
)
TEMPLATE = (
    "{%- for message in messages %}{{ '<' + message.role + '>' + message.content }}"
    "{%- if not loop.last %}{{ '\\n' }}{%- endif %}{%- endfor %}"
)
FLAGS = (
    "--seq-len 16 --batch 2 --epoch-steps 3 --steps 3 --lr 0.003 --precision fp32 --eval-rows 4"
).split()
FORMS = ("whole", "sharded", "bin")


def save_tokenizer(folder: pathlib.Path) -> None:
    builders.save_tokenizer(folder, conftest.prose(5), 300, TEMPLATE)


def llama(num_ids: int = 300) -> typing.Any:
    torch.manual_seed(3)
    described = transformers.LlamaConfig(
        vocab_size=num_ids,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(described)


def gemma3() -> typing.Any:
    torch.manual_seed(3)
    text = {
        "vocab_size": 300,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "sliding_window": 32,
    }
    vision = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    described = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=5,
        boi_token_index=6,
        eoi_token_index=7,
    )
    return transformers.Gemma3ForConditionalGeneration(described)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The same model in the three forms that transformers reads."""
    made: dict[str, pathlib.Path] = {}
    for form in FORMS:
        folder = tmp_path_factory.mktemp("models") / form
        save_tokenizer(folder)
        core = llama()
        core.save_pretrained(folder, max_shard_size="6KB" if form == "sharded" else "5GB")
        if form == "bin":
            (folder / "model.safetensors").unlink()
            torch.save(core.state_dict(), folder / "pytorch_model.bin")
        made[form] = folder
    return made


@pytest.fixture
def model(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the model whose weights are one file."""
    return pathlib.Path(shutil.copytree(folders["whole"], tmp_path / "model"))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    lines = [
        {"prompt": f"hello {n}", "completion": " the pump ran for minutes"} for n in range(200)
    ]
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def change(folder: pathlib.Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refusal(folder: pathlib.Path) -> str:
    with pytest.raises(errors.UserError) as caught:
        judge.check(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_folder_passes_without_torch_and_quickly(
    folders: dict[str, pathlib.Path], form: str
):
    began = time.perf_counter()
    judge.check(folders[form])
    assert time.perf_counter() - began < 0.5
    code = f"import sys; sys.path[:] = [{str(conftest.PAYLOAD)!r}, *(p for p in sys.path if 'site-packages' not in p)]\n"
    code += "import pathlib; from ddptrain.model_folder import judge\n"
    code += f"judge.check(pathlib.Path({str(folders[form])!r})); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def damages(contents: dict[str, bytes], name: str) -> st.SearchStrategy[bytes]:
    """Return the ways to spoil a file: cut short, emptied, a pointer, or another file's content."""
    content = contents[name]
    cut = st.integers(1, len(content.rstrip()) - 1).map(lambda end: content[:end])
    others = [other for key, other in contents.items() if key != name]
    return st.one_of(cut, st.sampled_from([b"", POINTER]), st.sampled_from(others))


@hypothesis.settings(max_examples=600)
@hypothesis.given(st.data())
def test_a_spoilt_file_is_named_in_one_line(
    folders: dict[str, pathlib.Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    form = data.draw(st.sampled_from(FORMS))
    source = folders[form]
    contents = {path.name: path.read_bytes() for path in sorted(source.iterdir())}
    name = data.draw(st.sampled_from(sorted(contents)))
    spoilt = data.draw(damages(contents, name))
    if name.endswith(".jinja"):
        hypothesis.assume(not is_template(spoilt))

    folder = tmp_path_factory.mktemp("spoilt")
    for other, content in contents.items():
        (folder / other).write_bytes(spoilt if other == name else content)
    assert f"{folder}/{name} " in f"{refusal(folder)} "
    shutil.rmtree(folder)


def is_template(content: bytes) -> bool:
    """Return whether jinja takes a cut template, or one without an expression, for a whole one."""
    try:
        jinja2.Environment().parse(content.decode())
    except (jinja2.TemplateSyntaxError, UnicodeDecodeError):
        return False
    return content.startswith(TEMPLATE[:3].encode())


@pytest.mark.parametrize("case", CASES["models_of_other_kinds"], ids=lambda case: case["words"])
def test_a_model_of_another_kind_is_refused(model: pathlib.Path, case: dict[str, typing.Any]):
    change(model, **case["config"])
    text = refusal(model)
    assert text.startswith(f"{model}/config.json describes {case['words']}")
    assert "; give " in text


@pytest.mark.parametrize("values", CASES["models_that_are_left_to_transformers"])
def test_unknown_models_are_left_to_transformers(model: pathlib.Path, values: dict[str, object]):
    change(model, **values)
    judge.check(model)


def test_weights_of_another_model_are_refused(model: pathlib.Path, tmp_path: pathlib.Path):
    llama(num_ids=200).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", model)
    assert "embeddings of 300 x 8, the weights' " in refusal(model)


def test_a_folder_without_a_model_says_what_it_holds(model: pathlib.Path):
    (model / "model.safetensors").rename(model / "tiny-q4.gguf")
    assert "tiny-q4.gguf is for llama.cpp" in refusal(model)
    (model / "tiny-q4.gguf").unlink()
    assert "holds no weights that transformers reads; download model.safetensors" in refusal(model)
    (model / "config.json").rename(model / "adapter_config.json")
    assert "holds an adapter, not a whole model; merge it" in refusal(model)


def test_files_that_transformers_does_not_read_do_not_matter(model: pathlib.Path):
    for name in ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "vocab.json"):
        (model / name).write_bytes(POINTER)
    judge.check(model)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [POINTER, None])
def test_a_spoilt_file_ends_a_training_before_its_tokens(
    model: pathlib.Path,
    conversations: pathlib.Path,
    tmp_path: pathlib.Path,
    name: str,
    content: bytes | None,
):
    whole = (model / name).read_bytes()
    (model / name).write_bytes(content or whole[: len(whole) // 2])
    result = ranks.train(2, conversations, tmp_path / "run", "--model-local-dir", model, *FLAGS)
    assert result.codes == [2, 2], result.output
    (line,) = result.fatal()
    words = "is a Git LFS pointer" if content else "is cut short"
    assert f"{model / name} {words}" in line
    assert "Traceback" not in result.output
    assert not (tmp_path / "run" / "tokens").exists()


def test_a_model_that_also_sees_is_tuned_on_text(
    model: pathlib.Path, conversations: pathlib.Path, tmp_path: pathlib.Path
):
    for path in ("config.json", "model.safetensors"):
        (model / path).unlink()
    gemma3().save_pretrained(model)
    ranks.trained(2, conversations, tmp_path / "run", "--model-local-dir", model, *FLAGS)

    load = transformers.Gemma3ForConditionalGeneration.from_pretrained
    before = load(model, local_files_only=True).state_dict()
    after = load(tmp_path / "run" / "model", local_files_only=True).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.language_model.layers.0.mlp.up_proj.weight" in changed
    assert not any("vision" in name or "projector" in name for name in changed)


@pytest.mark.parametrize("are_used", [False, True])
def test_embeddings_grow_for_ids_that_texts_use(
    model: pathlib.Path, conversations: pathlib.Path, tmp_path: pathlib.Path, are_used: bool
):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    tokenizer.add_tokens(["minutes" if are_used else "never"])
    tokenizer.save_pretrained(model)
    num_ids = len(tokenizer)

    run_dir = tmp_path / "run"
    result = ranks.trained(1, conversations, run_dir, "--model-local-dir", model, *FLAGS)
    assert f"the tokenizer has {num_ids} ids, the model 300" in result.output
    tuned = transformers.AutoModelForCausalLM.from_pretrained(
        run_dir / "model", local_files_only=True
    )
    assert tuned.config.vocab_size == (num_ids if are_used else 300)
    assert ("no text uses the others" in result.output) is not are_used


def test_a_model_that_looks_ahead_is_refused(
    model: pathlib.Path, conversations: pathlib.Path, tmp_path: pathlib.Path
):
    torch.manual_seed(3)
    described = transformers.BertConfig(
        vocab_size=300,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
        is_decoder=True,
    )
    transformers.BertLMHeadModel(described).save_pretrained(model)
    judge.check(model)
    ranks.trained(1, conversations, tmp_path / "run", "--model-local-dir", model, *FLAGS)
    change(model, is_decoder=False)
    result = ranks.train(1, conversations, tmp_path / "again", "--model-local-dir", model, *FLAGS)
    (line,) = result.fatal()
    assert "config.json describes bert, which reads text in both directions" in line


def test_weights_that_lack_tensors_are_refused(
    model: pathlib.Path, conversations: pathlib.Path, tmp_path: pathlib.Path
):
    change(model, num_hidden_layers=3)
    result = ranks.train(1, conversations, tmp_path / "run", "--model-local-dir", model, *FLAGS)
    (line,) = result.fatal()
    assert "the weights lack 9 tensors of config.json, such as model.layers.2." in line

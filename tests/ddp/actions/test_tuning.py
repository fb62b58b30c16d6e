"""Fine-tuning a local model: the option's effects, and refusals before a submission."""

import pathlib
import shutil

import pytest
import yaml
from cluster import Cluster
from harness import Trainer
from pip_double import Pip

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

TUNING = "tuning/requirements.txt"


def extras(pip: Pip) -> list[tuple[str, ...]]:
    return [call for call in pip.calls if call[-1].endswith(TUNING)]


def test_the_option_makes_another_environment_with_the_locked_packages(
    trainer: Trainer, cluster: Cluster, pip: Pip
):
    without = trainer.run("install-environment")["environment"]
    assert extras(pip) == []
    assert "transformers" not in pip.calls[-1]
    trainer.config["transformers"] = True
    with_it = trainer.run("install-environment")["environment"]
    assert with_it != without
    (call,) = extras(pip)
    assert "--require-hashes" in call
    assert pathlib.Path(call[-1].removeprefix("-r")).read_text().startswith("transformers==")
    assert "transformers" in pip.calls[-1], "it is imported before the environment counts as made"
    trainer.config["tensorboard"] = True
    assert trainer.run("install-environment")["environment"] not in (with_it, without)


@pytest.mark.parametrize("data", ["chat.jsonl", "chat"])
def test_a_model_in_the_workspace_is_tuned(
    trainer: Trainer, model: pathlib.Path, cluster: Cluster, pip: Pip, data: str
):
    path = trainer.workspace / data
    trainer.run("submit-ddp", args=f"--model-local-dir {model} --steps 5", dataset=str(path))
    words = [
        "--data",
        str(path),
        "--resume",
        "$resume",
        "--model-local-dir",
        str(model),
        "--steps",
        "5",
    ]
    assert cluster.job(40).commands()[0].endswith(" ".join(words))
    checks = trainer.run(
        "submit-ddp", args=f"--model-local-dir={model}", dataset=str(path), dry_run=True
    )["checks"]
    assert f"model: {model} is readable" in checks


def test_without_the_option_it_is_refused_with_what_to_type(
    trainer: Trainer, model: pathlib.Path, cluster: Cluster
):
    trainer.config["transformers"] = False
    for action, more in (
        ("submit-ddp", {"args": f"--model-local-dir {model}"}),
        ("submit-ddp", {"args": f"--model-local-dir={model}", "dry_run": True}),
        ("submit-sweep", {"args": f"--model-local-dir {model}", "grid": "lr=0.1,0.2"}),
        ("submit-sweep", {"grid": f"model-local-dir={model}"}),
    ):
        error = trainer.fails(action, dataset=str(trainer.workspace / "chat"), **more)
        assert error == (
            "args: --model-local-dir needs transformers in the jobs' environment; juju config trainer transformers=true"
        )
    assert cluster.changes == []


def test_a_container_brings_its_own(trainer: Trainer, model: pathlib.Path, cluster: Cluster):
    trainer.config["transformers"] = False
    data = str(trainer.workspace / "chat")
    trainer.run(
        "submit-ddp",
        args=f"--model-local-dir {model}",
        dataset=data,
        container_image="hf/pytorch:1",
        nodes=1,
    )
    assert cluster.jobs


@pytest.mark.parametrize(
    "case", CASES["impossible_fine_tunings_are_refused_before_anything_is_written"]
)
def test_impossible_fine_tunings_are_refused_before_anything_is_written(
    trainer: Trainer,
    model: pathlib.Path,
    cluster: Cluster,
    pip: Pip,
    case: tuple[str, str | None, str],
):
    args, dataset, error = case
    top, before = trainer.workspace, trainer.files()
    words = args.format(top=top, model=f"--model-local-dir {model}")
    given = {"dataset": f"{top}/{dataset}"} if dataset else {}
    message = trainer.fails("submit-ddp", args=words, **given)
    assert message.startswith(error.format(top=top))
    assert (cluster.changes, pip.calls) == ([], [])
    assert trainer.files() == before


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(("file", "content", "words"), CASES["a_model_is_judged_by_its_files"])
def test_a_model_is_judged_by_its_files(
    trainer: Trainer,
    model: pathlib.Path,
    cluster: Cluster,
    pip: Pip,
    file: str,
    content: str,
    words: str,
    dry_run: bool,
):
    (model / file).write_text(content)
    before = trainer.files()
    data = str(trainer.workspace / "chat")
    error = trainer.fails(
        "submit-ddp", args=f"--model-local-dir {model}", dataset=data, dry_run=dry_run
    )
    assert error == f"args: {model / file} {words.format(model=model)}"
    assert (cluster.changes, pip.calls) == ([], [])
    assert trainer.files() == before


def test_each_run_of_a_sweep_is_checked(
    trainer: Trainer, model: pathlib.Path, cluster: Cluster, pip: Pip
):
    data, absent = str(trainer.workspace / "chat"), trainer.workspace / "models" / "big"
    error = trainer.fails("submit-sweep", grid=f"model-local-dir={model},{absent}", dataset=data)
    assert error == f"--model-local-dir: {absent} does not exist"
    assert cluster.changes == []
    damaged = trainer.workspace / "models" / "cut"
    shutil.copytree(model, damaged)
    (damaged / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-1])
    error = trainer.fails("submit-sweep", grid=f"model-local-dir={model},{damaged}", dataset=data)
    assert error.startswith(f"options of run 1: {damaged}/model.safetensors is cut short")
    trainer.run("submit-sweep", grid=f"model-local-dir={model} lr=0.1,0.2", dataset=data, nodes=1)
    assert cluster.jobs
    error = trainer.fails("submit-sweep", grid=f"tokenizer-local-dir={model}", dataset=data)
    assert error == "args: --tokenizer-local-dir needs --model-local-dir; give both"

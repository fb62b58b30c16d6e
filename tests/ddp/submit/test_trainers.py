"""The signal that makes a program's trainer save: a remark at submission, and chosen by `auto`."""

import pathlib

import pytest

from ddp.options import fields, models
from ddp.problem import ParameterError
from ddp.settings import Settings
from ddp.submit import trainers

HUGGING_FACE = "from transformers import Trainer, TrainingArguments\nTrainer()\n"


def choose(
    settings: Settings, folder: pathlib.Path, source: str, **more: object
) -> tuple[str | None, str]:
    path = folder / "train.py"
    path.write_text(source)
    params = fields.parse(models.SubmitDdp, {"workload": str(path), **more})
    return trainers.choose(settings.workspace, params)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (HUGGING_FACE, "transformers' Trainer"),
        ("import transformers as t\nt.Seq2SeqTrainer()", "transformers' Trainer"),
        ("from trl import SFTTrainer", "TRL's trainer"),
        (
            "import sentence_transformers as st\nst.CrossEncoderTrainer()",
            "sentence-transformers' trainer",
        ),
        ("import lightning as L\nL.Trainer()", "Lightning's Trainer"),
        ("from pytorch_lightning.trainer import Trainer", "Lightning's Trainer"),
        ("def main():\n    from nemo.collections import llm", "NeMo"),
        ("from megatron.training import pretrain", "Megatron-LM"),
    ],
)
def test_a_trainer_is_known_by_what_the_program_imports(
    settings: Settings, tmp_path: pathlib.Path, source: str, name: str
):
    signal, remark = choose(settings, tmp_path, source)
    assert signal is None, "nothing is sent that nobody asked for"
    assert remark.startswith(f"TERM at the time limit, on which {name} saves with ")
    assert remark.endswith(": stop-signal auto sends it")
    signal, remark = choose(settings, tmp_path, source, **{"stop-signal": "auto"})
    assert signal == "TERM"
    assert remark.startswith(f"stop-signal: TERM, on which {name} saves")


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from transformers import GPT2LMHeadModel",  # as nanoGPT's model.py does
        "import lightning as L\nL.Fabric()",
        "from sentence_transformers import SentenceTransformer",  # which only embeds
        "from . import trl",
        "def broken(",
    ],
)
def test_a_program_without_a_known_trainer_gets_no_remark_and_no_auto(
    settings: Settings, tmp_path: pathlib.Path, source: str
):
    assert choose(settings, tmp_path, source) == (None, "")
    with pytest.raises(ParameterError, match="give TERM, USR1, USR2 or INT"):
        choose(settings, tmp_path, source, **{"stop-signal": "auto"})


def test_a_signal_that_is_named_is_taken_as_it_is(settings: Settings, tmp_path: pathlib.Path):
    assert choose(settings, tmp_path, HUGGING_FACE, **{"stop-signal": "USR1"}) == ("USR1", "")


def test_a_module_of_the_environment_is_known_by_its_name(settings: Settings):
    given = {"workload": "trl.scripts.sft", "module": True, "stop-signal": "auto"}
    params = fields.parse(models.SubmitDdp, given)
    assert trainers.choose(settings.workspace, params)[0] == "TERM"

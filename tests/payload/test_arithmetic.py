"""A resumed training's statement about its bits."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib

import pytest
import torch

from ddptrain.checkpoint import arithmetic, stored
from ddptrain.options import config
from ddptrain.world import distributed, rendezvous

META = {"torch": torch.__version__, "device": "NVIDIA H200", "arithmetic": arithmetic.VERSION}


@pytest.mark.parametrize(
    ("deterministic", "reasons"),
    [(True, []), (False, ["sums on GPUs without --deterministic"])],
)
def test_a_resume_on_a_gpu_is_exact_only_with_deterministic_operations(
    deterministic: bool, reasons: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    world = distributed.World(rendezvous.Place(0, 1, 0, 1), torch.device("cuda"))
    settings = config.complete(config.Config(deterministic=deterministic), "cuda", {})
    saved = stored.Checkpoint(pathlib.Path("epoch-0001"), META)

    assert arithmetic.differences(saved, settings, 32, world) == reasons

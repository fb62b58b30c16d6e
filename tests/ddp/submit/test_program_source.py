"""Programs that start their own ranks get a remark at submission, and no others do."""

import pathlib

import pytest

from ddp.options import fields, models
from ddp.settings import Settings
from ddp.submit import program_source

MULTIGPU = """
import torch.multiprocessing as mp
from torch.distributed import init_process_group

def main(rank, world_size):
    init_process_group("nccl", rank=rank, world_size=world_size)

if __name__ == "__main__":
    mp.spawn(main, args=(2,), nprocs=2)
"""
IMAGENET = (
    MULTIGPU
    + "import argparse\nargparse.ArgumentParser().add_argument('--multiprocessing-distributed')\n"
)
WHY = "starts its own ranks in each rank (mp.spawn), which wait for ever; call its function once"


def remarks(settings: Settings, folder: pathlib.Path, source: str, args: str = "") -> list[str]:
    path = folder / "train.py"
    path.write_text(source)
    params = fields.parse(models.SubmitDdp, {"workload": str(path), "args": args})
    return program_source.check(settings.workspace, params, settings.workspace.look())


@pytest.mark.parametrize(
    ("source", "args", "wanted"),
    [
        (MULTIGPU, "", f"train.py {WHY}"),
        (MULTIGPU.replace("import torch.multiprocessing as mp", "import torch").replace("mp.", "torch.multiprocessing."), "", WHY),
        (MULTIGPU.replace("torch.multiprocessing as mp", "os").replace("mp.spawn", "x") + "from torch.multiprocessing import spawn", "", WHY),
        (MULTIGPU + "import os\nif 'LOCAL_RANK' in os.environ:\n    main(0, 1)\n", "", ""),
        (MULTIGPU.replace("init_process_group", "prepare"), "", ""),
        (MULTIGPU.replace("mp.spawn", "numpy.random.SeedSequence(1).spawn"), "", ""),
        (IMAGENET, "--multiprocessing-distributed --dummy", "omit it, add --dist-url env://"),
        (IMAGENET, "--dummy", ""),
    ],
)  # fmt: skip
def test_ranks_that_a_program_starts_are_seen_at_the_submission(
    settings: Settings, tmp_path: pathlib.Path, source: str, args: str, wanted: str
):
    found = remarks(settings, tmp_path, source, args)
    assert [wanted in one for one in found] == [True] * bool(wanted)

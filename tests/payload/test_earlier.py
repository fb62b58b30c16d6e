"""Runs of earlier releases, and of another torch, continue with their own settings.

data/earlier/make.py made their folders with their own code. torch-2.15.0 has the newest tested
torch, the others have 2.13.0: the newer one reads the older one's files, and the reverse is
refused.
"""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import shutil

import conftest
import pytest
import ranks
import torch

EARLIER = pathlib.Path(__file__).parent / "data" / "earlier"
MADE_BY = "Intel(R) Xeon(R) Processor"  # with AVX-512: another processor computes other bits
TORCH = "2.13.0+cpu"


def is_same_machine(made_by: str) -> bool:
    """Whether this processor and torch are those that made a folder."""
    about = pathlib.Path("/proc/cpuinfo").read_text()
    return (
        MADE_BY in about
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.__version__ == made_by
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split("."))


@pytest.mark.parametrize(
    ("made", "exact"),
    [
        ("20261122", "yes"),  # the default rate was 0.003, the warm-up a tenth of the steps
        ("20261125", "yes"),
        ("20261127", "no"),  # with dropout, whose numbers came from a generator that was saved
        ("20261129", "yes"),  # with dropout
        ("torch-2.15.0", "yes"),
    ],
)
def test_a_run_of_an_earlier_release_goes_on_as_it_was(
    made: str, exact: str, tmp_path: pathlib.Path
):
    """Only the data is given: model, batch, rate, warm-up and length come from the record."""
    folder = tmp_path / made
    shutil.copytree(EARLIER / made, folder, symlinks=True)
    before = json.loads((folder / "run" / "config.json").read_text())
    manifest = json.loads((folder / "run" / "latest" / "manifest.json").read_text())
    made_by = manifest["meta"]["torch"]
    if _release(made_by) > _release(torch.__version__):
        refused = ranks.train(1, folder / "data", folder / "run")
        (line,) = refused.fatal()
        assert line.endswith(f"torch {made_by} wrote it; use that one, or a newer one")
        return
    if _release(made_by) != _release(torch.__version__):
        exact = "no"  # a run that another torch continues is not exact

    result = ranks.trained(1, folder / "data", folder / "run")

    wanted = {
        int(step): loss for step, loss in json.loads((folder / "next.json").read_text()).items()
    }
    found = {step: loss for step, loss in conftest.losses(folder / "run").items() if step > 10}
    resumed = next(line for line in result.marked("CKPT") if "resumed" in line)
    assert resumed["exact"] == exact
    assert found == pytest.approx(wanted, abs=1e-4 if exact == "yes" else 0.06)
    if is_same_machine(made_by):
        assert (found == wanted) == (exact == "yes")
    after = json.loads((folder / "run" / "config.json").read_text())
    known = {name: value for name, value in before.items() if value is not None and name in after}
    assert {name: after[name] for name in known.keys() - {"run_dir", "data", "profile"}} == {
        name: known[name] for name in known.keys() - {"run_dir", "data", "profile"}
    }
    assert "changes" not in after

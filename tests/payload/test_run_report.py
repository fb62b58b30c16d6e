"""What a run really leaves is what `ddp report` and the charm read: the page of a run that was just trained."""

import ctypes.util
import datetime
import json
import pathlib
import subprocess
import time

import conftest
import pytest
import ranks
import torch

from ddp.run import folder
from ddp.view import page
from ddptrain import hardware

RECORDED = conftest.ROOT / "tests" / "ddp" / "data" / "gpt-20261123"
TINY = (
    "--layers", 2, "--heads", 2, "--width", 32, "--seq-len", 32, "--batch", 4, "--precision", "fp32", "--eval-rows", 16,
    "--log-every", 2,
)  # fmt: skip
NVML = """
#include <string.h>
typedef struct { unsigned int gpu, memory; } rates;
static int device, fails;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) { *handle = &device; return strcmp(uuid, "GPU-1234") ? 6 : 0; }
int nvmlDeviceGetUtilizationRates(void *handle, rates *found) {
  if (handle != &device || fails++) return 3;
  found->gpu = 87; found->memory = 12;
  return 0;
}
"""


def train(run_dir: pathlib.Path, dataset: pathlib.Path, job: int, *more: object) -> ranks.Result:
    """Train as the job's script does: the log is the job's, the attempt has a name."""
    (run_dir / "logs" / f"{job}.r0").mkdir(parents=True)
    (run_dir / "control").mkdir(exist_ok=True)
    result = ranks.run(2, "train", "--data", dataset, "--run-dir", run_dir, *TINY, *more, RUN_ATTEMPT_ID=f"{job}.r0")
    (run_dir / "logs" / f"{job}.out").write_text(result.output)
    return result


@pytest.fixture(scope="module")
def trained(dataset: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    run_dir = tmp_path_factory.mktemp("runs") / "gpt"
    assert train(run_dir, dataset, 7, "--steps", 12, "--epoch-steps", 4, "--lr", 1e30, "--clip", 0).returncode
    time.sleep(0.05)
    more = ("--steps", 12, "--epoch-steps", 4, "--resume", "never")
    assert train(run_dir, dataset, 8, *more).returncode == 0
    return run_dir


def test_the_report_tells_what_the_payload_did(trained: pathlib.Path):
    run = folder.read(trained)
    assert (run.name, run.kind, run.job_id, run.state, run.why, run.notes) == ("gpt", "gpt", 8, "COMPLETED", "", ())
    assert [(one.name, one.outcome, one.step) for one in run.attempts] == [
        ("7.r0", "failed", ""),
        ("8.r0", "done", "12"),
    ]
    assert "--lr" in run.attempts[0].why
    assert run.attempts[1].began and run.attempts[1].ended and run.attempts[1].ended > run.attempts[1].began
    assert dict(run.metrics.series["loss"].points(100)) == pytest.approx(conftest.losses(trained))
    assert dict(run.metrics.series["val_loss"].points(100)) == pytest.approx(conftest.val_losses(trained))
    assert {"loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "memory_mib"} == run.metrics.series.keys()
    assert 20 < run.metrics.series["memory_mib"].points(100)[-1][1] < 16_384
    assert run.cluster["torch"] == torch.__version__
    assert run.cluster.keys() >= {"nodes", "ranks", "devices", "backend", "torch", "CUDA", "Python"}
    assert run.figures["steps"] == 12
    assert (run.settings["width"], run.settings["epoch_steps"]) == ("32", "4")
    html = page.page([run], made=datetime.datetime.now(datetime.UTC))
    assert html.count('class="curve') >= 6


def test_the_recorded_run_has_todays_form(trained: pathlib.Path):
    """tests/ddp looks at this one; record it again when this fails."""
    for name in ("config.json", "summary.json", "control/7.r0.outcome", "control/8.r0.outcome"):
        assert json.loads((RECORDED / name).read_text()).keys() == json.loads((trained / name).read_text()).keys(), name
    forms = [
        {(record["kind"], *sorted(record)) for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
        for folder in (RECORDED, trained)
    ]  # fmt: skip
    assert forms[0] == forms[1]


def test_the_use_of_a_gpu_is_asked_of_nvml(tmp_path: pathlib.Path):
    (tmp_path / "nvml.c").write_text(NVML)
    library = str(tmp_path / "libnvidia-ml.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    use = hardware.GpuUse(torch.device("cpu"), library)
    assert use.percent() is None
    use.use("GPU-1234", library)
    assert use.percent() == 87.0
    assert use.percent() is None  # NVML knows no more: NVML_ERROR_NOT_SUPPORTED, as on a MIG instance
    other = hardware.GpuUse(torch.device("cpu"), library)
    other.use("GPU-5678", library)
    assert other.percent() is None


@pytest.mark.parametrize("library", ["libabsent.so.1", ctypes.util.find_library("m") or "libm.so.6"])
def test_without_nvml_the_use_of_a_gpu_is_unknown(library: str):
    use = hardware.GpuUse(torch.device("cpu"))
    use.use("GPU-1234", library)
    assert use.percent() is None

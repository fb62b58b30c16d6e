"""Trainings against MLflow's own server, which is killed and comes back.

The lane `tracking` runs it (tox.ini).
"""

# pyright: basic, reportMissingImports=false
import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time

import conftest
import pytest
import ranks
import test_finetune
from mlflow import tracking

from ddptrain.ground import files

MLFLOW = conftest.ROOT / "build" / "venvs" / "mlflow" / "bin" / "python"
SMALL = "--seq-len 32 --batch 8 --precision fp32 --eval-rows 16 --epoch-steps 50 --steps 100000"
model_dir, conversations = test_finetune.model_dir, test_finetune.conversations


@contextlib.contextmanager
def served(folder: pathlib.Path, port: int):
    """Start a server whose data outlive it in the folder, and kill it at the end."""
    argv = f"{MLFLOW} -m mlflow server --port {port} --backend-store-uri sqlite:///mlflow.db --artifacts-destination files"
    env = {**os.environ, "PYTHONPATH": "", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("a") as log:
        argv += " --workers 1 --uvicorn-opts --no-access-log"
        server = subprocess.Popen(
            argv.split(), cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # with its workers
        server.wait()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workload", ["gpt", "finetune"])
def test_nothing_is_lost_when_the_server_is_killed_in_each_of_two_attempts(
    workload: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest
):
    run_dir, stop, port = tmp_path / workload, tmp_path / "stop", ranks.free_port()
    if workload == "gpt":
        data, more = request.getfixturevalue("dataset"), ("--layers 2 --heads 2 --width 64",)
    else:
        data = request.getfixturevalue("conversations")
        more = ("--local-files-only --model-local-dir", request.getfixturevalue("model_dir"))
    env = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}", "STOP_FILE": str(stop)}
    client = tracking.MlflowClient(env["MLFLOW_TRACKING_URI"])

    def history(name: str) -> dict[int, float]:
        note = run_dir / "tracking.json"
        found = (
            client.get_metric_history(json.loads(note.read_text())["run_id"], name)
            if note.exists()
            else []
        )
        assert len({m.step for m in found}) == len(found), "a record counts once"
        return {m.step: m.value for m in found}

    def recorded() -> set[int]:
        return {
            r["step"] for r in files.read_records(run_dir / "metrics.jsonl") if r["kind"] == "step"
        }

    with contextlib.ExitStack() as running, concurrent.futures.ThreadPoolExecutor(1) as pool:
        for attempt in range(2):
            stop.unlink(missing_ok=True)
            at = len(recorded())
            job = pool.submit(
                ranks.trained, 2, data, run_dir, SMALL, *more, RUN_ATTEMPT_ID=f"7.r{attempt}", **env
            )
            with served(tmp_path, port):
                while len(history("loss")) < at + 20 and not job.done():
                    time.sleep(0.1)
            at = len(recorded())
            while len(recorded()) < at + 50 and not job.done():  # it trains on
                time.sleep(0.1)
            if attempt == 0:  # which ends without the server
                stop.touch()
                assert "records were not sent; metrics.jsonl has them all" in job.result().output
        running.enter_context(served(tmp_path, port))
        while len(history("loss")) < at + 50 and not job.done():
            time.sleep(0.1)
        stop.touch()
        assert "records were not sent" not in job.result().output
        assert history("loss") == conftest.losses(run_dir)
        assert history("val_loss") == conftest.val_losses(run_dir)
        (run,) = client.search_runs(["1"])
        assert (run.info.status, run.data.params["batch"], run.data.tags["run_dir"]) == (
            "SCHEDULED",
            "8",
            str(run_dir),
        )
        for name in ("config.json", "summary.json", "loss.png"):
            path = client.download_artifacts(run.info.run_id, name, str(tmp_path))
            assert pathlib.Path(path).read_bytes() == (run_dir / name).read_bytes()

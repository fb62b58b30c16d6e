"""Under the program of Kubernetes' pods, with the real torchrun: two pods on this host, one gloo rank each."""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import conftest
import ranks

POD = conftest.ROOT / "lib" / "ddp" / "node" / "pod.py"
TINY = (
    "--layers", 2, "--heads", 2, "--width", 32, "--seq-len", 32, "--batch", 4, "--epoch-steps", 500, "--precision", "fp32",
    "--eval-rows", 16, "--log-every", 1,
)  # fmt: skip


@contextlib.contextmanager
def pods(run_dir: pathlib.Path, attempt: int, *words: object):
    """Two pods, which are ended at the end if they are not."""
    port = ranks.free_port()
    found: list[subprocess.Popen[str]] = []
    for index in range(2):
        env = {
            "PATH": os.environ["PATH"], "PYTHONPATH": str(conftest.PAYLOAD), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": "", "JOB_COMPLETION_INDEX": str(index), "NNODES": "2", "NPROC_PER_NODE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DDP_JOB_UID": "8f0c", "DDP_POD_IP": "127.0.0.1",
            "DDP_POD_NAME": f"night-{index}-x{attempt}", "RUN_DIR": str(run_dir), "DDP_FOLDER": str(run_dir),
        }  # fmt: skip
        argv = [sys.executable, str(POD), "--module", "ddptrain", *(str(word) for word in words)]
        found.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        yield found
    finally:
        for pod in found:
            if pod.poll() is None:
                pod.terminate()  # it asks the ranks to leave, and takes what is left of them with it
                pod.communicate(timeout=100)


def ends(found: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    texts = [pod.communicate(timeout=200)[0] for pod in found]
    print(*texts, sep="\n")
    return [pod.returncode for pod in found], "".join(texts)


def test_the_smoke_test_passes(tmp_path: pathlib.Path):
    (tmp_path / "run").mkdir()
    with pods(tmp_path / "run", 0, "smoke", "--run-dir", tmp_path / "run") as found:
        codes, text = ends(found)
    assert codes == [0, 0]
    assert "improved=yes" in text
    assert (tmp_path / "run/control/8f0c.done").exists()


def test_a_training_that_is_evicted_saves_and_goes_on(dataset: pathlib.Path, tmp_path: pathlib.Path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    train = ("train", "--data", dataset, "--run-dir", run_dir, *TINY, "--resume", "auto", "--steps")
    with pods(run_dir, 0, *train, 100_000) as found:
        began = time.monotonic()
        while not (run_dir / "metrics.jsonl").exists() or len((run_dir / "metrics.jsonl").read_text().splitlines()) < 5:
            assert all(pod.poll() is None for pod in found)
            assert time.monotonic() - began < 200
            time.sleep(0.1)
        found[1].send_signal(signal.SIGTERM)  # its node is drained
        codes, _ = ends(found)
    assert codes == [75, 75]
    assert json.loads((run_dir / "control/night-0-x0.outcome").read_text())["outcome"] == "preempted"
    assert (run_dir / "latest").exists()
    step = json.loads((run_dir / "latest" / "manifest.json").read_text())["meta"]["step"]
    with pods(run_dir, 1, *train, step + 3) as found:
        codes, text = ends(found)
    assert codes == [0, 0], text
    assert f"step={step}" in next(line for line in text.splitlines() if "resumed=" in line)


def test_a_mistake_in_the_parameters_is_not_tried_again(tmp_path: pathlib.Path):
    (tmp_path / "run").mkdir()
    words = ("train", "--data", tmp_path / "absent", "--run-dir", tmp_path / "run", *TINY, "--steps", 3)
    with pods(tmp_path / "run", 0, *words) as found:
        codes, text = ends(found)
    assert codes == [78, 78]
    assert "[FATAL]" in text

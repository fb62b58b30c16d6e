"""The smoke test: flags, markers and meaning as in the Kubernetes guide, under real torchrun."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import re
import threading
import time

import conftest
import pytest
import ranks
import torch.distributed as dist

from ddptrain.ground import errors
from ddptrain.world import rendezvous


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, ranks.Result]:
    run_dir = tmp_path_factory.mktemp("smoke") / "run"
    flags = "--epochs 2 --batch 256 --samples 4096 --features 128 --classes 4 --lr 3e-3 --seed 42".split()
    result = conftest.torchrun(
        2,
        "smoke",
        *flags,
        "--run-dir",
        run_dir,
        "--report-json",
        run_dir / "report.json",
        RUN_ATTEMPT_ID="1.r0",
    )
    assert result.returncode == 0, result.output
    return run_dir, result


def test_the_guides_command_line_works_and_prints_its_markers(
    smoke: tuple[pathlib.Path, ranks.Result],
):
    output = smoke[1].output
    seen = re.findall(r"^INFO:ddptrain:\[([A-Z]+)\]", output, re.MULTILINE)
    assert set(seen) == {
        "STEP",
        "DDP",
        "ENV",
        "RANK",
        "DATA",
        "MODEL",
        "TRAIN",
        "BATCH",
        "EPOCH",
        "RESULT",
        "DONE",
    }
    assert seen.count("RANK") == 2
    assert seen.count("EPOCH") == 2
    (plan,) = smoke[1].marked("TRAIN")
    assert (plan["global_batch"], plan["steps_per_epoch"]) == (
        "512",
        "8",
    )  # the batch is per process


def test_it_learns_and_says_so(smoke: tuple[pathlib.Path, ranks.Result]):
    (result,) = smoke[1].marked("RESULT")
    assert result["improved"] == "yes"
    assert float(result["last_loss"]) < 0.7 * float(result["first_loss"])
    summary = json.loads((smoke[0] / "summary.json").read_text())
    assert (summary["workload"], summary["state"], summary["steps"]) == ("smoke", "done", 16)
    assert summary["samples_per_second"] > 0
    assert (smoke[0] / "loss.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((smoke[0] / "report.json").read_text())
    assert {"world_size", "tokens", "elapsed", "tokens/s"} <= report.keys()
    assert conftest.outcome(smoke[0], "1.r0")["outcome"] == "done"


@pytest.mark.long
def test_two_ranks_get_the_message_that_one_alone_gets_by_torchrun_too():
    result = conftest.torchrun(2, "smoke --classes 1")
    assert result.returncode != 0
    assert result.fatal() == ["--classes 1: must be at least 2"]


def test_tasks_of_srun_without_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(
        errors.UserError, match="would each train alone; start me with torchrun, one for each node"
    ):
        rendezvous.place()


def test_a_rendezvous_that_fails_names_both_nodes_by_what_slurm_calls_them(
    monkeypatch: pytest.MonkeyPatch,
):
    given = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
        "HEAD_NODE": "slurmd-0",
        "SLURMD_NODENAME": "slurmd-1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def fail(*_: object, **__: object) -> None:
        raise dist.DistNetworkError("The client socket has timed out after 120000ms\nmore")

    monkeypatch.setattr(rendezvous.dist, "rendezvous", fail)
    with pytest.raises(errors.UserError) as caught:
        rendezvous.connect(rendezvous.Place(1, 2, 0, 1))
    where = "the rendezvous at 127.0.0.1:9 (slurmd-0) failed on slurmd-1"
    assert str(caught.value).startswith(
        f"{where}: The client socket has timed out after 120000ms; is the port"
    )


def test_rank_0_keeps_the_store_until_all_have_read_why_none_enters():
    store, read = dist.HashStore(), threading.Event()

    class SlowReader:
        def __getattr__(self, name: str):
            return getattr(store, name)

        def get(self, key: str) -> bytes:
            time.sleep(0.5)
            read.set()
            return store.get(key)

    failures: list[str] = []

    def join(rank: int, view: object) -> None:
        with pytest.raises(errors.SharedError) as caught:
            rendezvous.meet(
                view,
                rendezvous.Place(rank, 2, rank, 2),
                {"rank": rank, "host": "a", "device": ""},
                "bad",
            )
        failures.append(str(caught.value))

    other = threading.Thread(target=join, args=(1, SlowReader()))
    other.start()
    join(0, store)
    assert read.is_set()
    other.join()
    assert failures == ["bad", "bad"]

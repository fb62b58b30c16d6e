"""The smoke test: flags, markers and meaning of the Kubernetes guide's train.py, under the real torchrun."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import re
import socket
import subprocess
import sys

import conftest
import pytest
import ranks
import torch.distributed as dist

from ddptrain import distributed, errors


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, ranks.Result]:
    run_dir = tmp_path_factory.mktemp("smoke") / "run"
    flags = "--epochs 2 --batch 256 --samples 4096 --features 128 --classes 4 --lr 3e-3 --seed 42".split()
    result = conftest.torchrun(
        2, "smoke", *flags, "--run-dir", run_dir, "--report-json", run_dir / "report.json", RUN_ATTEMPT_ID="1.r0"
    )
    assert result.returncode == 0, result.output
    return run_dir, result


def test_the_guides_command_line_works_and_prints_its_markers(smoke: tuple[pathlib.Path, ranks.Result]):
    output = smoke[1].output
    seen = re.findall(r"^INFO:ddptrain:\[([A-Z]+)\]", output, re.MULTILINE)
    assert set(seen) == {"STEP", "DDP", "ENV", "RANK", "DATA", "MODEL", "TRAIN", "BATCH", "EPOCH", "RESULT", "DONE"}
    assert seen.count("RANK") == 2
    assert seen.count("EPOCH") == 2
    (plan,) = smoke[1].marked("TRAIN")
    assert (plan["global_batch"], plan["steps_per_epoch"]) == ("512", "8")  # the batch is per process


def test_it_learns_and_says_so(smoke: tuple[pathlib.Path, ranks.Result]):
    (result,) = smoke[1].marked("RESULT")
    assert result["improved"] == "yes"
    assert float(result["last_loss"]) < 0.7 * float(result["first_loss"])
    summary = json.loads((smoke[0] / "summary.json").read_text())
    assert (summary["workload"], summary["state"], summary["steps"]) == ("smoke", "done", 16)
    assert summary["tokens_per_second"] is None
    assert summary["samples_per_second"] > 0
    assert summary["checkpoint"] is None
    assert (smoke[0] / "loss.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((smoke[0] / "report.json").read_text())
    assert {"world_size", "tokens", "elapsed", "tokens/s"} <= report.keys()
    assert json.loads((smoke[0] / "control" / "1.r0.outcome").read_text())["outcome"] == "done"


def test_two_ranks_get_the_message_that_one_alone_gets_by_torchrun_too():
    result = conftest.torchrun(2, "smoke", "--classes", 1)
    assert result.returncode != 0
    assert result.fatal() == ["--classes 1: must be at least 2"]


def test_without_a_launcher_it_is_a_world_of_one():
    result = ranks.succeed(1, "smoke", "--samples", 300, "--epochs", 1)
    assert result.marked("DDP")[0]["world_size"] == "1"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--samples", "1"], "fewer than the 2 ranks"),
        (["--lr", "-1"], "--lr -1.0: must be above 0"),
        (["--batch", "x"], "invalid int value"),
    ],
)
def test_what_cannot_be_is_one_line(flags: list[str], words: str):
    result = ranks.run(2, "smoke", *flags)
    assert result.codes == [2, 2]
    (line,) = result.fatal()
    assert words in line


def test_under_srun_without_torchrun_the_ranks_meet_through_the_run_directory(tmp_path: pathlib.Path):
    logs = as_by_srun(tmp_path, SLURM_JOB_ID="12")
    assert "launcher=srun" in logs[0].read_text()
    assert (tmp_path / "run" / "control" / "12.0.r0.rendezvous").exists()


def test_under_srun_in_a_job_of_ours_the_ranks_know_where_they_meet(tmp_path: pathlib.Path):
    """No file: 8,000 ranks would look for it ten times a second."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = as_by_srun(tmp_path, SLURM_JOB_ID="13", HEAD_IP="127.0.0.1", HEAD_PORT=str(port))
    assert f"master=127.0.0.1:{port}" in logs[0].read_text()
    assert not list(tmp_path.rglob("*.rendezvous"))


def as_by_srun(tmp_path: pathlib.Path, **variables: str) -> list[pathlib.Path]:
    """Run two ranks to a good end with srun's own variables, no MASTER_ADDR; return their logs."""
    processes = []
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    for rank in range(2):
        env = {
            "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1",
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **variables,
        }  # fmt: skip
        logs[rank].touch()
        argv = ["smoke", "--run-dir", str(tmp_path / "run")]
        processes.append(ranks.CONTEXT.Process(target=ranks._rank, args=(argv, env, str(logs[rank]), None)))
        processes[-1].start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0], [log.read_text() for log in logs]
    return logs


def test_the_ranks_address_is_that_of_the_way_to_sruns_host_and_no_name_is_looked_up(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> str:
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(distributed.socket, "gethostbyname", refuse)
    monkeypatch.delenv("HEAD_IP", raising=False)
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.9")
    assert distributed._own_address() == "127.0.0.1"
    monkeypatch.setenv("HEAD_IP", "10.0.0.4")
    assert distributed._own_address() == "10.0.0.4"


def test_a_rendezvous_that_fails_names_both_nodes_by_what_slurm_calls_them(monkeypatch: pytest.MonkeyPatch):
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "HEAD_NODE": "slurmd-0", "SLURMD_NODENAME": "slurmd-1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def fail(*_: object, **__: object) -> None:
        raise dist.DistNetworkError("The client socket has timed out after 120000ms\nmore")

    monkeypatch.setattr(distributed.dist, "rendezvous", fail)
    with pytest.raises(errors.UserError) as caught:
        distributed._rendezvous(distributed.Place(1, 2, 0, 1, "torchrun"), None)
    where = "the rendezvous at 127.0.0.1:9 (slurmd-0) failed on slurmd-1"
    assert str(caught.value).startswith(f"{where}: The client socket has timed out after 120000ms; is the port")


@pytest.mark.parametrize(
    "argv",
    [["smoke", "--samples", "8"], ["prepare", "--source", "{here}", "--output", "{tmp}/d"], ["inspect", "{tmp}"]],
)
def test_garbage_is_searched_for_again_but_not_among_the_imports(tmp_path: pathlib.Path, argv: list[str]):
    (tmp_path / "metrics.jsonl").touch()
    argv = [word.format(tmp=tmp_path, here=__file__) for word in argv]
    code = f"""
import gc, runpy, sys
sys.argv = ["ddptrain", *{argv!r}]
try:
    runpy.run_module("ddptrain", run_name="__main__", alter_sys=True)
except SystemExit as e:
    print("ended", e.code, gc.isenabled(), gc.get_freeze_count() > 10_000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.splitlines()[-1] == "ended 0 True True", done.stdout + done.stderr

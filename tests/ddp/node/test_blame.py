"""Whom a failed attempt is blamed on: only evidence moves it off the program."""

import json
import pathlib
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest

from ddp.node import explain

HOSTS = ["gpu-0", "gpu-1"]
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    work()\n'
PEER_GONE = (
    "torch.distributed.DistBackendError: [7] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via "
    "c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer"
)


def explained(folder: pathlib.Path, text: str, *others: str) -> tuple[str, str, str]:
    """Return the verdict on an attempt in which rank 1, of the second node, printed a text, and the others theirs."""
    (folder / "control").mkdir(exist_ok=True)
    (folder / "job.json").write_text(json.dumps({"ranks_per_node": 1, "launcher": "torchrun"}))
    for node, printed in enumerate((*others, text), 2 - len((*others, text))):
        logs = folder / "logs" / "12.r0" / f"node-{node}" / "12.r0_x" / "attempt_0" / "0"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "stderr.log").write_text(printed)
    agent = (
        "1: E1120 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 2)"
    )
    (folder / "logs" / "12.out").write_text(f"[ENV] job=12 attempt=12.r0 nodes=gpu-0 gpu-1\n{agent}\n")
    return explain.blame(str(folder), "12", "12.r0", HOSTS)


def blame(folder: pathlib.Path, text: str, *others: str) -> tuple[str, str]:
    kind, node, _ = explained(folder, text, *others)
    return kind, node if kind in ("node", "network") else ""


# What people reported, each in full, and the verdict that it needs
@pytest.mark.parametrize(
    ("text", "verdict", "remedy"),
    [
        (f"{TRACE}ModuleNotFoundError: No module named 'pynvml'\n", ("program", ""), ""),
        (f"{TRACE}KeyError: 'taxid'\n", ("program", ""), ""),
        (f"{TRACE}BrokenPipeError: [Errno 32] Broken pipe\n", ("program", ""), ""),
        (
            "requests.exceptions.ConnectionError: ('Connection aborted.', "
            "ConnectionResetError(104, 'Connection reset by peer'))\n",
            ("program", ""),
            "a download failed",
        ),
        (
            "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.\n",
            ("program", ""),
            "use fewer workers, or a larger /dev/shm",
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n",
            ("node", "gpu-1"),
            "",
        ),
        (f"{TRACE}RuntimeError: CUDA error: uncorrectable ECC error encountered\n", ("node", "gpu-1"), ""),
        (
            f"{TRACE}torch.AcceleratorError: CUDA error: an uncorrectable NVLink error was detected\n",
            ("node", "gpu-1"),
            "",
        ),
        (
            f"{TRACE}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error\n",
            ("node", "gpu-1"),
            "",
        ),
        (f"{TRACE}OSError: [Errno 122] Disk quota exceeded: '/mnt/shared/model.pt'\n", ("mistake", ""), "quota -s"),
        (f"[rank1]: {TRACE}[rank1]: OSError: [Errno 28] No space left on device\n", ("mistake", ""), "remove files"),
        (f"{TRACE}OSError: [Errno 24] Too many open files: 'x'\n", ("mistake", ""), "ulimit -n"),
        (f"{TRACE}FileNotFoundError: [Errno 2] No such file or directory: 'x.yaml'\n", ("mistake", ""), "on the nodes"),
        (f"{TRACE}ValueError: see [Errno 28] and FileNotFoundError\n", ("program", ""), ""),
    ],
)
def test_a_fault_is_blamed_by_evidence_alone(tmp_path: pathlib.Path, text: str, verdict: tuple[str, str], remedy: str):
    assert blame(tmp_path, text) == verdict
    assert remedy in explained(tmp_path, text)[2]


def test_more_memory_than_the_job_has_is_not_tried_again(tmp_path: pathlib.Path):
    explained(tmp_path, "step 7\n")
    lines = "1: E1120 api.py:1002] failed (exitcode: -9) local_rank: 0\n"
    (tmp_path / "logs" / "12.out").write_text(lines)
    assert explain.blame(str(tmp_path), "12", "12.r0", HOSTS) == ("program", "gpu-1", "killed by signal 9 (SIGKILL)")
    lines += "1: slurmstepd-gpu-1: error: Detected 1 oom_kill event in StepId=12.0.\n"
    (tmp_path / "logs" / "12.out").write_text(lines)
    kind, node, words = explain.blame(str(tmp_path), "12", "12.r0", HOSTS)
    assert (kind, node) == ("mistake", "gpu-1")
    assert words.endswith("submit it with a larger memory; or use a smaller batch")


def test_a_lost_peer_is_a_consequence_and_the_rank_that_failed_first_the_cause(tmp_path: pathlib.Path):
    for folder, other, verdict in (("a", "KeyError: 'x'", ("program", "")), ("b", PEER_GONE, ("network", "-"))):
        (tmp_path / folder).mkdir()
        assert blame(tmp_path / folder, f"{TRACE}{other}\n", f"{TRACE}{PEER_GONE}\n") == verdict


SUSPICIOUS = ("xid", "Xid", "nvml", "NVML", "ECC", "Bus error", "SIGBUS", "Connection reset by peer", "Broken pipe")


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.sampled_from(
        ["KeyError", "ValueError", "ModuleNotFoundError", "OSError", "requests.exceptions.ConnectionError"]
    ),
    st.lists(st.sampled_from(SUSPICIOUS) | st.text("abcxyz_ ", max_size=8), min_size=1, max_size=5),
)
def test_no_word_of_a_message_moves_the_blame_off_the_program(name: str, words: list[str]):
    with tempfile.TemporaryDirectory() as folder:
        assert blame(pathlib.Path(folder), f"{TRACE}{name}: {' '.join(words)}\n") == ("program", "")
